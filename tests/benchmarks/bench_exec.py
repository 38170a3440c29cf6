"""`true` in the same sandbox by every way there is: our agent, `docker exec`, and SWE-ReX.

    pip install --target /opt/rex swe-rex aiohttp
    cp /usr/lib/x86_64-linux-gnu/lib{gcc_s.so.1,rt.so.1,pthread.so.0,dl.so.2,util.so.1} /opt/rex
    python tests/benchmarks/bench_exec.py --backend docker --swe-rex /opt/rex

SWE-ReX's server runs in the sandbox and its client beside it, so that no network and no engine lies between
them. `swe_rex` starts a process as we do; `swe_rex_shell` types into a shell that is there already, which is
less work than a command with its own limits, process group and streams. The ways alternate in rounds of 10,
so that all see the same machine. The folder must be readable for other users: the policy is one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

from bench_sandboxes import environment, percentile

from agentrl.types import SandboxSpec
from envs.sandbox.contract import Backend, ExecRequest, Mount, Sandbox
from envs.sandbox.docker import DockerBackend
from envs.sandbox.local import LocalBackend

ROUND = 10
AT = "/swe-rex"
SWE_REX = f"""
import asyncio, json, os, subprocess, sys, time
os.environ |= {{"PYTHONPATH": "{AT}", "HOME": "/tmp"}}
sys.path.insert(0, "{AT}")
from swerex.runtime.abstract import BashAction, Command, CreateBashSessionRequest
from swerex.runtime.remote import RemoteRuntime

async def main():
    runtime = RemoteRuntime(host="http://127.0.0.1", port=8765, auth_token="x")
    await runtime.wait_until_alive(timeout=60)
    await runtime.create_session(CreateBashSessionRequest(startup_timeout=10))
    found = {{"swe_rex": [], "swe_rex_shell": []}}
    for number in range({ROUND} + 1):
        for way, times in found.items():
            begun = time.perf_counter()
            if way == "swe_rex":
                done = await runtime.execute(Command(command=["true"]))
            else:
                done = await runtime.run_in_session(BashAction(command="true"))
            assert done.exit_code == 0, done
            if number:  # the first opens what the others use
                times.append((time.perf_counter() - begun) * 1000)
    return found

serve = ["-m", "swerex.server", "--host", "127.0.0.1", "--port", "8765", "--auth-token", "x"]
server = subprocess.Popen([sys.executable, *serve], stdout=2, stderr=2)
try:
    found = asyncio.run(main())
finally:
    server.kill()
    server.wait()
print("\\n" + json.dumps(found))
"""


async def agent(box: Sandbox, round_: int) -> list[float]:
    times = []
    for number in range(ROUND):
        begun = time.perf_counter()
        result = await box.exec(ExecRequest(exec_id=f"b{round_}-{number}", argv=("true",)))
        times.append((time.perf_counter() - begun) * 1000)
        assert result.exit_code == 0
    return times


async def docker_exec(box: Sandbox) -> list[float]:
    times = []
    for _ in range(ROUND):
        begun = time.perf_counter()
        process = await asyncio.create_subprocess_exec("docker", "exec", box.info.id, "true")
        assert await process.wait() == 0
        times.append((time.perf_counter() - begun) * 1000)
    return times


async def swe_rex(box: Sandbox, round_: int) -> dict[str, list[float]]:
    request = ExecRequest(
        exec_id=f"rex{round_}",
        argv=("python3", "-c", SWE_REX),
        env={"LD_LIBRARY_PATH": AT},  # for libraries that a small image has not
        timeout_s=180.0,
    )
    result = await box.exec(request)
    assert result.exit_code == 0, result.stdout.text()[-2000:] + result.stderr.text()[-2000:]
    found: dict[str, list[float]] = json.loads(result.stdout.text().splitlines()[-1])
    return found


async def bench(name: str, rounds: int, rex: Path | None) -> dict[str, float | int | str | None]:
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        backend: Backend = DockerBackend(state) if name == "docker" else LocalBackend(state)
        times: dict[str, list[float]] = {}
        try:
            image = await backend.prepare(str(environment(Path(folder))))
            mounts = () if rex is None else (Mount(source=str(rex), target=AT),)
            spec = SandboxSpec(image=image, memory_mib=1024, disk_mib=64, pids=128)
            box = await backend.create(spec, image=image, session="bench", mounts=mounts)
            for round_ in range(rounds):
                times.setdefault("agent", []).extend(await agent(box, round_))
                if name == "docker":
                    times.setdefault("docker_exec", []).extend(await docker_exec(box))
                if rex is not None:
                    for way, values in (await swe_rex(box, round_)).items():
                        times.setdefault(way, []).extend(values)
        finally:
            await backend.close()
    result: dict[str, float | int | str | None] = {"backend": name, "commands": rounds * ROUND}
    ours = percentile(times["agent"], 0.5)
    for way, values in times.items():
        result |= {f"{way}_p50_ms": percentile(values, 0.5), f"{way}_p95_ms": percentile(values, 0.95)}
    for way in times.keys() - {"agent"}:
        result[f"{way}_over_agent"] = (percentile(times[way], 0.5) or 0) / (ours or 1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backend", choices=("docker", "local"), default="docker")
    parser.add_argument("--rounds", type=int, default=5, help=f"of {ROUND} commands by each way")
    parser.add_argument("--swe-rex", type=Path, metavar="FOLDER", help="where pip put swe-rex and aiohttp")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = asyncio.run(
        bench(options.backend, options.rounds, options.swe_rex and options.swe_rex.resolve())
    )
    if options.json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        print(f"{key:28} {value:10.2f}" if isinstance(value, float) else f"{key:28} {value!s:>10}")


if __name__ == "__main__":
    main()
