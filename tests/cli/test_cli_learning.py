"""Where the learner's time goes, for a run and beside others."""

from __future__ import annotations

import inspect
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

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


def test_the_bench_steps_on_a_stored_group_and_tells_it_as_one_object(tmp_path: Path) -> None:
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49_152,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=8_192,
        )
    ).save_pretrained(tmp_path)
    words = ["--model", str(tmp_path), "--sides", "shared", "--scaling", "", "--repeats", "2", "--json"]
    command = [sys.executable, "-m", "agentrl.cli.main", "bench", "learner", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    side, data = found["sides"]["shared"], found["data"]
    assert set(found["sides"]) == {"shared"}
    assert data["tokens"] > 2 * data["distinct_tokens"] > 0
    rates = [data["tokens"] / seconds for seconds in side["wall_s"]]
    assert side["tokens_per_s"] == pytest.approx(statistics.median(rates), rel=0.1)
    assert len(side["wall_s"]) == 2
    assert side["grad_norm"] > 0
