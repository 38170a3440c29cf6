"""The one layout that all operators work on: action tokens, gathered.

`N` action (sampled, trainable) tokens of a set of trajectories stand in one flat row each tensor, trajectory after
trajectory, inside a trajectory in the order in which they were *sampled* (over all its calls and branches). Prompt,
observation and padding tokens do not exist here, so no operator can leak them into a mean, a ratio or a carry.
Legend: `_N` per action token, `_S` per trajectory, `_G` per group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which trajectory, turn and group each action token belongs to.

    Worked example: two trajectories of 2 and 3 action tokens in one group: `lengths_S = [2, 3]`,
    `traj_N = [0, 0, 1, 1, 1]`, `group_S = [0, 0]`.
    """

    lengths_S: torch.Tensor
    """int64 `[S]`: action tokens of each trajectory (0 is allowed only where an operator says so)."""
    group_S: torch.Tensor
    """int64 `[S]`: group index, 0-based and dense."""
    turn_N: torch.Tensor
    """int64 `[N]`: turn index inside the trajectory, non-decreasing in each trajectory."""

    @property
    def traj_N(self) -> torch.Tensor:
        return torch.repeat_interleave(torch.arange(self.lengths_S.numel()), self.lengths_S)

    @property
    def n_tokens(self) -> int:
        return int(self.lengths_S.sum())

    @property
    def n_trajectories(self) -> int:
        return self.lengths_S.numel()

    @property
    def n_groups(self) -> int:
        return int(self.group_S.max()) + 1 if self.group_S.numel() else 0

    @staticmethod
    def of(
        lengths: list[int] | torch.Tensor,
        groups: list[int] | torch.Tensor | None = None,
        turns: list[int] | torch.Tensor | None = None,
    ) -> Layout:
        """From plain lists; one group and one turn unless said."""
        lengths_S = torch.as_tensor(lengths, dtype=torch.int64)
        group_S = torch.zeros_like(lengths_S) if groups is None else torch.as_tensor(groups, dtype=torch.int64)
        n = int(lengths_S.sum())
        turn_N = torch.zeros(n, dtype=torch.int64) if turns is None else torch.as_tensor(turns, dtype=torch.int64)
        if group_S.shape != lengths_S.shape or turn_N.shape != (n,):
            raise ValueError(f"layout of {lengths_S.numel()} trajectories and {n} tokens does not fit its columns")
        return Layout(lengths_S=lengths_S, group_S=group_S, turn_N=turn_N)


def segment_sum(values_N: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Sum over the action tokens of each trajectory, `[S]`, in the dtype of the values."""
    out = values_N.new_zeros(layout.n_trajectories)
    return out.index_add(0, layout.traj_N.to(values_N.device), values_N)


def segment_mean(values_N: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Mean over the action tokens of each trajectory, `[S]`; 0 for a trajectory without tokens."""
    lengths = layout.lengths_S.to(values_N.device)
    return segment_sum(values_N, layout) / lengths.clamp_min(1).to(values_N.dtype)
