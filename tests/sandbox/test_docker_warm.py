"""Containers that are started before anyone asks: as good as any, never too many, and nobody's but one's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from engines import Rule, containers_of, docker, engine_or_skip, image_of, mounts_below, opened, proxied

from agentrl.types import SandboxSpec
from envs.sandbox import docker as docker_backend
from envs.sandbox.conformance import sh
from envs.sandbox.contract import FileChange, Mount
from envs.sandbox.docker import DockerBackend
from envs.sandbox.docker_outlive import RECORD
from envs.sandbox.live import LiveSandbox
from envs.sandbox.probe import probe_machine

pytestmark = pytest.mark.docker
OWNER = "pool test"


@pytest.fixture(scope="module", autouse=True)
def engine() -> str:
    return engine_or_skip()


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


async def make(backend: DockerBackend, state: Path, session: str = "one", **more: Any) -> LiveSandbox:
    image = await image_of(backend, state)
    spec = SandboxSpec(image=image, memory_mib=more.pop("memory_mib", 128), disk_mib=16, pids=48)
    return await backend.create(spec, image=image, session=session, deadline_s=60.0, **more)


async def filled(backend: DockerBackend, ready: int) -> None:
    """Until so many wait."""
    async with asyncio.timeout(60):
        while backend.pool is None or (backend.pool.ready, backend.pool.making) != (ready, 0):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def waiting_in(backend: DockerBackend, held: list[LiveSandbox]) -> list[str]:
    return sorted(set(containers_of(backend)) - {box.info.id for box in held})


async def the_one_waiting(backend: DockerBackend, held: list[LiveSandbox]) -> str:
    """When those that are being removed are gone."""
    await filled(backend, 1)
    async with asyncio.timeout(30):
        while len(names := await asyncio.to_thread(waiting_in, backend, held)) != 1:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return names[0]


def described(name: str) -> dict[str, Any]:
    """What the engine holds a container to, without what tells one from another."""
    facts = json.loads(docker("inspect", name))[0]
    host, config = facts["HostConfig"], facts["Config"]
    host["Mounts"] = sorted((m["Target"], m.get("ReadOnly", False)) for m in host["Mounts"])
    labels = {key: value for key, value in config["Labels"].items() if "session" not in key}
    labels.pop("agentrl.lease_deadline")
    return {"host": host, "config": {**config, "Labels": labels}}


def test_one_that_waited_is_held_to_the_same_as_one_that_was_made_and_is_had_at_once(state: Path) -> None:
    async def check() -> None:
        async with opened(state, warm=2) as backend:
            cold = await make(backend, state)
            await sh(cold, "echo mine > app.py")
            await filled(backend, 1)
            changes = (FileChange(path="laid.txt", kind="file", content=b"in\n"),)
            warm = await make(backend, state, "two", apply=changes)
            assert (cold.info.warm, warm.info.warm) == (False, True)
            assert warm.info.spec == cold.info.spec
            assert warm.info.image_digest == cold.info.image_digest
            assert warm.info.instance != cold.info.instance
            assert described(warm.info.id) == described(cold.info.id)
            assert warm.info.ready_ms < cold.info.ready_ms
            assert (await sh(warm, "cat app.py laid.txt")).stdout.head == b"print('hello')\nin\n"
            assert await warm.diff() == changes
            state_now = backend.pool
            assert state_now is not None
            assert (state_now.hits, state_now.misses) == (1, 1)

    asyncio.run(check())


def test_an_empty_pool_is_a_miss_and_what_it_can_not_give_is_made(state: Path, tmp_path: Path) -> None:
    async def check() -> None:
        async with opened(state, warm=1) as backend:
            first = await make(backend, state)
            await filled(backend, 1)
            (tmp_path / "tests").mkdir()
            mounted = await make(
                backend, state, mounts=(Mount(source=str(tmp_path / "tests"), target="/tests"),)
            )
            assert (mounted.info.warm, backend.pool.ready, backend.pool.misses) == (False, 1, 1)  # type: ignore[union-attr]
            boxes = await asyncio.gather(*(make(backend, state, str(n)) for n in range(3)))
            assert sorted(box.info.warm for box in boxes) == [False, False, True]
            assert len({box.info.id for box in (first, mounted, *boxes)}) == 5
            assert (backend.pool.hits, backend.pool.misses) == (1, 3)  # type: ignore[union-attr]
            await filled(backend, 1)
            other = await make(backend, state, memory_mib=144)  # another spec is another kind
            assert not other.info.warm
            await filled(backend, 1)
            assert (await make(backend, state, memory_mib=144)).info.warm
            assert backend.pool.discarded == 1  # type: ignore[union-attr]

    asyncio.run(check())


def test_with_an_engine_that_is_slow_to_answer_the_pool_never_exceeds_its_size(
    state: Path, tmp_path: Path
) -> None:
    async def check() -> None:
        async with proxied(tmp_path) as proxy, opened(state, proxy.path, warm=2) as backend:
            held = [await make(backend, state)]
            proxy.rules += [
                Rule("/containers/create", "drop_answer", times=2),
                Rule("/start", "delay", seconds=1),
            ]
            most = 0

            async def look() -> None:
                nonlocal most
                while True:
                    most = max(most, len(await asyncio.to_thread(waiting_in, backend, held)))
                    await asyncio.sleep(0.1)

            looking = asyncio.create_task(look())
            for _ in range(20):
                kind = backend.pool
                assert kind is not None
                assert kind.ready + kind.making <= 2
                backend._pool.ask(backend._pool._asked[-1][0])  # type: ignore[union-attr]
                await asyncio.sleep(0.1)
            await filled(backend, 2)
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            assert 1 <= most <= 2
            assert len(waiting_in(backend, held)) == 2

    asyncio.run(check())


def test_one_that_died_or_hangs_while_it_waited_is_never_handed_out(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_backend, "HAND_OUT_DEADLINE_S", 0.5)

    async def check() -> None:
        async with opened(state, warm=1) as backend:
            held = [await make(backend, state)]
            name = await the_one_waiting(backend, held)
            await asyncio.to_thread(docker, "kill", name)
            await asyncio.sleep(0.3)
            held.append(await make(backend, state, "two"))
            assert held[1].info.id != name
            name = await the_one_waiting(backend, held)
            await asyncio.to_thread(docker, "pause", name)
            try:
                held.append(await make(backend, state, "three"))
            finally:
                with contextlib.suppress(subprocess.CalledProcessError):
                    await asyncio.to_thread(docker, "unpause", name)
            assert held[2].info.id != name  # perhaps the one that was started when this one was asked for
            assert (await sh(held[2], "echo on")).stdout.head == b"on\n"
            assert backend.pool.discarded >= 1  # type: ignore[union-attr]

    asyncio.run(check())


def containers_named(names: list[str]) -> list[str]:
    """Those of them that the engine still knows."""
    return sorted(set(docker("ps", "-a", "--format", "{{.Names}}").split()) & set(names))


_DIES = """
import asyncio, os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_docker_warm import OWNER, filled, make, waiting_in
from envs.sandbox.conformance import sh
from envs.sandbox.docker import DockerBackend

