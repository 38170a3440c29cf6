"""An engine whose disk fills up: new sandboxes are refused, those that run go on, and images that nobody uses
make room."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from disks import fill, mounted
from engines import PrivateEngine, docker, engine_or_skip, private_engine

from agentrl.errors import SandboxError
from agentrl.types import SandboxSpec
from envs.sandbox import images, room, rootfs
from envs.sandbox.conformance import sh
from envs.sandbox.contract import Sandbox
from envs.sandbox.docker import DockerBackend
from envs.sandbox.docker_stock import BASE, BUILT

pytestmark = pytest.mark.docker
DISK_MIB, IMAGE_MIB = 400, 24


@pytest.fixture(scope="module")
def engine() -> Iterator[PrivateEngine]:
    engine_or_skip()
    with private_engine(disk=partial(mounted, mib=DISK_MIB)) as engine:  # in memory: it waits for writes
        yield engine


async def a_box(backend: DockerBackend, image: str) -> Sandbox:
    spec = SandboxSpec(image=image, memory_mib=128, disk_mib=16, pids=32)
    return await backend.create(spec, image=image, session="s")


def test_an_engine_whose_disk_is_full_refuses_and_recovers_by_what_nobody_uses(
    engine: PrivateEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "LOW_BYTES", 32 << 20)
    monkeypatch.setattr(room, "AGAIN_S", 0.0)
    data = engine.folder / "data"

    def image(number: int) -> str:
        """To be built: one layer is everybody's, one nobody else's."""
        folder = tmp_path / f"image-{number}"
        folder.mkdir()
        (folder / "number").write_text(str(number))
        (folder / "large").write_bytes(os.urandom(IMAGE_MIB << 20))
        (folder / "Dockerfile").write_text("FROM users/own:1\nCOPY number large /app/\n")
        return str(folder)

    async def run() -> None:
        backend = DockerBackend(tmp_path / "state", host=f"unix://{engine.socket}")
        (tmp_path / "files").mkdir()
        await backend.prepare(str(tmp_path / "files"))  # it brings the base
        docker("-H", f"unix://{engine.socket}", "tag", BASE + rootfs.identity(), "users/own:1")
        lives, *unused = [await backend.prepare(image(number)) for number in range(4)]
        box = await a_box(backend, lives)
        assert backend.short_of() is None
        rest = fill(data, free_mib=4)
        assert "MiB left" in (backend.short_of() or "")
        new = image(4)
        for refused in (a_box(backend, lives), backend.prepare(new)):
            with pytest.raises(SandboxError) as caught:  # what was just asked for is not let go
                await refused
            assert (caught.value.code, caught.value.owner) == ("disk_pressure", "environment")
            assert caught.value.retryable
        assert (await sh(box, "cat number; echo more > x; cat x")).stdout.head == b"0more\n"
        kept = {each.id: each.users for each in await backend.stock(sizes=False) if BUILT in each.id}
        assert sorted(kept.values()) == [0, 0, 0, 1]

        monkeypatch.setattr(room, "FRESH_S", 0.0)
        made = await backend.prepare(new)
        another = await a_box(backend, made)
        assert (await sh(another, "cat number")).stdout.head == b"4"
        assert backend.short_of() is None
        left = {each.id.rpartition(":")[2] for each in await backend.stock(sizes=False) if BUILT in each.id}
        assert {digest.removeprefix("dir:") for digest in (lives, made)} <= left
        assert unused[0].removeprefix("dir:") not in left, "the longest unused went first"
        assert (await sh(box, "cat number x")).stdout.head == b"0more\n"
        docker("-H", f"unix://{engine.socket}", "image", "inspect", "users/own:1")  # not ours to let go
        rest.unlink()
        again = await a_box(backend, await backend.prepare(str(tmp_path / "image-1")))
        assert (await sh(again, "cat number")).stdout.head == b"1", "what was let go is brought again"
        for each in (box, another, again):
            await each.close()
        await backend.close()

    asyncio.run(run())
