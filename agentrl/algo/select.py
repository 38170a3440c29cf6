"""Axis *select*: which groups and trajectories enter statistics and which enter the loss.

An operator of `SELECT` reads raw rewards, before shaping, and answers two masks: who counts in group
statistics and who is trained. An operator of `PRUNE` runs after the advantage and can only take trajectories
out of the loss. Whoever leaves the loss leaves its numerator and its denominator. Ungraded members are in
neither mask before any operator runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from agentrl.algo.axes import table
from agentrl.algo.columns import group_sum
from agentrl.errors import ConfigError, EvidenceError

SPREAD_TOLERANCE = 1e-6
"""A group whose largest and smallest reward differ by no more than this is zero-variance: float noise is no
signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """bool `[S]` each."""

    counted_S: torch.Tensor
    """Enters group statistics."""
    trained_S: torch.Tensor
    """Enters the loss."""


def group_spread(reward_S: torch.Tensor, group_S: torch.Tensor, counted_S: torch.Tensor) -> torch.Tensor:
    """`max - min` over the counted members of each group, `[G]`; 0 for a group without any."""
    n_groups = int(group_S.max()) + 1 if group_S.numel() else 0
    high = reward_S.new_full((n_groups,), -torch.inf)
    low = reward_S.new_full((n_groups,), torch.inf)
    members, groups = reward_S[counted_S], group_S[counted_S]
    high = high.scatter_reduce(0, groups, members, "amax")
    low = low.scatter_reduce(0, groups, members, "amin")
    return torch.where(torch.isfinite(high), high - low, torch.zeros_like(high))


def everything(counted_S: torch.Tensor) -> Selection:
    """All graded trajectories."""
    return Selection(counted_S=counted_S, trained_S=counted_S)


def mixed_groups(
    reward_S: torch.Tensor,
    group_S: torch.Tensor,
    counted_S: torch.Tensor,
    *,
    max_rounds: int | None = 8,
    at_cap: str = "train",
) -> Selection:
    """Only groups with spread: `max(R) - min(R) > 1e-6` (dynamic sampling, DAPO arXiv:2503.14476 eq. 11).

    `max_rounds` and `at_cap` ("train" or "skip") bound the collection around it, see `next_round`.
    """
    del max_rounds, at_cap
    keep_G = group_spread(reward_S, group_S, counted_S) > SPREAD_TOLERANCE
    return Selection(counted_S=counted_S, trained_S=counted_S & keep_G[group_S])


def next_round(
    *, usable: int, wanted: int, rounds: int, max_rounds: int, at_cap: str
) -> Literal["sample", "train", "skip"]:
    """What dynamic sampling does after `rounds` rounds: never more than `max_rounds`, never an endless loop.

    At the cap it trains on the usable groups there are (`at_cap="train"`), or skips the step; with none it
    skips.
    """
    if max_rounds is None or max_rounds < 1:
        raise ConfigError(
            "Dynamic sampling without a cap can run forever.", fix="Set select.mixed_groups.max_rounds >= 1."
        )
    if usable >= wanted:
        return "train"
    if rounds < max_rounds:
        return "sample"
    return "train" if at_cap == "train" and usable > 0 else "skip"


def max_variance(
    reward_S: torch.Tensor, group_S: torch.Tensor, counted_S: torch.Tensor, *, keep: int
) -> Selection:
    """The `keep` members of each group with the largest reward variance: top `k` and bottom `keep - k`, best
    `k`.

    PODS, arXiv:2504.13818 (the optimum is always such a split). Statistics are taken over the kept subset.
    """
    kept_S = torch.zeros_like(counted_S)
    for group in torch.unique(group_S[counted_S]).tolist():
        members = torch.nonzero(counted_S & (group_S == group)).flatten()
        order = members[torch.argsort(reward_S[members], stable=True)]
        m = min(keep, order.numel())
        splits = [torch.cat([order[: m - k], order[order.numel() - k :]]) for k in range(m + 1)]
        best = max(
            range(m + 1),
            key=lambda k: (float(reward_S[splits[k]].var(correction=0)) if m else 0.0, -abs(2 * k - m)),
        )
        kept_S[splits[best]] = True
    return Selection(counted_S=kept_S, trained_S=kept_S)


