"""An environment whose tasks are packages with a sandbox of their own: a generator under a name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentrl.types import Task
from envs.tasks.package import load_suite


class Generate(Protocol):
    """Writes packages below `out`: as many of each split, the same bytes for the same seed."""

    def __call__(self, out: Path, *, train: int, heldout: int, seed: int) -> tuple[Path, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedEnvironment:
    """What the registry needs of it; sessions, grading and admission are those of any task package."""

    name: str
    summary: str
    generate: Generate

    def tasks(self, folder: Path, *, train: int, heldout: int, seed: int) -> tuple[Task, ...]:
        """Tasks of packages in `folder`, written there once."""
        done = folder / ".complete"
        if not done.exists():
            self.generate(folder, train=train, heldout=heldout, seed=seed)
            done.touch()
        return load_suite(folder)
