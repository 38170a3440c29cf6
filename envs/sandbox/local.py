"""Sandboxes on this machine from Linux namespaces, an overlay over a shared read-only image, and a seccomp
filter.

The embedded default: no engine, no image registry, about fifteen milliseconds to a ready sandbox. What the
kernel refuses is named together with its fix; nothing is ever silently left out (control groups are the one
optional part, and `SandboxInfo.limits_enforced` says which limits hold).

Writable inside: the workdir, /tmp, /var/tmp, /dev/shm and the home, all in one tmpfs of the task's disk
size. Network: loopback only; a task that asks for more is refused here. See `zygote` for how a sandbox is
made, `agent` for how it runs commands. Every descriptor that a live sandbox costs this process: its
socket, a pidfd, the overlay's upper directory.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from agentrl.errors import SandboxError
from agentrl.types import JsonScalar, SandboxSpec, to_dict
from envs.sandbox import cgroups, oci, zygote
from envs.sandbox import namespaces as ns
from envs.sandbox.agent import Inbox
from envs.sandbox.channel import Channel, last_words
from envs.sandbox.contract import FileChange, Isolation, Mount, SandboxInfo, StockItem, StockKind
from envs.sandbox.diff import diff_overlay
from envs.sandbox.docker_janitor import owned
from envs.sandbox.images import Images
from envs.sandbox.interpreter import base_python
from envs.sandbox.live import LiveSandbox
from envs.sandbox.oci import OciImages
from envs.sandbox.pressure import not_ready
from envs.sandbox.room import Room
from envs.sandbox.shelf import NOTE, Shelf, held_while, in_order

UID_BASE = 0x6A61_0000
"""First of the 65,536 ids on this machine that stand for a sandbox's ids when the host is root: nobody's."""
HOME = "/home/policy"
OPEN_FILES = 4096
ZYGOTE_DEADLINE_S = 20.0
CHECK_DEADLINE_S = 20.0
KEEPER_DEADLINE_S = 10.0
ORPHAN_GRACE_S = 60.0
"""A sandbox that may outlive this process, and was told of no lease, ends itself so long after it."""
_BOOT = "import sys; sys.path.insert(0, sys.argv[3]); from envs.sandbox import zygote; sys.path.pop(0); {}"
_ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\npolicy:x:1000:1000:policy:/home/policy:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/:/bin/false\n",
    "group": "root:x:0:\npolicy:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "profile": "# Commands get their whole environment from the agent.\n",
    "resolv.conf": "",
    "shells": "/bin/sh\n/bin/bash\n",
}
KEPT: dict[str, StockKind] = {
    "images/dir-*": "workspace",
    "images/mount-*": "mount",
    "images/oci-workdir-*": "workdir",
    "images/oci-" + "[0-9a-f]" * 64: "system",
}
"""What is kept below the state folder."""
_SYSCTLS = (
    ("kernel.apparmor_restrict_unprivileged_userns", "0"),
    ("kernel.unprivileged_userns_clone", "1"),
)


class LocalBackend:
    """See `contract.Backend`. `state_dir` holds prepared images and, while it runs, one folder of this
    backend."""

    def __init__(self, state_dir: Path | None = None, *, python: str | None = None) -> None:
        self._state = (state_dir or Path.home() / ".local" / "state" / "agentrl").absolute()
        self._python = python or base_python()
        root = (
            os.geteuid() == 0 and ns.has_capability(ns.CAP_SYS_ADMIN) and ns.maps_range(UID_BASE, zygote.IDS)
        )
        self._uid_base = UID_BASE if root else None
        policy = UID_BASE + zygote.POLICY_ID
        owner = (policy, policy) if root else None
        self._images = Images(self._state / "images", owner)
        self._systems = OciImages(self._state / "images", owner, self._uid_base)
        self._shelf = Shelf(self._state, KEPT, counts=owned)
        self._room = Room(self, lambda: (self._state,))
        self._hierarchy = cgroups.detect()
        self._id = f"{os.getpid()}-{os.urandom(4).hex()}"
        self._folder = self._state / "run" / self._id
        self._numbers = itertools.count(1)
        self._live: set[LiveSandbox] = set()
        self._zygote: _Zygote | None = None
        self._starting = asyncio.Lock()
        self._asking = asyncio.Lock()
        """A keeper answers one question at a time."""
        self._swept = False
        self._owner: str | None = None
        self._keepers: dict[Path, _Keeper] = {}
        """Zygotes of processes that are no more, by their folder."""

    @property
    def name(self) -> str:
        return "local"

    @property
    def isolation(self) -> Isolation:
        return "namespaces"

    @property
    def limits_memory(self) -> bool:
        """Whether control groups can hold a sandbox to its memory here."""
        return self._hierarchy is not None and "memory" in self._hierarchy.parents

    def short_of(self) -> str | None:
        """See `contract.Short`."""
        return self._room.short_of()

    async def has(self, environment_dir: str) -> bool:
        """See `contract.Foreseeing`."""
        image = oci.reference(environment_dir)
        if image is not None:
            return await self._systems.has(image)
        return await self._images.has(environment_dir)

    async def stock(self, *, sizes: bool) -> tuple[StockItem, ...]:
        """See `contract.Stocking`."""
        return in_order(await asyncio.to_thread(self._shelf.stock, sizes=sizes))

    async def discard(self, item: StockItem, *, unused_s: float) -> bool:
        """See `contract.Stocking`."""
        return await asyncio.to_thread(self._shelf.discard, item.id, unused_s=unused_s)

    def check(self) -> None:
        """Make and end one sandbox, waiting for it. Raises `SandboxError` with the primitive that the
        kernel refused and the fix."""
        lower = self._folder / "check"
        self._make_folder()
        lower.mkdir()
        spec = SandboxSpec(image="check", memory_mib=64, disk_mib=8)
        name = f"{self._id}-check"
        process, control = self._spawn()
        ours, theirs = socket.socketpair()
        group = self._group(name, spec)
        try:
            with control, ours, theirs:
                _await_readable(control, CHECK_DEADLINE_S)
                control.recv(64)
                request = self._request(name, spec, lower, (), group, image="check", session="check")
                socket.send_fds(control, [json.dumps(request).encode()], [theirs.fileno()])
                theirs.close()
                _await_readable(ours, CHECK_DEADLINE_S)
                for fd in _receive_start(ours)[1]:
                    os.close(fd)
        finally:
            process.wait(CHECK_DEADLINE_S)
            group.remove()
            shutil.rmtree(self._folder, ignore_errors=True)

    async def prepare(self, environment_dir: str) -> str:
        image = oci.reference(environment_dir)

        async def make() -> str:
            if image is not None:
                return await self._systems.prepare(image)
            return await self._images.prepare(environment_dir)

        async def found() -> tuple[str, list[Path]]:
            digest = await self._room.making(make)
            return digest, [self._images.path(digest)]

        return await held_while(found, self._shelf.touch_all)

    async def create(
        self,
        spec: SandboxSpec,
        *,
        image: str,
        session: str,
        mounts: tuple[Mount, ...] = (),
        apply: tuple[FileChange, ...] = (),
        deadline_s: float = 120.0,
    ) -> LiveSandbox:
        begun = time.monotonic()
        _check_spec(spec, mounts)
        name = f"{self._id}-{next(self._numbers)}"
        note = self._folder / f"{name}{NOTE}"
        try:
            async with asyncio.timeout(deadline_s):
                await self._room.for_sandbox()
                await self._ensure_zygote()  # It holds the lock by which the note counts.

                async def found() -> tuple[_Made, list[Path]]:
                    made = await self._made_of(spec, image, mounts)
                    return made, made.things

                made = await held_while(found, lambda things: self._shelf.use(note, things))
                sandbox = await self._start(
                    name, spec, image, made.lower, made.binds, begun, session, made.system
                )
        except TimeoutError as error:
            self._shelf.ended(note)
            raise not_ready(name, deadline_s, phase="start") from error
        except BaseException:
            self._shelf.ended(note)
            raise
        return await sandbox.beginning_with(apply, deadline_s=deadline_s)

    async def _made_of(self, spec: SandboxSpec, image: str, mounts: tuple[Mount, ...]) -> _Made:
        system: oci.System | None = None
        if image.startswith(oci.PREFIX):
            system = self._systems.require(image)
            lower = await self._systems.workdir(image, spec.workdir)
        else:
            lower = self._images.require(image)
        places = [await self._images.snapshot(mount.source) for mount in mounts]
        return _Made(
            lower=lower,
            binds=tuple((str(place), mount.target) for place, mount in zip(places, mounts, strict=True)),
            system=system,
            things=[lower, *places, *([] if system is None else [Path(system.tree).parent])],
        )

    async def _start(
        self,
        name: str,
        spec: SandboxSpec,
        image: str,
        lower: Path,
        binds: tuple[tuple[str, str], ...],
        begun: float,
        session: str,
        system: oci.System | None,
    ) -> LiveSandbox:
        zygote_ = await self._ensure_zygote()
        descriptors: list[int] = []
        group: cgroups.Group | None = None
        ours, theirs = socket.socketpair()
        try:
            with contextlib.ExitStack() as given:
                sockets = [given.enter_context(theirs)]
                group = self._group(name, spec)
                request = self._request(
                    name,
                    spec,
                    lower,
                    binds,
                    group,
                    image=image,
                    session=session,
                    owner=self._owner,
                    system=system,
                )
                if self._owner is not None:
                    sockets.append(given.enter_context(_listen(request["listen"])))
                await zygote_.send(request, *sockets)
            await _readable(ours.fileno())
            started, descriptors = _receive_start(ours)
            if len(descriptors) != 2:  # The kernel leaves out what this process has no room for.
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            upper, handle = descriptors
            pid = int(started["pid"])
        except BaseException:
            await self._abandon(ours, descriptors, group)
            raise

        return await self._alive(ours, request, upper, handle, pid, group, begun)

    async def _alive(
        self,
        ours: socket.socket,
        request: zygote.Request,
        upper: int,
        handle: int,
        pid: int,
        group: cgroups.Group,
        begun: float,
        *,
        keep_on_failure: bool = False,
    ) -> LiveSandbox:
        """The sandbox behind a connection to its agent."""
        name, lower = request["id"], Path(request["lower"])

        async def end() -> None:
            self._live.discard(sandbox)
            await _kill(handle)
            os.close(handle)
            os.close(upper)
            if not group.remove(within_s=0.0):
                await asyncio.to_thread(group.remove)
            for path in (request["log"], request["listen"]):
                with contextlib.suppress(OSError):
                    os.unlink(path)
            self._shelf.ended(Path(request["folder"], f"{name}{NOTE}"))

        async def post_mortem() -> dict[str, JsonScalar]:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await _readable(handle)
                await asyncio.sleep(0.01)
            return _post_mortem(request)

        async def differ() -> tuple[FileChange, ...]:
            return await asyncio.to_thread(diff_overlay, upper, lower)

        channel = None
        try:
            channel = await Channel.attach(ours, sandbox=name, post_mortem=post_mortem)
            hello, _ = await channel.call({"op": "hello"}, deadline_s=ZYGOTE_DEADLINE_S)
        except BaseException:
            if channel is not None:
                channel.close()
            if not keep_on_failure:
                await _kill(handle)
            await self._abandon(ours, [upper, handle], group)
            raise
        info = SandboxInfo(
            id=name,
            backend=self.name,
            isolation=self.isolation,
            image_digest=request["image"],
            instance=hello["instance"],
            spec=SandboxSpec(**request["spec"]),
            limits_enforced=tuple(dict.fromkeys((*group.limits, "pids", "disk", "network"))),
            ready_ms=(time.monotonic() - begun) * 1000,
        )
        sandbox = LiveSandbox(info, channel, differ=differ, end=end, agent_pid=pid)
        self._live.add(sandbox)
        return sandbox

    async def _abandon(
        self, ours: socket.socket, descriptors: list[int], group: cgroups.Group | None
    ) -> None:
        """Give back what a sandbox that never came to life has taken. Its agent, if any, ends with its
        socket."""
        ours.close()
        for fd in descriptors:
            os.close(fd)
        if group is not None:
            await asyncio.to_thread(group.remove)

    # -- outliving this process: see `adoption.Adopting`

    def outlive(self, owner: str) -> None:
        self._owner = owner

    async def adopt(self, session: str) -> LiveSandbox | None:
        found = await self._take(session)
        if found is None:
            return None
        ours, request, upper, handle = found
        group = cgroups.Group(
            folders=tuple(request["cgroup_folders"]),
            limits=tuple(request["cgroup_limits"]),
            oom_file=request["oom_file"],
        )
        pid, now = int(request["pid"]), time.monotonic()
        return await self._alive(ours, request, upper, handle, pid, group, now, keep_on_failure=True)

    async def _take(self, session: str) -> tuple[socket.socket, zygote.Request, int, int] | None:
        async with self._asking:
            for keeper in await self._kept():
                for name in keeper.names(session):
                    taken = await asyncio.to_thread(keeper.take, name)
                    if taken is None:
                        continue
                    request, upper, handle = taken
                    try:
                        return _dial(request["listen"]), request, upper, handle
                    except OSError:  # Its agent has just ended it.
                        os.close(upper)
                        os.close(handle)
        return None

    async def forget(self) -> int:
        ended = 0
        async with self._asking:
            for keeper in await self._kept():
                ended += await asyncio.to_thread(keeper.end_rest)
        return ended

    async def _kept(self) -> list[_Keeper]:
        """The zygotes that outlived their hosts and hold sandboxes of our owner."""
        with contextlib.suppress(OSError):
            for folder in await asyncio.to_thread(lambda: list((self._state / "run").iterdir())):
                if self._owner is not None and folder != self._folder and folder not in self._keepers:
                    keeper = await asyncio.to_thread(_Keeper.connect, folder, self._owner)
                    if keeper is not None:
                        self._keepers[folder] = keeper
        return list(self._keepers.values())

    async def close(self) -> None:
        await self._room.close()
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._live)))
        for keeper in self._keepers.values():
            keeper.close()
        self._keepers.clear()
        if self._zygote is not None:
            await self._zygote.close()
            self._zygote = None
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- the zygote

    async def _ensure_zygote(self) -> _Zygote:
        async with self._starting:
            if self._zygote is None or not self._zygote.alive:
                if self._zygote is not None:
                    await self._zygote.close()
                self._sweep()
                self._make_folder()
                process, control = self._spawn()
                started = _Zygote(process, control)
                try:
                    await started.ready(self._folder / "zygote.log")
                except BaseException:
                    await started.close()
                    raise
                self._zygote = started
            return self._zygote

    def _make_folder(self) -> None:
        for name in ("root", "disk", "empty", "etc"):
            (self._folder / name).mkdir(parents=True, exist_ok=True, mode=0o755)
        for name, text in _ETC.items():
            (self._folder / "etc" / name).write_text(text)
        with contextlib.suppress(OSError):
            shutil.copyfile("/etc/ld.so.cache", self._folder / "etc/ld.so.cache")
        links = self._folder / "etc/alternatives"
        if os.path.isdir("/etc/alternatives") and not links.exists():
            ignore = shutil.ignore_patterns("*.gz")  # manual pages
            shutil.copytree("/etc/alternatives", links, symlinks=True, ignore=ignore)

    def _spawn(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = _BOOT.format("zygote.main(int(sys.argv[1]), sys.argv[2])")
        package_root = str(Path(zygote.__file__).parents[2])
        number = str(theirs.fileno())
        try:
            with theirs, (self._folder / "zygote.log").open("ab") as log:
                process = subprocess.Popen(
                    [self._python, "-I", "-S", "-c", code, number, str(self._folder), package_root],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
                    cwd="/",
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        return process, ours

    def _sweep(self) -> None:
        """Remove what backends left that were killed together with their zygote."""
        if self._swept:
            return
        self._swept = True
        with contextlib.suppress(OSError):
            for folder in (self._state / "run").iterdir():
                with contextlib.suppress(OSError), (folder / "lock").open("rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if self._hierarchy is not None:
                        self._hierarchy.sweep(f"agentrl-{folder.name}-")
                    shutil.rmtree(folder, ignore_errors=True)

    # -- what a sandbox is asked to be

    def _group(self, name: str, spec: SandboxSpec) -> cgroups.Group:
        if self._hierarchy is None:
            return cgroups.Group(folders=(), limits=(), oom_file=None)
        return self._hierarchy.create(f"agentrl-{name}", spec)

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _request(
        self,
        name: str,
        spec: SandboxSpec,
        lower: Path,
        binds: tuple[tuple[str, str], ...],
        group: cgroups.Group,
        *,
        image: str,
        session: str,
        owner: str | None = None,
        system: oci.System | None = None,
    ) -> zygote.Request:
        path = f"{zygote.TOOLS}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        given = () if system is None else system.volumes
        taken = (spec.workdir, HOME, "/tmp", "/var/tmp", "/logs", *(target for _, target in binds))
        one_user = self._uid_base is None
        return {
            "id": name,
            "owner": owner,
            "session": session,
            "image": image,
            "spec": to_dict(spec),
            "listen": str(self._folder / f"{name}.sock"),
            "folder": str(self._folder),
            "log": str(self._log(name)),
            "lower": str(lower),
            "tree": None if system is None else system.tree,
            "volumes": [path for path in given if path.rstrip("/") not in taken],
            "binds": binds,
            "workdir": spec.workdir,
            "home": HOME,
            "disk_mib": spec.disk_mib,
            "uid_base": self._uid_base,
            "python": self._python,
            "python_folders": _python_folders(self._python),
            "hidden": _site_packages(self._python),
            "cgroup_procs": group.procs,
            "cgroup_folders": group.folders,
            "cgroup_limits": group.limits,
            "oom_file": group.oom_file,
            "settings": {
                "workdir": spec.workdir,
                "home": HOME,
                "path": path if system is None else system.path,
                "env": spec.env if system is None else {**system.env, **spec.env},
                "policy_uid": None if one_user else zygote.POLICY_ID,
                "rlimits": {
                    "NOFILE": OPEN_FILES,
                    "CORE": 0,
                    "FSIZE": spec.disk_mib * 1024 * 1024,
                    # With one user the agent and its supervisors count too.
                    "NPROC": spec.pids + (8 if one_user else 0),
                },
                "orphan_grace_s": ORPHAN_GRACE_S,
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """What a sandbox is made of."""

    lower: Path
    binds: tuple[tuple[str, str], ...]
    system: oci.System | None
    things: list[Path]
    """All of it that lies below the state folder."""


def _post_mortem(request: zygote.Request) -> dict[str, JsonScalar]:
    """What the zygote, the agent's own log and the kernel say of a sandbox that ended."""
    evidence: dict[str, JsonScalar] = {}
    with contextlib.suppress(OSError):
        for line in Path(request["folder"], "exits").read_text().splitlines():
            which, _, code = line.partition(" ")
            if which == request["id"]:
                evidence["exit"] = int(code)
    evidence.update(last_words(Path(request["log"])))
    if request["oom_file"] is not None:
        with contextlib.suppress(OSError):
            for line in Path(request["oom_file"]).read_text().splitlines():
                if line.startswith("oom_kill "):
                    evidence["oom_kills"] = int(line.split()[1])
    return evidence


