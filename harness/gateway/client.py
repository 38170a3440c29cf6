"""Requests to a gateway and their answers as records or errors, for synchronous and asynchronous callers.

A `Call` says what to send and how to read the answer; `Client.send` and `AsyncClient.send` carry it out.
Every call is safe to send again, because each has a key under which the gateway does it once; so what is
tried again is a lost connection, a proxy's 502 or 504, and an answer with `Retry-After`. An answer 202 means
that it is not done yet, and the same call is sent again. All ends at the call's deadline with a named cause.

Errors: the caller's own mistake is a `ConfigError`; whatever else went wrong is a `SandboxError` with the
owner that the gateway decided.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Literal, Protocol, Self, TypeVar
from urllib.parse import quote

import httpx
import pydantic

from agentrl.config import environment
from agentrl.errors import AgentRLError, ConfigError, EvidenceError, SandboxError
from agentrl.inference.connections import Connections, NotConnected, TransportError
from agentrl.types import Fault, Limits, Observation, Termination, Verdict, from_json, to_dict
from envs.evidence import Admission
from envs.sandbox.contract import FilePart
from harness.gateway import wire

T = TypeVar("T")
M = TypeVar("M", bound=pydantic.BaseModel)

HOLD_S = 30.0
"""How long the gateway may hold a request before it answers 202."""
ANSWER_S = HOLD_S + 30.0
"""Longest wait for one answer."""
LOOK_S = 2.0
"""Between two looks at how far the preparation of images has come."""
PREPARE_DEADLINE_S = 6 * 3600.0
"""For the images of a whole suite."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0
LEAST_ANSWER_S = 5.0
"""Shortest wait for an answer, also when the call's deadline is nearer: a busy gateway can say so."""
CONNECTIONS = 1024
"""Of a synchronous client, which several threads may share."""
CONNECT_S = 10.0
KEEP_S = 4.0
"""How long an idle connection is kept; the gateway's server keeps it five seconds."""
_ASKED = frozenset({"authorization", "content-type"})
_OF_THE_WIRE = frozenset({"content-encoding", "content-length", "transfer-encoding"})
"""Headers about how an answer travelled, which is over."""
_SUCCESS = frozenset({200, 201, 202})
_YOURS = frozenset({401, 403, 413, 422})
"""Statuses that say that the request itself is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """One thing to ask of a gateway. `deadline_s` covers all tries."""

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    body: bytes | None = None
    content_type: str = "application/json"
    params: Mapping[str, str | int | float] = field(default_factory=dict)
    deadline_s: float = 60.0
    so_far: bool = False
    """A 202 is an answer too: what there is by now."""


@dataclass(frozen=True, slots=True)
class _Pause:
    seconds: float


@dataclass(frozen=True, slots=True)
class _Ask:
    request: httpx.Request
    answer_s: float
    """Longest wait for its answer."""


_Steps = Generator["_Ask | _Pause", "httpx.Response | httpx.RequestError | None", T]


def _conversation(call: Call[T], build: Callable[[Call[T]], httpx.Request]) -> _Steps[T]:
    """What to send and how long to pause, until there is an answer; the answers are sent in."""
    began = time.monotonic()
    pause = FIRST_PAUSE_S
    while True:
        asked = time.monotonic()
        left = max(LEAST_ANSWER_S, call.deadline_s - (asked - began))
        got = yield _Ask(build(call), min(ANSWER_S, left))
        assert got is not None
        if isinstance(got, httpx.Response):
            if got.status_code == 202 and not call.so_far:
                held = time.monotonic() - asked > FIRST_PAUSE_S
                wait = 0.0 if held else FIRST_PAUSE_S  # who answers at once is not asked without end
                cause = "the gateway is still at it"
            elif got.status_code < 400:
                if got.status_code not in _SUCCESS:
                    raise _unreadable(call, got)
                try:
                    return call.read(got)
                except (ValueError, TypeError, EvidenceError) as error:
                    raise _unreadable(call, got) from error
            else:
                after = got.headers.get("retry-after")
                if after is None and got.status_code not in (502, 504):
                    raise error_of(got)
                wait = _seconds(after, pause)
                cause = str(error_of(got))
        else:
            wait, cause = pause, f"{type(got).__name__}: {got}"
        if time.monotonic() - began + wait > call.deadline_s:
            raise SandboxError(
                f"{call.method} {call.path}: not done by the gateway in {call.deadline_s:g} s: {cause}",
                fix="Look at the gateway's /readyz and /v1/capacity.",
                owner="gateway",
                code="gateway_no_answer",
                phase="gateway",
            )
        if wait:
            yield _Pause(wait * random.uniform(0.8, 1.2))
            pause = min(2 * pause, LONGEST_PAUSE_S)


def _unreadable(call: Call[Any], response: httpx.Response) -> SandboxError:
    """For a success that is no answer of a gateway: a page of some proxy, or half of one."""
    return SandboxError(
        f"{call.method} {call.path}: the answer {response.status_code} is not a gateway's.",
        fix="Is the URL a gateway's, of this version, with nothing in between that answers itself?",
        owner="gateway",
        code="gateway_answer",
        phase="gateway",
        evidence={"answer": response.content[:200].decode("utf-8", "backslashreplace")},
    )


def _seconds(text: str | None, otherwise: float) -> float:
    try:
        seconds = float(text) if text is not None else otherwise
    except ValueError:
        return otherwise
    return seconds if seconds >= 0 else otherwise


def error_of(response: httpx.Response) -> AgentRLError:
    """An answer that is no success, as the error that its owner stands for."""
    try:
        body = wire.ErrorBody.model_validate_json(response.content)
    except pydantic.ValidationError:
        return SandboxError(
            f"The gateway answered {response.status_code} without saying why.",
            fix="Is the URL a gateway's?",
            owner="gateway",
            code="gateway_answer",
            phase="gateway",
        )
    if body.owner == "caller":
        if response.status_code in _YOURS or body.code in ("unknown_task", "other_revision"):
            return ConfigError(body.message, fix=body.fix)
        return SandboxError(
            body.message, fix=body.fix, owner="gateway", code=body.code, phase=body.phase, retryable=True
        )
    return SandboxError(
        body.message,
        fix=body.fix,
        owner=body.owner,
        code=body.code,
        phase=body.phase,
        retryable=body.retryable,
        evidence=dict(body.evidence),
    )


def _builder(url: str, token: str) -> Callable[[Call[Any]], httpx.Request]:
    try:
        base = httpx.URL(url.rstrip("/"))
        usable = base.scheme in ("http", "https") and bool(base.host) and (base.port or 1) < 1 << 16
    except httpx.InvalidURL:
        usable = False
    if not usable or base.userinfo or base.query or base.fragment:
        raise ConfigError(
            f"'{url}' is no gateway URL.", fix="Example: http://gateway:8080, with the token beside it."
        )

    def build(call: Call[Any]) -> httpx.Request:
        try:
            return _request(call)
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise ConfigError(
                f"{call.method} {call.path!r:.200} can not be sent: {error}.", fix="Use paths that are text."
            ) from error

    def _request(call: Call[Any]) -> httpx.Request:
        headers = {"Authorization": f"Bearer {token}"}
        if call.body is not None:
            headers["Content-Type"] = call.content_type
        return httpx.Request(
            call.method,
            f"{base}{call.path}",
            params=dict(call.params) or None,
            content=call.body,
            headers=headers,
            extensions={"timeout": httpx.Timeout(ANSWER_S, connect=CONNECT_S).as_dict()},
        )

    return build


def token_of(token: str | None) -> str:
    """The token given, or `AGENTRL_GATEWAY_TOKEN`. Raises `ConfigError`."""
    found = token or environment("GATEWAY_TOKEN")
    if not found:
        raise ConfigError(
            "The gateway needs a token.",
            fix="Set AGENTRL_GATEWAY_TOKEN; agentrl serve tenant NAME --store URL makes one.",
        )
    if not found.isascii() or not found.isprintable() or found != found.strip():
        raise ConfigError(
            "The gateway's token holds a character that no header can.",
            fix="Give it as `agentrl serve tenant` printed it, without a line break.",
        )
    return found


class Client:
    """A gateway for synchronous callers. `transport`: another way to it, for tests."""

    def __init__(
        self, url: str, *, token: str | None = None, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.token = token_of(token)
        self._build = _builder(url, self.token)
        self._http = httpx.Client(transport=transport, limits=httpx.Limits(max_connections=CONNECTIONS))

    def send(self, call: Call[T]) -> T:
        """Carry it out. Raises `ConfigError` or `SandboxError`."""
        steps = _conversation(call, self._build)
        step = next(steps)
        while True:
            try:
                if isinstance(step, _Pause):
                    time.sleep(step.seconds)
                    step = next(steps)
                    continue
                try:
                    got: httpx.Response | httpx.RequestError = self._answer(step)
                except httpx.RequestError as error:
                    got = error
                step = steps.send(got)
            except StopIteration as done:
                value: T = done.value
                return value

    def _answer(self, asked: _Ask) -> httpx.Response:
        until = time.monotonic() + asked.answer_s
        timeout = httpx.Timeout(asked.answer_s, connect=min(CONNECT_S, asked.answer_s))
        asked.request.extensions["timeout"] = timeout.as_dict()
        response = self._http.send(asked.request, stream=True)
        try:
            raw = []
            for piece in response.iter_bytes():
                raw.append(piece)
                if time.monotonic() > until:  # it comes, but for ever
                    raise httpx.ReadTimeout(f"no whole answer in {asked.answer_s:g} s")
        finally:
            response.close()
        told = [(n, v) for n, v in response.headers.items() if n.lower() not in _OF_THE_WIRE]
        return httpx.Response(response.status_code, headers=told, content=b"".join(raw))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


class Way(Protocol):
    """How requests reach a gateway: what any asynchronous transport of httpx offers."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response: ...

    async def aclose(self) -> None: ...


