"""The layers of an image, tars from somebody else, to one folder, in order.

Nothing of a layer is believed. Every name is resolved inside the folder, through the links that the image
itself made and never out of it; nothing is written through a link or into what is there: a name that comes
again replaces. Whiteouts (`.wh.x`, `.wh..wh..opq`) hide what earlier layers brought, not what their own did.
Left out, because a sandbox has no use for it or it would be a danger: device nodes, fifos, setuid and setgid
bits, extended attributes. What is counted is what was unpacked, never what a header says.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tarfile
from pathlib import Path
from typing import Any

from agentrl.errors import TaskError
from envs.sandbox.images import require_room
from envs.sandbox.scoped import inside
from envs.sandbox.tars import HEADER_BYTES, Forwards

MAX_BYTES = 32 * 1024**3
"""Of all layers of an image, unpacked."""
MAX_ENTRIES = 2_000_000
MAX_DEPTH = 256
IDS = 65536
"""Ids of an image that a sandbox has; a file of any other belongs to nobody."""
_NOBODY = 65534
_ENTRY_BYTES = 4096
"""What the headers of one file may take beside the allowance of the whole layer."""
_CHUNK = 1 << 20
_LOOK_BYTES = 256 << 20
"""So often the room on the disk is looked at."""
_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
_MAX_TIME = 2**33


def bad_image(what: str, why: str, fix: str) -> TaskError:
    return TaskError(f"The image {what} {why}.", fix=fix, code="bad_image", phase="prepare")


class Tree:
    """One folder that layers are unpacked into. Nobody else may write there meanwhile."""

    def __init__(self, root: Path, *, name: str, first_id: int | None) -> None:
        """`name` is what errors call the image. `first_id`: the id on this machine of the image's root;
        None: everything stays this user's, who must then be able to read it all."""
        self._root = str(root)
        self._name = name
        self._first_id = first_id
        self._bytes = MAX_BYTES
        self._entries = MAX_ENTRIES
        self._unlooked = 0
        self._folders: dict[str, tuple[int, float]] = {}
        """Modes and times of folders, set when nothing more is written into them."""

    def apply(self, source: Any) -> None:
        """Unpack a layer, its bytes as `source.read` gives them. Raises `TaskError` for what is no good
        layer, and what `tars.UNREADABLE` lists for what is no tar."""
        reader = Forwards(source, allowed=HEADER_BYTES, refuse=self._long_header)
        written: set[str] = set()
        first, beside = self._entries, HEADER_BYTES
        begun = 0
        for member in reader.members():
            # What was read since the last one is headers.
            self._entries -= 1
            beside += begun - reader.tell()
            if beside + _ENTRY_BYTES * (first - self._entries) < 0:
                raise self._long_header()
            if self._entries < 0:
                raise self._bad(f"has more than {MAX_ENTRIES} files", "Use an image with fewer.")
            self._count(reader.tell() - begun)
            self._entry(member, reader, written)
            begun = reader.tell()
        reader.allow(MAX_BYTES)
        while piece := reader.read(_CHUNK):  # What follows the last file is part of what is hashed.
            self._count(len(piece))

    def finish(self) -> None:
        """Give the folders the modes and times that they shall have."""
        for path, (mode, at) in sorted(self._folders.items(), reverse=True):
            # A later entry may have put a link in its place, or in that of a folder above it.
            if _is_folder(path) and inside(self._root, path.removeprefix(self._root)) == path:
                os.chmod(path, mode)
                os.utime(path, (at, at))

    # -- one entry

    def _entry(self, member: tarfile.TarInfo, reader: Forwards, written: set[str]) -> None:
        parts = [part for part in member.name.split("/") if part not in ("", ".")]
        if ".." in parts or "\0" in member.name:
            raise self._bad(f"names {member.name[:200]!r}, which leads out of it", "Do not use this image.")
        if member.issparse():
            raise self._bad(f"holds {member.name[:200]!r} with holes", "Pack it with docker or buildah.")
        if not parts:
            if member.isdir():
                self._folders[self._root] = (self._mode(member) | 0o755, _time(member))
            return
        if parts[-1].startswith(_WHITEOUT):
            self._whiteout(inside(self._root, "/".join(parts[:-1])), parts[-1], written)
            return
        path = f"{self._folder_of(parts[:-1], written)}/{parts[-1]}"
        if member.isdir():
            if not _is_folder(path):
                self._remove(path)
                os.mkdir(path, 0o755)
            self._settle(path, member)
            self._folders[path] = (self._mode(member), _time(member))
            written.add(path)
        elif member.isreg():
            self._remove(path)
            self._file(path, member, reader)
            written.add(path)
        elif member.issym():
            self._remove(path)
            os.symlink(member.linkname, path)
            self._settle(path, member)
            written.add(path)
        elif member.islnk():
            self._link(path, member)
            written.add(path)
        elif not (member.isdev() or member.isfifo()):
            raise self._bad(f"holds {member.name[:200]!r} of an unknown kind", "Use another image.")

    def _folder_of(self, parts: list[str], written: set[str]) -> str:
        """The real folder that a name's parent leads to, made where it is missing."""
        path = inside(self._root, "/".join(parts))
        if path.count("/") - self._root.count("/") > MAX_DEPTH:
            raise self._bad(f"nests folders more than {MAX_DEPTH} deep", "Use another image.")
        missing = []
        while not _is_folder(path):
            missing.append(path)
            path = os.path.dirname(path)
        for folder in reversed(missing):
            self._remove(folder)
            os.mkdir(folder, 0o755)
            if self._first_id is not None:
                os.chown(folder, self._first_id, self._first_id)
        real = missing[0] if missing else path
        above = real
        while len(above) > len(self._root) and above not in written:
            written.add(above)
            above = os.path.dirname(above)
        return real

    def _file(self, path: str, member: tarfile.TarInfo, reader: Forwards) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        left = member.size
        with open(os.open(path, flags, 0o600), "wb") as file:
            while left > 0:
                size = min(left, _CHUNK)
                self._count(size)
                reader.allow(size)
                piece = reader.read(size)
                if len(piece) < size:
                    raise EOFError("it ends too early")
                file.write(piece)
                left -= size
        self._settle(path, member)

    def _link(self, path: str, member: tarfile.TarInfo) -> None:
        if ".." in member.linkname.split("/"):
            raise self._bad(f"links {member.linkname[:200]!r}, outside of it", "Do not use this image.")
        source = inside(self._root, member.linkname, follow=False)
        try:
            facts = os.lstat(source)
        except OSError as error:
            raise self._bad(
                f"links {member.name[:200]!r} to {member.linkname[:200]!r}, which it does not hold",
                "Pull or pack it again.",
            ) from error
        if not (stat.S_ISREG(facts.st_mode) or stat.S_ISLNK(facts.st_mode)):
            raise self._bad(f"links {member.name[:200]!r} to a folder", "Pull or pack it again.")
        if source != path:
            self._remove(path)
            os.link(source, path, follow_symlinks=False)

    def _settle(self, path: str, member: tarfile.TarInfo) -> None:
        if self._first_id is not None:
            ids = (i if 0 <= i < IDS else _NOBODY for i in (member.uid, member.gid))
            uid, gid = (self._first_id + i for i in ids)
            os.chown(path, uid, gid, follow_symlinks=False)
        if member.isreg():
            os.chmod(path, self._mode(member))
        at = _time(member)
        os.utime(path, (at, at), follow_symlinks=False)

    def _mode(self, member: tarfile.TarInfo) -> int:
        mode = member.mode & 0o1777
        if self._first_id is None:
            mode |= 0o700 if member.isdir() else 0o400
        return mode

    # -- what is no longer there

    def _whiteout(self, parent: str, name: str, written: set[str]) -> None:
        if name == _OPAQUE:
            for child in os.listdir(parent) if _is_folder(parent) else ():
                self._hide(f"{parent}/{child}", written)
        elif not name.startswith(_WHITEOUT * 2):  # Others are notes of a storage driver.
            hidden = name.removeprefix(_WHITEOUT)
            if hidden in ("", ".", ".."):
                raise self._bad(f"hides {hidden!r}, which is no name", "Do not use this image.")
            self._hide(f"{parent}/{hidden}", written)

    def _hide(self, path: str, written: set[str]) -> None:
        """Remove what earlier layers brought."""
        if path not in written:
            self._remove(path)
        elif _is_folder(path):
            for child in os.listdir(path):
                self._hide(f"{path}/{child}", written)

    def _remove(self, path: str) -> None:
        if _is_folder(path):
            shutil.rmtree(path)
        else:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(path)

    # -- what is too much

    def _count(self, size: int) -> None:
        self._bytes -= size
        self._unlooked += size
        if self._bytes < 0:
            raise self._bad(
                f"unpacks to more than {MAX_BYTES >> 30} GiB",
                "Use a smaller one; it may be made to fill a disk.",
            )
        if self._unlooked > _LOOK_BYTES:
            self._unlooked = 0
            require_room(Path(self._root))

    def _bad(self, why: str, fix: str) -> TaskError:
        return bad_image(self._name, why, fix)

    def _long_header(self) -> TaskError:
        return self._bad("has a layer whose headers are longer than any file needs", "Do not use this image.")


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _time(member: tarfile.TarInfo) -> float:
    """Seconds since 1970, such as every file system takes."""
    at = float(member.mtime)
    return at if 0 <= at < _MAX_TIME else 0.0
