"""An image on this machine's disk, as registries and engines write it, to a tree that sandboxes share.

A task names one as skopeo and podman do: `oci:FOLDER[:TAG]` (an OCI image layout), `oci-archive:FILE[:TAG]`
(the same as a tar), `docker-archive:FILE[:NAME]` (what `docker save` writes, also gzipped); a relative path
is one of the task package, and it lies in there (`envs.session.image_of` refuses others). An
`environment/` folder that holds `oci-layout` or `image.tar` is an image too.

Invariants: every blob has the sha256 that names it before it is parsed, and every layer that of the image's
configuration before the tree is used; the tree is named by the digest of that configuration, which is the
image's id for engines as well; it is complete or not there, however many ask at once and whoever is killed.
Not done here: asking registries. Which machine an image is for is looked at, never translated.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gzip
import hashlib
import io
import json
import os
import platform
import re
import shutil
import stat
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Protocol, cast

import zstandard

from agentrl.errors import SandboxError, TaskError
from envs.sandbox.images import require_room
from envs.sandbox.layers import MAX_BYTES, Tree, bad_image
from envs.sandbox.scoped import inside
from envs.sandbox.shelf import remove_tree
from envs.sandbox.tars import HEADER_BYTES, OF_THE_MACHINE, UNREADABLE, Forwards

KINDS = ("oci", "oci-archive", "docker-archive")
PREFIX = "oci:"
"""How the digests of these images begin."""
DOCUMENT_BYTES = 4 * 1024 * 1024
"""Of an index, a manifest or a configuration."""
MAX_MEMBERS = 20_000
MAX_LAYERS = 256
MAX_NESTING = 4
ZSTD_WINDOW = 128 * 1024 * 1024
FRESH_S = 60.0
"""Something half-done is not looked at before: whoever makes it may not hold it yet."""
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_CHUNK = 1 << 20
_TAGS = ("org.opencontainers.image.ref.name", "io.containerd.image.name")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PLACES = ("/etc", "/dev", "/proc", "/tmp", "/var/tmp", "/root", "/run", "/logs", "/home/policy")
_OWN = ("/dev", "/proc")
"""Programs open what is there by name: behind a link, other mounts may hide it."""
_TAKEN = ("", "proc", "dev", "sys")
_AGAIN = "Pull or pack it again."


@dataclass(frozen=True, slots=True)
class Reference:
    """Where an image is. `kind` is one of `KINDS`, or `archive` for a file that says itself which it is."""

    kind: str
    path: Path
    tag: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.path}" + (f":{self.tag}" if self.tag else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """An unpacked image, as a sandbox starts from it."""

    tree: str
    """Its root on this machine. Never written again."""
    path: str
    env: dict[str, str]
    volumes: tuple[str, ...]
    """Folders that the image declares as volumes: they are writable, empty, and part of the disk."""


def reference(wanted: str) -> Reference | None:
    """What a string that is to be prepared says of an image on this machine; None: it names no such image."""
    kind, colon, rest = wanted.partition(":")
    if colon and kind in KINDS:
        path, _, tag = rest.partition(":")
        if not path or "\0" in wanted:
            raise TaskError(
                f"{wanted!r:.200} names no file.",
                fix=f"Write {kind}:PATH or {kind}:PATH:TAG; the path itself holds no colon.",
                code="bad_image",
                phase="prepare",
            )
        return Reference(kind, Path(path), tag)
    folder = Path(wanted)
    if folder.is_absolute() and (folder / "oci-layout").is_file():
        return Reference("oci", folder, "")
    if folder.is_absolute() and (folder / "image.tar").is_file():
        return Reference("archive", folder / "image.tar", "")
    return None


def located(image: str, package: Path) -> str:
    """A task's image with its path made absolute: relative ones are the package's. Other names stay."""
    found = None if image.startswith("/") else reference(image)
    if found is None:
        return image
    return str(Reference(found.kind, Path(os.path.normpath(package / found.path)), found.tag))


# ------------------------------------------------------------------------------------------- where bytes are


class _Files(Protocol):
    """Named pieces of a folder or of an archive."""

    def names(self) -> frozenset[str]: ...

    def open(self, name: str) -> tuple[io.BufferedReader, int]:
        """It and its length. Raises KeyError for what is not there."""
        ...


class _Folder:
    def __init__(self, path: Path) -> None:
        self._path = path

    def names(self) -> frozenset[str]:
        return frozenset(os.listdir(self._path))

    def open(self, name: str) -> tuple[io.BufferedReader, int]:
        path = self._path / name
        if not path.is_file():
            raise KeyError(name)
        return path.open("rb"), path.stat().st_size


class _Part(io.RawIOBase):
    """A stretch of a file that others read too."""

    def __init__(self, fd: int, offset: int, size: int) -> None:
        self._fd = fd
        self._at = offset
        self._end = offset + size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = os.pread(self._fd, min(len(buffer), self._end - self._at), self._at)
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


class _Archive:
    def __init__(self, file: BinaryIO, what: str) -> None:
        self._file = file
        self._members: dict[str, tuple[int, int] | str] = {}
        refuse = lambda: bad_image(what, "has headers longer than any file needs", "Do not use it.")  # noqa: E731
        reader = Forwards(file, allowed=HEADER_BYTES, refuse=refuse, skips=True)
        for member in reader.members():
            name = os.path.normpath(member.name)
            if name in self._members or len(self._members) > MAX_MEMBERS:
                why = f"holds {name[:200]!r} twice" if name in self._members else "has too many files"
                raise bad_image(what, why, _AGAIN)
            if member.isreg() and not member.issparse():
                self._members[name] = (member.offset_data, member.size)
            elif member.issym() or member.islnk():  # `docker save` links layers that are the same.
                base = os.path.dirname(name) if member.issym() else ""
                self._members[name] = os.path.normpath(os.path.join(base, member.linkname))

    def names(self) -> frozenset[str]:
        return frozenset(self._members)

    def open(self, name: str) -> tuple[io.BufferedReader, int]:
        found = self._members[os.path.normpath(name)]
        for _ in range(MAX_NESTING):
            if not isinstance(found, str):
                return io.BufferedReader(_Part(self._file.fileno(), *found), _CHUNK), found[1]
            found = self._members[found]
        raise KeyError(name)


class _Hashed:
    """Bytes that pass, and their sha256."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.seen = hashlib.sha256()

    def read(self, size: int) -> bytes:
        piece: bytes = self._source.read(size)
        self.seen.update(piece)
        return piece


