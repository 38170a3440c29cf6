"""Archives of strangers: a good one is the same task, a bad one is a typed refusal that leaves nothing."""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import lzma
import os
import stat
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.errors import TaskError
from envs.tasks import archive, package


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "packages" / "one"
    package.write_task(
        made,
        config={
            "schema_version": "1.4",
            "task": {"name": "small/one"},
            "metadata": {"agentrl": {"grader": "script"}},
        },
        instruction="Do it.\n",
        environment={"hello.txt": "hello\n"},
        tests={"test.sh": "echo 1 > /logs/verifier/reward.txt\n"},
        solution="#!/bin/bash\ntrue\n",
    )
    return made


def tarred(folder: Path, top: str = ".", mode: str = "w:gz") -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode=mode) as out:  # type: ignore[call-overload]
        out.add(folder, arcname=top)
    return raw.getvalue()


def zipped(folder: Path) -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as out:
        for path in sorted(folder.rglob("*")):
            out.write(path, path.relative_to(folder))
    return raw.getvalue()


def with_member(folder: Path, member: tarfile.TarInfo, data: bytes = b"") -> bytes:
    raw = io.BytesIO(gzip.decompress(tarred(folder)))
    with tarfile.open(fileobj=raw, mode="a") as out:
        member.size = len(data)
        out.addfile(member, io.BytesIO(data))
    return raw.getvalue()


@pytest.mark.parametrize(
    "pack",
    [
        tarred,
        zipped,
        lambda f: tarred(f, "one"),
        lambda f: tarred(f, mode="w"),
        lambda f: tarred(f, mode="w:xz"),
        lambda f: tarred(f, mode="w:bz2"),
        lambda f: tar_with(f, format=tarfile.PAX_FORMAT),
        lambda f: tar_with(f, format=tarfile.GNU_FORMAT),
        lambda f: tar_with(f, last=zipped(f)),
    ],
    ids=["tgz", "zip", "one folder", "tar", "xz", "bz2", "pax", "gnu", "a zip in the tar"],
)
def test_an_archive_is_the_task_that_was_packed(
    folder: Path, tmp_path: Path, pack: Callable[[Path], bytes]
) -> None:
    data = pack(folder)
    task = package.load_task(folder)
    got = archive.unpack(data, tmp_path / "uploads")
    assert (got.id, got.revision, got.instruction) == (task.id, task.revision, task.instruction)
    assert archive.unpack(data, tmp_path / "uploads") == got  # again is the same
    assert [path.name for path in (tmp_path / "uploads").iterdir()] == [task.revision]


def tar_with(folder: Path, *, format: int = tarfile.USTAR_FORMAT, last: bytes = b"") -> bytes:
    """With a long name, and a last file that could be taken for the end of another kind of archive."""
    (folder / "environment" / ("long" * 40)).write_text("x")
    if last:
        (folder / "zz.zip").write_bytes(last)
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=format if not last else tarfile.PAX_FORMAT) as out:
        for path in sorted(folder.rglob("*")):
            out.add(path, arcname=path.relative_to(folder), recursive=False)
    return raw.getvalue()


def header(name: str, kind: bytes, size: int) -> bytes:
    """One tar header as it says of itself, true or not."""
    member = tarfile.TarInfo(name)
    member.type, member.size = kind, size
    return member.tobuf(tarfile.GNU_FORMAT)


def bomb(kind: bytes, size: int) -> bytes:
    """A header that claims a description of this length, and zeros to go with it, in a few kilobytes."""
    squeezed = io.BytesIO()
    with gzip.GzipFile(fileobj=squeezed, mode="wb", compresslevel=9) as out:
        out.write(header("name", kind, size))
        for _ in range(min(size, 64 << 20) >> 20):
            out.write(bytes(1 << 20))
    return squeezed.getvalue()


