"""`tasks import` and `tasks export`: other people's task formats to packages and back."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape

from agentrl.cli import output
from agentrl.errors import ConfigError, TaskError
from agentrl.types import Split
from envs.tasks.formats import table


def import_tasks(name: str, src: Path, out: Path, *, split: str | None, as_json: bool) -> None:
    """Write a package for each task; what is broken is the user's to mend."""
    try:
        made = table.import_tasks(name, src, out, split=None if split is None else Split(split))
    except TaskError as error:
        raise ConfigError(error.message, fix=error.fix) from error
    if as_json:
        output.emit({"format": name, "src": src, "out": out, "tasks": [task.id for task in made]})
        return
    output.say(f"{len(made)} tasks in {escape(str(out))}")
    if any(task.metadata.get("shared_verifier_ignored") for task in made):
        output.say("Some ask for a shared verifier: they are graded in a fresh sandbox all the same.")
    output.say(f"Check them where they will run: agentrl tasks validate {escape(str(out))} --backend docker")


def export_tasks(name: str, src: Path, out: Path, *, as_json: bool) -> None:
    """Write packages in another format."""
    try:
        done = table.export_tasks(name, src, out)
    except TaskError as error:
        raise ConfigError(error.message, fix=error.fix) from error
    if as_json:
        output.emit({"format": name, "src": src, "out": out, "tasks": len(done)})
        return
    output.say(f"{len(done)} tasks in {escape(str(out))}")
