"""Attempts that all live at once while things break under them: every one ends in a record, and no fault is
the policy's.

    python tests/benchmarks/bench_faults.py --count 512 --commands 20 --faults 0.01
    python tests/benchmarks/bench_faults.py --backend docker --count 128

A scripted policy runs `--commands` commands in a sandbox of its own and submits; nobody runs a command before
every sandbox is there. Before each command, with the given probability, one of these happens for real:

    killed      SIGKILL of what runs commands in the sandbox, between commands
    in_command  the same while a command runs
    model       the model server answers with an error

It fails (exit 1) unless there are as many records as attempts in the store, the attempts that nothing was
done to are graded, no other one is, no fault is the policy's or scored, and no process, mount, descriptor,
cgroup or disk block is left.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_sandboxes import machine

from agentrl.errors import ModelError
from agentrl.inference.sampler import SampleRequest
from agentrl.inference.scripted import ScriptedSampler
from agentrl.store import Store
from agentrl.types import Task, Trajectory
from envs.admission import admit
from envs.evidence import Admission
from envs.sandbox.backends import checked
from envs.sandbox.contract import Backend, Sandbox
from envs.session import Session
from envs.tasks.package import load_task
from envs.tasks.swe_mini import generate
from harness.chat import ChatFormat
from harness.rollout import RolloutSettings, run_one

sys.path.insert(0, str(Path(__file__).parent.parent / "harness"))

from tiny_tokenizer import tokenizer

COMMAND = '<tool_call>{"name": "bash", "arguments": {"command": "%s"}}</tool_call>'
SUBMIT = '<tool_call>{"name": "submit", "arguments": {}}</tool_call>'
KINDS = ("killed", "in_command", "model")
READY_DEADLINE_S = 1800.0


def kill(box: Sandbox) -> None:
    """The agent of a local sandbox, or the container."""
    pid = getattr(box, "agent_pid", None)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    else:
        subprocess.run(["docker", "kill", box.info.id], check=True, capture_output=True, timeout=60)


class Breaking:
    """Passes everything on to a backend, and knows which sandbox is whose."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.boxes: dict[str, Sandbox] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def create(self, *given: Any, session: str, **more: Any) -> Sandbox:
        box = await self._inner.create(*given, session=session, **more)
        self.boxes.setdefault(session, box)  # the first one of a session is where the policy works
        return box


class Bench:
    """All attempts, and what was done to them."""

    def __init__(self, given: argparse.Namespace, backend: Backend) -> None:
        self.given = given
        self.backend = Breaking(backend)
        self.done_to: dict[str, str] = {}
        self.opened = 0
        self._all_there = asyncio.Event()
        self._random = random.Random(given.seed)
        self._kinds = 0
        self._opening = asyncio.Semaphore(given.at_once)
        self._killers: set[asyncio.Task[None]] = set()

    async def _open(self, *given: Any, **more: Any) -> Session:
        try:
            async with self._opening:
                return await Session.open(*given, **more)
        finally:
            self.opened += 1
            if self.opened == self.given.count:
                self._all_there.set()

    async def _line(self, request: SampleRequest, number: int) -> str:
        async with asyncio.timeout(READY_DEADLINE_S):
            await self._all_there.wait()
        if number == self.given.commands:
            return SUBMIT
        who = request.session
        if who not in self.done_to and self._random.random() < self.given.faults:
            kind = self.done_to[who] = KINDS[self._kinds % len(KINDS)]
            self._kinds += 1
            if kind == "model":
                raise ModelError("the server is gone.", code="server", phase="sample", retryable=False)
            box = self.backend.boxes[who]
            if kind == "in_command":
                self._soon(lambda: kill(box))
                return COMMAND % "sleep 20"
            await asyncio.to_thread(kill, box)
        return COMMAND % "true"

    def _soon(self, what: Callable[[], None]) -> None:
        async def later() -> None:
            await asyncio.sleep(0.3)
            await asyncio.to_thread(what)

        task = asyncio.get_running_loop().create_task(later())
        self._killers.add(task)
        task.add_done_callback(self._killers.discard)

    async def run(self, task: Task, admission: Admission, store: Store) -> list[Trajectory]:
        chat = ChatFormat(tokenizer("chatml"))
        sampler = ScriptedSampler(self._line, encode=chat.encode_reply)
        settings = RolloutSettings(require_log_probs=False, sample_deadline_s=READY_DEADLINE_S)
        store.begin_run("faults", config={}, algo="none", seed=self.given.seed, run_id="faults")

        async def one(number: int) -> Trajectory:
            made = await run_one(
                task,
                sampler=sampler,
                chat=chat,
                backend=self.backend,  # type: ignore[arg-type]
                group_id="g",
                index=number,
                signing_key=b"key of the benchmark",
                admission=admission,
                settings=settings,
                open_session=self._open,
            )
            await asyncio.to_thread(store.add_trajectory, "faults", made)
            return made

        return await asyncio.gather(*(one(number) for number in range(self.given.count)))


