"""`tasks synth repo`: real projects to admitted bug-fixing tasks, with tables of what became of every
mutant."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from agentrl.cli import output, progress
from agentrl.cli.boundary import FAILED
from agentrl.errors import ConfigError
from agentrl.store import Store
from agentrl.types import Task, to_dict
from envs.evidence import Admission
from envs.sandbox.backends import checked
from envs.tasks.synth import factory
from envs.tasks.synth.mutations import KINDS

REPORT = "synth.json"


def repo(
    sources: Sequence[str],
    out: Path,
    *,
    work: Path | None,
    per_project: int,
    seed: int,
    repeats: int,
    light: bool,
    extra: Sequence[str],
    image: str,
    backend: str,
    at_once: int | None,
    minutes: float,
    store: str | None,
    as_json: bool,
) -> None:
    """Make the tasks, keep every admission in the store, print and write the tables."""
    folder = (work or out.with_name(out.name + ".work")).absolute()
    if folder == out.absolute() or out.absolute() in folder.parents:
        raise ConfigError(
            f"The work folder {folder} lies in {out}.",
            fix="Give --work a folder outside: packages are read below OUT.",
        )
    doubled = sorted({s for s in sources if sum(Path(s).name == Path(o).name for o in sources) > 1})
    if doubled:
        raise ConfigError(f"{doubled[0]} is named twice.", fix="Name each project once.")
    plan = factory.Plan(
        out=out.absolute(),
        work=folder,
        per_project=per_project,
        seed=seed,
        repeats=repeats,
        at_once=at_once or os.cpu_count() or 1,
        image=image,
        light=light,
        budget_s=60 * minutes,
        extra=tuple(extra),
    )
    folder.mkdir(parents=True, exist_ok=True)
    target = store or str(folder / "store.db")
    if "://" not in target and Path(target).is_dir():
        target = str(Path(target) / "store.db")
    with Store.open(target) as opened, progress.shown(as_json=as_json) as listener:

        def keep(task: Task, admission: Admission) -> None:
            opened.add_task(task)
            opened.add_admission(task.id, task.revision, valid=admission.valid, facts=to_dict(admission))

        async def work_through() -> tuple[factory.Outcome, ...]:
            place = checked(backend)
            try:
                return await factory.make(sources, plan, place, listener=listener, kept=keep)
            finally:
                await place.close()

        outcomes = asyncio.run(work_through())
    found = {"out": out, "work": folder, "store": target, "seed": seed, **factory.summary(outcomes)}
    text = json.dumps(output.jsonable(found), indent=1, ensure_ascii=False)
    (folder / REPORT).write_text(text + "\n", encoding="utf-8")
    if as_json:
        output.emit(found)
    else:
        _print(found)
    if not found["admitted"]:
        raise typer.Exit(FAILED)


def _print(found: dict[str, Any]) -> None:
    """Two tables, by project and by kind; every cause that occurred has its column in both."""
    occurred = {cause for one in found["projects"] for cause in one["causes"]}
    causes = [cause for cause in factory.CAUSES if cause in occurred]
    output.table(
        ("project", "licence", "split", "tests", "flaky", "tried", *causes, "why not"),
        [
            (
                one["name"] or one["spec"],
                one["licence"],
                one["split"],
                one["stable_tests"],
                one["flaky_tests"],
                one["tried"],
                *(one["causes"].get(cause, 0) for cause in causes),
                f"{one['rejected']}: {one['why']}" if one["rejected"] else "",
            )
            for one in found["projects"]
        ],
        numbers=("tests", "flaky", "tried", *causes),
    )
    output.say()
    numbers = ("proposed", "executed", "tried", *causes)
    rows = [(kind, *(counts.get(name, 0) for name in numbers)) for kind, counts in found["kinds"].items()]
    total = [sum(int(row[at]) for row in rows) for at in range(1, len(numbers) + 1)]
    output.table(("kind", *numbers), [*rows, ("all", *total)], numbers=numbers)
    output.say()
    for cause in causes:
        output.say(f"{cause}: {found['causes'][cause]}")
    output.say()
    used = sum(bool(counts.get("admitted")) for counts in found["kinds"].values())
    output.say(
        f"{found['admitted']} tasks of {used} of {len(KINDS)} kinds in {escape(str(found['out']))}, "
        f"{found['quarantined']} quarantined; all counts: {escape(str(found['work'] / REPORT))}"
    )
