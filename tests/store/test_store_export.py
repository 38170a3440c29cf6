"""A run leaves as JSON lines and comes back the same, or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from store_records import LOST, trajectory, verdict

from agentrl.errors import StoreError
from agentrl.store import Store
from agentrl.store.export import export_run, import_run, read_export
from agentrl.types import Termination


@pytest.fixture
def exported(store: Store, run_id: str, tmp_path: Path) -> Path:
    lost = trajectory(
        "t3", calls=(), earned=verdict(None, LOST), termination=Termination.FAULT, group_id="g2"
    )
    store.add_trajectory(run_id, trajectory("t1"), phase="heldout_before")
    store.add_trajectory(run_id, trajectory("t2"), step=5)
    store.add_trajectory(run_id, lost)
    path = tmp_path / "run.jsonl"
    assert export_run(store, run_id, path) == 3
    return path


def test_an_imported_run_has_equal_records_in_the_same_places_and_the_same_chain(
    store: Store, run_id: str, exported: Path, tmp_path: Path
) -> None:
    with Store.open(tmp_path / "other.db") as other:
        run = import_run(other, exported)
        assert run.head == store.run(run_id).head
        assert run.config == store.run(run_id).config
        assert list(other.iter_trajectories(run_id)) == list(store.iter_trajectories(run_id))
        assert other.trajectories(run_id) == store.trajectories(run_id)
        assert other.verify(run_id).ok
        assert import_run(other, exported).trajectories == 3  # again is once
    assert list(read_export(exported)) == list(store.iter_trajectories(run_id))
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(("cut", "says"), [
    (lambda lines: lines[:-1], "ends before its last line"),
    (lambda lines: lines[:2] + lines[3:], "line 3: its content or its place"),
    (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], "line 2: its content or its place"),
    (lambda lines: [*lines, lines[1]], "line 6: there is more"),
    (lambda lines: [lines[0].replace('"seed":7', '"seed":8'), *lines[1:]], "line 1: the run does not match"),
    (lambda lines: [lines[0], lines[1].replace('"index":0', '"index":1'), *lines[2:]], "line 2: its content"),
    (lambda lines: [lines[0].replace('"format":1', '"format":2'), *lines[1:]], "line 1: format 2"),
    (lambda lines: [lines[0], lines[1][:-9], *lines[2:]], "line 2: "),
    (lambda lines: [*lines[:-1], lines[-1].replace("3", "4", 1)], "line 5: the run ends after 3"),
])  # fmt: skip
def test_a_changed_export_is_refused_whole(exported: Path, tmp_path: Path, cut: object, says: str) -> None:
    lines = exported.read_text(encoding="utf-8").splitlines()
    forged = tmp_path / "forged.jsonl"
    forged.write_text("\n".join(cut(lines)) + "\n", encoding="utf-8")  # type: ignore[operator]
    with Store.open(tmp_path / "other.db") as other:
        with pytest.raises(StoreError, match=says):
            import_run(other, forged)
        assert other.runs() == ()


def test_a_run_that_resumes_one_that_is_not_here_is_refused(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    child = store.begin_run("child", config={}, algo="a", seed=0, parent=run_id).id
    export_run(store, child, tmp_path / "child.jsonl")
    with Store.open(tmp_path / "other.db") as other, pytest.raises(StoreError, match="Import that one first"):
        import_run(other, tmp_path / "child.jsonl")


def test_each_line_is_strict_json(exported: Path) -> None:
    def refuse(word: str) -> float:
        raise AssertionError(word)

    lines = [json.loads(line, parse_constant=refuse) for line in exported.read_text("utf-8").splitlines()]
    assert [line["record"]["id"] for line in lines[1:-1]] == ["t1", "t2", "t3"]
