"""Sandboxes as hardened Docker containers on an engine of this machine.

The engine creates, starts, kills and removes; everything else goes to the agent, PID 1 of the container, over
a unix socket in a folder that only it and this process share. So a slow, frozen or restarted engine stops no
command, and no command's time contains the engine's. A container: no network, no published port, read-only
system, all capabilities dropped but the eight with which the agent becomes the policy user (who has none), no
new privileges, the engine's seccomp profile and ours on top, memory without swap, processes, CPU and disk
limited, no log driver, no restart, the image by id.

Invariants: a create whose answer was lost is found again by the container's name, never made twice; whatever
was made is removed, at once or by retries that `leaked` counts; only containers that carry this backend's
label are touched, and others only when `_orphaned` says that nobody owns them any more. A container that
someone restarts does not come back to life: its start file is gone, and its agent was another instance.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import hashlib
import itertools
import json
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import httpx

from agentrl.config import environment
from agentrl.errors import BoundaryError, SandboxError, SandboxLost
from agentrl.types import JsonScalar, SandboxSpec, from_json, to_json
from envs.sandbox import docker_disk, docker_init, docker_outlive
from envs.sandbox import namespaces as ns
from envs.sandbox.agent import Inbox, frames
from envs.sandbox.cgroups import RESERVED_MEMORY_MIB
from envs.sandbox.channel import Channel, last_words
from envs.sandbox.contract import (
    FileChange,
    Isolation,
    Mount,
    SandboxInfo,
    StockItem,
    StockKind,
    checked_multiplier,
)
from envs.sandbox.diff import diff_overlay
from envs.sandbox.docker_disk import HOME, POLICY_ID
from envs.sandbox.docker_images import PYTHON, TOOLS, DockerImages, Prepared
from envs.sandbox.docker_stock import ENGINES
from envs.sandbox.engine import API, PING_DEADLINE_S, Engine, EngineRefused, EngineUnknown, socket_path
from envs.sandbox.images import require_room
from envs.sandbox.live import LiveSandbox
from envs.sandbox.pressure import QUEUE_DEADLINE_S, Deadline, Pressure, not_ready, waited_in_vain
from envs.sandbox.room import Room
from envs.sandbox.shelf import NOTE, Shelf, held_while, in_order
from envs.sandbox.warm import Kind, PoolState, WarmPool

P = ParamSpec("P")
T = TypeVar("T")

LABEL = "agentrl"
CREATES_PER_CORE = 2
RESERVED_PIDS = 4
"""Beside the policy's own: the agent, a supervisor, and the next one."""
OPEN_FILES = 4096
ORPHAN_GRACE_S = 60.0
"""A sandbox that nobody is connected to ends itself after this, with or without an engine."""
LEASE_S = 7200.0
INFO_DEADLINE_S = 15.0
ADOPT_DEADLINE_S = 20.0
CREATE_DEADLINE_S = 60.0
SHUTDOWN_DEADLINE_S = 0.5
KILL_DEADLINE_S = 0.4
"""What is left of the second in which a sandbox closes."""
REMOVE_DEADLINE_S = 20.0
REMOVALS_AT_ONCE = 4
LATE_LOOKS = 4
"""For a container whose create was given up: after 0.2, 0.6, 1.4 and 3 s."""
MAX_PAUSE_S = 30.0
CLOSE_DEADLINE_S = 30.0
WARM_AGE_S = 3600.0
"""A container that waited longer for somebody who asks for it is ended."""
WARM_DEADLINE_S = 120.0
HAND_OUT_DEADLINE_S = 5.0
"""For a container that waited to show that it is as it was."""
KEPT: dict[str, StockKind] = {
    "images/dir-*": "workspace",
    "images/mount-*": "mount",
    "workdirs/[0-9a-f]*": "workdir",
}
"""What is kept below the state folder, beside the engine's own images."""
_LOOK_S = 0.25
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TAKEN = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "proc", "dev", "etc", "sys", "")