class _Keeper:
    """A zygote whose host is no more, and what it keeps for its owner's successor. Its answers take a
    moment: call from a thread."""

    def __init__(self, connection: socket.socket, rows: list[tuple[str, str]]) -> None:
        self._connection = connection
        self._left = dict(rows)
        """Not adopted: name to session."""

    @classmethod
    def connect(cls, folder: Path, owner: str) -> _Keeper | None:
        """None when no zygote answers there, or it keeps nothing of this owner."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(KEEPER_DEADLINE_S)
        keeper = cls(connection, [])
        try:
            with _short(str(folder / zygote.KEEPER)) as path:
                connection.connect(path)
            keeper._left = dict(keeper._ask({"list": owner}) or ())
        except OSError:
            pass
        if not keeper._left:
            connection.close()
            return None
        return keeper

    def names(self, session: str) -> list[str]:
        """The newest first."""
        return [name for name, of in reversed(self._left.items()) if of == session]

    def _ask(self, wish: dict[str, Any]) -> Any:
        self._connection.sendall(json.dumps(wish).encode())
        return json.loads(self._connection.recv(zygote.MAX_REQUEST) or b"null")

    def take(self, name: str) -> tuple[zygote.Request, int, int] | None:
        """What it was asked to be, its upper directory, its pidfd; None when it has ended. It counts as
        adopted."""
        self._left.pop(name)
        self._connection.sendall(json.dumps({"take": name}).encode())
        data, descriptors, _, _ = socket.recv_fds(self._connection, zygote.MAX_REQUEST, 2)
        request = json.loads(data or b"null")
        return None if request is None else (request, descriptors[0], descriptors[1])

    def end_rest(self) -> int:
        rest, self._left = list(self._left), {}
        ended = 0
        with contextlib.suppress(OSError):  # It has ended itself, and all that it kept.
            for name in rest:
                ended += bool(self._ask({"end": name}))
        return ended

    def close(self) -> None:
        self._connection.close()


@contextlib.contextmanager
def _short(path: str) -> Iterator[str]:
    """A name of this socket that fits: paths of sockets are short, so its folder is named by a descriptor."""
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)


def _listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _short(path) as short:
        listener.bind(short)
    listener.listen(8)
    return listener


def _dial(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        with _short(path) as short:
            connection.connect(short)
    except OSError:
        connection.close()
        raise
    return connection


class _Zygote:
    """The host's handle of the zygote process."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process = process
        self._control = control
        control.setblocking(False)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def ready(self, log: Path) -> None:
        """Wait for its word; else `SandboxError` with what it wrote to `log`."""
        try:
            async with asyncio.timeout(ZYGOTE_DEADLINE_S):
                await _readable(self._control.fileno())
                if self._control.recv(64) == zygote.READY:
                    return
        except (TimeoutError, OSError):
            pass
        said = last_words(log)
        raise SandboxError(
            f"The zygote of the local backend did not start: {said.get('log', '')}",
            fix="Run `agentrl doctor`.",
            code="zygote",
            phase="start",
            evidence=said,
        )

    async def send(self, request: zygote.Request, *sockets: socket.socket) -> None:
        data = json.dumps(request).encode()
        if len(data) > zygote.MAX_REQUEST:
            raise SandboxError(
                f"The specification of the sandbox has {len(data)} bytes.",
                fix="Make its environment variables smaller.",
                code="spec_too_large",
                phase="create",
                retryable=False,
            )
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [s.fileno() for s in sockets]))]
        while True:
            try:
                self._control.sendmsg([data], rights)
                return
            except BlockingIOError:
                await asyncio.sleep(0.002)
            except OSError as error:
                raise SandboxError(
                    f"The zygote of the local backend is gone: {error}.",
                    fix="Create the sandbox again: another zygote is started.",
                    code="zygote",
                    phase="create",
                ) from error

    async def close(self) -> None:
        with contextlib.suppress(OSError):
            self._control.send(zygote.END)
        self._control.close()
        for patience_s in (5.0, 1.0):
            until = time.monotonic() + patience_s
            while self._process.poll() is None and time.monotonic() < until:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            if self._process.poll() is None:
                self._process.kill()


