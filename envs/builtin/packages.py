"""An environment whose tasks are packages with a sandbox of their own: a generator under a name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from agentrl.errors import ConfigError
from agentrl.types import Split, Task
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
    suite: str = ""
    """A folder of packages to take instead of generating any."""

    def with_options(self, **options: str) -> PackagedEnvironment:
        """The same with the packages of a folder: `suite=path`. `ConfigError` for other options."""
        if set(options) - {"suite"}:
            wrong = ", ".join(sorted(set(options) - {"suite"}))
            raise ConfigError(f"Environment {self.name} has no option {wrong}.", fix="Known: suite.")
        if not Path(options["suite"]).is_dir():
            raise ConfigError(
                f"There is no folder {options['suite']}.", fix="Give one with task.toml files below it."
            )
        return replace(self, suite=options["suite"])

    def tasks(self, folder: Path, *, train: int, heldout: int, seed: int) -> tuple[Task, ...]:
        """Tasks of packages in `folder`, written there once; or the first of each split of `suite`."""
        if self.suite:
            return self._given(train=train, heldout=heldout)
        done = folder / ".complete"
        if not done.exists():
            self.generate(folder, train=train, heldout=heldout, seed=seed)
            done.touch()
        return load_suite(folder)

    def _given(self, *, train: int, heldout: int) -> tuple[Task, ...]:
        found = load_suite(self.suite)
        wanted = {Split.TRAIN: train, Split.HELDOUT: heldout}
        return tuple(
            task for split, count in wanted.items() for task in [t for t in found if t.split is split][:count]
        )
