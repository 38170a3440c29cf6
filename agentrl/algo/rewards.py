"""Axis *reward*: what a trajectory earned, and on which action tokens it stands.

`REWARD` operators map the outcome `[S]` to a shaped outcome `[S]`, one after the other. `TOKEN_REWARD`
operators answer rewards `[N]` that are added on top: turn rewards, KL to the reference fixed at collection,
process rewards. `place` puts everything on action tokens; the sum over a trajectory is its reward, exactly.
Ungraded trajectories pass through as NaN.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import torch

from agentrl.algo.axes import table
from agentrl.algo.columns import Layout, segment_mean, segment_sum
from agentrl.errors import EvidenceError

SIMPLEX_SAMPLES = 4096
"""Weight vectors drawn for a set reward of more than two dimensions; the generator is seeded, so runs
repeat."""


def place(
    outcome_S: torch.Tensor, layout: Layout, token_reward_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Rewards per action token `[N]`: the outcome on the last one of its trajectory, token rewards where they
    are.

    A reward that arrives with an observation belongs to the action before it; the caller has put it there.
    """
    rewards_N = torch.zeros(layout.n_tokens, dtype=outcome_S.dtype)
    last_S = torch.cumsum(layout.lengths_S, 0) - 1
    has_S = layout.lengths_S > 0
    rewards_N[last_S[has_S]] = outcome_S[has_S]
    return rewards_N if token_reward_N is None else rewards_N + token_reward_N


def land_on_kept(reward_N: torch.Tensor, layout: Layout, keep_N: torch.Tensor) -> torch.Tensor:
    """Move rewards of excluded tokens to kept ones: `[N]` in, `[N_kept]` out, sums per trajectory unchanged.

    A turn's reward lands on the last kept token at or before the end of its turn, else on the trajectory's
    first kept token. A trajectory without kept token loses its rewards (it is not trained).
    """
    n = layout.n_tokens
    if n == 0:
        return reward_N.clone()
    at_N = torch.arange(n)
    last_U = torch.cumsum(torch.bincount(layout.unit_N), 0) - 1
    last_in_turn = last_U[layout.unit_N]
    kept_before = torch.cummax(torch.where(keep_N, at_N, torch.full_like(at_N, -1)), 0).values
    traj_N = layout.traj_N
    target = kept_before[last_in_turn]
    first_kept_S = torch.full((layout.n_trajectories,), n).scatter_reduce(
        0, traj_N[keep_N], at_N[keep_N], "amin"
    )
    target = torch.where(target < layout.start_S[traj_N], first_kept_S[traj_N], target)
    slot_N = torch.cumsum(keep_N.to(torch.int64), 0) - 1
    moves = (target < n) & (reward_N != 0)
    out = reward_N.new_zeros(int(keep_N.sum()))
    return out.index_add(0, slot_N[target[moves]], reward_N[moves])


def soft_overlong(
    outcome_S: torch.Tensor, length_S: torch.Tensor, *, max_length: int, cache: int, coefficient: float = 1.0
) -> torch.Tensor:
    """`R + c * clamp((L_max - L_cache - |y|) / L_cache, -1, 0)`, |y| = generated tokens (DAPO,
    arXiv:2503.14476 eq. 13)."""
    penalty_S = ((max_length - cache - length_S.to(outcome_S.dtype)) / cache).clamp(-1.0, 0.0)
    return outcome_S + coefficient * penalty_S


def step_bonus(
    outcome_S: torch.Tensor,
    length_S: torch.Tensor,
    *,
    target: int,
    bonus: float = 0.5,
    correct_above: float = 0.5,
) -> torch.Tensor:
    """`R + bonus` for a correct trajectory of at most `target` generated tokens (LASER, arXiv:2505.15612)."""
    earns_S = (outcome_S > correct_above) & (length_S <= target)
    return outcome_S + bonus * earns_S.to(outcome_S.dtype)


def group_length_reward(
    outcome_S: torch.Tensor,
    length_S: torch.Tensor,
    group_S: torch.Tensor,
    counted_S: torch.Tensor,
    *,
    weight: float = 1.0,
    correct_above: float = 0.5,
) -> torch.Tensor:
    """`R + w l`, `l = 1/2 - (len - min)/(max - min)` for correct ones, `min(0, l)` else (Kimi k1.5,
    arXiv:2501.12599 §2.3.3)."""
    n_groups = int(group_S.max()) + 1 if group_S.numel() else 0
    length = length_S.to(outcome_S.dtype)
    high = length.new_full((n_groups,), -torch.inf).scatter_reduce(
        0, group_S[counted_S], length[counted_S], "amax"
    )
    low = length.new_full((n_groups,), torch.inf).scatter_reduce(
        0, group_S[counted_S], length[counted_S], "amin"
    )
    width = (high - low)[group_S]
    lam = torch.where(
        width > 0, 0.5 - (length - low[group_S]) / width.clamp_min(1e-9), torch.zeros_like(length)
    )
    return outcome_S + weight * torch.where(outcome_S > correct_above, lam, lam.clamp(max=0.0))


