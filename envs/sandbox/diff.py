"""Two directory trees to the `FileChange` records between them, read from outside and never through a
symlink.

Works on directory descriptors, so it does not care which process or mount namespace a tree lived in, nor
whether it is still mounted. Not carried over, because a `FileChange` can not say it: sockets, fifos and
devices, names that are not UTF-8, owners, times and extended attributes.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from agentrl.errors import SandboxError
from envs.sandbox.contract import FileChange

MAX_FILE_BYTES = 16 * 1024 * 1024
MAX_TOTAL_BYTES = 64 * 1024 * 1024
MAX_CHANGES = 20_000
MAX_DEPTH = 64
_OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class DiffTooLarge(SandboxError):
    """The policy changed more than a diff may carry. Its own doing: such work can not be judged."""

    owner = "policy"
    code = "diff_too_large"
    retryable = False


def diff_overlay(upper: int, lower: Path) -> tuple[FileChange, ...]:
    """Changes that an overlay's upper directory (a descriptor, not consumed) makes to `lower`, sorted by
    path."""
    return _Walk().run(upper, lower, whole=False)


def diff_trees(changed: int, original: Path) -> tuple[FileChange, ...]:
    """Changes from `original` to the tree of the descriptor `changed` (not consumed), sorted by path."""
    return _Walk().run(changed, original, whole=True)


class _Walk:
    def __init__(self) -> None:
        self._changes: list[FileChange] = []
        self._bytes = 0

    def run(self, upper: int, lower: Path, *, whole: bool) -> tuple[FileChange, ...]:
        below = os.open(lower, _FOLDER)
        try:
            self._folder(upper, below, "", 0, whole)
        finally:
            os.close(below)
        return tuple(sorted(self._changes, key=lambda c: c.path))

    def _add(self, change: FileChange) -> None:
        self._changes.append(change)
        self._bytes += len(change.content or b"")
        if len(self._changes) > MAX_CHANGES or self._bytes > MAX_TOTAL_BYTES:
            raise DiffTooLarge(
                f"The workdir has more than {MAX_CHANGES} changes or {MAX_TOTAL_BYTES} changed bytes.",
                phase="diff",
                evidence={"changes": len(self._changes), "bytes": self._bytes},
            )

    def _folder(self, upper: int, lower: int | None, prefix: str, depth: int, whole: bool) -> None:
        """`whole`: `upper` says everything about this directory, so what it lacks is deleted."""
        if depth > MAX_DEPTH:
            raise DiffTooLarge(f"{prefix} is nested deeper than {MAX_DEPTH} directories.", phase="diff")
        names = [n for n in os.listdir(upper) if _encodable(n)]
        if whole and lower is not None:
            for name in set(os.listdir(lower)) - set(names):
                if _encodable(name):
                    self._add(FileChange(path=prefix + name, kind="deleted"))
        for name in names:
            path = prefix + name
            try:
                now = os.stat(name, dir_fd=upper, follow_symlinks=False)
            except FileNotFoundError:
                continue  # A process still lives there and removed it meanwhile.
            before = _stat(name, lower)
            if stat.S_ISDIR(now.st_mode):
                self._subfolder(upper, lower, name, path, now, before, depth, whole)
            elif stat.S_ISREG(now.st_mode):
                self._file(upper, lower, name, path, now, before)
            elif stat.S_ISLNK(now.st_mode):
                target = os.fsencode(os.readlink(name, dir_fd=upper))
                same = before is not None and stat.S_ISLNK(before.st_mode)
                if not same or os.fsencode(os.readlink(name, dir_fd=lower)) != target:
                    self._add(FileChange(path=path, kind="symlink", mode=0o777, content=target))
            elif before is not None:
                # A whiteout (character device 0:0), or a special file in place of something: it is gone.
                self._add(FileChange(path=path, kind="deleted"))

    def _subfolder(
        self,
        upper: int,
        lower: int | None,
        name: str,
        path: str,
        now: os.stat_result,
        before: os.stat_result | None,
        depth: int,
        whole: bool,
    ) -> None:
        there = before is not None and stat.S_ISDIR(before.st_mode)
        mode = stat.S_IMODE(now.st_mode) & 0o777
        if not there or (before is not None and mode != stat.S_IMODE(before.st_mode) & 0o777):
            self._add(FileChange(path=path, kind="dir", mode=mode))
        inner = _open(name, upper, now.st_mode, _FOLDER)
        try:
            below = os.open(name, _FOLDER, dir_fd=lower) if there else None
            try:
                self._folder(inner, below, path + "/", depth + 1, whole or _opaque(inner))
            finally:
                if below is not None:
                    os.close(below)
        finally:
            os.close(inner)

    def _file(
        self,
        upper: int,
        lower: int | None,
        name: str,
        path: str,
        now: os.stat_result,
        before: os.stat_result | None,
    ) -> None:
        mode = stat.S_IMODE(now.st_mode) & 0o777
        if now.st_size > MAX_FILE_BYTES:
            raise DiffTooLarge(
                f"{path} has {now.st_size} bytes; a changed file may have {MAX_FILE_BYTES}.",
                phase="diff",
                evidence={"path": path, "bytes": now.st_size},
            )
        content = _read(name, upper, now.st_mode)
        if before is not None and stat.S_ISREG(before.st_mode) and lower is not None:
            same_mode = mode == stat.S_IMODE(before.st_mode) & 0o777
            if same_mode and before.st_size == len(content) and _read(name, lower, before.st_mode) == content:
                return
        self._add(FileChange(path=path, kind="file", mode=mode, content=content))


def _encodable(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _stat(name: str, folder: int | None) -> os.stat_result | None:
    if folder is None:
        return None
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _open(name: str, folder: int, mode: int, flags: int) -> int:
    """Open what was seen, also where its owner (we, without root) took away the permission to read it."""
    try:
        return os.open(name, flags, dir_fd=folder)
    except PermissionError:
        handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            exact = f"/proc/self/fd/{handle}"
            os.chmod(exact, stat.S_IMODE(mode) | 0o500)
            try:
                return os.open(exact, flags & ~os.O_NOFOLLOW)
            finally:
                os.chmod(exact, stat.S_IMODE(mode))
        finally:
            os.close(handle)


def _read(name: str, folder: int, mode: int) -> bytes:
    fd = _open(name, folder, mode, _FILE)
    with os.fdopen(fd, "rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise DiffTooLarge(f"{name} grew beyond {MAX_FILE_BYTES} bytes while it was read.", phase="diff")
    return data


def _opaque(folder: int) -> bool:
    for name in _OPAQUE:
        try:
            if os.getxattr(folder, name) == b"y":
                return True
        except OSError:
            continue
    return False
