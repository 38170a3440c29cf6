"""Archives of strangers: a good one is the same task, a bad one is a typed refusal that leaves nothing."""

from __future__ import annotations

import gzip
import io
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

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
    ],
    ids=["tgz", "zip", "one folder", "tar", "xz"],
)
def test_an_archive_is_the_task_that_was_packed(
    folder: Path, tmp_path: Path, pack: Callable[[Path], bytes]
) -> None:
    task = package.load_task(folder)
    got = archive.unpack(pack(folder), tmp_path / "uploads")
    assert (got.id, got.revision, got.instruction) == (task.id, task.revision, task.instruction)
    assert archive.unpack(pack(folder), tmp_path / "uploads") == got  # again is the same
    assert [path.name for path in (tmp_path / "uploads").iterdir()] == [task.revision]


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
}


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
