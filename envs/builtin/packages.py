"""An environment whose tasks are packages with a sandbox of their own: a generator under a name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

from agentrl.errors import ConfigError
from agentrl.types import Split, Task
from envs.environment import TRIES_PER_TASK, split_of
from envs.tasks.package import load_suite

Drawn = TypeVar("Drawn")


class Generate(Protocol):
    """Writes packages below `out`: as many of each split, the same bytes for the same seed."""

    def __call__(self, out: Path, *, train: int, heldout: int, seed: int) -> tuple[Path, ...]: ...


def write_drawn(
    drawn: Iterator[Drawn],
    *,
    name: str,
    content: Callable[[Drawn], bytes],
    write: Callable[[Path, str, Drawn], Path],
    out: Path,
    train: int,
    heldout: int,
    seed: int,
) -> tuple[Path, ...]:
    """Write the first of each split that are drawn as packages below `out`, training tasks first.

    Args:
        drawn: what tasks can be made of, the same for the same seed; may be endless and repeat itself.
        name: the environment's.
        content: what makes one the same as another, and decides its split, whatever the seed.
        write: writes one into a folder, under a name of its own.

    Raises:
        ConfigError: not so many different ones come within `TRIES_PER_TASK` draws for each.
    """
    wanted = {Split.TRAIN: train, Split.HELDOUT: heldout}
    kept: dict[Split, dict[bytes, Drawn]] = {split: {} for split in wanted}
    for one in itertools.islice(drawn, TRIES_PER_TASK * (train + heldout)):
        if all(len(kept[split]) == count for split, count in wanted.items()):
            break
        key = content(one)
        split = split_of(key)
        if len(kept[split]) < wanted[split]:
            kept[split].setdefault(key, one)
    for split, count in wanted.items():
        if len(kept[split]) < count:
            raise ConfigError(
                f"{name} makes only {len(kept[split])} of {count} {split} tasks.",
                fix=f"Lower tasks.{split}.",
            )
    return tuple(
        write(out / f"{split}-{index:05d}", f"s{seed}-{split}-{index:05d}", one)
        for split in wanted
        for index, one in enumerate(kept[split].values())
    )


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