def pax(*records: tuple[str, str]) -> bytes:
    """A tar whose one file is described by these records."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as out:
        member = tarfile.TarInfo("file")
        member.pax_headers = dict(records)
        out.addfile(member)
    return raw.getvalue()


def _link(kind: bytes, target: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo("environment/link")
    member.type, member.linkname = kind, target
    return member


def _named(name: str) -> tarfile.TarInfo:
    return tarfile.TarInfo(name)


def _zip_with(name: str, data: bytes, attributes: int = 0) -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as out:
        info = zipfile.ZipInfo(name)
        info.external_attr = attributes
        out.writestr(info, data, zipfile.ZIP_DEFLATED)
    return raw.getvalue()


EVIL: dict[str, tuple[str, Callable[[Path], bytes]]] = {
    "no archive": ("archive_format", lambda f: b"not an archive"),
    "empty": ("archive_format", lambda f: b""),
    "cut short": ("archive_format", lambda f: tarred(f)[:300]),
    "no task.toml": ("archive_format", lambda f: _zip_with("readme.txt", b"hello")),
    "path outside": ("archive_path", lambda f: with_member(f, _named("../../evil"), b"x")),
    "absolute path": ("archive_path", lambda f: with_member(f, _named("/etc/evil"), b"x")),
    "zip path outside": ("archive_path", lambda f: _zip_with("a/../../evil", b"x")),
    "zip backslash": ("archive_path", lambda f: _zip_with("..\\evil", b"x")),
    "long name": ("archive_path", lambda f: with_member(f, _named("n" * 300), b"x")),
    "deep path": ("archive_path", lambda f: with_member(f, _named("d/" * 40 + "x"), b"x")),
    "symlink": ("archive_entry", lambda f: with_member(f, _link(tarfile.SYMTYPE, "/etc/passwd"))),
    "hard link": ("archive_entry", lambda f: with_member(f, _link(tarfile.LNKTYPE, "/etc/passwd"))),
    "device": ("archive_entry", lambda f: with_member(f, _link(tarfile.CHRTYPE, ""))),
    "fifo": ("archive_entry", lambda f: with_member(f, _link(tarfile.FIFOTYPE, ""))),
    "zip symlink": ("archive_entry", lambda f: _zip_with("l", b"/etc/passwd", (stat.S_IFLNK | 0o777) << 16)),
    "twice the same file": ("archive_entry", lambda f: with_member(f, _named("instruction.md"), b"other")),
    "a file under a file": ("archive_entry", lambda f: with_member(f, _named("instruction.md/x"), b"x")),
    "bomb": ("archive_size", lambda f: _zip_with("zeros", bytes(archive.MAX_BYTES + 1))),
    "bad toml": ("task_package", lambda f: _zip_with("task.toml", b"[[[")),
    "deep toml": ("task_package", lambda f: _zip_with("task.toml", b"a = " + b"[" * 9999 + b"]" * 9999)),
    "tar bomb": ("archive_size", lambda f: bomb(tarfile.REGTYPE, 1 << 40)),
    "pax header bomb": ("archive_size", lambda f: bomb(b"x", 1 << 40)),
    "global pax header bomb": ("archive_size", lambda f: bomb(b"g", 60 << 20)),
    "long name bomb": ("archive_size", lambda f: bomb(b"L", 1 << 32)),
    "headers of headers": ("archive_format", lambda f: header("h", b"x", 0) * 5000),
    "sizes that are none": ("archive_format", lambda f: pax(("GNU.sparse.map", "a,b"))),
    "negative size": ("archive_format", lambda f: pax(("size", "-5120"), ("path", "p"))),
    "sparse without a map": (
        "archive_format",
        lambda f: pax(("GNU.sparse.major", "1"), ("GNU.sparse.minor", "0")),
    ),
    "zip by another method": ("archive_format", lambda f: _zip_by(zipfile.ZIP_LZMA)),
    "xz with a dictionary of 1 GiB": ("archive_format", lambda f: _wide_xz()),
    "tgz cut in a file": ("archive_format", lambda f: gzip.compress(tarred(f, mode="w")[:-9000])),
    "bz2 of nothing": ("archive_format", lambda f: bz2.compress(b"")),
}


def _zip_by(method: int) -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", method) as out:
        out.writestr("task.toml", b"x" * 100)
    return raw.getvalue()


def _wide_xz() -> bytes:
    """LZMA alone says in its header how much memory it wants: here far more than it needs."""
    squeezed = lzma.compress(bytes(10_240), lzma.FORMAT_ALONE)
    return squeezed[:1] + struct.pack("<I", 1 << 30) + squeezed[5:]


@pytest.mark.parametrize("name", EVIL)
def test_an_evil_archive_is_refused_with_its_kind_and_leaves_nothing(
    folder: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "MAX_BYTES", 1 << 20)
    code, pack = EVIL[name]
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(TaskError) as refused:
        archive.unpack(pack(folder), tmp_path / "uploads")
    assert refused.value.code == code
    assert refused.value.fix
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "uploads"])


def test_too_many_entries_are_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_ENTRIES", 3)
    with pytest.raises(TaskError, match="more than 3 entries"):
        archive.unpack(tarred(folder), tmp_path / "uploads")


def test_a_zip_of_too_many_entries_is_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "MAX_ENTRIES", 10)
    monkeypatch.setattr(zipfile, "ZipFile", None)  # nothing may be made of it
    data = b"PK\3\4" + b"PK\1\2" * 11
    with pytest.raises(TaskError, match="more than 10 entries"):
        archive.unpack(data, tmp_path / "uploads")


def test_a_full_disk_is_not_the_packages_fault(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tarred(folder)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(archive, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        archive.unpack(data, tmp_path / "uploads")
    assert list((tmp_path / "uploads").iterdir()) == []


def test_who_was_slower_with_the_same_package_has_the_same_task(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tarred(folder)
    load = archive.load_task

    def meanwhile(path: Path) -> object:
        monkeypatch.setattr(archive, "load_task", load)
        archive.unpack(data, tmp_path / "uploads")
        return load(path)

    monkeypatch.setattr(archive, "load_task", meanwhile)
    task = archive.unpack(data, tmp_path / "uploads")
    assert [path.name for path in (tmp_path / "uploads").iterdir()] == [task.revision]


PACKS: list[Callable[[Path], bytes]] = [
    lambda f: tarred(f, mode="w"),
    lambda f: tar_with(f, format=tarfile.PAX_FORMAT),
    lambda f: tar_with(f, format=tarfile.GNU_FORMAT),
    tarred,
    zipped,
]


@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    kind=st.integers(0, len(PACKS) - 1),
    changes=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=6),
    cut=st.none() | st.integers(0, 1 << 16),
)
def test_a_damaged_archive_is_a_task_or_a_typed_refusal(
    tmp_path_factory: pytest.TempPathFactory,
    folder: Path,
    kind: int,
    changes: list[tuple[int, int]],
    cut: int | None,
) -> None:
    data = bytearray(PACKS[kind](folder))
    for at, byte in changes:
        data[at % min(len(data), 4096)] = byte
    uploads = tmp_path_factory.mktemp("uploads")
    try:
        archive.unpack(bytes(data[: None if cut is None else cut % len(data)]), uploads)
    except TaskError:
        assert list(uploads.iterdir()) == []
