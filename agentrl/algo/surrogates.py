"""Axis *surrogate*: ratio, advantage and log-prob of a token to its policy loss (minimised).

Every operator takes the same columns and returns a `Term`: the loss per token with gradient, and which tokens
its rule took the gradient from or bounded. Ratios arrive with bounded exponents. An advantage is a constant.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agentrl.algo.axes import table
from agentrl.algo.ratios import Ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """Loss per token, and what the rule did to it."""

    loss_N: torch.Tensor
    clipped_N: torch.Tensor
    """bool `[N]`: bounded by the rule (for PPO: without gradient)."""
    effective_N: torch.Tensor
    """float `[N]`: the weight that was used, detached; the raw ratio is logged beside it."""


def _term(loss_N: torch.Tensor, clipped_N: torch.Tensor, effective_N: torch.Tensor) -> Term:
    return Term(loss_N=loss_N, clipped_N=clipped_N, effective_N=effective_N.detach())


def reinforce(logp_N: torch.Tensor, advantage_N: torch.Tensor) -> Term:
    """`L = -A log pi` (Williams, 1992)."""
    return _term(-advantage_N * logp_N, torch.zeros_like(logp_N, dtype=torch.bool), torch.ones_like(logp_N))


def importance(ratio: Ratio, advantage_N: torch.Tensor) -> Term:
    """`L = -rho A`, unclipped."""
    return _term(-ratio.value_N * advantage_N, torch.zeros_like(ratio.saturated_N), ratio.value_N)


def ppo_clip(
    ratio: Ratio, advantage_N: torch.Tensor, *, low: float = 0.2, high: float = 0.2, dual: float | None = None
) -> Term:
    """`L = -min(rho A, clip(rho, 1-low, 1+high) A)`; for A < 0 at most `-dual A` (arXiv:1707.06347,
    1912.09729).

    `high > low` is clip-higher (arXiv:2503.14476). `dual` is the bound c > 1 of dual-clip PPO.
    """
    rho = ratio.value_N
    plain = rho * advantage_N
    bounded = rho.clamp(1.0 - low, 1.0 + high) * advantage_N
    objective = torch.minimum(plain, bounded)
    clipped = (plain > bounded).detach()
    if dual is not None:
        floor = dual * advantage_N
        hit = (advantage_N < 0) & (objective < floor)
        objective = torch.where(hit, floor, objective)
        clipped = clipped | hit.detach()
    safe = torch.where(advantage_N == 0, torch.ones_like(advantage_N), advantage_N)
    return _term(-objective, clipped, torch.where(advantage_N == 0, rho, objective / safe))


def cispo(
    ratio: Ratio,
    logp_N: torch.Tensor,
    advantage_N: torch.Tensor,
    *,
    high: float = 0.28,
    low: float | None = None,
) -> Term:
    """`L = -sg(clip(rho, 1-low, 1+high)) A log pi`; by default only the upper bound (CISPO,
    arXiv:2506.13585)."""
    floor = 0.0 if low is None else 1.0 - low
    weight = ratio.value_N.detach().clamp(floor, 1.0 + high)
    clipped = weight != ratio.value_N.detach()
    return _term(-weight * advantage_N * logp_N, clipped, weight)


def sapo(
    ratio: Ratio, advantage_N: torch.Tensor, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> Term:
    """`L = -(4/tau) sigmoid(tau (rho - 1)) A`, so the gate is `4p(1-p)` and 1 at rho = 1 (SAPO,
    arXiv:2511.20347).

    `tau_positive` where A > 0, `tau_negative` where A <= 0 (a zero advantage takes the negative one; it is 0
    anyway).
    """
    tau = torch.where(
        advantage_N > 0,
        torch.full_like(advantage_N, tau_positive),
        torch.full_like(advantage_N, tau_negative),
    )
    p = torch.sigmoid(tau * (ratio.value_N - 1.0))
    gate = (4.0 * p * (1.0 - p)).detach()
    return _term(-(4.0 / tau) * p * advantage_N, torch.zeros_like(ratio.saturated_N), gate * ratio.value_N)


def double_sided(
    ratio: Ratio, logp_N: torch.Tensor, advantage_N: torch.Tensor, *, low: float = 0.2, high: float = 0.2
) -> Term:
    """`L = -sg(f(rho)) A log pi`, `f = rho` if `1-low < rho < 1+high` else 0 (SAO direct double-sided, Hou et
    al. 2026).

    A masked token has no gradient and stays in the denominator.
    """
    rho = ratio.value_N.detach()
    inside = (rho > 1.0 - low) & (rho < 1.0 + high)
    weight = torch.where(inside, rho, torch.zeros_like(rho))
    return _term(-weight * advantage_N * logp_N, ~inside, weight)


def dynamic_clip(
    ratio: Ratio,
    old_logp_N: torch.Tensor,
    advantage_N: torch.Tensor,
    *,
    low: float = 0.16,
    high: float = 0.2,
    cap: float = 10.0,
) -> Term:
    """PPO with bounds per token, `q = pi_old(a)`: `1/2 + 1/2 sqrt(max(1-4 low/q, 0)) <= rho <= 1/2 + 1/2
    sqrt(1+4 high/q)`.

    Rare tokens get more room (DCPO, arXiv:2509.02333 eq. 5); the upper bound is at most `cap`.
    """
    q = old_logp_N.exp().clamp_min(torch.finfo(old_logp_N.dtype).tiny)
    lower = 0.5 + 0.5 * (1.0 - 4.0 * low / q).clamp_min(0.0).sqrt()
    upper = (0.5 + 0.5 * (1.0 + 4.0 * high / q).sqrt()).clamp(max=cap)
    rho = ratio.value_N
    bounded_rho = torch.minimum(torch.maximum(rho, lower), upper)
    plain, bounded = rho * advantage_N, bounded_rho * advantage_N
    return _term(
        -torch.minimum(plain, bounded),
        (plain > bounded).detach(),
        torch.where(plain > bounded, bounded_rho, rho),
    )


def mixed_policy(
    ratio: Ratio,
    logp_N: torch.Tensor,
    advantage_N: torch.Tensor,
    off_policy_N: torch.Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
    shape: float = 0.1,
) -> Term:
    """PPO clip on own tokens, `-f(pi) A` with `f(x) = x/(x + shape)` on a teacher's (LUFFY,
    arXiv:2504.14945).

    The teacher's probability is taken as 1, so the ratio is `pi` itself; `f` lifts the gradient of rare
    tokens.
    """
    own = ppo_clip(ratio, advantage_N, low=low, high=high)
    probability = logp_N.exp()
    shaped = probability / (probability + shape)
    return _term(
        torch.where(off_policy_N, -shaped * advantage_N, own.loss_N),
        own.clipped_N & ~off_policy_N,
        torch.where(off_policy_N, shaped, own.effective_N),
    )


SURROGATE = table(reinforce, importance, ppo_clip, cispo, sapo, double_sided, dynamic_clip, mixed_policy)
