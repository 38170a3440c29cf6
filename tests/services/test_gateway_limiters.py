"""What is asked of the backend at once follows how it keeps up, and whoever waits for that is not charged."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gateway_given import MemoryBackend, MemorySandbox, World, prepared_store, task_at, until, world

from agentrl.errors import ConfigError, ExecUnknown, SandboxError, TaskError
from agentrl.store import Store
from agentrl.types import EvidenceKey, ExecStatus, SandboxSpec, Task, Termination
from envs import session as sessions
from envs.sandbox.backends import keep_warm
from envs.sandbox.plain import PlainBackend
from envs.sandbox.warm import PoolState
from envs.session import Session
from harness.gateway import client as calls
from harness.gateway import wire
from services.gateway.limiters import IMAGES_AT_ONCE, Limiters
from services.gateway.ration import Ration


async def ready(here: World, task: Task, key: str) -> wire.SessionView:
    view = await here.ada.send(calls.open_session(client_key=key, task_id=task.id))
    return await settled(here, view)


async def settled(here: World, view: wire.SessionView) -> wire.SessionView:
    async with asyncio.timeout(60):
        while view.waiting:
            view = await here.ada.send(calls.session(view.id, wait_s=5.0))
    return view


def test_run_permits_follow_what_commands_take_beside_their_own_time() -> None:
    async def run() -> None:
        permits = Ration(permits=8)
        permits.tenant("ada")
        limiters = Limiters(creates=2, permits=permits)

        def answered(after_s: float, own_s: float, status: ExecStatus = ExecStatus.EXITED) -> float:
            limiters.ran(time.monotonic() - after_s, status=status, own_ms=1000 * own_s)
            return permits.capacity["permits"]

        assert answered(0.01, 0.0) == 8
        assert answered(60.01, 60.0) == 8  # a long command is not a slow machine
        assert answered(9.0, 1.0, ExecStatus.TIMEOUT) == 8  # it was given time to end
        held = [permits.claim("ada", permits=1) for _ in range(6)]
        permits.queue(held)
        assert answered(9.0, 1.0) == 4
        late = permits.claim("ada", permits=1)
        permits.queue([late])
        for claim in held[:2]:  # four are held still, and no more than four may be
            permits.release(claim)
        assert late.granted_at is None
        permits.release(held[2])
        assert late.granted_at is not None
        for _ in range(40):
            answered(0.01, 0.0)
        assert permits.capacity["permits"] == 8
        limiters.broke(SandboxError("of its own", code="no_disk"))
        assert limiters.exec.limit == 8

    asyncio.run(run())


def test_after_an_answer_that_did_not_come_fewer_commands_run_at_once_and_the_wait_is_told(
    store: Store, task: Task
) -> None:
    silent = True
    go = asyncio.Event()

    async def before(operation: str, session: str) -> None:
        nonlocal silent
        if operation == "exec" and silent:
            silent = False
            raise ExecUnknown("No answer in time.", phase="exec")
        if operation == "exec":
            await go.wait()

    async def run() -> None:
        async with world(store, [task], backend=MemoryBackend(before=before), permits=2) as here:
            views = [await ready(here, task, key) for key in ("a", "b", "c")]
            command = wire.ExecBody(exec_id="e", command="true")
            with pytest.raises(SandboxError):
                await here.ada.send(calls.run(views[0].id, command))
            capacity = await here.ada.send(calls.capacity())
            told = capacity.limiters["exec"]
            assert (told.limit, told.maximum, told.decreased) == (1.0, 2, 1)
            assert capacity.permits.capacity == {"permits": 1.0}
            sent = [asyncio.create_task(here.ada.send(calls.run(view.id, command))) for view in views[1:]]
            await until(lambda: here.gateway.permits.waiting() == 1)
            await asyncio.sleep(0.1)
            go.set()
            first, second = sorted(await asyncio.gather(*sent), key=lambda done: done.queue_ms)
            assert here.backend.most_running == 1
            assert second.queue_ms >= 100
            assert second.wall_ms == first.wall_ms
            async with here.raw(None) as http:
                page = (await http.get("/metrics")).text
            assert 'agentrl_limit_decreased{operation="exec"} 1.0' in page
            for operation in ("create", "exec", "delete", "pull", "build"):
                assert f'agentrl_limit{{operation="{operation}"}}' in page

    asyncio.run(run())


def test_images_wait_for_each_other_and_nothing_that_is_there_waits_for_them(tmp_path: Path) -> None:
    """Builds hold neither a turn to make sandboxes nor the verification's; their wait is queue time."""
    tasks = [task_at(tmp_path / str(n), f"t{n}") for n in range(IMAGES_AT_ONCE + 2)]
    building = asyncio.Event()
    building.set()
    at_once = most = 0

    async def before(operation: str, session: str) -> None:
        nonlocal at_once, most
        if operation == "prepare":
            at_once += 1
            most = max(most, at_once)
            await building.wait()
            at_once -= 1

    async def run(store: Store) -> None:
        backend = MemoryBackend(before=before)
        async with world(store, tasks, backend=backend, slots=8, creates=1) as here:
            await ready(here, tasks[0], "known")
            building.clear()
            asked = [
                await here.ada.send(calls.open_session(client_key=task.id, task_id=task.id))
                for task in tasks[1:]
            ]
            await until(lambda: here.gateway.limiters.build.waiting == 1)
            limiters = (await here.ada.send(calls.capacity())).limiters
            assert (limiters["build"].busy, limiters["create"].busy) == (IMAGES_AT_ONCE, 0)
            assert at_once == IMAGES_AT_ONCE
            known = await here.ada.send(calls.open_session(client_key="again", task_id=tasks[0].id))
            await until(lambda: at_once == IMAGES_AT_ONCE + 1)  # not held up: only our own fake waits
            await asyncio.sleep(0.1)
            building.set()
            views = [await settled(here, view) for view in (*asked, known)]
            assert {view.state for view in views} == {"ready"}
            assert max(view.queue_ms for view in views) >= 100

    with prepared_store(tmp_path / "store.db", tasks) as store:
        asyncio.run(run(store))


