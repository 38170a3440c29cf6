"""Requests as broken clients make them, and a store that is held: a typed answer, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import socket
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import uvicorn
from gateway_given import TOKENS, MemorySandbox, World, finished, ready, world

from agentrl.store import Store
from agentrl.types import Task
from envs.sandbox.contract import FileChange
from envs.sandbox.diff import DiffTooLarge
from services.gateway import process
from services.gateway.app import create_app


@asynccontextmanager
async def served(here: World) -> AsyncIterator[int]:
    """The gateway on a port of this machine, as `agentrl serve gateway` has it."""
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        create_app(here.gateway, own=False),
        log_level="critical",
        access_log=False,
        ws="none",
        http=process.heads_in_time(10.0),
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        await asyncio.wait_for(serving, 20)


async def said(port: int, raw: bytes) -> bytes:
    """All that the gateway says to these bytes, until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(raw)
        async with asyncio.timeout(20):
            return await reader.read()
    finally:
        writer.close()


def head(path: str, *lines: str, method: str = "POST", version: str = "1.1") -> bytes:
    token = f"Authorization: Bearer {TOKENS['ada']}"
    text = "\r\n".join((f"{method} {path} HTTP/{version}", "Host: g", "Connection: close", token, *lines))
    return text.encode() + b"\r\n\r\n"


def test_a_head_without_end_costs_a_connection_and_no_memory(store: Store, task: Task) -> None:
    async def run() -> None:
        async with world(store, [task]) as here, served(here) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: g\r\nX-Long: ")
            sent = 0
            with suppress(ConnectionError):
                while sent < 64 * 2**20:
                    writer.write(b"a" * 65536)
                    await asyncio.wait_for(writer.drain(), 20)
                    sent += 65536
            assert sent < 16 * 2**20
            writer.close()
            ordinary = b"GET /healthz HTTP/1.1\r\nHost: g\r\nConnection: close\r\nX-Long: " + b"a" * 30_000
            assert b" 200 OK" in await said(port, ordinary + b"\r\n\r\n")

    asyncio.run(run())


BODY = json.dumps({"client_key": "k", "task": {"id": "small/one"}, "lease_ttl_s": 60.0}).encode()
CHUNKED = f"{len(BODY):x}\r\n".encode() + BODY + b"\r\n0\r\n\r\n"
LENGTH = f"Content-Length: {len(BODY)}"
JSON = "Content-Type: application/json"
WIRES = {
    "whole": (head("/v1/sessions", JSON, LENGTH) + BODY, (b" 201 ", b" 202 ")),
    "in pieces": (head("/v1/sessions", JSON, "Transfer-Encoding: chunked") + CHUNKED, (b" 201 ", b" 202 ")),
    "of the first version": (head("/v1/sessions", JSON, LENGTH, version="1.0") + BODY, (b" 201 ", b" 202 ")),
    "squeezed": (
        head("/v1/sessions", JSON, "Content-Encoding: gzip", "Content-Length: 12")
        + b"\x1f\x8b\x08\0\0\0\0\0\0\x03\x03\0",
        (b" 400 ", b" 415 ", b" 422 "),
    ),
    "two lengths": (head("/v1/sessions", JSON, LENGTH, "Content-Length: 3") + BODY, (b" 400 ",)),
    "length and pieces": (
        head("/v1/sessions", JSON, LENGTH, "Transfer-Encoding: chunked") + CHUNKED,
        (b" 400 ",),
    ),
    "a negative length": (head("/v1/sessions", JSON, "Content-Length: -1") + BODY, (b" 400 ",)),
    "no protocol at all": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64, (b" 400 ", b"")),
    "an upgrade": (
        head("/v1/sessions", "Upgrade: websocket", "Connection: Upgrade", method="GET"),
        (b" 404 ", b" 405 ", b" 426 "),
    ),
}


@pytest.mark.parametrize("name", WIRES)
def test_however_a_request_is_wrapped_it_is_understood_or_refused(
    store: Store, task: Task, name: str
) -> None:
    raw, wanted = WIRES[name]

    async def run() -> None:
        async with world(store, [task]) as here, served(here) as port:
            answer = await said(port, raw)
            first = answer.partition(b"\r\n")[0]
            assert any(status in first for status in wanted), answer[:400]
            assert b" 500 " not in first
            assert b" 200 OK" in await said(
                port, b"GET /healthz HTTP/1.1\r\nHost: g\r\nConnection: close\r\n\r\n"
            )

    asyncio.run(run())


NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "-1", "0", "1" + "0" * 400, "1" * 5000, "[]", "{}"]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_that_is_none_is_refused_wherever_it_stands(store: Store, task: Task, number: str) -> None:
    async def run() -> None:
        async with world(store, [task]) as here:
            view = await ready(here, task)
            async with here.raw() as http:
                for path, body in (
                    ("", '{"client_key": "n", "task": {"id": "small/one"}, "queue_timeout_s": N}'),
                    ("", '{"client_key": "n", "task": {"id": "small/one"}, "deadline_at": N}'),
                    (f"/{view.id}/lease", '{"epoch": 1, "ttl_s": N}'),
                    (f"/{view.id}/exec", '{"exec_id": "n", "command": "true", "timeout_s": N}'),
                ):
                    answer = await http.post(
                        f"/v1/sessions{path}",
                        content=body.replace("N", number, 1).replace("N", number),
                        headers={"Content-Type": "application/json"},
                    )
                    assert answer.status_code in (400, 422), (path, number, answer.text)
                    assert answer.json()["owner"] == "caller"
            assert (await here.ada.send(finished(view.id))).reward == 1.0

    asyncio.run(run())


def test_a_store_that_somebody_holds_delays_what_must_be_written_and_loses_nothing(
    store: Store, task: Task, tmp_path: Path
) -> None:
    """A backup or another program has the file: who asks waits, and what needs no store is answered."""

    async def run() -> None:
        async with world(store, [task]) as here:
            other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            opening = asyncio.create_task(ready(here, task))
            await asyncio.sleep(0.5)
            assert not opening.done()
            async with here.raw(None) as http, asyncio.timeout(5):
                assert (await http.get("/healthz")).status_code == 200
            other.execute("ROLLBACK")
            other.close()
            view = await opening
            assert view.state == "ready"
            assert (await here.ada.send(finished(view.id))).reward == 1.0
            moves = [move.state for move in await asyncio.to_thread(store.session_log, view.id)]
            assert (moves[0], moves[-1]) == ("queued", "done")

    asyncio.run(run())


def test_a_diff_that_is_too_large_to_show_is_said_and_ends_nothing(
    store: Store, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with world(store, [task]) as here:
            view = await ready(here, task)

            async def large(_: MemorySandbox) -> tuple[FileChange, ...]:
                raise DiffTooLarge("The workdir has more than 20000 changes.", phase="diff")

            with monkeypatch.context() as once:
                once.setattr(MemorySandbox, "diff", large)
                async with here.raw() as http:
                    answer = await http.get(f"/v1/sessions/{view.id}/diff")
            assert (answer.status_code, answer.json()["code"]) == (413, "diff_too_large")
            assert (await here.ada.send(finished(view.id))).reward == 1.0

    asyncio.run(run())
