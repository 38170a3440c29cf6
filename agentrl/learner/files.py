"""Folders that appear whole or not at all: write beside, flush to disk, hash, rename.

A reader of `target` sees either nothing or every byte; a process killed in the middle leaves only a `.tmp-`
folder, which the next writer in the same place removes. One writer per root is assumed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

TEMPORARY = ".tmp-"


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `target` when the block ends without an exception.

    Raises:
        FileExistsError: `target` is there already.
    """
    root = target.parent
    root.mkdir(parents=True, exist_ok=True)
    for left_over in root.glob(f"{TEMPORARY}*"):
        shutil.rmtree(left_over, ignore_errors=True)
    if target.exists():
        raise FileExistsError(str(target))
    work = root / f"{TEMPORARY}{uuid.uuid4().hex}"
    work.mkdir()
    try:
        yield work
        for path in sorted(work.rglob("*")):
            _flush(path)
        _flush(work)
        os.rename(work, target)
        _flush(root)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file atomically."""
    work = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
    work.write_bytes(data)
    _flush(work)
    os.replace(work, path)
    _flush(path.parent)


def remove_whole(path: Path) -> None:
    """Remove a folder so that no reader ever sees a part of it under its name."""
    gone = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
    os.rename(path, gone)
    shutil.rmtree(gone)


def hash_of(folder: Path, *, without: str) -> str:
    """sha256 over names, sizes and bytes of all files of a folder but the one called `without`, in hex."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != without):
        name = path.relative_to(folder).as_posix().encode()
        for number in (len(name), path.stat().st_size):
            digest.update(number.to_bytes(8, "little"))
        digest.update(name)
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
