"""A task's `environment/` folder to an image that a cluster can pull, and to the archive that is laid into
its pods.

A cluster builds nothing. A folder that brings only files runs on the base image of this backend
(`AGENTRL_KUBERNETES_IMAGE`); a Dockerfile that is nothing but `FROM name` runs on that image; any other must
have been built and pushed as `<AGENTRL_KUBERNETES_REGISTRY>environment:<digest>`, which the error of a pod
that can not pull it says. Where the cluster's node is this machine on its Docker engine, that engine's images
are the node's: then the base and the builds of the Docker backend are used, and nothing has to be set.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import tarfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from agentrl.config import environment
from agentrl.errors import SandboxError
from envs.sandbox import oci, rootfs
from envs.sandbox.docker_images import DockerImages, saved_tag
from envs.sandbox.docker_stock import MARK_EVERY_S
from envs.sandbox.engine import Engine, socket_path
from envs.sandbox.images import Images, checked_name, is_name
from envs.sandbox.pressure import Pressure

DEFAULT_IMAGE = "python:3.12-slim"
DEFAULT_REGISTRY = "agentrl/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a pod is made from."""

    image: str
    files: bool
    """The workdir is the prepared copy of the folder's files; otherwise what the image has there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """A tar of what is laid into a pod: `lower/…` and `mount-<i>/…`. `path` None: nothing is."""

    path: Path | None
    size: int
    sha256: str
    place_mib: int
    """Room that it needs, packed and unpacked at once."""


class KubernetesImages:
    """Copies, archives and notes below `root`. `shares_engine` says whether the cluster's node runs on the
    Docker engine of this machine; it is asked once, when that matters."""

    def __init__(
        self, root: Path, *, base_image: str | None, shares_engine: Callable[[], Awaitable[bool]]
    ) -> None:
        self._root = root
        self._copies = Images(root / "images", None)
        self._base_image = base_image or environment("KUBERNETES_IMAGE")
        self._registry = environment("KUBERNETES_REGISTRY") or DEFAULT_REGISTRY
        self._shares_engine = shares_engine
        self._engine: DockerImages | None = None
        self._known: dict[str, Prepared] = {}
        self._look_at: dict[str, float] = {}
        """When an image is to be looked for again: somebody may remove what nobody seems to use."""
        self._locks: dict[str, asyncio.Lock] = {}

    async def prepare(self, environment_dir: str) -> str:
        """Returns the folder's digest, or that of a named image. See `contract.Backend.prepare`."""
        saved = oci.reference(environment_dir)
        named = saved is None and is_name(environment_dir)
        if saved is not None:
            if not await self._shares_engine():
                oci.refuse_elsewhere(
                    saved,
                    "Push it (`skopeo copy`) to a registry that the cluster pulls from, and name it there.",
                )
            digest = await self._built_here().prepare(environment_dir)
        elif named:
            digest = "image:" + hashlib.sha256(checked_name(environment_dir).encode()).hexdigest()
        else:
            digest = await self._copies.prepare(environment_dir)
        async with self._locks.setdefault(digest, asyncio.Lock()):
            if digest not in self._known or time.monotonic() > self._look_at.get(digest, 0.0):
                self._look_at[digest] = time.monotonic() + MARK_EVERY_S
                if saved is not None:
                    prepared = Prepared(image=saved_tag(digest), files=False)
                elif named:  # The cluster pulls it; that its content stays the same is seen to at each start.
                    prepared = Prepared(image=environment_dir, files=False)
                else:
                    prepared = await self._find(environment_dir, digest)
                note = self._note(digest)
                await asyncio.to_thread(_write, note, json.dumps(asdict(prepared)).encode())
                self._known[digest] = prepared
        return digest

    async def require(self, digest: str) -> Prepared:
        """What `prepare` found, also in an earlier process. Raises `SandboxError` image_unknown."""
        if digest not in self._known and "/" not in digest:
            with contextlib.suppress(OSError, ValueError, TypeError):
                self._known[digest] = Prepared(**json.loads(self._note(digest).read_bytes()))
        if digest not in self._known:
            raise SandboxError(
                f"There is no prepared image {digest}.",
                fix="Call prepare() with the task's environment folder first.",
                code="image_unknown",
                phase="prepare",
                retryable=False,
            )
        return self._known[digest]

    async def archive(self, digest: str, prepared: Prepared, mounts: tuple[str, ...]) -> Archive:
        """What is laid into a pod of this image with these folders mounted. Made once."""
        parts = [] if not prepared.files else [("lower", self._copies.require(digest))]
        for number, source in enumerate(mounts):
            parts.append((f"mount-{number}", await self._copies.snapshot(source)))
        key = hashlib.sha256("\n".join(f"{name} {path}" for name, path in parts).encode()).hexdigest()
        async with self._locks.setdefault("archive " + key, asyncio.Lock()):
            return await asyncio.to_thread(_pack, self._root / "archives" / f"{key}.tar", parts)

    def _note(self, digest: str) -> Path:
        return self._root / "notes" / (digest.replace(":", "-") + ".json")

    async def _find(self, environment_dir: str, digest: str) -> Prepared:
        recipe = _recipe(Path(environment_dir) / "Dockerfile")
        if not recipe or recipe == ["from scratch"]:
            return Prepared(image=await self._base(environment_dir), files=True)
        if len(recipe) == 1 and recipe[0].lower().startswith("from "):
            return Prepared(image=recipe[0].split()[1], files=False)
        if await self._shares_engine():
            await self._built_here().prepare(environment_dir)
            return Prepared(image=f"agentrl/environment:{digest.partition(':')[2]}", files=False)
        return Prepared(image=f"{self._registry}environment:{digest.partition(':')[2]}", files=False)

    async def _base(self, environment_dir: str) -> str:
        if self._base_image is not None:
            return self._base_image
        if await self._shares_engine():
            await self._built_here().prepare(environment_dir)
            named = environment("DOCKER_BASE")
            return named or "agentrl/base:" + await asyncio.to_thread(rootfs.identity)
        return DEFAULT_IMAGE

    def _built_here(self) -> DockerImages:
        if self._engine is None:
            engine = Engine(socket_path())
            self._engine = DockerImages(
                engine, self._root / "engine", owner=None, base_image=None, pressure=Pressure(1)
            )
        return self._engine


def _recipe(dockerfile: Path) -> list[str]:
    """Its lines without comments; `from scratch` in lower case. Empty without a Dockerfile."""
    if not dockerfile.is_file():
        return []
    lines = [line.strip() for line in dockerfile.read_text("utf-8", "replace").splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    return [line.lower() if line.lower() == "from scratch" else line for line in lines]


def _pack(path: Path, parts: list[tuple[str, Path]]) -> Archive:
    if not parts:
        return Archive(path=None, size=0, sha256="", place_mib=16)
    if not path.exists():

        def neutral(info: tarfile.TarInfo) -> tarfile.TarInfo:
            info.uid = info.gid = info.mtime = 0
            info.uname = info.gname = ""
            return info

        path.parent.mkdir(parents=True, exist_ok=True)
        building = path.with_name(f".{path.name}-{os.urandom(6).hex()}")
        with tarfile.open(building, "w") as tar:
            for name, folder in parts:
                tar.add(folder, arcname=name, filter=neutral)
        os.rename(building, path)
    seen = hashlib.sha256()
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            seen.update(chunk)
    size = path.stat().st_size
    return Archive(path=path, size=size, sha256=seen.hexdigest(), place_mib=16 + 3 * (size >> 20))


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}-{os.urandom(6).hex()}")
    beside.write_bytes(data)
    os.rename(beside, path)
