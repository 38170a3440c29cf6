"""The gateway as a process that is killed in the middle: who comes after it goes on, or nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from gateway_given import TOKENS, tenant

from agentrl.errors import SandboxError
from agentrl.store import Store
from agentrl.types import Action, EvidenceKey, Observation, Task, Termination
from envs.sandbox.backends import checked
from envs.tasks import package
from harness.gateway import client as calls
from harness.gateway import wire
from harness.gateway.client import AsyncClient
from harness.gateway.remote import GatewayPlace

WANTED = os.environ.get("AGENTRL_TEST_LIVE")
"""Sessions that live when the gateway is killed, on either backend and in both tests, by hand."""
LIVE = {"local": int(WANTED or 50), "docker": int(WANTED or 16)}
LEFT = int(WANTED or 8)
STEPS = 4
BUSY_S = 60.0
"""What a machine that is busy with other things may take for things that take a second."""
LEASE_S = {"local": 5.0, "docker": 10.0}


def counting_task(folder: Path) -> Task:
    """Solved by a file that has each number exactly once, in order."""
    lines = "".join(f"{step}\\n" for step in range(STEPS))
    package.write_task(
        folder,
        config={
            "schema_version": "1.4",
            "task": {"name": "small/one"},
            "environment": {"workdir": "/app", "memory_mb": 128, "storage_mb": 16},
            "verifier": {"timeout_sec": 30},
            "metadata": {"agentrl": {"grader": "script", "exec_timeout_s": 30}},
        },
        instruction="Count.\n",
        environment={"hello.txt": "hello\n"},
        tests={
            "test.sh": f"printf '{lines}' | cmp -s - steps.txt && r=1 || r=0\n"
            "echo $r > /logs/verifier/reward.txt\n"
        },
        solution=f"#!/bin/bash\nprintf '{lines}' > steps.txt\n",
    )
    return package.load_task(folder)


class Process:
    """`agentrl serve gateway`, to be killed and started again on the same port with the same store."""

    def __init__(self, folder: Path, backend: str = "local") -> None:
        self.folder = folder
        self.backend = backend
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.task = counting_task(folder / "suite" / "one")
        with Store.open(folder / "store.db") as store:
            store.add_tenant(tenant("ada"))
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> dict[str, object]:
        """Until it serves. Returns what it says of itself."""
        words = ["serve", "gateway", "--backend", self.backend, "--port", str(self.port), "--json"]
        options = {"--tasks": self.folder / "suite", "--store": self.folder / "store.db"}
        options |= {"--state-dir": self.folder / "state"}
        words += [str(word) for option in options.items() for word in option]
        words += ["--slots", str(LIVE[self.backend]), "--memory", "999999", "--permits", "8"]
        words += ["--warm", "2"] if self.backend == "docker" else []
        with (self.folder / "gateway.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "agentrl.cli.main", *words],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, (self.folder / "gateway.log").read_text()
        told: dict[str, object] = json.loads(line)
        return told

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(60)
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def client(self) -> AsyncClient:
        return AsyncClient(self.url, token=TOKENS["ada"])

    def traces(self) -> list[str]:
        """Whatever of its sandboxes is still on this machine."""
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{name}/cmdline").read_bytes()
                if str(self.folder).encode() in words and int(name) != os.getpid():
                    found.append(f"process {name}")
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        found += [line.split()[4] for line in mounts if str(self.folder) in line]
        for here, folders, files in os.walk(self.folder / "state"):  # what is gone meanwhile is passed over
            if here.endswith("/run"):
                found += [f"{here}/{name}" for name in (*folders, *files)]
        return found


@pytest.fixture(
    params=[
        pytest.param("local", marks=pytest.mark.sandbox),
        pytest.param("docker", marks=pytest.mark.docker),
    ]
)
def process(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Process]:
    made = Process(tmp_path, request.param)
    try:
        checked(request.param, tmp_path / "check")
    except SandboxError as error:
        pytest.skip(str(error))
    yield made
    made.kill(signal.SIGTERM)


async def gone(process: Process, within_s: float) -> list[str]:
    """What is left after at most so long."""
    until = time.monotonic() + within_s
    while (left := process.traces()) and time.monotonic() < until:  # noqa: ASYNC110  (it looks from outside)
        await asyncio.sleep(0.1)
    return left


async def episode(place: GatewayPlace, task: Task, number: int, halfway: asyncio.Barrier) -> list[str]:
    """An attempt whose every step must happen once: it appends a line to a file. Returns the lines."""
    session = await place.open(
        task,
        place,
        session_id=f"g.{number}.1",
        signing_key=b"key",
        admission=None,  # type: ignore[arg-type]
    )
    try:
        for step in range(STEPS):
            if step == STEPS // 2:
                await halfway.wait()
            words = {"command": f"echo {step} >> steps.txt; sleep 0.1; cat steps.txt"}
            seen = await session.call(Action(id=str(step), tool="bash", arguments=words))
        await session.call(Action(id="end", tool="submit", arguments={}))
        verdict = await session.finalize(termination=Termination.FINISHED, fault=None)
        assert verdict.reward == 1.0, verdict.fault
        return seen.text.split()
    finally:
        await session.close()


def test_killed_in_the_middle_and_started_again_it_adopts_every_session_and_they_finish(
    process: Process,
) -> None:
    async def run() -> None:
        isolation, live = process.start()["isolation"], LIVE[process.backend]
        halfway = asyncio.Barrier(live + 1)
        place = GatewayPlace(process.url, name=process.backend, isolation=isolation, client=process.client())  # type: ignore[arg-type]
        await place.admit(process.task)
        attempts = [asyncio.create_task(episode(place, process.task, n, halfway)) for n in range(live)]
        await halfway.wait()
        await asyncio.sleep(0.05)  # commands are running now
        process.kill()
        told = process.start()
        assert told["epoch"] == 2
        ends = await asyncio.gather(*attempts)
        assert ends == [[str(step) for step in range(STEPS)]] * live
        async with process.client() as client:
            page = await client.send(calls.Call(method="GET", path="/metrics", read=lambda got: got.text))
            assert f"agentrl_sessions_adopted_total {live}.0" in page
        await place.close()
        process.kill(signal.SIGTERM)
        assert await gone(process, BUSY_S) == []

    asyncio.run(run())


def test_killed_and_not_started_again_nothing_is_left_when_the_leases_are_over(process: Process) -> None:
    async def run() -> None:
        process.start()
        async with process.client() as client:
            await client.send(calls.admit(process.task.id, None, deadline_s=60))

            async def one(number: int) -> None:
                asked = calls.open_session(
                    client_key=str(number), task_id=process.task.id, lease_ttl_s=LEASE_S[process.backend]
                )
                view = await client.send(asked)
                while view.waiting:
                    view = await client.send(calls.session(view.id, wait_s=5))
                body = wire.ExecBody(exec_id="e", command="nohup sleep 600 > /dev/null 2>&1 &")
                await client.send(calls.run(view.id, body))

            await asyncio.gather(*(one(n) for n in range(LEFT)))
            process.kill()
            assert process.traces() != []
            assert await gone(process, LEASE_S[process.backend] + BUSY_S) == []

    asyncio.run(run())


def test_a_session_that_began_from_a_snapshot_is_adopted_and_its_verdict_still_says_so(
    process: Process,
) -> None:
    async def run() -> None:
        process.start()
        async with process.client() as client:

            async def ready(key: str, from_snapshot: str | None = None) -> str:
                asked = calls.open_session(
                    client_key=key, task_id=process.task.id, from_snapshot=from_snapshot
                )
                view = await client.send(asked)
                while view.waiting:
                    view = await client.send(calls.session(view.id, wait_s=5))
                assert view.state == "ready", view.fault
                return view.id

            async def shell(session_id: str, exec_id: str, command: str) -> None:
                body = wire.ExecBody(exec_id=exec_id, command=command)
                assert (await client.send(calls.run(session_id, body))).exit_code == 0

            first = await ready("first")
            await shell(first, "half", "printf '0\\n1\\n' > steps.txt")
            snapshot = await client.send(calls.snapshot(first, client_key="half"))
            second = await ready("second", snapshot.id)
            await shell(second, "more", "echo 2 >> steps.txt")
            process.kill()
            process.start()
            assert await client.send(calls.snapshot(first, client_key="half")) == snapshot
            await shell(second, "rest", "echo 3 >> steps.txt")
            ended = calls.finalize(second, termination=Termination.FINISHED, fault=None, deadline_s=60)
            verdict = await client.send(ended)
            assert verdict.reward == 1.0, verdict.fault
            start = next(link for link in verdict.evidence if link.key is EvidenceKey.E1_START)
            assert start.facts["snapshot"] == snapshot.digest
        process.kill(signal.SIGTERM)
        assert await gone(process, BUSY_S) == []

    asyncio.run(run())


def test_an_id_that_was_used_before_a_restart_is_not_another_commands_after_it(process: Process) -> None:
    """A signal's neither: what was sent once is answered as then, and something else under its id is
    refused."""

    async def run() -> None:
        process.start()
        async with process.client() as client:
            view = await client.send(calls.open_session(client_key="k", task_id=process.task.id))
            while view.waiting:
                view = await client.send(calls.session(view.id, wait_s=5))

            def shell(exec_id: str, command: str) -> calls.Call[wire.ExecView]:
                return calls.run(view.id, wire.ExecBody(exec_id=exec_id, command=command, follow=True))

            def tool(call_id: str, command: str) -> calls.Call[tuple[Observation, bool]]:
                words = {"command": command}
                return calls.tool(
                    view.id, "bash", call_id=call_id, action_id="a", arguments=words, deadline_s=60
                )

            waiting = shell("w", "trap 'echo caught' USR1; echo on; while [ ! -e go ]; do sleep 0.05; done")
            count = "echo >> n; wc -l < n"
            first, seen = await client.send(shell("e", "echo 1")), await client.send(tool("c", count))
            await client.send(tool("d", "true"))
            token = {"Authorization": f"Bearer {TOKENS['ada']}", "Content-Type": "application/json"}
            async with httpx.AsyncClient(base_url=process.url, headers=token) as http:
                assert (await http.post(f"{waiting.path}?wait_s=0", content=waiting.body)).status_code == 202
            async for piece in calls.follow(client, view.id, "w"):
                if b"on" in piece:
                    break
            hit = calls.signal(view.id, "w", "USR1")
            assert (await client.send(hit)).running
            process.kill()
            process.start()
            assert (await client.send(hit)).running, "as it was answered then"
            again = await client.send(shell("e", "echo 1"))
            assert again.model_copy(update={"queue_ms": first.queue_ms}) == first
            assert (await client.send(tool("c", count)))[0].text == seen[0].text == "1\n"
            async with httpx.AsyncClient(base_url=process.url, headers=token) as http:
                # From here on the gateway holds a command whose words it was never told.
                told = await http.get(f"/v1/sessions/{view.id}/exec/e", params={"wait_s": 30})
                assert told.json()["stdout"]["head"] == "1\n"
            other = hit.body.replace(b"USR1", b"USR2") if hit.body else None
            for call, code in (
                (shell("e", "echo 3"), "exec_id_reused"),
                (shell("w", "true"), "exec_id_reused"),
                (tool("c", "echo 3"), "call_id_reused"),
                (tool("d", "false"), "call_id_reused"),  # not asked for again since
                (replace(hit, body=other), "signal_id_reused"),
            ):
                with pytest.raises(SandboxError) as refused:
                    await client.send(call)
                assert refused.value.code == code
            await client.send(calls.put_file(view.id, "go", b""))
            assert (await client.send(waiting)).stdout.head == "on\ncaught\n", "one signal, not two"

    asyncio.run(run())
