"""Whole attempts through a gateway (HTTP on a socket) and, in the same run, with sessions of this process.

python tests/benchmarks/bench_gateway.py --backend local --clients 64 --sessions 64 --calls 20

Each attempt opens a session, reads a file in it `--calls` times and finalizes it; the attempts that live at
the same time call together, before the first and after the last of them does anything else, so that a rate of
calls is one of calls only. The gateway lives in a process of its own; the backend, the tasks and the limits
are the same on both sides. On a busy machine compare the processor time per call.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from agentrl.store import Store, TenantRow
from agentrl.types import Action, Task, Termination
from envs.admission import admit
from envs.evidence import Admission
from envs.sandbox.backends import checked
from envs.session import Session
from envs.tasks.package import load_task
from envs.tasks.swe_mini import generate
from harness.gateway.client import AsyncClient
from harness.gateway.remote import GatewayPlace

T = TypeVar("T")
TOKEN = "token of the benchmark"
KEY = b"key of the benchmark"


class Side:
    """Times in milliseconds, and how attempts ended."""

    def __init__(self, server: int | None = None) -> None:
        self.server = server
        """Its process."""
        self.times: dict[str, list[float]] = {}
        self.ends: Counter[str] = Counter()
        self.wall_s = 0.0
        self.calling_s = 0.0
        """While calls were made, and nothing else."""
        self.cpu_s = {"client": 0.0, "server": 0.0}
        """Processor time of that: of this process, and of the gateway's."""

    async def timed(self, what: str, operation: Awaitable[T]) -> T:
        begun = time.perf_counter()
        result = await operation
        self.times.setdefault(what, []).append((time.perf_counter() - begun) * 1000)
        return result

    async def attempts(
        self,
        place: Any,
        open_session: Any,
        task: Task,
        admission: Admission | None,
        given: argparse.Namespace,
    ) -> None:
        limit = asyncio.Semaphore(given.clients)
        together = asyncio.Barrier(given.clients)

        async def calls(session: Any) -> None:
            path = {"path": str(task.metadata["file"])}
            for step in range(given.calls):
                action = Action(id=str(step), tool="read_file", arguments=path)
                seen = await self.timed("call", session.call(action))
                assert not seen.is_error, seen.text

        async def one(number: int) -> None:
            async with limit:
                session = await self.timed(
                    "open",
                    open_session(
                        task, place, session_id=f"b.{number}.1", signing_key=KEY, admission=admission
                    ),
                )
                try:
                    first = await together.wait() == 0
                    begun, client, server = time.perf_counter(), time.process_time(), self.cpu_of_server()
                    await calls(session)
                    await together.wait()
                    if first:
                        self.calling_s += time.perf_counter() - begun
                        self.cpu_s["client"] += time.process_time() - client
                        self.cpu_s["server"] += self.cpu_of_server() - server
                    verdict = await self.timed(
                        "finalize", session.finalize(termination=Termination.FINISHED, fault=None)
                    )
                    self.ends["graded" if verdict.reward is not None else str(verdict.fault.code)] += 1
                finally:
                    await session.close()

        begun = time.perf_counter()
        await asyncio.gather(*(one(number) for number in range(given.sessions)))
        self.wall_s = time.perf_counter() - begun

    def cpu_of_server(self) -> float:
        """Processor seconds so far; 0 where the server is this process."""
        if self.server is None:
            return 0.0
        fields = Path(f"/proc/{self.server}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def summary(self) -> dict[str, Any]:
        def quantile(values: list[float], share: float) -> float:
            return round(sorted(values)[min(len(values) - 1, int(share * len(values)))], 2)

        return {
            "wall_s": round(self.wall_s, 2),
            "sessions_per_s": round(len(self.times["open"]) / self.wall_s, 2),
            "calls_per_s_while_calling": round(len(self.times["call"]) / self.calling_s, 1),
            "cpu_ms_per_call": {
                side: round(1000 * spent / len(self.times["call"]), 3) for side, spent in self.cpu_s.items()
            },
            "ms": {w: {"p50": quantile(v, 0.5), "p99": quantile(v, 0.99)} for w, v in self.times.items()},
            "ends": dict(self.ends),
        }


async def here(task: Task, given: argparse.Namespace, folder: Path) -> Side:
    """Sessions of this process."""
    side = Side()
    backend = checked(given.backend, folder / "here")
    try:
        admission = await admit(task, backend, light=True)
        await side.attempts(backend, Session.open, task, admission, given)
    finally:
        await backend.close()
    return side


async def there(task: Task, given: argparse.Namespace, folder: Path) -> Side:
    """Sessions of a gateway in another process."""
    with Store.open(folder / "store.db") as store:
        digest = sha256(TOKEN.encode()).hexdigest()
        store.add_tenant(
            TenantRow(
                name="bench", token_hash=digest, weight=1.0, max_sessions=4096, max_queue=4096, added_at=0.0
            )
        )
    words = ["serve", "gateway", "--backend", given.backend, "--port", "0", "--json"]
    options = {"--tasks": folder / "suite", "--store": folder / "store.db", "--slots": given.clients}
    options |= {"--permits": given.clients, "--verify": given.clients, "--state-dir": folder / "there"}
    process = subprocess.Popen(  # noqa: ASYNC220  (once, before anything is measured)
        [sys.executable, "-m", "agentrl.cli.main", *words, *(str(w) for o in options.items() for w in o)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        told = json.loads(await asyncio.to_thread(process.stdout.readline))
        client = AsyncClient(told["url"], token=TOKEN)
        place = GatewayPlace(told["url"], name=given.backend, isolation=told["isolation"], client=client)
        side = Side(process.pid)
        await place.admit(task)
        await side.attempts(place, place.open, task, None, given)
        await place.close()
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
    return side


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="local")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--calls", type=int, default=20)
    given = parser.parse_args()
    if given.sessions % given.clients:
        parser.error("--sessions must be a multiple of --clients: they call together")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = load_task(generate(folder / "suite", train=1, heldout=0, seed=1)[0])
        sides = {
            "in_process": asyncio.run(here(task, given, folder)).summary(),
            "gateway": asyncio.run(there(task, given, folder)).summary(),
        }
    ratio = sides["gateway"]["sessions_per_s"] / sides["in_process"]["sessions_per_s"]
    load = os.getloadavg()[0]
    print(json.dumps({**vars(given), **sides, "sessions_ratio": round(ratio, 3), "load": load}, indent=1))


if __name__ == "__main__":
    main()