class DockerBackend:
    """See `contract.Backend`. Belongs to one event loop.

    `state_dir` holds image copies and, while it runs, one folder of this backend; the engine must see it
    under the same path. `base_image` (default: `AGENTRL_DOCKER_BASE`, else one made of this machine's
    programs) lies under environment folders that bring only files.
    """

    def __init__(
        self,
        state_dir: Path | None = None,
        *,
        host: str | None = None,
        base_image: str | None = None,
        lease_s: float = LEASE_S,
        orphan_grace_s: float = ORPHAN_GRACE_S,
        creates_at_once: int | None = None,
        time_multiplier: float | None = None,
    ) -> None:
        state = (state_dir or Path.home() / ".local" / "state" / "agentrl").absolute() / "docker"
        self._engine = Engine(socket_path(host))
        self.time_multiplier = checked_multiplier(
            time_multiplier or environment("DOCKER_TIME_MULTIPLIER"), "AGENTRL_DOCKER_TIME_MULTIPLIER"
        )
        """See `contract.Slower`: of the engine's default runtime."""
        self._state = state
        self.id = f"{os.getpid()}-{os.urandom(4).hex()}"
        self.pressure = Pressure(creates_at_once or CREATES_PER_CORE * (os.cpu_count() or 1))
        """Of everything that this backend starts on the engine, sandboxes and probes of images alike."""
        self._images = DockerImages(
            self._engine,
            state,
            owner=(POLICY_ID, POLICY_ID) if os.geteuid() == 0 else None,
            base_image=base_image,
            pressure=self.pressure,
            require_room=self._require_room,
        )
        self._shelf = Shelf(state, KEPT, counts=lambda _: True)  # containers outlive whoever holds a lock
        self._room = Room(self, self._disks)
        self._lease_s = lease_s
        self._orphan_grace_s = orphan_grace_s
        self._folder = state / "run" / self.id
        self._lock: int | None = None
        self._numbers = itertools.count(1)
        self._live: set[LiveSandbox] = set()
        self._removals: dict[str, asyncio.Task[None]] = {}
        self._failed_removals: set[str] = set()
        self._removing = asyncio.Semaphore(REMOVALS_AT_ONCE)
        self._facts: dict[str, Any] | None = None
        self._sweep: asyncio.Task[int] | None = None
        self._owner: str | None = None
        self._estate: docker_outlive.Estate | None = None
        self._janitor: docker_outlive.Janitor | None = None
        self._asking = asyncio.Lock()
        self._pool: WarmPool[_Launched] | None = None

    @property
    def name(self) -> str:
        return "docker"

    @property
    def isolation(self) -> Isolation:
        return "docker"

    @property
    def leaked(self) -> int:
        """Containers whose removal has failed and is being tried again."""
        return len(self._failed_removals)

    def short_of(self) -> str | None:
        """See `contract.Short`: the disks of the state folder and of the engine, where that is here."""
        return self._room.short_of()

    def _disks(self) -> list[Path]:
        root = (self._facts or {}).get("DockerRootDir")
        return [self._state, *([] if not root else [Path(root)])]

    async def _require_room(self) -> None:
        """Before something new is brought to the engine: nothing that is there waits for what it says."""
        await self._know()
        for disk in self._disks():
            require_room(disk)

    async def has(self, environment_dir: str) -> bool:
        """See `contract.Foreseeing`."""
        return await self._images.has(environment_dir)

    async def stock(self, *, sizes: bool) -> tuple[StockItem, ...]:
        """See `contract.Stocking`. Of the engine's images only those that this program brought to it."""
        await self._know()
        if sizes:  # Somebody asks who has time: folders of dead backends need nothing.
            await self.reap()
        here = await asyncio.to_thread(self._shelf.stock, sizes=sizes)
        return in_order([*here, *await self._images.stock(self._disks()[-1])])

    async def discard(self, item: StockItem, *, unused_s: float) -> bool:
        """See `contract.Stocking`."""
        if item.id.startswith(ENGINES):
            return await self._images.discard(item, unused_s=unused_s)
        return await asyncio.to_thread(self._shelf.discard, item.id, unused_s=unused_s)

    def check(self) -> None:
        """Ask the engine, waiting for it, whether sandboxes can be made. Raises `SandboxError` with the
        fix."""
        examine(self._engine.path)

    async def prepare(self, environment_dir: str) -> str:
        return await self._room.making(lambda: self._images.prepare(environment_dir))

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
        prepared = await self._images.require(image)
        sandbox = None
        if self._pool is not None and not mounts:
            sandbox = await self._handed_out(self._pool, spec, image, session, begun)
        if sandbox is None:
            start = _Start(f"agentrl-{self.id}-{next(self._numbers)}", self._deadline(deadline_s), image)
            launched = await self._launch(start, spec, image, prepared, session, mounts, deadline_s)
            sandbox = self._alive(launched, begun)
        return await sandbox.beginning_with(apply, deadline_s=deadline_s)

    def _deadline(self, seconds: float) -> Deadline:
        return Deadline(seconds, queue_s=self.time_multiplier * QUEUE_DEADLINE_S)

    async def _launch(
        self,
        start: _Start,
        spec: SandboxSpec,
        image: str,
        prepared: Prepared,
        session: str,
        mounts: tuple[Mount, ...],
        deadline_s: float,
    ) -> _Launched:
        """A container whose agent has answered, within the deadline."""
        try:
            async with start.deadline:
                await self._open()
                return await self._start(start, spec, image, prepared, session, mounts)
        except TimeoutError as error:
            if start.deadline.queued:
                raise waited_in_vain(start.name) from error
            raise not_ready(
                start.name,
                deadline_s,
                phase=start.phase,
                place="engine or the machine",
                evidence=self._said(start.name),
            ) from error

    async def close(self) -> None:
        await self._room.close()
        if self._pool is not None:
            for waiting in await self._pool.stop():
                self._alive(waiting, time.monotonic())  # Ended with the others.
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._live)))
        if self._sweep is not None:
            self._sweep.cancel()
        if self._removals:
            await asyncio.wait(self._removals.values(), timeout=CLOSE_DEADLINE_S)
        if self._estate is not None:
            self._estate.close()
            self._estate = None
        left = [task for task in self._removals.values() if not task.done()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if self._lock is not None:
            if not left:
                with contextlib.suppress(OSError):
                    (self._folder / "lock").unlink()
                    self._folder.rmdir()
            os.close(self._lock)
            self._lock = None
        if self._janitor is not None:
            self._janitor.dismiss(everything_gone=not left)
            self._janitor = None

    # -- started ahead: see `warm`

    def keep_warm(self, size: int) -> None:
        """See `warm.Warming`.

        A container that waits belongs to nobody: its record names no session, so that whoever comes after
        this process ends it, and it was told of no lease, so that it ends itself. To give it away, the
        record is written anew, whole, with the session, before the sandbox is handed out; what is adopted is
        found by its record, and nothing that ends containers asks a label for the session, which could not
        be changed any more. A sandbox that needs folders mounted beside its image is always made.
        """
        self._pool = None
        if size:
            age_s = min(WARM_AGE_S, self._lease_s / 2)  # what is left of the label's lease is its holder's
            self._pool = WarmPool(
                size,
                make=self._make_warm,
                end=self._end_warm,
                alive=lambda waiting: waiting.channel.alive,
                max_age_s=age_s,
            )

    @property
    def pool(self) -> PoolState | None:
        return None if self._pool is None else self._pool.state

    async def _handed_out(
        self, pool: WarmPool[_Launched], spec: SandboxSpec, image: str, session: str, begun: float
    ) -> LiveSandbox | None:
        """A container that waited, probed and given to the session; None: a miss."""

        async def give(found: _Launched) -> LiveSandbox | None:
            record = replace(found.record, session=session)
            seen, _ = await found.channel.call({"op": "probe"}, deadline_s=HAND_OUT_DEADLINE_S)
            if seen.get("instance") != record.instance:
                return None
            if self._owner is not None:
                docker_outlive.write(found.folder, record)
            return self._alive(replace(found, record=record), begun, warm=True)

        async def end(found: _Launched) -> None:
            await self._alive(found, begun).close()

        return await pool.hand_out((image, to_json(spec).decode()), give, end)

    async def _make_warm(self, kind: Kind) -> _Launched:
        image, spec = kind[0], from_json(SandboxSpec, kind[1])
        prepared = await self._images.require(image)
        start = _Start(f"agentrl-{self.id}-{next(self._numbers)}", self._deadline(WARM_DEADLINE_S), image)
        try:
            return await self._launch(start, spec, image, prepared, "", (), WARM_DEADLINE_S)
        except (BoundaryError, OSError):
            await self._removed(start.name)
            raise

    async def _end_warm(self, waiting: _Launched) -> None:
        await self._alive(waiting, time.monotonic()).close()
        await self._removed(waiting.folder.name)

    async def _removed(self, name: str) -> None:
        """Wait until the engine no longer has it, nor can still come to have it."""
        if (removal := self._removals.get(name)) is not None:
            await asyncio.wait({removal})

    # -- outliving this process: see `adoption.Adopting`

    def outlive(self, owner: str) -> None:
        self._owner = owner

    async def adopt(self, session: str) -> LiveSandbox | None:
        while (taken := (await self._inherited()).take(session)) is not None:
            folder, record = taken
            try:
                return await self._resume(folder, record)
            except (OSError, BoundaryError):
                self._dispose(folder.name)  # It has ended, or is not what was made.
        return None

    async def forget(self) -> int:
        rest = (await self._inherited()).rest()
        for folder in rest:
            self._dispose(folder.name)
        return len(rest)

    async def _inherited(self) -> docker_outlive.Estate:
        async with self._asking:
            if self._estate is None:
                assert self._owner is not None, "outlive() first"
                estate = docker_outlive.Estate(self._state / "run", self._owner)
                await asyncio.to_thread(estate.enter)
                self._estate = estate
            return self._estate

    async def _resume(self, folder: Path, record: docker_outlive.Record) -> LiveSandbox:
        """A sandbox of another process. Raises when its agent does not answer, or is another one."""
        begun = time.monotonic()
        connection = _connect(folder / "share")
        if connection is None:
            raise FileNotFoundError(f"nobody listens in {folder}")
        channel = await Channel.attach(
            connection, sandbox=folder.name, post_mortem=lambda: self._post_mortem(folder.name)
        )
        upper: int | None = None
        try:
            hello, _ = await channel.call({"op": "hello"}, deadline_s=ADOPT_DEADLINE_S)
            if hello["instance"] != record.instance:
                raise SandboxLost(f"Sandbox {folder.name} is another instance than at its start.")
            upper = docker_disk.upper_of(folder)
            return self._alive(_Launched(channel, folder, record, upper), begun)
        except BaseException:
            channel.close()
            if upper is not None:
                os.close(upper)
            raise

    def _folder_of(self, name: str) -> Path:
        """Where a container's things lie; its name holds that of its backend."""
        return self._state / "run" / name.removeprefix("agentrl-").rpartition("-")[0] / name

    # -- starting

    async def _know(self) -> None:
        """Once: what the engine says of itself."""
        if self._facts is None:
            facts = await self._engine.info()
            _check_engine(facts)
            self._facts = facts

    async def _open(self) -> None:
        """Once: hold this backend's lock, sweep what dead backends left."""
        await self._know()
        if self._lock is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._folder.chmod(0o711)
            self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._owner is not None:
                self._janitor = docker_outlive.Janitor(self._folder, self._engine.path)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().create_task(self.reap())
            self._sweep.add_done_callback(_heard)

    async def _start(
        self,
        start: _Start,
        spec: SandboxSpec,
        image: str,
        prepared: Prepared,
        session: str,
        mounts: tuple[Mount, ...],
    ) -> _Launched:
        name, folder = start.name, self._folder / start.name
        channel, connection = None, None

        async def found() -> tuple[tuple[Path, dict[str, str]], list[Path]]:
            lower = await self._images.workdir(image, prepared, spec.workdir)
            places = {mount.target: await self._images.snapshot(mount.source) for mount in mounts}
            made = lower, {target: str(place) for target, place in places.items()}
            return made, [lower, *places.values()]

        try:
            start.phase = "disk"
            await self._room.for_sandbox()
            folder.mkdir(mode=0o700)
            note = folder / NOTE
            lower, places = await held_while(found, lambda things: self._shelf.use(note, things))
            await _whole(self._lay, start, folder, lower, spec, prepared)
            body = await asyncio.to_thread(self._body, name, spec, prepared, session, start.writable, places)
            start.phase = "create"
            async with start.deadline.turn(self.pressure):
                await self._create_container(start, body)
                start.phase = "start"
                await self._start_container(start)
            start.phase = "agent"
            connection = await self._dial(start, folder)
            channel = await Channel.attach(
                connection, sandbox=name, post_mortem=lambda: self._post_mortem(name)
            )
            connection = None
            hello, _ = await channel.call({"op": "hello"}, deadline_s=start.left())
        except BaseException:
            if channel is not None:
                channel.close()
            if connection is not None:
                connection.close()
            if start.upper is not None:
                os.close(start.upper)
            self._dispose(name, unsure=start.asked)
            raise

        assert start.upper is not None
        record = docker_outlive.Record(
            owner=self._owner or "",
            session=session,
            image=image,
            instance=hello["instance"],
            lower=str(lower),
            spec=spec,
        )
        if self._owner is not None:
            docker_outlive.write(folder, record)
        return _Launched(channel, folder, record, start.upper)

    def _alive(self, launched: _Launched, begun: float, *, warm: bool = False) -> LiveSandbox:
        """The sandbox behind a connection to its agent."""
        folder, record, upper = launched.folder, launched.record, launched.upper
        name, lower = folder.name, Path(record.lower)

        async def end() -> None:
            self._live.discard(sandbox)
            self._shelf.ended(folder / NOTE, remove=False)  # It goes with the folder, once that is unmounted.
            if not await self._shut_down(folder):
                await self._kill(name)
            os.close(upper)
            self._dispose(name)

        async def differ() -> tuple[FileChange, ...]:
            if sandbox not in self._live:
                raise SandboxLost(f"Sandbox {name} is closed.", phase="diff", code="closed")
            mine = os.dup(upper)  # The sandbox may be closed while a thread still reads.
            try:
                return await _whole(diff_overlay, mine, lower)
            finally:
                os.close(mine)

        info = SandboxInfo(
            id=name,
            backend=self.name,
            isolation=self.isolation,
            image_digest=record.image,
            instance=record.instance,
            spec=record.spec,
            limits_enforced=("memory", "pids", "cpu", "disk", "network"),
            ready_ms=(time.monotonic() - begun) * 1000,
            warm=warm,
            time_multiplier=self.time_multiplier,
        )
        sandbox = LiveSandbox(info, launched.channel, differ=differ, end=end)
        self._live.add(sandbox)
        return sandbox

    def _lay(self, start: _Start, folder: Path, lower: Path, spec: SandboxSpec, prepared: Prepared) -> None:
        """Make the sandbox's folder on this machine: what it shares with its agent, and its disk."""
        share = folder / "share"
        share.mkdir(mode=0o700)
        word = {
            "owner": os.geteuid(),
            "filter": base64.b64encode(ns.seccomp_code()).decode(),
            "settings": {
                "workdir": spec.workdir,
                "home": HOME,
                "path": prepared.path or _PATH,
                "env": {**prepared.env, **spec.env},
                "policy_uid": POLICY_ID,
                "oom_path": "auto",
                "orphan_grace_s": self._orphan_grace_s,
                "rlimits": {"NOFILE": OPEN_FILES, "CORE": 0, "FSIZE": spec.disk_mib << 20},
            },
        }
        (share / "start.json").touch(mode=0o600)
        (share / "start.json").write_text(json.dumps(word))
        try:
            start.writable, start.upper = docker_disk.make(
                folder, lower, workdir=spec.workdir, disk_mib=spec.disk_mib
            )
        except OSError as error:
            raise SandboxError(
                f"The disk of sandbox {folder.name} could not be made: {error}.",
                fix="Run agentrl as root on the engine's machine; see `agentrl doctor`.",
                code="no_disk",
                phase="disk",
                evidence={"errno": error.errno},
            ) from error

    def _body(
        self,
        name: str,
        spec: SandboxSpec,
        prepared: Prepared,
        session: str,
        writable: Mapping[str, str],
        mounts: Mapping[str, str],
    ) -> dict[str, Any]:
        """What the engine is asked to create."""
        memory = (spec.memory_mib + spec.disk_mib + RESERVED_MEMORY_MIB) << 20
        fixed = {TOOLS: str(self._images.tools())}
        if not prepared.own_python:
            fixed[PYTHON] = str(self._images.python()[0])
        share = str(self._folder / name / "share")
        binds = [
            *(_bind(here, inside, read_only=True) for inside, here in {**fixed, **mounts}.items()),
            *(_bind(here, inside) for inside, here in {**writable, docker_init.FOLDER: share}.items()),
        ]
        cores = float((self._facts or {}).get("NCPU") or os.cpu_count() or 1)
        nothing = {
            path: f"rw,noexec,nosuid,size={spec.disk_mib}m"
            for path in prepared.volumes
            if path not in writable
        }
        return {
            "Image": prepared.image_id,
            "Hostname": "sandbox",
            "User": "0:0",
            "WorkingDir": "/",
            "Entrypoint": [prepared.python, "-I", "-S", f"{TOOLS}/docker_init.py"],
            "Cmd": [],
            "Healthcheck": {"Test": ["NONE"]},
            "Labels": self._labels(session, spec),
            "HostConfig": {
                "NetworkMode": "none",
                "IpcMode": "none",
                "ReadonlyRootfs": True,
                "CapDrop": ["ALL"],
                "CapAdd": list(_CAPABILITIES),
                "SecurityOpt": ["no-new-privileges"],
                "Memory": memory,
                "MemorySwap": memory,
                "PidsLimit": spec.pids + RESERVED_PIDS,
                "NanoCpus": int(min(spec.cpus, cores) * 1e9),
                "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
                "LogConfig": {"Type": "none"},
                "RestartPolicy": {"Name": "no"},
                "Mounts": binds,
                "Tmpfs": nothing,
            },
        }

    def _labels(self, session: str, spec: SandboxSpec) -> dict[str, str]:
        described = json.dumps(
            [spec.image, spec.workdir, spec.cpus, spec.memory_mib, spec.disk_mib, spec.pids]
        )
        return {
            LABEL: "sandbox",
            f"{LABEL}.backend": self.id,
            f"{LABEL}.session": session,
            f"{LABEL}.lease_deadline": str(math.ceil(time.time() + self._lease_s)),
            f"{LABEL}.spec": hashlib.sha256(described.encode()).hexdigest(),
            f"{LABEL}.place": _place(),
            f"{LABEL}.lock": str(self._folder / "lock"),
        }

    async def _create_container(self, start: _Start, body: dict[str, Any]) -> None:
        """Create it exactly once: after an answer that was lost, whatever has this name is ours."""
        start.asked = True
        for last in (False, True):
            try:
                await self._engine.call(
                    "POST",
                    "/containers/create",
                    phase="create",
                    deadline_s=min(CREATE_DEADLINE_S, start.left() if last else start.left() / 2),
                    params={"name": start.name},
                    body=body,
                )
                return
            except EngineUnknown as unknown:
                if unknown.code == "engine_unreachable" or last:
                    raise
            except EngineRefused as refused:
                if refused.status == 404:
                    self._images.forget(start.image)
                    raise SandboxError(
                        f"The engine no longer has the image of sandbox {start.name}: {refused.message}",
                        fix="Prepare the environment again.",
                        code="image_gone",
                        phase="create",
                    ) from refused
                if refused.status != 409:
                    raise
            if await self._engine.container(start.name, phase="create", deadline_s=start.left()) is not None:
                return

    async def _start_container(self, start: _Start) -> None:
        """Start it; starting twice is once."""
        for last in (False, True):
            try:
                route = f"/containers/{start.name}/start"
                await self._engine.call("POST", route, phase="start", deadline_s=start.left())
                return
            except EngineUnknown as unknown:
                if unknown.code != "engine_cut" or last:
                    raise

    async def _dial(self, start: _Start, folder: Path) -> socket.socket:
        """Connect to the agent as soon as it listens. Raises when its container ended instead."""
        pause, look_at = 0.002, time.monotonic() + _LOOK_S
        while True:
            connection = _connect(folder / "share")
            if connection is not None:
                return connection
            if time.monotonic() > look_at:
                with contextlib.suppress(
                    EngineUnknown
                ):  # Slow is not dead: the deadline of the start decides.
                    facts = await self._engine.container(start.name, phase="agent", deadline_s=start.left())
                    if facts is None or not facts["State"]["Running"]:
                        evidence = await self._post_mortem(start.name)
                        raise SandboxError(
                            f"The agent of sandbox {start.name} ended early: {evidence.get('log', '')}",
                            fix="See the evidence; the image's Python may be broken.",
                            code="agent_died",
                            phase="agent",
                            evidence=evidence,
                        )
                look_at = time.monotonic() + _LOOK_S
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.02)

    # -- ending

    async def _post_mortem(self, name: str) -> dict[str, JsonScalar]:
        """What the engine and the agent's own log say, in time. The engine may hear of a death a little later
        than the connection does."""
        evidence: dict[str, JsonScalar] = {"container": name}
        until = time.monotonic() + PING_DEADLINE_S
        try:
            while True:
                left = max(0.01, until - time.monotonic())
                facts = await self._engine.container(name, phase="post_mortem", deadline_s=left)
                if facts is None or not facts["State"]["Running"] or left < PING_DEADLINE_S / 2:
                    break
                await asyncio.sleep(0.1)
            if facts is None:
                evidence["state"] = "removed"
            else:
                state = facts["State"]
                evidence["state"] = state["Status"]
                evidence["exit"] = None if state["Running"] else state["ExitCode"]
                evidence["oom_killed"] = state["OOMKilled"]
                evidence["restarts"] = facts.get("RestartCount")
                evidence["started_at"], evidence["finished_at"] = state["StartedAt"], state["FinishedAt"]
        except (EngineUnknown, EngineRefused) as error:
            evidence["engine"] = error.message
        return {**evidence, **self._said(name)}

    def _said(self, name: str) -> dict[str, JsonScalar]:
        return last_words(self._folder_of(name) / "share" / "agent.log")

    async def _shut_down(self, folder: Path) -> bool:
        """Let the agent end, and with it, as it is PID 1, everything inside. No engine needed. False when it
        did not even agree to end."""
        connection = _connect(folder / "share")
        if connection is None:
            return False
        loop = asyncio.get_running_loop()
        agreed = False
        with connection:
            try:
                async with asyncio.timeout(SHUTDOWN_DEADLINE_S):
                    for piece in frames({"op": "shutdown", "id": 1}):
                        await loop.sock_sendall(connection, piece)
                    inbox = Inbox()
                    while data := await loop.sock_recv(connection, 65536):
                        agreed = agreed or bool(inbox.feed(data))
                return True
            except ConnectionError:
                return True
            except (TimeoutError, ValueError, OSError):
                return agreed

    async def _kill(self, name: str) -> None:
        """Kill by the engine. What does not work in time is left to the removal, which kills too."""
        with contextlib.suppress(EngineUnknown, EngineRefused):
            await self._engine.call(
                "POST", f"/containers/{name}/kill", phase="kill", deadline_s=KILL_DEADLINE_S
            )

    def _dispose(self, name: str, *, unsure: bool = False) -> None:
        """Remove a container and its folder in the background, until it works."""
        if name not in self._removals:
            task = asyncio.get_running_loop().create_task(self._remove(name, LATE_LOOKS if unsure else 0))
            self._removals[name] = task
            task.add_done_callback(lambda _: self._removals.pop(name, None))

    async def _remove(self, name: str, looks: int) -> None:
        """`looks`: how often an absent container may still come, from a create that was given up."""
        pause = 0.2
        while True:
            try:
                async with self._removing:
                    outcome = await self._engine.remove(name, deadline_s=REMOVE_DEADLINE_S)
                if outcome == "removed" or (outcome == "absent" and looks <= 0):
                    break
                looks -= outcome == "absent"
            except (EngineUnknown, EngineRefused):
                self._failed_removals.add(name)
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_S)
        self._failed_removals.discard(name)
        await asyncio.to_thread(docker_disk.remove, self._folder_of(name))

    # -- what others left

    async def reap(self) -> int:
        """Remove containers and folders that nobody owns any more; returns how many containers."""
        removed = 0
        for facts in await self._engine.containers({LABEL: "sandbox"}):
            labels = facts.get("Labels") or {}
            if labels.get(f"{LABEL}.backend") != self.id and _orphaned(
                labels, running=facts["State"] == "running"
            ):
                with contextlib.suppress(EngineUnknown, EngineRefused):
                    outcome = await self._engine.remove(facts["Id"], deadline_s=REMOVE_DEADLINE_S)
                    removed += outcome == "removed"
        kept = {
            (facts.get("Labels") or {}).get(f"{LABEL}.backend")
            for facts in await self._engine.containers({LABEL: "sandbox"})
        }
        await asyncio.to_thread(_sweep, self._state / "run", {self.id, *kept})
        return removed


