"""The scripted demonstrator: what it does is imperfect in the ways it is said to be, and in no other."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from tiny_tokenizer import tokenizer

from agentrl.errors import ConfigError
from agentrl.inference.sampler import SampleRequest
from agentrl.types import SamplingParams, Task
from envs.tasks.package import load_task
from envs.tasks.swe_mini import generate
from harness.chat import ChatFormat
from harness.demonstrator import Demonstrator, Habits


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat(tokenizer("chatml"))


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return load_task(generate(tmp_path_factory.mktemp("suite"), train=1, heldout=0, seed=5)[0])


def attempt(task: Task, chat: ChatFormat, habits: Habits, seed: int) -> list[dict[str, Any]]:
    """Its calls until it submits; tests pass when the fix is in."""
    script = Demonstrator(task, habits, chat, seed=str(seed))
    seen = ""
    calls: list[dict[str, Any]] = []
    while not calls or calls[-1]["name"] != "submit":
        request = SampleRequest(
            id=str(len(calls)),
            session="s",
            prompt_token_ids=tuple(chat.encode_reply(seen or "fix it")),
            params=SamplingParams(max_tokens=1),
        )
        call = json.loads(script(request, len(calls)).split("\n")[1])
        calls.append(call)
        if call["name"] == "replace_in_file":
            line = call["arguments"]["new"]
        seen = ""
        if call["name"] == "run_tests":
            seen = "PASSED 3/3" if line == task.metadata["fix"] else "FAILED 2/3"
    return calls


def test_every_edit_starts_from_the_line_as_it_is_and_changes_it_to_the_next_alternative(
    task: Task, chat: ChatFormat
) -> None:
    alternatives = list(task.metadata["alternatives"])
    for seed in range(40):
        line = task.metadata["buggy"]
        for call in attempt(task, chat, Habits(careful=0.5, give_up=0.3, change_mind=0.5), seed):
            if call["name"] == "replace_in_file":
                after = alternatives[(alternatives.index(line) + 1) % len(alternatives)]
                assert call["arguments"] == {"path": task.metadata["file"], "old": line, "new": after}
                line = after


def test_who_always_checks_and_never_gives_up_ends_with_the_fix_in_at_most_as_many_edits_as_there_are_others(
    task: Task, chat: ChatFormat
) -> None:
    calls = attempt(task, chat, Habits(careful=1.0, give_up=0.0, change_mind=0.0), 0)
    names = [call["name"] for call in calls]
    edits = names.count("replace_in_file")
    assert names == ["read_file", *["replace_in_file", "run_tests"] * edits, "submit"]
    assert edits <= len(task.metadata["alternatives"]) - 1
    assert calls[-3]["arguments"]["new"] == task.metadata["fix"]


def test_it_checks_its_work_as_often_as_its_habits_say(task: Task, chat: ChatFormat) -> None:
    habits = Habits(careful=0.2, give_up=0.2, change_mind=0.4)
    tested = Counter(
        any(call["name"] == "run_tests" for call in attempt(task, chat, habits, seed)) for seed in range(400)
    )
    assert 0.14 < tested[True] / 400 < 0.26  # three standard errors


def test_a_task_without_the_notes_it_needs_is_refused(task: Task, chat: ChatFormat) -> None:
    bare = replace(task, metadata={"file": "a.py"})
    with pytest.raises(ConfigError, match="has no buggy, alternatives"):
        Demonstrator(bare, Habits(careful=0.0, give_up=0.0, change_mind=0.0), chat, seed="0")