def _unpacked(file: io.BufferedReader) -> Any:
    """A blob's bytes without compression, by what it begins with."""
    begins = file.peek(4)[:4]
    if begins.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=file)
    if begins == b"\x28\xb5\x2f\xfd":
        unzip = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW)
        return unzip.stream_reader(file, read_across_frames=True)
    return file


# -------------------------------------------------------------------------------------------- which image


@dataclass(frozen=True, slots=True)
class _Layer:
    name: str
    digest: str | None
    """Of the blob; None: `docker save` of old engines says none."""
    diff_id: str
    """Of what is in it, unpacked."""


class Image:
    """One image of an open layout or archive, its documents checked. See `opened`."""

    def __init__(self, what: str, files: _Files, config: bytes, layers: tuple[tuple[str, str | None], ...]):
        self.what = what
        self.files = files
        self.raw_config = config
        self.id = hashlib.sha256(config).hexdigest()
        """Hex digest of its configuration, as engines name it."""
        facts = _parsed(what, config, "its configuration")
        here = ("linux", _MACHINES.get(platform.machine(), platform.machine()))
        its = (facts.get("os"), facts.get("architecture"))
        if its != here:
            raise _foreign(what, [f"{its[0]}/{its[1]}"])
        diff_ids = _table(facts.get("rootfs")).get("diff_ids")
        if not isinstance(diff_ids, list) or not all(
            isinstance(each, str) and _DIGEST.fullmatch(each) for each in diff_ids
        ):
            raise bad_image(what, "does not say what its layers hold", _AGAIN)
        if len(diff_ids) != len(layers) or len(layers) > MAX_LAYERS:
            raise bad_image(what, f"has {len(layers)} layers, and its configuration {len(diff_ids)}", _AGAIN)
        self.layers = tuple(_Layer(*layer, diff_id) for layer, diff_id in zip(layers, diff_ids, strict=True))
        self._config = _table(facts.get("config"))

    def system(self, tree: Path) -> System:
        env = {}
        for entry in _strings(self._config.get("Env")):
            name, _, value = entry.partition("=")
            if name and "\0" not in entry:
                env[name] = value
        path = env.pop("PATH", None) or _PATH
        env.pop("HOME", None)
        volumes = tuple(sorted(_strings(self._config.get("Volumes"))))
        for volume in volumes:
            parts = volume.split("/")
            if not volume.startswith("/") or ".." in parts or "\0" in volume or parts[1] in _TAKEN:
                raise bad_image(self.what, f"declares the volume {volume[:200]!r}", "Use another image.")
        return System(tree=str(tree), path=path, env=env, volumes=volumes)

    def check_blobs(self) -> None:
        """Hash every layer whose digest is known. Raises `TaskError` before a byte of it is parsed."""
        for number, layer in enumerate(self.layers, 1):
            with _blob(self.what, self.files, layer.name) as (file, _):
                seen = hashlib.sha256()
                while piece := file.read(_CHUNK):
                    seen.update(piece)
            if layer.digest is not None and layer.digest != f"sha256:{seen.hexdigest()}":
                where = f"layer {number} of {len(self.layers)}"
                raise bad_image(self.what, f"is damaged: {where} is not {layer.digest}", _AGAIN)

    def unpack(self, tree: Tree) -> None:
        for number, layer in enumerate(self.layers, 1):
            where = f"layer {number} of {len(self.layers)}"
            with _blob(self.what, self.files, layer.name) as (file, _):
                source = _Hashed(_unpacked(file))
                try:
                    tree.apply(source)
                except (*UNREADABLE, zstandard.ZstdError) as error:
                    raise bad_image(self.what, f"can not be read: {where}: {error}", _AGAIN) from error
                except OSError as error:
                    if error.errno in OF_THE_MACHINE:
                        raise
                    why = f"can not be unpacked: {where}: {error.strerror}"
                    raise bad_image(self.what, why, "Use another image.") from error
            if layer.diff_id != f"sha256:{source.seen.hexdigest()}":
                raise bad_image(self.what, f"is damaged: {where} does not hold {layer.diff_id}", _AGAIN)
        tree.finish()

    def save(self, out: BinaryIO, tag: str) -> None:
        """Write this image alone as `docker save` would: what any engine loads."""
        self.check_blobs()
        names = [f"{number}/layer.tar" for number in range(len(self.layers))]
        listing = [{"Config": f"{self.id}.json", "RepoTags": [tag], "Layers": names}]
        with tarfile.open(fileobj=out, mode="w|") as tar:
            texts = (("manifest.json", json.dumps(listing).encode()), (f"{self.id}.json", self.raw_config))
            for name, text in texts:
                info = tarfile.TarInfo(name)
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text))
            for name, layer in zip(names, self.layers, strict=True):
                with _blob(self.what, self.files, layer.name) as (file, size):
                    info = tarfile.TarInfo(name)
                    info.size = size
                    tar.addfile(info, file)


