"""Trajectory to rows: every sampled token once, in a row that is exactly what the model saw."""

from __future__ import annotations

import random
import time

import learner_given as given
import numpy as np
import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from agentrl.errors import EvidenceError
from agentrl.learner.samples import UNKNOWN_VERSION, Rows, build
from agentrl.types import BranchReason, LogProbKind, Trajectory


def masks(rows: Rows) -> list[list[int]]:
    return [rows.action_mask(r).astype(int).tolist() for r in range(len(rows.rows))]


def ids(rows: Rows) -> list[list[int]]:
    return [row.tolist() for row in rows.rows]


def test_a_prompt_that_drops_tokens_starts_a_new_row_and_loses_nothing() -> None:
    """TOK-04: a template that removes earlier thinking."""
    user1, think1, answer1, user2, think2, answer2 = 1, 2, 3, 4, 5, 6
    a = given.call("a", [user1], [think1, answer1])
    b = given.call(
        "b",
        [user1, answer1, user2],
        [think2, answer2],
        parent=a,
        parent_prompt=[user1],
        keep=1,
        reason=BranchReason.REASONING_DROPPED,
    )
    rows = build(given.trajectory([a, b]))
    assert ids(rows) == [[user1, think1, answer1], [user1, answer1, user2, think2, answer2]]
    assert masks(rows) == [[0, 1, 1], [0, 0, 0, 1, 1]]


def test_a_row_holds_the_header_that_was_sampled_from_at_every_turn() -> None:
    """TOK-17."""
    header = 4
    a = given.call("a", [1, header], [7])
    b = given.call("b", [1, header, 7, 2, header], [8], parent=a, parent_prompt=[1, header])
    rows = build(given.trajectory([a, b]))
    assert ids(rows) == [[1, 4, 7, 2, 4, 8]]
    assert masks(rows) == [[0, 0, 1, 0, 0, 1]]


def test_a_forked_token_that_was_sampled_once_trains_once() -> None:
    """TRJ-04: two continuations of one sampled token."""
    a = given.call("a", [1, 2], [3])
    b = given.call("b", [1, 2, 3], [4], parent=a, parent_prompt=[1, 2])
    c = given.call("c", [1, 2, 3], [5], parent=a, parent_prompt=[1, 2], reason=BranchReason.RESAMPLED)
    rows = build(given.trajectory([a, b, c]))
    assert ids(rows) == [[1, 2, 3, 4], [1, 2, 3, 5]]
    assert masks(rows) == [[0, 0, 1, 1], [0, 0, 0, 1]]


def test_two_calls_that_sampled_the_same_token_both_train_it() -> None:
    """TRJ-04, second half."""
    a = given.call("a", [1, 2], [3, 4])
    b = given.call("b", [1, 2], [3, 5], parent=a, parent_prompt=[1, 2], keep=2, reason=BranchReason.RESAMPLED)
    rows = build(given.trajectory([a, b]))
    assert ids(rows) == [[1, 2, 3, 4], [1, 2, 3, 5]]
    assert masks(rows) == [[0, 0, 1, 1], [0, 0, 1, 1]]


def test_calls_that_extend_each_other_are_one_row() -> None:
    """SRV-13: prompts of 3, 6 and 9 ids, generations of 2: one row of 11 with 6 actions."""
    a = given.call("a", [1, 2, 3], [4, 5])
    b = given.call("b", [1, 2, 3, 4, 5, 6], [7, 8], parent=a, parent_prompt=[1, 2, 3])
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    c = given.call("c", prompt, [10, 11], parent=b, parent_prompt=prompt[:6])
    rows = build(given.trajectory([a, b, c]))
    assert [len(r) for r in rows.rows] == [11]
    assert sum(masks(rows)[0]) == 6
    assert rows.position_N.tolist() == [3, 4, 6, 7, 9, 10]
    assert (rows.end_row, rows.end_position) == (0, 11)


