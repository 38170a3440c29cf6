"""Every recipe against a slow reference written from its equation, and what must hold of all of them."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from algo_evidence import full, gradients, recipe_of, simple
from algo_plain import SPECS, reference

from agentrl.algo.columns import Layout
from agentrl.algo.objective import Columns, finish_metrics, loss, prepare
from agentrl.algo.recipes import RECIPES
from agentrl.errors import ConfigError, EvidenceError

pytestmark = pytest.mark.algorithms
NAMES = sorted(RECIPES)
TEACHERS = {n for n, r in RECIPES.items() if r.surrogate is None or "teacher_logp_N" in r.columns}
NOT_BY_REWARD = TEACHERS | {"vpo", "agpo", "treerpo"}
"""Recipes whose direction does not come from the outcome alone (VPO reads components, TreeRPO node values,
AGPO may refuse to move)."""


def rearranged(columns: Columns, live: dict[str, torch.Tensor], order: list[int]):
    """The same batch with trajectories in another order."""
    order_S = torch.tensor(order)
    at = columns.layout.tokens_of(order_S)
    changes = {"layout": columns.layout.take(order_S)}
    for f in fields(columns):
        value = getattr(columns, f.name)
        if isinstance(value, torch.Tensor):
            changes[f.name] = value[at] if f.name.endswith("_N") else value[order_S]
    return replace(columns, **changes), {k: v[at] for k, v in live.items()}, at


def with_excluded(columns: Columns, live: dict[str, torch.Tensor]):
    """The same batch with tokens inserted that are excluded and hold NaN everywhere: in front, inside and
    behind."""
    layout = columns.layout
    source: list[int] = []
    turns: list[int] = []
    lengths: list[int] = []
    start = 0
    for s, length in enumerate(layout.lengths_S.tolist()):
        row = list(range(start, start + length))
        start += length
        for place in sorted({0, s % (length + 1), length}, reverse=True):
            row.insert(place, -1)
        known = [int(layout.turn_N[i]) for i in row if i >= 0]
        seen = 0
        for i in row:
            turns.append(known[min(seen, len(known) - 1)] if i < 0 else int(layout.turn_N[i]))
            seen += i >= 0
        source += row
        lengths.append(len(row))
    index = torch.tensor(source)
    valid_N = index >= 0

    def spread(value: torch.Tensor) -> torch.Tensor:
        out = value[index.clamp_min(0)].clone()
        if out.is_floating_point():
            out[~valid_N] = float("nan")
        return out

    changes = {
        "layout": Layout.of(lengths, layout.group_S, turns),
        "valid_N": valid_N,
        "length_S": layout.lengths_S,
    }
    for f in fields(columns):
        value = getattr(columns, f.name)
        if isinstance(value, torch.Tensor) and f.name.endswith("_N"):
            changes[f.name] = spread(value)
    changes["turn_reward_N"] = torch.nan_to_num(changes["turn_reward_N"])
    return replace(columns, **changes), {k: spread(v) for k, v in live.items()}, valid_N


def test_every_recipe_has_a_reference():
    assert set(SPECS) == set(RECIPES)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradient_equal_the_slow_reference(name, seed):
    columns, live = full(seed)
    recipe = recipe_of(name)
    value, gradient, _ = gradients(recipe, prepare(recipe, columns), live)
    expected, by_logp, by_value = reference(name, columns, live)
    assert value == pytest.approx(expected, abs=1e-9)
    assert gradient["logp_N"].tolist() == pytest.approx(by_logp, abs=1e-9)
    assert gradient["values_N"].tolist() == pytest.approx(by_value, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_add_up_to_the_batch(name):
    columns, live = full(2)
    recipe = recipe_of(name)
    prepared = prepare(recipe, columns)
    whole, gradient, totals = gradients(recipe, prepared, live)
    for parts in ([[i] for i in range(8)], [[6], [5, 0, 3], [7, 1, 2, 4]]):
        value, split, split_totals = gradients(recipe, prepared, live, parts)
        assert value == pytest.approx(whole, abs=1e-12)
        assert split_totals == pytest.approx(totals, abs=1e-12)
        for key in gradient:
            torch.testing.assert_close(split[key], gradient[key], rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_trajectories_changes_nothing(name):
    columns, live = full(3)
    recipe = recipe_of(name)
    if name in ("pods", "pro-grpo", "cppo"):  # whose ties go to the earlier member
        distinct = [1.0, 0.9, 0.15, 0.3, 0.0, 0.8, float("nan"), 0.22]
        columns = replace(columns, reward_S=torch.tensor(distinct, dtype=torch.float64))
    whole, gradient, _ = gradients(recipe, prepare(recipe, columns), live)
    moved, moved_live, at = rearranged(columns, live, [5, 2, 7, 0, 6, 3, 1, 4])
    value, other, _ = gradients(recipe, prepare(recipe, moved), moved_live)
    assert value == pytest.approx(whole, abs=1e-12)
    for key in gradient:
        torch.testing.assert_close(other[key], gradient[key][at], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_excluded_tokens_anywhere_change_nothing_and_get_no_gradient(name):
    columns, live = full(4)
    recipe = recipe_of(name)
    whole, gradient, _ = gradients(recipe, prepare(recipe, columns), live)
    wider, wider_live, valid_N = with_excluded(columns, live)
    value, other, _ = gradients(recipe, prepare(recipe, wider), wider_live)
    assert value == pytest.approx(whole, abs=1e-12)
    for key in gradient:
        torch.testing.assert_close(other[key][valid_N], gradient[key], rtol=0, atol=1e-12)
        assert not bool(other[key][~valid_N].any())


@pytest.mark.parametrize("name", NAMES)
def test_an_ungraded_member_never_enters_statistics_nor_the_loss(name):
    columns, live = full(5)
    recipe = recipe_of(name)
    whole, gradient, _ = gradients(recipe, prepare(recipe, columns), live)
    rest, rest_live, at = rearranged(columns, live, [0, 1, 2, 3, 4, 5, 7])
    value, other, _ = gradients(recipe, prepare(recipe, rest), rest_live)
    assert value == pytest.approx(whole, abs=1e-12)
    inside = torch.zeros(columns.layout.n_tokens, dtype=torch.bool)
    inside[at] = True
    for key in gradient:
        torch.testing.assert_close(other[key], gradient[key][at], rtol=0, atol=1e-12)
        assert not bool(gradient[key][~inside].any())


@pytest.mark.parametrize("name", sorted(set(NAMES) - NOT_BY_REWARD))
def test_a_success_beside_a_failure_is_made_more_probable(name):
    recipe = recipe_of(name)
    columns, _ = full(6)
    n = 8
    zero = torch.zeros(n, dtype=torch.float64)
    flat = {
        f.name: zero.clone()
        for f in fields(columns)
        if f.name.endswith("_N") and f.name not in ("valid_N", "lag_N")
    }
    flat |= {
        "logb_N": zero - 1,
        "prox_logp_N": zero - 1,
        "ref_logp_N": zero - 1,
        "entropy_N": zero + 1,
        "prm_logp_N": zero - 1,
    }
    if recipe.group_size == 1:
        flat["values_N"] = zero + 0.5
    ones = torch.ones(4, dtype=torch.float64)
    batch = simple(
        [1.0, 1.0, 0.0, 0.0],
        [2] * 4,
        greedy_reward_S=ones * 0.5,
        density_S=ones,
        answer_S=torch.arange(4),
        exit_index_S=torch.zeros(4, dtype=torch.int64),
        first_attempt_S=ones * 0.5,
        components_SK=torch.zeros(4, 2, dtype=torch.float64),
        off_policy_S=torch.zeros(4, dtype=torch.bool),
        history_mean_S=ones * 0.5,
        history_std_S=ones * 0.5,
        history_step_S=torch.ones(4, dtype=torch.int64),
        **{k: v for k, v in flat.items() if k != "teacher_logp_N"},
    )
    current = {
        "logp_N": zero - 1,
        "values_N": zero,
        "entropy_N": zero,
        "ref_kl_N": zero,
        "teacher_divergence_N": zero,
    }
    _, gradient, _ = gradients(recipe, prepare(recipe, batch), current)
    by_trajectory = gradient["logp_N"].reshape(4, 2).sum(1)
    kept = prepare(recipe, batch).trained_S
    assert bool(kept[:2].any())
    assert bool((by_trajectory[:2][kept[:2]] < 0).all())
    assert bool((by_trajectory[2:] >= 0).all())


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_with_nothing_to_train_says_so_and_is_never_nan(name):
    columns, live = full(7)
    recipe = recipe_of(name)
    none = replace(columns, valid_N=torch.zeros(columns.layout.n_tokens, dtype=torch.bool))
    ungraded = replace(columns, reward_S=torch.full((8,), float("nan"), dtype=torch.float64))
    empty = Columns(
        layout=Layout.of([]),
        reward_S=torch.zeros(0),
        terminated_S=torch.zeros(0, dtype=torch.bool),
        truncated_S=torch.zeros(0, dtype=torch.bool),
        **{
            f.name: getattr(columns, f.name)[:0]
            for f in fields(columns)
            if f.name[-2:] in ("_N", "_S", "SK")
            and f.name not in ("reward_S", "terminated_S", "truncated_S")
            and getattr(columns, f.name) is not None
        },
    )
    for batch, values in ((none, live), (ungraded, live), (empty, {k: v[:0] for k, v in live.items()})):
        prepared = prepare(recipe, batch)
        assert prepared.nothing is not None
        assert prepared.nothing.startswith("Nothing to train")
        value, gradient, _ = gradients(recipe, prepared, values)
        assert value == 0.0
        assert not any(bool(g.any()) for g in gradient.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_column_is_named(name):
    columns, _ = full(0)
    recipe = recipe_of(name)
    for column in recipe.columns:
        with pytest.raises(EvidenceError, match=column):
            prepare(recipe, replace(columns, **{column: None}))


@pytest.mark.parametrize("name", ["grpo", "ppo", "gspo", "cispo", "sapo"])
def test_float32_gives_the_float64_numbers_to_its_precision(name):
    columns, live = full(8)
    recipe = recipe_of(name)
    prepared = prepare(recipe, columns)
    wide, gradient, _ = gradients(recipe, prepared, live)
    narrow, other, _ = gradients(recipe, prepared, {k: v.float() for k, v in live.items()})
    assert narrow == pytest.approx(wide, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(other["logp_N"].double(), gradient["logp_N"], rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_gives_the_numbers_of_the_cpu(name):
    columns, live = full(0)
    recipe = recipe_of(name)
    prepared = prepare(recipe, columns)
    value, gradient, _ = gradients(recipe, prepared, live)
    other, on_gpu, _ = gradients(recipe, prepared, {k: v.cuda() for k, v in live.items()})
    assert other == pytest.approx(value, abs=1e-12)
    for key in gradient:
        torch.testing.assert_close(on_gpu[key].cpu(), gradient[key], rtol=0, atol=1e-12)


def test_a_recipe_refuses_a_loss_without_what_it_needs_from_the_model():
    recipe = recipe_of("ppo")
    columns, live = full(0)
    with pytest.raises(ConfigError, match="values_N"):
        loss(recipe, prepare(recipe, columns), logp_N=live["logp_N"])


def test_graded_trajectories_must_have_ended_one_way():
    columns, _ = full(0)
    both = replace(columns, truncated_S=torch.ones(8, dtype=torch.bool))
    with pytest.raises(EvidenceError, match="exactly one of terminated and truncated"):
        prepare(recipe_of("grpo"), both)


def test_a_graded_trajectory_without_action_tokens_is_an_error_not_a_silent_drop():
    with pytest.raises(EvidenceError, match="no action token"):
        prepare(recipe_of("dr-grpo"), simple([1.0, 0.0, 0.0], [2, 0, 1]))


def test_metrics_of_micro_batches_are_those_of_the_batch():
    columns, live = full(9)
    recipe = recipe_of("ppo")
    prepared = prepare(recipe, columns)
    used = {k: live[k] for k in ("logp_N", "values_N", "entropy_N")}
    whole = finish_metrics(loss(recipe, prepared, **used)[1])
    parts = None
    for part in ([0, 4], [1, 2, 3], [5, 6, 7]):
        at = columns.layout.tokens_of(torch.tensor(part))
        metrics = loss(recipe, prepared.take(part), **{k: v[at] for k, v in used.items()})[1]
        parts = metrics if parts is None else parts + metrics
    assert finish_metrics(parts) == pytest.approx(whole)
    assert {"mismatch/abs_mean", "mismatch/abs_max", "mismatch/k3", "ratio/raw", "ratio/effective"} <= set(
        whole
    )
    assert {"ratio/clip_fraction", "policy/entropy", "policy/surprise", "loss/value", "loss/total"} <= set(
        whole
    )
