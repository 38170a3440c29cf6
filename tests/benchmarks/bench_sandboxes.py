"""Sandboxes started at once, commands in each: ready, exec and close times, and what is left behind.

python tests/benchmarks/bench_sandboxes.py --backend local --count 64 --commands 20
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path

from agentrl.errors import BoundaryError
from agentrl.types import SandboxSpec
from envs.sandbox.cgroups import detect
from envs.sandbox.contract import Backend, ExecRequest
from envs.sandbox.local import LocalBackend
from envs.sandbox.plain import PlainBackend


def percentile(values: list[float], share: float) -> float | None:
    """The value that `share` of the sorted values do not exceed; None without values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None


def machine() -> dict[str, int]:
    """What sandboxes could leave on this machine."""
    hierarchy = detect()
    parents = set() if hierarchy is None else set(hierarchy.parents.values())
    return {
        "processes": sum(name.isdigit() for name in os.listdir("/proc")),
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "cgroups": sum(name.startswith("agentrl-") for parent in parents for name in os.listdir(parent)),
        "temporary": len(list(Path(tempfile.gettempdir()).glob("agentrl-plain-*"))),
    }


async def one(
    backend: Backend, image: str, commands: int, at_once: asyncio.Semaphore, times: dict[str, list[float]]
) -> str:
    """One sandbox's life; returns how it ended."""
    spec = SandboxSpec(image=image, memory_mib=128, disk_mib=16, pids=32)
    try:
        async with at_once:
            begun = time.perf_counter()
            box = await backend.create(spec, image=image, session="bench")
            times["ready"].append((time.perf_counter() - begun) * 1000)
        try:
            for number in range(commands):
                begun = time.perf_counter()
                result = await box.exec(ExecRequest(exec_id=str(number), command="true"))
                times["exec"].append((time.perf_counter() - begun) * 1000)
                if result.exit_code != 0:
                    return f"exit {result.exit_code}"
        finally:
            begun = time.perf_counter()
            await box.close()
            times["close"].append((time.perf_counter() - begun) * 1000)
    except BoundaryError as error:
        return error.code
    return "ok"


async def bench(name: str, count: int, commands: int, at_once: int) -> dict[str, object]:
    times: dict[str, list[float]] = {"ready": [], "exec": [], "close": []}
    with tempfile.TemporaryDirectory() as folder:
        before = machine()
        backend: Backend = LocalBackend(Path(folder)) if name == "local" else PlainBackend(Path(folder))
        environment = Path(folder, "environment")
        environment.mkdir()
        (environment / "app.py").write_text("print('hello')\n")
        image = await backend.prepare(str(environment))
        await one(backend, image, 1, asyncio.Semaphore(1), {"ready": [], "exec": [], "close": []})
        limit = asyncio.Semaphore(at_once)
        begun = time.perf_counter()
        ends = await asyncio.gather(*(one(backend, image, commands, limit, times) for _ in range(count)))
        wall_s = time.perf_counter() - begun
        await backend.close()
        await asyncio.sleep(0.2)
        after = machine()
    result: dict[str, object] = {"backend": name, "count": count, "commands": commands, "wall_s": wall_s}
    for what, values in times.items():
        result |= {f"{what}_p50_ms": percentile(values, 0.5), f"{what}_p95_ms": percentile(values, 0.95)}
    result["ends"] = {end: ends.count(end) for end in sorted(set(ends))}
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
        print(f"{key:14} {value:10.2f}" if isinstance(value, float) else f"{key:14} {value!s:>10}")


if __name__ == "__main__":
    main()
