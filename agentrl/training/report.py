"""A run in the store to one self-contained HTML file: what was learned, how attempts ended, what it cost.

Everything is read from the store, nothing is measured here. The page holds its own style and drawings, needs
no script and no network, and says of each number what it counts. A rate of held-out success stands with its
95 % Wilson interval; an attempt without a reward is not a failure and is counted apart.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from agentrl.store import Store
from agentrl.store.rows import RunRow, RunState, TrajectoryRow, VerifyReport
from agentrl.training import charts, view
from agentrl.types import Termination, Trajectory

BEFORE, AFTER, TRAIN = "heldout_before", "heldout_after", "train"
HELDOUT = "heldout_"
"""Phases of held-out evaluation begin so; `heldout_12` is the one after update 12."""
SOLVED = 1.0
"""The reward of a solved task."""
Z_95 = 1.959963984540054
SHOWN_TEXT = 6000
"""Characters of one observation or generation in the page; the store has the rest."""

COLOURS: Mapping[str, str] = {
    "solved": "var(--solved)",
    Termination.FINISHED: "var(--c1)",
    Termination.SUCCESS: "var(--c2)",
    Termination.MAX_TURNS: "var(--c3)",
    Termination.MAX_TOKENS: "var(--c4)",
    Termination.CONTEXT_FULL: "var(--c5)",
    Termination.WALL_CLOCK: "var(--c6)",
    Termination.FORMAT: "var(--c7)",
    Termination.CANCELLED: "var(--c8)",
    Termination.FAULT: "var(--fault)",
}
"""Solved attempts, and by their termination all others."""
CHOSEN = (
    "loss/policy",
    "value/loss",
    "critic/explained_variance",
    "policy/entropy",
    "optimizer/grad_norm",
    "ratio/clip_fraction",
    "rollout/success",
    "rollout/tests_run_share",
    "groups/zero_variance",
    "tokens/total",
)
"""Metrics worth a drawing of their own, where they exist."""
SUMS = ("time/total_s", "time/update_s")
"""Times that are sums of other times."""
SMALL_W, SMALL_H = 340.0, 130.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """`k` of `n`, with its 95 % Wilson interval."""

    k: int
    n: int

    @property
    def value(self) -> float | None:
        return self.k / self.n if self.n else None

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.k, self.n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the attempts of one phase ended. `graded` have a reward; `faults` counts by owner."""

    phase: str
    total: int
    graded: int
    solved: int
    ends: Mapping[str, int]
    faults: Mapping[str, int]
    bar: Markup


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What the attempts of one phase did. Means are per attempt."""

    attempts: int
    tested: float
    """Share that ran the tests before submitting, or without ever submitting."""
    turns: float
    tools: Mapping[str, float]


def write_report(store: Store, run_id: str, path: Path | str) -> Path:
    """Write the page of a run, whole or not at all; its path.

    Raises:
        StoreError: there is no such run.
    """
    file = Path(path)
    page = render(store, run_id)
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    beside.write_text(page, encoding="utf-8")
    os.replace(beside, file)
    return file


def render(store: Store, run_id: str) -> str:
    """The page as text."""
    run = store.run(run_id)
    rows = store.trajectories(run_id, limit=None)
    metrics = _metrics(store, run_id)
    before, after = (success(r for r in rows if r.phase == phase) for phase in (BEFORE, AFTER))
    decode = view.decoder(store, run_id)
    uses = {phase: tool_use(store.iter_trajectories(run_id, phase=phase)) for phase in (BEFORE, AFTER)}
    environment = Environment(
        loader=PackageLoader("agentrl.training", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": lambda v: "–" if v is None else f"{100 * v:.1f} %",
        "whole": lambda v: f"{v:,}".replace(",", "\u202f"),
        "clipped": clipped,
        "words": lambda text: str(text).replace("_", " "),
    }
    return environment.get_template("report.html.jinja").render(
        run=run,
        config_text=config_text(run.config),
        started=time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started_at)),
        written=time.strftime("%Y-%m-%d %H:%M", time.localtime()),
        took=_duration(_ended(run, rows) - run.started_at),
        finished=None if run.state is RunState.RUNNING else str(run.state),
        before=before,
        after=after,
        headline=_headline(before, after),
        curve=_curve(rows, metrics, before, after),
        outcomes=[_outcome(phase, [r for r in rows if r.phase == phase]) for phase in _phases(rows)],
        colours=COLOURS,
        uses=uses,
        tool_chart=_tool_chart(uses),
        facts=_facts(store, run_id, rows),
        mismatch=_panels(metrics, lambda name: name.startswith("mismatch/")),
        chosen=_panels(metrics, lambda name: name in CHOSEN),
        everything=_panels(metrics, lambda _: True),
        timing=_timing(metrics),
        samples=_samples(store, rows, decode),
        decoded=decode is not None,
        evidence_means=view.EVIDENCE_MEANS,
        call_text=view.call_text,
        chain=_chain(store, run),
        events=[e for e in store.events(run_id) if e.message],
        moment=lambda at: time.strftime("%H:%M:%S", time.localtime(at)),
    )


# --------------------------------------------------------------------------------------------------- numbers


def wilson(k: int, n: int, z: float = Z_95) -> tuple[float, float]:
    """Score interval of a proportion (Wilson, 1927). Nothing seen: 0 to 1.

    Worked example: 8 of 10 at z = 1.96 gives 0.490 to 0.943.
    """
    if n == 0:
        return 0.0, 1.0
    p, zz = k / n, z * z
    centre = (p + zz / (2 * n)) / (1 + zz / n)
    half = z / (1 + zz / n) * math.sqrt(p * (1 - p) / n + zz / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def success(rows: Iterable[TrajectoryRow]) -> Rate:
    """Solved attempts of those that have a reward."""
    rewards = [r.reward for r in rows if r.reward is not None]
    return Rate(k=sum(reward >= SOLVED for reward in rewards), n=len(rewards))


def tool_use(trajectories: Iterable[Trajectory]) -> ToolUse | None:
    """What attempts did; None when there are none."""
    attempts = tested = turns = 0
    used: Counter[str] = Counter()
    for trajectory in trajectories:
        tools = [a.tool for turn in trajectory.turns for a in turn.actions if a.error is None]
        before_submit = tools[: tools.index("submit")] if "submit" in tools else tools
        attempts += 1
        tested += "run_tests" in before_submit
        turns += len(trajectory.turns)
        used.update(tools)
    if not attempts:
        return None
    return ToolUse(
        attempts=attempts,
        tested=tested / attempts,
        turns=turns / attempts,
        tools={name: count / attempts for name, count in sorted(used.items())},
    )


def config_text(config: Mapping[str, Any]) -> str:
    """The resolved configuration as TOML-like text; keys without a value are left out."""
    lines: list[str] = []

    def walk(table: Mapping[str, Any], name: str) -> None:
        plain = {k: v for k, v in table.items() if not isinstance(v, Mapping) and v is not None}
        if name and (plain or not table):
            lines.extend(["", f"[{name}]"])
        lines.extend(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in plain.items())
        for key, value in table.items():
            if isinstance(value, Mapping):
                walk(value, f"{name}.{key}" if name else key)

    walk(config, "")
    return "\n".join(lines).strip()


def clipped(text: str, limit: int = SHOWN_TEXT) -> str:
    """The head and the tail of a long text, and how much is left out. Control characters become pictures."""
    text = view.visible(text)
    if len(text) <= limit:
        return text
    head, tail = text[: limit * 2 // 3], text[-limit // 3 :]
    return f"{head}\n… {len(text) - len(head) - len(tail)} characters left out …\n{tail}"


def _metrics(store: Store, run_id: str) -> dict[str, list[tuple[float, float]]]:
    series: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in store.metrics(run_id):
        series[row.name].append((float(row.step), row.value))
    return dict(series)


def _ended(run: RunRow, rows: Sequence[TrajectoryRow]) -> float:
    return run.finished_at or max((r.finished_at for r in rows), default=run.started_at)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _phases(rows: Sequence[TrajectoryRow]) -> list[str]:
    """In the order in which they began."""
    return list(dict.fromkeys(row.phase for row in rows))


# -------------------------------------------------------------------------------------------------- drawings


def _headline(before: Rate, after: Rate) -> Markup | None:
    rows = [
        (name, rate.value, *rate.interval, colour)
        for name, rate, colour in (("before", before, "var(--before)"), ("after", after, "var(--after)"))
        if rate.value is not None
    ]
    return charts.strip(rows, title="Held-out success with 95 % intervals") if rows else None


def _curve(
    rows: Sequence[TrajectoryRow], metrics: Mapping[str, list[tuple[float, float]]], before: Rate, after: Rate
) -> Markup:
    reward = metrics.get("reward/mean") or _reward_by_step(rows)
    last = max((x for x, _ in reward), default=0.0)
    points: dict[float, Rate] = {0.0: before} if before.n else {}
    for phase in _phases(rows):
        number = phase.removeprefix(HELDOUT)
        if phase.startswith(HELDOUT) and number.isdigit():
            points[float(number)] = success(r for r in rows if r.phase == phase)
    if after.n:
        points[last if last else 1.0] = after
    held = sorted((x, rate) for x, rate in points.items() if rate.n)
    values = [y for _, y in reward] + [0.0, 1.0]
    return charts.lines(
        [
            charts.Line(name="mean reward of the update", colour="var(--train)", points=reward),
            charts.Line(
                name="held-out success",
                colour="var(--after)",
                points=[(x, rate.k / rate.n) for x, rate in held],
                intervals=[rate.interval for _, rate in held],
                dots=True,
                faint=True,
            ),
        ],
        bounds=(min(values), max(values)),
        x_label="update",
        title="Learning curve",
    )


def _reward_by_step(rows: Sequence[TrajectoryRow]) -> list[tuple[float, float]]:
    by_step: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        if row.phase == TRAIN and row.step is not None and row.reward is not None:
            by_step[row.step].append(row.reward)
    return [(float(step), fmean(rewards)) for step, rewards in sorted(by_step.items())]


def _outcome(phase: str, rows: Sequence[TrajectoryRow]) -> Outcome:
    solved = sum(r.reward is not None and r.reward >= SOLVED for r in rows)
    rest = Counter(str(r.termination) for r in rows if r.reward is None or r.reward < SOLVED)
    parts = {"solved": solved, **{end: rest[end] for end in map(str, Termination) if rest[end]}}
    return Outcome(
        phase=phase,
        total=len(rows),
        graded=sum(r.reward is not None for r in rows),
        solved=solved,
        ends={end: count for end, count in parts.items() if count},
        faults=Counter(
            f"{r.fault_owner}: {r.fault_code}"
            for r in rows
            if r.fault_owner is not None and r.fault_code != view.NOT_ADMITTED
        ),
        bar=charts.shares(parts, COLOURS, title=f"How {phase} ended"),
    )


def _tool_chart(uses: Mapping[str, ToolUse | None]) -> tuple[Markup, Markup] | None:
    before, after = uses[BEFORE], uses[AFTER]
    if before is None and after is None:
        return None
    names = sorted({*(before.tools if before else ()), *(after.tools if after else ())})

    def both(label: str, what: Callable[[ToolUse], float]) -> tuple[str, float | None, float | None]:
        return label, None if before is None else what(before), None if after is None else what(after)

    rows = [both("turns", lambda use: use.turns)]
    rows += [both(name, partial(_uses, name)) for name in names]
    return (
        charts.pairs(
            [both("run the tests", lambda use: use.tested)], percent=True, title="Tests before submitting"
        ),
        charts.pairs(rows, title="Uses per attempt"),
    )


def _uses(tool: str, use: ToolUse) -> float:
    return use.tools.get(tool, 0.0)


def _panels(
    metrics: Mapping[str, list[tuple[float, float]]], wanted: Callable[[str], bool]
) -> list[tuple[str, float, Markup]]:
    """A small drawing per metric: (name, last value, drawing)."""
    panels = []
    for name, points in sorted(metrics.items()):
        finite = [p for p in points if math.isfinite(p[1])]
        if wanted(name) and finite:
            line = charts.Line(name=name, colour="var(--train)", points=finite)
            drawing = charts.lines([line], width=SMALL_W, height=SMALL_H, title=name)
            panels.append((name, finite[-1][1], drawing))
    return panels


def _timing(
    metrics: Mapping[str, list[tuple[float, float]]],
) -> tuple[Markup, list[tuple[str, str, float, float]]] | None:
    """Where an update's time goes: (drawing, rows of name, colour, seconds per update, share)."""
    means = {
        name.removeprefix("time/").removesuffix("_s"): fmean(y for _, y in points)
        for name, points in sorted(metrics.items())
        if name.startswith("time/") and name not in SUMS
    }
    total = sum(means.values())
    if not total:
        return None
    ordered = dict(sorted(means.items(), key=lambda item: -item[1]))
    palette = [
        "var(--c1)",
        "var(--c3)",
        "var(--c2)",
        "var(--c5)",
        "var(--c4)",
        "var(--c6)",
        "var(--c7)",
        "var(--c8)",
    ]
    colours = {name: palette[min(i, len(palette) - 1)] for i, name in enumerate(ordered)}
    rows = [(name, colours[name], seconds, seconds / total) for name, seconds in ordered.items()]
    return charts.shares(ordered, colours, title="Seconds of an update", unit=" s"), rows