# ---------------------------------------------------------------------------------------------------- waiting


async def _readable(fd: int) -> None:
    """Wait until a descriptor can be read (a pidfd: until its process ended). The caller sets the
    deadline."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


def _await_readable(connection: socket.socket, deadline_s: float) -> None:
    if not select.select([connection], [], [], deadline_s)[0]:
        raise SandboxError(
            f"The zygote did not answer within {deadline_s:g} s.",
            fix="Look at the load of this machine.",
            code="zygote",
            phase="start",
        )


async def _kill(handle: int) -> None:
    """End PID 1 of a sandbox, and with it everything inside; returns when all of it is gone."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    await _readable(handle)


def _receive_start(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The launcher's first message: two descriptors, or why there is no sandbox."""
    data, descriptors, _, _ = socket.recv_fds(connection, 65536, 4)
    messages = Inbox().feed(data)
    if not messages:
        raise SandboxError(
            "The launcher of the sandbox ended without a word.",
            fix="See zygote.log in the backend's folder.",
            code="launcher",
            phase="start",
        )
    header = messages[0][0]
    if header["event"] != "started":
        _refuse(header["error"])
    return header, descriptors


def _refuse(problem: dict[str, Any]) -> NoReturn:
    phase, primitive = problem["phase"], problem.get("primitive")
    code = problem.get("errno")
    what = primitive or problem["message"]
    why = f"{os.strerror(code)} ({errno.errorcode.get(code, code)})" if code else problem["message"]
    raise SandboxError(
        f"This kernel does not make a sandbox: {what}: {why}.",
        fix=fix_for(phase),
        code=f"no_{phase}",
        phase="start",
        evidence={"primitive": str(what), "errno": code, "step": phase},
    )


def fix_for(phase: str) -> str:
    """What an administrator can do so that a primitive works, from what this machine has set."""
    if phase == "user_namespace":
        for name, wanted in _SYSCTLS:
            with contextlib.suppress(OSError):
                now = Path("/proc/sys", *name.split(".")).read_text().strip()
                if now != wanted:
                    return f"Set `sysctl -w {name}={wanted}` (or an AppArmor profile with `userns,`)."
        with contextlib.suppress(OSError):
            if Path("/proc/sys/user/max_user_namespaces").read_text().strip() == "0":
                return "Set `sysctl -w user.max_user_namespaces=15000`."
    fixes = {
        "user_namespace": "In a container: allow unshare and mount in its seccomp profile, or privileged.",
        "mount_namespace": "Set `sysctl -w user.max_mnt_namespaces=15000`; in a container add CAP_SYS_ADMIN.",
        "pid_namespace": "Set `sysctl -w user.max_pid_namespaces=15000`; in a container add CAP_SYS_ADMIN.",
        "ipc_namespace": "Set `sysctl -w user.max_ipc_namespaces=15000 user.max_uts_namespaces=15000`.",
        "network_namespace": "Set `sysctl -w user.max_net_namespaces=15000`; AppArmor may forbid it too.",
        "mount": "Overlay over tmpfs needs Linux 5.14 as root, 6.6 as a user, and the `overlay` module: "
        "`modprobe overlay`.",
        "proc": "In a container /proc must not be masked: `--security-opt systempaths=unconfined`.",
        "pivot_root": "Allow pivot_root in the container's seccomp or AppArmor profile.",
        "seccomp": "The kernel needs CONFIG_SECCOMP_FILTER on x86-64 or arm64.",
        "cgroup": "The control groups of this process vanished; start again.",
    }
    fix = fixes.get(phase, "Run `agentrl doctor`.")
    return f"{fix} Or use the docker backend, or go without isolation: `--insecure-local`."


def _check_spec(spec: SandboxSpec, mounts: tuple[Mount, ...]) -> None:
    if spec.network != "none":
        raise SandboxError(
            f"The local backend has no network '{spec.network}'; a sandbox here reaches only itself.",
            fix="Use the docker or kubernetes backend, or set the task's network to none.",
            code="network_unsupported",
            phase="create",
            retryable=False,
        )
    for target in (spec.workdir, *(mount.target for mount in mounts)):
        parts = target.split("/")
        taken = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "proc", "dev", "etc", "")
        if not target.startswith("/") or ".." in parts or "," in target or parts[1] in taken:
            raise SandboxError(
                f"'{target}' can not be a folder of a task.",
                fix="Use an absolute path such as /app, outside of the system's folders.",
                code="bad_path",
                phase="create",
                retryable=False,
            )


def _python_folders(python: str) -> list[str]:
    """Installation prefix of the interpreter, where the system folders do not hold it already."""
    prefix = str(Path(python).parent.parent)
    return [] if prefix.startswith(("/usr", "/bin", "/lib")) else [prefix]


def _site_packages(python: str) -> list[str]:
    """Folders of installed packages: not the sandbox's business, and not part of any image."""
    found = []
    for prefix in {str(Path(python).parent.parent), "/usr", "/usr/local"}:
        for pattern in ("lib/python3*/site-packages", "lib/python3*/dist-packages"):
            found += [str(path) for path in Path(prefix).glob(pattern) if path.is_dir()]
    return sorted(found)
