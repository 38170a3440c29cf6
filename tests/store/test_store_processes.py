"""Writers that are killed, that race, that block: nothing is lost, stored twice or waited for without end."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from store_records import call, trajectory

from agentrl.errors import StoreError
from agentrl.store import Store
from agentrl.store.layout import explode
from agentrl.types import ModelCall

WRITER = Path(__file__).with_name("writing_process.py")


def writer(url: str, run_id: str, first: int, count: int, prefix: str) -> subprocess.Popen[str]:
    words = [sys.executable, str(WRITER), url, run_id, str(first), str(count), prefix]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_writer_killed_in_the_middle_leaves_a_valid_chain_with_all_it_acknowledged(
    store: Store, url: str, run_id: str
) -> None:
    process = writer(url, run_id, 0, 100_000, "k")
    assert process.stdout is not None
    acknowledged = [process.stdout.readline().split()[0] for _ in range(25)]
    process.send_signal(signal.SIGKILL)
    rest, _ = process.communicate(timeout=30)
    acknowledged += [line.split()[0] for line in rest.splitlines() if line.endswith("True")]
    report = store.verify(run_id)
    assert report.why is None
    stored = [row.id for row in store.trajectories(run_id, limit=None)]
    assert stored[: len(acknowledged)] == acknowledged
    assert len(stored) - len(acknowledged) in (0, 1)  # one may be in but not yet printed
    assert store.add_trajectory(run_id, trajectory("after", group_id="after"))
    assert store.verify(run_id).ok


def test_two_processes_that_add_the_same_trajectories_keep_each_once(
    store: Store, url: str, run_id: str
) -> None:
    processes = [writer(url, run_id, 0, 40, "same"), writer(url, run_id, 0, 40, "same")]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    first, second = ([line.split()[1] == "True" for line in out.splitlines()] for out, _ in outputs)
    assert [a != b for a, b in zip(first, second, strict=True)] == [True] * 40  # each was new to exactly one
    report = store.verify(run_id)
    assert (report.trajectories, report.why) == (40, None)


def test_a_blocked_writer_gives_up_at_its_deadline_and_names_who_holds_the_file(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with Store.open(path, wait_s=0.3) as store:
        run = store.begin_run("x", config={}, algo="a", seed=0).id
        holder = sqlite3.connect(path)
        holder.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        with pytest.raises(StoreError) as refused:
            store.add_trajectory(run, trajectory("t1"))
        assert time.monotonic() - began < 5
        said = str(refused.value)
        assert said.startswith(f"add trajectory t1 to run {run}: waited ")
        assert "database is locked" in said
        if Path("/proc/locks").exists():
            assert f"process {os.getpid()} is writing" in said
        assert len(store.trajectories(run)) == 0  # readers are not blocked
        holder.close()
        assert store.add_trajectory(run, trajectory("t1"))


def test_a_writer_waits_for_a_short_transaction_of_another(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with Store.open(path) as store:
        run = store.begin_run("x", config={}, algo="a", seed=0).id
        holder = sqlite3.connect(path, check_same_thread=False)
        holder.execute("BEGIN IMMEDIATE")
        release = threading.Timer(0.8, holder.close)  # longer than SQLite itself waits at a time
        release.start()
        assert store.add_trajectory(run, trajectory("t1"))
        release.join(timeout=10)


def test_a_transaction_that_a_killed_server_connection_cut_short_is_done_again(postgres: object) -> None:
    url = postgres.database()  # type: ignore[attr-defined]
    with Store.open(url) as store, Store.open(url) as other:
        run = store.begin_run("x", config={}, algo="a", seed=0).id
        with other._database.read() as connection:
            connection.exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        assert store.add_trajectory(run, trajectory("t1"))
        assert store.verify(run).ok


def chain_of(n: int) -> tuple[ModelCall, ...]:
    """`n` calls of 20 + 20 tokens, each a branch that drops the last token of its parent."""
    calls: list[ModelCall] = []
    whole: tuple[int, ...] = ()
    for at in range(n):
        keep = max(len(whole) - 1, 0)
        prompt = whole[:keep] + tuple(range(at, at + 20))
        parent = calls[-1].id if calls else None
        calls.append(
            call(
                f"c{at}",
                prompt,
                tuple(range(20)),
                parent=parent,
                keep=keep,
                reason="history_edited" if at else None,
            )
        )
        whole = prompt + calls[-1].generation_token_ids
    return tuple(calls)


def test_the_work_to_store_a_trajectory_grows_with_its_length_not_with_its_square() -> None:
    def seconds(n: int) -> float:
        record = trajectory(calls=chain_of(n), turns=())
        best = float("inf")
        for _ in range(3):
            began = time.process_time()
            explode(record, phase="train", step=None)
            best = min(best, time.process_time() - began)
        return best

    assert seconds(400) < 9 * seconds(80)  # 5 when linear, 25 when quadratic
