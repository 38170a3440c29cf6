"""Harbor packages of schema 1.0 to 1.4: the native format, copied byte for byte and checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from agentrl.types import Split
from envs.tasks import package
from envs.tasks.formats.files import Package, error, read_tree, write_tree

FORMAT = "harbor"


def read(src: Path, split: Split | None) -> Iterator[Package]:
    """Every package below a folder, as it is."""
    if split is not None:
        raise error(src, "--split", "can not be given for harbor", "Set metadata.agentrl.split in task.toml.")
    folders = sorted(path.parent for path in src.rglob("task.toml")) if src.is_dir() else []
    if not folders:
        raise error(src, "folder", "holds no task.toml", "Give a package, or a folder of packages.")
    for folder in folders:
        package.load_task(folder)
        yield Package(name=folder.name, files=read_tree(folder))


def write(packages: Sequence[Path], out: Path) -> None:
    """The same packages."""
    for folder in packages:
        write_tree(out / folder.name, read_tree(folder))
