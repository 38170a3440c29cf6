"""Progress on a clock of our own: what is printed, when, and that rates are what they say."""

from __future__ import annotations

import io
import json

from rich.console import Console

from agentrl.cli.progress import Bars, JsonLines, Lines, Phase


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rate_and_time_left_by_hand() -> None:
    phase = Phase(name="train", total=40, unit="tasks", started=10.0)
    assert phase.rate(12.0) is None
    assert phase.eta_s(12.0) is None
    phase.done = 10
    assert phase.rate(15.0) == 2.0
    assert phase.eta_s(15.0) == 15.0
    assert Phase(name="x", total=None, unit="y", started=0.0, done=3).eta_s(1.0) is None


def test_plain_lines_come_at_most_every_two_seconds() -> None:
    out, clock = io.StringIO(), Clock()
    lines = Lines(out, clock=clock)
    lines.begin("train", total=20, unit="trajectories")
    for _ in range(20):
        clock.now += 0.5
        lines.advance(1, reward=0.5)
    lines.end(reward=0.75)
    shown = out.getvalue().splitlines()
    assert shown[0] == "Reinforcement: 20 trajectories"
    assert shown[1] == "Reinforcement: 4/20 trajectories, 2.0 trajectories/s, 8.0 s left, reward 0.5"
    assert len(shown) == 1 + 5 + 1
    assert shown[-1] == "Reinforcement: done in 10.0 s, 20/20 trajectories, reward 0.75"


def test_plain_lines_come_at_most_every_twentieth_of_a_long_phase() -> None:
    out, clock = io.StringIO(), Clock()
    lines = Lines(out, clock=clock)
    lines.begin("imitation", total=1000, unit="steps")
    for _ in range(1000):
        clock.now += 3.0
        lines.advance()
    assert len(out.getvalue().splitlines()) == 1 + 20
    assert "3.0 s each" in out.getvalue()


def test_json_lines_are_objects_that_name_their_event() -> None:
    out, clock = io.StringIO(), Clock()
    lines = JsonLines(out, clock=clock)
    lines.begin("tasks", total=2, unit="tasks")
    clock.now += 4.0
    lines.advance(1, quarantined=0)
    lines.metrics(3, {"loss": float("nan"), "reward": 0.5})
    lines.note("two\nlines")
    lines.end()
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [e["event"] for e in events] == ["begin", "advance", "metrics", "note", "end"]
    assert events[1]["rate_per_s"] == 0.25
    assert events[1]["eta_s"] == 4.0
    assert events[1]["facts"] == {"quarantined": 0}
    assert events[2]["values"] == {"loss": None, "reward": 0.5}


def test_bars_keep_finished_phases_and_notes_in_sight() -> None:
    out, clock = io.StringIO(), Clock()
    bars = Bars(Console(file=out, force_terminal=True, width=160, color_system=None), clock=clock)
    bars.begin("tasks", total=4, unit="tasks")
    clock.now += 2.0
    bars.advance(4, quarantined=0)
    bars.note("a [strange] note")
    bars.end()
    bars.begin("train", total=10, unit="trajectories")
    clock.now += 5.0
    bars.advance(5, reward=0.25)
    bars.close()
    last = out.getvalue()[-2000:]
    assert "Tasks" in last
    assert "4/4 tasks" in last
    assert "5/10 trajectories" in last
    assert "5.0 s left" in last
    assert "reward 0.25" in last
    assert "a [strange] note" in out.getvalue()


def test_nothing_is_shown_before_a_phase_and_nothing_breaks() -> None:
    out = io.StringIO()
    for listener in (Lines(out), JsonLines(out), Bars(Console(file=out))):
        listener.advance(1, x=1)
        listener.end()
        listener.close()
    assert out.getvalue() == ""
