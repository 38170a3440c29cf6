"""Images that a tenant has the gateway make ready before sessions need them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from gateway_given import IMAGE, MemoryBackend, task_at, until, world

from agentrl.errors import ConfigError, SandboxError
from agentrl.store import Store
from agentrl.types import Task
from envs.preparation import ImageStatus
from harness.gateway import client as calls
from harness.gateway.remote import GatewayPlace
from services.gateway import core, preparing

JSON = {"Content-Type": "application/json"}


class Held(MemoryBackend):
    """Images wait to be let go; what is named in `bad` can not be had."""

    def __init__(self, bad: str = "") -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.bad = bad
        self.asked: list[str] = []
        self.ended = 0

    async def prepare(self, environment_dir: str) -> str:
        self.asked.append(environment_dir)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.ended += 1
            raise
        if self.bad and self.bad in environment_dir:
            raise SandboxError("It asks for fewer.", fix="Log in.", code="pull_limited", phase="pull")
        return IMAGE


def test_a_preparation_is_told_as_it_comes_and_the_same_key_never_begins_it_twice(
    store: Store, task: Task, tmp_path: Path
) -> None:
    tasks = [task, task_at(tmp_path / "bad", "bad")]
    wanted = [(each.id, each.revision) for each in tasks]

    async def run() -> None:
        backend = Held(bad="/bad/")
        async with world(store, tasks, backend=backend) as here:
            ask = calls.prepare_tasks(wanted, client_key="k", wait_s=0.01)
            first = await here.ada.send(ask)
            assert (first.total, first.done, first.images) == (2, False, [])
            async with here.raw() as http:
                again = await http.post(
                    "/v1/tasks/prepare", params={"wait_s": 0}, content=ask.body or b"", headers=JSON
                )
            assert again.status_code == 202
            backend.go.set()
            last = await here.ada.send(calls.prepare_tasks(wanted, client_key="k", wait_s=10))
            assert len(backend.asked) == 2
            assert (last.total, last.done) == (2, True)
            ready, failed = sorted(last.images, key=lambda status: status.state, reverse=True)
            assert (ready.tasks, ready.digest) == ((task.id,), IMAGE)
            assert (failed.code, failed.owner, failed.fix) == ("pull_limited", "environment", "Log in.")
            await here.ada.send(calls.prepare_tasks(wanted, client_key="other", wait_s=10))
            assert len(backend.asked) == 4
            with pytest.raises(SandboxError, match="used for another request"):
                await here.ada.send(calls.prepare_tasks(wanted[:1], client_key="k"))
            mine = await here.bob.send(calls.prepare_tasks(wanted[:1], client_key="k", wait_s=10))
            assert mine.total == 1, "keys are a tenant's own"

    asyncio.run(run())


def test_what_the_gateway_does_not_have_is_refused_before_anything_begins(store: Store, task: Task) -> None:
    async def run() -> None:
        async with world(store, [task], backend=Held()) as here:
            for wanted, match in (
                ([("small/none", None)], "no task small/none"),
                ([(task.id, "0" * 64)], "at revision"),
                ([], "tasks"),
            ):
                with pytest.raises(ConfigError, match=match):
                    await here.ada.send(calls.prepare_tasks([(task.id, None), *wanted][1:], client_key="k"))
            assert isinstance(here.backend, Held)
            assert here.backend.asked == []

    asyncio.run(run())


def test_a_tenant_has_few_preparations_at_once_and_they_end_with_the_gateway(
    store: Store, task: Task, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(core, "STOP_DEADLINE_S", 1.0)

    async def run() -> None:
        backend = Held()
        async with world(store, [task], backend=backend) as here:
            for number in range(preparing.AT_ONCE):
                await here.ada.send(calls.prepare_tasks([(task.id, None)], client_key=str(number), wait_s=0))
            async with here.raw() as http:
                ask = calls.prepare_tasks([(task.id, None)], client_key="more", wait_s=0)
                refused = await http.post("/v1/tasks/prepare", content=ask.body or b"", headers=JSON)
            assert (refused.status_code, refused.json()["code"]) == (429, "preparing")
            assert int(refused.headers["Retry-After"]) > 0
            await here.bob.send(calls.prepare_tasks([(task.id, None)], client_key="b", wait_s=0))
            await until(lambda: len(backend.asked) >= 1)
        assert backend.ended >= 1

    asyncio.run(run())
    assert "left behind" not in caplog.text


def test_old_preparations_are_forgotten_and_asked_for_again_they_begin_again(
    store: Store, task: Task
) -> None:
    async def run() -> None:
        backend = Held()
        backend.go.set()
        async with world(store, [task], backend=backend) as here:
            for number in [*range(preparing.KEPT + 1), 0]:
                ask = calls.prepare_tasks([(task.id, None)], client_key=str(number), wait_s=10)
                assert (await here.ada.send(ask)).done
            assert len(backend.asked) == preparing.KEPT + 2
            assert len(here.gateway._preparations._of["ada"]) == preparing.KEPT

    asyncio.run(run())


def test_a_run_hears_of_every_image_of_its_gateway_once(store: Store, task: Task, tmp_path: Path) -> None:
    tasks = [task, task_at(tmp_path / "bad", "bad")]

    async def run() -> None:
        backend = Held(bad="/bad/")
        async with world(store, tasks, backend=backend) as here:
            place = GatewayPlace("http://gateway", name="memory", isolation="docker", client=here.ada)
            heard: list[ImageStatus] = []
            backend.go.set()
            statuses = await place.prepare_images(tasks, heard=heard.append)
            assert heard == list(statuses)
            assert sorted((s.tasks[0], s.state) for s in statuses) == [
                ("small/bad", "failed"),
                ("small/one", "ready"),
            ]
            assert await place.prepare_images([]) == ()

    asyncio.run(run())


def test_a_preparation_that_does_not_end_is_left_with_what_it_waited_for(
    store: Store, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "LOOK_S", 0.01)

    async def run() -> None:
        async with world(store, [task], backend=Held()) as here:
            with pytest.raises(SandboxError, match=r"0 of 1 images were over in 0\.05 s"):
                async for _ in calls.preparing(here.ada, [(task.id, None)], deadline_s=0.05):
                    pass

    asyncio.run(run())


def test_on_a_cluster_one_sandbox_of_each_image_is_started_in_the_turn_of_a_verification(
    store: Store, task: Task, tmp_path: Path
) -> None:
    tasks = [task, *(task_at(tmp_path / f"t{number}", f"t{number}") for number in range(4))]

    class Cluster(MemoryBackend):
        """Images are fetched by who starts: all but one from the same."""

        async def pulled_for(self, digest: str) -> str:
            return next(sources)

    sources = iter(["one", "two", "one", "two", "one"])
    at_once = most = 0
    made: list[str] = []

    async def before(operation: str, session: str) -> None:
        nonlocal at_once, most
        if operation == "create":
            made.append(session)
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0.01)
            at_once -= 1
            if len(made) == 1:
                raise SandboxError(
                    "The node can not pull it.", code="pull_failed", phase="start", retryable=False
                )

    async def run() -> None:
        async with world(store, tasks, backend=Cluster(before=before), verify=1) as here:
            ask = calls.prepare_tasks([(each.id, None) for each in tasks], client_key="k", wait_s=10)
            told = await here.ada.send(ask)
            assert sorted(status.code or "" for status in told.images) == ["", "", "", "", "pull_failed"]
            assert (len(made), most) == (3, 1)
            assert here.backend.live == set()
            assert not any(here.gateway.verification.in_use.values())

    asyncio.run(run())
