"""The progress of a run as a person or a machine reads it: a bar per phase, plain lines, JSON lines.

All of them are `agentrl.training.events.Listener`s and write to stderr, so that stdout stays the result's. A
rate is counted over the whole phase; an ETA is what that rate promises, and absent when the total is unknown.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from agentrl.cli.output import duration, jsonable
from agentrl.training.events import Listener

LINE_EVERY_S = 2.0
"""Plain and JSON lines come at most this often within a phase …"""
LINE_EVERY_SHARE = 0.05
"""… and only after this share of the total, so that a log stays readable."""

Fact = float | int | str
Clock = Callable[[], float]

TITLES = {
    "images": "Images",
    "tasks": "Tasks",
    "demonstration": "Demonstrations",
    "imitation": "Imitation",
    "heldout_before": "Held-out, before",
    "train": "Reinforcement",
    "heldout_after": "Held-out, after",
    "report": "Report",
}
"""What the phases of a run are called on a screen."""


@dataclass(slots=True)
class Phase:
    """What is known of the current phase."""

    name: str
    total: int | None
    unit: str
    started: float
    done: int = 0
    facts: dict[str, Fact] = field(default_factory=dict)

    def rate(self, now: float) -> float | None:
        """Units per second since the phase began; None before the first."""
        elapsed = now - self.started
        return self.done / elapsed if self.done and elapsed > 0 else None

    def eta_s(self, now: float) -> float | None:
        """Seconds left at this rate; None when nobody can know."""
        rate = self.rate(now)
        if rate is None or self.total is None:
            return None
        return max(0, self.total - self.done) / rate

    @property
    def title(self) -> str:
        return TITLES.get(self.name, self.name.replace("_", " ").capitalize())

    @property
    def count(self) -> str:
        return (
            f"{self.done}/{self.total} {self.unit}" if self.total is not None else f"{self.done} {self.unit}"
        )


def facts_text(facts: Mapping[str, Fact]) -> str:
    """`reward 0.42 · faults 0`: floats to three significant places, in the order given."""
    shown = (
        f"{k.replace('_', ' ')} {v:.3g}" if isinstance(v, float) else f"{k.replace('_', ' ')} {v}"
        for k, v in facts.items()
    )
    return " · ".join(shown)


def rate_text(rate: float | None, unit: str) -> str:
    """`12.3 tasks/s`, or `4.1 s each` for what is slower than one a second."""
    if rate is None:
        return ""
    return f"{rate:.1f} {unit}/s" if rate >= 1 else f"{1 / rate:.1f} s each"


class Bars:
    """A bar per phase on a terminal: count, rate, time left, current facts. Finished phases stay in sight."""

    def __init__(self, console: Console, *, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._phase: Phase | None = None
        self._task: TaskID | None = None
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}", justify="right"),
            TextColumn("[cyan]{task.fields[rate]}"),
            TextColumn("[dim]{task.fields[left]}"),
            TextColumn("{task.fields[facts]}"),
            console=console,
            refresh_per_second=4,
        )

    def begin(self, phase: str, *, total: int | None, unit: str) -> None:
        self._progress.start()
        self._phase = Phase(name=phase, total=total, unit=unit, started=self._clock())
        self._task = self._progress.add_task(self._phase.title, total=total, **self._fields(self._phase))

    def advance(self, n: int = 1, **facts: Fact) -> None:
        if self._phase is not None and self._task is not None:
            self._phase.done += n
            self._phase.facts |= facts
            self._progress.update(self._task, completed=self._phase.done, **self._fields(self._phase))

    def end(self, **facts: Fact) -> None:
        if self._phase is None or self._task is None:
            return
        self._phase.facts |= facts
        whole = max(1, self._phase.total if self._phase.total is not None else self._phase.done)
        fields = self._fields(self._phase) | {"left": duration(self._clock() - self._phase.started)}
        self._progress.update(self._task, total=whole, completed=whole, **fields)
        self._phase = self._task = None

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def note(self, message: str) -> None:
        self._progress.console.print(f"[yellow]•[/] {escape(message)}")

    def close(self) -> None:
        """Leave the screen as it is."""
        if self._progress.live.is_started:
            self._progress.stop()

    def _fields(self, phase: Phase) -> dict[str, Any]:
        now = self._clock()
        eta = phase.eta_s(now)
        return {
            "count": phase.count,
            "rate": rate_text(phase.rate(now), phase.unit),
            "left": "" if eta is None else f"{duration(eta)} left",
            "facts": escape(facts_text(phase.facts)),
        }


@dataclass(slots=True)
class _Throttle:
    """Whether the next line of a phase is due."""

    at: float = 0.0
    done: int = 0

    def due(self, phase: Phase, now: float) -> bool:
        step = 1 if phase.total is None else max(1, round(phase.total * LINE_EVERY_SHARE))
        if now - self.at < LINE_EVERY_S or phase.done - self.done < step:
            return False
        self.at, self.done = now, phase.done
        return True


class Lines:
    """Plain lines for logs and pipes: at most one per two seconds and per 5 % of a phase."""

    def __init__(self, stream: TextIO, *, clock: Clock = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._phase: Phase | None = None
        self._throttle = _Throttle()

    def begin(self, phase: str, *, total: int | None, unit: str) -> None:
        now = self._clock()
        self._phase = Phase(name=phase, total=total, unit=unit, started=now)
        self._throttle = _Throttle(at=now)
        self._write(f"{self._phase.title}: {'' if total is None else f'{total} '}{unit}")

    def advance(self, n: int = 1, **facts: Fact) -> None:
        if self._phase is None:
            return
        self._phase.done += n
        self._phase.facts |= facts
        now = self._clock()
        if self._throttle.due(self._phase, now):
            eta = self._phase.eta_s(now)
            parts = [
                self._phase.count,
                rate_text(self._phase.rate(now), self._phase.unit),
                "" if eta is None else f"{duration(eta)} left",
                facts_text(self._phase.facts),
            ]
            self._write(f"{self._phase.title}: {', '.join(p for p in parts if p)}")

    def end(self, **facts: Fact) -> None:
        if self._phase is None:
            return
        self._phase.facts |= facts
        took = duration(self._clock() - self._phase.started)
        told = facts_text(self._phase.facts)
        self._write(f"{self._phase.title}: done in {took}, {self._phase.count}{f', {told}' if told else ''}")
        self._phase = None

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def note(self, message: str) -> None:
        self._write(f"note: {message}")

    def close(self) -> None:
        pass

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class JsonLines:
    """One JSON object per line, for machines: `event` is begin, advance, end, metrics or note."""

    def __init__(self, stream: TextIO, *, clock: Clock = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._phase: Phase | None = None
        self._throttle = _Throttle()

    def begin(self, phase: str, *, total: int | None, unit: str) -> None:
        now = self._clock()
        self._phase = Phase(name=phase, total=total, unit=unit, started=now)
        self._throttle = _Throttle(at=now)
        self._write("begin", phase=phase, total=total, unit=unit)

    def advance(self, n: int = 1, **facts: Fact) -> None:
        if self._phase is None:
            return
        self._phase.done += n
        self._phase.facts |= facts
        now = self._clock()
        if self._throttle.due(self._phase, now):
            self._write(
                "advance",
                phase=self._phase.name,
                done=self._phase.done,
                total=self._phase.total,
                rate_per_s=self._phase.rate(now),
                eta_s=self._phase.eta_s(now),
                facts=self._phase.facts,
            )

    def end(self, **facts: Fact) -> None:
        if self._phase is None:
            return
        self._phase.facts |= facts
        self._write(
            "end",
            phase=self._phase.name,
            done=self._phase.done,
            wall_s=self._clock() - self._phase.started,
            facts=self._phase.facts,
        )
        self._phase = None

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._write("metrics", step=step, values=dict(values))

    def note(self, message: str) -> None:
        self._write("note", message=message)

    def close(self) -> None:
        pass

    def _write(self, event: str, **values: object) -> None:
        line = {"event": event, "at": time.time(), **jsonable(values)}
        self._stream.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
        self._stream.flush()


@contextmanager
def shown(*, as_json: bool) -> Iterator[Listener]:
    """The listener that fits stderr: JSON lines if asked, bars on a terminal, plain lines otherwise."""
    listener: Bars | Lines | JsonLines
    if as_json:
        listener = JsonLines(sys.stderr)
    elif sys.stderr.isatty():
        listener = Bars(Console(stderr=True))
    else:
        listener = Lines(sys.stderr)
    try:
        yield listener
    finally:
        listener.close()
