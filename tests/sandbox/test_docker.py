"""The conformance suite on containers of a real engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from engines import containers_of, engine_or_skip, kill_container, mounts_below

from envs.sandbox.conformance import KINDS, Case, Kind
from envs.sandbox.docker import DockerBackend

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module", params=[0, 2], ids=["cold", "warm"])
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Case, asyncio.Runner]]:
    """With a pool nearly every sandbox is one that waited."""
    engine_or_skip()
    folder = tmp_path_factory.mktemp("docker")
    backend = DockerBackend(folder / "state")
    backend.keep_warm(request.param)
    with asyncio.Runner() as runner:
        yield Case(backend, folder, kill_container), runner
        pool = backend.pool
        runner.run(backend.close())
    assert (pool.hits > 0) if pool is not None else request.param == 0
    assert containers_of(backend) == []
    assert mounts_below(folder) == []
    assert list((folder / "state" / "docker" / "run").iterdir()) == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_container_keeps_the_contract(running: tuple[Case, asyncio.Runner], kind: Kind) -> None:
    case, runner = running
    runner.run(asyncio.wait_for(kind.run(case), 120))
