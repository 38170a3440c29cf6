"""A wall before the application: no body beyond its limit is read into memory, none for ever, and none at all
of somebody without a token."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from harness.gateway.wire import ErrorBody

MAX_JSON_BYTES = 8 * 1024 * 1024
MAX_FILE_BYTES = 64 * 1024 * 1024
BODY_DEADLINE_S = 300.0
"""For a body to arrive whole."""
_LARGE = re.compile(r"/v1/(tasks|sessions/[^/]+/files)")
"""What takes a file."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class LimitBody:
    """ASGI middleware: 413 as soon as a body is known to be too large, declared or not, 408 when it does not
    come. Of a request under `/v1` without the token of a tenant, the application sees no body."""

    def __init__(
        self,
        app: Callable[[Message, Receive, Send], Awaitable[None]],
        known: Callable[[str], Awaitable[bool]],
    ) -> None:
        self._app = app
        self._known = known

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if scope["path"].startswith("/v1") and not await self._known(_token(headers)):
            await self._app(scope, _nothing, send)
            return
        limit = MAX_FILE_BYTES if _LARGE.fullmatch(scope["path"]) else MAX_JSON_BYTES
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and (len(declared) > 15 or int(declared) > limit):
            await _refuse(send, *_too_large(limit))
            return
        seen = 0
        more = True
        refused: tuple[int, ErrorBody] | None = None
        answered = False
        until = asyncio.get_running_loop().time() + BODY_DEADLINE_S

        async def counted() -> Message:
            nonlocal seen, more, refused
            if not more:  # now it is asked whether the caller is still there
                return await receive()
            try:
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError:
                refused = _too_slow()
            else:
                seen += len(message.get("body", b""))
                more = message.get("more_body", False)
                if seen > limit:
                    refused = _too_large(limit)
            # Refused: the application sees a caller that went away, and what it answers is dropped.
            return message if refused is None else {"type": "http.disconnect"}

        async def instead(message: Message) -> None:
            nonlocal answered
            if refused is None or answered:
                answered = True
                await send(message)

        await self._app(scope, counted, instead)
        if not answered and refused is not None:
            await _refuse(send, *refused)


def _token(headers: dict[bytes, bytes]) -> str:
    scheme, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


async def _nothing() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


def _too_large(limit: int) -> tuple[int, ErrorBody]:
    return 413, ErrorBody(
        code="too_large",
        owner="caller",
        message=f"The body is larger than {limit // 2**20} MiB.",
        fix="Send less: split a file, or make it inside the sandbox.",
    )


def _too_slow() -> tuple[int, ErrorBody]:
    return 408, ErrorBody(
        code="too_slow",
        owner="caller",
        message=f"The body did not arrive within {BODY_DEADLINE_S:g} s.",
        fix="Send it again over a better connection, or in smaller parts.",
        retryable=True,
    )


async def _refuse(send: Send, status: int, body: ErrorBody) -> None:
    raw = body.model_dump_json().encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": raw})
