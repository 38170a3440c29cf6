"""Axis *reduction*: which unit the loss is averaged over. Axis *token weight*: which tokens count more.

A reduction returns a weight per token and its own *global* count, so that the loss of any micro-batch is a
plain weighted sum: `loss = sum_i (weight_i / count) * term_i`. Only tokens in the loss are seen here; a
trajectory without any adds nothing to a count, and only the final count is guarded against 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agentrl.algo.axes import table
from agentrl.algo.columns import Layout, group_sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """`weight_N / count` is the weight of a token in the loss."""

    weight_N: torch.Tensor
    """float64 `[N]`."""
    count: float
    """The denominator, in units of the reduction; add it over ranks."""


def token_mean(layout: Layout) -> Share:
    """`1/N`, N = loss tokens of the whole optimizer step (DAPO, arXiv:2503.14476)."""
    return Share(weight_N=torch.ones(layout.n_tokens, dtype=torch.float64), count=float(layout.n_tokens))


def sequence_mean(layout: Layout) -> Share:
    """`1/(S T_i)`: mean over trajectories of the mean over their tokens (GRPO, arXiv:2402.03300)."""
    weight_S = 1.0 / layout.lengths_S.clamp_min(1).to(torch.float64)
    return Share(weight_N=weight_S[layout.traj_N], count=float((layout.lengths_S > 0).sum()))


def sequence_sum(layout: Layout) -> Share:
    """`1/S`: mean over trajectories of the sum over their tokens (the unbiased policy gradient)."""
    return Share(
        weight_N=torch.ones(layout.n_tokens, dtype=torch.float64), count=float((layout.lengths_S > 0).sum())
    )


def constant(layout: Layout, *, max_length: int) -> Share:
    """`1/(S L_max)` with the constant `L_max` of the run, never a padded width (Dr. GRPO,
    arXiv:2503.20783)."""
    return Share(
        weight_N=torch.full((layout.n_tokens,), 1.0 / max_length, dtype=torch.float64),
        count=float((layout.lengths_S > 0).sum()),
    )


def prompt_mean(layout: Layout) -> Share:
    """`1/(P N_g)`: mean over groups of the mean over all tokens of the group."""
    tokens_G = group_sum(layout.lengths_S.to(torch.float64), layout.group_S)
    weight_S = (1.0 / tokens_G.clamp_min(1.0))[layout.group_S]
    return Share(weight_N=weight_S[layout.traj_N], count=float((tokens_G > 0).sum()))


def turn_mean(layout: Layout) -> Share:
    """`1/(U T_u)`: mean over turns of the mean over their tokens."""
    unit_N = layout.unit_N
    sizes_U = torch.bincount(unit_N).to(torch.float64)
    return Share(weight_N=(1.0 / sizes_U)[unit_N], count=float(sizes_U.numel()))


def forking_tokens(entropy_N: torch.Tensor, *, share: float = 0.2) -> torch.Tensor:
    """1 for the `share` of tokens of the batch with the highest entropy, else 0; the count is kept
    (arXiv:2506.01939)."""
    if entropy_N.numel() == 0:
        return entropy_N.to(torch.float64)
    n = max(1, round(share * entropy_N.numel()))
    threshold = torch.sort(entropy_N, descending=True).values[n - 1]
    return (entropy_N >= threshold).to(torch.float64)


def probability_weight(logb_N: torch.Tensor, *, alpha: float = 0.3) -> torch.Tensor:
    """`w = alpha pi(a_t) + 1 - alpha`: damp low-probability tokens (Lopti / advantage reweighting,
    arXiv:2505.12929)."""
    return alpha * logb_N.to(torch.float64).exp() + 1.0 - alpha


def sign_weight(advantage_N: torch.Tensor, *, positive: float = 1.0, negative: float = 1.0) -> torch.Tensor:
    """`positive` where A > 0, `negative` where A < 0."""
    one = torch.ones_like(advantage_N, dtype=torch.float64)
    return torch.where(advantage_N > 0, positive * one, torch.where(advantage_N < 0, negative * one, one))


REDUCTION = table(token_mean, sequence_mean, sequence_sum, constant, prompt_mean, turn_mean)
TOKEN_WEIGHT = table(forking_tokens, probability_weight, sign_weight)