# --------------------------------------------------------------------------------------------------- evidence


def _facts(store: Store, run_id: str, rows: Sequence[TrajectoryRow]) -> list[tuple[str, int]]:
    faults = sum(r.fault_owner is not None and r.fault_code != view.NOT_ADMITTED for r in rows)
    return [
        ("trajectories", len(rows)),
        ("model calls", sum(r.calls for r in rows)),
        ("generated tokens", sum(r.tokens for r in rows)),
        ("faults", faults),
        ("updates", len(store.updates(run_id))),
        ("policy versions", len(store.policy_versions(run_id))),
    ]


def _chain(store: Store, run: RunRow) -> VerifyReport:
    folder = view.run_folder(run)
    key = None if folder is None else folder / "signing.key"
    return store.verify(run.id, key=key.read_bytes() if key is not None and key.is_file() else None)


def _samples(
    store: Store, rows: Sequence[TrajectoryRow], decode: view.Decode | None
) -> list[tuple[str, view.TrajectoryView]]:
    """One success after training, one failure after training, one from before: what there is of them."""
    late = [r for r in rows if r.phase == AFTER] + [r for r in reversed(rows) if r.phase == TRAIN]
    early = [r for r in rows if r.phase == BEFORE]
    graded = [r for r in late if r.reward is not None]
    picks = (
        ("A success after training", next((r for r in graded if (r.reward or 0) >= SOLVED), None)),
        ("A failure after training", next((r for r in graded if (r.reward or 0) < SOLVED), None)),
        ("One from before", next((r for r in early if r.reward == 0), next(iter(early), None))),
    )
    return [(title, view.load(store, row.id, decode=decode)) for title, row in picks if row is not None]