def examine(path: str) -> dict[str, Any]:
    """What the engine behind this socket says of itself, waiting for it. Raises `SandboxError` with the fix
    when sandboxes can not be made on it."""
    facts: dict[str, Any] = _told(path, "/info")
    _check_engine(facts)
    return facts


def sandboxes(path: str) -> tuple[int, int]:
    """How many sandboxes run on this engine, and how many of them were started before their session was
    known (see `warm`). Raises `SandboxError`."""
    wanted = json.dumps({"label": [f"{LABEL}=sandbox"]})
    found = [facts.get("Labels") or {} for facts in _told(path, "/containers/json", filters=wanted)]
    return len(found), sum(labels.get(f"{LABEL}.session") == "" for labels in found)


def _told(path: str, route: str, **params: str) -> Any:
    """What the engine answers, waiting for it."""
    transport = httpx.HTTPTransport(uds=path)
    try:
        with socket.socket(socket.AF_UNIX) as first:  # httpx leaks a socket that can not connect.
            first.settimeout(PING_DEADLINE_S)
            first.connect(path)
        with httpx.Client(transport=transport, base_url="http://docker", timeout=INFO_DEADLINE_S) as client:
            answer = client.get(API + route, params=params)
            if answer.is_success:
                return answer.json()
        raise SandboxError(
            f"The Docker engine at {path} refuses: {answer.text.strip()[:500]}",
            fix="Use an engine of version 20.10 or newer, or another backend: `--backend local`.",
            code="engine_refused",
            phase="prepare",
            retryable=answer.status_code >= 500,
        )
    except PermissionError as error:
        raise SandboxError(
            f"This user may not ask the Docker engine at {path}.",
            fix="Add it to the group of that socket (usually docker) and log in again, or set DOCKER_HOST to"
            " an engine of its own.",
            code="engine_forbidden",
            phase="prepare",
            retryable=False,
        ) from error
    except (OSError, httpx.HTTPError, ValueError) as error:
        raise SandboxError(
            f"No Docker engine answers at {path}: {error}.",
            fix="Start it, set DOCKER_HOST, or use another backend: `--backend local`.",
            code="engine_unreachable",
            phase="prepare",
        ) from error


