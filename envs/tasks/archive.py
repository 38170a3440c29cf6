"""A task package as one archive (tar, zip) from somebody else, to a folder, or a `TaskError`.

Nothing of the archive is believed: every name is checked, every size is counted as it is unpacked and not
read from a header, and only plain files and folders are taken: what a link or a device would do to the
machine that unpacks it is nobody's need. What describes the files is bounded like the files: a header that
says of itself that it is long is not read. Files are written below a folder that the caller chose, into a
place of their own that is renamed when all of it is there. Whether it is a good task is `package`'s to say.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import secrets
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from agentrl.errors import TaskError
from agentrl.types import Task
from envs.sandbox import oci
from envs.sandbox.tars import HEADER_BYTES, OF_THE_MACHINE, UNREADABLE, Forwards
from envs.tasks.package import load_task

MAX_BYTES = 256 * 1024 * 1024
"""Of all files together, unpacked."""
MAX_ENTRIES = 20_000
MAX_DEPTH = 32
MAX_NAME_BYTES = 255
XZ_MEMORY = 128 * 1024 * 1024
"""What unpacking xz may take; its highest preset takes half of it."""
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    folder: bool
    executable: bool
    open: Callable[[], IO[bytes]]


def _bad(code: str, what: str, fix: str) -> TaskError:
    return TaskError(f"The archive {what}.", fix=fix, phase="load", code=code)


def unpack(data: bytes, into: Path) -> Task:
    """The task of an archive, unpacked to a new folder below `into` that is named by its revision; a package
    that is there already is the same one.

    Raises:
        TaskError: with the code `archive_format`, `archive_path`, `archive_entry`, `archive_size`, or those
            of `package.load_task`. Nothing is left behind then.
        OSError: the folder can not be written to.
    """
    into.mkdir(parents=True, exist_ok=True)
    beside = into / f".{secrets.token_hex(8)}"
    beside.mkdir()
    try:
        try:
            _write(_entries(data), beside)
        except UNREADABLE as error:
            raise _bad("archive_format", f"can not be read: {error}", "Pack it again.") from error
        except OSError as error:
            if error.errno in OF_THE_MACHINE:
                raise
            why = f"can not be written: {error.strerror}"
            raise _bad("archive_entry", why, "Use other names, each once.") from error
        task = load_task(_package(beside))
        image = oci.reference(oci.located(task.sandbox.image, Path(task.path)))
        if image is not None and not image.path.is_relative_to(task.path):
            raise _bad(
                "archive_path",
                f"names an image outside of it, {task.sandbox.image[:200]!r}",
                "Pack the image with the task, or push it to a registry.",
            )
        target = into / task.revision
        try:
            Path(task.path).rename(target)
        except OSError:
            if not target.is_dir():  # else somebody was faster with the same package
                raise
        return load_task(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


class _Xz:
    """One xz stream, with bounded memory."""

    def __init__(self, data: bytes) -> None:
        self._inner = lzma.LZMADecompressor(memlimit=XZ_MEMORY)
        self._data = data

    def read(self, size: int) -> bytes:
        if self._inner.eof:
            return b""
        given, self._data = self._data, b""
        piece = self._inner.decompress(given, size)
        if not piece and not self._inner.eof:
            raise EOFError("it ends too early")
        return piece


def _tar(data: bytes) -> Forwards:
    """The bytes of a tar, unpacked, as far as an archive may be long."""
    source: Any
    if data.startswith(b"\x1f\x8b"):
        source = gzip.GzipFile(fileobj=io.BytesIO(data))
    elif data.startswith(b"BZh"):
        source = bz2.BZ2File(io.BytesIO(data))
    elif data.startswith((b"\xfd7zXZ\0", b"]\0\0")):
        source = _Xz(data)
    else:
        source = io.BytesIO(data)
    return Forwards(source, allowed=MAX_BYTES + HEADER_BYTES + _CHUNK, refuse=_too_long)


def _too_long() -> TaskError:
    return _bad("archive_size", "is longer than a task's may be", "Leave out what no task needs.")


def _entries(data: bytes) -> Iterator[_Entry]:
    if data.startswith((b"PK\3\4", b"PK\5\6")):
        yield from _zipped(data)
        return
    try:
        archive = tarfile.open(fileobj=cast(IO[bytes], _tar(data)), mode="r:")  # noqa: SIM115  (closed below)
    except tarfile.TarError as error:
        raise _bad("archive_format", "is neither tar nor zip", "Pack the folder with tar -czf.") from error
    with archive:
        while (member := archive.next()) is not None:
            if not (member.isreg() or member.isdir()) or member.issparse():
                raise _bad(
                    "archive_entry",
                    f"holds {member.name[:200]!r}, which is neither a file nor a folder",
                    "Pack files, not links: tar -czhf.",
                )
            yield _Entry(
                member.name,
                member.isdir(),
                bool(member.mode & 0o111),
                lambda m=member: _of(archive, m),  # type: ignore[misc]
            )


def _of(archive: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    opened = archive.extractfile(member)
    assert opened is not None, "a regular file"
    return opened


def _zipped(data: bytes) -> Iterator[_Entry]:
    if data.count(b"PK\1\2") > MAX_ENTRIES:  # before a record is made of each
        raise _too_many()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            kind = info.external_attr >> 28
            if kind not in (0, 0o4, 0o10):
                raise _bad(
                    "archive_entry",
                    f"holds {info.filename[:200]!r}, which is neither a file nor a folder",
                    "Pack files, not links.",
                )
            if info.flag_bits & 0x1:
                raise _bad("archive_format", "is encrypted", "Pack it without a password.")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise _bad("archive_format", "is packed by a method of its own", "Use zip's own, or tar.")
            executable = bool(info.external_attr >> 16 & 0o111)
            yield _Entry(info.filename, info.is_dir(), executable, lambda i=info: archive.open(i))  # type: ignore[misc]


def _parts(name: str) -> list[str]:
    """The parts of a plain relative path; empty for the top itself."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    try:
        encoded = [len(part.encode()) for part in parts]
    except UnicodeEncodeError as error:
        raise _bad("archive_path", f"names {name[:200]!r}, which is not UTF-8", "Rename it.") from error
    if (
        name.startswith("/")
        or "\\" in name
        or "\0" in name
        or ".." in parts
        or len(parts) > MAX_DEPTH
        or any(length > MAX_NAME_BYTES for length in encoded)
    ):
        raise _bad(
            "archive_path",
            f"names {name[:200]!r}, which is no plain path below its top",
            "Pack the folder from the inside: tar -C FOLDER -czf task.tgz .",
        )
    return parts


