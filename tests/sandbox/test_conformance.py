"""The conformance suite on the backends that need nothing but this machine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.errors import SandboxError
from envs.sandbox.conformance import KINDS, Case, Kind
from envs.sandbox.contract import Sandbox
from envs.sandbox.local import LocalBackend
from envs.sandbox.plain import PlainBackend

pytestmark = pytest.mark.sandbox


def _kill_agent(box: Sandbox) -> None:
    os.kill(box.agent_pid, signal.SIGKILL)  # type: ignore[attr-defined]


@pytest.fixture(scope="module", params=["plain", "local"])
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Case, asyncio.Runner]]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    backend: PlainBackend | LocalBackend
    if request.param == "plain":
        backend = PlainBackend(folder / "state")
    else:
        backend = LocalBackend(folder / "state")
        try:
            backend.check()
        except SandboxError as error:
            pytest.skip(str(error))
    with asyncio.Runner() as runner:
        yield Case(backend, folder, _kill_agent), runner
        runner.run(backend.close())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_backend_keeps_the_contract(running: tuple[Case, asyncio.Runner], kind: Kind) -> None:
    case, runner = running
    if kind.isolated and case.backend.isolation == "none":
        pytest.skip("holds only under isolation")
    if kind.memory and isinstance(case.backend, LocalBackend) and not case.backend.limits_memory:
        pytest.skip("no memory control group can be made here")
    runner.run(asyncio.wait_for(kind.run(case), 120))