class _Kept:
    """Over connections that are kept, at a fifth of what httpx's own transport costs."""

    def __init__(self) -> None:
        self._connections: Connections | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self._connections is None:  # It belongs to the event loop of the first request.
            self._connections = Connections(headers={}, connect_s=CONNECT_S, keep_s=KEEP_S)
        asked = {name: value for name, value in request.headers.items() if name in _ASKED}
        try:
            reply = await self._connections.send(
                request.method,
                str(request.url),
                request.content or None,
                headers=asked,
                deadline_s=ANSWER_S,
            )
        except NotConnected as error:
            raise httpx.ConnectError(str(error)) from error
        except TransportError as error:
            raise httpx.ReadError(str(error)) from error
        told = [(name, value) for name, value in reply.headers.items() if name.lower() not in _OF_THE_WIRE]
        return httpx.Response(reply.status, headers=told, content=reply.content)

    async def aclose(self) -> None:
        if self._connections is not None:
            await self._connections.close()
            self._connections = None


class AsyncClient:
    """A gateway for asynchronous callers. Belongs to one event loop. `way`: another one to it, for tests."""

    def __init__(self, url: str, *, token: str | None = None, way: Way | None = None) -> None:
        self.token = token_of(token)
        self._build = _builder(url, self.token)
        self._way = way or _Kept()

    async def send(self, call: Call[T]) -> T:
        """Carry it out. Raises `ConfigError` or `SandboxError`."""
        steps = _conversation(call, self._build)
        step = next(steps)
        while True:
            try:
                if isinstance(step, _Pause):
                    await asyncio.sleep(step.seconds)
                    step = next(steps)
                    continue
                try:
                    async with asyncio.timeout(step.answer_s):
                        response = await self._way.handle_async_request(step.request)
                        await response.aread()
                    got: httpx.Response | httpx.RequestError = response
                except httpx.RequestError as error:
                    got = error
                except TimeoutError:
                    got = httpx.ReadTimeout(f"no whole answer in {step.answer_s:g} s")
                step = steps.send(got)
            except StopIteration as done:
                value: T = done.value
                return value

    async def close(self) -> None:
        await self._way.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()


