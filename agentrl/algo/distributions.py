"""Logits to log-probs, entropies and divergences of whole next-token distributions, in the temperature of
sampling.

Small references and building blocks: the learner calls them per chunk of tokens, so that no `[N, V]` float32
tensor ever exists. `log softmax(z / T)` on both sides: a log-prob selected at T = 1 can not be converted to
another T.
"""

from __future__ import annotations

from typing import Literal

import torch

Divergence = Literal["reverse", "forward", "jsd"]


def selected_log_prob(
    logits_NV: torch.Tensor,
    ids_N: torch.Tensor,
    *,
    temperature: float = 1.0,
    kept_NV: torch.Tensor | None = None,
) -> torch.Tensor:
    """`z[id]/T - logsumexp(z/T)` in float32 or better, `[N]`.

    `kept_NV` (bool) replays the set that top-p or top-k kept at sampling; the sampled id is always kept, so
    that a last-bit difference between engine and learner can not make it -inf.
    """
    z = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature
    if kept_NV is not None:
        kept = kept_NV.scatter(
            -1, ids_N.unsqueeze(-1), torch.ones_like(ids_N, dtype=torch.bool).unsqueeze(-1)
        )
        z = torch.where(kept, z, torch.full_like(z, -torch.inf))
    return z.gather(-1, ids_N.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(z, -1)


def entropy(logits_NV: torch.Tensor, *, temperature: float = 1.0) -> torch.Tensor:
    """`H = -sum_v p_v log p_v` with gradient, `[N]`; `dH/dz_v = -p_v (log p_v + H)`."""
    log_p = torch.log_softmax(
        logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature, -1
    )
    return -(log_p.exp() * log_p).sum(-1)


def kl(log_p_NV: torch.Tensor, log_q_NV: torch.Tensor) -> torch.Tensor:
    """`KL(p || q) = sum_v p (log p - log q)`, `[N]`; 0 log 0 = 0."""
    gap = torch.where(log_p_NV == -torch.inf, torch.zeros_like(log_p_NV), log_p_NV - log_q_NV)
    return (log_p_NV.exp() * gap).sum(-1)


def divergence(
    student_NV: torch.Tensor,
    teacher_NV: torch.Tensor,
    *,
    kind: Divergence = "reverse",
    beta: float = 0.5,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Per-token divergence of logits, gradient through the student, `[N]`.

    reverse `KL(pi || pi_T)` (arXiv:2306.08543), forward `KL(pi_T || pi)`, jsd `beta KL(pi_T || m) + (1-beta)
    KL(pi || m)`, `m = beta pi_T + (1-beta) pi` (GKD, arXiv:2306.13649).
    """
    wide = torch.promote_types(student_NV.dtype, torch.float32)
    log_s = torch.log_softmax(student_NV.to(wide) / temperature, -1)
    log_t = torch.log_softmax(teacher_NV.detach().to(wide) / temperature, -1)
    if kind == "reverse":
        return kl(log_s, log_t)
    if kind == "forward":
        return kl(log_t, log_s)
    log_b = torch.log(torch.tensor([beta, 1.0 - beta], dtype=wide, device=log_s.device))
    log_m = torch.logaddexp(log_t + log_b[0], log_s + log_b[1])
    return beta * kl(log_t, log_m) + (1.0 - beta) * kl(log_s, log_m)
