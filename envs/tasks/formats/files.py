"""A task package in memory: its files by relative path, before they are written or after they were read.

Bytes and git modes (executable, link) survive; empty folders do not, as in git. Nothing is executed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import TaskError
from envs.tasks import package

PLAIN, EXECUTABLE, LINK = "100644", "100755", "120000"

SOURCE = "source"
"""Folder of a package that holds, byte for byte, files of the original that have no place of their own."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One file, or a link whose target is `raw`."""

    raw: bytes
    mode: str = PLAIN


Files = Mapping[str, Entry]


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One task: the name of its folder, and everything in it, `task.toml` included."""

    name: str
    files: Files


def error(where: object, key: str, what: str, fix: str) -> TaskError:
    """What is wrong with a file or row of another format: where, which key, and what to do."""
    return TaskError(f"{where}: {key}: {what}.", fix=fix, phase="import", code="task_format")


def text(content: str) -> Entry:
    """A text file; one that starts with `#!` is executable."""
    try:
        raw = content.encode()
    except UnicodeEncodeError as wrong:
        raise error(
            "text", repr(content[:40]), f"is not valid Unicode: {wrong}", "Mend the source."
        ) from wrong
    return Entry(raw, EXECUTABLE if content.startswith("#!") else PLAIN)


def read_tree(folder: Path) -> dict[str, Entry]:
    """Every file and link below a folder, sorted by path."""
    return {path: Entry(raw, mode) for path, mode, raw in package.entries(folder)}


def below(files: Files, prefix: str) -> Iterator[tuple[str, Entry]]:
    """Files in the folder `prefix`, by their path relative to it."""
    for path, entry in files.items():
        if path.startswith(prefix + "/"):
            yield path[len(prefix) + 1 :], entry


def write_tree(folder: Path, files: Files) -> None:
    """Write files below a folder that holds none of them."""
    for name, entry in files.items():
        target = folder / name
        if not target.resolve().is_relative_to(folder.resolve()):
            raise error(target, "path", "leaves its folder", "Mend the source.")
        target.parent.mkdir(parents=True, exist_ok=True)
        if entry.mode == LINK:
            os.symlink(os.fsdecode(entry.raw), target)
            continue
        target.write_bytes(entry.raw)
        target.chmod(0o755 if entry.mode == EXECUTABLE else 0o644)
