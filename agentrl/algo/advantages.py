"""Axis *advantage*: rewards (and values) to one number per action token that says how much better than
expected it was.

Group statistics see only counted members (graded and selected), in float64, by two passes: mean first, then
squared deviations, so that nearly equal rewards do not cancel. A group with fewer than two counted members
teaches nothing: its members are not `defined` and leave the loss. A group whose rewards spread by at most
1e-6 has advantage exactly 0. Operators answer a `Credit`, per trajectory (broadcast to all its tokens) or per
token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from agentrl.algo.axes import table
from agentrl.algo.columns import Layout, group_sum
from agentrl.algo.gae import adaptive_lambda, gae, reverse_scan
from agentrl.algo.select import SPREAD_TOLERANCE, group_spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What an advantage operator found. Exactly one of `advantage_S` and `advantage_N` is set."""

    advantage_S: torch.Tensor | None = None
    """float64 `[S]`, broadcast to the tokens."""
    advantage_N: torch.Tensor | None = None
    """float64 `[N]`."""
    returns_N: torch.Tensor | None = None
    """float64 `[N]`, target of the critic; None without one."""
    defined_S: torch.Tensor | None = None
    """bool `[S]`: False takes the trajectory out of the policy loss (no comparison was possible). None: all
    True."""
    facts: dict[str, float] = field(default_factory=dict)
    """Numbers for the log."""


# ------------------------------------------------------------------------------------------- group statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """float64 `[G]` each, over counted members."""

    count_G: torch.Tensor
    mean_G: torch.Tensor
    squares_G: torch.Tensor
    """Sum of squared deviations from the mean."""
    flat_G: torch.Tensor
    """bool: spread at most 1e-6."""

    def std_G(self, ddof: int) -> torch.Tensor:
        return (self.squares_G / (self.count_G - ddof).clamp_min(1.0)).sqrt()


def statistics(return_S: torch.Tensor, group_S: torch.Tensor, counted_S: torch.Tensor) -> GroupStatistics:
    """Two-pass group statistics over counted members."""
    zero_S = torch.zeros_like(return_S)
    ones_S = counted_S.to(torch.float64)
    count_G = group_sum(ones_S, group_S)
    mean_G = group_sum(torch.where(counted_S, return_S, zero_S), group_S) / count_G.clamp_min(1.0)
    deviation_S = torch.where(counted_S, return_S - mean_G[group_S], zero_S)
    return GroupStatistics(
        count_G=count_G,
        mean_G=mean_G,
        squares_G=group_sum(deviation_S.square(), group_S),
        flat_G=group_spread(return_S, group_S, counted_S) <= SPREAD_TOLERANCE,
    )


def _credit(
    advantage_S: torch.Tensor, stats: GroupStatistics, group_S: torch.Tensor, counted_S: torch.Tensor
) -> Credit:
    """Zero where flat, undefined where fewer than two members counted."""
    usable_G = stats.count_G >= 2
    live_S = counted_S & usable_G[group_S] & ~stats.flat_G[group_S]
    graded_G = stats.count_G > 0
    return Credit(
        advantage_S=torch.where(live_S, advantage_S, torch.zeros_like(advantage_S)),
        defined_S=usable_G[group_S],
        facts={
            "groups/total": float(graded_G.sum()),
            "groups/too_small": float((graded_G & ~usable_G).sum()),
            "groups/zero_variance": float((usable_G & stats.flat_G).sum()),
        },
    )


def group_zscore(
    return_S: torch.Tensor,
    group_S: torch.Tensor,
    counted_S: torch.Tensor,
    *,
    ddof: int = 0,
    epsilon: float = 1e-6,
) -> Credit:
    """`A_i = (R_i - mean) / (std + eps)`, std over the group with `ddof` (GRPO, arXiv:2402.03300)."""
    stats = statistics(return_S, group_S, counted_S)
    scale_S = (stats.std_G(ddof) + epsilon)[group_S]
    return _credit((return_S - stats.mean_G[group_S]) / scale_S, stats, group_S, counted_S)


def group_centred(return_S: torch.Tensor, group_S: torch.Tensor, counted_S: torch.Tensor) -> Credit:
    """`A_i = R_i - mean` (Dr. GRPO, arXiv:2503.20783)."""
    stats = statistics(return_S, group_S, counted_S)
    return _credit(return_S - stats.mean_G[group_S], stats, group_S, counted_S)


def leave_one_out(return_S: torch.Tensor, group_S: torch.Tensor, counted_S: torch.Tensor) -> Credit:
    """`A_i = R_i - mean of the others = n/(n-1) (R_i - mean)` (RLOO, arXiv:2402.14740)."""
    stats = statistics(return_S, group_S, counted_S)
    factor_G = stats.count_G / (stats.count_G - 1.0).clamp_min(1.0)
    return _credit(factor_G[group_S] * (return_S - stats.mean_G[group_S]), stats, group_S, counted_S)


def greedy_baseline(return_S: torch.Tensor, greedy_reward_S: torch.Tensor) -> Credit:
    """`A_i = R_i - R(greedy)`, all turn rewards of one greedy rollout of the prompt (ReMax,
    arXiv:2310.10505)."""
    return Credit(advantage_S=return_S - greedy_reward_S)


def constant_baseline(return_S: torch.Tensor, *, baseline: float = 0.0) -> Credit:
    """`A_i = R_i - b` (REINFORCE, Williams 1992)."""
    return Credit(advantage_S=return_S - baseline)


