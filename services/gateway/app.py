"""HTTP in front of a `Gateway`: requests are checked, answers typed, and every refusal says what to do next.

What takes longer than `wait_s` answers 202; the same request again (same key) asks for the same thing. A
dropped connection loses nothing: what was begun goes on in the gateway.

Only this module and `limits` know HTTP. (Annotations are evaluated here: FastAPI reads them.)
"""

import hashlib
import logging
import posixpath
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from agentrl.errors import BoundaryError, ConfigError, SandboxError, StoreError
from agentrl.store import TenantRow
from agentrl.types import Action, Observation, Task, Verdict, storable, to_json
from envs.evidence import Admission
from envs.sandbox.contract import FilePart, NotRegular
from envs.sandbox.diff import DiffTooLarge
from harness.gateway import wire
from services.gateway.core import Gateway, Live
from services.gateway.limits import MAX_FILE_BYTES, LimitBody
from services.gateway.refused import Over, Refused, of_boundary, of_fault
from services.gateway.snapshots import view as snapshot_view

DEFAULT_WAIT_S = 30.0
PATH_CHARS = 4096

log = logging.getLogger(__name__)

_bearer = HTTPBearer(auto_error=False, description="The token of a tenant (`agentrl serve tenant NAME`).")
Wait = Annotated[
    float,
    Query(ge=0, le=wire.MAX_WAIT_S, description="Answer 202 when it is not done within so many seconds."),
]
Name = Annotated[str, Path(min_length=1, max_length=200)]
FilePath = Annotated[
    str, Query(min_length=1, max_length=PATH_CHARS, description="Relative to the task's workdir.")
]
Epoch = Annotated[
    int | None,
    Header(
        ge=1, le=wire.MAX_EPOCH, description="Refuse the request (409) when a higher epoch holds the session."
    ),
]
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": wire.ErrorBody, "description": about}
    for status, about in {
        400: "The body is no JSON.",
        401: "No tenant's token.",
        403: "This gateway does not allow it, or the sandbox's file does not.",
        404: "No such thing of this tenant.",
        408: "The body did not arrive.",
        409: "Not possible now, or used before for something else.",
        410: "It was here, and nobody asked for it to be kept.",
        413: "Too large.",
        422: "The request is malformed.",
        429: "Too much is waiting: see Retry-After.",
        503: "The gateway or a sandbox failed: nobody's score. See `owner` and `retryable`.",
    }.items()
}
_LATER: dict[int | str, dict[str, Any]] = {
    202: {"model": wire.SessionView, "description": "Not yet: send the same request again."}
}
_AGAIN: dict[int | str, dict[str, Any]] = {
    200: {"model": wire.SessionView, "description": "It was opened before, with the same key and body."}
}
_PREPARING: dict[int | str, dict[str, Any]] = {
    202: {"model": wire.PreparationView, "description": "Not all of them yet: send the same request again."}
}
_TAKEN: dict[int | str, dict[str, Any]] = {
    200: {"model": wire.SnapshotView, "description": "It was taken before, with the same key and body."}
}


class Caller:
    """Who asks, with which token."""

    def __init__(self, tenant: TenantRow, token: str) -> None:
        self.tenant = tenant
        self.token = token