@dataclass(frozen=True, slots=True)
class _Launched:
    """A container that has been started, and what is known of it."""

    channel: Channel
    folder: Path
    record: docker_outlive.Record
    upper: int
    """A descriptor of the changes of its workdir."""


class _Start:
    """One start under way: its container's name, its deadline, and what it waits for."""

    def __init__(self, name: str, deadline: Deadline, image: str) -> None:
        self.name = name
        self.deadline = deadline
        self.image = image
        self.phase = "prepare"
        self.writable: dict[str, str] = {}
        self.upper: int | None = None
        self.asked = False
        """The engine may have made the container, or may still be about to."""

    def left(self) -> float:
        return self.deadline.left()


async def _whole(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """A blocking call in a thread that is waited for also when the caller is cancelled: what it makes must be
    known before it can be given back."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **named))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        task.exception()  # Whatever it is, it was heard.
        raise


def _bind(here: str, inside: str, *, read_only: bool = False) -> dict[str, Any]:
    return {"Type": "bind", "Source": here, "Target": inside, "ReadOnly": read_only}


def _connect(share: Path) -> socket.socket | None:
    """A connection to the agent that listens in this folder; None when there is none. Paths of sockets are
    short, so the folder is named by a descriptor."""
    try:
        folder = os.open(share, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        connection.connect(f"/proc/self/fd/{folder}/agent")
    except OSError:
        connection.close()
        return None
    finally:
        os.close(folder)
    return connection


def _place() -> str:
    """Where the paths and locks of a backend mean something: this boot of this machine, this mount
    namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/mnt')}"


def _owner_alive(lock: str) -> bool:
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def _orphaned(labels: Mapping[str, str], *, running: bool) -> bool:
    """Nobody owns it: its backend is dead and its lease over (or it is dead itself). Of a backend somewhere
    else only the lease is known."""
    try:
        expired = time.time() > float(labels[f"{LABEL}.lease_deadline"])
        place, lock = labels[f"{LABEL}.place"], labels[f"{LABEL}.lock"]
    except (KeyError, ValueError):
        return False  # Not made by us, whatever its label says.
    if place == _place():
        return not _owner_alive(lock) and (expired or not running)
    return expired


def _sweep(run: Path, keep: set[str | None]) -> None:
    """Unmount and remove the folders of dead backends that have no containers left."""
    with contextlib.suppress(OSError):
        for folder in run.iterdir():
            lock = folder / "lock"
            if folder.name in keep or not lock.exists() or _owner_alive(str(lock)):
                continue
            for sandbox in folder.glob("agentrl-*"):
                docker_disk.remove(sandbox)
            with contextlib.suppress(OSError):
                lock.unlink()
                folder.rmdir()


def _heard(task: asyncio.Task[int]) -> None:
    """Sweeping is for others' leftovers: if the engine would not list them now, the next backend asks
    again."""
    if not task.cancelled():
        task.exception()


def _check_engine(facts: Mapping[str, Any]) -> None:
    """Refuse an engine that can not hold the limits or cannot share this machine's folders."""
    options = facts.get("SecurityOptions") or []
    problem = None
    if facts.get("OSType") != "linux":
        problem = ("runs no Linux containers", "Use a Linux engine.", "engine_os")
    elif not facts.get("MemoryLimit"):
        fix = "Boot with `cgroup_enable=memory`."
        problem = ("can not limit memory here", fix, "no_memory_limit")
    elif facts.get("PidsLimit") is False:
        problem = ("can not limit processes here", "Enable the pids control group.", "no_pids_limit")
    elif any(f"name={word}" in option for option in options for word in ("userns", "rootless")):
        fix = "Use an engine without user remapping, or `--backend local`."
        problem = ("remaps users, so that files can not be shared with it", fix, "engine_userns")
    elif not docker_disk.can_mount():
        fix = "Run agentrl as root on the engine's machine, or use `--backend local`, which needs no root."
        problem = ("is usable, but this user may not make the limited disk of a sandbox", fix, "needs_root")
    if problem is not None:
        what, fix, code = problem
        raise SandboxError(f"The Docker engine {what}.", fix=fix, code=code, phase="prepare", retryable=False)


def _check_spec(spec: SandboxSpec, mounts: tuple[Mount, ...]) -> None:
    if spec.network != "none":
        raise SandboxError(
            f"The docker backend has no network '{spec.network}'; a sandbox here reaches only itself.",
            fix="Set the task's network to none.",
            code="network_unsupported",
            phase="create",
            retryable=False,
        )
    for target in (spec.workdir, *(mount.target for mount in mounts)):
        parts = target.split("/")
        if not target.startswith("/") or ".." in parts or "," in target or parts[1] in _TAKEN:
            raise SandboxError(
                f"'{target}' can not be a folder of a task.",
                fix="Use an absolute path such as /app, outside of the system's folders.",
                code="bad_path",
                phase="create",
                retryable=False,
            )