def exit_decay(
    outcome_S: torch.Tensor, exit_index_S: torch.Tensor, *, base: float = 2.0, correct_above: float = 0.5
) -> torch.Tensor:
    """`R / base^k` for a correct answer at the k-th exit (k = 0 first), else 0 (S-GRPO, arXiv:2505.07686)."""
    decayed_S = outcome_S * base ** (-exit_index_S.to(outcome_S.dtype))
    zero_S = torch.where(torch.isnan(outcome_S), outcome_S, torch.zeros_like(outcome_S))
    return torch.where(outcome_S > correct_above, decayed_S, zero_S)


def weighted_components(
    outcome_S: torch.Tensor,
    components_SK: torch.Tensor,
    *,
    weights: tuple[float, ...],
    keep_outcome: bool = True,
) -> torch.Tensor:
    """`R + sum_k w_k c_k`: calibrated weighted sum of several rewards (QwQ, Kimi k1.5)."""
    if components_SK.shape[1] != len(weights):
        raise EvidenceError(
            f"{len(weights)} weights for {components_SK.shape[1]} components of the reward.",
            fix="Set reward.weighted_components.weights, one per component in the order of their names.",
        )
    extra_S = components_SK.to(outcome_S.dtype) @ torch.tensor(weights, dtype=outcome_S.dtype)
    base_S = (
        outcome_S
        if keep_outcome
        else torch.where(torch.isnan(outcome_S), outcome_S, torch.zeros_like(outcome_S))
    )
    return base_S + extra_S


def simplex_weights(k: int, *, samples: int = SIMPLEX_SAMPLES, concentration: float = 1.0) -> torch.Tensor:
    """float64 `[M, K]` weight vectors on the simplex: a midpoint grid for K = 2 and uniform weights, else
    Dirichlet draws."""
    if k == 2 and concentration == 1.0:
        w = (torch.arange(samples, dtype=torch.float64) + 0.5) / samples
        return torch.stack([w, 1.0 - w], -1)
    generator = torch.Generator().manual_seed(0)
    gammas = torch._standard_gamma(torch.full((samples, k), concentration, dtype=torch.float64), generator)
    return gammas / gammas.sum(-1, keepdim=True)


def set_reward(components_GK: torch.Tensor, weights_MK: torch.Tensor) -> torch.Tensor:
    """`R(S) = E_w max_{y in S} w^T r(y)`, scalar (VPO, Bahlous-Boldi et al., 2026). An empty set earns 0."""
    if components_GK.shape[0] == 0:
        return weights_MK.new_zeros(())
    return (weights_MK @ components_GK.to(weights_MK).T).max(-1).values.mean()


def set_marginal(
    outcome_S: torch.Tensor,
    components_SK: torch.Tensor,
    group_S: torch.Tensor,
    counted_S: torch.Tensor,
    *,
    concentration: float = 1.0,
) -> torch.Tensor:
    """`R(S) - R(S without y)`: what a member adds to the set reward of its group (VPO, Bahlous-Boldi et al.,
    2026)."""
    out_S = torch.where(torch.isnan(outcome_S), outcome_S, torch.zeros_like(outcome_S))
    weights = simplex_weights(components_SK.shape[1], concentration=concentration)
    for group in torch.unique(group_S[counted_S]).tolist():
        members = torch.nonzero(counted_S & (group_S == group)).flatten()
        scores = weights @ components_SK[members].to(weights).T
        best, arg = scores.max(-1)
        if members.numel() == 1:
            out_S[members] = best.mean().to(out_S)
            continue
        second = scores.scatter(1, arg.unsqueeze(1), -torch.inf).max(-1).values
        gain = (
            torch.zeros(members.numel(), dtype=torch.float64).index_add(0, arg, best - second)
            / weights.shape[0]
        )
        out_S[members] = gain.to(out_S)
    return out_S


def density_weighted(outcome_S: torch.Tensor, density_S: torch.Tensor) -> torch.Tensor:
    """`R / (1 + density)`, density = similarity mass of the other members (DRA-GRPO, arXiv:2505.09655)."""
    return outcome_S / (1.0 + density_S.to(outcome_S.dtype))


def frequency_weighted(
    outcome_S: torch.Tensor, answer_S: torch.Tensor, group_S: torch.Tensor, counted_S: torch.Tensor
) -> torch.Tensor:
    """`R * (1 - (n_a - 1) / (n - 1))`, n_a members with the same answer: common answers earn less (GAPO,
    Anschel et al. 2025)."""
    same = (
        (answer_S[:, None] == answer_S[None, :]) & (group_S[:, None] == group_S[None, :]) & counted_S[None, :]
    )
    n_same = same.sum(1).to(outcome_S.dtype)
    n = ((group_S[:, None] == group_S[None, :]) & counted_S[None, :]).sum(1).to(outcome_S.dtype)
    return outcome_S * (1.0 - (n_same - 1.0).clamp_min(0.0) / (n - 1.0).clamp_min(1.0))