# ------------------------------------------------------------------------------------------------- the calls


def _model(model: type[M]) -> Callable[[httpx.Response], M]:
    return lambda response: model.model_validate_json(response.content)


def _bytes(response: httpx.Response) -> bytes:
    """Of a file or a stream; a page of some proxy is neither."""
    if response.headers.get("content-type", "").partition(";")[0] != "application/octet-stream":
        raise ValueError("not the bytes that were asked for")
    return response.content


def _flag(response: httpx.Response, name: str) -> bool:
    said = response.headers.get(name)
    if said not in ("true", "false"):
        raise ValueError(f"the header {name} is missing")
    return bool(said == "true")


def _said(model: type[pydantic.BaseModel], **values: Any) -> bytes:
    """A body. Raises `ConfigError`: the gateway would refuse it."""
    try:
        return model(**values).model_dump_json().encode()
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"{model.__name__}: {where}: {first['msg']}.", fix=f"Correct {where or 'the request'}."
        ) from error


def _models(model: type[M]) -> Callable[[httpx.Response], tuple[M, ...]]:
    return lambda response: tuple(model.model_validate(row) for row in response.json())


def _of(session_id: str, *more: str) -> str:
    parts = (quote(part, safe="", errors="backslashreplace") for part in (session_id, *more))
    return "/".join(["/v1/sessions", *parts])