def test_two_roots_each_have_their_own_prompt() -> None:
    rows = build(given.trajectory([given.call("a", [1, 2], [3]), given.call("b", [9, 8, 7], [6])]))
    assert ids(rows) == [[1, 2, 3], [9, 8, 7, 6]]


def test_a_stop_token_is_an_action_even_where_it_is_also_the_padding_id() -> None:
    """MSK-02, MSK-11: the mask comes from what was sampled, not from ids; a 2 in the prompt stays context."""
    rows = build(given.trajectory([given.call("a", [2, 9, 2], [7, 8, 2])]))
    assert ids(rows) == [[2, 9, 2, 7, 8, 2]]
    assert masks(rows) == [[0, 0, 0, 1, 1, 1]]


def test_template_tokens_around_a_turn_are_never_actions() -> None:
    """MSK-03: header [S, A, N], sampled [g1, g2, E], a newline that the template adds after it."""
    s, a_, n, g1, g2, e, u = 10, 11, 12, 1, 2, 3, 20
    a = given.call("a", [s, a_, n], [g1, g2, e])
    b = given.call("b", [s, a_, n, g1, g2, e, n, u], [g1], parent=a, parent_prompt=[s, a_, n])
    rows = build(given.trajectory([a, b]))
    assert masks(rows)[0][:7] == [0, 0, 0, 1, 1, 1, 0]


def test_a_generation_of_one_token_after_a_prompt_of_one_token_is_one_action() -> None:
    """MSK-05, MSK-06: spans are counted, never looked up, so first and last positions are not special."""
    assert masks(build(given.trajectory([given.call("a", [7], [8])]))) == [[0, 1]]


def test_unusable_output_is_still_an_action() -> None:
    """SRV-06: what was sampled trains, whether a tool call could be parsed from it or not."""
    assert masks(build(given.trajectory([given.call("a", [5], [7, 8, 9])])))[0][1:] == [1, 1, 1]


def test_a_missing_log_prob_is_absent_and_never_zero() -> None:
    """LGP-06."""
    rows = build(given.trajectory([given.call("a", [1], [2, 3, 4], log_probs=[-0.1, None, None])]))
    assert rows.valid_N.tolist() == [True, False, False]
    np.testing.assert_array_equal(rows.log_prob_N, np.array([-0.1, np.nan, np.nan], dtype=np.float32))
    assert rows.invalid == {"no_log_prob": 2}


def test_an_id_outside_of_the_tokenizer_makes_its_call_invalid_and_keeps_its_ids() -> None:
    """LGP-11."""
    rows = build(given.trajectory([given.call("a", [1], [3, 12])]), vocab_size=10)
    assert ids(rows) == [[1, 3, 12]]
    assert rows.valid_N.tolist() == [False, False]
    assert rows.invalid == {"phantom_token": 2}


@pytest.mark.parametrize(
    ("settings_", "reason"),
    [
        ({"log_probs": None, "kind": None}, "no_log_prob"),
        ({"top_p": 0.9}, "truncated_sampling"),
        ({"temperature": 0.0}, "truncated_sampling"),
        ({"kind": LogProbKind.RAW, "temperature": 0.7}, "raw_log_prob"),
        ({"versions": []}, "no_version"),
    ],
)
def test_evidence_that_is_not_of_the_sampled_distribution_is_not_valid(
    settings_: dict[str, object], reason: str
) -> None:
    rows = build(given.trajectory([given.call("a", [1], [2, 3], **settings_)]))  # type: ignore[arg-type]
    assert not rows.valid_N.any()
    assert rows.invalid == {reason: 2}


def test_raw_log_probs_at_temperature_one_are_those_of_the_sampled_distribution() -> None:
    rows = build(given.trajectory([given.call("a", [1], [2], kind=LogProbKind.RAW)]))
    assert rows.valid_N.all()


