"""A task's `environment/` folder to a content-addressed, read-only copy that sandboxes share as their lower
layer.

A task may name an image in place of such a folder: `is_name` and `checked_name` say what is one.

The image holds the workspace files of the folder (what is under `files/` when that exists, else everything
but the recipe for a container), laid at the workdir. Invariant: a folder named by a digest is complete and
never written again, and its content is what the digest was taken of, also when somebody writes into the
original meanwhile; copies of the same folder made at the same time end as one.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import stat
from pathlib import Path

from agentrl.errors import SandboxError, TaskError
from agentrl.types import content_hash

RECIPES = frozenset(
    {
        "Dockerfile",
        ".dockerignore",
        "docker-compose.yaml",
        "docker-compose.yml",
        "compose.yaml",
        "compose.yml",
    }
)
"""Files of an environment folder that say how to build a container; not part of the workspace."""
LOW_BYTES = 256 * 1024 * 1024
"""With less than this free on a disk nothing new is made there: what lives there goes on."""
SANDBOX_SHARE = 0.25
"""Of that: with less no sandbox is made either, nor what is mounted into one. So what has begun before images
are refused can be finished: its verifier needs a sandbox too."""
MOST_SPARE_BYTES = 8 * 1024**3
_NAME = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*(:[0-9]+)?(/[A-Za-z0-9][A-Za-z0-9._-]*)*(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?"
    r"(@sha256:[0-9a-f]{64})?"
)
"""Registry and port, repository, tag, digest. Nothing in it leads anywhere else in a URL."""


def is_name(wanted: str) -> bool:
    """Whether what is to be prepared is an image's name, not a folder's path."""
    return not os.path.isabs(wanted) and not os.path.isdir(wanted)


def checked_name(name: str) -> str:
    """The name of an image. Raises `TaskError` for what is none."""
    if len(name) > 512 or ".." in name or _NAME.fullmatch(name) is None:
        raise TaskError(
            f"{name!r:.200} is no name of an image.",
            fix="Write environment.docker_image as repository:tag or repository@sha256:…",
            code="bad_image",
            phase="prepare",
        )
    return name


def free_bytes(folder: Path) -> tuple[int, int]:
    """Free bytes, and all, of the disk that a folder is on or will be. Raises OSError."""
    there = next((p for p in (folder, *folder.parents) if p.is_dir()), folder)
    facts = os.statvfs(there)
    return facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize


def spare_bytes(total: int) -> int:
    """What should stay free of a disk of so many bytes; with less, what nobody uses is let go (`room`)."""
    return max(2 * LOW_BYTES, min(total // 10, MOST_SPARE_BYTES))


def require_room(folder: Path, *, share: float = 1.0) -> None:
    """Raise `SandboxError` when the disk of a folder is nearly full: half an image is worse than none.
    `share`: of the free bytes that an image needs, for what needs less."""
    why = short_of_room(folder, share=share)
    if why is not None:
        raise SandboxError(
            why,
            fix="Remove images that are no longer used (`agentrl images prune`), old runs, or other files.",
            code="disk_pressure",
            phase="prepare",
        )


def short_of_room(*folders: Path, share: float = 1.0) -> str | None:
    """Why nothing new should be made on the disks of these folders; None: there is room."""
    for folder in folders:
        try:
            free, _ = free_bytes(folder)
        except OSError:
            continue  # Not here, or not for us to see.
        if free < share * LOW_BYTES:
            return (
                f"The disk of {folder} has {free >> 20} MiB left, less than {int(share * LOW_BYTES) >> 20}."
            )
    return None


def folder_digest(folder: Path) -> str:
    """`dir:` and the sha256 over relative paths, modes as git keeps them, and bytes of a whole folder."""
    entries = []
    for path in _walk(folder):
        facts = path.lstat()
        relative = os.fsencode(path.relative_to(folder))
        if stat.S_ISLNK(facts.st_mode):
            entries.append((relative, b"120000", os.fsencode(os.readlink(path))))
        elif stat.S_ISREG(facts.st_mode):
            entries.append((relative, b"100755" if facts.st_mode & 0o111 else b"100644", path.read_bytes()))
        elif not stat.S_ISDIR(facts.st_mode):
            raise TaskError(
                f"{path} is neither a file, a folder nor a symlink.",
                fix="Remove it from the task.",
                code="bad_image",
                phase="prepare",
            )
    return "dir:" + content_hash(*(part for entry in sorted(entries) for part in entry))


def workspace(environment: Path) -> Path:
    """The folder whose content is laid at the workdir."""
    files = environment / "files"
    return files if files.is_dir() else environment


def _walk(folder: Path) -> list[Path]:
    found = []
    for root, folders, files in os.walk(folder):
        found += [Path(root, name) for name in (*folders, *files)]
    return found


class Images:
    """Copies under one root folder, owned by `owner` (uid, gid) when this process may give files away."""

    def __init__(self, root: Path, owner: tuple[int, int] | None) -> None:
        self._root = root
        self._owner = owner
        self._known: dict[str, str] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def prepare(self, environment_dir: str) -> str:
        """Copy the workspace of an environment folder; returns its digest. Single-flight per folder."""
        lock = self._locks.setdefault(environment_dir, asyncio.Lock())
        async with lock:
            return await asyncio.to_thread(self._copy_environment, Path(environment_dir))

    async def has(self, environment_dir: str) -> bool:
        """Whether `prepare` would find it."""
        return await asyncio.to_thread(self._has, Path(environment_dir))

    def _has(self, environment: Path) -> bool:
        return environment.is_dir() and self.path(folder_digest(environment)).is_dir()

    def _copy_environment(self, environment: Path) -> str:
        if is_name(str(environment)):
            raise TaskError(
                f"The image {checked_name(str(environment))} can not be used: nothing here asks a registry.",
                fix="Use the docker or kubernetes backend; or save it (`docker save`) and name the file,"
                " docker-archive:PATH; or give the task an environment/ folder.",
                code="image_unsupported",
                phase="prepare",
            )
        if not environment.is_dir():
            raise TaskError(
                f"There is no environment folder {environment}.",
                fix="Give the task an environment/ folder with its workspace files.",
                code="bad_image",
                phase="prepare",
            )
        return self._copy(environment, "dir:")

    async def snapshot(self, folder: str) -> Path:
        """A copy of a folder that is mounted beside an image (tests): readable inside whatever the modes
        of the original, and unchanged while it is in use."""
        return await asyncio.to_thread(self._snapshot, Path(folder))

    def _snapshot(self, folder: Path) -> Path:
        if not folder.is_dir():
            raise SandboxError(
                f"There is no folder {folder} to mount.", code="bad_mount", phase="prepare", retryable=False
            )
        return self.path(self._copy(folder, "mount:"))

    def path(self, digest: str) -> Path:
        """Where the copy with this digest is, or would be."""
        return self._root / digest.replace(":", "-")

    def require(self, digest: str) -> Path:
        path = self.path(digest)
        if "/" in digest or not path.is_dir():
            raise SandboxError(
                f"There is no prepared image {digest}.",
                fix="Call prepare() with the task's environment folder first.",
                code="image_unknown",
                phase="prepare",
                retryable=False,
            )
        return path

    def _copy(self, whole: Path, kind: str) -> str:
        """Copy a folder, `dir:` an environment's or `mount:` any other; returns its digest. That is taken of
        the copy, so it tells what was copied, whatever happens to the original meanwhile."""
        digest = kind + folder_digest(whole).removeprefix("dir:")
        if self.path(digest).is_dir():
            return digest
        require_room(self._root, share=1.0 if kind == "dir:" else SANDBOX_SHARE)
        building = self._root / f".building-{os.getpid()}-{os.urandom(6).hex()}"
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            shutil.copytree(whole, building, symlinks=True)
            digest = kind + folder_digest(building).removeprefix("dir:")
            made = workspace(building) if kind == "dir:" else building
            if kind == "dir:" and made == building:
                for name in RECIPES:
                    _discard(building / name)
            for path in (made, *_walk(made)):
                self._settle(path)
            self._give(made, self.path(digest))
        except OSError as error:
            raise _not_copied(whole, error) from error
        finally:
            shutil.rmtree(building, ignore_errors=True)
        return digest

    def _give(self, made: Path, target: Path) -> None:
        try:
            os.rename(made, target)
        except OSError:
            if not target.is_dir():  # Else someone else was faster with the same content.
                raise

    def _settle(self, path: Path) -> None:
        """Modes as git keeps them, so that an image does not depend on the umask of who made the folder."""
        facts = path.lstat()
        if not stat.S_ISLNK(facts.st_mode):
            executable = stat.S_ISDIR(facts.st_mode) or facts.st_mode & 0o111
            path.chmod(0o755 if executable else 0o644)
        if self._owner is not None:
            os.chown(path, *self._owner, follow_symlinks=False)


def _discard(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _not_copied(what: Path, error: OSError) -> SandboxError:
    return SandboxError(
        f"The image of {what} could not be copied: {error}.",
        fix="Check the free space and the rights of the state folder.",
        code="image_copy",
        phase="prepare",
    )


def changing(folder: Path) -> SandboxError:
    """For a folder that is no longer the same after an image was made of it."""
    return SandboxError(
        f"{folder} changes while it is read.",
        fix="Finish writing the folder before it is used.",
        code="image_changing",
        phase="prepare",
    )