def environments() -> Call[tuple[wire.EnvironmentView, ...]]:
    return Call(method="GET", path="/v1/environments", read=_models(wire.EnvironmentView))


def tasks(*, limit: int = 100, offset: int = 0) -> Call[tuple[wire.TaskView, ...]]:
    params = {"limit": limit, "offset": offset}
    return Call(method="GET", path="/v1/tasks", params=params, read=_models(wire.TaskView))


def upload_task(archive: bytes) -> Call[wire.TaskView]:
    """Give the gateway a task package, as a tar or zip archive."""
    return Call(
        method="POST",
        path="/v1/tasks",
        body=archive,
        content_type="application/gzip",
        read=_model(wire.TaskView),
        deadline_s=180.0,
    )


def capacity() -> Call[wire.CapacityView]:
    return Call(method="GET", path="/v1/capacity", read=_model(wire.CapacityView))


def admit(task_id: str, revision: str | None, *, deadline_s: float) -> Call[Admission]:
    """Validate a task at the gateway, once for everybody."""
    return Call(
        method="POST",
        path="/v1/admissions",
        body=_said(wire.AdmissionRequest, task={"id": task_id, "revision": revision}),
        read=lambda response: from_json(Admission, response.content),
        deadline_s=deadline_s,
    )


def prepare_tasks(
    tasks: Iterable[tuple[str, str | None]], *, client_key: str, wait_s: float = HOLD_S
) -> Call[wire.PreparationView]:
    """Have the images of tasks (id, revision) made ready; what comes back says how far it has come: see
    `preparing`."""
    refs = [{"id": task_id, "revision": revision} for task_id, revision in tasks]
    return Call(
        method="POST",
        path="/v1/tasks/prepare",
        params={"wait_s": wait_s},
        body=_said(wire.PrepareRequest, client_key=client_key, tasks=refs),
        read=_model(wire.PreparationView),
        deadline_s=wait_s + ANSWER_S,
        so_far=True,
    )


class _Preparing:
    """What to ask until all images are over, within a deadline."""

    def __init__(self, tasks: Iterable[tuple[str, str | None]], deadline_s: float) -> None:
        self.call = prepare_tasks(tasks, client_key=f"prepare-{secrets.token_hex(8)}", wait_s=LOOK_S)
        self._deadline_s = deadline_s
        self._until = time.monotonic() + deadline_s

    def over(self, view: wire.PreparationView) -> bool:
        if not view.done and time.monotonic() > self._until:
            raise SandboxError(
                f"{len(view.images)} of {view.total} images were over in {self._deadline_s:g} s.",
                fix="Look at the gateway's /v1/capacity (pull, build), and ask again: it goes on with them.",
                code="no_answer",
                phase="prepare",
            )
        return view.done


async def preparing(
    client: AsyncClient,
    tasks: Iterable[tuple[str, str | None]],
    *,
    deadline_s: float = PREPARE_DEADLINE_S,
) -> AsyncIterator[wire.PreparationView]:
    """Have the images of tasks (id, revision) made ready; how far it has come, again and again, to the
    end."""
    asking = _Preparing(tasks, deadline_s)
    over = False
    while not over:
        view = await client.send(asking.call)
        over = asking.over(view)
        yield view


def preparing_sync(
    client: Client, tasks: Iterable[tuple[str, str | None]], *, deadline_s: float = PREPARE_DEADLINE_S
) -> Iterator[wire.PreparationView]:
    """`preparing` for synchronous callers."""
    asking = _Preparing(tasks, deadline_s)
    over = False
    while not over:
        view = client.send(asking.call)
        over = asking.over(view)
        yield view


def open_session(
    *,
    client_key: str,
    task_id: str,
    revision: str | None = None,
    limits: Limits | None = None,
    group_id: str | None = None,
    group_size: int = 1,
    deadline_at: float | None = None,
    queue_timeout_s: float = 600.0,
    lease_ttl_s: float = 120.0,
    from_snapshot: str | None = None,
) -> Call[wire.SessionView]:
    """Ask for a session; what comes back may still be waiting: see `session`. `from_snapshot`: see
    `snapshot`."""
    body = _said(
        wire.OpenRequest,
        client_key=client_key,
        task={"id": task_id, "revision": revision},
        limits=limits,
        group_id=group_id,
        group_size=group_size,
        deadline_at=deadline_at,
        queue_timeout_s=queue_timeout_s,
        lease_ttl_s=lease_ttl_s,
        from_snapshot=from_snapshot,
    )
    return Call(
        method="POST",
        path="/v1/sessions",
        body=body,
        read=_model(wire.SessionView),
        deadline_s=queue_timeout_s,
        so_far=True,
    )


