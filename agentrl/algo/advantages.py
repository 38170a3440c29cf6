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
from agentrl.algo.columns import Layout, group_sum, segment_sum, turn_sum
from agentrl.algo.critic_losses import explained_variance
from agentrl.algo.gae import adaptive_lambda, gae, reverse_scan
from agentrl.algo.select import SPREAD_TOLERANCE, group_spread
from agentrl.errors import EvidenceError


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


def n_step(
    rewards_N: torch.Tensor,
    values_N: torch.Tensor,
    layout: Layout,
    truncated_S: torch.Tensor,
    bootstrap_S: torch.Tensor | None = None,
    *,
    n: int = 1,
    gamma: float = 1.0,
) -> Credit:
    """`A_t = sum_{k<n} gamma^k r_{t+k} + gamma^n V_{t+n} - V_t`; past the end the value of the final state,
    once.

    Written as `G_t - gamma^m G_{t+m}` with G the reward-to-go, `m = min(n, tokens left)`.
    """
    gamma_S = torch.full((layout.n_trajectories,), gamma, dtype=torch.float64)
    at_N = torch.arange(layout.n_tokens)
    traj_N = layout.traj_N
    left_N = (layout.start_S + layout.lengths_S)[traj_N] - at_N
    steps_N = left_N.clamp(max=n)
    final_S = torch.zeros(layout.n_trajectories, dtype=torch.float64)
    if bool(truncated_S.any()):
        if bootstrap_S is None:
            raise EvidenceError(
                "Truncated trajectories have no bootstrap value.", fix="Read the critic on their ends."
            )
        final_S = torch.where(truncated_S, bootstrap_S, final_S)
    to_go_N = reverse_scan(rewards_N, gamma_S, layout.lengths_S)
    ends = left_N <= n
    ahead_N = (at_N + steps_N).clamp(max=max(layout.n_tokens - 1, 0))
    zero_N = torch.zeros_like(values_N)
    later_N = torch.where(ends, zero_N, to_go_N[ahead_N])
    value_N = torch.where(ends, final_S[traj_N], values_N[ahead_N])
    discount_N = gamma ** steps_N.to(torch.float64)
    returns_N = to_go_N - discount_N * later_N + discount_N * value_N
    return Credit(advantage_N=returns_N - values_N, returns_N=returns_N)


def gae_or_mean(
    rewards_N: torch.Tensor,
    values_N: torch.Tensor,
    layout: Layout,
    return_S: torch.Tensor,
    group_S: torch.Tensor,
    truncated_S: torch.Tensor,
    counted_S: torch.Tensor,
    bootstrap_S: torch.Tensor | None = None,
    *,
    gamma: float = 1.0,
    lambda_policy: float = 0.95,
    lambda_critic: float | None = None,
    alpha: float | None = None,
    threshold: float = 0.0,
    bootstrap: bool = True,
) -> Credit:
    """GAE when the critic explains the returns better than a mean does, else `R - mean` (EVPO, Pan et al.,
    2026).

    The gate is the explained variance `1 - Var(G - V) / Var(G)` over counted tokens against `threshold`. The
    mean is that of the group where two members counted, of the batch otherwise. The critic is trained either
    way.
    """
    credit = gae_tokens(
        rewards_N,
        values_N,
        layout,
        truncated_S,
        counted_S,
        bootstrap_S,
        gamma=gamma,
        lambda_policy=lambda_policy,
        lambda_critic=lambda_critic,
        alpha=alpha,
        bootstrap=bootstrap,
    )
    counted_N = counted_S[layout.traj_N]
    to_go_N = reverse_scan(
        rewards_N, torch.full((layout.n_trajectories,), gamma, dtype=torch.float64), layout.lengths_S
    )
    explained = explained_variance(values_N[counted_N], to_go_N[counted_N])
    if explained is not None and explained > threshold:
        return Credit(
            advantage_N=credit.advantage_N, returns_N=credit.returns_N, facts={"critic/gate_open": 1.0}
        )
    stats = statistics(return_S, group_S, counted_S)
    batch = return_S[counted_S].mean() if bool(counted_S.any()) else return_S.new_zeros(())
    mean_S = torch.where((stats.count_G >= 2)[group_S], stats.mean_G[group_S], batch)
    advantage_S = torch.where(counted_S, return_S - mean_S, torch.zeros_like(return_S))
    return Credit(
        advantage_N=advantage_S[layout.traj_N], returns_N=credit.returns_N, facts={"critic/gate_open": 0.0}
    )