@contextlib.contextmanager
def opened(wanted: Reference, scratch: Path) -> Iterator[Image]:
    """The image of a reference; `scratch` is a folder for what has to be unzipped.

    Raises `TaskError` bad_image: not there, damaged, ambiguous, for another machine."""
    what, path = str(wanted), wanted.path
    if not path.is_absolute():
        raise bad_image(what, "has a relative path, and no task whose it is", "Write it absolute.")
    folder = path if wanted.kind == "oci" else path.parent
    if wanted.kind in ("oci", "archive") and (folder / "files").is_dir():
        raise bad_image(what, "lies beside files/", "Put the files into the image.")
    try:
        with contextlib.ExitStack() as stack:
            if wanted.kind == "oci":
                if not path.is_dir():
                    raise bad_image(what, "is not there: no such folder", "Correct environment.docker_image.")
                files: _Files = _Folder(path)
            else:
                if not path.is_file():
                    raise bad_image(what, "is not there: no such file", "Correct environment.docker_image.")
                files = _Archive(stack.enter_context(_plain(path, what, scratch)), what)
            docker = wanted.kind == "docker-archive" or (
                wanted.kind == "archive" and "manifest.json" in files.names()
            )
            yield _of_docker(what, files, wanted.tag) if docker else _of_index(what, files, wanted.tag)
    except UNREADABLE as error:
        raise bad_image(what, f"can not be read: {error}", _AGAIN) from error


