"""Calls to a sandbox over connections that come and go: none while there is nothing to say, a new one when
there is, and every request that is still without an answer asked again over it.

Asking again is safe: the agent runs an exec id once and keeps its result, and files are written by content.
So a dropped connection loses nothing and runs nothing twice. What ends a call: its answer, its own deadline
(`ExecUnknown`: the outcome can not be known), or the end of the sandbox, of which the watch tells, or the
witness, or a connection that can not be made for too long.

Two wires: TCP to the pod (from inside the cluster), and an exec connection of the API server to the witness's
relay (from anywhere).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import aiohttp

from agentrl.errors import ExecUnknown, SandboxError, SandboxLost
from agentrl.types import JsonScalar
from envs.sandbox.agent import Inbox, frames
from envs.sandbox.kubernetes_api import ApiRefused

Header = dict[str, Any]
Received = Callable[[bytes], None]
Dropped = Callable[[str], None]

IDLE_S = 20.0
"""A connection over which nothing was asked for this long is closed."""
HELLO_DEADLINE_S = 30.0
UNREACHABLE_S = 120.0
"""A sandbox to which no connection can be made for this long is lost, whatever its pod's status says."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 2.0
FAREWELL_S = 3.0
"""How long a pod that was told to end may take to say that it has."""
_LAST = 0
"""Number of the last request of all; others are drawn from far above."""
_STDIN, _STDOUT, _STDERR, _ERROR = 0, 1, 2, 3
_WORDS = 500


class Wire(Protocol):
    """One connection. `dropped` was called, or will be, exactly once unless `close` was called before."""

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...


Dial = Callable[[Received, Dropped], Awaitable[Wire]]
PostMortem = Callable[[], Awaitable[dict[str, JsonScalar]]]


class _Tcp(asyncio.Protocol):
    def __init__(self, received: Received, dropped: Dropped) -> None:
        self._received = received
        self._dropped = dropped
        self._transport: asyncio.Transport | None = None
        self._closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def data_received(self, data: bytes) -> None:
        if not self._closed:
            self._received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closed:
            self._closed = True
            self._dropped(repr(exc) if exc is not None else "the other side hung up")

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        self._closed = True
        if self._transport is not None:
            self._transport.close()


async def dial_tcp(host: str, port: int, received: Received, dropped: Dropped) -> Wire:
    """Raises OSError, TimeoutError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(HELLO_DEADLINE_S):
        _, wire = await loop.create_connection(lambda: _Tcp(received, dropped), host, port)
    return wire


class ExecWire:
    """The streams of a program that the API server runs in the pod: our requests to its input, its output to
    us. Messages have the name of their stream as first byte (`v4.channel.k8s.io`)."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse, received: Received, dropped: Dropped) -> None:
        self._ws = ws
        self._received = received
        self._dropped = dropped
        self._closed = False
        self._said = ""
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self._writer = loop.create_task(self._write())
        self._reader = loop.create_task(self._read())
        self._reader.add_done_callback(self._end)

    def write(self, data: bytes) -> None:
        self._queue.put_nowait(data)

    def close(self) -> None:
        """After what was written has gone out."""
        if not self._closed:
            self._closed = True
            self._queue.put_nowait(None)

    def whenever_finished(self, tell: Callable[[ExecWire], None]) -> None:
        self._writer.add_done_callback(lambda _: tell(self))

    async def finished(self) -> None:
        """When nothing of this connection is left."""
        await asyncio.gather(self._writer, self._reader, return_exceptions=True)

    async def _write(self) -> None:
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            while (data := await self._queue.get()) is not None:
                await self._ws.send_bytes(bytes([_STDIN]) + data)
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._ws.close()

    async def _read(self) -> None:
        async for message in self._ws:
            if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                continue
            stream, data = message.data[0], message.data[1:]
            if stream == _STDOUT and not self._closed:
                self._received(data)
            elif stream in (_STDERR, _ERROR):
                self._said = (self._said + data.decode("utf-8", "backslashreplace"))[-_WORDS:]

    def _end(self, task: asyncio.Task[None]) -> None:
        cause = None if task.cancelled() else task.exception()
        self._queue.put_nowait(None)
        if not self._closed:
            self._closed = True
            self._dropped(self._said or repr(cause or self._ws.exception() or "closed"))


