"""`tasks`: packages on disk, listed, shown, generated, and proved gradable."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from agentrl.cli import output, progress
from agentrl.cli.boundary import FAILED
from agentrl.errors import BoundaryError, ConfigError, TaskError, nearest
from agentrl.store import Store
from agentrl.training.events import Listener
from agentrl.types import Task, to_dict
from envs.admission import admit
from envs.evidence import Admission
from envs.preparation import ImageStatus, images_of, prepare_images
from envs.sandbox.backends import checked
from envs.sandbox.contract import Backend
from envs.tasks import swe_mini
from envs.tasks.package import load_suite, load_task
from harness.gateway.remote import GatewayPlace


def list_tasks(path: Path, *, as_json: bool) -> None:
    """A line per package."""
    found = _packages(path)
    if as_json:
        output.emit({"path": path, "tasks": [_facts(task) for task in found]})
        return
    output.table(
        ("id", "split", "grader", "tests", "turns", "tools", "instruction"),
        [
            (
                task.id,
                str(task.split),
                task.grader.kind,
                len(task.grader.fail_to_pass) + len(task.grader.pass_to_pass),
                task.limits.max_turns,
                len(task.tools),
                _short(task.instruction),
            )
            for task in found
        ],
        numbers=("tests", "turns", "tools"),
    )


def show_task(path: Path, *, as_json: bool) -> None:
    """One package whole."""
    if not (path / "task.toml").is_file():
        raise ConfigError(
            f"{path} is not a task package: it has no task.toml.", fix="See agentrl tasks list."
        )
    task = _packages(path)[0]
    files = sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())
    if as_json:
        output.emit({**_facts(task), "files": files})
        return
    grader, limits, box = task.grader, task.limits, task.sandbox
    output.say(f"[bold]{escape(task.id)}[/] [dim]{task.split}, revision {task.revision[:12]}[/]")
    output.say()
    output.say(escape(task.instruction.strip()))
    output.say()
    output.fact("tools", ", ".join(task.tools), width=8)
    output.fact("grader", f"{grader.kind}, at most {grader.timeout_s:g} s", width=8)
    for name in grader.fail_to_pass:
        output.fact("", f"must begin to pass: {name}", width=8)
    for name in grader.pass_to_pass:
        output.fact("", f"must still pass:    {name}", width=8)
    told = f"{limits.max_turns} turns, {limits.max_tokens} tokens, context {limits.max_context}, "
    output.fact(
        "limits", told + f"{output.duration(limits.wall_s)}, {limits.exec_timeout_s:g} s per command", width=8
    )
    told = f"{box.cpus:g} CPU, {box.memory_mib} MiB memory, {box.disk_mib} MiB disk, {box.pids} processes, "
    output.fact("sandbox", told + f"network {box.network}", width=8)
    for number, name in enumerate(files):
        output.fact("" if number else "files", name, width=8)


def synth(out: Path, *, train: int, heldout: int, seed: int, as_json: bool) -> None:
    """Generate the suite swe-mini."""
    if train + heldout == 0:
        raise ConfigError("--train and --heldout are both 0.", fix="Ask for at least one task.")
    try:
        made = swe_mini.generate(out, train=train, heldout=heldout, seed=seed)
    except TaskError as error:
        raise ConfigError(error.message, fix=error.fix) from error
    if as_json:
        facts = {"suite": "swe-mini", "out": out, "train": train, "heldout": heldout, "seed": seed}
        output.emit({**facts, "tasks": made})
        return
    output.say(f"{len(made)} tasks in {escape(str(out))}: {train} to train on, {heldout} held out")
    output.say(f"Check them: agentrl tasks validate {escape(str(out))} --light")


def validate(
    path: Path, *, repeats: int, light: bool, backend: str, at_once: int, store: str | None, as_json: bool
) -> None:
    """Admission of every package below a path; exit code 1 if any is quarantined."""
    places = _places(path)
    place = checked(backend)
    with progress.shown(as_json=as_json) as listener:
        listener.begin("validate", total=len(places), unit="tasks")
        found = asyncio.run(
            _validate(places, place, repeats=repeats, light=light, at_once=at_once, listener=listener)
        )
        listener.end()
    if store is not None:
        _keep(store, found)
    rows = [_outcome(place, task, why) for place, task, why in found]
    bad = sum(not row["valid"] for row in rows)
    if as_json:
        output.emit(
            {"path": path, "backend": backend, "valid": len(rows) - bad, "quarantined": bad, "tasks": rows}
        )
    else:
        output.table(
            ("task", "outcome", "solution and empty", "exploits refused", "slowest", "why"),
            [
                (
                    row["task"],
                    output.good("valid") if row["valid"] else output.bad("quarantined"),
                    f"{row['repeats']} ×",
                    row["attacks"],
                    output.duration(row["runtime_s"]),
                    "; ".join(row["reasons"]),
                )
                for row in rows
            ],
            numbers=("solution and empty", "exploits refused", "slowest"),
        )
        output.say(f"{len(rows) - bad} valid, {bad} quarantined")
    if bad:
        raise typer.Exit(FAILED)


def prepare(
    path: Path,
    *,
    backend: str,
    gateway: str | None,
    at_once: int,
    start: bool | None,
    state_dir: Path | None,
    as_json: bool,
) -> None:
    """Images of every package below a path; exit code 1 if any can not be had."""
    found = _packages(path)
    total = len(images_of(found))
    place = GatewayPlace.connect(gateway) if gateway is not None else checked(backend, state_dir)
    with progress.shown(as_json=as_json) as listener:
        listener.begin("images", total=total, unit="images")
        failed = 0

        def heard(status: ImageStatus) -> None:
            nonlocal failed
            failed += status.state == "failed"
            if status.state == "failed":
                listener.note(f"{status.image} can not be had: {status.message}")
            listener.advance(1, failed=failed)

        async def all_of_them() -> tuple[ImageStatus, ...]:
            try:
                if isinstance(place, GatewayPlace):
                    return await place.prepare_images(found, heard=heard)
                return await prepare_images(found, place, at_once=at_once, start=start, heard=heard)
            finally:
                await place.close()

        statuses = asyncio.run(all_of_them())
        listener.end()
    where = gateway if gateway is not None else place.name
    if as_json:
        facts = {"path": path, "backend": place.name, "gateway": gateway, "ready": len(statuses) - failed}
        output.emit({**facts, "failed": failed, "images": statuses})
    else:
        output.table(
            ("image", "tasks", "outcome", "was there", "took", "digest"),
            [
                (
                    _short(status.image),
                    len(status.tasks),
                    output.good("ready") if status.state == "ready" else output.bad(f"failed: {status.code}"),
                    {True: "yes", False: "no", None: "–"}[status.was_there],
                    output.duration(status.seconds),
                    (status.digest or "–")[:24],
                )
                for status in statuses
            ],
            numbers=("tasks", "took"),
        )
        for status in statuses:
            if status.state == "failed":
                needed = escape(", ".join(status.tasks[:3]))
                output.say(f"{output.bad('failed')} {escape(status.image)}, for {needed}")
                output.fact("why", f"{status.owner}/{status.code}: {status.message}", width=8)
                output.fact("fix", status.fix or "–", width=8)
        output.say(f"{len(statuses) - failed} ready, {failed} failed, on {escape(str(where))}")
    if failed:
        raise typer.Exit(FAILED)


Found = tuple[Path, Task | None, Admission | str]
"""A package, its task if it can be read, and the outcome or why it can not be read."""


async def _validate(
    places: Sequence[Path], backend: Backend, *, repeats: int, light: bool, at_once: int, listener: Listener
) -> list[Found]:
    limit = asyncio.Semaphore(at_once)
    quarantined = 0

    async def one(place: Path) -> Found:
        nonlocal quarantined
        task: Task | None = None
        async with limit:
            try:
                task = load_task(place)
                outcome: Admission | str = await admit(task, backend, repeats=repeats, light=light)
            except BoundaryError as error:
                outcome = (
                    str(error) if isinstance(error, TaskError) else f"{error.owner}/{error.code}: {error}"
                )
        valid = isinstance(outcome, Admission) and outcome.valid
        quarantined += not valid
        if not valid:
            reasons = outcome if isinstance(outcome, str) else "; ".join(outcome.reasons)
            listener.note(f"{place.name} is quarantined: {reasons}")
        listener.advance(1, quarantined=quarantined)
        return place, task, outcome

    try:
        return list(await asyncio.gather(*(one(place) for place in places)))
    finally:
        await backend.close()


def _outcome(place: Path, task: Task | None, outcome: Admission | str) -> dict[str, Any]:
    name = str(place) if task is None else task.id
    if isinstance(outcome, str):
        return {
            "task": name,
            "path": place,
            "valid": False,
            "repeats": 0,
            "attacks": 0,
            "runtime_s": None,
            "reasons": [outcome],
        }
    return {
        "task": name,
        "path": place,
        "revision": outcome.revision,
        "valid": outcome.valid,
        "mode": outcome.mode,
        "repeats": outcome.repeats,
        "attacks": len(outcome.attacks),
        "runtime_s": outcome.runtime_s,
        "reasons": list(outcome.reasons),
    }


def _keep(url: str, found: Sequence[Found]) -> None:
    """Where runs with `tasks.admission = "stored"` look."""
    target = url if "://" in url or not Path(url).is_dir() else str(Path(url) / "store.db")
    with Store.open(target) as store:
        for _, task, outcome in found:
            if task is not None and isinstance(outcome, Admission):
                store.add_task(task)
                store.add_admission(task.id, task.revision, valid=outcome.valid, facts=to_dict(outcome))


def _places(path: Path) -> list[Path]:
    if not path.is_dir():
        raise ConfigError(f"There is no folder {path}.", fix=_near(path))
    places = sorted(file.parent for file in path.rglob("task.toml"))
    if not places:
        raise ConfigError(
            f"{path} holds no task package.", fix="Give a folder with task.toml files below it."
        )
    return places


def _packages(path: Path) -> tuple[Task, ...]:
    """What can be read below a path; a broken package is the user's to mend."""
    _places(path)
    try:
        return load_suite(path)
    except TaskError as error:
        raise ConfigError(error.message, fix=error.fix) from error


def _near(path: Path) -> str:
    siblings = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
    return nearest(path.name, siblings) if siblings else "Give a folder with task.toml files below it."


def _facts(task: Task) -> dict[str, Any]:
    return to_dict(task)


def _short(text: str, limit: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
