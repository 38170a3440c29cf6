"""Sandboxes started at once, commands in each: ready, exec and close times, and what is left behind.

python tests/benchmarks/bench_sandboxes.py --backend local --count 64 --commands 20
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

from agentrl.errors import BoundaryError
from agentrl.types import SandboxSpec
from envs.sandbox.cgroups import detect
from envs.sandbox.contract import Backend, ExecRequest, Sandbox
from envs.sandbox.local import LocalBackend
from envs.sandbox.plain import PlainBackend

T = TypeVar("T")


def percentile(values: list[float], share: float) -> float | None:
    """The value that `share` of the sorted values do not exceed; None without values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None


def descendants() -> int:
    """Processes below this one."""
    parents: dict[str, str] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parents[name] = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]
    found = {str(os.getpid())}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return len(found) - 1


def machine() -> dict[str, int]:
    """What sandboxes could leave on this machine."""
    hierarchy = detect()
    parents = set() if hierarchy is None else set(hierarchy.parents.values())
    mine = f"agentrl-{os.getpid()}-"
    return {
        "processes": descendants(),
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "cgroups": sum(name.startswith(mine) for parent in parents for name in os.listdir(parent)),
        "temporary": len(list(Path(tempfile.gettempdir()).glob(f"agentrl-plain-{os.getpid()}-*"))),
    }


class Bench:
    """One run: times in milliseconds per operation, and how each sandbox ended."""

    def __init__(self, backend: Backend, image: str, commands: int) -> None:
        self.backend = backend
        self.image = image
        self.commands = commands
        self.times: dict[str, list[float]] = {}
        self.ends: list[str] = []

    async def timed(self, what: str, operation: Awaitable[T]) -> T:
        begun = time.perf_counter()
        result = await operation
        self.times.setdefault(what, []).append((time.perf_counter() - begun) * 1000)
        return result

    async def start(self, at_once: asyncio.Semaphore) -> Sandbox | None:
        spec = SandboxSpec(image=self.image, memory_mib=128, disk_mib=16, pids=32)
        async with at_once:
            try:
                return await self.timed("ready", self.backend.create(spec, image=self.image, session="bench"))
            except BoundaryError as error:
                self.ends.append(error.code)
                return None

    async def commands_in(self, box: Sandbox, what: str) -> None:
        for number in range(self.commands):
            request = ExecRequest(exec_id=f"{what}-{number}", command="true")
            try:
                result = await self.timed(what, box.exec(request))
            except BoundaryError as error:
                self.ends.append(error.code)
                return
            if result.exit_code != 0:
                self.ends.append(f"{result.status} {result.exit_code}")
                return
        self.ends.append("ok")

    async def run(self, count: int, at_once: int) -> None:
        limit = asyncio.Semaphore(at_once)
        boxes = [box for box in await asyncio.gather(*(self.start(limit) for _ in range(count))) if box]
        await self.commands_in(boxes[0], "exec")
        self.ends.clear()
        await asyncio.gather(*(self.commands_in(box, "exec_at_once") for box in boxes))
        await asyncio.gather(*(self.timed("close", box.close()) for box in boxes))


def environment(folder: Path) -> Path:
    """A small workspace."""
    made = folder / "environment"
    made.mkdir()
    (made / "app.py").write_text("print('hello')\n")
    return made


async def bench(name: str, count: int, commands: int, at_once: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        before = machine()
        backend: Backend = LocalBackend(Path(folder)) if name == "local" else PlainBackend(Path(folder))
        image = await backend.prepare(str(environment(Path(folder))))
        await Bench(backend, image, 1).run(1, 1)  # starts what is started once
        run = Bench(backend, image, commands)
        begun = time.perf_counter()
        await run.run(count, at_once)
        wall_s = time.perf_counter() - begun
        await backend.close()
        await asyncio.sleep(0.2)
        after = machine()
    result: dict[str, object] = {"backend": name, "count": count, "commands": commands, "wall_s": wall_s}
    for what, values in run.times.items():
        result |= {f"{what}_p50_ms": percentile(values, 0.5), f"{what}_p95_ms": percentile(values, 0.95)}
    result["ends"] = {end: run.ends.count(end) for end in sorted(set(run.ends))}
    result["left"] = {key: after[key] - before[key] for key in before}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("local", "plain"), default="local")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--commands", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=16, help="sandboxes in creation at the same time")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = asyncio.run(bench(options.backend, options.count, options.commands, options.at_once))
    if options.json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        print(f"{key:20} {value:10.2f}" if isinstance(value, float) else f"{key:20} {value!s:>10}")


if __name__ == "__main__":
    main()
