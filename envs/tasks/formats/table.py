"""The formats by name, and the two verbs: what others wrote to packages, and packages to what others read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from agentrl.errors import ConfigError, TaskError, nearest
from agentrl.types import Split, Task
from envs.tasks import package
from envs.tasks.formats import harbor, r2egym, swebench, swebench_repo, swesmith, terminal_bench
from envs.tasks.formats.files import Files, Package, error, read_tree, write_tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format: `read` makes packages of what lies at a path, `write` the opposite."""

    summary: str
    read: Callable[[Path, Split | None], Iterator[Package]]
    write: Callable[[Sequence[Path], Path], None]
    tasks: str | None = None
    """Folder of the tasks, where files beside it belong to the whole and are kept."""


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        harbor.FORMAT: Format(
            summary="Harbor packages, schema 1.0 to 1.4", read=harbor.read, write=harbor.write
        ),
        swebench.FORMAT: Format(
            summary="SWE-bench rows: .jsonl, .json or .parquet", read=swebench.read, write=swebench.write
        ),
        swebench_repo.FORMAT: Format(
            summary="SWE-bench 5 task repositories",
            read=swebench_repo.read,
            write=swebench_repo.write,
            tasks=swebench_repo.TASKS,
        ),
        swesmith.FORMAT: Format(summary="SWE-smith rows", read=swesmith.read, write=swesmith.write),
        r2egym.FORMAT: Format(summary="R2E-Gym rows", read=r2egym.read, write=r2egym.write),
        terminal_bench.FORMAT: Format(
            summary="terminal-bench 1 task folders", read=terminal_bench.read, write=terminal_bench.write
        ),
    }
)


def get(name: str) -> Format:
    """A format by name; `ConfigError` names the nearest."""
    if name not in FORMATS:
        raise ConfigError(f"There is no task format '{name}'.", fix=nearest(name, FORMATS))
    return FORMATS[name]


def import_tasks(name: str, src: Path, out: Path, *, split: Split | None = None) -> tuple[Task, ...]:
    """Write a package below `out` for each task at `src`, and load it. Nothing is written if any is broken.

    Raises:
        TaskError: names file or row, key, and what to do.
        ConfigError: an unknown format, or a package that reading the format needs.
    """
    wanted = get(name)
    _empty(out)
    made = tuple(wanted.read(src, split))
    seen: set[str] = set()
    for each in made:
        if each.name in seen:
            raise error(src, each.name, "is there twice", "Give every task a name of its own.")
        seen.add(each.name)
    for each in made:
        write_tree(out / each.name, each.files)
    if wanted.tasks is not None:
        write_tree(out, _beside(src, (src / wanted.tasks,)))
    return tuple(package.load_task(out / each.name) for each in made)


def export_tasks(name: str, src: Path, out: Path) -> tuple[Path, ...]:
    """Write the packages at or below `src` in another format; the packages that were written.

    Raises:
        TaskError: names file and key, and what to do.
        ConfigError: an unknown format, or a package that writing the format needs.
    """
    wanted = get(name)
    folders = tuple(sorted(file.parent for file in src.rglob("task.toml"))) if src.is_dir() else ()
    if not folders:
        raise error(src, "folder", "holds no task package", "Give a folder with task.toml files below it.")
    if out.suffix == "" or out.is_dir():
        _empty(out)
    try:
        wanted.write(folders, out)
    except KeyError as missing:
        raise TaskError(
            f"{src}: {missing}: is missing from a package.", fix="Import it again.", code="task_format"
        ) from missing
    if wanted.tasks is not None:
        write_tree(out, _beside(src, folders))
    return folders


def _empty(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise error(out, "folder", "is not empty", "Give a new folder.")


def _beside(src: Path, tasks: Sequence[Path]) -> Files:
    """What lies at `src` and in none of the task folders, without its git history."""
    apart = (".git", *(str(folder.relative_to(src)) for folder in tasks))
    return {
        path: entry
        for path, entry in read_tree(src).items()
        if not any(path == name or path.startswith(name + "/") for name in apart)
    }