def gae_turns(
    rewards_N: torch.Tensor,
    values_N: torch.Tensor,
    layout: Layout,
    truncated_S: torch.Tensor,
    bootstrap_S: torch.Tensor | None = None,
    *,
    gamma: float = 1.0,
    lambda_policy: float = 0.95,
    lambda_critic: float | None = None,
    bootstrap: bool = True,
) -> Credit:
    """`A_u = delta_u + gamma lambda A_{u+1}` with a turn as the step, broadcast to its tokens (turn-level
    PPO).

    A turn's value is that of its first action token; its reward is the sum of its rewards. With
    `lambda_policy = 0` and Monte-Carlo values this is the segment advantage of SPO (arXiv:2505.23564) and the
    progress of GRPO-VPS.
    """
    starts_N = layout.turn_starts_N
    turns_S = torch.zeros_like(layout.lengths_S).index_add(0, layout.traj_N, starts_N.to(torch.int64))
    turns = Layout(lengths_S=turns_S, group_S=layout.group_S, turn_N=layout.turn_N[starts_N])
    advantage_U, returns_U = _gae_where_possible(
        turn_sum(rewards_N, layout),
        values_N[starts_N],
        turns,
        gamma,
        lambda_policy,
        lambda_policy if lambda_critic is None else lambda_critic,
        bootstrap_S,
        truncated_S if bootstrap else None,
    )
    return Credit(advantage_N=advantage_U[layout.unit_N], returns_N=returns_U[layout.unit_N])


# -------------------------------------------------------------------------------------------- turns and
# tokens


