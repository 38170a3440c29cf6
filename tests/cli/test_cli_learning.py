"""Where the learner's time goes, for a run and beside others."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from agentrl.cli import learning
from agentrl.cli.app import bench
from agentrl.cli.learning import BENCH

ROOT = Path(__file__).parent.parent.parent


def test_the_profile_of_a_run_is_the_mean_over_its_updates(here, typed) -> None:
    found = json.loads(typed("runs", "profile", "--json").stdout)
    assert found["updates"] == 4
    assert found["metrics"]["time/forward_s"] == pytest.approx(0.8)
    assert found["metrics"]["time/backward_s"] == pytest.approx(1.7)
    assert found["seconds"] == pytest.approx(0.8 + 1.7 + 0.1)
    text = typed("runs", "profile").stdout
    assert "backward\t1.700\t65.4 %" in text


def test_a_bench_that_is_not_there_says_where_it_is(typed, monkeypatch) -> None:
    monkeypatch.setattr(learning, "BENCH", Path("tests") / "nowhere.py")
    result = typed("bench", "learner")
    assert result.exit_code == 2
    assert "checkout of the source" in result.stderr


def test_the_bench_knows_every_option_that_the_verb_gives_it() -> None:
    verb = next(c for c in bench.registered_commands if c.name == "learner").callback
    assert verb is not None
    source = (ROOT / BENCH).read_text()
    given = {*inspect.signature(verb).parameters} - {"json"} | {"out"}  # --json asks the bench for its file
    assert len(given) > 5
    for option in given:
        assert f'"--{option}"' in source
