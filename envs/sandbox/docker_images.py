"""A task's `environment/` folder, or the image that it names, to an image that the engine has, and to the
tree that its workdir starts as.

A folder with a Dockerfile is built, under a tag that is the hash of the folder; a folder without one (or with
nothing but `FROM scratch`) is workspace files over the base image. Invariants: the same folder is built once,
however many ask at once; a sandbox is started from an image *id* that was written down when the folder was
prepared, never from a tag; an image in which the agent can not run is refused here, with what to do, not at
the first command.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import re
import shutil
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from agentrl.config import environment
from agentrl.errors import SandboxError, TaskError
from envs.sandbox import agent, docker_init, oci, rootfs
from envs.sandbox.contract import StockItem
from envs.sandbox.docker_stock import BASE, BUILT, SAVED, Brought, replace_file
from envs.sandbox.engine import Engine, EngineRefused
from envs.sandbox.images import Images, changing, checked_name, folder_digest, is_name
from envs.sandbox.interpreter import base_python
from envs.sandbox.pressure import Pressure

TOOLS = "/opt/agentrl/tools"
PYTHON = "/opt/agentrl/python"
BUILD_DEADLINE_S = 1800.0
PULL_DEADLINE_S = 1800.0
PULLS_AT_ONCE = 3
"""However many sandboxes wait: registries count, and an engine pulls the layers of one image in parallel."""
LIMITED_PAUSE_S, LIMITED_LONGEST_PAUSE_S = 15.0, 120.0
LIMITED_PATIENCE_S = 900.0
"""How long a registry that asks for fewer pulls is asked again. The engine keeps its `Retry-After` to itself,
so the pauses grow instead."""
IMPORT_DEADLINE_S = 300.0
PROBE_DEADLINE_S = 60.0
COPY_DEADLINE_S = 300.0
WORDS = 4000
"""Characters of a failed build's output that go into the error."""
_CHUNK = 1 << 20
_NO_BASH, _OLD_PYTHON = 3, 4
_KILLED = 128 + 9
_NO_PROGRAM = re.compile(
    r"executable file .{0,300}not found|exec.{0,300}(no such file|permission denied|format error|not a dir)",
    re.I | re.S,
)
"""How runtimes say that an image lacks a program, or has one that does not run: all else is the engine's."""
_PROBE = f"""
import sys
if sys.version_info < (3, 8): sys.exit({_OLD_PYTHON})
import ctypes, fcntl, hashlib, json, resource, select, selectors, socket, struct, os, py_compile
for name in ("agent.py", "docker_init.py"):
    try: py_compile.compile("{TOOLS}/" + name, doraise=True)
    except OSError: pass
folders = os.environ.get("PATH", "").split(":")
sys.exit(0 if any(os.access(folder + "/bash", os.X_OK) for folder in folders) else {_NO_BASH})
"""


_LIMITED = ("toomanyrequests", "too many requests", "rate limit")
"""What an engine passes on of a registry that asks for fewer pulls; in small letters."""
_FULL = "no space left on device"
"""Its disk, in its words."""
_RECIPES_OWN = ("copy failed", "add failed", "dockerfile parse", "failed to parse", "unknown instruction")
"""How the engine begins to say that the Dockerfile is wrong, where no command of it ran; in small letters."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """What the engine said while it worked, to its error. `recipe`: a command of the Dockerfile failed, or it
    can not be read; everything else (a registry, a disk, the engine) is none of the task's."""

    words: str
    recipe: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a sandbox is started from."""

    image_id: str
    files: bool
    """The workdir is the prepared copy of the folder's files; otherwise what the image has there."""
    python: str
    """The interpreter as the container sees it."""
    own_python: bool
    """Whether the image has it; otherwise a copy of this machine's is mounted."""
    path: str | None
    env: dict[str, str]
    volumes: tuple[str, ...]
    """Folders that the image declares as volumes: they get a limited tmpfs instead."""


def saved_tag(digest: str) -> str:
    """What the engine calls an image that was loaded from this machine's disk: by its id."""
    return SAVED + digest.partition(":")[2]


