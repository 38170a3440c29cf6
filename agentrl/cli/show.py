"""One trajectory on a screen, turn by turn, and the verdict with its chain of evidence."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from agentrl.cli.output import duration, number, out
from agentrl.training.view import EVIDENCE_MEANS, ActionView, TrajectoryView, TurnView, call_text, visible
from agentrl.types import Evidence

INDENT = 4
MARKS = {True: ("✓", "green"), False: ("✗", "red"), None: ("?", "yellow")}
"""Holds, does not hold, unknown (which is not true)."""


def show(t: TrajectoryView) -> None:
    """Print a trajectory: colours on a terminal, plain text in a pipe."""
    console = out()
    for line in _lines(t):
        if isinstance(line, Text) and sys.stdout.isatty():
            console.print(Padding(line, (0, 0, 0, INDENT)))
        elif isinstance(line, Text):
            sys.stdout.write("".join(f"{' ' * INDENT}{row}\n" for row in line.plain.splitlines()))
        else:
            console.print(line)


def _lines(t: TrajectoryView) -> Iterator[str | Text]:
    """Strings are markup, `Text` is content, shown as it is and indented."""
    place = f"{t.phase}{'' if t.step is None else f', step {t.step}'}, group {t.group_id}, member {t.index}"
    maker = f"{t.harness} with {t.model or 'no model call'} in {duration(t.seconds)}"
    yield f"[bold]trajectory[/] {escape(t.id)}"
    yield f"[bold]task[/] {escape(t.task_id)} [dim]({t.split}, revision {t.task_revision[:12]})[/]"
    yield f"[bold]run[/] {escape(t.run_id)}, {escape(place)}"
    yield f"[bold]made by[/] {escape(maker)}"
    if t.instruction:
        yield "[bold]instruction[/]"
        yield _content(t.instruction)
    for turn in t.turns:
        yield ""
        yield _head(turn)
        if turn.branch_reason is not None:
            yield f"  [yellow]new branch: {turn.branch_reason}[/]"
        if turn.text is not None:
            yield _content(turn.text, "cyan")
        for action in turn.actions:
            yield from _action(action, parsed=turn.text is None)
    yield ""
    yield from _verdict(t)


def _content(text: str, style: str = "") -> Text:
    return Text(visible(text).rstrip("\n"), style=style)


def _head(turn: TurnView) -> str:
    parts = [
        f"prompt {turn.prompt_tokens} tokens ({turn.new_tokens} new)",
        f"generated {turn.generated_tokens}",
        f"log-prob mean {number(turn.log_prob_mean, 3)}, min {number(turn.log_prob_min, 3)}"
        if turn.log_prob_mean is not None
        else "no log-probs",
        f"policy version {', '.join(map(str, turn.versions))}" if turn.versions else "no policy version",
        f"{turn.finish_reason} after {duration(turn.seconds)}",
    ]
    if turn.log_probs_missing:
        parts.insert(3, f"{turn.log_probs_missing} log-probs missing")
    return f"[bold]turn {turn.number}[/] · {' · '.join(parts)} [dim]{escape(turn.call_id)}[/]"


def _action(action: ActionView, *, parsed: bool) -> Iterator[str | Text]:
    if parsed:
        yield _content(call_text(action.tool, action.arguments), "cyan")
    colour = "red" if action.error is not None or action.is_error else "dim"
    yield f"  → [bold]{escape(action.tool)}[/] [{colour}]{escape(action.outcome)}[/]"
    if action.error is not None and action.observation is None:
        yield _content(action.error)
    if action.observation is not None:
        yield _content(action.observation)
    if action.truncated_bytes:
        yield f"  [dim]{action.truncated_bytes} bytes were not shown to the model[/]"


def _verdict(t: TrajectoryView) -> Iterator[str | Text]:
    components = "".join(f" · {escape(name)} {value:g}" for name, value in t.components.items())
    reward = "[yellow]none[/]" if t.reward is None else f"[bold]{t.reward:g}[/]"
    yield f"[bold]ended[/] {t.termination.replace('_', ' ')} · {t.generated_tokens} tokens generated"
    yield f"[bold]reward[/] {reward}{components}"
    if t.fault is not None:
        fault = f"of the {t.fault.owner} ({t.fault.code}, {t.fault.phase}): {t.fault.message}"
        yield f"[bold]fault[/] [red]{escape(fault)}[/]"
    for link in t.evidence:
        yield _link(link)
    for name, outcome, message in t.tests:
        colour = "green" if outcome == "passed" else "red"
        yield f"  [{colour}]{outcome}[/] {escape(name)}{f' [dim]{escape(message)}[/]' if message else ''}"
    flags = f" · flags: {escape(', '.join(t.flags))}" if t.flags else ""
    yield f"[bold]isolation[/] {t.isolation} · grader {escape(t.grader_revision[:12])}{flags}"
    signed = f"signed {t.signature[:16]}…" if t.signature else "not signed"
    yield f"[bold]record[/] {signed} · content {t.content_hash[:16]}… · number {t.seq} of the run's chain"


def _link(link: Evidence) -> str:
    mark, colour = MARKS[link.holds]
    facts = ", ".join(f"{key} {_fact(value)}" for key, value in link.facts.items())
    name = str(link.key).partition("_")[0]
    told = f" [dim]({escape(facts)})[/]" if facts else ""
    return f"  [{colour}]{mark}[/] {name:3} {EVIDENCE_MEANS[link.key]}{told}"


def _fact(value: object) -> str:
    text = "unknown" if value is None else str(value)
    return text if len(text) <= 24 else f"{text[:23]}…"