def improvement_bonus(
    outcome_S: torch.Tensor, first_attempt_S: torch.Tensor, *, alpha: float = 1.0
) -> torch.Tensor:
    """`R + alpha (R - R_first)`: pay for improving on the first attempt of the trajectory (SCoRe,
    arXiv:2409.12917)."""
    return outcome_S + alpha * (outcome_S - first_attempt_S.to(outcome_S.dtype))


def teacher_mean(
    outcome_S: torch.Tensor,
    teacher_logp_N: torch.Tensor,
    logb_N: torch.Tensor,
    layout: Layout,
    *,
    alpha: float = 0.1,
) -> torch.Tensor:
    """`R + alpha mean_t (log pi_T - log pi_b)` (CoDistill-GRPO, Kwon et al., 2026)."""
    return outcome_S + alpha * segment_mean((teacher_logp_N - logb_N).to(outcome_S.dtype), layout)


def turn_rewards(turn_reward_N: torch.Tensor, *, weight: float = 1.0) -> torch.Tensor:
    """`w r_turn` on the action token before the observation it came with."""
    return weight * turn_reward_N


def kl_in_reward(
    logb_N: torch.Tensor, ref_logp_N: torch.Tensor, *, coefficient: float = 0.01
) -> torch.Tensor:
    """`-beta (log pi_b - log pi_ref)` per token, fixed at collection (RLHF, arXiv:1909.08593, 2203.02155)."""
    return -coefficient * (logb_N - ref_logp_N)


def potential_shaping(potential_N: torch.Tensor, layout: Layout, *, weight: float = 1.0) -> torch.Tensor:
    """`w (Phi_{t+1} - Phi_t)`, Phi = 0 after the end: changes no optimal policy (DIVER, arXiv:2509.26209).

    The sum over a trajectory is `-w Phi` of its first token, whatever happened in between.
    """
    next_N = torch.zeros_like(potential_N)
    next_N[:-1] = potential_N[1:]
    last_S = torch.cumsum(layout.lengths_S, 0) - 1
    next_N[last_S[layout.lengths_S > 0]] = 0.0
    return weight * (next_N - potential_N)


def implicit_process(
    prm_logp_N: torch.Tensor, ref_logp_N: torch.Tensor, *, beta: float = 0.05
) -> torch.Tensor:
    """`beta (log pi_phi - log pi_ref)` per token, pi_phi trained online from outcomes (PRIME,
    arXiv:2502.01456)."""
    return beta * (prm_logp_N - ref_logp_N)


def patch_similarity(predicted: str | None, oracle: str) -> float:
    """`SequenceMatcher` ratio of two patches in [0, 1]; -1 for an unusable answer (`None`) (SWE-RL,
    arXiv:2502.18449)."""
    if predicted is None:
        return -1.0
    return difflib.SequenceMatcher(None, predicted, oracle, autojunk=False).ratio()


def multi_file_similarity(predicted: Mapping[str, str] | None, oracle: Mapping[str, str]) -> float:
    """Mean of `patch_similarity` over the union of touched files, a missing one counts 0; -1 for an unusable
    answer."""
    if predicted is None:
        return -1.0
    files = sorted(set(predicted) | set(oracle))
    if not files:
        return 0.0
    both = [f for f in files if f in predicted and f in oracle]
    return sum(patch_similarity(predicted[f], oracle[f]) for f in both) / len(files)


def trajectory_return(
    outcome_S: torch.Tensor, token_reward_N: torch.Tensor | None, layout: Layout
) -> torch.Tensor:
    """`R_s + sum_t r_t`: the scalar that trajectory-level advantages compare, `[S]`."""
    if token_reward_N is None:
        return outcome_S
    return outcome_S + segment_sum(token_reward_N.to(outcome_S.dtype), layout)


def difficulty_budget(
    outcome_S: torch.Tensor,
    reward_S: torch.Tensor,
    length_S: torch.Tensor,
    history_mean_S: torch.Tensor,
    *,
    short: int,
    long: int,
    bonus: float = 0.5,
    correct_above: float = 0.5,
) -> torch.Tensor:
    """`R + bonus [correct and |y| <= short + (1 - p)(long - short)]`, p the prompt's success so far (DAST).

    Prompts that are always solved are to be solved within `short` tokens, those never solved have `long`.
    """
    budget_S = short + (1.0 - history_mean_S.clamp(0.0, 1.0)) * (long - short)
    earns_S = (reward_S > correct_above) & (length_S <= budget_S)
    return outcome_S + bonus * earns_S.to(outcome_S.dtype)


REWARD = table(
    difficulty_budget,
    soft_overlong,
    step_bonus,
    group_length_reward,
    exit_decay,
    weighted_components,
    set_marginal,
    density_weighted,
    frequency_weighted,
    improvement_bonus,
    teacher_mean,
)
TOKEN_REWARD = table(turn_rewards, kl_in_reward, potential_shaping, implicit_process)