@contextlib.contextmanager
def _plain(path: Path, what: str, scratch: Path) -> Iterator[BinaryIO]:
    """An archive file without the gzip around it."""
    with path.open("rb") as file:
        if file.read(2) != b"\x1f\x8b":
            file.seek(0)
            yield file
            return
        file.seek(0)
        scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=scratch) as copy, gzip.GzipFile(fileobj=file) as packed:
            left = MAX_BYTES
            while piece := packed.read(_CHUNK):
                left -= len(piece)
                if left < 0:
                    raise bad_image(what, f"unpacks to more than {MAX_BYTES >> 30} GiB", "Use a smaller one.")
                if left >> 28 != (left + len(piece)) >> 28:
                    require_room(scratch)
                copy.write(piece)
            copy.seek(0)
            yield cast(BinaryIO, copy)


@contextlib.contextmanager
def _blob(what: str, files: _Files, name: str) -> Iterator[tuple[io.BufferedReader, int]]:
    try:
        file, size = files.open(name)
    except KeyError as error:
        raise bad_image(what, f"lacks {name[:200]}", _AGAIN) from error
    with file:
        yield file, size


def _read(what: str, files: _Files, name: str, digest: str | None) -> bytes:
    with _blob(what, files, name) as (file, _):
        data = file.read(DOCUMENT_BYTES + 1)
    if len(data) > DOCUMENT_BYTES:
        raise bad_image(what, f"has a {name[:200]} of more than {DOCUMENT_BYTES >> 20} MiB", "Do not use it.")
    if digest is not None and digest != f"sha256:{hashlib.sha256(data).hexdigest()}":
        raise bad_image(what, f"is damaged: {name[:200]} is not {digest}", _AGAIN)
    return data


