"""The critic: a value of the state in which each action was chosen, and of the state a budget cut off.

`V_i = V(s_i)` is read where the policy's distribution of `a_i` is read (entry t, tokens < t), so the value of
the first action after an observation already includes the observation. The end value of a truncated
trajectory is read after its last sampled token.

A separate critic is a copy of the policy's trunk with a linear head; a shared one is a head on the policy's
own hidden states. Either starts as a constant: the head's weights are zero and its bias gives the mean
return, so the first advantages are rewards minus their mean, not noise. A classification head (HL-Gauss,
arXiv:2403.03950) has `bins` outputs over `[low, high]`. Losses live in `agentrl.algo.critic_losses`, targets
in `agentrl.algo.gae`, diagnostics in `agentrl.algo.diagnostics`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from agentrl.algo.critic_losses import hl_gauss_targets, hl_gauss_value
from agentrl.errors import ConfigError
from agentrl.learner.batch import MicroBatch
from agentrl.learner.model import head_weight, trunk, trunk_states


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """One output (regression), or `bins` logits over `[low, high]`."""

    bins: int | None = None
    low: float = 0.0
    high: float = 1.0
    sigma: float = 0.0075

    def __post_init__(self) -> None:
        if self.bins is not None and (self.bins < 2 or not self.low < self.high):
            raise ConfigError(f"A value head of {self.bins} bins over [{self.low}, {self.high}].")


class ValueHead(nn.Module):
    """Hidden states to live values: `[N]`, or logits `[N, B]` for a classification head."""

    def __init__(self, width: int, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.linear = nn.Linear(width, shape.bins or 1)
        self.started: torch.Tensor
        self.register_buffer("started", torch.tensor(False))
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def start_at(self, mean_return: float) -> None:
        """Make every value the mean return, once: later calls change nothing."""
        if bool(self.started):
            return
        with torch.no_grad():
            if self.shape.bins is None:
                self.linear.bias.fill_(mean_return)
            else:
                one = torch.tensor([mean_return], dtype=torch.float64)
                # Wide enough for the mean to lie between bins: half a bin at least.
                width = (self.shape.high - self.shape.low) / self.shape.bins
                mass = hl_gauss_targets(
                    one,
                    bins=self.shape.bins,
                    low=self.shape.low,
                    high=self.shape.high,
                    sigma=max(self.shape.sigma, width),
                )
                self.linear.bias.copy_((mass[0] + 1e-6).log())
            self.started.fill_(True)

    def forward(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(hidden_ND.to(self.linear.weight.dtype))
        return out if self.shape.bins is not None else out.sum(dim=-1)

    def scalar(self, live: torch.Tensor) -> torch.Tensor:
        """`[N]` values out of what `forward` returned."""
        if self.shape.bins is None:
            return live
        return hl_gauss_value(live, low=self.shape.low, high=self.shape.high)


class Critic(nn.Module):
    """A separate value model: a copy of a policy's trunk and a head."""

    def __init__(
        self,
        model: Any,
        shape: HeadShape | None = None,
        *,
        compute_dtype: torch.dtype | None = None,
        freeze_attention: bool = False,
    ) -> None:
        """Copy the trunk of `model`, which has its packed attention set (`model.Policy` does that).

        Args:
            model: the policy's transformers model; it is not changed.
            shape: of the head.
            compute_dtype: bfloat16 runs the trunk under autocast.
            freeze_attention: attention weights take no gradient (SAO).
        """
        super().__init__()
        self.trunk = copy.deepcopy(trunk(model))
        self.head = ValueHead(head_weight(model).shape[1], shape or HeadShape())
        self.head.to(head_weight(model).device, head_weight(model).dtype)
        self.compute_dtype = compute_dtype
        for name, parameter in self.trunk.named_parameters():
            parameter.requires_grad_(not (freeze_attention and "attn" in name))

    def forward(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`(live_M, end_S, anchor)`: live values (or logits) of the actions' states, values of the end
        states, and a scalar on the graph of every hidden state (see `model.Outputs`)."""
        hidden_WD = trunk_states(self.trunk, micro, self.compute_dtype)
        live_M = self.head(hidden_WD.index_select(0, micro.predict_M))
        end_S = self.head.scalar(self.head(hidden_WD.index_select(0, micro.end_S)))
        return live_M, end_S, hidden_WD[0, 0] + live_M[:0].sum()
