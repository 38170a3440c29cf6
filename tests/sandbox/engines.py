"""What tests of the Docker backend need: the engine, or why there is none; and a proxy in front of it that
breaks things on purpose."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from agentrl.errors import SandboxError
from envs.sandbox.contract import Sandbox
from envs.sandbox.docker import DockerBackend
from envs.sandbox.engine import socket_path

Act = Literal["delay", "never", "drop_answer", "refuse", "late"]
"""`late`: handed on after `seconds`, though the asker may be gone by then."""


def docker(*words: str, host: str | None = None) -> str:
    """The engine's own command line, as an outsider would use it; `host` is the socket of another engine."""
    to = [] if host is None else ["-H", f"unix://{host}"]
    done = subprocess.run(["docker", *to, *words], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def engine_or_skip() -> str:
    """The engine's socket; skips the test when none of its sandboxes can be made here."""
    if shutil.which("docker") is None:
        pytest.skip("no docker command")
    try:
        backend = DockerBackend(Path("unused"))
        backend.check()
        return socket_path()
    except SandboxError as error:
        pytest.skip(str(error))


def kill_container(box: Sandbox) -> None:
    docker("kill", box.info.id)


def containers_of(backend: DockerBackend, host: str | None = None) -> list[str]:
    """Names of every container that carries this backend's label, dead or alive."""
    label = f"label=agentrl.backend={backend.id}"
    return docker("ps", "-a", "--filter", label, "--format", "{{.Names}}", host=host).split()


def mounts_below(folder: Path) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line.split()[4] for line in lines if line.split()[4].startswith(str(folder))]


_BEHIND: dict[str, str] = {}
"""Engine by proxy: a test that waits for the engine's command line can not serve it meanwhile."""


@dataclass
class Rule:
    """What happens to requests whose first line contains `route`, `times` times."""

    route: str
    act: Act
    times: int = 10**9
    seconds: float = 0.0
    hits: int = 0


@dataclass
class Proxy:
    """A unix socket in front of the engine's. One request per connection, as our client does it."""

    path: str
    engine: str
    rules: list[Rule] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    in_flight: dict[str, int] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            line = head.split(b"\r\n")[0].decode()
            self.seen.append(line)
            rule = next((r for r in self.rules if r.route in line and r.hits < r.times), None)
            kind = "start" if "/start" in line else "create" if "/containers/create" in line else "other"
            self.in_flight[kind] = self.in_flight.get(kind, 0) + 1
            self.peak[kind] = max(self.peak.get(kind, 0), self.in_flight[kind])
            with contextlib.ExitStack() as counted:
                counted.callback(self._count_down, kind)
                await self._pass(head, reader, writer, rule, answered=counted.close)

    def _count_down(self, kind: str) -> None:
        self.in_flight[kind] -= 1

    async def _pass(
        self,
        head: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        rule: Rule | None,
        answered: Callable[[], None],
    ) -> None:
        """`answered` is called as the engine's answer begins, before the client can know of it."""
        if rule is not None:
            rule.hits += 1
            if rule.act == "never":
                await asyncio.sleep(3600)
            if rule.act == "refuse":
                writer.write(
                    b"HTTP/1.1 500 Server Error\r\nContent-Type: application/json\r\n"
                    b'Content-Length: 18\r\n\r\n{"message":"rule"}'
                )
                await writer.drain()
                return
            if rule.act in ("delay", "late"):
                await asyncio.sleep(rule.seconds)
        there, back = await asyncio.open_unix_connection(self.engine)
        back.write(head)
        forward = asyncio.create_task(_pump(reader, back))
        try:
            if rule is not None and rule.act in ("drop_answer", "late"):
                await there.read(1)  # The engine has done it, and nobody hears.
                return
            backward = asyncio.create_task(_pump(there, writer, heard=answered))
            try:
                await asyncio.wait((forward, backward), return_when=asyncio.FIRST_COMPLETED)
            finally:
                backward.cancel()
                await asyncio.gather(backward, return_exceptions=True)
        finally:
            forward.cancel()
            back.close()
            await asyncio.gather(forward, return_exceptions=True)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _pump(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, heard: Callable[[], None] | None = None
) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await source.read(1 << 16):
            if heard is not None:
                heard()
            target.write(data)
            await target.drain()


