"""`trajectories`, `runs`, `verify`, `report`: what is in a store, for people and machines."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from agentrl.cli import locate, output
from agentrl.cli.boundary import FAILED
from agentrl.errors import ConfigError, StoreError
from agentrl.store import Store
from agentrl.store.rows import RunRow, RunState, TrajectoryRow
from agentrl.training import report as page
from agentrl.training import view
from agentrl.types import EvidenceKey
from harness import fidelity

MARK = {True: "holds", False: "broken", None: "unknown"}


def list_trajectories(
    run: str | None,
    phase: str | None,
    task: str | None,
    termination: str | None,
    reward: float | None,
    limit: int,
    *,
    newest_first: bool,
    store: str | None,
    as_json: bool,
) -> None:
    """A line per trajectory."""
    with locate.run_in(run, store) as (here, row):
        try:
            found = here.trajectories(
                row.id,
                phase=phase,
                task=task,
                termination=termination,
                newest_first=newest_first,
                limit=limit if reward is None else None,
            )
        except StoreError as error:
            raise ConfigError(error.message, fix=error.fix) from error
        rows = [r for r in found if reward is None or r.reward == reward][:limit]
        if as_json:
            output.emit(
                {"run": row.id, "store": here.url, "trajectories": [output.jsonable(r) for r in rows]}
            )
            return
        output.table(
            ("id", "phase", "step", "task", "ended", "reward", "fault", "turns", "tokens", "versions"),
            [_line(r) for r in rows],
            numbers=("step", "reward", "turns", "tokens"),
        )


def _line(r: TrajectoryRow) -> tuple[Any, ...]:
    fault = "" if r.fault_owner is None else output.bad(f"{r.fault_owner}/{r.fault_code}")
    reward = output.middling("none") if r.reward is None else f"{r.reward:g}"
    versions = "–" if r.min_version is None else str(r.min_version)
    if r.max_version is not None and r.max_version != r.min_version:
        versions += f"–{r.max_version}"
    step = "–" if r.step is None else r.step
    return (r.id, r.phase, step, r.task_id, str(r.termination), reward, fault, r.turns, r.tokens, versions)


def show_trajectory(trajectory: str, *, store: str | None, as_json: bool) -> None:
    """Turn by turn."""
    from agentrl.cli import show

    with locate.trajectory_in(trajectory, store) as (here, found):
        run_id = here.trajectory_row(found).run_id
        seen = view.load(here, found, decode=view.decoder(here, run_id))
        if not as_json:
            show.show(seen)
            return
        facts = output.jsonable(seen)
        facts["evidence"] = [
            {
                "key": str(link.key),
                "means": view.EVIDENCE_MEANS[EvidenceKey(link.key)],
                "state": MARK[link.holds],
                "holds": link.holds,
                "facts": output.jsonable(link.facts),
            }
            for link in seen.evidence
        ]
        facts["tests"] = [{"name": n, "outcome": o, "message": m} for n, o, m in seen.tests]
        output.emit({**facts, "store": here.url})


def show_fidelity(run: str | None, phase: str | None, *, store: str | None, as_json: bool) -> None:
    """A line per harness: how many of its calls are exact, forked (why), refused (why)."""
    with locate.run_in(run, store) as (here, row):
        rows = [found.facts() for found in fidelity.by_harness(here.iter_trajectories(row.id, phase=phase))]
        if as_json:
            output.emit({"run": row.id, "store": here.url, "harnesses": rows})
            return
        output.table(
            ("harness", "trajectories", "calls", "exact", "forked", "refused", "beside"),
            [
                (
                    r["harness"],
                    r["trajectories"],
                    r["calls"],
                    output.share(r["exact_share"]),
                    _counted(r["forked_share"], r["forked"]),
                    _counted(r["refused_share"], r["refused"]),
                    _counted(None, r["beside"]),
                )
                for r in rows
            ],
            numbers=("trajectories", "calls", "exact"),
        )


def _counted(share: float | None, counts: dict[str, int]) -> str:
    """A share with what it is made of."""
    named = ", ".join(f"{name} {n}" for name, n in sorted(counts.items()))
    told = "" if share is None else output.share(share)
    return f"{told} ({named})".strip() if named else told


def verify(run: str | None, key: Path | None, *, store: str | None, as_json: bool) -> None:
    """Every record and every link; exit code 1 for a broken one."""
    with locate.run_in(run, store) as (here, row):
        found = here.verify(row.id, key=_key(row, key))
        if as_json:
            output.emit(
                {"run": row.id, "name": row.name, "store": here.url, "ok": found.ok, **output.jsonable(found)}
            )
        elif found.ok:
            signed = f", {found.signatures_checked} signatures" if found.signatures_checked else ""
            output.say(f"[green]✓[/] run {escape(row.id)} ({escape(row.name)}) is what was written:")
            output.say(
                f"  {found.trajectories} trajectories, {found.calls_checked} calls, "
                f"{found.tokens_checked} tokens, "
                f"{found.policy_versions} versions, {found.updates} updates{signed}"
            )
            output.say(f"  head {found.head}")
        else:
            broken = f"run {row.id} is broken at {found.broken_id}: {found.why}"
            output.say(f"[red]✗[/] {escape(broken)}")
    if not found.ok:
        raise typer.Exit(FAILED)


def _key(run: RunRow, named: Path | None) -> bytes | None:
    """The key that is named, or the one in the run's folder if it is still there."""
    if named is not None:
        return named.read_bytes()
    folder = view.run_folder(run)
    with suppress(OSError):
        return None if folder is None else (folder / "signing.key").read_bytes()
    return None