def _write(entries: Iterator[_Entry], top: Path) -> None:
    left = MAX_BYTES
    for number, entry in enumerate(entries, 1):
        if number > MAX_ENTRIES:
            raise _too_many()
        parts = _parts(entry.name)
        if not parts:
            continue
        path = top.joinpath(*parts)
        if entry.folder:
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = 0o755 if entry.executable else 0o644
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with os.fdopen(target, "wb") as file, entry.open() as source:
            while piece := source.read(min(_CHUNK, left + 1)):
                left -= len(piece)
                if left < 0:
                    raise _bad(
                        "archive_size",
                        f"unpacks to more than {MAX_BYTES >> 20} MiB",
                        "Make large files inside the sandbox, or in its image.",
                    )
                file.write(piece)


def _too_many() -> TaskError:
    return _bad("archive_size", f"has more than {MAX_ENTRIES} entries", "Leave out what no task needs.")


def _package(top: Path) -> Path:
    """The folder of the one package: the top, or the only folder in it."""
    if (top / "task.toml").is_file():
        return top
    inside = list(top.iterdir())
    if len(inside) == 1 and (inside[0] / "task.toml").is_file():
        return inside[0]
    raise _bad(
        "archive_format", "holds no task.toml at its top", "Pack one package: the folder with task.toml."
    )
