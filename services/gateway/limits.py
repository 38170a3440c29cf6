"""No request body beyond its limit is read into memory: a wall before the application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from harness.gateway.wire import ErrorBody

MAX_JSON_BYTES = 8 * 1024 * 1024
MAX_FILE_BYTES = 64 * 1024 * 1024

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class LimitBody:
    """ASGI middleware: 413 as soon as a body is known to be too large, declared or not."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = MAX_FILE_BYTES if scope["path"].endswith(("/files", "/v1/tasks")) else MAX_JSON_BYTES
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > limit:
            await _refuse(send, limit)
            return
        seen = 0
        answered = False

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > limit:  # the application sees a caller that went away, and what it answers is dropped
                return {"type": "http.disconnect"}
            return message

        async def instead(message: Message) -> None:
            nonlocal answered
            if seen <= limit or answered:
                answered = True
                await send(message)

        await self._app(scope, counted, instead)
        if not answered:
            await _refuse(send, limit)


async def _refuse(send: Send, limit: int) -> None:
    body = ErrorBody(
        code="too_large",
        owner="caller",
        message=f"The body is larger than {limit // 2**20} MiB.",
        fix="Send less: split a file, or make it inside the sandbox.",
    )
    raw = body.model_dump_json().encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": raw})
