"""The host's end of the agent's frame protocol: one asyncio transport per sandbox, no thread.

Invariants: every call ends, by an answer, by `SandboxLost` (the connection ended; with a post-mortem) or
by `ExecUnknown` (no answer in time: a fault of the environment, never a timeout of the policy's command).
Frames are at most 256 KiB, so no answer holds up another.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from agentrl.errors import ExecUnknown, SandboxLost
from agentrl.types import JsonScalar
from envs.sandbox.agent import Inbox, frames

Header = dict[str, Any]
PostMortem = Callable[[], Awaitable[dict[str, JsonScalar]]]
"""What can still be found out about a sandbox that is gone: exit status, kills for memory, its last words."""
_WORDS = 4096


class _Wire(asyncio.Protocol):
    def __init__(self, received: Callable[[bytes], None], lost: Callable[[Exception | None], None]) -> None:
        self._received = received
        self._lost = lost

    def data_received(self, data: bytes) -> None:
        self._received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost(exc)


def last_words(log: Path) -> dict[str, JsonScalar]:
    """The end of what an agent wrote, as evidence; nothing when there is none."""
    with contextlib.suppress(OSError):
        return {"log": log.read_text("utf-8", "backslashreplace")[-_WORDS:]}
    return {}


class Channel:
    """Calls over one connected stream socket. Made by `Channel.attach`; belongs to that event loop."""

    def __init__(self, sandbox: str, post_mortem: PostMortem) -> None:
        self._sandbox = sandbox
        self._post_mortem = post_mortem
        self._inbox = Inbox()
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[tuple[Header, bytes]]] = {}
        self._transport: asyncio.Transport | None = None
        self._closed = False
        self._lost: SandboxLost | None = None
        self._autopsy: asyncio.Task[None] | None = None

    @classmethod
    async def attach(cls, connection: socket.socket, *, sandbox: str, post_mortem: PostMortem) -> Channel:
        channel = cls(sandbox, post_mortem)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_unix_connection(
            lambda: _Wire(channel._on_data, channel._on_lost), sock=connection
        )
        channel._transport = transport
        return channel

    @property
    def alive(self) -> bool:
        return self._transport is not None and not self._closed and self._autopsy is None

    async def call(self, header: Header, body: bytes = b"", *, deadline_s: float) -> tuple[Header, bytes]:
        """Send a request and wait for its answer, at most `deadline_s`."""
        if self._autopsy is not None:
            await asyncio.shield(self._autopsy)
        if self._lost is not None:
            raise self._gone()
        if self._closed or self._transport is None:
            raise SandboxLost(
                f"Sandbox {self._sandbox} is closed.", phase=str(header.get("op")), code="closed"
            )
        number = next(self._numbers)
        answer: asyncio.Future[tuple[Header, bytes]] = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        for piece in frames({**header, "id": number}, body):
            self._transport.write(piece)
        try:
            async with asyncio.timeout(deadline_s):
                return await answer
        except TimeoutError as error:
            raise ExecUnknown(
                f"Sandbox {self._sandbox} did not answer '{header.get('op')}' within {deadline_s:g} s.",
                fix="The machine is overloaded or the agent hangs; the sandbox must not be used further.",
                code="transport_timeout",
                phase=str(header.get("op")),
            ) from error
        finally:
            self._pending.pop(number, None)

    def post(self, header: Header, body: bytes = b"") -> None:
        """Send a request whose answer nobody waits for. Does nothing when the sandbox is gone."""
        if self._transport is not None and self.alive:
            for piece in frames({**header, "id": next(self._numbers)}, body):
                self._transport.write(piece)

    def close(self) -> None:
        """Hang up. Calls still waiting end with `SandboxLost`."""
        self._closed = True
        if self._transport is not None:
            self._transport.abort()
        self._fail(SandboxLost(f"Sandbox {self._sandbox} was closed.", code="closed"))

    def _on_data(self, data: bytes) -> None:
        try:
            messages = self._inbox.feed(data)
        except (ValueError, KeyError, TypeError):
            if self._transport is not None:
                self._transport.abort()  # Not our protocol: nothing it says can be trusted.
            return
        for header, body in messages:
            waiting = self._pending.pop(header["id"], None)
            if waiting is not None and not waiting.done():
                waiting.set_result((header, body))

    def _on_lost(self, cause: Exception | None) -> None:
        if self._closed or self._autopsy is not None:
            return
        self._autopsy = asyncio.get_running_loop().create_task(self._examine(cause))

    async def _examine(self, cause: Exception | None) -> None:
        evidence = await self._post_mortem()
        if cause is not None:
            evidence = {**evidence, "cause": repr(cause)}
        self._lost = SandboxLost(
            f"Sandbox {self._sandbox} is gone: its agent hung up.",
            fix="Run the whole attempt again in a new sandbox.",
            evidence=evidence,
        )
        self._fail(self._lost)

    def _gone(self) -> SandboxLost:
        assert self._lost is not None
        return SandboxLost(self._lost.message, fix=self._lost.fix, evidence=self._lost.evidence)

    def _fail(self, error: SandboxLost) -> None:
        for waiting in self._pending.values():
            if not waiting.done():
                waiting.set_exception(error)
        self._pending.clear()
