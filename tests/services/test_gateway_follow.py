"""Commands are watched and signalled while they run, over HTTP, on real processes."""

from __future__ import annotations

import asyncio
import hashlib
import resource
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from gateway_given import TOKENS, URL, World, on_processes, until

from agentrl.errors import ConfigError, SandboxError
from agentrl.store import Store
from agentrl.types import Task
from harness.gateway import client as calls
from harness.gateway import wire


def body(command: str, exec_id: str = "e") -> wire.ExecBody:
    return wire.ExecBody(exec_id=exec_id, command=command, timeout_s=60, follow=True)


def test_output_is_read_while_the_command_runs_and_is_whole(store: Store, task: Task, tmp_path: Path) -> None:
    async def run() -> None:
        async with on_processes(store, task, tmp_path) as (here, session):
            command = (
                "echo one; while [ ! -e go ]; do sleep 0.05; done; head -c 700000 /dev/zero | tr '\\0' x"
            )
            asked = asyncio.create_task(here.ada.send(calls.run(session, body(command))))
            await until(lambda: bool(here.gateway._live[session].operations))
            seen = b""
            async for piece in calls.follow(here.ada, session, "e"):
                if not seen:
                    assert not asked.done()  # it waits for what we do now
                    await _touch(here, session)
                seen += piece
            done = await asked
            assert seen == b"one\n" + b"x" * 700000
            assert done.stdout.bytes_total == len(seen)
            assert done.stdout.sha256 == hashlib.sha256(seen).hexdigest()
            async with here.raw() as http:  # the same in one answer, from the middle
                got = await http.get(
                    f"/v1/sessions/{session}/exec/e/output", params={"follow": True, "offset": 2}
                )
                assert got.content == seen[2:]
                end = await http.get(f"/v1/sessions/{session}/exec/e/output", params={"offset": len(seen)})
                assert (end.content, end.headers["x-exec-ended"]) == (b"", "true")

    asyncio.run(run())


async def _touch(here: World, session: str) -> None:
    """Beside the running command, which holds the session's turn: straight into its sandbox."""
    live = here.gateway._live[session]
    assert live.session is not None
    await live.session.write_file("go", b"", mode=0o644)


def test_a_signal_reaches_the_running_command_and_only_that(store: Store, task: Task, tmp_path: Path) -> None:
    async def run() -> None:
        async with on_processes(store, task, tmp_path) as (here, session):
            command = "trap 'echo caught; exit 5' INT; echo ready; while :; do sleep 0.05; done"
            asked = asyncio.create_task(here.ada.send(calls.run(session, body(command))))
            await until(lambda: bool(here.gateway._live[session].operations))
            async for piece in calls.follow(here.ada, session, "e"):
                if b"ready" in piece:
                    assert (await here.ada.send(calls.signal(session, "e", "INT"))).running
            done = await asked
            assert (done.status, done.exit_code, done.stdout.head) == ("exited", 5, "ready\ncaught\n")
            assert not (await here.ada.send(calls.signal(session, "e", "KILL"))).running
            after = await here.ada.send(calls.run(session, body("echo on", "f")))
            assert after.stdout.head == "on\n"
            with pytest.raises(SandboxError, match="ran no command g"):
                await here.ada.send(calls.signal(session, "g", "INT"))

    asyncio.run(run())


class Lossy:
    """Does what is asked, and loses the first answer to a signal."""

    def __init__(self, inner: httpx.ASGITransport) -> None:
        self.inner = inner
        self.asked: list[bytes] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self.inner.handle_async_request(request)
        if request.url.path.endswith("/signal"):
            self.asked.append(request.content)
            if len(self.asked) == 1:
                raise httpx.ReadError("the connection was lost after the request")
        return response

    async def aclose(self) -> None: ...


def test_a_signal_whose_answer_was_lost_is_sent_once(store: Store, task: Task, tmp_path: Path) -> None:
    async def run() -> None:
        async with on_processes(store, task, tmp_path) as (here, session):
            lossy = Lossy(here.transport)
            client = calls.AsyncClient(URL, token=TOKENS["ada"], way=lossy)
            command = "trap 'echo caught' USR1; echo ready; while [ ! -e go ]; do sleep 0.05; done"
            asked = asyncio.create_task(here.ada.send(calls.run(session, body(command))))
            await until(lambda: bool(here.gateway._live[session].operations))
            async for piece in calls.follow(here.ada, session, "e"):
                if b"ready" not in piece:
                    continue
                for sent in (2, 3):  # a new one is a new one
                    assert (await client.send(calls.signal(session, "e", "USR1"))).running
                    assert len(lossy.asked) == sent
                    await asyncio.sleep(0.3)  # two signals at the same moment would be one
                await _touch(here, session)
            assert (await asked).stdout.head == "ready\ncaught\ncaught\n"

    asyncio.run(run())


def test_a_file_of_150_megabytes_comes_out_in_pieces_and_no_more_of_it_is_ever_in_memory(
    store: Store, task: Task, tmp_path: Path
) -> None:
    """Row 66. The gateway and the caller are this process: its peak says what both held."""

    async def run() -> None:
        async with on_processes(store, task, tmp_path) as (here, session):
            make = "yes 0123456789abcde | head -c 150000000 > big; sha256sum < big; : > empty"
            made = await here.ada.send(calls.run(session, body(make)))
            seen, count, most = hashlib.sha256(), 0, 0
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            async for piece in calls.download(here.ada, session, "big"):
                seen.update(piece)
                count, most = count + len(piece), max(most, len(piece))
            grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            assert (count, seen.hexdigest()) == (150_000_000, made.stdout.head.split()[0])
            assert most <= wire.PART_BYTES
            assert grown_kib < 48 * 1024
            assert [piece async for piece in calls.download(here.ada, session, "empty")] == [b""]
            with pytest.raises(SandboxError, match=r"There is no nothing\.txt"):
                await here.ada.send(calls.file_part(session, "nothing.txt", offset=0))

            pieces = calls.download(here.ada, session, "big")
            await anext(pieces)
            await here.ada.send(calls.run(session, body("echo more >> big", "more")))
            with pytest.raises(SandboxError, match="was changed while it was read"):
                await anext(pieces)
            here.gateway.settings = replace(here.gateway.settings, download_mib=1.0)
            with pytest.raises(ConfigError, match=r"more than 1 MiB.*Pack or split"):
                await here.ada.send(calls.file_part(session, "big", offset=0))

    asyncio.run(run())


def test_output_of_a_command_that_was_not_followed_is_that_of_its_result_or_is_gone(
    store: Store, task: Task, tmp_path: Path
) -> None:
    async def run() -> None:
        async with on_processes(store, task, tmp_path) as (here, session):
            small = wire.ExecBody(exec_id="s", command="echo out; echo err >&2")
            await here.ada.send(calls.run(session, small))
            piece = await here.ada.send(calls.output(session, "s", stream="stderr"))
            assert (piece.data, piece.ended) == (b"err\n", True)
            async with here.raw() as http:
                assert (await http.get(f"/v1/sessions/{session}/exec/x/output")).status_code == 404
                bad = await http.get(f"/v1/sessions/{session}/exec/s/output", params={"stream": "third"})
                assert bad.status_code == 422

    asyncio.run(run())
