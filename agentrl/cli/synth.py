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
_SHOWN = ("admitted", "survives", "duplicate", "too_broad", "hangs", "no_import")
"""Causes with a column of their own; the rest are counted as other."""


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
    output.table(
        ("project", "licence", "split", "tests", "flaky", "tried", *_SHOWN, "other", "why not"),
        [
            (
                one["name"] or one["spec"],
                one["licence"],
                one["split"],
                one["stable_tests"],
                one["flaky_tests"],
                one["tried"],
                *_counts(one["causes"]),
                f"{one['rejected']}: {one['why']}" if one["rejected"] else "",
            )
            for one in found["projects"]
        ],
        numbers=("tests", "flaky", "tried", *_SHOWN, "other"),
    )
    output.say()
    rows = [
        (
            kind,
            counts.get("proposed", 0) or "",
            counts.get("executed", 0) or "",
            counts.get("tried", 0),
            *_counts({k: v for k, v in counts.items() if k not in ("proposed", "executed", "tried")}),
        )
        for kind, counts in found["kinds"].items()
    ]
    total = [sum(int(row[at] or 0) for row in rows) for at in range(1, len(rows[0]))]
    output.table(
        ("kind", "proposed", "executed", "tried", *_SHOWN, "other"),
        [*rows, ("all", *total)],
        numbers=("proposed", "executed", "tried", *_SHOWN, "other"),
    )
    output.say()
    used = sum(bool(counts.get("admitted")) for counts in found["kinds"].values())
    output.say(
        f"{found['admitted']} tasks of {used} of {len(KINDS)} kinds in {escape(str(found['out']))}, "
        f"{found['quarantined']} quarantined; all counts: {escape(str(found['work'] / REPORT))}"
    )


def _counts(causes: dict[str, int]) -> tuple[int, ...]:
    shown = tuple(causes.get(cause, 0) for cause in _SHOWN)
    return (*shown, sum(causes.values()) - sum(shown))