async def main():
    state = Path({state!r})
    backend = DockerBackend(state, orphan_grace_s={grace_s})
    backend.outlive(OWNER)
    backend.keep_warm(2)
    held = [await make(backend, state, "cold")]
    await filled(backend, 1)
    held.append(await make(backend, state, "given"))
    assert held[1].info.warm
    await sh(held[1], "echo mine > app.py")
    held[1].lease({lease_s})
    held[1].note("n", "v")
    await held[1].recall()
    await filled(backend, 2)
    print(held[1].info.id, *waiting_in(backend, held), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def _left_behind(state: Path, *, lease_s: float, grace_s: float) -> list[str]:
    """Names: of the one that waited and was given to a session, and of those that waited still."""
    program = textwrap.dedent(_DIES).format(
        tests=str(Path(__file__).parent), state=str(state), lease_s=lease_s, grace_s=grace_s
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    return done.stdout.split()


def test_who_comes_after_finds_the_one_that_was_given_by_its_session_and_ends_those_that_waited(
    tmp_path: Path,
) -> None:
    given, *waited = _left_behind(tmp_path, lease_s=120, grace_s=120)
    assert len(waited) == 2
    records = {path.parent.name: json.loads(path.read_bytes())["session"] for path in tmp_path.rglob(RECORD)}
    assert records[given] == "given"
    assert {records[name] for name in waited} == {""}
    detail = next(found.detail for found in probe_machine(tmp_path) if found.name == "docker engine")
    told = re.search(r"\((\d+) started ahead\)", detail)
    assert told is not None
    assert int(told[1]) >= 3, "what was given away was started ahead too, and that is all a label can say"

    async def check() -> None:
        after = DockerBackend(tmp_path)
        after.outlive(OWNER)
        after.keep_warm(2)
        try:
            assert await after.adopt("") is None, "nobody's is nobody's to adopt"
            box = await after.adopt("given")
            assert box is not None
            assert box.info.id == given
            assert (await sh(box, "cat app.py")).stdout.head == b"mine\n"
            assert (await box.recall()).notes == {"n": "v"}
            assert await after.forget() == 3  # the two that waited, and the session nobody came for
            async with asyncio.timeout(30):
                while containers_named(waited):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        finally:
            await after.close()

    asyncio.run(check())
    assert mounts_below(tmp_path) == []


def test_when_nobody_comes_after_those_that_waited_end_themselves(tmp_path: Path) -> None:
    names = _left_behind(tmp_path, lease_s=2, grace_s=2)
    until = time.monotonic() + 60
    run = tmp_path / "docker" / "run"
    while left := [*containers_named(names), *mounts_below(tmp_path), *os.listdir(run)]:
        assert time.monotonic() < until, left
        time.sleep(0.2)
