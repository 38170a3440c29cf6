"""Skip-observation GAE against the six-line loop, and the properties that make it what it is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algo.advantages import gae_tokens, gae_turns, n_step
from agentrl.algo.columns import Layout, segment_sum
from agentrl.algo.gae import BLOCK, adaptive_lambda, gae, reverse_scan
from agentrl.algo.rewards import land_on_kept, place
from agentrl.errors import EvidenceError

pytestmark = pytest.mark.algorithms


def slow(rewards, values, lengths, gamma, lams, finals):
    """The reference: one token at a time, from the end."""
    out, start = [], 0
    for length, lam, final in zip(lengths, lams, finals, strict=True):
        carry, following, part = 0.0, final, []
        for i in reversed(range(start, start + length)):
            carry = rewards[i] + gamma * following - values[i] + gamma * lam * carry
            following = values[i]
            part.append(carry)
        out += reversed(part)
        start += length
    return torch.tensor(out, dtype=torch.float64)


def random_batch(lengths, seed=0):
    g = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    return torch.randn(n, generator=g, dtype=torch.float64), torch.randn(n, generator=g, dtype=torch.float64)


LONG = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5, BLOCK * BLOCK + 7, 1, 40_000]


@pytest.mark.parametrize(
    ("gamma", "lam"), [(1.0, 0.95), (1.0, 1.0), (0.9, 0.0), (1e-3, 1e-3), (0.99, 0.5), (0.0, 1.0)]
)
def test_the_scan_equals_the_plain_loop_for_any_length(gamma, lam):
    rewards_N, values_N = random_batch(LONG)
    truncated_S = torch.arange(len(LONG)) % 2 == 0
    bootstrap_S = torch.linspace(-1, 1, len(LONG), dtype=torch.float64)
    finals = torch.where(truncated_S, bootstrap_S, torch.zeros_like(bootstrap_S)).tolist()
    estimate = gae(
        rewards_N,
        values_N,
        Layout.of(LONG),
        gamma=gamma,
        lambda_policy=lam,
        bootstrap_S=bootstrap_S,
        truncated_S=truncated_S,
    )
    expected = slow(rewards_N.tolist(), values_N.tolist(), LONG, gamma, [lam] * len(LONG), finals)
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(estimate.advantage_N, expected, rtol=0, atol=1e-12 * scale)
    torch.testing.assert_close(estimate.returns_N, expected + values_N, rtol=0, atol=1e-12 * scale)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=8),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_the_scan_equals_the_plain_loop_on_random_input(lengths, gamma, lam, seed):
    rewards_N, values_N = random_batch(lengths, seed)
    estimate = gae(rewards_N, values_N, Layout.of(lengths), gamma=gamma, lambda_policy=lam)
    expected = slow(
        rewards_N.tolist(), values_N.tolist(), lengths, gamma, [lam] * len(lengths), [0.0] * len(lengths)
    )
    torch.testing.assert_close(estimate.advantage_N, expected, rtol=1e-12, atol=1e-11)


def test_policy_and_critic_have_their_own_lambda_per_trajectory():
    lengths = [5, 200, 64]
    rewards_N, values_N = random_batch(lengths)
    lam_S = torch.tensor([0.3, 0.9, 0.0], dtype=torch.float64)
    estimate = gae(rewards_N, values_N, Layout.of(lengths), gamma=0.9, lambda_policy=lam_S, lambda_critic=1.0)
    loop = (rewards_N.tolist(), values_N.tolist(), lengths, 0.9)
    torch.testing.assert_close(
        estimate.advantage_N, slow(*loop, lam_S.tolist(), [0.0] * 3), rtol=0, atol=1e-12
    )
    torch.testing.assert_close(
        estimate.returns_N - values_N, slow(*loop, [1.0] * 3, [0.0] * 3), rtol=0, atol=1e-12
    )


def test_trajectories_in_another_order_give_bit_equal_numbers():
    lengths = [700, 3, 129, 20_000, 128]
    rewards_N, values_N = random_batch(lengths)
    layout = Layout.of(lengths)
    whole = gae(rewards_N, values_N, layout, gamma=0.99, lambda_policy=0.97).advantage_N
    order = torch.tensor([3, 0, 4, 2, 1])
    at = layout.tokens_of(order)
    moved = gae(rewards_N[at], values_N[at], layout.take(order), gamma=0.99, lambda_policy=0.97).advantage_N
    assert torch.equal(moved, whole[at])


def test_splitting_the_batch_gives_bit_equal_numbers():
    lengths = [700, 3, 129, 2_000]
    rewards_N, values_N = random_batch(lengths)
    layout = Layout.of(lengths)
    whole = gae(rewards_N, values_N, layout, gamma=0.99, lambda_policy=0.97).advantage_N
    for i in range(4):
        at = layout.tokens_of(torch.tensor([i]))
        alone = gae(
            rewards_N[at], values_N[at], Layout.of([lengths[i]]), gamma=0.99, lambda_policy=0.97
        ).advantage_N
        assert torch.equal(alone, whole[at])


def test_float32_input_is_carried_in_float32_and_float64_in_float64():
    rewards_N, values_N = random_batch([50])
    assert (
        gae(
            rewards_N.half(), values_N.half(), Layout.of([50]), gamma=1.0, lambda_policy=1.0
        ).advantage_N.dtype
        is torch.float32
    )
    assert (
        gae(rewards_N, values_N.float(), Layout.of([50]), gamma=1.0, lambda_policy=1.0).advantage_N.dtype
        is torch.float64
    )


def test_gamma_and_lambda_one_with_a_terminal_reward_give_the_reward_minus_the_value():
    _, values_N = random_batch([7, 300])
    layout = Layout.of([7, 300])
    rewards_N = place(torch.tensor([2.0, -1.0], dtype=torch.float64), layout)
    estimate = gae(rewards_N, values_N, layout, gamma=1.0, lambda_policy=1.0)
    expected = torch.tensor([2.0] * 7 + [-1.0] * 300, dtype=torch.float64) - values_N
    torch.testing.assert_close(estimate.advantage_N, expected, rtol=0, atol=1e-12)


def test_lambda_zero_gives_the_td_error():
    rewards_N, values_N = random_batch([4])
    estimate = gae(rewards_N, values_N, Layout.of([4]), gamma=0.5, lambda_policy=0.0)
    following = torch.cat([values_N[1:], torch.zeros(1, dtype=torch.float64)])
    assert torch.equal(estimate.advantage_N, rewards_N + 0.5 * following - values_N)


def test_a_trajectory_without_trainable_token_is_an_error():
    with pytest.raises(EvidenceError, match="no trainable token"):
        gae(torch.zeros(2), torch.zeros(2), Layout.of([2, 0]), gamma=1.0, lambda_policy=1.0)


def test_a_truncated_trajectory_without_bootstrap_is_an_error():
    with pytest.raises(EvidenceError, match="bootstrap"):
        gae(
            torch.zeros(2),
            torch.zeros(2),
            Layout.of([2]),
            gamma=1.0,
            lambda_policy=1.0,
            truncated_S=torch.tensor([True]),
        )


def test_a_nan_value_of_a_trainable_token_is_an_error():
    with pytest.raises(EvidenceError, match="not finite"):
        gae(torch.zeros(2), torch.tensor([0.0, torch.nan]), Layout.of([2]), gamma=1.0, lambda_policy=1.0)


def test_values_and_rewards_of_another_length_are_refused():
    with pytest.raises(EvidenceError, match="one of each"):
        gae(torch.zeros(3), torch.zeros(2), Layout.of([2]), gamma=1.0, lambda_policy=1.0)


# ------------------------------------------------------------------------------------ numbers from public
# faults


def test_gae_03_a_masked_value_never_becomes_a_next_value():
    rewards_N = torch.tensor([0.0, 0.0, 2.0], dtype=torch.float64)
    values_N = torch.tensor(
        [0.1, 0.2, 0.3], dtype=torch.float64
    )  # the value 50 of the masked slot is not here at all
    advantage = gae(rewards_N, values_N, Layout.of([3]), gamma=0.99, lambda_policy=0.95).advantage_N
    torch.testing.assert_close(
        advantage, torch.tensor([1.692947, 1.69585, 1.7], dtype=torch.float64), rtol=0, atol=1e-6
    )


def test_gae_05_the_bootstrap_enters_once():
    advantage = gae(
        torch.zeros(2, dtype=torch.float64),
        torch.tensor([0.3, 0.4], dtype=torch.float64),
        Layout.of([2]),
        gamma=0.5,
        lambda_policy=1.0,
        bootstrap_S=torch.tensor([1.0], dtype=torch.float64),
        truncated_S=torch.tensor([True]),
    ).advantage_N
    torch.testing.assert_close(advantage, torch.tensor([-0.05, 0.1], dtype=torch.float64), rtol=0, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(length=st.integers(1, 40), gamma=st.floats(0, 1), seed=st.integers(0, 99))
def test_gae_05_with_lambda_one_the_advantage_is_the_return_with_one_bootstrap_minus_the_value(
    length, gamma, seed
):
    rewards_N, values_N = random_batch([length], seed)
    estimate = gae(
        rewards_N,
        values_N,
        Layout.of([length]),
        gamma=gamma,
        lambda_policy=1.0,
        bootstrap_S=torch.tensor([0.7], dtype=torch.float64),
        truncated_S=torch.tensor([True]),
    )
    for t in range(length):
        g = (
            sum(gamma ** (k - t) * float(rewards_N[k]) for k in range(t, length))
            + gamma ** (length - t) * 0.7
        )
        assert float(estimate.advantage_N[t]) == pytest.approx(g - float(values_N[t]), abs=1e-10)


def test_gae_07_the_length_adaptive_lambda_counts_trainable_tokens_and_is_clamped():
    lam = adaptive_lambda(torch.tensor([100, 400, 20, 10, 60]), 0.05).tolist()
    assert lam == pytest.approx([0.8, 0.95, 0.0, 0.0, 0.6666666667])


def test_gae_09_the_advantage_uses_the_return_not_the_immediate_reward():
    rewards_N = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    values_N = torch.tensor([0.2, 0.4, 0.7], dtype=torch.float64)
    estimate = gae(rewards_N, values_N, Layout.of([3]), gamma=1.0, lambda_policy=1.0)
    torch.testing.assert_close(estimate.advantage_N, torch.tensor([0.8, 0.6, 0.3], dtype=torch.float64))
    torch.testing.assert_close(estimate.returns_N, torch.ones(3, dtype=torch.float64))


def test_a_value_that_rises_from_06_to_075_earns_015_and_one_that_falls_to_04_costs_02():
    values_N = torch.tensor([0.6, 0.75, 0.6, 0.4], dtype=torch.float64)
    advantage = gae(torch.zeros(4), values_N, Layout.of([2, 2]), gamma=1.0, lambda_policy=0.0).advantage_N
    assert [round(float(advantage[i]), 12) for i in (0, 2)] == [0.15, -0.2]


# -------------------------------------------------------------------------------------------- operators on
# top


def test_n_step_equals_its_definition_and_one_step_equals_the_td_error():
    lengths = [1, 5, 9]
    rewards_N, values_N = random_batch(lengths)
    layout = Layout.of(lengths)
    truncated_S = torch.tensor([False, True, False])
    bootstrap_S = torch.tensor([9.0, 0.5, 9.0], dtype=torch.float64)
    for n in (1, 2, 4, 50):
        credit = n_step(rewards_N, values_N, layout, truncated_S, bootstrap_S, n=n, gamma=0.9)
        start = 0
        for s, length in enumerate(lengths):
            for t in range(length):
                m = min(n, length - t)
                g = sum(0.9**k * float(rewards_N[start + t + k]) for k in range(m))
                tail = float(values_N[start + t + m]) if t + m < length else (0.5 if s == 1 else 0.0)
                expected = g + 0.9**m * tail - float(values_N[start + t])
                assert float(credit.advantage_N[start + t]) == pytest.approx(expected, abs=1e-12)
            start += length


def test_gae_over_turns_equals_gae_over_tokens_when_every_turn_is_one_token():
    lengths = [4, 3]
    rewards_N, values_N = random_batch(lengths)
    layout = Layout.of(lengths, turns=[0, 1, 2, 3, 0, 1, 2])
    no = torch.zeros(2, dtype=torch.bool)
    by_turn = gae_turns(rewards_N, values_N, layout, no, lambda_policy=0.9)
    by_token = gae_tokens(rewards_N, values_N, layout, no, ~no, lambda_policy=0.9)
    assert torch.equal(by_turn.advantage_N, by_token.advantage_N)


def test_a_segment_is_worth_its_progress_between_boundaries():
    layout = Layout.of([5], turns=[0, 0, 1, 1, 2])
    values_N = torch.tensor([0.2, 9.0, 0.5, 9.0, 0.6], dtype=torch.float64)
    rewards_N = place(torch.tensor([1.0], dtype=torch.float64), layout)
    credit = gae_turns(rewards_N, values_N, layout, torch.tensor([False]), lambda_policy=0.0)
    assert credit.advantage_N.tolist() == pytest.approx([0.3, 0.3, 0.1, 0.1, 0.4])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_placed_rewards_sum_to_the_reward_whatever_is_excluded(data):
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    n = sum(sizes)
    turns = [
        t
        for size in sizes
        for t in sorted(data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)))
    ]
    keep_N = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    reward_N = torch.tensor(
        data.draw(st.lists(st.sampled_from([0.0, 0.5, -1.0, 2.0]), min_size=n, max_size=n)),
        dtype=torch.float64,
    )
    layout = Layout.of(sizes, turns=turns)
    inner = layout.keep(keep_N)
    landed = land_on_kept(reward_N, layout, keep_N)
    expected = torch.where(
        inner.lengths_S > 0, segment_sum(reward_N, layout), torch.zeros(len(sizes), dtype=torch.float64)
    )
    assert torch.equal(segment_sum(landed, inner), expected)


def test_a_turn_reward_stands_on_the_last_token_before_its_observation():
    layout = Layout.of([4], turns=[0, 0, 1, 1])
    reward_N = torch.tensor([0.5, 0.0, 0.0, 1.0], dtype=torch.float64)
    every = torch.ones(4, dtype=torch.bool)
    assert land_on_kept(reward_N, layout, every).tolist() == [0.0, 0.5, 0.0, 1.0]
    assert land_on_kept(reward_N, layout, torch.tensor([True, False, False, True])).tolist() == [0.5, 1.0]
    assert land_on_kept(reward_N, layout, torch.tensor([False, False, True, True])).tolist() == [0.5, 1.0]


def test_a_scan_over_nothing_is_nothing():
    assert reverse_scan(torch.zeros(0), torch.zeros(2), torch.tensor([0, 0])).numel() == 0
