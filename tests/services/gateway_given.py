"""A gateway without sandboxes or sockets: an in-memory backend that counts, and faults as a test says."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from agentrl.store import Store, TenantRow
from agentrl.types import ExecStatus, SandboxSpec, Task, Termination, Verdict, to_dict
from envs.evidence import Admission
from envs.sandbox.contract import (
    ExecRequest,
    ExecResult,
    FileChange,
    Health,
    Mount,
    SandboxInfo,
    StreamCapture,
)
from envs.sandbox.plain import PlainBackend
from envs.tasks import package
from harness.gateway import client as calls
from harness.gateway import wire
from harness.gateway.client import AsyncClient
from services.gateway.app import create_app
from services.gateway.core import Gateway, Settings

IMAGE = "sha256:memory"
TOKENS = {"ada": "token of ada", "bob": "token of bob"}
URL = "http://gateway"


def task_at(folder: Path, name: str = "one", **limits: Any) -> Task:
    """A script-graded task; the fake writes its reward."""
    package.write_task(
        folder,
        config={
            "schema_version": "1.4",
            "task": {"name": f"small/{name}"},
            "environment": {"workdir": "/app", "memory_mb": 256},
            "verifier": {"timeout_sec": 10},
            "metadata": {"agentrl": {"grader": "script", "exec_timeout_s": 5, **limits}},
        },
        instruction="Say hello.\n",
        environment={"hello.txt": "hello\n"},
        tests={"test.sh": "echo 1 > /logs/verifier/reward.txt\n"},
        solution="#!/bin/bash\ntrue\n",
    )
    return package.load_task(folder)


def stream(data: bytes) -> StreamCapture:
    return StreamCapture(
        bytes_total=len(data),
        head=data,
        tail=b"",
        truncated=False,
        sha256=hashlib.sha256(data).hexdigest(),
    )


async def until(holds: Callable[[], bool], within_s: float = 10.0) -> None:
    """Look again and again, with a deadline."""
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110  (a test looks from outside)
            await asyncio.sleep(0.002)


async def _nothing(_: str, __: str) -> None:
    await asyncio.sleep(0)


@dataclass
class MemoryBackend:
    """Sandboxes as dictionaries. `before(operation, session)` is awaited first each time; it may raise."""

    before: Callable[[str, str], Awaitable[None]] = _nothing
    reward: str = "1.0"
    name: str = "memory"
    isolation: Any = "docker"
    live: set[str] = field(default_factory=set)
    most_live: int = 0
    most_verifying: int = 0
    running: int = 0
    most_running: int = 0
    ran: list[str] = field(default_factory=list)
    """Every command that really ran, by exec id."""
    numbers: Any = field(default_factory=itertools.count)
    closed: bool = False

    async def prepare(self, environment_dir: str) -> str:
        await self.before("prepare", "")
        return IMAGE

    async def create(
        self,
        spec: SandboxSpec,
        *,
        image: str,
        session: str,
        mounts: tuple[Mount, ...] = (),
        apply: tuple[FileChange, ...] = (),
        deadline_s: float = 120.0,
    ) -> MemorySandbox:
        await self.before("create", session)
        self.live.add(session)
        verifying = sum("-verify" in name for name in self.live)
        self.most_verifying = max(self.most_verifying, verifying)
        self.most_live = max(self.most_live, len(self.live) - verifying)
        return MemorySandbox(self, spec, session, f"memory-{next(self.numbers)}", mounts, apply)

    async def close(self) -> None:
        self.closed = True


class MemorySandbox:
    def __init__(
        self,
        backend: MemoryBackend,
        spec: SandboxSpec,
        session: str,
        name: str,
        mounts: tuple[Mount, ...],
        apply: tuple[FileChange, ...],
    ) -> None:
        self._mounts = mounts
        self._backend = backend
        self._session = session
        self._files: dict[str, bytes] = {"/app/hello.txt": b"hello\n"}
        self._files |= {f"/app/{change.path}": change.content or b"" for change in apply}
        self._results: dict[str, ExecResult] = {}
        self._verifier = "-verify" in session
        self._graded = False
        self.info = SandboxInfo(
            id=name,
            backend="memory",
            isolation="docker",
            image_digest=IMAGE,
            instance=name,
            spec=spec,
            limits_enforced=(),
            ready_ms=0.0,
        )

    async def exec(self, request: ExecRequest) -> ExecResult:
        if request.exec_id in self._results:
            return self._results[request.exec_id]
        if not self._verifier:
            self._backend.running += 1
            self._backend.most_running = max(self._backend.most_running, self._backend.running)
        try:
            await self._backend.before("exec", self._session)
            self._backend.ran.append(request.exec_id)
            self._graded |= any("test.sh" in word for word in request.argv or ())
            words = (request.command or "").split()
            timed_out = False
            if words[:1] == ["sleep"]:
                timed_out = float(words[1]) > request.timeout_s
                await asyncio.sleep(min(float(words[1]), request.timeout_s))
        finally:
            if not self._verifier:
                self._backend.running -= 1
        result = ExecResult(
            exec_id=request.exec_id,
            status=ExecStatus.TIMEOUT if timed_out else ExecStatus.EXITED,
            exit_code=None if timed_out else 0,
            signal=None,
            stdout=stream((request.command or "").encode()),
            stderr=stream(b""),
            cpu_ms=0.0,
            memory_peak_kib=None,
            wall_ms=1.0,
            kill_verified=True if timed_out else None,
        )
        self._results[request.exec_id] = result
        return result

    async def follow(self, exec_id: str, *, stream: str, offset: int, max_bytes: int) -> tuple[bytes, bool]:
        if exec_id not in self._results:
            raise FileNotFoundError(exec_id)
        result = self._results[exec_id]
        data = (result.stdout if stream == "stdout" else result.stderr).head
        return data[offset : offset + max_bytes], True

    async def signal(self, exec_id: str, number: int, *, key: str | None = None) -> bool:
        return False

    async def read_file(self, path: str, *, max_bytes: int = 1 << 24) -> bytes:
        await self._backend.before("read_file", self._session)
        if path == "/logs/verifier/reward.txt" and self._graded:
            return self._backend.reward.encode()
        for mount in self._mounts:
            if path.startswith(mount.target + "/"):
                return (Path(mount.source) / path.removeprefix(mount.target + "/")).read_bytes()
        if path not in self._files:
            raise FileNotFoundError(path)
        if len(self._files[path]) > max_bytes:
            raise ValueError("larger than asked for")
        return self._files[path]

    async def write_file(self, path: str, data: bytes, *, mode: int | None = 0o644) -> None:
        await self._backend.before("write_file", self._session)
        self._files[path] = data

    async def probe(self) -> Health:
        await self._backend.before("probe", self._session)
        return Health(instance=self.info.instance, alive=True, oom_kills=0, disk_free_bytes=None, processes=1)

    async def kill_all(self) -> int:
        await self._backend.before("kill_all", self._session)
        return 0

    async def diff(self) -> tuple[FileChange, ...]:
        await self._backend.before("diff", self._session)
        changed = {p: d for p, d in sorted(self._files.items()) if p != "/app/hello.txt"}
        return tuple(
            FileChange(path=path.removeprefix("/app/"), kind="file", content=data)
            for path, data in changed.items()
        )

    async def close(self) -> None:
        self._backend.live.discard(self._session)


def tenant(name: str, **changes: Any) -> TenantRow:
    values = {"weight": 1.0, "max_sessions": 100, "max_queue": 100, "added_at": 1.0, **changes}
    return TenantRow(name=name, token_hash=hashlib.sha256(TOKENS[name].encode()).hexdigest(), **values)


def prepared_store(path: Path, tasks: list[Task], **tenants: dict[str, Any]) -> Store:
    """A store that knows both tenants and has a valid admission of every task."""
    store = Store.open(path)
    for name in TOKENS:
        store.add_tenant(tenant(name, **tenants.get(name, {})))
    for task in tasks:
        admitted(store, task, backend="memory")
    return store


def admitted(store: Store, task: Task, *, backend: str) -> None:
    """Note a valid admission of the task on a backend of this name."""
    record = Admission(
        task_id=task.id,
        revision=task.revision,
        image_digest=IMAGE,
        backend=backend,
        valid=True,
        mode="light",
        repeats=1,
        runtime_s=0.1,
        admitted_at=1.0,
    )
    store.add_admission(task.id, task.revision, valid=True, facts=to_dict(record))


@dataclass
class World:
    """A running gateway and ways to it."""

    gateway: Gateway
    backend: MemoryBackend
    store: Store
    transport: httpx.ASGITransport
    clients: dict[str, AsyncClient]

    @property
    def ada(self) -> AsyncClient:
        return self.clients["ada"]

    @property
    def bob(self) -> AsyncClient:
        return self.clients["bob"]

    def raw(self, name: str | None = "ada") -> httpx.AsyncClient:
        """Plain HTTP, for requests that no client would send."""
        headers = {"Authorization": f"Bearer {TOKENS[name]}"} if name else {}
        return httpx.AsyncClient(transport=self.transport, base_url=URL, headers=headers)

    async def quiet(self, within_s: float = 10.0) -> None:
        """Wait until every sandbox is gone and every slot is free."""
        await until(lambda: not self.backend.live and not any(self.gateway.slots.in_use.values()), within_s)


@asynccontextmanager
async def world(
    store: Store,
    tasks: list[Task],
    *,
    backend: MemoryBackend | None = None,
    clock: Any = None,
    steady: Any = None,
    uploads: Path | None = None,
    **settings: Any,
) -> AsyncIterator[World]:
    """A `clock` is also the steady one, unless that is given."""
    place = backend or MemoryBackend()
    values = {"slots": 4, "permits": 2, "verify": 1, "creates": 2, "reap_every_s": 0.01, **settings}
    more: dict[str, Any] = {"uploads": uploads}
    more |= {} if clock is None else {"clock": clock, "steady": steady or clock}
    gateway = Gateway(store=store, backend=place, tasks=tasks, settings=Settings(**values), **more)
    await gateway.start()
    transport = httpx.ASGITransport(create_app(gateway, own=False))
    clients = {name: AsyncClient(URL, token=token, way=transport) for name, token in TOKENS.items()}
    try:
        yield World(gateway, place, store, transport, clients)
    finally:
        for client in clients.values():
            await client.close()
        await gateway.stop()


async def ready(here: World, task: Task, key: str = "k", **more: Any) -> wire.SessionView:
    """A session of Ada's that can be acted in."""
    view = await here.ada.send(calls.open_session(client_key=key, task_id=task.id, **more))
    return await here.ada.send(calls.session(view.id, wait_s=30.0))


def finished(session_id: str) -> calls.Call[Verdict]:
    """The call that ends an attempt as its policy wants it to."""
    return calls.finalize(session_id, termination=Termination.FINISHED, fault=None, deadline_s=60)


@asynccontextmanager
async def on_processes(store: Store, task: Task, folder: Path) -> AsyncIterator[tuple[World, str]]:
    """A gateway over processes of this machine, and a ready session."""
    admitted(store, task, backend="plain")
    async with world(store, [task], backend=PlainBackend(folder / "state")) as here:  # type: ignore[arg-type]
        view = await here.ada.send(calls.open_session(client_key="k", task_id=task.id))
        while view.waiting:
            view = await here.ada.send(calls.session(view.id, wait_s=5))
        assert view.state == "ready", view.fault
        yield here, view.id
