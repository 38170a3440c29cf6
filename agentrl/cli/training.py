"""`quickstart`, `train`, `eval`: a run file and what was typed to a run, its progress and its result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import agentrl.training
from agentrl.cli import output, progress
from agentrl.config import RunConfig, load, rank
from agentrl.errors import ConfigError

QUICKSTART = Path(agentrl.training.__file__).with_name("quickstart.toml")
RUNS = Path("runs")
NOTE = "run.json"
"""A folder that holds this holds a run."""


def for_the_suite(algo: str) -> list[str]:
    """Overrides for a recipe that estimates advantages with a critic: the turn limit is a rule of the suite's
    tasks and the state at it is graded, so there is no future to add to that grade; and where lambda is a
    plain number it is 1, since one outcome is credit for hundreds of tokens and the critic is new."""
    from agentrl.algo import recipes

    advantage = recipes.get(algo).advantage
    if not advantage.operator.startswith("gae"):
        return []
    adaptive = "alpha" in advantage.numbers
    return [
        "train.overrides.advantage.bootstrap=false",
        *([] if adaptive else ["train.overrides.advantage.lambda_policy=1.0"]),
    ]


def quickstart(
    seed: int,
    algo: str,
    backend: str,
    dir: Path | None,
    overrides: Sequence[str],
    *,
    resume: bool,
    as_json: bool,
) -> None:
    """The packaged run file with the options laid over it."""
    name = f"quickstart-{algo}-s{seed}"
    folder = dir if dir is not None else _folder(name, resume=resume)
    typed = [
        f'run.name="{name}"',
        f"run.seed={seed}",
        f"run.dir={_toml(str(folder))}",
        f'train.recipe="{algo}"',
        f'sandbox.backend="{backend}"',
        *for_the_suite(algo),
    ]
    _run(load(QUICKSTART, [*typed, *overrides]), resume=resume, as_json=as_json)


def train(run_file: Path, overrides: Sequence[str], *, resume: bool, as_json: bool) -> None:
    """A run as its file says."""
    _run(load(run_file, overrides), resume=resume, as_json=as_json)


def evaluate(run_file: Path, checkpoint: str | None, overrides: Sequence[str], *, as_json: bool) -> None:
    """Held-out success of one policy of a run."""
    config = load(run_file, overrides)
    from agentrl.training import loop

    with progress.shown(as_json=as_json) as listener:
        result = loop.evaluate(config, checkpoint=checkpoint, listener=listener)
    facts = output.jsonable(result)
    if as_json:
        output.emit(facts)
        return
    for key, value in facts.items():
        output.fact(key.replace("_", " "), str(value), width=max(map(len, facts)))


def _folder(name: str, *, resume: bool) -> Path:
    """The next free folder of that name, or the newest one that holds a run."""
    taken = RUNS / name
    number = 1
    last: Path | None = None
    while (taken / NOTE).exists() or (taken.exists() and any(taken.iterdir())):
        last = taken
        number += 1
        taken = RUNS / f"{name}-{number}"
    if not resume:
        return taken
    if last is None:
        raise ConfigError(f"There is no run in {taken} to resume.", fix="Start it without --resume.")
    return last


def _toml(text: str) -> str:
    """A TOML string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _run(config: RunConfig, *, resume: bool, as_json: bool) -> None:
    if rank():
        from services import trainer

        trainer.help_train(config)
        return
    with progress.shown(as_json=as_json) as listener:
        listener.note(f"Run {config.run.name} in {config.run.folder}; loading the learner.")
        from transformers.utils.logging import disable_progress_bar

        from services import trainer

        disable_progress_bar()  # every reload of the sampler's weights would draw one over ours
        done = trainer.train(config, listener=listener, resume=resume)
    heldout = {"n": done.heldout_n, "before": done.heldout_before, "after": done.heldout_after}
    if as_json:
        facts = output.jsonable(done)
        kept = {key: value for key, value in facts.items() if not key.startswith("heldout_")}
        output.emit({"algo": done.algo, "seed": done.seed, "heldout": heldout, **kept})
        return
    output.say()
    if done.heldout_n:
        output.say(
            f"[bold]Held-out success[/] {output.share(done.heldout_before)} → "
            f"[bold green]{output.share(done.heldout_after)}[/] on {done.heldout_n} tasks never trained on"
        )
    checked = f"{done.calls_checked} of {done.calls} calls checked"
    output.say(
        f"{done.trajectories} trajectories, {done.faults} faults, {checked}, {output.duration(done.wall_s)}"
    )
    if done.report is not None:
        output.fact("Report", done.report, width=7)
    output.fact("Store", done.store, width=7)
    output.fact("Next", f"agentrl trajectories list --run {done.run_id}", width=7)
    output.fact("", f"agentrl verify {done.run_id}", width=7)