def test_versions_and_turns_are_per_token() -> None:
    a = given.call("a", [1], [2, 3], versions=[4, 5])
    summary = given.call("s", [9], [8], versions=[])
    b = given.call("b", [1, 2, 3, 6], [7], parent=a, parent_prompt=[1], versions=[5])
    rows = build(given.trajectory([a, summary, b], turns=["a", "b"]))
    assert rows.version_N.tolist() == [4, 5, UNKNOWN_VERSION, 5]
    assert rows.turn_N.tolist() == [0, 0, 1, 1], "a call without a turn belongs to the next one"
    assert rows.call_N.tolist() == [0, 0, 1, 2]


def test_a_prompt_that_is_not_what_the_engine_echoed_is_refused() -> None:
    a = given.call("a", [1, 2], [3])
    broken = type(a)(**{f: getattr(a, f) for f in a.__slots__} | {"prompt_hash": "0" * 64})
    with pytest.raises(EvidenceError, match="is not the prompt that the engine echoed"):
        build(given.trajectory([broken]))


def test_a_trajectory_without_calls_is_refused() -> None:
    with pytest.raises(EvidenceError, match="no model calls"):
        build(given.trajectory([]))


@st.composite
def trees(draw: st.DrawFn) -> Trajectory:
    """Random call trees: extensions, branches at any point of any earlier call, new roots; few ids."""
    calls = []
    prompts: list[list[int]] = []
    token = st.integers(0, 3)
    for i in range(draw(st.integers(1, 7))):
        parent = draw(st.none() | st.integers(0, i - 1)) if i else None
        generation = draw(st.lists(token, min_size=1, max_size=4))
        delta = draw(st.lists(token, min_size=1, max_size=3))
        if parent is None:
            prompts.append(delta)
            calls.append(given.call(f"c{i}", delta, generation))
            continue
        whole = [*prompts[parent], *calls[parent].generation_token_ids]
        keep = draw(st.just(len(whole)) | st.integers(0, len(whole)))
        prompts.append([*whole[:keep], *delta])
        calls.append(
            given.call(
                f"c{i}",
                prompts[-1],
                generation,
                parent=calls[parent],
                parent_prompt=prompts[parent],
                keep=keep,
            )
        )
    return given.trajectory(calls)


@settings(max_examples=150, deadline=None)
@for_all(trees())
def test_every_sampled_token_is_one_action_after_exactly_its_own_prompt(trajectory: Trajectory) -> None:
    rows = build(trajectory)
    places = set(zip(rows.row_N.tolist(), rows.position_N.tolist(), strict=True))
    assert len(places) == rows.n_actions == sum(len(c.generation_token_ids) for c in trajectory.calls)
    at = 0
    for call in trajectory.calls:
        prompt = trajectory.prompt_ids(call.id)
        for k, token in enumerate(call.generation_token_ids):
            row, position = rows.row_N[at], rows.position_N[at]
            seen = rows.rows[row][:position].tolist()
            assert seen == [*prompt, *call.generation_token_ids[:k]]
            assert rows.rows[row][position] == token == rows.token_N[at]
            at += 1
    leaves = {c.id for c in trajectory.calls}
    for call in trajectory.calls:
        if call.parent_id in leaves and call.branch_reason is None:
            leaves.discard(call.parent_id)
    assert len(rows.rows) <= len(trajectory.calls)
    assert len(rows.rows) >= len(leaves), "a row per leaf, one more per second continuation"


def test_building_is_linear_in_the_tokens() -> None:
    def seconds(turns: int) -> float:
        trajectory = given.chain(
            random.Random(0), id="t", turns=turns, generated=(20, 20), observed=(20, 20), vocab=1000
        )
        started = time.perf_counter()
        build(trajectory)
        return time.perf_counter() - started

    seconds(30)
    short, long = min(seconds(60) for _ in range(3)), min(seconds(480) for _ in range(3))
    assert long < 8 * short * 4, f"8 times the tokens took {long / short:.0f} times as long"
