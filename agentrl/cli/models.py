"""`model fetch`: a name to a folder of weights."""

from __future__ import annotations

from pathlib import Path

from agentrl.cli import output, progress
from agentrl.learner import fetch as fetching

FOLDER = Path("models")


def fetch(source: str, out: Path | None, *, dtype: str, as_json: bool) -> None:
    """Fetch a model and say where it lies."""
    target = out if out is not None else FOLDER / source.rpartition("/")[2]
    with progress.shown(as_json=as_json) as listener:
        listener.note(f"Fetching {source} into {target}.")
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        done = fetching.fetch(source, target, dtype=dtype)
    if as_json:
        output.emit(output.jsonable(done))
        return
    output.say(f"{done.parameters / 1e6:.0f} million parameters, {done.dtype}, context {done.context}")
    output.fact("Folder", done.folder, width=7)
    output.fact("Train", f'agentrl train run.toml --set policy.source="{done.folder}"', width=7)
