"""Whatever is changed in the evidence behind the store's back, `verify` finds it and says which entry."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Table, create_engine, text
from store_records import LOST, call, trajectory, verdict

from agentrl.errors import StoreError
from agentrl.store import Store, VerifyReport
from agentrl.store.codec import decompress
from agentrl.store.schema import metadata
from agentrl.types import BranchReason, PolicyVersion, Termination
from envs.grading import sign

EVIDENCE = (
    "runs",
    "chains",
    "groups",
    "trajectories",
    "calls",
    "turns",
    "actions",
    "verdicts",
    "policy_versions",
    "updates",
    "consumed",
)
NOT_EVIDENCE = {("runs", "state"), ("runs", "finished_at")}
RUN = "therun"
KEY = b"the grader's"


@dataclass(frozen=True)
class Tampered:
    """A finished run and a raw connection to its file, without foreign keys."""

    store: Store
    raw: sqlite3.Connection

    def verify(self, key: bytes | None = None) -> VerifyReport | None:
        """The report; None when the run can not even be found."""
        self.raw.commit()
        if not self.raw.execute("SELECT 1 FROM runs WHERE id = ?", (RUN,)).fetchone():
            with pytest.raises(StoreError, match="no run"):
                self.store.verify(RUN)
            return None
        return self.store.verify(RUN, key=key)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evidence") / "store.db"
    with Store.open(path) as store:
        store.begin_run("x", config={"a": 1}, algo="grpo", seed=1, run_id=RUN)
        branch = (
            call("a", (9, 4, 1), (7, 2), log_probs=(-0.5, None)),
            call("b", (9, 4, 7), (1,), parent="a", keep=2, reason=BranchReason.COMPACTION, log_probs=(-0.1,)),
        )
        lost = verdict(None, LOST)
        for record in (
            trajectory("t1"),
            trajectory(
                "t2", calls=branch, turns=(), earned=verdict(0.0, replace(LOST, owner="policy")), index=1
            ),
            trajectory("t3", calls=(), earned=lost, termination=Termination.FAULT, group_id="g2"),
            trajectory("t4", calls=(), earned=lost, termination=Termination.FAULT, group_id="g2", index=1),
        ):
            store.add_trajectory(RUN, replace(record, verdict=sign(record.verdict, KEY)), step=2)
        for number in range(3):
            published = PolicyVersion(
                number=number,
                parent=number - 1 if number else None,
                step=number,
                location="there",
                content_hash="a" * 64,
                config_hash="b" * 64,
                published_at=1.0,
            )
            if number:
                store.record_update(RUN, number, [f"t{number}"], published, {"loss": 1.0})
            else:
                store.publish(RUN, published)
    return path


@pytest.fixture
def run(untouched: Path, tmp_path: Path) -> Iterator[Tampered]:
    path = tmp_path / "store.db"
    path.write_bytes(untouched.read_bytes())
    raw = sqlite3.connect(path)
    with Store.open(path) as store:
        yield Tampered(store, raw)
    raw.close()


def changed(value: Any) -> list[Any]:
    """Other values for a stored one: near, far, and of another kind."""
    if value is None:
        return [0, "x"]
    if isinstance(value, bytes):
        return [bytes([value[0] ^ 1]) + value[1:], value[:-1] + bytes([value[-1] ^ 0x80]), value + b"\0", b""]
    if isinstance(value, int):
        return [value + 1, value + 1000, -1 - value]
    if isinstance(value, float):
        return [math.nextafter(value, math.inf), value + 1.0]
    return [value[:-1] + chr(ord(value[-1]) ^ 1) if value else "x", value + " ", ""] if value != "" else ["x"]


def test_an_untouched_run_verifies_and_what_was_checked_is_counted(run: Tampered) -> None:
    report = run.verify(KEY)
    assert report is not None
    assert report.why is None
    assert report.ok
    assert (report.trajectories, report.calls_checked, report.tokens_checked) == (4, 4, 6)
    assert (report.policy_versions, report.updates, report.signatures_checked) == (3, 2, 4)
    assert report.head == run.store.run(RUN).head


@pytest.mark.parametrize("name", EVIDENCE)
def test_a_changed_value_in_any_column_of_any_row_is_found(run: Tampered, name: str) -> None:
    table: Table = metadata.tables[name]
    tried = 0
    for column in table.columns:
        if (name, column.name) in NOT_EVIDENCE:
            continue
        for rowid, value in run.raw.execute(f"SELECT rowid, {column.name} FROM {name}").fetchall():
            for other in [*changed(value), *([] if value is None else [None])]:
                statement = f"UPDATE {name} SET {column.name} = ? WHERE rowid = ?"
                try:
                    run.raw.execute(statement, (other, rowid))
                except sqlite3.IntegrityError:
                    continue  # the table itself refuses (NOT NULL, unique)
                now = run.raw.execute(
                    f"SELECT {column.name} FROM {name} WHERE rowid = ?", (rowid,)
                ).fetchone()[0]
                if now == value and type(now) is type(value):
                    continue
                report = run.verify()
                assert report is None or not report.ok, f"{name}.{column.name}: {value!r} -> {other!r}"
                run.raw.execute(statement, (value, rowid))
                tried += 1
    assert tried >= 2 * (len(table.columns) - 2)
    report = run.verify()
    assert report is not None
    assert report.ok


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_byte_of_any_stored_text_or_binary_is_found(run: Tampered, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["trajectories", "calls", "turns", "actions", "verdicts", "updates"]))
    columns = [c.name for c in metadata.tables[name].columns]
    column = data.draw(st.sampled_from(columns))
    rows = run.raw.execute(
        f"SELECT rowid, CAST({column} AS BLOB), typeof({column}) FROM {name} "
        f"WHERE typeof({column}) IN ('text', 'blob') AND length({column}) > 0"
    ).fetchall()
    if not rows:
        return
    rowid, raw, kind = data.draw(st.sampled_from(rows))
    at = data.draw(st.integers(0, len(raw) - 1))
    forged = raw[:at] + bytes([raw[at] ^ data.draw(st.integers(1, 255))]) + raw[at + 1 :]
    put = f"UPDATE {name} SET {column} = {'CAST(? AS TEXT)' if kind == 'text' else '?'} WHERE rowid = ?"
    try:
        run.raw.execute(put, (forged, rowid))
    except sqlite3.IntegrityError:
        return
    try:
        report = run.verify()
    finally:
        run.raw.execute(put, (raw, rowid))
        run.raw.commit()
    assert report is not None
    assert not report.ok


def test_every_byte_of_a_compressed_column_counts(run: Tampered) -> None:
    (frame,) = run.raw.execute(
        "SELECT generation FROM calls WHERE trajectory_id='t1' AND position=0"
    ).fetchone()
    for at in range(len(frame)):
        forged = frame[:at] + bytes([frame[at] ^ 0x08]) + frame[at + 1 :]
        run.raw.execute("UPDATE calls SET generation = ? WHERE trajectory_id='t1' AND position=0", (forged,))
        report = run.verify()
        assert report is not None
        assert report.broken_id == "t1"


def test_a_column_packed_anew_with_the_same_content_is_found(run: Tampered) -> None:
    where = "WHERE trajectory_id = 't1' AND position = 0"
    (frame,) = run.raw.execute(f"SELECT generation FROM calls {where}").fetchone()
    again = zstandard.ZstdCompressor(write_checksum=False).compress(decompress(frame))
    assert decompress(again) == decompress(frame)
    run.raw.execute(f"UPDATE calls SET generation = ? {where}", (again,))
    report = run.verify()
    assert report is not None
    assert "a binary column" in str(report.why)


CHILDREN = ("calls", "turns", "actions", "verdicts")


def remove(raw: sqlite3.Connection, name: str) -> None:
    for table in CHILDREN:
        raw.execute(f"DELETE FROM {table} WHERE trajectory_id = ?", (name,))
    raw.execute("DELETE FROM trajectories WHERE id = ?", (name,))


@pytest.mark.parametrize(
    ("name", "where", "why"),
    [
        ("t1", "#1", "missing: the next one stored is t2"),
        ("t3", "#3", "missing: the next one stored is t4"),
        ("t4", "#4", "has 4, 3 are left"),
    ],
)
def test_a_removed_trajectory_is_found_the_last_one_too(
    run: Tampered, name: str, where: str, why: str
) -> None:
    remove(run.raw, name)
    report = run.verify()
    assert report is not None
    assert report.broken_id == where
    assert why in str(report.why)


def test_a_removed_tail_is_found_even_with_a_corrected_length(run: Tampered) -> None:
    remove(run.raw, "t4")
    run.raw.execute("UPDATE chains SET length = 3 WHERE kind = 'trajectory'")
    report = run.verify()
    assert report is not None
    assert "ends in another link" in str(report.why)


def test_two_trajectories_that_changed_places_are_found(run: Tampered) -> None:
    for name, seq in (("t3", 99), ("t4", 3), ("t3", 4)):
        run.raw.execute("UPDATE trajectories SET seq = ? WHERE id = ?", (seq, name))
    report = run.verify()
    assert report is not None
    assert (report.broken_id, report.trajectories) == ("t4", 2)
    assert "does not continue the chain" in str(report.why)


def test_an_inserted_trajectory_is_found(run: Tampered) -> None:
    columns = [c.name for c in metadata.tables["trajectories"].columns if c.name not in ("id", "seq")]
    run.raw.execute(
        f"INSERT INTO trajectories (id, seq, {', '.join(columns)}) "
        f"SELECT 't5', 5, {', '.join(columns)} FROM trajectories WHERE id = 't4'"
    )
    report = run.verify()
    assert report is not None
    assert report.broken_id == "t5"


@pytest.mark.parametrize("table", CHILDREN)
def test_a_removed_row_of_a_trajectory_is_found(run: Tampered, table: str) -> None:
    run.raw.execute(
        f"DELETE FROM {table} WHERE rowid = (SELECT max(rowid) FROM {table} WHERE trajectory_id = 't1')"
    )
    report = run.verify()
    assert report is not None
    assert report.broken_id == "t1"


def test_rows_of_a_trajectory_that_is_not_there_are_found(run: Tampered) -> None:
    run.raw.execute("INSERT INTO actions VALUES ('ghost', 0, 0, 'bash', 0, 0, NULL)")
    report = run.verify()
    assert report is not None
    assert (report.broken_id, report.why) == ("ghost", "rows in actions belong to no trajectory")


def test_a_reward_given_to_a_trajectory_whose_sandbox_was_lost_is_named(run: Tampered) -> None:
    for table in ("verdicts", "trajectories"):
        key = "trajectory_id" if table == "verdicts" else "id"
        run.raw.execute(f"UPDATE {table} SET reward = 1.0 WHERE {key} = 't3'")
    report = run.verify()
    assert report is not None
    assert (report.broken_id, report.why) == ("t3", "it has a reward and a fault of the environment")


def test_a_prompt_that_no_longer_follows_from_its_parents_is_named(run: Tampered) -> None:
    run.raw.execute("UPDATE calls SET prompt_keep = 1 WHERE trajectory_id = 't2' AND position = 1")
    report = run.verify()
    assert report is not None
    assert report.broken_id == "t2"
    assert "call b: the prompt rebuilt from its parents does not hash" in str(report.why)


def test_a_removed_mark_of_training_is_found(run: Tampered) -> None:
    run.raw.execute("DELETE FROM consumed WHERE trajectory_id = 't2'")
    report = run.verify()
    assert report is not None
    assert report.broken_id == "update 2"


def test_a_version_whose_parent_is_not_the_one_before_is_named(run: Tampered) -> None:
    run.raw.execute("DELETE FROM policy_versions WHERE number = 1")
    report = run.verify()
    assert report is not None
    assert (report.broken_id, report.why) == ("version 2", "its parent is 1 where version 0 comes before it")


def test_verdicts_signed_with_another_key_or_not_at_all_are_refused(run: Tampered) -> None:
    report = run.verify(b"another key")
    assert report is not None
    assert (report.broken_id, report.why) == ("t1", "its verdict is not signed with this key")
    run.store.begin_run("y", config={}, algo="a", seed=0, run_id="unsigned")
    run.store.add_trajectory("unsigned", trajectory("u1"))
    assert run.store.verify("unsigned").ok
    assert run.store.verify("unsigned", key=KEY).why == "it is not signed"


def test_tampering_is_found_on_postgresql_too(postgres: Any) -> None:
    url = postgres.database()
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with Store.open(url) as store:
        store.begin_run("x", config={}, algo="a", seed=0, run_id=RUN)
        for at in range(3):
            store.add_trajectory(RUN, trajectory(f"t{at}"))
        assert store.verify(RUN).ok
        for statement in (
            "UPDATE calls SET generation = set_byte(generation, 9, 255) WHERE trajectory_id = 't1'",
            "UPDATE verdicts SET reward = '0.5' WHERE trajectory_id = 't1'",
            "DELETE FROM actions WHERE trajectory_id = 't1'",
        ):
            with engine.connect() as connection:
                before = connection.begin()
                connection.execute(text("CREATE TABLE kept AS SELECT * FROM calls"))
                before.commit()
            with engine.begin() as connection:
                connection.execute(text(statement))
            assert store.verify(RUN).broken_id == "t1"
            with engine.begin() as connection:
                connection.execute(text("DELETE FROM calls"))
                connection.execute(text("INSERT INTO calls SELECT * FROM kept"))
                connection.execute(text("DROP TABLE kept"))
                connection.execute(text("UPDATE verdicts SET reward = '1.0'"))
    engine.dispose()