class DockerImages:
    """Images of one engine; copies and notes below `root`."""

    def __init__(
        self,
        engine: Engine,
        root: Path,
        *,
        owner: tuple[int, int] | None,
        base_image: str | None,
        pressure: Pressure,
        require_room: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`pressure` bounds the containers in which images are tried, and whatever else its owner starts.
        `require_room` raises before something new is brought to an engine without room for it."""
        self._engine = engine
        self._pressure = pressure
        self._require_room = require_room
        self._brought = Brought(engine, root)
        self._root = root
        self._owner = owner
        self._base_image = base_image or environment("DOCKER_BASE")
        self._copies = Images(root / "images", owner)
        self._known: dict[str, Prepared] = {}
        self._interpreters: dict[str, tuple[str, bool]] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._pulls = asyncio.Semaphore(PULLS_AT_ONCE)

    async def prepare(self, environment_dir: str) -> str:
        """Returns the folder's digest, or that of a named image. See `contract.Backend.prepare`."""
        digest = await self._prepare(environment_dir)
        prepared = self._known.get(digest)
        if prepared is not None:
            await self._brought.used(prepared.image_id)
        return digest

    async def has(self, environment_dir: str) -> bool:
        """Whether `prepare` would find it: nothing is pulled, built or loaded."""
        if (saved := oci.reference(environment_dir)) is not None:
            digest = await asyncio.to_thread(oci.identity, saved, self._root)
            return await self._engine.image(saved_tag(digest), phase="load") is not None
        if is_name(environment_dir):
            return await self._engine.image(checked_name(environment_dir), phase="prepare") is not None
        if not await self._copies.has(environment_dir):
            return False
        return await self._recall(await self._copies.prepare(environment_dir)) is not None

    async def stock(self, place: Path) -> list[StockItem]:
        """What this program brought to the engine, whose disk `place` is on."""
        return await self._brought.stock(place)

    async def discard(self, item: StockItem, *, unused_s: float) -> bool:
        """See `contract.Stocking`."""
        gone = await self._brought.discard(item, unused_s=unused_s)
        if gone:  # Whatever was started from it asks the engine again.
            self._known.clear()
        return gone

    async def _prepare(self, environment_dir: str) -> str:
        if (saved := oci.reference(environment_dir)) is not None:
            return await self._prepare_saved(saved)
        if is_name(environment_dir):
            return await self._prepare_named(checked_name(environment_dir))
        digest = await self._copies.prepare(environment_dir)
        async with self._lock(digest):
            if await self._recall(digest) is None:
                dockerfile = Path(environment_dir) / "Dockerfile"
                built = dockerfile.is_file() and not _only_files(dockerfile)
                image = await (self._build(environment_dir, digest) if built else self._base())
                self._keep(digest, await self._describe(image, files=not built))
        return digest

    async def _prepare_named(self, name: str) -> str:
        """An image by the name that a task gives it: pulled once, then known by its id."""
        async with self._lock("name " + name):
            image = await self._named(name)
        digest = "image:" + image.removeprefix("sha256:")
        async with self._lock(digest):
            if await self._recall(digest) is None:
                self._keep(digest, await self._describe(image, files=False))
        return digest

    async def _prepare_saved(self, wanted: oci.Reference) -> str:
        """An image on this machine's disk: checked here, then loaded into the engine once."""
        self._root.mkdir(parents=True, exist_ok=True)
        digest = await asyncio.to_thread(oci.identity, wanted, self._root)
        tag = saved_tag(digest)
        async with self._lock(digest):
            if await self._recall(digest) is None:
                found = await self._engine.image(tag, phase="load")
                if found is None:
                    await self._load(wanted, tag)
                    found = await self._engine.image(tag, phase="load")
                self._keep(digest, await self._describe(_id(found, tag), files=False))
        return digest

    async def _load(self, wanted: oci.Reference, tag: str) -> None:
        await self._has_room()
        with tempfile.TemporaryFile(dir=self._root) as file:
            await asyncio.to_thread(oci.save, wanted, self._root, tag, cast(BinaryIO, file))
            file.seek(0)
            content = _pieces(cast(BinaryIO, file))
            problem = await self._ask(
                "/images/load", {"quiet": "1"}, content, phase="load", deadline_s=IMPORT_DEADLINE_S
            )
        _require_written(problem)
        if problem is not None:
            raise SandboxError(
                f"The engine did not load the image {wanted}: {problem.words[-WORDS:]}",
                fix="Try it by hand: `docker load`; look at the engine's disk.",
                code="load_failed",
                phase="load",
            )

    async def _has_room(self) -> None:
        if self._require_room is not None:
            await self._require_room()

    def _keep(self, digest: str, prepared: Prepared) -> None:
        self._note(digest).parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._note(digest), json.dumps(asdict(prepared)).encode())
        self._known[digest] = prepared

    def forget(self, digest: str) -> None:
        """The engine has lost the image: ask it again before it is used."""
        self._known.pop(digest, None)

    async def require(self, digest: str) -> Prepared:
        """What `prepare` noted, also in an earlier process. Raises `SandboxError` image_unknown."""
        async with self._lock(digest):
            prepared = None if "/" in digest else await self._recall(digest)
        if prepared is None:
            raise SandboxError(
                f"There is no prepared image {digest}.",
                fix="Call prepare() with the task's environment folder first.",
                code="image_unknown",
                phase="prepare",
                retryable=False,
            )
        return prepared

    async def _recall(self, digest: str) -> Prepared | None:
        if digest in self._known:
            return self._known[digest]
        try:
            facts = json.loads(self._note(digest).read_bytes())
        except (OSError, ValueError):
            return None
        prepared = Prepared(**{**facts, "volumes": tuple(facts["volumes"])})
        if await self._engine.image(prepared.image_id, phase="prepare") is None:
            return None
        self._known[digest] = prepared
        return prepared

    def _note(self, digest: str) -> Path:
        return self._root / "notes" / (digest.replace(":", "-") + ".json")

    def _lock(self, key: str) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())

    async def snapshot(self, folder: str) -> Path:
        """A copy of a folder that is mounted beside an image."""
        return await self._copies.snapshot(folder)

    # -- images

    async def _base(self) -> str:
        """The id of the image under a folder that brings only files."""
        async with self._lock("base"):
            if self._base_image is not None:
                return await self._named(self._base_image)
            tag = BASE + await asyncio.to_thread(rootfs.identity)
            found = await self._engine.image(tag, phase="prepare")
            if found is None:
                await self._import(tag)
                found = await self._engine.image(tag, phase="prepare")
            return _id(found, tag)

    async def _named(self, name: str) -> str:
        found = await self._engine.image(name, phase="prepare")
        if found is None:
            await self._pull(name)
            found = await self._engine.image(name, phase="prepare")
            await asyncio.to_thread(self._brought.pulled, name, _id(found, name))
        return _id(found, name)

    async def _pull(self, name: str) -> None:
        repository, at, exact = name.partition("@")
        plain, colon, tag = repository.rpartition(":")
        if at:
            where = {"fromImage": repository, "tag": exact}
        elif colon and "/" not in tag:
            where = {"fromImage": plain, "tag": tag}
        else:
            where = {"fromImage": name, "tag": "latest"}
        pause, until = LIMITED_PAUSE_S, time.monotonic() + LIMITED_PATIENCE_S
        async with self._pulls:
            await self._has_room()
            while True:
                problem = await self._ask(
                    "/images/create", where, None, phase="pull", deadline_s=PULL_DEADLINE_S
                )
                limited = problem is not None and any(word in problem.words.lower() for word in _LIMITED)
                if not limited or time.monotonic() + pause > until:
                    break
                await asyncio.sleep(pause * (1 + random.random() / 2))
                pause = min(2 * pause, LIMITED_LONGEST_PAUSE_S)
        _require_written(problem)
        if problem is not None and limited:
            raise SandboxError(
                f"The registry of {name} still asks for fewer pulls: {problem.words[-WORDS:]}",
                fix="Log the engine in (`docker login`), give it a mirror (registry-mirrors in its"
                " daemon.json), or bring the image as a file.",
                code="pull_limited",
                phase="pull",
            )
        if problem is not None:
            raise SandboxError(
                f"The image {name} could not be pulled: {problem.words[-WORDS:]}",
                fix="Pull or import it by hand, or name one that the engine has (`docker images`): a task's"
                " environment.docker_image, or AGENTRL_DOCKER_BASE.",
                code="pull_failed",
                phase="pull",
            )

    async def _import(self, tag: str) -> None:
        """Make the base image of this machine's own programs."""
        await self._has_room()
        repository, _, version = tag.rpartition(":")
        where = {"fromSrc": "-", "repo": repository, "tag": version}
        with tempfile.TemporaryFile() as file:
            await asyncio.to_thread(rootfs.write_rootfs, cast(BinaryIO, file))
            file.seek(0)
            content = _pieces(cast(BinaryIO, file))
            problem = await self._follow(
                "/images/create", where, content, phase="import", deadline_s=IMPORT_DEADLINE_S
            )
        _require_written(problem)
        if problem is not None:
            raise SandboxError(
                f"The base image could not be imported: {problem.words[-WORDS:]}",
                fix="Set AGENTRL_DOCKER_BASE to an image that the engine has.",
                code="no_base",
                phase="prepare",
            )

    async def _build(self, environment_dir: str, digest: str) -> str:
        tag = BUILT + digest.partition(":")[2]
        found = await self._engine.image(tag, phase="build")
        if found is None:
            await self._has_room()
            with tempfile.TemporaryFile() as file:
                await asyncio.to_thread(_context, Path(environment_dir), cast(BinaryIO, file))
                file.seek(0)
                if await asyncio.to_thread(folder_digest, Path(environment_dir)) != digest:
                    raise changing(Path(environment_dir))
                where = {"t": tag, "rm": "1", "forcerm": "1", "labels": json.dumps({"agentrl": "image"})}
                content = _pieces(cast(BinaryIO, file))
                problem = await self._ask(
                    "/build", where, content, phase="build", deadline_s=BUILD_DEADLINE_S
                )
            if problem is not None and problem.recipe:
                raise TaskError(
                    f"The Dockerfile of {environment_dir} could not be built: {problem.words[-WORDS:]}",
                    fix="Try it by hand: `docker build` in that folder.",
                    code="build_failed",
                    phase="build",
                )
            _require_written(problem)
            if problem is not None:
                raise SandboxError(
                    f"The engine broke off the build of {environment_dir}: {problem.words[-WORDS:]}",
                    fix="Look at the engine's disk and at the registry of the base image, then try again.",
                    code="build_broken",
                    phase="build",
                )
            found = await self._engine.image(tag, phase="build")
        return _id(found, tag)

    async def _ask(
        self,
        route: str,
        params: dict[str, str],
        content: AsyncIterator[bytes] | None,
        *,
        phase: str,
        deadline_s: float,
    ) -> _Failed | None:
        """`_follow`, for which a refusal as a whole is an answer too."""
        try:
            return await self._follow(route, params, content, phase=phase, deadline_s=deadline_s)
        except EngineRefused as refused:
            return _Failed(refused.message, recipe=refused.status == 400)

    async def _follow(
        self,
        route: str,
        params: dict[str, str],
        content: AsyncIterator[bytes] | None,
        *,
        phase: str,
        deadline_s: float,
    ) -> _Failed | None:
        """Read a stream of progress records to its end. Returns the output so far if one of them is an
        error."""
        said: list[str] = []
        async with self._engine.stream(
            "POST", route, phase=phase, deadline_s=deadline_s, params=params, content=content
        ) as response:
            async for line in response.aiter_lines():
                try:
                    record: dict[str, Any] = json.loads(line)
                except ValueError:
                    continue
                said = [*said[-200:], str(record.get("stream", ""))]
                if "error" in record:
                    error = str(record["error"])
                    ran = bool((record.get("errorDetail") or {}).get("code"))  # exit code of a command
                    recipe = ran or error.lower().startswith(_RECIPES_OWN)
                    return _Failed("".join(said) + error, recipe)
        return None

    # -- the agent's needs

    async def _describe(self, image_id: str, *, files: bool) -> Prepared:
        facts = await self._engine.image(image_id, phase="prepare")
        if facts is None:
            raise SandboxError(f"The image {image_id} vanished.", code="image_gone", phase="prepare")
        config: dict[str, Any] = facts.get("Config") or {}
        env = dict(entry.partition("=")[::2] for entry in config.get("Env") or ())
        path = env.pop("PATH", None)
        env.pop("HOME", None)
        async with self._lock("python " + image_id):
            if image_id not in self._interpreters:
                self._interpreters[image_id] = await self._interpreter(image_id)
        python, own = self._interpreters[image_id]
        volumes = tuple(sorted(config.get("Volumes") or ()))
        return Prepared(
            image_id=image_id, files=files, python=python, own_python=own, path=path, env=env, volumes=volumes
        )

    async def _interpreter(self, image_id: str) -> tuple[str, bool]:
        """The Python that the agent runs under in this image, and whether it is the image's own."""
        tools = await asyncio.to_thread(self.tools)
        binds = [f"{tools}:{TOOLS}"]
        code, why = await self._trial(image_id, "python3", binds)
        own = code in (0, _NO_BASH)
        if not own:
            copy, inside = await asyncio.to_thread(self.python)
            code, _ = await self._trial(image_id, inside, [*binds, f"{copy}:{PYTHON}:ro"])
        if code == _NO_BASH:
            raise SandboxError(
                f"The image {image_id[:19]} has no bash, under which commands run.",
                fix="Install bash in its Dockerfile.",
                owner="task",
                code="no_bash",
                phase="prepare",
                retryable=False,
            )
        if code != 0 and "format error" in why.lower():
            raise SandboxError(
                f"The image {image_id[:19]} is for another kind of processor than this machine's.",
                fix="Pull or build the variant for this machine (docker build --platform).",
                owner="task",
                code="other_platform",
                phase="prepare",
                retryable=False,
                evidence={"python3": why},
            )
        if code != 0:
            raise SandboxError(
                f"The image {image_id[:19]} has no Python >= 3.8, and this machine's does not run there.",
                fix="Install python3 in its Dockerfile, or use an image with glibc.",
                owner="task",
                code="no_python",
                phase="prepare",
                retryable=False,
                evidence={"python3": why},
            )
        return ("python3", True) if own else (inside, False)

    async def _trial(self, image_id: str, python: str, binds: list[str]) -> tuple[int, str]:
        """Run the probe in a throw-away container: its exit code, or -1 and why it did not start."""
        body = {
            "Image": image_id,
            "User": "0:0",
            "Entrypoint": [python, "-I", "-S", "-c", _PROBE],
            "Cmd": [],
            "Labels": {"agentrl": "probe"},
            "HostConfig": {
                "NetworkMode": "none",
                "ReadonlyRootfs": True,
                "CapDrop": ["ALL"],
                "SecurityOpt": ["no-new-privileges"],
                "Memory": 256 << 20,
                "MemorySwap": 256 << 20,
                "PidsLimit": 32,
                "NanoCpus": 10**9,
                "LogConfig": {"Type": "none"},
                "Binds": binds,
            },
        }
        call = self._engine.call
        limit: dict[str, Any] = {"phase": "probe", "deadline_s": PROBE_DEADLINE_S}
        async with self._pressure.slot(teaches=False):
            made = await call("POST", "/containers/create", body=body, **limit)
            route = f"/containers/{made['Id']}"
            try:
                await call("POST", route + "/start", **limit)
                ended = await call("POST", route + "/wait", **limit)
            except EngineRefused as refused:
                if _NO_PROGRAM.search(refused.message) is None:
                    raise  # Of the engine: it says nothing about the image.
                return -1, refused.message[:500]
            finally:
                await self._engine.remove(made["Id"], deadline_s=PROBE_DEADLINE_S)
        code = int(ended["StatusCode"])
        if code == _KILLED:
            raise SandboxError(
                f"The probe of the image {image_id[:19]} was killed.",
                fix="Look at the memory of this machine, and who kills containers; then try again.",
                code="probe_killed",
                phase="probe",
            )
        return code, f"exit code {code}"

    def tools(self) -> Path:
        """The folder with the agent that is mounted into every sandbox."""
        sources = [Path(agent.__file__), Path(docker_init.__file__)]
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
        folder = self._root / f"tools-{digest}"
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
        for path in sources:
            if not (folder / path.name).exists():
                replace_file(folder / path.name, path.read_bytes())
        return folder

    def python(self) -> tuple[Path, str]:
        """A copy of this machine's Python without installed packages: its folder, and the path inside."""
        program = Path(base_python())
        prefix = program.parent.parent
        library = next(iter(sorted(prefix.glob("lib/python3.*/os.py"), reverse=True)), None)
        if library is None:
            return prefix, f"{PYTHON}/bin/{program.name}"
        facts = program.stat()
        marks = f"{program} {facts.st_size} {facts.st_mtime_ns}"
        target = self._root / ("python-" + hashlib.sha256(marks.encode()).hexdigest()[:16])
        if not target.is_dir():
            building = Path(tempfile.mkdtemp(prefix=".building-", dir=self._root))
            (building / "bin").mkdir()
            shutil.copy2(program, building / "bin" / program.name)
            skipped = shutil.ignore_patterns(
                "site-packages", "dist-packages", "__pycache__", "test", "config-*"
            )
            shutil.copytree(library.parent, building / "lib" / library.parent.name, ignore=skipped)
            building.chmod(0o755)
            try:
                os.rename(building, target)
            except OSError:  # Someone else was faster with the same content.
                shutil.rmtree(building, ignore_errors=True)
        return target, f"{PYTHON}/bin/{program.name}"

    # -- what the workdir starts as

    async def workdir(self, digest: str, prepared: Prepared, workdir: str) -> Path:
        """A tree on this machine, never written again, that equals the workdir of a fresh sandbox."""
        if prepared.files:
            return self._copies.require(digest)
        key = hashlib.sha256(f"{prepared.image_id} {workdir}".encode()).hexdigest()[:32]
        target = self._root / "workdirs" / key
        async with self._lock("workdir " + key):
            if not target.is_dir():
                await self._extract(prepared.image_id, workdir, target)
        return target

    async def _extract(self, image_id: str, workdir: str, target: Path) -> None:
        """Copy the workdir out of the image, through a container that is never started."""
        target.parent.mkdir(parents=True, exist_ok=True)
        body = {
            "Image": image_id,
            "Entrypoint": ["-"],
            "Labels": {"agentrl": "probe"},
            "NetworkDisabled": True,
        }
        made = await self._engine.call(
            "POST", "/containers/create", phase="prepare", deadline_s=COPY_DEADLINE_S, body=body
        )
        building = Path(tempfile.mkdtemp(prefix=".building-", dir=target.parent))
        try:
            with tempfile.TemporaryFile() as file:
                try:
                    # Of what a link leads to, as commands see it.
                    await self.archive(made["Id"], workdir.rstrip("/") + "/.", cast(BinaryIO, file))
                except EngineRefused as refused:
                    if refused.status != 404:  # An image without that folder: it starts empty.
                        raise
                await asyncio.to_thread(_unpack, cast(BinaryIO, file), building, self._owner)
            os.rename(building, target)
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, building, True)
            raise
        finally:
            await self._engine.remove(made["Id"], deadline_s=COPY_DEADLINE_S)

    async def archive(self, container: str, path: str, out: BinaryIO) -> None:
        """The engine's tar of a folder of a container, running or not. Raises `EngineRefused` 404 without
        it."""
        async with self._engine.stream(
            "GET",
            f"/containers/{container}/archive",
            phase="archive",
            deadline_s=COPY_DEADLINE_S,
            params={"path": path},
        ) as response:
            async for piece in response.aiter_bytes(_CHUNK):
                await asyncio.to_thread(out.write, piece)
        out.seek(0)


