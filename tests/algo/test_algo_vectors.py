"""The worked numbers of the sources, and those of faults that users of other systems met in public."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from algo_evidence import gradients, policy_gradient, recipe_of, simple

from agentrl.algo import (
    advantages,
    critic_losses,
    distributions,
    mismatch,
    penalties,
    ratios,
    rewards,
    select,
    surrogates,
)
from agentrl.algo.columns import Layout
from agentrl.algo.metrics import Metrics, finish_metrics, mean_of
from agentrl.algo.objective import loss, prepare
from agentrl.errors import ConfigError, EvidenceError

pytestmark = pytest.mark.algorithms


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def group(operator, *returns, **numbers):
    n = len(returns)
    credit = operator(
        f64(*returns), torch.zeros(n, dtype=torch.int64), torch.ones(n, dtype=torch.bool), **numbers
    )
    return credit.advantage_S.tolist()


def surrogate(operator, rho, advantage, **numbers):
    """(loss, gradient with respect to the log-prob) of one token at log-prob log(rho), behaviour log-prob
    0."""
    logp_N = f64(math.log(rho)).requires_grad_()
    available = {"ratio": ratios.ratio_of(logp_N), "logp_N": logp_N, "advantage_N": f64(advantage)}
    columns = surrogates.SURROGATE[operator].columns
    term = surrogates.SURROGATE[operator].function(**{c: available[c] for c in columns}, **numbers)
    term.loss_N.sum().backward()
    return float(term.loss_N.detach()), float(logp_N.grad)


# ---------------------------------------------------------------------------------------------- advantages


def test_group_scores_of_binary_rewards():
    assert group(advantages.group_zscore, 1, 1, 0, 0, epsilon=0.0) == pytest.approx([1, 1, -1, -1])
    rare = group(advantages.group_zscore, 1, 0, 0, 0, epsilon=0.0)
    assert rare == pytest.approx([1.7320508, -0.5773503, -0.5773503, -0.5773503])
    assert group(advantages.group_centred, 1, 0, 0, 0) == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_four_rollouts_weigh_by_length_under_grpo_and_equally_under_dr_grpo():
    lengths, outcome = [7, 22, 7, 35], [1.0, 1.0, 0.0, 0.0]
    columns = simple(outcome, lengths, ref_logp_N=torch.full((71,), -1.0, dtype=torch.float64))
    grpo = recipe_of("grpo", **{"advantage.epsilon": 0.0})
    prepared = prepare(grpo, columns)
    weight_N = 4 * prepared.components[0].weight_N * prepared.advantage_N
    assert [float(weight_N[i]) for i in (0, 7, 29, 36)] == pytest.approx([1 / 7, 1 / 22, -1 / 7, -1 / 35])
    prepared = prepare(recipe_of("dr-grpo", **{"reduction.max_length": 35}), columns)
    assert [float(prepared.advantage_N[i]) for i in (0, 7, 29, 36)] == [0.5, 0.5, -0.5, -0.5]
    weight_N = 4 * 35 * prepared.components[0].weight_N * prepared.advantage_N
    assert [float(weight_N[i]) for i in (0, 7, 29, 36)] == pytest.approx([0.5, 0.5, -0.5, -0.5])


@pytest.mark.parametrize("ddof", [0, 1])
def test_adv_01_a_singleton_has_advantage_zero_and_leaves_the_loss(ddof):
    assert group(advantages.group_zscore, 0.7, ddof=ddof) == [0.0]
    assert group(advantages.group_centred, 0.7) == [0.0]
    prepared = prepare(recipe_of("cispo"), simple([0.7], [3]))
    assert prepared.nothing is not None
    assert prepared.facts["groups/too_small"] == 1.0
    assert prepared.facts["trajectories/no_comparison"] == 1.0


def test_adv_03_nearly_equal_rewards_are_not_flattened():
    a = group(advantages.group_zscore, 2.0, 2.00002, ddof=1, epsilon=1e-6)
    b = group(advantages.group_zscore, 0.5, 0.50003, ddof=1, epsilon=1e-6)
    assert a == pytest.approx([-0.6604, 0.6604], abs=1e-3)
    assert b == pytest.approx([-0.6753, 0.6753], abs=1e-3)


def test_adv_04_the_ddof_is_explicit():
    r = [1, 1, 1, 0, 0, 0, 0, 0]
    pick = lambda values: [values[0], values[3]]  # noqa: E731
    assert pick(group(advantages.group_zscore, *r, ddof=1, epsilon=0.0)) == pytest.approx(
        [1.207615, -0.724569], abs=1e-6
    )
    assert pick(group(advantages.group_zscore, *r, ddof=0, epsilon=0.0)) == pytest.approx(
        [1.290994, -0.774597], abs=1e-6
    )
    assert pick(group(advantages.group_centred, *r)) == pytest.approx([0.625, -0.375])
    assert pick(group(advantages.leave_one_out, *r)) == pytest.approx([0.714286, -0.428571], abs=1e-6)
    assert group(advantages.group_zscore, 1, 0, ddof=1, epsilon=0.0) == pytest.approx(
        [0.707107, -0.707107], abs=1e-6
    )
    assert group(advantages.group_zscore, 1, 0, ddof=0, epsilon=0.0) == pytest.approx([1, -1])


def test_adv_05_float_noise_is_not_a_spread():
    assert group(advantages.group_zscore, 0.1 + 0.2, 0.3, 0.3, 0.3, epsilon=0.0) == [0, 0, 0, 0]


def test_adv_08_zero_variance_groups_are_kept_or_dropped_by_one_switch():
    columns = simple([1.0, 1.0], [1, 1], logb_N=f64(-1, -1), ref_logp_N=f64(-1.2, -1.2))
    keep = recipe_of("grpo", **{"penalty.kl_k3.coefficient": 0.1, "reduction": "token_mean"})
    value, gradient = policy_gradient(keep, columns, [-1.0, -1.0])
    assert value == pytest.approx(0.0018731, abs=1e-7)
    assert sum(gradient) == pytest.approx(0.0181269, abs=1e-7)
    drop = recipe_of("grpo", **{"penalty.kl_k3.coefficient": 0.1, "select": "mixed_groups"})
    prepared = prepare(drop, columns)
    assert prepared.nothing is not None
    assert prepared.denominators == {"policy": 0.0, "penalty/kl_k3": 0.0}
    off = recipe_of("grpo", penalty="none")
    assert policy_gradient(off, columns, [-1.0, -1.0])[1] == [0.0, 0.0]


def test_adv_10_remax_subtracts_all_turn_rewards_of_the_greedy_rollout():
    columns = simple([3.0, 1.0], [2, 2], [0, 1], greedy_reward_S=f64(1.5, 1.5))
    prepared = prepare(recipe_of("remax"), columns)
    assert prepared.advantage_N.tolist() == [1.5, 1.5, -0.5, -0.5]
    assert prepared.layout.n_trajectories == 2


def test_adv_11_the_soft_overlong_penalty_counts_generated_tokens():
    lengths = torch.tensor([79, 80, 81, 90, 100, 101, 150])
    shaped = rewards.soft_overlong(torch.zeros(7, dtype=torch.float64), lengths, max_length=100, cache=20)
    assert shaped.tolist() == pytest.approx([0, 0, -0.05, -0.5, -1, -1, -1])


def test_drpo_never_makes_a_long_correct_answer_negative():
    r = f64(0.73, 0.60, 0.20, 0, 0, 0)
    centred = group(advantages.group_centred, *r.tolist())
    assert centred[2] == pytest.approx(-0.055)
    zeros, every = torch.zeros(6, dtype=torch.int64), torch.ones(6, dtype=torch.bool)
    a = advantages.correctness_first(r, r, zeros, every, correct_above=0.0).advantage_S
    assert a[0] > a[1] > a[2] > 0
    assert a[3:].tolist() == [-0.5, -0.5, -0.5]
    assert float(a.sum()) == pytest.approx(0.0, abs=1e-12)


def test_vpo_prefers_a_set_that_covers_the_trade_offs():
    weights = rewards.simplex_weights(2)
    assert float(rewards.set_reward(f64(1, 0, 0, 1).reshape(2, 2), weights)) == pytest.approx(0.75, abs=1e-9)
    assert float(rewards.set_reward(f64(0.6, 0.6, 0.6, 0.6).reshape(2, 2), weights)) == pytest.approx(
        0.6, abs=1e-9
    )
    zero = torch.zeros(2, dtype=torch.int64)
    gain = rewards.set_marginal(
        f64(0, 0), f64(1, 0, 0, 1).reshape(2, 2), zero, torch.ones(2, dtype=torch.bool)
    )
    assert gain.tolist() == pytest.approx([0.25, 0.25], abs=1e-9)
    twins = rewards.set_marginal(
        f64(0, 0), f64(0.6, 0.6, 0.6, 0.6).reshape(2, 2), zero, torch.ones(2, dtype=torch.bool)
    )
    assert twins.tolist() == pytest.approx([0, 0], abs=1e-12)


def test_patches_are_compared_by_similarity():
    assert rewards.patch_similarity("abcd", "abcd") == 1.0
    assert rewards.patch_similarity("abcd", "bcde") == 0.75
    assert rewards.patch_similarity(None, "abcd") == -1.0
    assert rewards.multi_file_similarity({"a": "x", "b": "y"}, {"a": "x"}) == 0.5


def test_near_copies_leave_the_loss_and_stay_in_the_statistics():
    trained = torch.tensor([True, True, False, True])
    kept = select.distinct_only(trained, f64(0.5, 2.0, 0.1, 2.1), at_most=2.0)
    assert kept.tolist() == [True, True, False, False]


def test_a_length_budget_grows_with_difficulty():
    outcome = f64(1, 1, 1, 0)
    shaped = rewards.difficulty_budget(
        outcome, outcome, torch.tensor([100, 101, 300, 50]), f64(1.0, 1.0, 0.0, 0.5), short=100, long=300
    )
    assert shaped.tolist() == [1.5, 1.0, 1.5, 0.0]


def test_an_all_fail_group_gets_a_negative_advantage_from_a_virtual_best_member():
    assert group(advantages.virtual_best, 0, 0, 0, epsilon=0.0) == pytest.approx([-1 / math.sqrt(3)] * 3)
    assert group(advantages.virtual_best, 1, 1, 1) == [0, 0, 0]


def test_tree_values_are_means_of_leaves():
    value, advantage = advantages.tree_values([-1, 0, 0, 1, 1], [None, None, 0.0, 1.0, 0.0])
    assert value == [0.25, 0.5, 0.0, 1.0, 0.0]
    assert advantage == [0.0, 0.25, -0.25, 0.5, -0.5]


def test_the_evpo_gate_falls_back_to_the_group_mean_when_the_critic_explains_nothing():
    layout = Layout.of([1, 1])
    args = (
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(2, dtype=torch.bool),
        torch.ones(2, dtype=torch.bool),
    )
    good = advantages.gae_or_mean(f64(1, 0), f64(0.9, 0.1), layout, f64(1, 0), *args)
    assert good.facts == {"critic/gate_open": 1.0}
    assert good.advantage_N.tolist() == pytest.approx([0.1, -0.1])
    bad = advantages.gae_or_mean(f64(1, 0), f64(0.1, 0.9), layout, f64(1, 0), *args)
    assert bad.facts == {"critic/gate_open": 0.0}
    assert bad.advantage_N.tolist() == pytest.approx([0.5, -0.5])


def test_trj_02_repeats_of_one_task_share_a_group_and_the_size_is_asserted():
    columns = simple([1.0, 0.0, 1.0, 0.0], [1] * 4, expected_group_size=4)
    prepared = prepare(recipe_of("dr-grpo"), columns)
    assert prepared.advantage_N.tolist() == [0.5, -0.5, 0.5, -0.5]
    with pytest.raises(EvidenceError, match=r"\{1: 4\}.*4 members"):
        prepare(
            recipe_of("dr-grpo"), simple([1.0, 0.0, 1.0, 0.0], [1] * 4, [0, 1, 2, 3], expected_group_size=4)
        )


def test_gae_06_a_scalar_advantage_reaches_every_turn_of_its_trajectory():
    columns = simple([0.8], [4], logb_N=torch.zeros(4, dtype=torch.float64))
    prepared = prepare(recipe_of("reinforce"), columns)
    assert prepared.advantage_N.tolist() == [0.8] * 4


# ----------------------------------------------------------------------------------------- ratio and
# surrogate


def test_a_probability_that_doubles_has_ratio_two():
    assert float(
        ratios.ratio_of(ratios.token(f64(math.log(0.4)), f64(math.log(0.2)))).value_N
    ) == pytest.approx(2.0)
    assert pytest.approx(0.012) == 0.01 * 1.2


CASES = [
    (1.1, 2.0, -2.2, -2.2),
    (1.1, -2.0, 2.2, 2.2),
    (0.5, 2.0, -1.0, -1.0),
    (0.5, -2.0, 1.6, 0.0),
    (1.3, 2.0, -2.4, 0.0),
    (1.3, -2.0, 2.6, 2.6),
]


@pytest.mark.parametrize(("rho", "advantage", "value", "gradient"), CASES)
def test_ppo_in_all_six_cases(rho, advantage, value, gradient):
    assert surrogate("ppo_clip", rho, advantage) == pytest.approx((value, gradient))


@pytest.mark.parametrize(
    ("rho", "advantage", "expected"),
    [
        (5, -1, (3, 0)),
        (2, -1, (2, 2)),
        (5, 1, (-1.2, 0)),
        (0.5, -1, (0.8, 0)),
        (0.5, 1, (-0.5, -0.5)),
        (1, 1, (-1, -1)),
    ],
)
def test_rat_02_dual_clip(rho, advantage, expected):
    assert surrogate("ppo_clip", rho, advantage, dual=3.0) == pytest.approx(expected)


def test_clip_higher_lets_a_rare_token_grow():
    assert surrogate("ppo_clip", 1.25, 1.0, high=0.28) == pytest.approx((-1.25, -1.25))
    assert surrogate("ppo_clip", 1.29, 1.0, high=0.28) == pytest.approx((-1.28, 0.0))


def test_cispo_keeps_the_gradient_where_ppo_loses_it():
    assert surrogate("cispo", 1.3, 2.0, high=0.2)[1] == pytest.approx(-2.4)
    assert surrogate("cispo", 1.3, 100.0, high=0.2)[1] == pytest.approx(-120.0)


def test_rat_06_cispo_is_a_detached_weight_times_the_log_prob():
    logp_N = f64(-0.7).requires_grad_()
    ratio = ratios.ratio_of(ratios.token(logp_N, f64(-1.2)))
    assert float(ratio.value_N.detach()) == pytest.approx(1.648721, abs=1e-6)
    term = surrogates.cispo(ratio, logp_N, f64(2.0), high=0.28)
    term.loss_N.sum().backward()
    assert float(term.loss_N.detach()) == pytest.approx(1.792)
    assert float(logp_N.grad) == pytest.approx(-2.56)
    assert surrogate("cispo", 0.1, 2.0)[1] == pytest.approx(-0.2)


def test_rat_08_sapo_has_the_factor_four_over_tau_and_a_temperature_per_sign():
    for rho, value, slope in ((1, 2, 1), (1.5, 2.489837, 0.940015), (3, 3.523188, 0.419974)):
        loss_value, gradient = surrogate("sapo", rho, 1.0, tau_positive=1.0)
        assert (-loss_value, -gradient / rho) == pytest.approx((value, slope), abs=1e-6)
    loss_value, gradient = surrogate("sapo", 1.0, -1.0, tau_negative=1.05)
    assert (loss_value, gradient) == pytest.approx((1.904762, 1.0), abs=1e-6)
    loss_value, gradient = surrogate("sapo", 1.5, -1.0, tau_negative=1.05)
    assert (loss_value, gradient / 1.5) == pytest.approx((2.393585, 0.934140), abs=1e-6)
    assert surrogate("sapo", 1.5, 2.0, tau_positive=1.0)[0] == pytest.approx(-4.979675, abs=1e-6)


def test_sapo_gate_is_one_on_policy_and_symmetric():
    p = 1 / (1 + math.exp(-2 * (1.5 - 1)))
    assert surrogate("sapo", 1.5, 1.0, tau_positive=2.0)[1] == pytest.approx(-4 * p * (1 - p) * 1.5)
    assert surrogate("sapo", 1.0, 1.0, tau_positive=7.0)[1] == pytest.approx(-1.0)


@pytest.mark.parametrize(
    ("rho", "weight"), [(0.8, 0.0), (0.81, 0.81), (1.0, 1.0), (1.19, 1.19), (1.2, 0.0), (3.0, 0.0)]
)
def test_sao_masks_outside_the_open_interval_with_a_detached_weight(rho, weight):
    # 1.2 and 0.8 lie on the border: log and exp may move them by one ulp, so they are nudged outwards.
    nudged = rho * (1 + 1e-12) if rho == 1.2 else rho * (1 - 1e-12) if rho == 0.8 else rho
    assert surrogate("double_sided", nudged, 2.0)[1] == pytest.approx(-2.0 * weight)


def test_sao_masked_tokens_stay_in_the_denominator():
    columns = simple([1.0], [2], logb_N=f64(0, -1), values_N=f64(0, 0))
    recipe = recipe_of("sao", **{"advantage.alpha": 1e9})
    _, gradient = policy_gradient(recipe, columns, [-1.0, -1.0], values_N=f64(0, 0))
    assert gradient == pytest.approx([0.0, -0.5])


def test_gspo_takes_the_geometric_mean_over_the_trajectory():
    layout = Layout.of([2, 3])
    log_ratio = ratios.sequence_geomean(
        f64(math.log(2), math.log(0.5), 0.3, 0.0, 0.0), f64(0, 0, 0, 0, 0), layout
    )
    assert log_ratio.exp().tolist() == pytest.approx([1, 1, math.exp(0.1), math.exp(0.1), math.exp(0.1)])


def test_gspo_gradient_of_a_trajectory_is_shared_by_its_tokens():
    logp = [-1.0 + 0.0001, -1.0, -1.0]
    columns = simple([1.0, 0.0], [2, 1], logb_N=f64(-1, -1, -1))
    _, gradient = policy_gradient(recipe_of("gspo", **{"advantage.epsilon": 0.0}), columns, logp)
    s = math.exp(0.00005)
    assert gradient == pytest.approx([-0.5 * s / 2, -0.5 * s / 2, 0.5])


def test_rat_04_product_and_geometric_mean_have_different_names_and_numbers():
    layout = Layout.of([200])
    gap = (torch.full((200,), -0.01, dtype=torch.float64), torch.zeros(200, dtype=torch.float64))
    assert float(ratios.sequence_product(*gap, layout).exp()[0]) == pytest.approx(0.135335, abs=1e-6)
    assert float(ratios.sequence_geomean(*gap, layout).exp()[0]) == pytest.approx(0.990050, abs=1e-6)
    for level in ("sequence_product", "sequence_geomean"):
        capped = ratios.truncated(*gap, layout, cap=2.0, level=level)
        assert torch.equal(capped.value_N, capped.log_N.exp())


def test_rat_01_an_overflowing_ratio_is_bounded_and_counted():
    logp_N = torch.tensor([1000.0], requires_grad=True)  # float32
    old = torch.zeros(1)
    for advantage, dual, value, gradient in (
        (0.0, None, 0.0, 0.0),
        (1.0, None, -1.2, 0.0),
        (-1.0, 3.0, 3.0, 0.0),
    ):
        logp_N.grad = None
        ratio = ratios.ratio_of(ratios.token(logp_N, old))
        term = surrogates.ppo_clip(ratio, torch.tensor([advantage]), dual=dual)
        term.loss_N.sum().backward()
        assert (float(term.loss_N.detach()), float(logp_N.grad)) == pytest.approx((value, gradient))
        assert ratio.saturated_N.tolist() == [True]
    huge = surrogates.ppo_clip(ratios.ratio_of(ratios.token(logp_N, old)), torch.tensor([-1.0])).loss_N
    assert float(huge.detach()) == pytest.approx(4.8517e8, rel=1e-4)


def test_rat_01_the_saturated_share_is_reported_and_a_masked_overflow_contributes_nothing():
    columns = simple([1.0, 0.0], [1, 2], valid_N=torch.tensor([True, True, False]), logb_N=f64(-1, -1, -1))
    recipe = recipe_of("cispo")
    value, metrics = loss(recipe, prepare(recipe, columns), logp_N=f64(29.0, -1.0, 999.0))
    out = finish_metrics(metrics)
    assert math.isfinite(float(value))
    assert out["ratio/saturated_fraction"] == 0.5
    assert out["ratio/log_abs_max"] == 30.0


def test_rat_11_a_tensor_of_another_shape_is_refused_also_when_sizes_coincide():
    columns = simple([1.0, 0.0, 1.0], [1, 1, 1])
    recipe = recipe_of("cispo")
    with pytest.raises(EvidenceError, match="shape"):
        loss(recipe, prepare(recipe, columns), logp_N=torch.zeros(3, 3))
    with pytest.raises(EvidenceError, match="shape"):
        simple([1.0, 0.0, 1.0], [1, 1, 1], values_N=torch.zeros(3, 1))


def test_met_07_raw_and_effective_weights_are_reported_apart():
    layout = Layout.of([3])
    fixed = ratios.truncated(f64(math.log(0.5), math.log(3.0), 0.0), f64(0, 0, 0), layout, cap=2.0)
    assert float(fixed.log_N.exp().mean()) == pytest.approx(1.5)
    assert float(fixed.value_N.mean()) == pytest.approx(1.166667, abs=1e-6)
    recipe = recipe_of("grpo-decoupled")
    columns = simple(
        [1.0, 0.0], [2, 1], prox_logp_N=f64(math.log(0.5), math.log(3.0), 0.0), logb_N=f64(0, 0, 0)
    )
    _, metrics = loss(recipe, prepare(recipe, columns), logp_N=columns.prox_logp_N)
    out = finish_metrics(metrics)
    assert out["correction/raw"] == pytest.approx(1.5)
    assert out["correction/effective"] == pytest.approx(1.166667, abs=1e-6)
    assert out["correction/changed_fraction"] == pytest.approx(0.333333, abs=1e-6)
    assert mismatch.saturated(f64(30.0, 1.0)).tolist() == [True, False]


def test_masked_correction_drops_tokens_outside_its_interval():
    fixed = ratios.masked(f64(math.log(0.4), math.log(1.5), math.log(2.5)), f64(0, 0, 0), Layout.of([3]))
    assert fixed.value_N.tolist() == pytest.approx([0.0, 1.5, 0.0])


def test_luffy_lifts_rare_teacher_tokens():
    logp_N = f64(math.log(0.1), 0.0).requires_grad_()
    term = surrogates.mixed_policy(
        ratios.ratio_of(logp_N), logp_N, f64(1, 1), torch.tensor([True, False]), shape=0.1
    )
    term.loss_N[0].backward()
    assert float(term.loss_N[0].detach()) == pytest.approx(-0.5)
    assert float(logp_N.grad[0]) == pytest.approx(-0.25)  # f'(pi) pi = shape pi / (pi + shape)^2


def test_dynamic_clip_gives_rare_tokens_more_room():
    upper = lambda q: 0.5 + 0.5 * math.sqrt(1 + 4 * 0.2 / q)  # noqa: E731
    for q in (0.9, 0.05):
        logp_N = f64(math.log(q) + 3.0).requires_grad_()
        ratio = ratios.ratio_of(logp_N - math.log(q))
        term = surrogates.dynamic_clip(ratio, f64(math.log(q)), f64(1.0))
        assert float(term.loss_N.detach()) == pytest.approx(-upper(q))


# ----------------------------------------------------------------------------------------------- penalties


@pytest.mark.parametrize(
    ("d", "values", "slopes"),
    [
        (0.5, (0.5, 0.125, 0.106531), (1, 0.5, 0.393469)),
        (-0.5, (-0.5, 0.125, 0.148721), (1, -0.5, -0.648721)),
    ],
)
def test_kl_01_value_and_gradient_of_each_estimator(d, values, slopes):
    for operator, value, slope in zip(("kl_k1", "kl_k2", "kl_k3"), values, slopes, strict=True):
        logp_N, ref_N = f64(d - 1.0).requires_grad_(), f64(-1.0).requires_grad_()
        penalty = penalties.PENALTY[operator].function(logp_N, ref_N)
        penalty.loss_N.sum().backward()
        assert float(penalty.loss_N.detach()) == pytest.approx(value, abs=1e-6)
        assert float(logp_N.grad) == pytest.approx(slope, abs=1e-6)
        assert ref_N.grad is None


def test_kl_04_in_the_reward_the_loss_term_is_absent_and_the_metric_present():
    recipe = recipe_of("reinforce++")
    columns = simple([1.0, 0.0], [2, 2], ref_logp_N=f64(-1.5, -1, -1, -1))
    prepared = prepare(recipe, columns)
    assert [c.name for c in prepared.components] == ["policy"]
    _, metrics = loss(recipe, prepared, logp_N=columns.logb_N)
    assert "policy/kl_ref_k3" in finish_metrics(metrics)


def test_kl_in_reward_is_subtracted_per_token_and_kl_in_loss_leaves_rewards_unchanged():
    columns = simple([1.0], [2], logb_N=f64(-1, -1), ref_logp_N=f64(-1.5, -0.5))
    assert rewards.kl_in_reward(
        columns.logb_N, columns.ref_logp_N, coefficient=0.1
    ).tolist() == pytest.approx([-0.05, 0.05])
    with_reward = recipe_of("reinforce", token_reward=[{"operator": "kl_in_reward", "coefficient": 0.1}])
    assert prepare(with_reward, columns).advantage_N.tolist() == pytest.approx([1.0, 1.05])
    with_loss = recipe_of("reinforce", penalty=[{"operator": "kl_k2", "coefficient": 0.1}])
    assert prepare(with_loss, columns).advantage_N.tolist() == [1.0, 1.0]


def test_kl_06_the_penalty_covers_exactly_the_tokens_in_the_loss():
    recipe = recipe_of(
        "reinforce", penalty=[{"operator": "kl_k2", "coefficient": 1.0}], reduction="token_mean"
    )
    columns = simple([0.0], [3], valid_N=torch.tensor([True, False, True]), ref_logp_N=f64(-1.1, -4, -0.8))
    value, metrics = loss(recipe, prepare(recipe, columns), logp_N=f64(-1, -1, -1))
    # squared log-ratio mean 0.025 over kept tokens; k2 is half of it
    assert float(value) == pytest.approx(0.0125)
    assert finish_metrics(metrics)["penalty/kl_k2"] == pytest.approx(0.0125)


def test_adaptive_beta_doubles_above_and_halves_below_the_band():
    assert penalties.adapt_beta(0.1, 0.03, low=0.005, high=0.02) == 0.2
    assert penalties.adapt_beta(0.1, 0.001, low=0.005, high=0.02) == 0.05
    assert penalties.adapt_beta(0.1, 0.01, low=0.005, high=0.02) == 0.1
    with pytest.raises(ConfigError, match="low first"):
        penalties.adapt_beta(0.1, 0.01, low=0.02, high=0.005)


def test_a_coefficient_from_the_training_state_replaces_that_of_the_recipe():
    recipe = recipe_of("ppo-penalty")
    columns = simple([1.0], [1], logb_N=f64(-1), values_N=f64(0))
    prepared = prepare(recipe, columns)
    live = {"logp_N": f64(-0.5), "values_N": f64(0)}
    parts = [
        finish_metrics(loss(recipe, prepared, **live, coefficients={"penalty/kl_old": c})[1])[
            "loss/penalty/kl_old"
        ]
        for c in (1.0, 2.0)
    ]
    assert parts[0] == pytest.approx(math.exp(0.5) - 1 - 0.5)
    assert parts[1] == pytest.approx(2 * parts[0])
    with pytest.raises(ConfigError, match="kl_old"):
        loss(recipe, prepared, **live, coefficients={"penalty/kl_odl": 1.0})


def test_met_05_the_entropy_bonus_has_a_gradient():
    logits = f64(1.0, 0.0).reshape(1, 2).requires_grad_()
    h = distributions.entropy(logits)
    assert float(h.detach()) == pytest.approx(0.582203, abs=1e-6)
    recipe = recipe_of("reinforce", penalty=[{"operator": "entropy_bonus", "coefficient": 0.1}])
    value, _ = loss(recipe, prepare(recipe, simple([0.0], [1])), logp_N=f64(-1.0), entropy_N=h)
    value.backward()
    assert logits.grad.flatten().tolist() == pytest.approx([0.0196612, -0.0196612], abs=1e-7)


def test_met_03_entropy_is_never_negative_and_surprise_is_named_differently():
    assert bool((distributions.entropy(torch.randn(200, 7)) >= 0).all())
    recipe = recipe_of("reinforce")
    columns = simple([1.0], [4], valid_N=torch.tensor([True, True, False, False]))
    _, metrics = loss(recipe, prepare(recipe, columns), logp_N=f64(-0.5, -0.7, 1.0, 1.0))
    out = finish_metrics(metrics)
    assert out["policy/surprise"] == pytest.approx(0.6)
    assert "policy/entropy" not in out


# ------------------------------------------------------------------------------------------ value,
# distributions


def test_value_losses():
    assert float(critic_losses.value_mse(f64(0.5), f64(1.0))) == 0.125
    v = f64(0.9).requires_grad_()
    clipped = critic_losses.value_clipped(v, f64(1.0), f64(0.5), clip=0.2)
    clipped.sum().backward()
    assert (float(clipped.detach()), float(v.grad)) == pytest.approx((0.5 * 0.3**2, 0.0))
    v = f64(0.9).requires_grad_()
    back = critic_losses.value_clipped(v, f64(0.0), f64(0.5), clip=0.2)
    back.sum().backward()
    assert (float(back.detach()), float(v.grad)) == pytest.approx((0.5 * 0.81, 0.9))


def test_a_histogram_head_learns_the_value_it_is_shown():
    target = critic_losses.hl_gauss_targets(f64(0.3, 1.0), bins=101, low=0.0, high=1.0, sigma=0.0075)
    assert target.sum(-1).tolist() == pytest.approx([1, 1])
    assert float(critic_losses.hl_gauss_value(target.clamp_min(1e-30).log())[0]) == pytest.approx(
        0.3, abs=1e-3
    )
    logits = torch.zeros(1, 101, dtype=torch.float64, requires_grad=True)
    critic_losses.hl_gauss(logits, f64(0.3)).sum().backward()
    assert float(logits.grad[0, 30]) < 0 < float(logits.grad[0, 90])


def test_explained_variance():
    assert critic_losses.explained_variance(f64(0, 1), f64(0, 1)) == 1.0
    assert critic_losses.explained_variance(f64(0.5, 0.5), f64(0, 1)) == 0.0
    assert critic_losses.explained_variance(f64(1, 0), f64(0, 1)) == -3.0
    assert critic_losses.explained_variance(f64(1, 0), f64(1, 1)) is None


def test_lgp_01_the_temperature_is_applied_before_the_softmax():
    logits, ids = f64(2, 1, 0).reshape(1, 3), torch.tensor([1])
    assert float(distributions.selected_log_prob(logits, ids, temperature=0.5)) == pytest.approx(
        -2.142932, abs=1e-6
    )
    assert float(distributions.selected_log_prob(logits, ids)) == pytest.approx(-1.407606, abs=1e-6)


def test_lgp_05_a_batch_whose_engine_reported_zeros_is_refused():
    found = mismatch.measure(f64(-0.5, -1, -0.2, -2), f64(0, 0, 0, 0))
    assert found.abs_mean == pytest.approx(0.925)
    assert found.k3 == pytest.approx(0.407119, abs=1e-6)
    assert found.longest_zero_run == 4
    with pytest.raises(EvidenceError, match="disagree"):
        found.refuse_above(0.1)
    mismatch.measure(f64(-0.5, -1.0), f64(-0.51, -0.99)).refuse_above(0.1)


def test_lgp_10_the_recorded_kept_set_is_replayed_and_never_gives_minus_infinity():
    logits, ids = f64(3.0, 2.99, 0).reshape(1, 3), torch.tensor([1])
    kept = torch.tensor([[False, True, False]])
    assert float(distributions.selected_log_prob(logits, ids, kept_NV=kept)) == 0.0
    own_top = torch.tensor([[True, False, False]])  # the learner's own top-1 misses the sampled id
    assert float(distributions.selected_log_prob(logits, ids, kept_NV=own_top)) == pytest.approx(
        -0.698160, abs=1e-6
    )


def test_met_08_the_selected_log_prob_equals_the_full_log_softmax():
    logits, ids = torch.randn(50, 33), torch.randint(0, 33, (50,))
    full = torch.log_softmax(logits, -1).gather(-1, ids[:, None])[:, 0]
    torch.testing.assert_close(distributions.selected_log_prob(logits, ids), full, rtol=0, atol=1e-6)


def test_divergences_are_zero_for_equal_distributions_and_match_their_sums():
    student, teacher = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    p, q = torch.softmax(student, -1), torch.softmax(teacher, -1)
    m = 0.5 * (p + q)
    expected = {
        "reverse": (p * (p / q).log()).sum(-1),
        "forward": (q * (q / p).log()).sum(-1),
        "jsd": 0.5 * (q * (q / m).log()).sum(-1) + 0.5 * (p * (p / m).log()).sum(-1),
    }
    for kind, value in expected.items():
        torch.testing.assert_close(distributions.divergence(student, teacher, kind=kind), value)
        torch.testing.assert_close(
            distributions.divergence(student, student, kind=kind),
            torch.zeros(4, dtype=torch.float64),
            rtol=0,
            atol=1e-12,
        )


# -------------------------------------------------------------------------------------------------
# aggregation


def token_losses(name, losses, lengths, valid=None, **overrides):
    """A recipe under which the loss of a token is the given number: REINFORCE with A = -1 at log-prob =
    loss."""
    recipe = recipe_of(name, **overrides)
    columns = simple([-1.0] * len(lengths), lengths, valid_N=valid)
    return recipe, columns, prepare(recipe, columns), {"logp_N": f64(*losses)}


def test_agg_01_the_split_into_micro_batches_changes_nothing():
    recipe, _, prepared, live = token_losses(
        "reinforce", [1.0] * 2 + [3.0] * 6, [2, 6], reduction="token_mean"
    )
    for parts in (None, [[0], [1]], [[1], [0]]):
        value, gradient, _ = gradients(recipe, prepared, live, parts)
        assert value == pytest.approx(2.5)
        assert gradient["logp_N"].tolist() == pytest.approx([1 / 8] * 8)


def test_agg_04_ranks_with_global_denominators_average_to_the_one_rank_result():
    losses = [[2.0, 2.0, 2.0], [6.0]]
    local = [token_losses("reinforce", part, [len(part)], reduction="token_mean") for part in losses]
    world = {"policy": sum(p.denominators["policy"] for _, _, p, _ in local)}
    per_rank = []
    for recipe, columns, prepared, live in local:
        again = prepare(recipe, columns, denominators=world)
        assert torch.equal(again.components[0].weight_N, prepared.rescale(world).components[0].weight_N)
        per_rank.append(float(loss(recipe, again, **live)[0]) * 2)  # two ranks, gradients are averaged
    assert per_rank == pytest.approx([3.0, 3.0])


def test_local_denominators_are_refused_where_a_statistic_spans_the_batch():
    columns = simple([1.0, 0.0], [1, 1], ref_logp_N=f64(-1, -1))
    with pytest.raises(ConfigError, match="batch-wide"):
        prepare(recipe_of("reinforce++"), columns, denominators={"policy": 4.0})
    with pytest.raises(ConfigError, match="penalty/kl_k3"):
        prepare(recipe_of("grpo"), columns, denominators={"policy": 4.0})


def test_agg_06_a_fully_masked_trajectory_adds_no_phantom_token():
    valid = torch.tensor([True] * 4 + [False] * 3)
    recipe, _, prepared, live = token_losses("reinforce", [1.0] * 7, [4, 3], valid, reduction="token_mean")
    assert gradients(recipe, prepared, live)[0] == pytest.approx(1.0)
    assert prepared.facts["trajectories/all_tokens_excluded"] == 1.0


def test_agg_08_the_constant_divisor_is_a_number_of_the_run():
    recipe, _, prepared, live = token_losses(
        "reinforce", [1.0] * 6, [2, 4], reduction={"operator": "constant", "max_length": 10}
    )
    assert gradients(recipe, prepared, live)[0] == pytest.approx(0.3)
    parts = [gradients(recipe, prepared, live, [[i]])[0] for i in (0, 1)]
    assert parts == pytest.approx([0.1, 0.2])
    with pytest.raises(ConfigError, match="max_length"):
        recipe_of("reinforce", reduction="constant")


def test_agg_10_a_partial_window_is_one_step_of_its_own():
    window = [[1.0, 1.0], [2.0, 2.0, 1.0], [1.0]]
    whole = [x for part in window for x in part]
    recipe, _, prepared, live = token_losses("reinforce", whole, [2, 3, 1], reduction="token_mean")
    assert gradients(recipe, prepared, live, [[0], [1], [2]])[0] == pytest.approx(8 / 6)
    steps = []
    for part in (window[0] + window[1], window[2]):
        recipe, _, prepared, live = token_losses("reinforce", part, [len(part)], reduction="token_mean")
        steps.append(gradients(recipe, prepared, live)[0])
    assert steps == pytest.approx([1.4, 1.0])


def test_trj_05_the_unit_of_averaging_is_a_choice():
    losses = [1.0] * 2 + [3.0] * 4 + [5.0] * 3
    layout = Layout.of([6, 3], turns=[0, 0, 1, 1, 1, 1, 0, 0, 0])
    expected = {
        "sequence_mean": 11 / 3,
        "turn_mean": 3.0,
        "token_mean": 29 / 9,
        "prompt_mean": 29 / 9,
        "sequence_sum": 14.5,
    }
    for reduction, value in expected.items():
        recipe = recipe_of("reinforce", reduction=reduction)
        prepared = prepare(recipe, simple([-1.0, -1.0], [6, 3]).__class__(
            layout=layout,
            reward_S=f64(-1, -1),
            terminated_S=torch.ones(2, dtype=torch.bool),
            truncated_S=torch.zeros(2, dtype=torch.bool),
        ))  # fmt: skip
        total, gradient, _ = gradients(recipe, prepared, {"logp_N": f64(*losses)})
        assert total == pytest.approx(value)
        if reduction == "sequence_mean":
            assert float(gradient["logp_N"][-1]) == pytest.approx(1 / 6)


# ------------------------------------------------------------------------------------------- masks and
# freshness


def test_msk_08_a_nan_at_an_excluded_token_is_never_touched_and_elsewhere_it_raises():
    recipe = recipe_of("grpo", advantage="constant_baseline", reduction="token_mean", penalty="none")
    nan = float("nan")
    masked = simple([1.0], [2], logb_N=f64(0, nan), valid_N=torch.tensor([True, False]))
    value, gradient = policy_gradient(recipe, masked, [0.0, nan])
    assert (value, gradient) == (-1.0, [-1.0, 0.0])
    with pytest.raises(EvidenceError, match="logb_N is not finite on 1 tokens"):
        prepare(recipe, simple([1.0], [2], logb_N=f64(0, nan)))
    with pytest.raises(EvidenceError, match="not finite on 1 tokens"):
        policy_gradient(recipe, simple([1.0], [2], logb_N=f64(0, 0)), [0.0, nan])


def test_asy_02_lag_is_counted_from_the_oldest_token_and_the_bound_is_inclusive():
    batch = [[10], [9, 10], [8], [10, 10]]
    assert [select.fresh(v, 10, 1) for v in batch] == [True, True, False, True]
    assert [select.fresh(v, 10, 0) for v in batch] == [True, False, False, True]
    with pytest.raises(EvidenceError, match="11"):
        select.fresh([11], 10, 1)


def test_asy_10_stale_tokens_leave_numerator_and_denominator_and_keep_their_reward_in_the_baseline():
    lag_N = torch.tensor([2, 2, 1, 0])
    recipe = recipe_of("reinforce", reduction="token_mean", max_lag=1)
    prepared = prepare(recipe, simple([1.0], [4], lag_N=lag_N))
    assert prepared.components[0].active_N.tolist() == [False, False, True, True]
    assert prepared.denominators == {"policy": 2.0}
    group_recipe = recipe_of("dr-grpo", max_lag=1)
    prepared = prepare(group_recipe, simple([1.0, 0.0, 0.0], [2, 1, 1], lag_N=torch.tensor([5, 5, 0, 0])))
    assert prepared.advantage_N.tolist() == pytest.approx([0, 0, -1 / 3, -1 / 3])
    assert prepared.trained_S.tolist() == [False, True, True]
    with pytest.raises(EvidenceError, match="newer policy version"):
        prepare(group_recipe, simple([1.0, 0.0], [1, 1], lag_N=torch.tensor([-1, 0])))


def test_env_11_dynamic_sampling_ends_at_its_cap():
    decide = lambda usable, rounds, at_cap="train": select.next_round(  # noqa: E731
        usable=usable, wanted=4, rounds=rounds, max_rounds=3, at_cap=at_cap
    )
    assert [decide(0, r) for r in (1, 2, 3)] == ["sample", "sample", "skip"]
    assert decide(2, 3) == "train"
    assert decide(2, 3, "skip") == "skip"
    assert decide(4, 1) == "train"
    with pytest.raises(ConfigError, match="cap"):
        select.next_round(usable=0, wanted=4, rounds=1, max_rounds=0, at_cap="train")


def test_env_11_at_the_cap_the_denominator_is_that_of_the_usable_groups():
    columns = simple([1, 0, 1, 1, 0, 0, 0, 1], [2] * 8, [0, 0, 1, 1, 2, 2, 3, 3])
    prepared = prepare(recipe_of("dapo"), columns)
    assert prepared.denominators == {"policy": 8.0}
    assert prepared.facts["select/mixed_groups"] == 4.0
    nothing = prepare(recipe_of("dapo"), simple([1, 1, 0, 0], [2] * 4, [0, 0, 1, 1]))
    assert nothing.nothing is not None


# --------------------------------------------------------------------------------------------------- metrics


def test_means_are_taken_once_over_everything():
    total = (
        mean_of("x", f64(1.0))
        + mean_of("x", f64(2.0, 3.0, 6.0))
        + Metrics(maxima={"m": 1.0})
        + Metrics(maxima={"m": 5.0})
    )
    assert finish_metrics(total) == {"x": 3.0, "m": 5.0}
    assert finish_metrics(mean_of("x", f64())) == {}


# ------------------------------------------------------------------------------------------------- selection


def test_pods_keeps_the_subset_of_largest_variance():
    zero, every = torch.zeros(5, dtype=torch.int64), torch.ones(5, dtype=torch.bool)
    kept = select.max_variance(f64(0, 0.1, 0.5, 0.9, 1.0), zero, every, keep=2).trained_S
    assert kept.tolist() == [True, False, False, False, True]


def test_pods_split_is_optimal_among_all_subsets():

    g = torch.Generator().manual_seed(1)
    for keep in (2, 3, 4):
        r = torch.rand(7, generator=g, dtype=torch.float64)
        kept = select.max_variance(
            r, torch.zeros(7, dtype=torch.int64), torch.ones(7, dtype=torch.bool), keep=keep
        ).trained_S
        best = max(float(r[list(c)].var(correction=0)) for c in itertools.combinations(range(7), keep))
        assert float(r[kept].var(correction=0)) == pytest.approx(best)


def test_cppo_keeps_the_largest_advantages():
    kept = select.prune_small_advantage(
        f64(0.1, -2, 1, 0.5), torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.int64), keep=0.5
    )
    assert kept.tolist() == [False, True, True, False]


def test_a_stored_success_replaces_one_failure_of_an_all_fail_group_only():
    assert select.failure_to_replace([None, 0.0, 0.0]) == 1
    assert select.failure_to_replace([0.0, 1.0]) is None
    assert select.failure_to_replace([None, None]) is None


def test_agpo_does_not_move_on_a_negative_batch_loss():
    columns = simple([1.0, 0.0], [4, 1])  # the long one succeeded: the batch loss at ratio 1 is negative
    floored = prepare(recipe_of("agpo"), columns)
    assert floored.facts["policy/floored"] == 1.0
    assert not bool(floored.components[0].weight_N.any())
    moving = prepare(recipe_of("agpo"), simple([1.0, 0.0], [1, 4]))
    assert "policy/floored" not in moving.facts