def blocks(folder: Path) -> int:
    """Bytes on disk below a folder."""
    return sum(p.lstat().st_blocks * 512 for p in folder.rglob("*")) if folder.exists() else 0


def held(folder: Path) -> dict[str, int]:
    """What could be left; of mounts those below the folder, since others mount on this machine too."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return {**machine(), "mounts": sum(str(folder) in line for line in mounts)}


async def whole(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    task = load_task(generate(folder / "suite", train=1, heldout=0, seed=1)[0])
    room = {"max_turns": given.commands + 1, "max_tokens": 1 << 20, "max_context": 1 << 20, "wall_s": 7200.0}
    task = dataclasses.replace(
        task,
        tools=("bash", "submit"),
        limits=dataclasses.replace(task.limits, **room),
        sandbox=dataclasses.replace(task.sandbox, memory_mib=96, disk_mib=16, pids=32),
    )
    state = folder / "state"
    before = held(folder)
    backend = checked(given.backend, state)
    try:
        admission = await admit(task, backend, light=True)
        kept = blocks(state)  # what is unpacked once, and kept
        bench = Bench(given, backend)
        begun = time.perf_counter()
        with Store.open(folder / "store.db") as store:
            made = await bench.run(task, admission, store)
            records = len(store.trajectories("faults", limit=None))
            verified = store.verify("faults").ok
        wall_s = time.perf_counter() - begun
    finally:
        await backend.close()
    await asyncio.sleep(1.0)
    after = held(folder)
    seen = [t.verdict.fault for t in made if t.verdict.fault is not None]
    touched = {t.id: bench.done_to.get(t.id) for t in made}
    left = {what: after[what] - before[what] for what in before}
    left["disk_bytes"] = max(0, blocks(state) - kept)
    wrong = [
        f"{t.id}: {touched[t.id] or 'untouched'}, reward {t.reward}, fault {t.verdict.fault}"
        for t in made
        if (t.reward is None) != (touched[t.id] is not None)
        or (t.verdict.fault is not None and (t.verdict.fault.scored or touched[t.id] is None))
    ]
    return {
        "attempts": given.count,
        "records": records,
        "store_verified": verified,
        "done_to": dict(Counter(kind for kind in touched.values() if kind)),
        "graded": sum(t.reward is not None for t in made),
        "faults": dict(Counter(f"{fault.owner}/{fault.code}" for fault in seen)),
        "wrong": wrong,
        "wall_s": round(wall_s, 1),
        "commands_per_s": round(sum(len(t.turns) for t in made) / wall_s, 1),
        "left": left,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=("local", "plain", "docker"), default="local")
    parser.add_argument("--count", type=int, default=512, help="attempts, all alive at once")
    parser.add_argument("--commands", type=int, default=20, help="of each")
    parser.add_argument("--faults", type=float, default=0.01, help="probability before each command")
    parser.add_argument("--at-once", type=int, default=16, help="sandboxes in creation at the same time")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        told = asyncio.run(whole(given, Path(folder)))
    print(json.dumps({"given": vars(given), **told}, indent=1))
    good = told["records"] == given.count and told["store_verified"] and not told["wrong"]
    if not good or any(told["left"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
