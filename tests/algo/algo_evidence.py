"""Batches for the tests of the algorithms: small, random by a seed, or written out by hand."""

from __future__ import annotations

from typing import Any

import torch

from agentrl.algo.columns import Layout
from agentrl.algo.objective import Columns, Prepared, loss, prepare
from agentrl.algo.recipes import Recipe, compose

NUMBERS: dict[str, dict[str, object]] = {
    "dr-grpo": {"reduction.max_length": 10},
    "dapo-soft-overlong": {"reward.soft_overlong": {"max_length": 5, "cache": 2}},
    "laser": {"reward.step_bonus": {"target": 3}},
    "multi-objective": {"reward.weighted_components": {"weights": [0.5, 0.25]}},
    "dast": {"reward.difficulty_budget": {"short": 2, "long": 5}},
    "pro-grpo": {"select.max_variance": {"keep": 2}},
    "pods": {"select.max_variance": {"keep": 2}},
}
"""What a run file must set for the recipes that have no default for it."""


def recipe_of(name: str, **overrides: object) -> Recipe:
    """The recipe with its required numbers set."""
    return compose({"recipe": name, **NUMBERS.get(name, {}), **overrides})


def simple(
    rewards: list[float], lengths: list[int], groups: list[int] | None = None, **columns: Any
) -> Columns:
    """Terminated trajectories with the given rewards; behaviour log-probs -1 unless given."""
    layout = Layout.of(lengths, groups)
    given = {"logb_N": torch.full((layout.n_tokens,), -1.0, dtype=torch.float64), **columns}
    return Columns(
        layout=layout,
        reward_S=torch.tensor(rewards, dtype=torch.float64),
        terminated_S=given.pop("terminated_S", torch.ones(len(lengths), dtype=torch.bool)),
        truncated_S=given.pop("truncated_S", torch.zeros(len(lengths), dtype=torch.bool)),
        **given,
    )


def full(seed: int = 0) -> tuple[Columns, dict[str, torch.Tensor]]:
    """Two groups of four with every column filled, one ungraded and one truncated member; and live
    tensors."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    turns = [[0, 1, 1], [0, 0, 1, 1, 1], [0, 0], [0, 0, 1, 1], [0, 0, 0, 1, 1, 1], [0], [0, 0], [0, 1, 1]]
    layout = Layout.of([len(t) for t in turns], [0] * 4 + [1] * 4, [i for t in turns for i in t])
    n, s = layout.n_tokens, 8
    logb_N = -rand(n) - 0.05
    truncated_S = torch.tensor([0, 0, 0, 1, 0, 0, 0, 0], dtype=torch.bool)
    columns = Columns(
        layout=layout,
        reward_S=torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 1.0, float("nan"), 0.0], dtype=torch.float64),
        terminated_S=~truncated_S,
        truncated_S=truncated_S,
        logb_N=logb_N,
        prox_logp_N=logb_N + 0.4 * (rand(n) - 0.5),
        ref_logp_N=logb_N + 0.4 * (rand(n) - 0.5),
        teacher_logp_N=logb_N + rand(n) - 0.5,
        prm_logp_N=logb_N + rand(n) - 0.5,
        values_N=rand(n),
        bootstrap_S=rand(s),
        entropy_N=rand(n) + 0.1,
        turn_reward_N=rand(n) * (rand(n) > 0.5),
        components_SK=rand(s, 2),
        greedy_reward_S=rand(s),
        off_policy_S=torch.tensor([0, 1, 0, 0, 0, 0, 0, 0], dtype=torch.bool),
        density_S=rand(s) * 3,
        answer_S=torch.tensor([0, 0, 1, 2, 0, 1, 1, 1]),
        exit_index_S=torch.arange(s) % 3,
        first_attempt_S=rand(s),
        history_mean_S=rand(s),
        history_std_S=rand(s) + 0.1,
        history_step_S=torch.tensor([3] * 4 + [1] * 4),
        node_value_N=rand(n) - 0.5,
        potential_N=rand(n),
        lag_N=torch.zeros(n, dtype=torch.int64),
    )
    live = {
        "logp_N": logb_N + 0.6 * (rand(n) - 0.5),
        "entropy_N": rand(n),
        "values_N": rand(n),
        "ref_kl_N": rand(n),
        "teacher_divergence_N": rand(n),
    }
    return columns, live


def gradients(
    recipe: Recipe, prepared: Prepared, live: dict[str, torch.Tensor], parts: list[list[int]] | None = None
) -> tuple[float, dict[str, torch.Tensor], dict[str, float]]:
    """Loss, gradient with respect to every live tensor (0 where unused), and metric totals, over
    micro-batches."""
    leaves = {k: v.clone().requires_grad_() for k, v in live.items()}
    total = 0.0
    totals: dict[str, float] = {}
    for part in parts if parts is not None else [list(range(prepared.layout.n_trajectories))]:
        at = prepared.layout.tokens_of(torch.tensor(part, dtype=torch.int64))
        value, metrics = loss(recipe, prepared.take(part), **{k: v[at] for k, v in leaves.items()})
        if value.requires_grad:
            value.backward()
        total += float(value.detach())
        for key, number in metrics.totals.items():
            totals[key] = totals.get(key, 0.0) + float(number)
    return total, {k: torch.zeros_like(v) if v.grad is None else v.grad for k, v in leaves.items()}, totals


def policy_gradient(
    recipe: Recipe, columns: Columns, logp: list[float], **live: torch.Tensor
) -> tuple[float, list[float]]:
    """Loss and its gradient with respect to the log-probs, as plain numbers."""
    logp_N = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    value, _ = loss(recipe, prepare(recipe, columns), logp_N=logp_N, **live)
    value.backward()
    assert logp_N.grad is not None
    return float(value.detach()), [float(g) for g in logp_N.grad]