def session(session_id: str, *, wait_s: float = 0.0) -> Call[wire.SessionView]:
    """What it is now, or, with `wait_s`, as soon as it is ready or ended."""
    return Call(method="GET", path=_of(session_id), params={"wait_s": wait_s}, read=_model(wire.SessionView))


def lease(session_id: str, *, epoch: int, ttl_s: float) -> Call[wire.LeaseView]:
    return Call(
        method="POST",
        path=_of(session_id, "lease"),
        body=_said(wire.LeaseRequest, epoch=epoch, ttl_s=ttl_s),
        read=_model(wire.LeaseView),
        deadline_s=ttl_s,
    )


def tool(
    session_id: str,
    name: str,
    *,
    call_id: str,
    action_id: str,
    arguments: Mapping[str, Any],
    deadline_s: float,
) -> Call[tuple[Observation, bool]]:
    """A typed tool call: what was observed, and whether the work is submitted."""
    body = {"call_id": call_id, "action_id": action_id, "arguments": dict(arguments)}

    def read(response: httpx.Response) -> tuple[Observation, bool]:
        submitted = response.headers.get("x-session-submitted") == "true"
        return from_json(Observation, response.content), submitted

    return Call(
        method="POST",
        path=_of(session_id, "tools", name),
        params={"wait_s": HOLD_S},
        body=json.dumps(body).encode("ascii"),  # escapes whatever a policy wrote, lone surrogates too
        read=read,
        deadline_s=deadline_s,
    )


def run(session_id: str, body: wire.ExecBody, *, deadline_s: float | None = None) -> Call[wire.ExecView]:
    """A command; never run twice under one `exec_id`."""
    return Call(
        method="POST",
        path=_of(session_id, "exec"),
        params={"wait_s": HOLD_S},
        body=body.model_dump_json().encode(),
        read=_model(wire.ExecView),
        deadline_s=body.timeout_s + 900.0 if deadline_s is None else deadline_s,
    )


@dataclass(frozen=True, slots=True)
class Output:
    """A piece of a command's output. `ended` with empty `data`: that was all."""

    data: bytes
    ended: bool


def output(
    session_id: str,
    exec_id: str,
    *,
    stream: Literal["stdout", "stderr"] = "stdout",
    offset: int = 0,
    wait_s: float = 0.0,
) -> Call[Output]:
    """What a command that was sent with `follow` has written from a byte on; see `follow`."""
    return Call(
        method="GET",
        path=_of(session_id, "exec", exec_id, "output"),
        params={"stream": stream, "offset": offset, "wait_s": wait_s},
        read=lambda response: Output(_bytes(response), _flag(response, "x-exec-ended")),
    )


async def follow(
    client: AsyncClient,
    session_id: str,
    exec_id: str,
    *,
    stream: Literal["stdout", "stderr"] = "stdout",
    offset: int = 0,
) -> AsyncIterator[bytes]:
    """A command's output as it comes, to its end; nothing is lost or repeated when connections break."""
    while True:
        piece = await client.send(output(session_id, exec_id, stream=stream, offset=offset, wait_s=HOLD_S))
        if piece.data:
            offset += len(piece.data)
            yield piece.data
        elif piece.ended:
            return


def follow_sync(
    client: Client,
    session_id: str,
    exec_id: str,
    *,
    stream: Literal["stdout", "stderr"] = "stdout",
    offset: int = 0,
) -> Iterator[bytes]:
    """`follow` for synchronous callers."""
    while True:
        piece = client.send(output(session_id, exec_id, stream=stream, offset=offset, wait_s=HOLD_S))
        if piece.data:
            offset += len(piece.data)
            yield piece.data
        elif piece.ended:
            return


def signal(session_id: str, exec_id: str, name: str) -> Call[wire.SignalView]:
    """Signal a running command, once however often this call has to be sent; a new call is a new signal."""
    body = wire.SignalBody.model_validate({"signal": name, "signal_id": secrets.token_hex(8)})
    return Call(
        method="POST",
        path=_of(session_id, "exec", exec_id, "signal"),
        body=body.model_dump_json().encode(),
        read=_model(wire.SignalView),
    )


