"""Skip-observation generalized advantage estimation: rewards and values of action tokens to advantages and
returns.

`delta_i = r_i + gamma * V_{i+1} - V_i`, `A_i = delta_i + gamma * lambda * A_{i+1}`, `R_i = A_i + V_i`
(arXiv:1506.02438), where `i+1` is the next *action* token of the same trajectory whatever lies between: tool
output, a compaction, another branch, another call. `V_i` is read in the state in which `a_i` was chosen.
After the last action the value is 0 if the trajectory was terminated and the critic's value of the final
state if a budget truncated it.

Invariant: the numbers of a trajectory depend on nothing but its own tokens (bit-equal however trajectories
are ordered or packed), because the scan is blocked by the distance from the *end of the trajectory*, never by
the place in the batch. No Python loop runs over tokens: each pass takes `BLOCK` vector steps over all blocks
at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from agentrl.algo.columns import Layout
from agentrl.errors import EvidenceError

BLOCK = 128
"""Tokens per block of the scan. 1 M tokens are 3 levels of at most 128 vector steps each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Advantages for the policy and regression targets for the critic, both float `[N]`, without gradient."""

    advantage_N: torch.Tensor
    returns_N: torch.Tensor


def reverse_scan(x_N: torch.Tensor, coefficient_S: torch.Tensor, lengths_S: torch.Tensor) -> torch.Tensor:
    """`y_i = x_i + c_s * y_{i+1}` inside each trajectory, `y` after its last token = 0.

    Args:
        x_N: float `[N]`.
        coefficient_S: float `[S]`, one constant per trajectory; 0 and 1 are exact, tiny ones only ever
            multiply.
        lengths_S: int64 `[S]`, summing to `N`; 0 is allowed.

    Returns:
        float `[N]`. Work is linear in `N`; the number of vector steps grows with the log of the longest
        trajectory.
    """
    if x_N.numel() == 0:
        return x_N.clone()
    lengths = lengths_S.detach().cpu().numpy()
    n_blocks_S = -(-lengths // BLOCK)
    traj_K = np.repeat(np.arange(lengths.size), n_blocks_S)
    first_S = np.cumsum(n_blocks_S) - n_blocks_S
    nth_K = np.arange(traj_K.size) - first_S[traj_K]  # 0 is the block at the end of the trajectory
    size_K = np.minimum(lengths[traj_K] - nth_K * BLOCK, BLOCK)
    # Longest blocks first, so that at each step the blocks that still have a token are a prefix.
    order_K = np.argsort((BLOCK - size_K).astype(np.uint8), kind="stable")
    end_K = torch.from_numpy((np.cumsum(lengths) - 1)[traj_K] - nth_K * BLOCK)[order_K].to(x_N.device)
    at_least = np.cumsum(np.bincount(size_K, minlength=BLOCK + 1)[::-1])[::-1]
    alive = at_least[1:]  # alive[o]: blocks with more than o tokens
    c_K = coefficient_S.to(x_N)[torch.from_numpy(traj_K)[order_K].to(x_N.device)]

    carry_K = x_N.new_zeros(traj_K.size)
    if int(n_blocks_S.max()) > 1:
        # The value that a block hands to the block before it obeys the same recurrence, one level up: scan
        # those.
        n_full = int(alive[BLOCK - 1])
        handed = x_N.new_zeros(n_full)
        for offset in range(BLOCK):
            handed = handed.mul_(c_K[:n_full]).add_(x_N.index_select(0, end_K[:n_full] - offset))
        out_K = x_N.new_zeros(traj_K.size)
        out_K[torch.from_numpy(order_K[:n_full]).to(x_N.device)] = handed
        # In time order a trajectory's blocks run from its last to its first: level-up sequences are reversed
        # here.
        flip_K = torch.from_numpy(first_S[traj_K] + n_blocks_S[traj_K] - 1 - nth_K).to(x_N.device)
        power_S = coefficient_S.to(x_N) ** BLOCK
        scanned_K = reverse_scan(out_K[flip_K], power_S, torch.from_numpy(n_blocks_S))[flip_K]
        into_K = torch.zeros_like(scanned_K)
        into_K[1:] = scanned_K[:-1]
        into_K[torch.from_numpy(nth_K == 0).to(x_N.device)] = 0.0
        carry_K = into_K[torch.from_numpy(order_K).to(x_N.device)]

    y_N = torch.empty_like(x_N)
    previous = carry_K
    for offset in range(BLOCK):
        n = int(alive[offset])
        if n == 0:
            break
        at = end_K[:n] - offset
        previous = previous[:n].mul_(c_K[:n]).add_(x_N.index_select(0, at))
        y_N.index_copy_(0, at, previous)
    return y_N


def adaptive_lambda(lengths_S: torch.Tensor, alpha: float) -> torch.Tensor:
    """`lambda_s = clamp(1 - 1 / (alpha * l_s), 0, 1)`, `l_s` = trainable tokens of the whole trajectory.

    VAPO, arXiv:2504.05118 eq. 8; SAO uses alpha = 1.5. float64 `[S]`.
    """
    return (1.0 - 1.0 / (alpha * lengths_S.clamp_min(1).to(torch.float64))).clamp(0.0, 1.0)


def gae(
    rewards_N: torch.Tensor,
    values_N: torch.Tensor,
    layout: Layout,
    *,
    gamma: float,
    lambda_policy: float | torch.Tensor,
    lambda_critic: float | torch.Tensor | None = None,
    bootstrap_S: torch.Tensor | None = None,
    truncated_S: torch.Tensor | None = None,
) -> Estimate:
    """Skip-observation GAE over all trajectories of a batch at once.

    Args:
        rewards_N: float `[N]`, rewards already placed on action tokens (`rewards.place`).
        values_N: float `[N]`, critic in the state in which each token was chosen. No gradient flows.
        layout: the trajectories; each must have at least one token.
        gamma: discount per action token.
        lambda_policy: one number, or `[S]` (length-adaptive), for the advantage.
        lambda_critic: the same for the returns; the policy's when None.
        bootstrap_S: float `[S]`, value of the final state; read only where `truncated_S`.
        truncated_S: bool `[S]`; where False the trajectory terminated and the next value is 0.

    Raises:
        EvidenceError: a trajectory without trainable token, a truncated one without bootstrap value, wrong
            shapes, or a value that is not finite.
    """
    n, s = layout.n_tokens, layout.n_trajectories
    if rewards_N.shape != (n,) or values_N.shape != (n,):
        raise EvidenceError(
            f"GAE over {n} tokens got {tuple(rewards_N.shape)} rewards and {tuple(values_N.shape)} values.",
            fix="Pass one of each per action token, in sampled order.",
        )
    empty = torch.nonzero(layout.lengths_S == 0).flatten().tolist()
    if empty:
        raise EvidenceError(
            f"Trajectories {empty[:8]} have no trainable token: their reward has no action to stand on.",
            fix="Remove them from the batch before estimating advantages.",
        )
    dtype = torch.promote_types(torch.promote_types(rewards_N.dtype, values_N.dtype), torch.float32)
    device = values_N.device
    with torch.no_grad():
        rewards_N, values_N = rewards_N.to(device, dtype), values_N.detach().to(dtype)
        last_S = (torch.cumsum(layout.lengths_S, 0) - 1).to(device)
        final_S = values_N.new_zeros(s)
        if truncated_S is not None and bool(truncated_S.any()):
            if bootstrap_S is None:
                raise EvidenceError(
                    f"{int(truncated_S.sum())} trajectories were truncated and have no bootstrap value.",
                    fix="Read the critic on their final states, or set bootstrap=false.",
                )
            final_S = torch.where(truncated_S.to(device), bootstrap_S.to(device, dtype), final_S)
        next_N = torch.empty_like(values_N)
        next_N[:-1] = values_N[1:]
        next_N[last_S] = final_S
        delta_N = rewards_N + gamma * next_N - values_N
        if not bool(torch.isfinite(delta_N).all()):
            raise EvidenceError(
                "A reward or a value of a trainable token is not finite.",
                fix="Find the token that the critic returned NaN for; never train over it.",
            )

        def scan(lam: float | torch.Tensor) -> torch.Tensor:
            lam_S = torch.as_tensor(lam, dtype=dtype, device=device).expand(s)
            return reverse_scan(delta_N, gamma * lam_S, layout.lengths_S)

        advantage_N = scan(lambda_policy)
        same = lambda_critic is None or (
            not isinstance(lambda_critic, torch.Tensor)
            and not isinstance(lambda_policy, torch.Tensor)
            and lambda_critic == lambda_policy
        )
        returns_N = (advantage_N if same or lambda_critic is None else scan(lambda_critic)) + values_N
    return Estimate(advantage_N=advantage_N, returns_N=returns_N)