def _zscore_within(
    values: torch.Tensor, key: torch.Tensor, counted: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """z-score among counted entries of equal key; 0 where fewer than two or no spread."""
    stats = statistics(values, key, counted)
    usable = (stats.count_G >= 2) & ~stats.flat_G
    scaled = (values - stats.mean_G[key]) / (stats.std_G(0) + epsilon)[key]
    return torch.where(counted & usable[key], scaled, torch.zeros_like(values))


def turn_blend(
    outcome_S: torch.Tensor,
    token_reward_N: torch.Tensor,
    layout: Layout,
    group_S: torch.Tensor,
    counted_S: torch.Tensor,
    *,
    share: float = 1.0,
    epsilon: float = 1e-6,
) -> Credit:
    """`A_k = z(turn reward k) + share * A_outcome` before the last turn, `A_outcome` on it (MT-GRPO,
    arXiv:2505.11821).

    Turn rewards are compared with the same turn index of the other members of the group.
    """
    outcome = group_zscore(outcome_S, group_S, counted_S, epsilon=epsilon)
    assert outcome.advantage_S is not None
    if layout.n_tokens == 0:
        return Credit(
            advantage_N=torch.zeros(0, dtype=torch.float64), defined_S=outcome.defined_S, facts=outcome.facts
        )
    starts_N = layout.turn_starts_N
    traj_U, turn_U = layout.traj_N[starts_N], layout.turn_N[starts_N]
    key_U = group_S[traj_U] * (int(turn_U.max()) + 1) + turn_U
    turn_advantage_U = _zscore_within(turn_sum(token_reward_N, layout), key_U, counted_S[traj_U], epsilon)
    last_U = torch.ones_like(traj_U, dtype=torch.bool)
    last_U[:-1] = traj_U[1:] != traj_U[:-1]
    base_U = outcome.advantage_S[traj_U]
    advantage_U = torch.where(last_U, base_U, turn_advantage_U + share * base_U)
    return Credit(advantage_N=advantage_U[layout.unit_N], defined_S=outcome.defined_S, facts=outcome.facts)


def turn_returns(
    rewards_N: torch.Tensor,
    layout: Layout,
    group_S: torch.Tensor,
    counted_S: torch.Tensor,
    *,
    gamma: float = 1.0,
    epsilon: float = 1e-6,
) -> Credit:
    """`A_k = sum_{j>=k} gamma^{j-k} z(r_j)`, z over all turns of the group (IGPO, arXiv:2510.14967).

    Turn rewards are information gains measured by the environment side; the outcome stands on the last turn.
    """
    starts_N = layout.turn_starts_N
    traj_U = layout.traj_N[starts_N]
    scaled_U = _zscore_within(turn_sum(rewards_N, layout), group_S[traj_U], counted_S[traj_U], epsilon)
    turns_S = torch.zeros_like(layout.lengths_S).index_add(0, traj_U, torch.ones_like(traj_U))
    gamma_S = torch.full((layout.n_trajectories,), gamma, dtype=torch.float64)
    to_go_U = reverse_scan(scaled_U, gamma_S, turns_S)
    members_G = group_sum(counted_S.to(torch.int64), group_S)
    return Credit(advantage_N=to_go_U[layout.unit_N], defined_S=(members_G >= 2)[group_S])


def trace_weighted(
    return_S: torch.Tensor,
    group_S: torch.Tensor,
    counted_S: torch.Tensor,
    layout: Layout,
    *,
    decay: float = 0.99,
    epsilon: float = 1e-6,
) -> Credit:
    """`A_t = z_i w_t`, `w_t ~ decay^{T-1-t}` scaled to mean 1 per trajectory (traces without a critic,
    GRPO-lambda)."""
    credit = group_zscore(return_S, group_S, counted_S, epsilon=epsilon)
    assert credit.advantage_S is not None
    traj_N = layout.traj_N
    left_N = (layout.start_S + layout.lengths_S - 1)[traj_N] - torch.arange(layout.n_tokens)
    weight_N = torch.as_tensor(decay, dtype=torch.float64) ** left_N.to(torch.float64)
    mean_S = segment_sum(weight_N, layout) / layout.lengths_S.clamp_min(1)
    return Credit(
        advantage_N=credit.advantage_S[traj_N] * weight_N / mean_S[traj_N],
        defined_S=credit.defined_S,
        facts=credit.facts,
    )


def entropy_shaped(
    reward_S: torch.Tensor,
    entropy_N: torch.Tensor,
    group_S: torch.Tensor,
    counted_S: torch.Tensor,
    layout: Layout,
    *,
    outcome_weight: float = 1.0,
    entropy_weight: float = 0.1,
    correct_above: float = 0.5,
    epsilon: float = 1e-6,
) -> Credit:
    """`A_{i,t} = z(r_{i,t})` over the tokens of the group, r by share of entropy (GTPO, arXiv:2508.04349).

    Successes: `a + b n_t H_{i,t} / sum_k H_{k,t}` over the `n_t` successes that reach position t; failures
    the negative of the same with `1/H`: a confident wrong token is punished more.
    """
    traj_N = layout.traj_N
    position_N = torch.arange(layout.n_tokens) - layout.start_S[traj_N]
    good_S = reward_S > correct_above
    counted_N, good_N = counted_S[traj_N], good_S[traj_N]
    longest = int(layout.lengths_S.max()) if layout.n_tokens else 1
    key_N = (group_S[traj_N] * 2 + good_N.to(torch.int64)) * longest + position_N
    level_N = torch.where(good_N, entropy_N.clamp_min(0.0), 1.0 / entropy_N.clamp_min(epsilon))
    level_N = torch.where(counted_N, level_N, torch.zeros_like(level_N))
    total = group_sum(level_N, key_N)
    number = group_sum(counted_N.to(torch.float64), key_N)
    fraction_N = number[key_N] * level_N / total[key_N].clamp_min(1e-12)
    shaped_N = outcome_weight + entropy_weight * fraction_N
    token_N = torch.where(good_N, shaped_N, -shaped_N)
    members_G = group_sum(counted_S.to(torch.int64), group_S)
    flat_G = group_spread(reward_S, group_S, counted_S) <= SPREAD_TOLERANCE
    advantage_N = _zscore_within(token_N, group_S[traj_N], counted_N, epsilon)
    return Credit(
        advantage_N=torch.where(flat_G[group_S][traj_N], torch.zeros_like(advantage_N), advantage_N),
        defined_S=(members_G >= 2)[group_S],
        facts={"groups/zero_variance": float(flat_G.sum())},
    )


def tree_nodes(node_value_N: torch.Tensor) -> Credit:
    """`A_t = V(node) - V(parent)` of the tree node the token belongs to (TreeRPO arXiv:2506.05183; see
    `tree_values`)."""
    return Credit(advantage_N=node_value_N)


def tree_values(parent_M: list[int], reward_M: list[float | None]) -> tuple[list[float], list[float]]:
    """Values and advantages of a rollout tree: a leaf's value is its reward, an inner node's the mean of its
    children.

    Args:
        parent_M: index of the parent, -1 for the root; parents before children.
        reward_M: reward of a leaf; None for an inner node.

    Returns:
        value and `value - value of the parent` (0 for the root) per node.
    """
    children: list[list[int]] = [[] for _ in parent_M]
    for node, parent in enumerate(parent_M):
        if parent >= 0:
            children[parent].append(node)
    value = [0.0] * len(parent_M)
    for node in reversed(range(len(parent_M))):
        own = reward_M[node]
        if children[node]:
            value[node] = sum(value[c] for c in children[node]) / len(children[node])
        elif own is None:
            raise EvidenceError(
                f"Tree node {node} is a leaf without a reward.", fix="Grade it or remove its branch."
            )
        else:
            value[node] = own
    return value, [0.0 if p < 0 else value[m] - value[p] for m, p in enumerate(parent_M)]


# ---------------------------------------------------------------------------------- other trajectory
# baselines


def virtual_best(
    return_S: torch.Tensor,
    group_S: torch.Tensor,
    counted_S: torch.Tensor,
    *,
    best: float = 1.0,
    ddof: int = 0,
    epsilon: float = 1e-6,
) -> Credit:
    """`z(R_i)` in the group plus one imagined member of reward `best`: all-fail groups push down (NGRPO,
    arXiv:2509.18851)."""
    stats = statistics(return_S, group_S, counted_S)
    count_G = stats.count_G + 1.0
    mean_G = (stats.mean_G * stats.count_G + best) / count_G
    squares_G = stats.squares_G + stats.count_G * (stats.mean_G - mean_G).square() + (best - mean_G).square()
    std_G = (squares_G / (count_G - ddof)).sqrt()
    nothing_G = stats.flat_G & ((stats.mean_G - best).abs() <= SPREAD_TOLERANCE)
    advantage_S = (return_S - mean_G[group_S]) / (std_G + epsilon)[group_S]
    live_S = counted_S & ~nothing_G[group_S] & (stats.count_G > 0)[group_S]
    return Credit(
        advantage_S=torch.where(live_S, advantage_S, torch.zeros_like(advantage_S)),
        facts={"groups/zero_variance": float((stats.flat_G & (stats.count_G > 0)).sum())},
    )


def correctness_first(
    reward_S: torch.Tensor,
    outcome_S: torch.Tensor,
    group_S: torch.Tensor,
    counted_S: torch.Tensor,
    *,
    temperature: float = 1.0,
    correct_above: float = 0.5,
) -> Credit:
    """`A = (1 - p) n w_i` for the n correct of a group, `-p` for the others, p = share correct (DRPO,
    arXiv:2510.04474).

    `w_i = softmax(shaped outcome / temperature)` within the correct ones only: length orders correct answers
    and can never make one negative. The sum over the group is 0.
    """
    good_S = counted_S & (reward_S > correct_above)
    n_G = group_sum(good_S.to(torch.float64), group_S)
    count_G = group_sum(counted_S.to(torch.float64), group_S)
    p_S = (n_G / count_G.clamp_min(1.0))[group_S]
    top_G = outcome_S.new_full(n_G.shape, -torch.inf).scatter_reduce(
        0, group_S[good_S], outcome_S[good_S], "amax"
    )
    zero_S = torch.zeros_like(outcome_S)
    shifted_S = torch.where(good_S, (outcome_S - top_G[group_S]) / temperature, zero_S)
    weight_S = torch.where(good_S, shifted_S.exp(), zero_S)
    weight_S = weight_S / group_sum(weight_S, group_S).clamp_min(1e-12)[group_S]
    advantage_S = torch.where(good_S, (1.0 - p_S) * n_G[group_S] * weight_S, -p_S)
    usable_G = count_G >= 2
    return Credit(
        advantage_S=torch.where(counted_S & usable_G[group_S], advantage_S, zero_S),
        defined_S=usable_G[group_S],
        facts={"groups/zero_variance": float((usable_G & ((n_G == 0) | (n_G == count_G))).sum())},
    )


def mixed_value_at_risk(
    return_S: torch.Tensor,
    counted_S: torch.Tensor,
    *,
    low: float = 0.2,
    high: float = 0.8,
    extra: float = 0.5,
) -> Credit:
    """Gradient weight of `(1+w) RVaR_{0:a} + RVaR_{a:b}`, centred over the batch (RiskPO, arXiv:2510.00911).

    With quantiles `q_a, q_b` of the batch: `(1+w)/a (min(R, q_a) - q_a) + 1/(b-a) (clip(R, q_a, q_b) - q_b)`:
    hard samples weigh more, what is beyond `q_b` is not pushed further.
    """
    counted = return_S[counted_S]
    zero_S = torch.zeros_like(return_S)
    if counted.numel() < 2:
        return Credit(advantage_S=zero_S, defined_S=torch.zeros_like(counted_S))
    q_low, q_high = torch.quantile(counted, torch.tensor([low, high], dtype=counted.dtype))
    weight_S = (1.0 + extra) / low * (return_S.clamp(max=q_low) - q_low)
    weight_S = weight_S + (return_S.clamp(q_low, q_high) - q_high) / (high - low)
    return Credit(advantage_S=torch.where(counted_S, weight_S - weight_S[counted_S].mean(), zero_S))


def smooth_standardised(
    return_S: torch.Tensor,
    group_S: torch.Tensor,
    counted_S: torch.Tensor,
    history_mean_S: torch.Tensor,
    history_std_S: torch.Tensor,
    history_step_S: torch.Tensor,
    *,
    epsilon: float = 1e-6,
) -> Credit:
    """`A = s1 or s2, whichever is smaller in size`: current and cumulative z-scores mixed (DCPO,
    arXiv:2509.02333).

    `s1 = (i-1)/i A_new + 1/i A_total`, `s2 = 1/i A_new + (i-1)/i A_total` at the i-th step of the prompt.
    """
    new = group_zscore(return_S, group_S, counted_S, epsilon=epsilon)
    assert new.advantage_S is not None
    zero_S = torch.zeros_like(return_S)
    spread_S = history_std_S > SPREAD_TOLERANCE
    total_S = torch.where(spread_S, (return_S - history_mean_S) / (history_std_S + epsilon), zero_S)
    step_S = history_step_S.to(torch.float64).clamp_min(1.0)
    first_S = (step_S - 1.0) / step_S * new.advantage_S + total_S / step_S
    second_S = new.advantage_S / step_S + (step_S - 1.0) / step_S * total_S
    mixed_S = torch.where(first_S.abs() < second_S.abs(), first_S, second_S)
    return Credit(
        advantage_S=torch.where(counted_S, mixed_S, zero_S), defined_S=new.defined_S, facts=new.facts
    )


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
    gae_turns,
    gae_or_mean,
    n_step,
    turn_blend,
    turn_returns,
    trace_weighted,
    entropy_shaped,
    tree_nodes,
    virtual_best,
    correctness_first,
    mixed_value_at_risk,
    smooth_standardised,
)
BATCH_WIDE = frozenset(
    {"batch_mean_baseline", "global_normalised", "group_centred_global", "gae_or_mean", "mixed_value_at_risk"}
)
"""Operators whose statistics span the whole batch: every rank must see all trajectories of the step."""
GROUP_RELATIVE = frozenset(
    {
        "group_zscore",
        "group_centred",
        "leave_one_out",
        "group_centred_global",
        "turn_blend",
        "turn_returns",
        "trace_weighted",
        "entropy_shaped",
        "correctness_first",
        "smooth_standardised",
    }
)
"""Operators that compare members of a group: undefined for one member."""
PER_TOKEN = frozenset(
    {
        "gae_tokens",
        "gae_turns",
        "gae_or_mean",
        "n_step",
        "turn_blend",
        "turn_returns",
        "trace_weighted",
        "entropy_shaped",
        "tree_nodes",
    }
)
"""Operators whose advantage differs inside a trajectory."""
