"""Teachers: what another policy says about the sampled tokens, as advantage shaping or as terms of the loss.

A teacher signal `r_t = log pi_T(a_t|s_t) - log pi(a_t|s_t)` may enter the ratio (`ratios.teacher_mixture`),
the reward (`rewards.teacher_mean`), the advantage (`SHAPING` here) or stand as its own component (`TEACHER`
here): inside the rollout expectation (T_C) or outside (T_D). A component names the trajectories it acts on
(`on`) and may not be filtered by the reward. Pure distillation replaces J(theta): supported, and marked so in
its recipe.
"""

from __future__ import annotations

import torch

from agentrl.algo.axes import table
from agentrl.algo.penalties import Penalty, k2, k3


def whiten(advantage_N: torch.Tensor, trained_N: torch.Tensor, *, epsilon: float = 1e-8) -> torch.Tensor:
    """`(A - mean) / (std + eps)` over the trained tokens of the batch."""
    trained = advantage_N[trained_N]
    if trained.numel() == 0:
        return advantage_N
    scaled = (advantage_N - trained.mean()) / (trained.var(correction=0).sqrt() + epsilon)
    return torch.where(trained_N, scaled, torch.zeros_like(advantage_N))


def clip_advantage(advantage_N: torch.Tensor, *, low: float = -5.0, high: float = 5.0) -> torch.Tensor:
    """`clip(A, low, high)`."""
    return advantage_N.clamp(low, high)


def teacher_interpolation(
    advantage_N: torch.Tensor, teacher_logp_N: torch.Tensor, logb_N: torch.Tensor, *, alpha: float = 0.1
) -> torch.Tensor:
    """`(1 - alpha) A + alpha (log pi_T - log pi_b)`, alpha < 1 (T_B by interpolation)."""
    return (1.0 - alpha) * advantage_N + alpha * (teacher_logp_N - logb_N)


def teacher_magnitude(
    advantage_N: torch.Tensor,
    teacher_logp_N: torch.Tensor,
    logb_N: torch.Tensor,
    *,
    low: float = 0.2,
    high: float = 5.0,
) -> torch.Tensor:
    """`A * clip((pi_T/pi_b)^sign(A), low, high)`: sign from the verifier, magnitude from the teacher (RLSD,
    Yang et al. 2026)."""
    weight_N = (torch.sign(advantage_N) * (teacher_logp_N - logb_N)).clamp(-20.0, 20.0).exp()
    return advantage_N * weight_N.clamp(low, high)


def teacher_reward(
    advantage_N: torch.Tensor,
    teacher_logp_N: torch.Tensor,
    logb_N: torch.Tensor,
    *,
    clip: float = 2.0,
    mix: float = 0.0,
    keep_below: float | None = None,
) -> torch.Tensor:
    """`(1-mix) clip(log pi_T - log pi_b, -c, c) M + mix A`: clipped teacher reward, times the ratio (REOPOLD,
    Ko et al. 2026).

    `M` masks tokens whose teacher gap is below `keep_below` in absolute value (None keeps all).
    """
    gap_N = teacher_logp_N - logb_N
    reward_N = gap_N.clamp(-clip, clip)
    if keep_below is not None:
        reward_N = torch.where(gap_N.abs() < keep_below, torch.zeros_like(reward_N), reward_N)
    return (1.0 - mix) * reward_N + mix * advantage_N


def reverse_kl(
    logp_N: torch.Tensor, teacher_logp_N: torch.Tensor, *, coefficient: float = 1.0, on: str = "trained"
) -> Penalty:
    """`log pi - log pi_T` on student tokens; gradient `d`, that of KL(pi || pi_T) on policy
    (arXiv:2306.08543, 2306.13649).

    The reported value is k3 of the same gap; the loss is k2, whose gradient is the useful one.
    """
    del coefficient, on
    d_N = logp_N - teacher_logp_N
    return Penalty(loss_N=k2(d_N), value_N=k3(d_N).detach())


def forward_kl(
    logp_N: torch.Tensor,
    teacher_logp_N: torch.Tensor,
    *,
    coefficient: float = 1.0,
    on: str = "trained",
    cap: float = 10.0,
) -> Penalty:
    """`-sg(min(pi_T/pi, cap)) log pi` on student tokens: the importance-weighted gradient of KL(pi_T ||
    pi)."""
    del coefficient, on
    gap_N = (teacher_logp_N - logp_N.detach()).clamp(-20.0, 20.0)
    weight_N = gap_N.exp().clamp(max=cap)
    return Penalty(loss_N=-weight_N * logp_N, value_N=(weight_N * gap_N).detach())


def divergence(
    live_teacher_divergence_N: torch.Tensor,
    *,
    coefficient: float = 1.0,
    on: str = "trained",
    kind: str = "reverse",
) -> Penalty:
    """`D(pi, pi_T)` over the whole vocabulary with gradient: `kind` is reverse `KL(pi || pi_T)`, forward
    `KL(pi_T || pi)` or jsd (`distributions.divergence`). The learner computes it."""
    del coefficient, on, kind
    return Penalty(loss_N=live_teacher_divergence_N, value_N=live_teacher_divergence_N.detach())


SHAPING = table(whiten, clip_advantage, teacher_interpolation, teacher_magnitude, teacher_reward)
TEACHER = table(reverse_kl, forward_kl, divergence)
