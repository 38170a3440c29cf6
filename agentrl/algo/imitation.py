"""The imitation component: raise the log-prob of tokens that are worth copying, whatever their advantage."""

from __future__ import annotations

import torch

from agentrl.algo.axes import table
from agentrl.algo.penalties import Penalty


def nll(logp_N: torch.Tensor, *, coefficient: float = 0.1, on: str = "positive") -> Penalty:
    """`-log pi(a_t)` on positive trajectories (positive-example LM loss, VAPO arXiv:2504.05118 eq. 13; SFT
    with `graded`)."""
    del coefficient, on
    return Penalty(loss_N=-logp_N, value_N=-logp_N.detach())


IMITATION = table(nll)
SCOPES = {
    "trained": "trajectories in the policy loss",
    "graded": "every graded trajectory",
    "positive": "graded trajectories whose raw reward is above 0.5",
    "all_fail": "graded trajectories of groups in which no member's raw reward is above 0.5",
}
"""Values of `on`: which trajectories a teacher or imitation component acts on."""

CORRECT_ABOVE = 0.5
"""A raw reward above this is a success, for scopes."""