def list_runs(limit: int, *, store: str | None, as_json: bool) -> None:
    """The runs of all stores found, the newest first."""
    rows: list[tuple[RunRow, str]] = []
    for url in locate.candidates(store):
        with locate.opened(url) as here:
            rows += [(row, here.url) for row in here.runs(limit=limit)]
    rows = sorted(rows, key=lambda pair: -pair[0].started_at)[:limit]
    if as_json:
        output.emit({"runs": [_run_facts(row) | {"store": url} for row, url in rows]})
        return
    output.table(
        ("id", "name", "algo", "seed", "state", "trajectories", "started", "took"),
        [
            (r.id, r.name, r.algo, r.seed, _state(r), r.trajectories, output.moment(r.started_at), _took(r))
            for r, _ in rows
        ],
        numbers=("seed", "trajectories"),
    )


def show_run(run: str | None, *, store: str | None, as_json: bool) -> None:
    """One run in numbers."""
    with locate.run_in(run, store) as (here, row):
        rows = here.trajectories(row.id, limit=None)
        phases = {phase: _phase(here, row.id, phase, rows) for phase in dict.fromkeys(r.phase for r in rows)}
        last: dict[str, tuple[int, float]] = {}
        for point in here.metrics(row.id):
            last[point.name] = (point.step, point.value)
        version = here.latest_version(row.id)
        if as_json:
            output.emit(
                {
                    **_run_facts(row),
                    "config": output.jsonable(row.config),
                    "store": here.url,
                    "updates": len(here.updates(row.id)),
                    "latest_version": None if version is None else output.jsonable(version),
                    "phases": phases,
                    "metrics": {name: {"step": step, "value": value} for name, (step, value) in last.items()},
                }
            )
            return
        newest = "none" if version is None else f"the newest is {version.number}"
        output.fact("run", f"{row.id} · {row.name} · {row.algo} · seed {row.seed} · {row.state}", width=8)
        output.fact("started", f"{output.moment(row.started_at)}, took {_took(row)}", width=8)
        output.fact("store", here.url, width=8)
        output.fact("updates", f"{len(here.updates(row.id))}; policy versions: {newest}", width=8)
        output.say()
        output.table(
            ("phase", "attempts", "graded", "success", "runs tests", "faults", "ended"),
            [_phase_line(phase, facts) for phase, facts in phases.items()],
            numbers=("attempts", "graded", "success", "runs tests", "faults"),
        )
        shown = [name for name in ("reward/mean", *page.CHOSEN) if name in last]
        if shown:
            output.say()
            output.table(
                ("metric", "last", "at update"),
                [(name, f"{last[name][1]:.4g}", last[name][0]) for name in shown],
                numbers=("last", "at update"),
            )


def report(run: str | None, out: Path | None, *, store: str | None, as_json: bool) -> None:
    """One HTML file."""
    with locate.run_in(run, store) as (here, row):
        folder = view.run_folder(row)
        target = out or (folder if folder is not None and folder.is_dir() else Path()) / "report.html"
        written = page.write_report(here, row.id, target)
        if as_json:
            output.emit({"run": row.id, "report": written, "bytes": written.stat().st_size})
        else:
            output.say(f"{escape(str(written))}")


def _phase(store: Store, run_id: str, phase: str, rows: tuple[TrajectoryRow, ...]) -> dict[str, Any]:
    mine = [r for r in rows if r.phase == phase]
    counts = store.counts(run_id, phase=phase)
    rate = page.success(mine)
    use = page.tool_use(store.iter_trajectories(run_id, phase=phase))
    low, high = rate.interval
    return {
        "attempts": len(mine),
        "graded": rate.n,
        "solved": rate.k,
        "success": rate.value,
        "success_interval": [low, high],
        "runs_tests": None if use is None else use.tested,
        "termination": dict(counts.termination),
        "fault": dict(counts.fault),
        "tool": dict(counts.tool),
    }


def _phase_line(phase: str, facts: dict[str, Any]) -> tuple[Any, ...]:
    ended = ", ".join(f"{name} {count}" for name, count in facts["termination"].items())
    faults = sum(facts["fault"].values())
    return (
        phase,
        facts["attempts"],
        facts["graded"],
        output.share(facts["success"]),
        output.share(facts["runs_tests"]),
        output.bad(str(faults)) if faults else "0",
        ended,
    )


def _run_facts(row: RunRow) -> dict[str, Any]:
    facts: dict[str, Any] = output.jsonable(row)
    del facts["config"]
    return facts


def _state(row: RunRow) -> str:
    shown = {RunState.FINISHED: output.good, RunState.FAILED: output.bad}.get(row.state, output.middling)
    return shown(str(row.state))


def _took(row: RunRow) -> str:
    return "–" if row.finished_at is None else output.duration(row.finished_at - row.started_at)
