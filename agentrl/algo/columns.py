"""The one layout that all operators work on: action tokens, gathered.

`N` action (sampled, trainable) tokens of a set of trajectories stand in one flat row each tensor, trajectory
after trajectory, inside a trajectory in the order in which they were *sampled* (over all its calls and
branches). Prompt, observation and padding tokens do not exist here, so no operator can leak them into a mean,
a ratio or a carry. Legend: `_N` per action token, `_S` per trajectory, `_G` per group, `_U` per turn (of all
trajectories, in order).
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
        every_S = torch.arange(self.lengths_S.numel(), device=self.lengths_S.device)
        return torch.repeat_interleave(every_S, self.lengths_S)

    @property
    def n_tokens(self) -> int:
        return self.turn_N.numel()

    @property
    def n_trajectories(self) -> int:
        return self.lengths_S.numel()

    @property
    def n_groups(self) -> int:
        return int(self.group_S.max()) + 1 if self.group_S.numel() else 0

    @property
    def start_S(self) -> torch.Tensor:
        """int64 `[S]`: position of the first action token of each trajectory."""
        return torch.cumsum(self.lengths_S, 0) - self.lengths_S

    @property
    def turn_starts_N(self) -> torch.Tensor:
        """bool `[N]`: the first action token of a turn."""
        first_N = torch.zeros_like(self.turn_N, dtype=torch.bool)
        if self.n_tokens:
            traj_N = self.traj_N
            first_N[0] = True
            first_N[1:] = (self.turn_N[1:] != self.turn_N[:-1]) | (traj_N[1:] != traj_N[:-1])
        return first_N

    @property
    def unit_N(self) -> torch.Tensor:
        """int64 `[N]`: index of the turn over all trajectories, 0-based and dense (`U` turns in order)."""
        return torch.cumsum(self.turn_starts_N.to(torch.int64), 0) - 1

    @staticmethod
    def of(
        lengths: list[int] | torch.Tensor,
        groups: list[int] | torch.Tensor | None = None,
        turns: list[int] | torch.Tensor | None = None,
    ) -> Layout:
        """From plain lists; one group and one turn unless said. `ValueError` where the columns do not fit."""
        lengths_S = torch.as_tensor(lengths, dtype=torch.int64)
        group_S = (
            torch.zeros_like(lengths_S) if groups is None else torch.as_tensor(groups, dtype=torch.int64)
        )
        n = int(lengths_S.sum())
        turn_N = (
            torch.zeros(n, dtype=torch.int64) if turns is None else torch.as_tensor(turns, dtype=torch.int64)
        )
        if group_S.shape != lengths_S.shape or turn_N.shape != (n,):
            raise ValueError(
                f"layout of {lengths_S.numel()} trajectories and {n} tokens does not fit its columns"
            )
        layout = Layout(lengths_S=lengths_S, group_S=group_S, turn_N=turn_N)
        if n > 1:
            falls_N = (turn_N[1:] < turn_N[:-1]) & ~layout._borders()
            if bool(falls_N.any()):
                raise ValueError(
                    "turn_N must not decrease inside a trajectory: order tokens as they were sampled"
                )
        return layout

    def _borders(self) -> torch.Tensor:
        traj_N = self.traj_N
        return traj_N[1:] != traj_N[:-1]

    def keep(self, keep_N: torch.Tensor) -> Layout:
        """The layout of only the tokens where bool `keep_N` holds. Every trajectory stays, perhaps with no
        token."""
        lengths_S = torch.zeros_like(self.lengths_S).index_add(0, self.traj_N, keep_N.to(torch.int64))
        return Layout(lengths_S=lengths_S, group_S=self.group_S, turn_N=self.turn_N[keep_N])

    def tokens_of(self, indices_S: torch.Tensor) -> torch.Tensor:
        """int64: positions of all tokens of the given trajectories, in the given order."""
        lengths = self.lengths_S[indices_S]
        shift = self.start_S[indices_S] - (torch.cumsum(lengths, 0) - lengths)
        return torch.arange(int(lengths.sum())) + torch.repeat_interleave(shift, lengths)

    def take(self, indices_S: torch.Tensor) -> Layout:
        """The layout of the given trajectories, in the given order. Group numbers are made dense again."""
        _, group_S = torch.unique(self.group_S[indices_S], return_inverse=True)
        return Layout(
            lengths_S=self.lengths_S[indices_S],
            group_S=group_S,
            turn_N=self.turn_N[self.tokens_of(indices_S)],
        )


def segment_sum(values_N: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Sum over the action tokens of each trajectory, `[S]`, in the dtype of the values."""
    out = values_N.new_zeros(layout.n_trajectories)
    return out.index_add(0, layout.traj_N.to(values_N.device), values_N)


def segment_mean(values_N: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Mean over the action tokens of each trajectory, `[S]`; 0 for a trajectory without tokens."""
    lengths = layout.lengths_S.to(values_N.device)
    return segment_sum(values_N, layout) / lengths.clamp_min(1).to(values_N.dtype)


def turn_sum(values_N: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Sum over the action tokens of each turn, `[U]`."""
    unit_N = layout.unit_N.to(values_N.device)
    n_units = int(unit_N[-1]) + 1 if unit_N.numel() else 0
    return values_N.new_zeros(n_units).index_add(0, unit_N, values_N)


def group_sum(values_S: torch.Tensor, group_S: torch.Tensor) -> torch.Tensor:
    """Sum over the members of each group, `[G]`."""
    n_groups = int(group_S.max()) + 1 if group_S.numel() else 0
    return values_S.new_zeros(n_groups).index_add(0, group_S, values_S)