@asynccontextmanager
async def proxied(folder: Path) -> AsyncIterator[Proxy]:
    path = str(folder / f"p{os.urandom(3).hex()}.sock")
    proxy = Proxy(path, socket_path())
    _BEHIND[path] = proxy.engine
    server = await asyncio.start_unix_server(proxy.accept, path)
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()


@dataclass
class PrivateEngine:
    """An engine of a test's own, which may be killed, restarted and filled up.

    It runs beside this machine's and shares nothing with it but the kernel and the runtime's program.
    """

    folder: Path
    keeps_containers: bool
    """The engine's `--live-restore`: containers go on without it."""
    _daemon: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> str:
        return str(self.folder / "dd.sock")

    def start(self) -> None:
        """Returns when it answers."""
        runtimes = json.loads(docker("info", "--format", "{{json .Runtimes}}"))
        name = docker("info", "--format", "{{.DefaultRuntime}}")
        runtime = [f"--default-runtime={name}"]
        if name not in ("runc", "io.containerd.runc.v2"):
            runtime.append(f"--add-runtime={name}={runtimes[name]['path']}")
        places = [
            f"--{key}={self.folder / value}"
            for key, value in {"data-root": "data", "exec-root": "exec", "pidfile": "pid"}.items()
        ]
        apart = ["--bridge=none", "--iptables=false", "--config-file", str(self.folder / "daemon.json")]
        (self.folder / "daemon.json").write_text("{}")
        restore = ["--live-restore"] if self.keeps_containers else []
        for stale in ("pid", "exec/containerd/containerd.pid"):  # Of a killed one: it may name a zombie.
            (self.folder / stale).unlink(missing_ok=True)
        with (self.folder / "log").open("ab") as log:
            # In a network of its own: without a bridge it would take away that of the machine's engine.
            daemon = ["unshare", "--net", "dockerd", "-H", f"unix://{self.socket}"]
            self._daemon = subprocess.Popen(
                [*daemon, *places, *apart, *runtime, *restore],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until = time.monotonic() + 60
        while subprocess.run(
            ["docker", "-H", f"unix://{self.socket}", "version"], capture_output=True, timeout=60, check=False
        ).returncode:
            if self._daemon.poll() is not None or time.monotonic() > until:
                said = (self.folder / "log").read_text(errors="backslashreplace")[-2000:]
                self.remove()
                pytest.skip(f"a second engine does not start here: {said}")
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL, to the daemon alone: what holds its containers is another process."""
        assert self._daemon is not None
        self._daemon.kill()
        self._daemon.wait()

    def remove(self) -> None:
        """The daemon, the processes that hold its containers, its mounts and its files."""
        if self._daemon is not None:
            self._daemon.terminate()
            try:
                self._daemon.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
        for pid in _processes_that_name(str(self.folder / "exec")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for mount in sorted(mounts_below(self.folder), reverse=True):
            subprocess.run(["umount", "-l", mount], check=False, capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def _processes_that_name(words: str) -> list[int]:
    """Processes with this in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and words.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


@contextlib.contextmanager
def private_engine(
    *, keeps_containers: bool = False, disk: Callable[[Path], AbstractContextManager[Path]] | None = None
) -> Iterator[PrivateEngine]:
    """Skips where no second engine can run. Its folder is not the test's: a socket's path must be short.
    `disk` mounts one of its own for its images and containers."""
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        pytest.skip("a second engine needs root and the engine's own program, dockerd")
    engine = PrivateEngine(Path(tempfile.mkdtemp(prefix="dd-")), keeps_containers)
    with contextlib.ExitStack() as mounted:
        try:
            if disk is not None:
                mounted.enter_context(disk(engine.folder / "data"))
            engine.start()
            yield engine
        finally:
            engine.remove()


@asynccontextmanager
async def opened(
    state: Path, host: str | None = None, *, warm: int = 0, **options: float
) -> AsyncIterator[DockerBackend]:
    """A backend that leaves nothing, whatever happened in between."""
    backend = DockerBackend(state, host=None if host is None else f"unix://{host}", **options)
    backend.keep_warm(warm)
    try:
        yield backend
    finally:
        await backend.close()
    assert containers_of(backend, _BEHIND.get(host or "", host)) == []
    assert mounts_below(state) == []
    assert backend.leaked == 0


async def image_of(backend: DockerBackend, state: Path) -> str:
    folder = state / "environment"
    if not folder.exists():  # Others may be reading it just now.
        folder.mkdir()
        (folder / "app.py").write_text("print('hello')\n")
    return await backend.prepare(str(folder))
