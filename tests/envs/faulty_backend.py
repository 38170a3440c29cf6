"""A backend that works, except where a test says otherwise: faults injected between grader and sandbox."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from agentrl.types import Action, Fault, Task, Termination, Verdict
from envs.evidence import Admission
from envs.sandbox.contract import ExecRequest, ExecResult, FileChange, Health, Sandbox, SandboxInfo
from envs.sandbox.plain import PlainBackend
from envs.session import Session, prepare
from envs.tasks import package

KEY = b"a signing key of the tests"
T = TypeVar("T")


def _same(value: T) -> T:
    return value


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What to change on the way, for sandboxes whose session name contains `where`."""

    where: str = ""
    info: Callable[[SandboxInfo], SandboxInfo] = _same
    health: Callable[[Health], Health] = _same
    pressure: float | None = 0.0
    """Share of the time in which something waits for a CPU; None: the kernel does not tell."""
    result: Callable[[ExecResult], ExecResult] = _same
    diff: Callable[[tuple[FileChange, ...]], tuple[FileChange, ...]] = _same
    before: Callable[[str], Awaitable[None]] | None = None
    """Awaited before each operation with its name; may raise."""


class FaultySandbox:
    def __init__(self, inner: Sandbox, faults: Faults) -> None:
        self.inner = inner
        self._faults = faults
        self._begun = time.monotonic()

    @property
    def info(self) -> SandboxInfo:
        return self._faults.info(self.inner.info)

    async def _before(self, name: str) -> None:
        if self._faults.before is not None:
            await self._faults.before(name)

    async def exec(self, request: ExecRequest) -> ExecResult:
        await self._before("exec")
        return self._faults.result(await self.inner.exec(request))

    async def read_file(self, path: str, *, max_bytes: int = 1 << 24) -> bytes:
        await self._before("read_file")
        return await self.inner.read_file(path, max_bytes=max_bytes)

    async def write_file(self, path: str, data: bytes, *, mode: int | None = 0o644) -> None:
        await self._before("write_file")
        await self.inner.write_file(path, data, mode=mode)

    async def probe(self) -> Health:
        await self._before("probe")
        health = replace(await self.inner.probe(), cpu_stalled_us=None)
        if self._faults.pressure is not None:
            stalled_us = 1e6 * (time.monotonic() - self._begun) * self._faults.pressure
            health = replace(health, cpu_stalled_us=round(stalled_us))
        return self._faults.health(health)

    async def kill_all(self) -> int:
        await self._before("kill_all")
        return await self.inner.kill_all()

    async def diff(self) -> tuple[FileChange, ...]:
        await self._before("diff")
        return self._faults.diff(await self.inner.diff())

    async def close(self) -> None:
        await self.inner.close()


class FaultyBackend:
    """A `PlainBackend` with faults; counts what it created and what is still open."""

    name = "plain"
    isolation = "none"

    def __init__(self, *faults: Faults) -> None:
        self.inner = PlainBackend()
        self.faults = faults
        self.created: list[str] = []
        self.live: dict[str, Any] = {}
        """Inner sandboxes by session name, also closed ones."""

    async def prepare(self, environment_dir: str) -> str:
        return await self.inner.prepare(environment_dir)

    async def create(self, spec: Any, *, session: str, **rest: Any) -> FaultySandbox:
        sandbox = await self.inner.create(spec, session=session, **rest)
        self.created.append(session)
        self.live[session] = sandbox
        for faults in self.faults:
            if faults.where in session:
                return FaultySandbox(sandbox, faults)
        return FaultySandbox(sandbox, Faults())

    async def close(self) -> None:
        await self.inner.close()


async def admission_of(task: Task, backend: Any, **changes: Any) -> Admission:
    """A valid admission, without the runs behind it."""
    record = Admission(
        task_id=task.id,
        revision=task.revision,
        image_digest=await prepare(task, backend),
        backend="plain",
        valid=True,
        mode="light",
        repeats=1,
        runtime_s=0.1,
        admitted_at=1.0,
    )
    return replace(record, **changes)


def attempt(
    task: Task,
    *actions: tuple[str, dict[str, Any]],
    faults: tuple[Faults, ...] = (),
    termination: Termination = Termination.FINISHED,
    fault: Fault | None = None,
    admission: dict[str, Any] | None = None,
    admitted: bool = True,
    then: Callable[[FaultyBackend, Session], Awaitable[None]] | None = None,
) -> Verdict:
    """One whole attempt on a `FaultyBackend`: open, act, `then`, finalize, close."""

    async def run() -> Verdict:
        backend = FaultyBackend(*faults)
        try:
            record = await admission_of(task, backend, **(admission or {})) if admitted else None
            async with await Session.open(
                task, backend, session_id="agent", signing_key=KEY, admission=record
            ) as session:
                for number, (tool, arguments) in enumerate(actions):
                    await session.call(Action(id=str(number), tool=tool, arguments=arguments))
                if then is not None:
                    await then(backend, session)
                return await session.finalize(termination=termination, fault=fault)
        finally:
            await backend.close()

    return asyncio.run(run())


TESTS = """\
from cart import total


def test_total():
    assert total(2, 3) == 5


def test_zero():
    assert total(0, 0) == 0
"""
HIDDEN = """\
from cart import total


def test_negative():
    assert total(-2, -3) == -5
"""
SOLVE = "#!/bin/bash\nset -eu\nsed -i 's/a - b/a + b/' cart.py\n"
FIX = ("replace_in_file", {"path": "cart.py", "old": "a - b", "new": "a + b"})


def config(**ours: Any) -> dict[str, Any]:
    """The task.toml of a small task, as nested tables."""
    return {
        "schema_version": "1.4",
        "task": {"name": "small/cart"},
        "environment": {"workdir": "/app", "memory_mb": 256},
        "verifier": {"timeout_sec": ours.pop("timeout_sec", 10)},
        "metadata": {
            "agentrl": {
                "grader": "tests",
                "fail_to_pass": ["test_cart.py::test_total", "test_hidden.py::test_negative"],
                "pass_to_pass": ["test_cart.py::test_zero"],
                "protected_paths": ["tests"],
                "exec_timeout_s": 5,
                **ours,
            }
        },
    }


def small_task(
    folder: Path,
    *,
    environment: dict[str, str] | None = None,
    tests: dict[str, str] | None = None,
    solution: str = SOLVE,
    **ours: Any,
) -> Task:
    """A task whose `total` subtracts; the fix is one character."""
    files = {
        "cart.py": 'def total(a, b):\n    """Combine a and b."""\n    return a - b\n',
        "tests/test_cart.py": TESTS,
    }
    package.write_task(
        folder,
        config=config(**ours),
        instruction="Fix total.\n",
        environment={**files, **(environment or {})},
        tests={"test_cart.py": TESTS, "test_hidden.py": HIDDEN, **(tests or {})},
        solution=solution,
    )
    return package.load_task(folder)
