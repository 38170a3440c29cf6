"""The proxy as a process, from a saved model to the fidelity report; and a person at the terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.learner import small
from agentrl.store import Store
from envs.tasks.swe_mini import generate

TEXTS = ["You are a helpful assistant. What is the weather? It is sunny in Paris."] * 4


def saved_model(folder: Path) -> Path:
    tokenizer = small.build_tokenizer(TEXTS, vocabulary=320)
    model = small.build_model(
        vocabulary=len(tokenizer), hidden_size=128, layers=2, heads=2, head_dim=64, context=512, seed=1
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def out(typed: Any, *words: str) -> Any:
    result = typed(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_model_is_served_to_any_client_and_what_it_said_can_be_read_and_verified(
    tmp_path: Path, typed: Any
) -> None:
    model, folder = saved_model(tmp_path / "model"), tmp_path / "proxy"
    words = ["serve", "proxy", "--model", str(model), "--dir", str(folder), "--port", "0", "--json"]
    with subprocess.Popen(
        [sys.executable, "-m", "agentrl.cli.main", *words, "--max-tokens", "12"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        serving = json.loads(line)
        session = serving["session"]
        headers = {"authorization": f"Bearer {session['key']}"}
        messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather?"}]
        for _ in range(2):
            answer = httpx.post(
                f"{session['openai_base_url']}/chat/completions",
                json={"model": "any", "messages": messages},
                headers=headers,
                timeout=60,
            )
            assert answer.status_code == 200, answer.text
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "And?"}]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, process.stderr.read()
    store = str(folder / "store.db")
    report = out(typed, "trajectories", "fidelity", "--store", store)
    assert [(r["calls"], r["exact"], r["exact_share"]) for r in report["harnesses"]] == [(2, 2, 1.0)]
    assert out(typed, "verify", "--store", store)["ok"] is True
    shown = out(typed, "trajectories", "show", serving["run"], "--store", store)
    said = [messages[1]["content"], messages[3]["content"]]
    assert [turn["text"].removesuffix("<|im_end|>") for turn in shown["turns"]] == said
    with Store.open(store) as opened:
        kept = next(opened.iter_trajectories(serving["run"]))
    assert [v.version for c in kept.calls for v in c.policy_versions] == [0, 0]
    assert kept.calls[1].parent_id == kept.calls[0].id
    assert kept.calls[1].branch_reason is None


def test_without_a_policy_the_proxy_says_what_to_give_it(typed: Any) -> None:
    result = typed("serve", "proxy")
    assert result.exit_code == 2
    assert "--model" in result.output


def test_a_person_plays_a_task_and_the_attempt_is_kept_as_a_demonstration(
    tmp_path: Path, typed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = generate(tmp_path / "suite", train=1, heldout=0, seed=3)[0]
    monkeypatch.chdir(tmp_path)
    lines = iter(["dance", "read_file cafe.py", "replace_in_file path=cafe.py", "run_tests", "submit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    store = str(tmp_path / "demos.db")
    told = out(typed, "tasks", "play", str(package), "--backend", "plain", "--store", store)
    assert (told["termination"], told["reward"], told["turns"]) == ("finished", 0.0, 3)
    with Store.open(store) as opened:
        run = opened.runs()[0]
        kept = next(opened.iter_trajectories(run.id, phase="demonstration"))
    assert [a.tool for t in kept.turns for a in t.actions] == ["read_file", "run_tests", "submit"]
    assert all(call.generation_log_probs is None for call in kept.calls)