def create_app(gateway: Gateway, *, own: bool = True) -> FastAPI:
    """The application. `own`: its lifespan starts and stops the gateway."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if own:
            await gateway.start()
        try:
            yield
        finally:
            if own:
                await gateway.stop()

    app = FastAPI(
        title="agentrl environment gateway",
        summary="Sessions of tasks in sandboxes, and verdicts with their evidence.",
        version="1",
        lifespan=lifespan,
    )
    app.add_middleware(LimitBody, known=gateway.knows)
    _errors(app)
    app.include_router(_public(gateway))
    app.include_router(_sessions(gateway))
    return app


# --------------------------------------------------------------------------------------------------- refusals


def _answer(status: int, body: wire.ErrorBody, retry_after_s: float | None = None) -> JSONResponse:
    headers = {} if retry_after_s is None else {"Retry-After": str(max(1, round(retry_after_s)))}
    return JSONResponse(body.model_dump(mode="json"), status_code=status, headers=headers)


def _errors(app: FastAPI) -> None:
    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> JSONResponse:
        return _answer(error.status, error.body, error.retry_after_s)

    @app.exception_handler(Over)
    async def over(_: Request, error: Over) -> JSONResponse:
        if error.fault is not None:
            return _answer(409, of_fault(error.fault))
        body = wire.ErrorBody(
            code="session_ended",
            owner="caller",
            message=f"The session is {error.state}.",
            fix="Finalize it to get its verdict; open another to go on.",
        )
        return _answer(409, body)

    @app.exception_handler(BoundaryError)
    async def boundary(_: Request, error: BoundaryError) -> JSONResponse:
        return _answer(503, of_boundary(error))

    @app.exception_handler(StoreError)
    async def store(_: Request, error: StoreError) -> JSONResponse:
        body = wire.ErrorBody(
            code="store", owner="gateway", message=error.message, fix=error.fix, retryable=True
        )
        return _answer(503, body, 5.0)

    @app.exception_handler(ConfigError)
    async def config(_: Request, error: ConfigError) -> JSONResponse:
        body = wire.ErrorBody(code="config", owner="caller", message=error.message, fix=error.fix)
        return _answer(422, body)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        body = wire.ErrorBody(
            code="malformed",
            owner="caller",
            message=storable(f"{where}: {first['msg']}."[:1000]),
            fix="See /docs for what this request takes.",
        )
        return _answer(422, body)

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> JSONResponse:
        body = wire.ErrorBody(
            code={400: "malformed", 404: "not_found"}.get(error.status_code, "http"),
            owner="caller",
            message=str(error.detail),
            fix="See /docs for what there is.",
        )
        answer = _answer(error.status_code, body)
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(ClientDisconnect)
    async def left(_: Request, __: ClientDisconnect) -> JSONResponse:
        """Nobody reads it: the caller went away while it sent a body, of which nothing was done."""
        body = wire.ErrorBody(
            code="disconnected", owner="caller", message="The body did not come whole.", fix="Send it again."
        )
        return _answer(400, body)

    @app.exception_handler(Exception)
    async def internal(_: Request, error: Exception) -> JSONResponse:
        log.error("a request ended by an error of our own", exc_info=error)
        body = wire.ErrorBody(
            code="internal",
            owner="gateway",
            message=f"{type(error).__name__}: an error of the gateway's own.",
            fix="Report it with the gateway's log; the session is as it was.",
            retryable=False,
        )
        return _answer(500, body)


# ----------------------------------------------------------------------------------------------------- public


def _public(gateway: Gateway) -> APIRouter:
    router = APIRouter(tags=["gateway"])

    @router.get("/healthz")
    async def healthz() -> dict[str, Any]:
        """The process answers."""
        return {"ok": True, "epoch": gateway.epoch}

    @router.get("/readyz", responses={503: _ERRORS[503]})
    async def readyz() -> dict[str, Any]:
        """It can serve: started, and its log can be written."""
        why = gateway.trouble()
        if why is not None:
            raise Refused(
                503, "not_ready", why, fix="Look at the store.", owner="gateway", retryable=True,
                retry_after_s=2.0,
            )  # fmt: skip
        return {"ok": True, "epoch": gateway.epoch}

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """For Prometheus."""
        held = {
            f"{ration}_{name}": amount
            for ration, of in (
                ("session", gateway.slots),
                ("run", gateway.permits),
                ("verify", gateway.verification),
            )
            for name, amount in of.in_use.items()
        }
        pool = gateway.pool()
        if pool is not None:
            gateway.metrics.pool(pool)
        page = gateway.metrics.page(held, gateway.leaked, gateway.limiters.views())
        return Response(page, media_type="text/plain; version=0.0.4")

    return router


# --------------------------------------------------------------------------------------------------- sessions


def _sessions(gateway: Gateway) -> APIRouter:
    router = APIRouter(prefix="/v1", responses=_ERRORS)

    async def caller(
        credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    ) -> Caller:
        if credentials is None:
            raise Refused(
                401,
                "unauthorized",
                "No bearer token.",
                fix="Send Authorization: Bearer TOKEN; make one with agentrl serve tenant NAME.",
            )
        return Caller(await gateway.tenant_of(credentials.credentials), credentials.credentials)

    Who = Annotated[Caller, Depends(caller)]

    async def live(session_id: Name, who: Who, x_lease_epoch: Epoch = None) -> Live:
        return await gateway.get(who.tenant, session_id, token=who.token, lease_epoch=x_lease_epoch)

    Session = Annotated[Live, Depends(live)]

    def later(one: Live) -> JSONResponse:
        return JSONResponse(gateway.view(one).model_dump(mode="json"), status_code=202)

    @router.get("/environments", tags=["tasks"])
    async def environments(_: Who) -> list[wire.EnvironmentView]:
        """Suites of tasks, and where they run."""
        names = sorted({task_id.partition("/")[0] for task_id in gateway.tasks})
        suites = {n: [t for t in gateway.tasks.values() if t.id.partition("/")[0] == n] for n in names}
        return [
            wire.EnvironmentView(
                name=name,
                tasks=len(of),
                tools=sorted({tool for task in of for tool in task.tools}),
                backend=gateway.backend.name,
                isolation=gateway.backend.isolation,
            )
            for name, of in suites.items()
        ]

    @router.get("/tasks", tags=["tasks"])
    async def tasks(
        _: Who,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        offset: Annotated[int, Query(ge=0, le=1 << 31)] = 0,
    ) -> list[wire.TaskView]:
        """Tasks by id."""
        found = [gateway.tasks[task_id] for task_id in sorted(gateway.tasks)[offset : offset + limit]]
        return [_task_view(gateway, task) for task in found]

    @router.post(
        "/tasks",
        tags=["tasks"],
        status_code=201,
        responses={200: {"model": wire.TaskView, "description": "It was here already."}},
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/gzip": {"schema": {"type": "string", "format": "binary"}}},
            }
        },
    )
    async def upload_task(_: Who, request: Request, response: Response) -> wire.TaskView:
        """Give the gateway a task: its package as one archive (`tar -C FOLDER -czf - .`, or zip).

        Every tenant can use it from now on. 200: it was here already. An id is one revision for ever.
        """
        task, new = await gateway.upload(await request.body())
        if not new:
            response.status_code = 200
        return _task_view(gateway, task)

    @router.post("/tasks/prepare", tags=["tasks"], responses=_PREPARING)
    async def prepare_tasks(
        who: Who, body: wire.PrepareRequest, response: Response, wait_s: Wait = DEFAULT_WAIT_S
    ) -> wire.PreparationView:
        """Have the images of tasks pulled, built or unpacked now, before any session waits for them.

        One status per distinct image. 202: not all of them are over; the same request again says how far it
        has come. An image that failed ends no other, and is tried again under a new `client_key`.
        """
        view = await gateway.prepare_images(who.tenant.name, body, wait_s=wait_s)
        if not view.done:
            response.status_code = 202
        return view

    @router.post("/admissions", tags=["tasks"], response_model=Admission)
    async def admissions(who: Who, body: wire.AdmissionRequest) -> Any:
        """Validate a task, once for everybody: its solution passes, doing nothing fails. Can take minutes."""
        return await gateway.admission(who.tenant.name, gateway.task(body.task))

    @router.get("/capacity", tags=["gateway"])
    async def capacity(who: Who) -> wire.CapacityView:
        """Back-pressure as numbers: slots, permits, verification, the caller's queue, limiters, breaker."""
        return gateway.capacity(who.tenant.name)

    @router.post("/sessions", tags=["sessions"], status_code=201, responses=_AGAIN | _LATER)
    async def open_session(who: Who, body: wire.OpenRequest, response: Response) -> wire.SessionView:
        """Ask for a session: 201 when admitted, 202 with its place when it waits.

        The same `client_key` with the same body is the same session; with another body 409.
        """
        one, new = await gateway.open(who.tenant, who.token, body)
        if one.state == "queued":
            response.status_code = 202
        elif not new:
            response.status_code = 200
        return gateway.view(one)

    @router.get("/sessions/{session_id}", tags=["sessions"])
    async def session(one: Session, wait_s: Wait = 0.0) -> wire.SessionView:
        """What it is now. With `wait_s`: as soon as it is ready or ended."""
        if wait_s:
            await gateway.settled(one, wait_s)
        return gateway.view(one)

    @router.post("/sessions/{session_id}/lease", tags=["sessions"])
    async def lease(one: Session, body: wire.LeaseRequest) -> wire.LeaseView:
        """Hold it for `ttl_s` more; any other request renews the lease too. A stale epoch is refused."""
        gateway.lease(one, body)
        return gateway.lease_view(one)

    @router.post(
        "/sessions/{session_id}/tools/{name}", tags=["act"], response_model=Observation, responses=_LATER
    )
    async def tool(one: Session, name: Name, body: wire.ToolRequest, wait_s: Wait = DEFAULT_WAIT_S) -> Any:
        """Call a typed tool. What the policy gets wrong is an observation; an error is never the policy's."""
        action = Action(id=body.action_id or body.call_id, tool=name, arguments=body.arguments)
        seen = await gateway.call(one, action, call_id=body.call_id, wait_s=wait_s)
        if seen is None:
            return later(one)
        answer = _record(seen)
        submitted = one.session is not None and one.session.submitted  # a whole view costs as much as a call
        answer.headers["X-Session-Submitted"] = str(submitted).lower()
        return answer

    @router.post("/sessions/{session_id}/exec", tags=["act"], response_model=wire.ExecView, responses=_LATER)
    async def run(one: Session, body: wire.ExecBody, wait_s: Wait = DEFAULT_WAIT_S) -> Any:
        """Run a command. The same `exec_id` is never run twice."""
        done = await gateway.exec(one, body, wait_s=wait_s)
        return later(one) if done is None else done

    @router.get(
        "/sessions/{session_id}/exec/{exec_id}",
        tags=["act"],
        response_model=wire.ExecView,
        responses=_LATER,
    )
    async def ran(one: Session, exec_id: Name, wait_s: Wait = 0.0) -> Any:
        """The result of a command that was sent before."""
        done = await gateway.exec_again(one, exec_id, wait_s=wait_s)
        return later(one) if done is None else done

    @router.get(
        "/sessions/{session_id}/exec/{exec_id}/output",
        tags=["act"],
        response_class=Response,
        responses={200: {"content": {"application/octet-stream": {}}}},
    )
    async def output(
        one: Session,
        exec_id: Name,
        stream: Literal["stdout", "stderr"] = "stdout",
        offset: Annotated[int, Query(ge=0, le=1 << 40)] = 0,
        follow: bool = False,
        wait_s: Wait = 0.0,
    ) -> Response:
        """Output of a command that was sent with `follow`, from a byte on, while it runs and after.

        What there is now (with `wait_s`: as soon as there is some), and in the headers `X-Next-Offset` and
        `X-Exec-Ended`: ask again from there until an empty answer that has ended. With `follow=true` one
        answer goes on until the command ends; if it is cut, go on from the bytes you have.
        """
        look = partial(gateway.follow, one, exec_id, stream=stream)
        try:
            data, ended = await look(offset=offset, wait_s=wait_s)
        except ValueError as error:
            raise Refused(410, "forgotten", f"{error}."[:1000], fix="Send it with follow: true.") from error
        if not follow:
            headers = {"X-Next-Offset": str(offset + len(data)), "X-Exec-Ended": str(ended).lower()}
            return Response(data, media_type="application/octet-stream", headers=headers)

        async def rest() -> AsyncIterator[bytes]:
            at, piece, over = offset, data, ended
            while piece or not over:
                yield piece
                at += len(piece)
                piece, over = await look(offset=at, wait_s=DEFAULT_WAIT_S)

        return StreamingResponse(rest(), media_type="application/octet-stream")

    @router.post("/sessions/{session_id}/exec/{exec_id}/signal", tags=["act"])
    async def send_signal(one: Session, exec_id: Name, body: wire.SignalBody) -> wire.SignalView:
        """Signal the process group of a running command. The same `signal_id` is never sent twice."""
        number = signal.Signals[f"SIG{body.signal}"].value
        return wire.SignalView(running=await gateway.signal(one, exec_id, number, body.signal_id))

    @router.put("/sessions/{session_id}/files", tags=["act"])
    async def put_file(
        one: Session,
        request: Request,
        path: FilePath,
        mode: Annotated[int, Query(ge=0, le=0o777)] = 0o644,
    ) -> wire.FileView:
        """Write the body to a file, atomically, as the policy's user."""
        inside = _inside(path)
        data = await request.body()

        async def write(session: Any) -> bool:
            await session.write_file(inside, data, mode=mode)
            return True

        await _of_file(gateway, one, "write_file", inside, write)
        return wire.FileView(path=inside, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    @router.get(
        "/sessions/{session_id}/files",
        tags=["act"],
        response_class=Response,
        responses={200: {"content": {"application/octet-stream": {}}}},
    )
    async def get_file(
        one: Session,
        path: FilePath,
        offset: Annotated[
            int | None, Query(ge=0, le=1 << 40, description="A part of it, from this byte on.")
        ] = None,
        max_bytes: Annotated[
            int, Query(ge=1, le=wire.PART_BYTES, description="Of a part.")
        ] = wire.PART_BYTES,
    ) -> Response:
        """The bytes of a file as the policy sees it; a large one in parts, with `offset`.

        In the headers of a part: `X-File-Bytes`, the size of the whole, and `X-File-State`, which is another
        when the file was changed between two parts. Ask again from there until `X-File-Bytes` are read.
        """
        inside = _inside(path)
        if offset is not None:

            async def read_part(session: Any) -> FilePart:
                try:
                    got: FilePart = await session.read_part(inside, offset=offset, max_bytes=max_bytes)
                except SandboxError as error:
                    if error.code == "unsupported":  # of the backend: nothing has happened to the session
                        raise Refused(409, error.code, error.message, fix=error.fix or "") from error
                    raise
                return got

            part = await _of_file(gateway, one, "read_file", inside, read_part)
            if part.file_bytes > gateway.settings.download_mib * 2**20:
                raise Refused(
                    413,
                    "file_too_large",
                    f"{inside} has {part.file_bytes} bytes, more than {gateway.settings.download_mib:g} MiB.",
                    fix="Pack or split it in the sandbox, or serve with a higher --download-mib.",
                )
            headers = {"X-File-Bytes": str(part.file_bytes), "X-File-State": part.state}
            return Response(part.data, media_type="application/octet-stream", headers=headers)

        async def read(session: Any) -> bytes:
            raw: bytes = await session.read_file(inside, max_bytes=MAX_FILE_BYTES)
            return raw

        raw = await _of_file(gateway, one, "read_file", inside, read)
        return Response(raw, media_type="application/octet-stream")

    @router.get("/sessions/{session_id}/diff", tags=["act"])
    async def diff(one: Session) -> wire.DiffView:
        """Changes of the workdir against the image, taken from outside the sandbox."""
        try:
            changes = await gateway.once(one, "diff", lambda session: session.diff())
        except DiffTooLarge as error:
            raise Refused(
                413, error.code, error.message, fix="Remove what need not be kept, such as caches and logs."
            ) from error
        return wire.DiffView(changes=[wire.ChangeView.of(change) for change in changes])

    @router.post(
        "/sessions/{session_id}/snapshot",
        tags=["act"],
        status_code=201,
        response_model=wire.SnapshotView,
        responses=_TAKEN | _LATER,
    )
    async def snapshot(
        one: Session, body: wire.SnapshotBody, response: Response, wait_s: Wait = DEFAULT_WAIT_S
    ) -> Any:
        """Keep the workdir as it is, for sessions of the same task to begin from (`from_snapshot`).

        It holds the changes of the workdir against the image, taken from outside the sandbox; refused while
        a command runs. The same `client_key` with the same body is the same snapshot, also after the session
        has ended. It is the tenant's until it is deleted or `ttl_s` is over, counted from now.
        """
        made = await gateway.snapshot(one, body, wait_s=wait_s)
        if made is None:
            return later(one)
        row, new = made
        response.status_code = 201 if new else 200
        return snapshot_view(row)

    @router.get("/snapshots", tags=["sessions"])
    async def snapshots(who: Who) -> list[wire.SnapshotView]:
        """What is kept for the caller, the oldest first."""
        return [snapshot_view(row) for row in await gateway.snapshots.of(who.tenant.name)]

    @router.delete("/snapshots/{snapshot_id}", tags=["sessions"])
    async def delete_snapshot(who: Who, snapshot_id: Name) -> wire.DeletedView:
        """Forget a snapshot. Sessions that began from it go on. Idempotent."""
        return wire.DeletedView(deleted=await gateway.snapshots.remove(who.tenant.name, snapshot_id))

    @router.post(
        "/sessions/{session_id}/finalize", tags=["sessions"], response_model=Verdict, responses=_LATER
    )
    async def finalize(one: Session, who: Who, body: wire.FinalizeBody, wait_s: Wait = DEFAULT_WAIT_S) -> Any:
        """Judge it: the signed verdict. Asked again, the same one, also when it ended otherwise."""
        verdict = await gateway.finalize(one, body.termination, body.fault, wait_s=wait_s)
        if verdict is None:
            return later(one)
        return _record(gateway.signed(one, verdict, who.token))

    @router.delete("/sessions/{session_id}", tags=["sessions"])
    async def delete(one: Session) -> wire.SessionView:
        """End it now, without a reward unless it was judged. Idempotent."""
        await gateway.cancel(one)
        return gateway.view(one)

    return router


def _task_view(gateway: Gateway, task: Task) -> wire.TaskView:
    return wire.TaskView(
        id=task.id,
        revision=task.revision,
        split=str(task.split),
        tools=list(task.tools),
        instruction=task.instruction,
        admitted=gateway.admitted(task),
    )


def _record(record: Observation | Verdict) -> Response:
    """Canonical JSON, byte for byte: a verdict's signature is over it."""
    return Response(to_json(record), media_type="application/json")


def _inside(path: str) -> str:
    """A normal path below the workdir. What symbolic links do is the sandbox's to contain."""
    normal = posixpath.normpath(path)
    if "\0" in path or normal.startswith(("/", "../")) or normal in (".", ".."):
        raise Refused(
            422,
            "path_outside",
            f"{path!r:.200} is no path below the task's workdir.",
            fix="Give a relative path without .. and NUL.",
        )
    try:
        normal.encode()
    except UnicodeEncodeError as error:
        raise Refused(422, "path_encoding", "The path is not UTF-8.", fix="Use valid text.") from error
    return normal


async def _of_file(gateway: Gateway, one: Live, what: str, path: str, work: Any) -> Any:
    try:
        return await gateway.once(one, what, work)
    except NotRegular as error:
        why = f"{path} is a pipe, a socket or a device."
        raise Refused(409, "not_regular", why, fix="Look at it with exec.") from error
    except FileNotFoundError as error:
        raise Refused(404, "no_file", f"There is no {path}.", fix="Look with GET …/diff or ls.") from error
    except PermissionError as error:
        raise Refused(403, "no_permission", f"No permission for {path}.", fix="chmod it first.") from error
    except IsADirectoryError as error:
        raise Refused(409, "is_a_folder", f"{path} is a folder.", fix="Name a file in it.") from error
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise Refused(409, "file", f"{path}: {why}.", fix="Correct the path.") from error
    except ValueError as error:
        raise Refused(
            413, "file_too_large", f"{path}: {error}"[:1000], fix="Read it in parts, with offset=0 and on."
        ) from error
