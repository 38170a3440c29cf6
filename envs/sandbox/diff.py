"""Two directory trees to the `FileChange` records between them, read from outside: `trees` with the types of
this side; and the hash that such records are known by."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, cast

from agentrl.errors import SandboxError
from agentrl.types import content_hash
from envs.sandbox.contract import FileChange
from envs.sandbox.trees import Change, TooLarge, walk


class DiffTooLarge(SandboxError):
    """The policy changed more than a diff may carry. Its own doing: such work can not be judged."""

    owner = "policy"
    code = "diff_too_large"
    retryable = False


def diff_overlay(upper: int, lower: Path) -> tuple[FileChange, ...]:
    """Changes that an overlay's upper directory (a descriptor, not consumed) makes to `lower`, sorted by
    path."""
    return _diff(upper, lower, whole=False)


def diff_trees(changed: int, original: Path) -> tuple[FileChange, ...]:
    """Changes from `original` to the tree of the descriptor `changed` (not consumed), sorted by path."""
    return _diff(changed, original, whole=True)


def diff_hash(changes: tuple[FileChange, ...]) -> str:
    """sha256 of a diff: what a verdict says it judged, and what a snapshot is known by."""
    return content_hash(
        *(
            p
            for c in changes
            for p in (c.path.encode(), c.kind.encode(), oct(c.mode).encode(), c.content or b"")
        )
    )


def record(change: Change) -> FileChange:
    """The record of a change, checked."""
    kind = cast(Literal["file", "symlink", "dir", "deleted"], change.kind)
    return FileChange(path=change.path, kind=kind, mode=change.mode, content=change.content)


def _diff(upper: int, lower: Path, *, whole: bool) -> tuple[FileChange, ...]:
    found: list[FileChange] = []
    below = os.open(lower, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        walk(upper, below, lambda change: found.append(record(change)), whole=whole)
    except TooLarge as large:
        raise DiffTooLarge(large.message, phase="diff", evidence=dict(large.evidence)) from large
    finally:
        os.close(below)
    return tuple(sorted(found, key=lambda c: c.path))