def test_a_registry_that_refuses_is_asked_less_and_a_broken_recipe_is_nobodys_load() -> None:
    class Place(MemoryBackend):
        error: Any = None

        async def prepare(self, environment_dir: str) -> str:
            raise self.error

    async def run() -> None:
        limiters = Limiters(creates=2, permits=Ration(permits=2))
        place = Place()
        place.error = TaskError("The Dockerfile is wrong.")
        with pytest.raises(TaskError):
            await limiters.prepare(place, "somewhere/image:1")
        assert limiters.pull.limit == IMAGES_AT_ONCE
        place.error = SandboxError("Too many requests.", code="pull_failed")
        with pytest.raises(SandboxError):
            await limiters.prepare(place, "somewhere/image:1")
        assert (limiters.pull.limit, limiters.build.limit) == (IMAGES_AT_ONCE / 2, IMAGES_AT_ONCE)

    asyncio.run(run())


def test_a_sandbox_that_waits_for_its_turn_longer_than_it_may_take_to_be_made_is_waited_for(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend keeps that deadline, and does not count the wait."""
    monkeypatch.setattr(sessions, "CREATE_DEADLINE_S", -9.95)  # with its grace of 10 s: a twentieth

    async def before(operation: str, session: str) -> None:
        if operation == "create":
            await asyncio.sleep(0.3)

    async def run() -> None:
        place = MemoryBackend(before=before)
        async with await Session.open(
            task, place, session_id="s", signing_key=b"k", admission=None
        ) as opened:
            assert opened.state == "ready"

    asyncio.run(run())


class Warmed(MemoryBackend):
    """Its first sandbox is made; those after it waited."""

    pool: PoolState | None = None

    def keep_warm(self, size: int) -> None:
        self.pool = PoolState(size=size, ready=0, making=0, hits=0, misses=0, discarded=0, failed=0)

    async def create(self, spec: SandboxSpec, **more: Any) -> MemorySandbox:
        assert self.pool is not None
        made = await super().create(spec, **more)
        warm = not more["mounts"] and self.pool.misses > 0
        if not more["mounts"]:
            counted = {"hits": self.pool.hits + 1} if warm else {"misses": self.pool.misses + 1}
            self.pool = replace(self.pool, **counted)
        made.info = replace(made.info, warm=warm)
        return made


def test_what_waits_ready_is_a_number_and_says_nothing_of_how_long_making_takes(
    store: Store, task: Task
) -> None:
    backend = Warmed()
    keep_warm(backend, 3)
    learned: list[float] = []

    async def run() -> None:
        async with world(store, [task], backend=backend) as here:
            here.gateway.limiters.create.number.learn = lambda took, **_: learned.append(took)  # type: ignore[method-assign]
            views = [await ready(here, task, key) for key in ("a", "b", "c")]
            assert len(learned) == 1  # of the one that was made
            told = (await here.ada.send(calls.capacity())).warm
            assert told is not None
            assert (told.size, told.hits, told.misses) == (3, 2, 1)
            for _ in range(2):  # counted once, however often it is asked for
                async with here.raw(None) as http:
                    page = (await http.get("/metrics")).text
            assert "agentrl_warm_miss_total 1.0" in page
            assert "agentrl_warm_hit_total 2.0" in page
            assert 'agentrl_warm_sandboxes{what="size"} 3.0' in page
            ends = [
                await here.ada.send(
                    calls.finalize(view.id, termination=Termination.FINISHED, fault=None, deadline_s=9)
                )
                for view in views
            ]
            starts = [next(e for e in end.evidence if e.key is EvidenceKey.E1_START) for end in ends]
            assert [start.facts.get("warm") for start in starts] == [None, True, True]

    asyncio.run(run())


def test_a_backend_that_can_keep_nothing_ready_says_so(tmp_path: Path, store: Store, task: Task) -> None:
    keep_warm(PlainBackend(tmp_path), 0)
    with pytest.raises(ConfigError, match=r"plain backend keeps no sandboxes ready.*--warm"):
        keep_warm(PlainBackend(tmp_path), 2)

    async def run() -> None:
        async with world(store, [task]) as here:
            assert (await here.ada.send(calls.capacity())).warm is None

    asyncio.run(run())
