"""Context policies: what they rewrite, and what the tree of calls says about it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fake_session import KEY, FakeSessions, NoBackend, task
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import tokenizer

from agentrl.errors import ConfigError
from agentrl.inference.sampler import SampleRequest
from agentrl.inference.scripted import ScriptedSampler
from agentrl.learner.samples import build
from agentrl.types import BranchReason, Termination, Trajectory
from harness.agent import NUDGE, ContextPolicy, ToolAgent
from harness.chat import ChatFormat
from harness.context import POLICIES, Replaced, ShortObservations, Summary, Window, get, parts, replaced
from harness.rollout import RolloutSettings, run_one
from harness.transcript import common_prefix

CHAT = ChatFormat(tokenizer("chatml"))
LS = '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
SUBMIT = '<tool_call>{"name": "submit", "arguments": {}}</tool_call>'
LONG = "x y z " * 40


def attempt(
    policy: ContextPolicy | None,
    lines: Sequence[str] | Callable[[SampleRequest, int], str],
    *,
    observation: str = LONG,
    chat: ChatFormat = CHAT,
    context: int = 2000,
    **options: Any,
) -> Trajectory:
    def script(request: SampleRequest, number: int) -> str:
        return lines(request, number) if callable(lines) else lines[min(number, len(lines) - 1)]

    return asyncio.run(
        run_one(
            task(),
            sampler=ScriptedSampler(script, encode=chat.encode_reply),
            chat=chat,
            backend=NoBackend(),
            group_id="g",
            index=0,
            signing_key=KEY,
            settings=RolloutSettings(require_log_probs=False, max_context=context),
            agent=ToolAgent(context=policy, **options),
            open_session=FakeSessions(lambda a: observation),
        )
    )


def check_tree(trajectory: Trajectory) -> None:
    """Prompts are rebuilt along the tree, every branch keeps the longest common prefix and says why it is
    one."""
    for call in trajectory.calls[1:]:
        assert call.parent_id is not None
        parent = trajectory.call(call.parent_id)
        old = trajectory.prompt_ids(parent.id) + parent.generation_token_ids
        new = trajectory.prompt_ids(call.id)
        assert call.prompt_keep == common_prefix(old, new)
        spans = replaced(trajectory, call.id)
        assert (call.branch_reason is None) == (call.prompt_keep == len(old))
        assert bool(spans) == (call.branch_reason is not None)
        rebuilt, at = list[int](), 0
        for span in spans:
            rebuilt += [*old[at : span.start], *new[span.new_start : span.new_end]]
            at = span.end
        rebuilt += old[at:]
        assert tuple(rebuilt) == new[: len(rebuilt)], "the spans turn the parent into the branch"


def prompts(trajectory: Trajectory) -> list[str]:
    return [CHAT.decode(trajectory.prompt_ids(call.id)) for call in trajectory.calls]


def test_without_a_policy_a_full_context_ends_the_attempt() -> None:
    for policy in (None, get("none")):
        trajectory = attempt(policy, [LS], context=900)
        assert trajectory.termination is Termination.CONTEXT_FULL
        assert trajectory.harness == "tool-agent/1"
        assert {call.branch_reason for call in trajectory.calls} == {None}


def test_a_window_forgets_the_oldest_turns_and_keeps_the_task() -> None:
    trajectory = attempt(Window(1600), [LS] * 13 + [SUBMIT])
    assert trajectory.termination is Termination.FINISHED
    assert trajectory.harness == "tool-agent/1+window"
    check_tree(trajectory)
    branches = [c for c in trajectory.calls if c.branch_reason is not None]
    assert branches
    assert {c.branch_reason for c in branches} == {BranchReason.TRUNCATION}
    assert trajectory.metadata["context_rewrites"] == len(branches)
    assert len(branches) < len(trajectory.calls) / 2, "not every call is a branch"
    assert all(len(trajectory.prompt_ids(c.id)) <= 1600 for c in trajectory.calls)
    assert all("Fix the bug in add." in text for text in prompts(trajectory))
    first = branches[0]
    (gone,) = replaced(trajectory, first.id)
    assert gone.new_start == gone.new_end, "whole turns are left out, nothing stands in their place"
    assert trajectory.call(first.parent_id or "").id == trajectory.calls[trajectory.calls.index(first) - 1].id


def test_old_observations_are_cut_and_new_ones_are_not() -> None:
    trajectory = attempt(ShortObservations(800, characters=20), [LS] * 6 + [SUBMIT])
    assert trajectory.termination is Termination.FINISHED
    check_tree(trajectory)
    assert BranchReason.TRUNCATION in {c.branch_reason for c in trajectory.calls}
    text = prompts(trajectory)[-1]
    assert f"x y z x y \n[{len(LONG) - 20} characters left out]\n" in text
    assert text.count(LONG) == 2
    assert text.count(LS) == 6, "replies stay"


def test_a_summary_is_a_recorded_call_of_the_policy_and_the_parent_of_what_follows() -> None:
    def lines(request: SampleRequest, number: int) -> str:
        text = CHAT.decode(request.prompt_token_ids)
        if Summary.REQUEST in text:
            return f"<think>long</think>Seen {text.count(LONG)}."
        return SUBMIT if number > 11 else LS

    trajectory = attempt(Summary(800, summary_tokens=60), lines)
    assert trajectory.termination is Termination.FINISHED
    check_tree(trajectory)
    asked = [i for i, text in enumerate(prompts(trajectory)) if Summary.REQUEST in text]
    assert len(asked) >= 2, "also a second time"
    for i in asked:
        summary, after = trajectory.calls[i], trajectory.calls[i + 1]
        assert summary.branch_reason is None, "the request extends what was there"
        assert after.parent_id == summary.id
        assert after.branch_reason is BranchReason.COMPACTION
        text = prompts(trajectory)[i + 1]
        assert text.count(Summary.INTRODUCTION) == 1
        assert "Seen " in text
        assert "long" not in text
        assert LONG not in text
        turn = next(t for t in trajectory.turns if t.call_id == summary.id)
        assert (turn.actions, turn.observations) == ((), ())
    assert trajectory.metadata["context_rewrites"] == len(asked)


def test_every_sampled_token_is_trained_once_whatever_was_rewritten() -> None:
    """The class of TRJ-04 and TOK-11: rows of a rewritten trajectory hold each sampled token exactly once."""
    for policy in (Window(700), ShortObservations(700, characters=20), Summary(700, summary_tokens=40)):
        trajectory = attempt(policy, [LS] * 8 + [SUBMIT])
        rows = build(trajectory)
        sampled = [i for call in trajectory.calls for i in call.generation_token_ids]
        trained = [int(rows.rows[r][p]) for r, p in zip(rows.row_N, rows.position_N, strict=True)]
        assert trained == sampled


@pytest.mark.parametrize("family", ["mistral", "llama", "smollm", "reasoning"])
@pytest.mark.parametrize("name", ["window", "observations", "summary"])
def test_policies_work_with_every_template(name: str, family: str) -> None:
    chat = ChatFormat(tokenizer(family))
    trajectory = attempt(get(name, 800), [LS] * 6 + [SUBMIT], chat=chat)
    assert trajectory.verdict.fault is None
    check_tree(trajectory)
    assert trajectory.metadata["context_rewrites"]


def test_an_unknown_policy_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'window'"):
        get("windows")
    assert all(POLICIES[name](100).name == name for name in POLICIES)


def test_messages_are_a_head_and_turns() -> None:
    messages = [
        {"role": r, "content": str(i)}
        for i, r in enumerate(["system", "user", "assistant", "tool", "tool", "assistant"])
    ]
    head, turns = parts(messages)
    assert [m["content"] for m in head] == ["0", "1"]
    assert [[m["content"] for m in turn] for turn in turns] == [["2", "3", "4"], ["5"]]
    assert parts(messages[:2]) == (messages[:2], [])


def test_replaced_spans_are_those_worked_out_by_hand() -> None:
    """Parent (1..6), branch (1, 2, 9, 5, 6, 7): tokens 2 to 4 became 2 to 3; the 7 is new."""
    trajectory = attempt(None, ["a", "b"], nudges=1)
    first, second = trajectory.calls
    made = Trajectory(
        **{
            **{f: getattr(trajectory, f) for f in trajectory.__dataclass_fields__},
            "turns": (),
            "calls": (
                _call(first, prompt_delta=(1, 2, 3, 4), generation_token_ids=(5, 6)),
                _call(
                    second,
                    prompt_keep=2,
                    prompt_delta=(9, 5, 6, 7),
                    branch_reason=BranchReason.TRUNCATION,
                    generation_token_ids=(8,),
                ),
            ),
        }
    )
    assert replaced(made, first.id) == ()
    assert replaced(made, second.id) == (Replaced(2, 4, 2, 3),)


def _call(call: Any, **changes: Any) -> Any:
    fields = {f: getattr(call, f) for f in call.__dataclass_fields__}
    return type(call)(**{**fields, **changes})


def test_a_reply_without_a_call_is_nudged_as_often_as_allowed() -> None:
    trajectory = attempt(None, ["Hm.", "Hm.", LS, "Done."], nudges=2, observation="ok")
    assert len(trajectory.calls) == 4
    assert trajectory.harness == "tool-agent/1+nudged"
    assert prompts(trajectory)[-1].count(NUDGE) == 2
    assert trajectory.termination is Termination.FINISHED
    assert {c.branch_reason for c in trajectory.calls} == {None}


@given(
    st.lists(st.integers(0, 60), min_size=2, max_size=7),
    st.sampled_from(["window", "observations", "summary"]),
)
@settings(max_examples=15, deadline=None)
def test_whatever_the_lengths_the_tree_holds(lengths: list[int], name: str) -> None:
    def lines(request: SampleRequest, number: int) -> str:
        return ("w " * lengths[number] + LS) if number < len(lengths) else SUBMIT

    trajectory = attempt(get(name, 600), lines, observation=LONG[:100])
    assert trajectory.verdict.fault is None
    check_tree(trajectory)