def _require_written(problem: _Failed | None) -> None:
    """Raise `SandboxError` disk_pressure for what failed because the engine's disk is full."""
    if problem is not None and _FULL in problem.words.lower():
        raise SandboxError(
            f"The engine's disk is full: {problem.words[-WORDS:]}",
            fix="Remove images that are no longer used (`agentrl images prune --backend docker`).",
            code="disk_pressure",
            phase="prepare",
        )


def _id(found: dict[str, Any] | None, name: str) -> str:
    if found is None:
        raise SandboxError(
            f"The engine has no image {name}.",
            fix="Set AGENTRL_DOCKER_BASE to an image that it has (`docker images`).",
            code="image_gone",
            phase="prepare",
        )
    return str(found["Id"])


def _only_files(dockerfile: Path) -> bool:
    """Nothing but `FROM scratch`: the folder says that it brings files and wants no system of its own."""
    lines = [line.strip() for line in dockerfile.read_text("utf-8", "replace").splitlines()]
    return [line.lower() for line in lines if line and not line.startswith("#")] == ["from scratch"]


def _context(folder: Path, out: BinaryIO) -> None:
    def neutral(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = info.mtime = 0
        info.uname = info.gname = ""
        return info

    with tarfile.open(fileobj=out, mode="w|") as tar:
        tar.add(folder, arcname=".", filter=neutral)


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    while data := await asyncio.to_thread(file.read, _CHUNK):
        yield data


def _unpack(file: BinaryIO, target: Path, owner: tuple[int, int] | None) -> None:
    """The content of the archive's one top folder into `target`, nothing outside it, all of it `owner`'s."""

    def below(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        _, _, name = member.name.partition("/")
        if not name or member.isdev():
            return None
        linkname = member.linkname.partition("/")[2] if member.islnk() else member.linkname
        return tarfile.tar_filter(member.replace(name=name, linkname=linkname, deep=False), path)

    file.seek(0)
    if file.read(1):
        file.seek(0)
        with tarfile.open(fileobj=file, mode="r|") as tar:
            tar.extractall(target, filter=below)
    if owner is not None:
        for root, folders, files in os.walk(target):
            for name in (*folders, *files):
                os.chown(os.path.join(root, name), *owner, follow_symlinks=False)
        os.chown(target, *owner)
    target.chmod(0o755)