class _Pending:
    """A request without an answer yet. Each time it is sent it has another number: of one that was cut off in
    the middle, the agent may still hold the beginning."""

    def __init__(self, header: Header, body: bytes, answer: asyncio.Future[Any] | None) -> None:
        self.op = str(header.get("op"))
        self.number = 0
        self.answer = answer
        """None: nobody waits, but it must arrive."""
        self._header = header
        self._body = body

    def pieces(self) -> list[bytes]:
        return frames({**self._header, "id": self.number}, self._body)

    @property
    def for_agent(self) -> bool:
        return not self.op.startswith("witness.")

    def fail(self, error: Exception) -> None:
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(error)


class Line:
    """See the module. Like a `Channel`: `call`, `post`, `close`. Belongs to one event loop."""

    def __init__(
        self,
        sandbox: str,
        *,
        token: str,
        dial: Dial,
        post_mortem: PostMortem,
        doubt: Callable[[], Awaitable[None]],
        idle_s: float = IDLE_S,
        unreachable_s: float = UNREACHABLE_S,
    ) -> None:
        self._sandbox = sandbox
        self._token = token
        self._dial = dial
        self._post_mortem = post_mortem
        self._doubt = doubt
        self._idle_s = idle_s
        self._unreachable_s = unreachable_s
        self._numbers = itertools.count(random.getrandbits(40))
        """From anywhere: of another process's requests the agent may hold the beginning of one, by its
        number."""
        self._pending: dict[int, _Pending] = {}
        self._wire: Wire | None = None
        self._inbox = Inbox()
        self._greeted: asyncio.Future[Header] | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._side: set[asyncio.Task[None]] = set()
        self._hang_up: asyncio.TimerHandle | None = None
        self._used_at = 0.0
        self._closed = False
        self._pod_lost: SandboxLost | None = None
        self._agent_lost: SandboxLost | None = None
        self._autopsy: asyncio.Task[None] | None = None
        self._over: asyncio.Future[bool] | None = None
        """What the pod answered to its end; None: it was not told over this line."""
        self.witness: str | None = None
        """Instance of the pod's witness, as it was at the first connection."""
        self.connections = 0
        """How many were made so far."""

    @property
    def connected(self) -> bool:
        return self._wire is not None

    @property
    def alive(self) -> bool:
        """Nothing is known of its end."""
        return not self._closed and self._pod_lost is None and self._agent_lost is None

    @property
    def silent_s(self) -> float:
        """How long nothing was sent."""
        return time.monotonic() - self._used_at

    async def call(self, header: Header, body: bytes = b"", *, deadline_s: float) -> tuple[Header, bytes]:
        """Ask, and wait for the answer at most `deadline_s`. Raises `SandboxLost`, `ExecUnknown`."""
        op = str(header.get("op"))
        if self._autopsy is not None and not op.startswith("witness."):
            await asyncio.shield(self._autopsy)
        self._refuse(op)
        answer: asyncio.Future[tuple[Header, bytes]] = asyncio.get_running_loop().create_future()
        pending = self._ask(header, body, answer)
        try:
            async with asyncio.timeout(deadline_s):
                return await answer
        except TimeoutError as error:
            raise ExecUnknown(
                f"Sandbox {self._sandbox} did not answer '{op}' within {deadline_s:g} s.",
                fix="The cluster is overloaded or the agent hangs; the sandbox must not be used further.",
                code="transport_timeout",
                phase=op,
            ) from error
        finally:
            self._pending.pop(pending.number, None)

    def post(self, header: Header, body: bytes = b"") -> None:
        """Ask for something whose answer nobody waits for; it is asked again like any other. Does nothing
        when the sandbox is gone."""
        if self.alive:
            self._ask(header, body, None)

    async def renew(self) -> None:
        """Let the witness hear from us. Raises what `call` raises."""
        await self.call({"op": "witness.hello", "token": self._token}, deadline_s=HELLO_DEADLINE_S)

    def close(self) -> None:
        """End the pod, if it can be told at once, and hang up when it has answered, or soon. Calls that still
        wait end with `SandboxLost`."""
        if self._closed:
            return
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._hang_up is not None:
            self._hang_up.cancel()
        if self._wire is not None:
            for piece in frames({"op": "witness.end", "id": _LAST}):
                self._wire.write(piece)
            loop = asyncio.get_running_loop()
            self._over = loop.create_future()
            loop.call_later(FAREWELL_S, self._take_leave, False)
        self._fail(SandboxLost(f"Sandbox {self._sandbox} was closed.", code="closed"))

    def _take_leave(self, over: bool) -> None:
        self._drop_wire()
        if self._over is not None and not self._over.done():
            self._over.set_result(over)

    async def over(self) -> bool:
        """After `close`: whether the pod said that every process of its policy is gone. Not later than
        `FAREWELL_S` after it."""
        return self._over is not None and await asyncio.shield(self._over)

    async def finished(self) -> None:
        """After `close`: when no task of this line is left."""
        tasks = [t for t in (self._connecting, self._autopsy, *self._side) if t is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    def lost(self, error: SandboxLost, *, witness_lives: bool) -> None:
        """The sandbox is gone, as the cluster says. The first cause stays."""
        if self._closed or self._pod_lost is not None:
            return
        if witness_lives:
            if self._agent_lost is None:
                self._agent_lost = error
                self._fail(error, only_agent=True)
            return
        self._pod_lost = self._agent_lost or error
        self._drop_wire()
        if self._connecting is not None:
            self._connecting.cancel()
        self._fail(self._pod_lost)

    # -- asking

    def _refuse(self, op: str) -> None:
        if self._closed:
            raise SandboxLost(f"Sandbox {self._sandbox} is closed.", phase=op, code="closed")
        gone = self._pod_lost or (None if op.startswith("witness.") else self._agent_lost)
        if gone is not None:
            raise _again(gone, op)

    def _ask(self, header: Header, body: bytes, answer: asyncio.Future[Any] | None) -> _Pending:
        pending = _Pending(header, body, answer)
        self._number(pending)
        self._used_at = time.monotonic()
        if self._wire is not None:
            self._send(self._wire, pending)
        else:
            self._connect()
        return pending

    def _number(self, pending: _Pending) -> None:
        self._pending.pop(pending.number, None)
        pending.number = next(self._numbers)
        self._pending[pending.number] = pending

    def _send(self, wire: Wire, pending: _Pending) -> None:
        for piece in pending.pieces():
            wire.write(piece)

    # -- connections

    def _connect(self) -> None:
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.get_running_loop().create_task(self._keep_dialing())

    async def _keep_dialing(self) -> None:
        begun, pause = time.monotonic(), FIRST_PAUSE_S
        while self._pending and not self._closed and self._pod_lost is None:
            try:
                wire, hello = await self._greet()
            except (OSError, TimeoutError, SandboxError, ValueError) as error:
                if time.monotonic() - begun > self._unreachable_s:
                    self.lost(_unreachable(self._sandbox, self._unreachable_s, error), witness_lives=False)
                    return
                if not isinstance(error, ApiRefused) or error.status == 404:
                    self._aside(self._doubt())  # Perhaps it is gone, and the watch has not said so yet.
                await asyncio.sleep(pause * (1 + random.random() / 2))
                pause = min(2 * pause, MAX_PAUSE_S)
                continue
            self._wire = wire
            self.connections += 1
            if self.witness is None:
                self.witness = hello["witness"]
            elif self.witness != hello["witness"]:
                self.lost(_replaced(self._sandbox), witness_lives=False)
                return
            if hello.get("agent_gone"):
                self._agent_ended(str(hello.get("log") or ""))
            for pending in list(self._pending.values()):
                self._number(pending)
                self._send(wire, pending)
            self._watch_idleness()
            return

    async def _greet(self) -> tuple[Wire, Header]:
        """A connection over which the witness has answered."""
        self._inbox = Inbox()
        greeted = self._greeted = asyncio.get_running_loop().create_future()

        def dropped(why: str) -> None:
            if not greeted.done():
                greeted.set_exception(ConnectionError(f"the connection was dropped: {why}"))
                greeted.exception()
            else:
                self._dropped(wire)

        wire = await self._dial(self._receive, dropped)
        try:
            for piece in frames({"op": "witness.hello", "token": self._token, "id": "hello"}):
                wire.write(piece)
            async with asyncio.timeout(HELLO_DEADLINE_S):
                return wire, await greeted
        except BaseException:
            wire.close()
            raise

    def _receive(self, data: bytes) -> None:
        try:
            messages = self._inbox.feed(data)
        except (ValueError, KeyError, TypeError):
            self._drop_wire()  # Not our protocol: nothing it says can be trusted.
            if self._pending:
                self._connect()
            return
        for header, body in messages:
            number = header["id"]
            if number == "hello":
                if self._greeted is not None and not self._greeted.done():
                    self._greeted.set_result(header)
            elif number == _LAST and "over" in header:
                self._take_leave(header["over"] is True)
            elif header.get("event") == "agent_gone":
                self._agent_ended(str(header.get("log") or ""))
            elif (header.get("error") or {}).get("kind") == "agent_gone":
                self._agent_ended(str(header["error"].get("message") or ""))
            else:
                pending = self._pending.pop(number, None)
                if pending is not None and pending.answer is not None and not pending.answer.done():
                    pending.answer.set_result((header, body))

    def _dropped(self, wire: Wire) -> None:
        """The connection ended by itself."""
        if self._wire is wire:
            self._wire = None
            if self._closed:
                self._take_leave(False)
        if not self._closed and self._pod_lost is None:
            if self._pending:
                self._connect()
            self._aside(self._doubt())

    def _drop_wire(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    def _watch_idleness(self) -> None:
        if self._hang_up is not None:
            self._hang_up.cancel()
        loop = asyncio.get_running_loop()
        self._hang_up = loop.call_later(max(0.01, self._idle_s - self.silent_s), self._perhaps_hang_up)

    def _perhaps_hang_up(self) -> None:
        if self._wire is None or self._closed:
            return
        if self._pending or self.silent_s < self._idle_s:
            self._hang_up = asyncio.get_running_loop().call_later(self._idle_s, self._perhaps_hang_up)
        else:
            self._drop_wire()

    # -- ends

    def _agent_ended(self, log: str) -> None:
        if self._autopsy is None and self._agent_lost is None and not self._closed:
            self._autopsy = asyncio.get_running_loop().create_task(self._examine(log))

    async def _examine(self, log: str) -> None:
        """Find out what the cluster knows of the agent's end, then tell it to all who wait for the agent."""
        evidence = await self._post_mortem()
        error = SandboxLost(
            f"Sandbox {self._sandbox} is gone: its agent ended.",
            fix="Run the whole attempt again in a new sandbox.",
            code="agent_died",
            evidence={**evidence, "log": log},
        )
        self.lost(error, witness_lives=True)

    def _fail(self, error: SandboxLost, *, only_agent: bool = False) -> None:
        for number, pending in list(self._pending.items()):
            if not only_agent or pending.for_agent:
                del self._pending[number]
                pending.fail(_again(error, pending.op))

    def _aside(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(_quietly(work))
        self._side.add(task)
        task.add_done_callback(self._side.discard)


async def _quietly(work: Awaitable[None]) -> None:
    """For a look that may fail: who waits has a deadline of their own."""
    with contextlib.suppress(SandboxError, OSError):
        await work


def _again(error: SandboxLost, phase: str) -> SandboxLost:
    return SandboxLost(
        error.message,
        fix=error.fix,
        owner=error.owner,
        code=error.code,
        phase=phase,
        retryable=error.retryable,
        evidence=error.evidence,
    )


def _unreachable(sandbox: str, after_s: float, cause: Exception) -> SandboxLost:
    return SandboxLost(
        f"Sandbox {sandbox} could not be reached for {after_s:g} s, though its pod runs: {cause!r}.",
        fix="Look at the network between this process and the pods, or set AGENTRL_KUBERNETES_REACH=exec.",
        code="unreachable",
        evidence={"cause": repr(cause)},
    )


def _replaced(sandbox: str) -> SandboxLost:
    return SandboxLost(
        f"Sandbox {sandbox} is another one than it was: its pod was replaced.",
        fix="Run the whole attempt again in a new sandbox.",
        code="replaced",
    )
