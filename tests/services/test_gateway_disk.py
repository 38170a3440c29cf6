"""A gateway whose disk fills up: nobody new is let in, who is there finishes, and room is made by what nobody
uses."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from disks import aged, fill
from gateway_given import finished, ready, task_at, until, world

from agentrl.errors import SandboxError
from agentrl.store import Store
from agentrl.types import Task, from_dict, to_dict
from envs.evidence import Admission
from envs.sandbox import room
from envs.sandbox.local import LocalBackend
from envs.session import prepare
from envs.tasks.package import load_task
from harness.gateway import client as calls
from harness.gateway import wire

pytestmark = pytest.mark.sandbox


def admitted_here(store: Store, task: Task, image: str) -> None:
    """As it was on the backend in memory."""
    row = store.admission(task.id, task.revision)
    assert row is not None
    facts = replace(from_dict(Admission, dict(row.facts)), backend="local", image_digest=image)
    store.add_admission(task.id, task.revision, valid=True, facts=to_dict(facts))


def test_while_the_disk_is_nearly_full_sessions_wait_and_those_that_live_are_judged_then_room_is_made(
    store: Store, task: Task, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "AGAIN_S", 0.0)
    state = small_disk / "state"
    backend: Any = LocalBackend(state)
    try:
        backend.check()
    except SandboxError as error:
        pytest.skip(str(error))
    task_at(tmp_path / "other", "other")
    (tmp_path / "other" / "environment" / "more.txt").write_text("another image\n")
    other = load_task(tmp_path / "other")

    async def run() -> None:
        admitted_here(store, task, await prepare(task, backend))
        async with world(store, [task, other], backend=backend) as here:
            lives = await ready(here, task, "lives")
            large = tmp_path / "large"
            large.mkdir()
            (large / "file").write_bytes(bytes(20 << 20))
            unused = state / "images" / (await backend.prepare(str(large))).replace(":", "-")
            await until(lambda: here.gateway.slots.paused is None)
            fill(small_disk, free_mib=5)
            await until(lambda: here.gateway.slots.paused is not None)
            capacity = await here.ada.send(calls.capacity())
            assert (capacity.slots.paused or "").startswith("disk_pressure: The disk of")
            waits = await here.ada.send(calls.open_session(client_key="waits", task_id=task.id))
            assert waits.state == "queued"
            told = await here.ada.send(calls.prepare_tasks([(other.id, None)], client_key="k", wait_s=10))
            assert [(s.state, s.code, s.retryable) for s in told.images] == [
                ("failed", "disk_pressure", True)
            ]
            done = await here.ada.send(
                calls.run(lives.id, wire.ExecBody(exec_id="e", command="cat hello.txt"))
            )
            assert done.stdout.head == "hello\n"
            verdict = await here.ada.send(finished(lives.id))
            assert (verdict.reward, verdict.fault) == (1.0, None), "its verifier's sandbox was still made"
            assert (await here.ada.send(calls.session(waits.id))).state == "queued"
            assert unused.is_dir()
            aged(state, unused, 3600)
            view = await here.ada.send(calls.session(waits.id, wait_s=30))
            assert view.state == "ready"
            assert not unused.exists()
            assert (await here.ada.send(calls.capacity())).slots.paused is None
            told = await here.ada.send(calls.prepare_tasks([(other.id, None)], client_key="l", wait_s=10))
            assert [s.state for s in told.images] == ["ready"]
            assert (await here.ada.send(finished(waits.id))).reward == 1.0

    asyncio.run(run())