def _json(what: str, data: bytes, name: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise bad_image(what, f"can not be read: {name}: {error}", _AGAIN) from error


def _parsed(what: str, data: bytes, name: str) -> dict[str, Any]:
    facts = _json(what, data, name)
    if not isinstance(facts, dict):
        raise bad_image(what, f"can not be read: {name} is no table", _AGAIN)
    return facts


def _rows(what: str, value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise bad_image(what, f"can not be read: {name} lists none", _AGAIN)
    return value


def _strings(value: Any) -> list[str]:
    """Those of a list, or the names of a table; an image's author may have written anything."""
    return [each for each in value if isinstance(each, str)] if isinstance(value, list | dict) else []


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _tags(row: dict[str, Any]) -> list[str]:
    return [str(value) for key, value in _table(row.get("annotations")).items() if key in _TAGS]


def _digest_of(what: str, row: Any) -> str:
    digest = row.get("digest") if isinstance(row, dict) else None
    if not isinstance(digest, str) or _DIGEST.fullmatch(digest) is None:
        raise bad_image(what, f"names a blob by {digest!r:.100}, which is no sha256", _AGAIN)
    return digest


def _blob_name(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _of_index(what: str, files: _Files, tag: str) -> Image:
    layout = _parsed(what, _read(what, files, "oci-layout", None), "oci-layout")
    if not str(layout.get("imageLayoutVersion", "")).startswith("1."):
        raise bad_image(what, "is of a layout that is not known", "Pack it as an OCI image layout 1.0.")
    index = _parsed(what, _read(what, files, "index.json", None), "index.json")
    rows = _rows(what, index.get("manifests"), "index.json")
    if tag:
        named = [row for row in rows if tag in _tags(row)]
        if not named:
            raise _which(what, [name for row in rows for name in _tags(row)])
        rows = named
    manifest = _manifest(what, files, rows, MAX_NESTING)
    config = _digest_of(what, manifest.get("config"))
    layers = []
    for row in _rows(what, manifest.get("layers"), "its manifest"):
        digest = _digest_of(what, row)
        if "encrypted" in str(row.get("mediaType")):
            raise bad_image(what, "is encrypted", "Decrypt it first.")
        layers.append((_blob_name(digest), digest))
    return Image(what, files, _read(what, files, _blob_name(config), config), tuple(layers))


def _manifest(what: str, files: _Files, rows: list[dict[str, Any]], nesting: int) -> dict[str, Any]:
    """The manifest for this machine among these."""
    if nesting == 0:
        raise bad_image(what, "nests its indexes too deeply", _AGAIN)
    here = ("linux", _MACHINES.get(platform.machine(), platform.machine()))
    offered: dict[str, None] = {}
    fitting = []
    for row in rows:
        on = row.get("platform")
        if isinstance(on, dict) and on.get("os") == "unknown":  # Notes of how it was built.
            continue
        if isinstance(on, dict):
            offered[f"{on.get('os')}/{on.get('architecture')}"] = None
        if not isinstance(on, dict) or (on.get("os"), on.get("architecture")) == here:
            fitting.append(row)
    variants = [str(_table(row.get("platform")).get("variant", "")) for row in fitting]
    if len(fitting) > 1 and len(set(variants)) == len(fitting) and any(variants):
        fitting = [min(zip(variants, fitting, strict=True), key=lambda pair: pair[0])[1]]
    if not fitting:
        raise _foreign(what, list(offered))
    if len({_digest_of(what, row) for row in fitting}) > 1:
        raise _which(what, [name for row in fitting for name in _tags(row)])
    digest = _digest_of(what, fitting[0])
    found = _parsed(what, _read(what, files, _blob_name(digest), digest), "its manifest")
    if "manifests" in found:
        return _manifest(what, files, _rows(what, found["manifests"], "its index"), nesting - 1)
    return found


def _of_docker(what: str, files: _Files, name: str) -> Image:
    data = _read(what, files, "manifest.json", None)
    rows = _rows(what, _json(what, data, "manifest.json"), "manifest.json")
    if name:
        full = name if ":" in name else f"{name}:latest"
        named = [row for row in rows if full in _strings(row.get("RepoTags"))]
    else:
        named = rows
    if len(named) != 1:
        raise _which(what, [tag for row in rows for tag in _strings(row.get("RepoTags")) or ["<none>"]])
    config, layers = named[0].get("Config"), named[0].get("Layers")
    if (
        not isinstance(config, str)
        or not isinstance(layers, list)
        or not all(isinstance(each, str) for each in layers)
    ):
        raise bad_image(what, "can not be read: manifest.json names no layers", _AGAIN)
    return Image(
        what,
        files,
        _read(what, files, config, _said_by_name(config)),
        tuple((each, _said_by_name(each)) for each in layers),
    )


def _said_by_name(name: str) -> str | None:
    """The digest that a file of a docker archive is named by, if it is."""
    found = re.fullmatch(r"(?:blobs/sha256/([0-9a-f]{64})|([0-9a-f]{64})\.json)", name)
    return None if found is None else f"sha256:{found[1] or found[2]}"


def _which(what: str, names: list[str]) -> TaskError:
    known = ", ".join(dict.fromkeys(name[:100] for name in names[:20])) or "none is named"
    return bad_image(what, f"is not one image: it holds {known}", "Name one: KIND:PATH:NAME.")


def _foreign(what: str, offered: list[str]) -> TaskError:
    here = f"linux/{_MACHINES.get(platform.machine(), platform.machine())}"
    return bad_image(
        what,
        f"is for {', '.join(offered)[:200] or 'no machine'}, and this machine is {here}",
        f"Pull it for this machine: --platform {here}.",
    )


def identity(wanted: Reference, scratch: Path) -> str:
    """The digest of an image, its layers not read. Raises as `opened`."""
    with opened(wanted, scratch) as image:
        return PREFIX + image.id


def save(wanted: Reference, scratch: Path, tag: str, out: BinaryIO) -> None:
    """See `Image.save`. Raises as `opened`."""
    with opened(wanted, scratch) as image:
        image.save(out, tag)


# -------------------------------------------------------------------------------------------------- the store


class OciImages:
    """Unpacked images below a folder. `owner` (uid, gid) gets the workdirs, and `first_id` is the id of an
    image's root, when this process may give files away."""

    def __init__(self, root: Path, owner: tuple[int, int] | None, first_id: int | None) -> None:
        self._root = root
        self._owner = owner
        self._first_id = first_id
        self._locks: dict[str, asyncio.Lock] = {}

    async def prepare(self, wanted: Reference) -> str:
        """Unpack an image; returns its digest. Single-flight. Raises `TaskError` bad_image, `SandboxError`
        no_bash."""
        async with self._locks.setdefault(str(wanted), asyncio.Lock()):
            return await asyncio.to_thread(self._prepare, wanted)

    async def has(self, wanted: Reference) -> bool:
        """Whether `prepare` would find it. Raises as `opened`."""
        digest = await asyncio.to_thread(identity, wanted, self._root)
        return self._path(digest).is_dir()

    def _prepare(self, wanted: Reference) -> str:
        try:
            with opened(wanted, self._root) as image:
                target = self._path(PREFIX + image.id)
                if not target.is_dir():
                    with self._building() as building:
                        self._unpack(image, building, target)
                        _give(building, target)
                return PREFIX + image.id
        except OSError as error:
            raise SandboxError(
                f"The image {wanted} could not be unpacked: {error}.",
                fix="Check the free space and the rights of the state folder.",
                code="image_copy",
                phase="prepare",
            ) from error

    def _unpack(self, image: Image, building: Path, target: Path) -> None:
        image.check_blobs()
        tree = building / "tree"
        tree.mkdir(mode=0o755)
        if self._first_id is not None:
            os.chown(tree, self._first_id, self._first_id)
        image.unpack(Tree(tree, name=image.what, first_id=self._first_id))
        system = image.system(target / "tree")
        _require_bash(image.what, tree, system.path)
        _require_places(image.what, tree, (*_PLACES, *system.volumes))
        (building / "system.json").write_text(json.dumps(asdict(system)))

    def require(self, digest: str) -> System:
        """What was unpacked, also in an earlier process. Raises `SandboxError` image_unknown."""
        try:
            facts = json.loads((self._path(digest) / "system.json").read_bytes())
        except (OSError, ValueError) as error:
            raise SandboxError(
                f"There is no prepared image {digest}.",
                fix="Call prepare() with the task's image first.",
                code="image_unknown",
                phase="prepare",
                retryable=False,
            ) from error
        tree = str(self._path(digest) / "tree")
        return System(**{**facts, "tree": tree, "volumes": tuple(facts["volumes"])})

    async def workdir(self, digest: str, workdir: str) -> Path:
        """A folder, never written again, that the workdir of a fresh sandbox starts as: what the image has
        there, all of it the policy's."""
        key = hashlib.sha256(f"{digest} {workdir}".encode()).hexdigest()[:32]
        target = self._root / f"oci-workdir-{key}"
        async with self._locks.setdefault(key, asyncio.Lock()):
            if not target.is_dir():
                await asyncio.to_thread(self._copy_workdir, self.require(digest), workdir, target)
        return target

    def _copy_workdir(self, system: System, workdir: str, target: Path) -> None:
        try:
            source = inside(system.tree, workdir)
        except OSError as error:
            raise bad_image(
                system.tree, f"has no folder {workdir}: {error.strerror}", "Use another workdir."
            ) from error
        with self._building() as building:
            copy = building / "copy"
            if os.path.isdir(source):
                shutil.copytree(source, copy, symlinks=True)
            else:
                copy.mkdir()
            for root, folders, files in os.walk(copy):
                for name in (*folders, *files, "."):
                    path = os.path.join(root, name)
                    if name in files and stat.S_ISREG(os.lstat(path).st_mode):
                        os.chmod(path, os.lstat(path).st_mode & 0o777 | 0o600)
                    elif not os.path.islink(path):
                        os.chmod(path, os.lstat(path).st_mode & 0o777 | 0o700)
                    if self._owner is not None:
                        os.chown(path, *self._owner, follow_symlinks=False)
            _give(copy, target)

    def _path(self, digest: str) -> Path:
        if _DIGEST.fullmatch("sha256:" + digest.removeprefix(PREFIX)) is None:
            return self._root / "oci-none"
        return self._root / digest.replace(":", "-")

    @contextlib.contextmanager
    def _building(self) -> Iterator[Path]:
        """A folder for something half-done: gone afterwards, and swept by the next if this process dies."""
        self._root.mkdir(parents=True, exist_ok=True)
        require_room(self._root)
        for left in self._root.glob(".oci-*"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > FRESH_S:
                    with _held(left):
                        remove_tree(left)
        building = Path(tempfile.mkdtemp(prefix=".oci-", dir=self._root))
        try:
            with _held(building):
                yield building
        finally:
            remove_tree(building)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Raises `BlockingIOError` while another process, or another thread of this one, is at work there."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def _give(made: Path, target: Path) -> None:
    if made.name.startswith("."):
        made.chmod(0o755)
    try:
        os.rename(made, target)
    except OSError:
        if not target.is_dir():  # Else someone else was faster with the same content.
            raise


def _require_places(what: str, tree: Path, places: tuple[str, ...]) -> None:
    """Folders, or nothing yet, where a sandbox mounts something of its own."""
    for place in places:
        try:
            path = inside(str(tree), place)
            led_away = place in _OWN and path != f"{tree}{place}"
            while not os.path.lexists(path):
                path = os.path.dirname(path)
            good = os.path.isdir(path) and not led_away
        except OSError:
            good = False
        if not good:
            raise bad_image(
                what, f"has something else where {place} should be a folder", "Use another image."
            )


def _require_bash(what: str, tree: Path, path: str) -> None:
    for folder in path.split(":"):
        with contextlib.suppress(OSError):
            program = inside(str(tree), f"{folder}/bash")
            facts = os.lstat(program)
            if folder.startswith("/") and stat.S_ISREG(facts.st_mode) and facts.st_mode & 0o111:
                return
    _no_bash(what)


def _no_bash(what: str) -> NoReturn:
    raise SandboxError(
        f"The image {what} has no bash, under which commands run.",
        fix="Install bash in its Dockerfile.",
        owner="task",
        code="no_bash",
        phase="prepare",
        retryable=False,
    )


def refuse_elsewhere(wanted: Reference, fix: str) -> NoReturn:
    """For a backend to which an image on this machine's disk means nothing."""
    raise TaskError(
        f"The image {wanted} lies on this machine's disk, and this backend can not use it from there.",
        fix=fix,
        code="image_unsupported",
        phase="prepare",
    )
