"""Which validations of a run's tasks are taken from the store, and which are made again."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.config import parse
from agentrl.store import Store
from agentrl.training.events import Silent
from agentrl.training.folder import RunFolder
from agentrl.training.loop import _Run
from agentrl.types import Task, to_dict
from envs.evidence import ADMISSION_FRESH_S, Admission
from envs.sandbox.plain import PlainBackend
from envs.tasks import swe_mini
from envs.tasks.package import load_task


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return load_task(swe_mini.generate(tmp_path / "tasks", train=1, heldout=0, seed=1)[0])


def found(store: Store, run_id: str, task: Task, tmp_path: Path, mode: str) -> tuple[Admission, list[str]]:
    """The admission that a run goes by, and what it said."""

    async def run() -> tuple[Admission, list[str]]:
        backend, listener = PlainBackend(), Silent()
        config = parse({"run": {"name": "one"}, "tasks": {"admission": mode}})
        try:
            one = _Run(config, None, RunFolder(tmp_path), store, run_id, listener)
            made = await one._admit([task], backend)
            return made[task.id], listener.notes
        finally:
            await backend.close()

    return asyncio.run(run())


def test_what_was_validated_more_than_a_month_ago_is_validated_again_or_said(
    tmp_path: Path, task: Task
) -> None:
    with Store.open(tmp_path / "store.db") as store:
        run_id = store.begin_run("one", config={}, algo="grpo", seed=1).id
        first, said = found(store, run_id, task, tmp_path, "light")
        assert (first.valid, said) == (True, [])
        again, said = found(store, run_id, task, tmp_path, "light")
        assert (again, said) == (first, [])

        month_ago = replace(first, admitted_at=time.time() - ADMISSION_FRESH_S - 60)
        store.add_admission(task.id, task.revision, valid=True, facts=to_dict(month_ago))
        kept, said = found(store, run_id, task, tmp_path, "stored")
        assert kept == month_ago
        assert len(said) == 1
        assert "1 tasks were validated more than a month ago" in said[0]
        renewed, said = found(store, run_id, task, tmp_path, "light")
        assert (renewed.valid, said) == (True, [])
        assert renewed.admitted_at >= first.admitted_at
        assert found(store, run_id, task, tmp_path, "stored") == (renewed, [])
