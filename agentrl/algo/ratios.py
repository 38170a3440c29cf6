"""Axis *ratio*: log-probs to log importance ratios, at the level of a token, a turn or a whole trajectory.

`rho = pi_theta / pi_old` lets evidence of an old policy speak for the current one (arXiv:1707.06347).
Operators return *log* ratios with gradient; `ratio_of` exponentiates once, with a bounded argument that is
counted. `CORRECTION` holds the detached weights that repair the gap between the policy that sampled and the
one the learner recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agentrl.algo.axes import table
from agentrl.algo.columns import Layout, segment_mean, segment_sum
from agentrl.errors import ConfigError, nearest

LOG_RATIO_LIMIT = 20.0
"""Arguments of exp() are clamped to plus or minus this: exp(20) = 4.85e8 is finite in float32 and in every
product."""


LEVELS = ("token", "sequence_geomean", "sequence_product")
"""At which a behaviour correction is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """`log_N` is exact and unclamped (what is exported and logged); `value_N = exp(clamp(log_N))` has the
    gradient."""

    log_N: torch.Tensor
    value_N: torch.Tensor
    saturated_N: torch.Tensor
    """bool `[N]`: the argument was clamped, so no gradient flows through the ratio there."""


def ratio_of(log_ratio_N: torch.Tensor) -> Ratio:
    """`exp(clamp(x, -20, 20))`; a NaN stays NaN and trips the guard of the loss."""
    bounded = log_ratio_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return Ratio(
        log_N=log_ratio_N, value_N=bounded.exp(), saturated_N=(log_ratio_N.detach().abs() > LOG_RATIO_LIMIT)
    )


def on_policy(logp_N: torch.Tensor) -> torch.Tensor:
    """`log pi - sg(log pi)`: value 1, gradient of log pi. One step per batch; needs no behaviour
    log-probs."""
    return logp_N - logp_N.detach()


def token(logp_N: torch.Tensor, old_logp_N: torch.Tensor) -> torch.Tensor:
    """`log rho_t = log pi(a_t|s_t) - log pi_old(a_t|s_t)` (arXiv:1707.06347)."""
    return logp_N - old_logp_N


def sequence_geomean(logp_N: torch.Tensor, old_logp_N: torch.Tensor, layout: Layout) -> torch.Tensor:
    """`log s_i = (1/T_i) sum_t log rho_{i,t}` over the action tokens of the whole trajectory (GSPO,
    arXiv:2507.18071)."""
    mean_S = segment_mean(logp_N - old_logp_N, layout)
    return mean_S[layout.traj_N.to(mean_S.device)]


def sequence_geomean_token(logp_N: torch.Tensor, old_logp_N: torch.Tensor, layout: Layout) -> torch.Tensor:
    """`sg(log s_i) + log pi - sg(log pi)`: value of GSPO, gradient per token (GSPO-token, arXiv:2507.18071
    §4.3)."""
    return sequence_geomean(logp_N.detach(), old_logp_N, layout) + logp_N - logp_N.detach()


def sequence_product(logp_N: torch.Tensor, old_logp_N: torch.Tensor, layout: Layout) -> torch.Tensor:
    """`log prod_t rho_{i,t} = sum_t log rho_{i,t}`: the likelihood ratio of the whole trajectory, unbounded
    in length."""
    sum_S = segment_sum(logp_N - old_logp_N, layout)
    return sum_S[layout.traj_N.to(sum_S.device)]


def turn_geomean(logp_N: torch.Tensor, old_logp_N: torch.Tensor, layout: Layout) -> torch.Tensor:
    """`(1/T_u) sum_{t in u} log rho_t` over the tokens of each turn: between token and trajectory."""
    unit_N = layout.unit_N.to(logp_N.device)
    n_units = int(unit_N[-1]) + 1 if unit_N.numel() else 0
    sums = logp_N.new_zeros(n_units).index_add(0, unit_N, logp_N - old_logp_N)
    sizes = logp_N.new_zeros(n_units).index_add(0, unit_N, torch.ones_like(logp_N))
    return (sums / sizes.clamp_min(1))[unit_N]


def teacher_mixture(
    logp_N: torch.Tensor, old_logp_N: torch.Tensor, teacher_logp_N: torch.Tensor, *, student: float = 0.5
) -> torch.Tensor:
    """`log (pi/pi_old)^l (pi/pi_T)^(1-l) = log pi - l log pi_old - (1-l) log pi_T` (RLAD, Zhang et al.,
    2026).

    `student` is l: 1 is the plain token ratio. Teacher-preferred tokens reach the upper clip later.
    """
    return logp_N - student * old_logp_N - (1.0 - student) * teacher_logp_N


def _behaviour_gap(
    old_logp_N: torch.Tensor, logb_N: torch.Tensor, layout: Layout, level: str
) -> torch.Tensor:
    gap_N = (old_logp_N - logb_N).detach()
    if level == "token":
        return gap_N
    zero_N = torch.zeros_like(gap_N)
    if level == "sequence_geomean":
        return sequence_geomean(gap_N, zero_N, layout)
    if level == "sequence_product":
        return sequence_product(gap_N, zero_N, layout)
    raise ConfigError(f"'{level}' is no level of a correction.", fix=nearest(level, LEVELS))


def truncated(
    old_logp_N: torch.Tensor, logb_N: torch.Tensor, layout: Layout, *, cap: float = 2.0, level: str = "token"
) -> Ratio:
    """`w = min(pi_prox / pi_behaviour, cap)`, detached (truncated importance sampling).

    `level`: token, sequence_product (collapses on long trajectories) or sequence_geomean; the names differ
    because the numbers do. The record's `log_N` keeps the raw gap, `value_N` is the effective weight.
    """
    raw = ratio_of(_behaviour_gap(old_logp_N, logb_N, layout, level))
    return Ratio(log_N=raw.log_N, value_N=raw.value_N.clamp(max=cap), saturated_N=raw.saturated_N)


def masked(
    old_logp_N: torch.Tensor,
    logb_N: torch.Tensor,
    layout: Layout,
    *,
    low: float = 0.5,
    high: float = 2.0,
    level: str = "token",
) -> Ratio:
    """`w = r` if `low <= r <= high` else 0, `r = pi_prox / pi_behaviour`, detached (masked importance
    sampling)."""
    raw = ratio_of(_behaviour_gap(old_logp_N, logb_N, layout, level))
    inside_N = (raw.value_N >= low) & (raw.value_N <= high)
    return Ratio(
        log_N=raw.log_N,
        value_N=torch.where(inside_N, raw.value_N, torch.zeros_like(raw.value_N)),
        saturated_N=raw.saturated_N,
    )


RATIO = table(
    on_policy,
    token,
    sequence_geomean,
    sequence_geomean_token,
    sequence_product,
    turn_geomean,
    teacher_mixture,
)
CORRECTION = table(truncated, masked)
