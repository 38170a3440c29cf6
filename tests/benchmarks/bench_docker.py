"""A command through the in-sandbox agent beside `docker exec` in the same container, turn by turn, and many
sandboxes at once; what is left on the engine afterwards.

python tests/benchmarks/bench_docker.py --repeats 50 --count 16 --commands 20
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

from bench_sandboxes import Bench, environment, percentile

from agentrl.types import SandboxSpec
from envs.sandbox.contract import ExecRequest
from envs.sandbox.docker import DockerBackend


async def agent_beside_exec(backend: DockerBackend, image: str, repeats: int) -> dict[str, float | None]:
    """Milliseconds of `true` by either way, alternating, so that both see the same machine."""
    spec = SandboxSpec(image=image, memory_mib=128, disk_mib=16)
    box = await backend.create(spec, image=image, session="bench")
    agent: list[float] = []
    engine: list[float] = []
    for number in range(repeats):
        begun = time.perf_counter()
        result = await box.exec(ExecRequest(exec_id=f"b{number}", argv=("true",)))
        agent.append((time.perf_counter() - begun) * 1000)
        assert result.exit_code == 0
        begun = time.perf_counter()
        process = await asyncio.create_subprocess_exec("docker", "exec", box.info.id, "true")
        assert await process.wait() == 0
        engine.append((time.perf_counter() - begun) * 1000)
    await box.close()
    ours, theirs = percentile(agent, 0.5), percentile(engine, 0.5)
    return {
        "agent_p50_ms": ours,
        "docker_exec_p50_ms": theirs,
        "docker_exec_over_agent": theirs / ours if ours and theirs else None,
    }


def mounts() -> list[str]:
    return Path("/proc/self/mountinfo").read_text().splitlines()


async def left(backend: DockerBackend) -> int:
    command = ("docker", "ps", "-aq", "--filter", f"label=agentrl.backend={backend.id}")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    return len(out.split())


async def bench(repeats: int, count: int, commands: int, at_once: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        backend = DockerBackend(Path(folder) / "state")
        backend.check()
        image = await backend.prepare(str(environment(Path(folder))))
        result: dict[str, object] = dict(await agent_beside_exec(backend, image, repeats))
        run = Bench(backend, image, commands)
        begun = time.perf_counter()
        await run.run(count, at_once)
        result |= {"count": count, "commands": commands, "wall_s": time.perf_counter() - begun}
        result |= {"most_creates_at_once": backend.pressure.peak}
        for what, values in run.times.items():
            result |= {f"{what}_p50_ms": percentile(values, 0.5), f"{what}_p95_ms": percentile(values, 0.95)}
        result["ends"] = {end: run.ends.count(end) for end in sorted(set(run.ends))}
        await backend.close()
        result["containers_left"] = await left(backend)
        result["mounts_left"] = sum(folder in line for line in mounts())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=50, help="commands by each way in one container")
    parser.add_argument("--count", type=int, default=16, help="sandboxes alive together")
    parser.add_argument("--commands", type=int, default=20, help="commands in each of them")
    parser.add_argument("--at-once", type=int, default=16, help="sandboxes in creation at the same time")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = asyncio.run(bench(options.repeats, options.count, options.commands, options.at_once))
    if options.json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        print(f"{key:24} {value:10.2f}" if isinstance(value, float) else f"{key:24} {value!s:>10}")


if __name__ == "__main__":
    main()
