"""HTTP in front of proxied sessions.

    POST /sessions                 open one (admin key): its base URLs and key
    GET  /sessions/ID              how many calls, how faithful
    POST /sessions/ID/close        end it: its trajectory is kept
    ANY  /s/ID/…                   the session's own endpoints (see `harness.proxy.door`)

A client that hangs up takes its sampling with it: the request under way is aborted in the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agentrl.errors import ConfigError
from harness import fidelity
from harness.proxy import openai_chat
from harness.proxy.door import MAX_BODY_BYTES, Request, Response, refused
from harness.proxy.exchange import Refusal
from services.proxy.sessions import Live, Sessions

DOORS = "/s/"


def create_app(sessions: Sessions, *, admin_key: str) -> ASGIApp:
    """The application. Model calls do not pass through a router: they are nearly all there is."""

    def allowed(request: HttpRequest) -> bool:
        sent = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        return hmac.compare_digest(sent.encode(), admin_key.encode())

    async def open_session(request: HttpRequest) -> JSONResponse:
        if not allowed(request):
            return _problem(401, "The admin key is missing or wrong. It was shown when the proxy started.")
        try:
            body = json.loads(await request.body() or b"{}")
            name, harness = str(body.get("name", "session")), str(body.get("harness", "unknown"))
            live = sessions.open(name, harness=harness)
        except (ValueError, AttributeError) as error:
            return _problem(400, f"The body must be a JSON object: {error}.")
        except ConfigError as error:
            return _problem(400, str(error))
        return JSONResponse(facts(live, str(request.base_url).rstrip("/")), status_code=201)

    async def session(request: HttpRequest) -> JSONResponse:
        live = sessions.get(request.path_params["session"])
        if live is None or not allowed(request):
            return _problem(404, "There is no such session, or the admin key is wrong.")
        return JSONResponse(_report(live))

    async def close(request: HttpRequest) -> JSONResponse:
        live = sessions.get(request.path_params["session"])
        if live is None or not allowed(request):
            return _problem(404, "There is no such session, or the admin key is wrong.")
        report = _report(live)
        await asyncio.to_thread(sessions.close, live.id)
        return JSONResponse({**report, "trajectory": live.id})

    async def healthz(_: HttpRequest) -> JSONResponse:
        return JSONResponse({"ok": True, "model": sessions.sampler.model, "sessions": len(sessions)})

    beside = Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/sessions", open_session, methods=["POST"]),
            Route("/sessions/{session}", session),
            Route("/sessions/{session}/close", close, methods=["POST"]),
        ]
    )
    doors = _Doors(sessions)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        asked = scope["type"] == "http" and _path(scope).startswith(DOORS)
        await (doors if asked else beside)(scope, receive, send)

    return app


def _path(scope: Scope) -> str:
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def facts(live: Live, base: str) -> dict[str, str]:
    """What an agent needs to know of a session."""
    return {
        "session": live.id,
        "key": live.key,
        "openai_base_url": f"{base}/s/{live.id}/v1",
        "anthropic_base_url": f"{base}/s/{live.id}",
    }


def _report(live: Live) -> dict[str, Any]:
    model = live.door.model
    found = fidelity.of_calls(live.recorder.calls, model.facts())
    return {"session": live.id, "name": live.name, "harness": live.harness, "fidelity": found.facts()}


def _problem(status: int, message: str) -> JSONResponse:
    return JSONResponse(
        {"error": {"message": message, "type": "invalid_request_error", "code": None, "param": None}},
        status_code=status,
    )


class _Doors:
    """Requests to sessions, as plain ASGI: the path that every model call takes."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        session_id, _, rest = _path(scope).removeprefix(DOORS).partition("/")
        live = self._sessions.get(session_id)
        try:
            body = await _body(receive)
        except Refusal as refusal:
            await _respond(send, refused(refusal, openai_chat.error))
            return
        if body is None:
            return
        if live is None:
            unknown = Refusal(
                f"There is no session '{session_id}'; it was closed, or never opened.",
                status=404,
                kind="not_found_error",
                code="session_not_found",
            )
            await _respond(send, refused(unknown, openai_chat.error))
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        request = Request(method=scope["method"], path=rest, headers=headers, body=body)
        await _until_gone(receive, _answered(live, request, send))


async def _answered(live: Live, request: Request, send: Send) -> None:
    await _respond(send, await live.door.handle(request))


async def _body(receive: Receive) -> bytes | None:
    """The whole body; None when the client left."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            raise Refusal(
                f"The request has more than {MAX_BODY_BYTES} bytes.",
                status=413,
                kind="request_too_large",
                code="request_too_large",
            )
        if not message.get("more_body", False):
            return b"".join(parts)


async def _until_gone(receive: Receive, work: Awaitable[None]) -> None:
    """Do the work unless the client hangs up first."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (working, gone):
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _respond(send: Send, response: Response) -> None:
    headers = [(b"content-type", response.content_type.encode())]
    headers += [(name.encode(), value.encode()) for name, value in response.headers.items()]
    if isinstance(response.body, bytes):
        headers.append((b"content-length", str(len(response.body)).encode()))
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        await send({"type": "http.response.body", "body": response.body})
        return
    headers.append((b"cache-control", b"no-cache"))
    closing: Callable[[], Awaitable[None]] | None = getattr(response.body, "aclose", None)
    try:
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        async for piece in response.body:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    finally:
        if closing is not None:
            await closing()
