"""Two directory trees to the changes between them, never through a symlink.

Works on directory descriptors, so it does not care which process or mount namespace a tree lived in, nor
whether it is still mounted. Standard library only, Python >= 3.8: it also runs inside a pod, like the agent.
Not carried over, because a change can not say it: sockets, fifos and devices, names that are not UTF-8,
owners, times and extended attributes.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Callable, NamedTuple  # noqa: UP035  (evaluated at run time, also by 3.8)

MAX_FILE_BYTES = 16 * 1024 * 1024
MAX_TOTAL_BYTES = 64 * 1024 * 1024
MAX_CHANGES = 20_000
MAX_DEPTH = 64
LOOKS = 3
"""How often a name is looked at that a living process changes meanwhile; then it is left out."""
_MOVED = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO})
_OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Change(NamedTuple):
    """One path; see `contract.FileChange`."""

    path: str
    kind: str
    mode: int = 0o644
    content: bytes | None = None


class TooLarge(Exception):
    """There is more than a diff may carry. `evidence` says what."""

    def __init__(self, message: str, evidence: dict[str, str | int] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.evidence = dict(evidence or {})


def walk(upper: int, lower: int, add: Callable[[Change], None], *, whole: bool) -> None:
    """Tell `add` every change from the tree `lower` to the tree `upper` (descriptors, not consumed).

    `whole`: `upper` is the changed tree itself; else it is the upper directory of an overlay on `lower`.
    In no order. Raises `TooLarge`.
    """
    _Walk(add)._folder(upper, lower, "", 0, whole)


class _Walk:
    def __init__(self, add: Callable[[Change], None]) -> None:
        self._tell = add
        self._changes = 0
        self._bytes = 0

    def _add(self, change: Change) -> None:
        self._changes += 1
        self._bytes += len(change.content or b"")
        if self._changes > MAX_CHANGES or self._bytes > MAX_TOTAL_BYTES:
            raise TooLarge(
                f"The workdir has more than {MAX_CHANGES} changes or {MAX_TOTAL_BYTES} changed bytes.",
                {"changes": self._changes, "bytes": self._bytes},
            )
        self._tell(change)

    def _folder(self, upper: int, lower: int | None, prefix: str, depth: int, whole: bool) -> None:
        """`whole`: `upper` says everything about this directory, so what it lacks is deleted."""
        if depth > MAX_DEPTH:
            raise TooLarge(f"{prefix[:200]}… is nested deeper than {MAX_DEPTH} directories.")
        names = [n for n in os.listdir(upper) if _encodable(n)]
        if whole and lower is not None:
            for name in set(os.listdir(lower)) - set(names):
                if _encodable(name):
                    self._add(Change(prefix + name, "deleted"))
        for name in names:
            for _ in range(LOOKS):
                try:
                    self._one(upper, lower, name, prefix + name, depth, whole)
                except OSError as error:
                    if error.errno in _MOVED:
                        continue  # A process still lives there and put something else in its place.
                    raise
                break

    def _one(self, upper: int, lower: int | None, name: str, path: str, depth: int, whole: bool) -> None:
        """What became of one name. Tells nothing before everything is known that another process could
        change."""
        now = os.stat(name, dir_fd=upper, follow_symlinks=False)
        before = _stat(name, lower)
        if stat.S_ISDIR(now.st_mode):
            self._subfolder(upper, lower, name, path, now, before, depth, whole)
        elif stat.S_ISREG(now.st_mode):
            self._file(upper, lower, name, path, now, before)
        elif stat.S_ISLNK(now.st_mode):
            target = os.fsencode(os.readlink(name, dir_fd=upper))
            same = before is not None and stat.S_ISLNK(before.st_mode)
            if not same or os.fsencode(os.readlink(name, dir_fd=lower)) != target:
                self._add(Change(path, "symlink", 0o777, target))
        elif before is not None:
            # A whiteout (character device 0:0), or a special file in place of something: it is gone.
            self._add(Change(path, "deleted"))

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
        inner = _open(name, upper, now.st_mode, _FOLDER)
        try:
            if not there or (before is not None and mode != stat.S_IMODE(before.st_mode) & 0o777):
                self._add(Change(path, "dir", mode))
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
            raise TooLarge(
                f"{path} has {now.st_size} bytes; a changed file may have {MAX_FILE_BYTES}.",
                {"path": path, "bytes": now.st_size},
            )
        content = _read(name, upper, now.st_mode)
        if before is not None and stat.S_ISREG(before.st_mode) and lower is not None:
            same_mode = mode == stat.S_IMODE(before.st_mode) & 0o777
            if same_mode and before.st_size == len(content) and _read(name, lower, before.st_mode) == content:
                return
        self._add(Change(path, "file", mode, content))


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
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file any more")
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise TooLarge(f"{name} grew beyond {MAX_FILE_BYTES} bytes while it was read.")
    return data


def _opaque(folder: int) -> bool:
    for name in _OPAQUE:
        try:
            if os.getxattr(folder, name) == b"y":
                return True
        except OSError:
            continue
    return False
