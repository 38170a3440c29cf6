"""An engine that is killed: what ran on it ends as the environment's, or goes on where the engine keeps
containers, and a new one serves the same backend."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import (
    PrivateEngine,
    containers_of,
    engine_or_skip,
    image_of,
    mounts_below,
    opened,
    private_engine,
)

from agentrl.errors import BoundaryError, SandboxError, SandboxLost
from agentrl.types import SandboxSpec
from envs.sandbox.conformance import sh
from envs.sandbox.docker import DockerBackend
from envs.sandbox.live import LiveSandbox

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def forgetful() -> Iterator[PrivateEngine]:
    engine_or_skip()
    with private_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def keeping() -> Iterator[PrivateEngine]:
    engine_or_skip()
    with private_engine(keeps_containers=True) as engine:
        yield engine


async def make(backend: DockerBackend, state: Path, *, deadline_s: float = 60.0) -> LiveSandbox:
    image = await image_of(backend, state)
    spec = SandboxSpec(image=image, memory_mib=128, disk_mib=16, pids=48)
    return await backend.create(spec, image=image, session="dies", deadline_s=deadline_s)


def test_sandboxes_of_a_killed_engine_end_as_the_environments_and_new_ones_are_made(
    forgetful: PrivateEngine, tmp_path: Path
) -> None:
    async def check() -> None:
        async with opened(tmp_path, forgetful.socket) as backend:
            boxes = [await make(backend, tmp_path) for _ in range(2)]
            running = asyncio.create_task(sh(boxes[0], "sleep 300", timeout_s=300))
            await asyncio.sleep(0.2)
            await asyncio.to_thread(forgetful.kill)
            begun = time.monotonic()
            with pytest.raises(SandboxError) as refused:
                await make(backend, tmp_path, deadline_s=3)
            assert (refused.value.owner, refused.value.retryable) == ("environment", True)
            assert time.monotonic() - begun < 10
            await asyncio.to_thread(forgetful.start)  # It ends what it finds: it was not told to keep it.
            with pytest.raises(SandboxLost) as lost:
                await asyncio.wait_for(running, 30)
            assert lost.value.owner == "environment"
            with pytest.raises(BoundaryError) as gone:
                await sh(boxes[1], "true")
            assert gone.value.owner == "environment"
            again = await make(backend, tmp_path)
            assert (await sh(again, "echo on")).stdout.head == b"on\n"

    asyncio.run(check())


def test_with_live_restore_a_killed_engine_costs_no_command_and_no_sandbox(
    keeping: PrivateEngine, tmp_path: Path
) -> None:
    async def check() -> None:
        async with opened(tmp_path, keeping.socket) as backend:
            box, closed_without = await make(backend, tmp_path), await make(backend, tmp_path)
            instance = box.info.instance
            running = asyncio.create_task(sh(box, "sleep 4; echo through"))
            await asyncio.sleep(0.2)
            await asyncio.to_thread(keeping.kill)
            assert (await sh(box, "echo without > app.py; echo ok")).stdout.head == b"ok\n"
            begun = time.monotonic()
            await closed_without.close()
            assert time.monotonic() - begun < 1.0
            await asyncio.to_thread(keeping.start)
            assert (await running).stdout.head == b"through\n"
            assert (await box.probe()).instance == instance
            assert [(c.path, c.content) for c in await box.diff()] == [("app.py", b"without\n")]
            assert (await sh(await make(backend, tmp_path), "echo new")).stdout.head == b"new\n"

    asyncio.run(check())


def test_a_backend_closed_while_its_engine_is_dead_leaves_nothing_once_it_is_back(
    keeping: PrivateEngine, tmp_path: Path
) -> None:
    async def check() -> None:
        backend = DockerBackend(tmp_path, host=f"unix://{keeping.socket}")
        box = await make(backend, tmp_path)
        assert containers_of(backend, keeping.socket) == [box.info.id]
        await asyncio.to_thread(keeping.kill)
        closing = asyncio.create_task(backend.close())
        await asyncio.sleep(2)
        await asyncio.to_thread(keeping.start)
        await asyncio.wait_for(closing, 60)
        until = time.monotonic() + 30
        while await asyncio.to_thread(containers_of, backend, keeping.socket):
            assert time.monotonic() < until, "a container was left behind"
            await asyncio.sleep(0.2)
        assert mounts_below(tmp_path) == []

    asyncio.run(check())