def batch_mean_baseline(return_S: torch.Tensor, counted_S: torch.Tensor) -> Credit:
    """`A_i = R_i - mean of the batch` (REINFORCE with a baseline)."""
    counted = return_S[counted_S]
    return Credit(
        advantage_S=return_S - (counted.mean() if counted.numel() else 0.0),
        facts={"advantage/baseline": float(counted.mean()) if counted.numel() else 0.0},
    )


def reward_to_go(rewards_N: torch.Tensor, layout: Layout, *, gamma: float = 1.0) -> Credit:
    """`A_t = sum_{k>=t} gamma^{k-t} r_k`: only the future counts."""
    gamma_S = torch.full((layout.n_trajectories,), gamma, dtype=rewards_N.dtype)
    return Credit(advantage_N=reverse_scan(rewards_N, gamma_S, layout.lengths_S))


def global_normalised(
    rewards_N: torch.Tensor,
    layout: Layout,
    counted_S: torch.Tensor,
    *,
    gamma: float = 1.0,
    epsilon: float = 1e-8,
) -> Credit:
    """`A_t = (G_t - mean) / (std + eps)` over all counted tokens of the batch (REINFORCE++,
    arXiv:2501.03262)."""
    returns_N = reward_to_go(rewards_N, layout, gamma=gamma).advantage_N
    assert returns_N is not None
    return Credit(advantage_N=_whiten(returns_N, counted_S[layout.traj_N], epsilon))


def group_centred_global(
    return_S: torch.Tensor,
    group_S: torch.Tensor,
    counted_S: torch.Tensor,
    layout: Layout,
    *,
    epsilon: float = 1e-8,
) -> Credit:
    """`A_i = (R_i - mean_group) / (std_batch + eps)`, std over counted tokens (REINFORCE++-baseline,
    arXiv:2501.03262)."""
    centred = group_centred(return_S, group_S, counted_S)
    assert centred.advantage_S is not None
    assert centred.defined_S is not None
    defined_S = centred.defined_S & counted_S
    advantage_N = centred.advantage_S[layout.traj_N]
    scale = _std(advantage_N[defined_S[layout.traj_N]]) + epsilon
    return Credit(advantage_S=centred.advantage_S / scale, defined_S=centred.defined_S, facts=centred.facts)


def _std(values: torch.Tensor) -> torch.Tensor:
    return values.var(correction=0).sqrt() if values.numel() else values.new_ones(())


def _whiten(values_N: torch.Tensor, counted_N: torch.Tensor, epsilon: float) -> torch.Tensor:
    counted = values_N[counted_N]
    if counted.numel() == 0:
        return torch.zeros_like(values_N)
    return torch.where(
        counted_N, (values_N - counted.mean()) / (_std(counted) + epsilon), torch.zeros_like(values_N)
    )


# ------------------------------------------------------------------------------------------------ with a
# critic


def gae_tokens(
    rewards_N: torch.Tensor,
    values_N: torch.Tensor,
    layout: Layout,
    truncated_S: torch.Tensor,
    counted_S: torch.Tensor,
    bootstrap_S: torch.Tensor | None = None,
    *,
    gamma: float = 1.0,
    lambda_policy: float = 0.95,
    lambda_critic: float | None = None,
    alpha: float | None = None,
    bootstrap: bool = True,
    whiten: bool = False,
) -> Credit:
    """`A_t = delta_t + gamma lambda A_{t+1}`, over action tokens only (arXiv:1506.02438, design of `gae.py`).

    `alpha` replaces lambda_policy by `1 - 1/(alpha l)` (VAPO, arXiv:2504.05118); `bootstrap=false` reads
    truncation as an end; `whiten` standardises advantages over the counted tokens of the batch (common in PPO
    for RLHF).
    """
    lam = lambda_policy if alpha is None else adaptive_lambda(layout.lengths_S, alpha)
    estimate = _gae_where_possible(
        rewards_N, values_N, layout, gamma, lam, lambda_policy if lambda_critic is None else lambda_critic,
        bootstrap_S, truncated_S if bootstrap else None,
    )  # fmt: skip
    advantage_N = _whiten(estimate[0], counted_S[layout.traj_N], 1e-8) if whiten else estimate[0]
    return Credit(advantage_N=advantage_N, returns_N=estimate[1])


def _gae_where_possible(
    rewards_N: torch.Tensor,
    values_N: torch.Tensor,
    layout: Layout,
    gamma: float,
    lambda_policy: float | torch.Tensor,
    lambda_critic: float | torch.Tensor,
    bootstrap_S: torch.Tensor | None,
    truncated_S: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE of the trajectories that have a kept token; the others (wholly excluded on purpose) have nothing to
    estimate."""
    has_S = layout.lengths_S > 0
    inner = Layout(lengths_S=layout.lengths_S[has_S], group_S=layout.group_S[has_S], turn_N=layout.turn_N)
    estimate = gae(
        rewards_N,
        values_N,
        inner,
        gamma=gamma,
        lambda_policy=lambda_policy[has_S] if isinstance(lambda_policy, torch.Tensor) else lambda_policy,
        lambda_critic=lambda_critic[has_S] if isinstance(lambda_critic, torch.Tensor) else lambda_critic,
        bootstrap_S=None if bootstrap_S is None else bootstrap_S[has_S],
        truncated_S=None if truncated_S is None else truncated_S[has_S],
    )
    return estimate.advantage_N, estimate.returns_N


ADVANTAGE = table(
    group_zscore,
    group_centred,
    leave_one_out,
    greedy_baseline,
    constant_baseline,
    batch_mean_baseline,
    reward_to_go,
    global_normalised,
    group_centred_global,
    gae_tokens,
)
BATCH_WIDE = frozenset({"batch_mean_baseline", "global_normalised", "group_centred_global"})
"""Operators whose statistics span the whole batch: every rank must see all trajectories of the step."""