def put_file(session_id: str, path: str, data: bytes, *, mode: int = 0o644) -> Call[wire.FileView]:
    return Call(
        method="PUT",
        path=_of(session_id, "files"),
        params={"path": path, "mode": mode},
        body=data,
        content_type="application/octet-stream",
        read=_model(wire.FileView),
        deadline_s=180.0,
    )


def get_file(session_id: str, path: str) -> Call[bytes]:
    return Call(
        method="GET",
        path=_of(session_id, "files"),
        params={"path": path},
        read=_bytes,
        deadline_s=180.0,
    )


def file_part(session_id: str, path: str, *, offset: int) -> Call[FilePart]:
    """Part of a file from a byte on; see `download`."""
    return Call(
        method="GET",
        path=_of(session_id, "files"),
        params={"path": path, "offset": offset, "max_bytes": wire.PART_BYTES},
        read=lambda response: FilePart(
            data=response.content,
            file_bytes=int(response.headers.get("x-file-bytes", "none said")),
            state=response.headers.get("x-file-state", ""),
        ),
        deadline_s=180.0,
    )


class _Parts:
    """What to ask for until the whole file is there, and what of the answers is the caller's."""

    def __init__(self, session_id: str, path: str) -> None:
        self._session_id, self._path = session_id, path
        self._at = 0
        self._state: str | None = None
        self.left = True

    def call(self) -> Call[FilePart]:
        return file_part(self._session_id, self._path, offset=self._at)

    def take(self, part: FilePart) -> bytes:
        if part.state != (self._state or part.state) or (not part.data and self._at < part.file_bytes):
            raise SandboxError(
                f"{self._path} was changed while it was read.",
                fix="Stop what writes it, or copy it first; then read it again.",
                owner="gateway",
                code="file_changed",
                phase="read_file",
            )
        self._at, self._state = self._at + len(part.data), part.state
        self.left = self._at < part.file_bytes
        return part.data


async def download(client: AsyncClient, session_id: str, path: str) -> AsyncIterator[bytes]:
    """A file of any size that the gateway lets out, in pieces: never more than one is in memory. Raises
    `SandboxError` file_changed when they are not of one content."""
    parts = _Parts(session_id, path)
    while parts.left:
        yield parts.take(await client.send(parts.call()))


def download_sync(client: Client, session_id: str, path: str) -> Iterator[bytes]:
    """`download` for synchronous callers."""
    parts = _Parts(session_id, path)
    while parts.left:
        yield parts.take(client.send(parts.call()))


def diff(session_id: str) -> Call[wire.DiffView]:
    return Call(method="GET", path=_of(session_id, "diff"), read=_model(wire.DiffView), deadline_s=180.0)


def snapshot(
    session_id: str, *, client_key: str, ttl_s: float = 86_400.0, deadline_s: float = 300.0
) -> Call[wire.SnapshotView]:
    """Keep the workdir of a session in which no command runs, for sessions to begin from; once per key."""
    body = _said(wire.SnapshotBody, client_key=client_key, ttl_s=ttl_s)
    return Call(
        method="POST",
        path=_of(session_id, "snapshot"),
        params={"wait_s": HOLD_S},
        body=body,
        read=_model(wire.SnapshotView),
        deadline_s=deadline_s,
    )


def snapshots() -> Call[tuple[wire.SnapshotView, ...]]:
    """What is kept for the caller, the oldest first."""
    return Call(method="GET", path="/v1/snapshots", read=_models(wire.SnapshotView))


def delete_snapshot(snapshot_id: str) -> Call[wire.DeletedView]:
    """Forget a snapshot; sessions that began from it go on."""
    path = f"/v1/snapshots/{quote(snapshot_id, safe='')}"
    return Call(method="DELETE", path=path, read=_model(wire.DeletedView))


def finalize(
    session_id: str, *, termination: Termination, fault: Fault | None, deadline_s: float
) -> Call[Verdict]:
    """The verdict; the same one however often it is asked for."""
    body = {"termination": str(termination), "fault": None if fault is None else to_dict(fault)}
    return Call(
        method="POST",
        path=_of(session_id, "finalize"),
        params={"wait_s": HOLD_S},
        body=json.dumps(body).encode("ascii"),
        read=lambda response: from_json(Verdict, response.content),
        deadline_s=deadline_s,
    )


def delete(session_id: str) -> Call[wire.SessionView]:
    return Call(method="DELETE", path=_of(session_id), read=_model(wire.SessionView), deadline_s=60.0)