def overlong_filter(counted_S: torch.Tensor, truncated_S: torch.Tensor) -> Selection:
    """Truncated trajectories leave the loss and keep their reward in the baseline (DAPO, arXiv:2503.14476
    §3.4)."""
    return Selection(counted_S=counted_S, trained_S=counted_S & ~truncated_S)


def prune_small_advantage(
    advantage_S: torch.Tensor, trained_S: torch.Tensor, group_S: torch.Tensor, *, keep: float = 0.5
) -> torch.Tensor:
    """Keep the `ceil(keep * n)` trajectories of each group with the largest `|A|` (CPPO, arXiv:2503.22342).

    Ties go to the earlier member. bool `[S]`. Statistics were taken before, over all members.
    """
    kept_S = torch.zeros_like(trained_S)
    for group in torch.unique(group_S[trained_S]).tolist():
        members = torch.nonzero(trained_S & (group_S == group)).flatten()
        n = -int(-(keep * members.numel()) // 1)
        order = torch.argsort(advantage_S[members].abs(), descending=True, stable=True)
        kept_S[members[order[:n]]] = True
    return kept_S


def distinct_only(trained_S: torch.Tensor, density_S: torch.Tensor, *, at_most: float = 2.0) -> torch.Tensor:
    """Trajectories whose similarity mass of the other members is at most `at_most` (DaGRPO): near copies with
    different rewards pull one policy in two directions. bool `[S]`; statistics were taken before.
    """
    return trained_S & (density_S <= at_most)


def positive_advantage(advantage_S: torch.Tensor, trained_S: torch.Tensor) -> torch.Tensor:
    """Only trajectories with `A > 0` (rejection sampling as a boundary case)."""
    return trained_S & (advantage_S > 0)


def failure_to_replace(reward_G: Sequence[float | None], *, correct_above: float = 0.5) -> int | None:
    """Index of the member that a stored success replaces: the first graded one of an all-fail group (ARPO,
    arXiv:2505.16282); None when a member succeeded or none is graded. The stored trajectory keeps its own
    behaviour log-probs and versions, so the ratio stays true.
    """
    graded = [i for i, r in enumerate(reward_G) if r is not None]
    if not graded or any(r is not None and r > correct_above for r in reward_G):
        return None
    return graded[0]


def lag(versions: Sequence[int], trainer_version: int) -> int:
    """`trainer - min(version)` over the tokens of a trajectory; a version of the future is an error."""
    if not versions:
        raise EvidenceError(
            "A trajectory without policy versions has no lag.", fix="Exclude it from off-policy recipes."
        )
    if max(versions) > trainer_version:
        raise EvidenceError(
            f"A token was sampled from version {max(versions)}, the trainer is at {trainer_version}.",
            fix="Two runs share a store or a publication was not recorded; stop and check.",
        )
    return trainer_version - min(versions)


def fresh(versions: Sequence[int], trainer_version: int, max_lag: int) -> bool:
    """Admission of a whole trajectory: `lag <= max_lag`, so `max_lag = 0` is exactly on-policy."""
    return lag(versions, trainer_version) <= max_lag


def members_per_group(group_S: torch.Tensor) -> dict[int, int]:
    """Histogram `{group size: groups}` over all members, graded or not."""
    sizes = group_sum(torch.ones_like(group_S), group_S).tolist()
    return {size: sizes.count(size) for size in sorted(set(sizes))}


SELECT = table(everything, mixed_groups, max_variance, overlong_filter)
PRUNE = table(prune_small_advantage, distinct_only, positive_advantage)
