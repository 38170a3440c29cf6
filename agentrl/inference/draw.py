"""Logits to sampled ids and the log-prob of each under the distribution that it was drawn from.

A row is drawn by inverting its cumulative distribution at one uniform number (float64): a few vector
operations for the whole batch, one random number per row. The log-prob is float32 `log_softmax(logits / T)`
over what truncation left; for a greedy row (T = 0) it is that of the untouched logits, which the caller
marks as raw.

Legend: `A` rows, `V` vocabulary, `K` stop ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Draw:
    """How each row of a batch is sampled, as tensors. None means that no row needs it."""

    temperature_A1: Tensor | None
    greedy_A: Tensor | None
    stops_AK: Tensor
    seeded: tuple[tuple[int, torch.Generator], ...]
    """Rows with randomness of their own."""
    truncated: tuple[tuple[int, int, float], ...]
    """(row, top_k, top_p)."""

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        generators: Sequence[torch.Generator | None],
        *,
        stop_token_ids: tuple[int, ...],
        device: torch.device,
    ) -> Draw:
        """From each row's parameters; `stop_token_ids` end every row."""
        stops = [(*stop_token_ids, *p.stop_token_ids) for p in params]
        width = max(1, *(len(row) for row in stops))
        return cls(
            temperature_A1=None
            if all(p.temperature in (0.0, 1.0) for p in params)
            else torch.tensor([[p.temperature or 1.0] for p in params], device=device, dtype=torch.float32),
            greedy_A=None
            if all(p.temperature > 0 for p in params)
            else torch.tensor([p.temperature == 0 for p in params], device=device),
            stops_AK=torch.tensor([[*row, *([-1] * (width - len(row)))] for row in stops], device=device),
            seeded=tuple((i, g) for i, g in enumerate(generators) if g is not None),
            truncated=tuple(
                (i, p.top_k, p.top_p)
                for i, p in enumerate(params)
                if p.temperature > 0 and (p.top_k or p.top_p < 1)
            ),
        )

    def sample(self, logits_AV: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Ids `[A]` and their log-probs `[A]`. Rows whose logits are not finite get a log-prob that is
        not."""
        logits_AV = logits_AV.float()
        if self.temperature_A1 is not None:
            logits_AV = logits_AV / self.temperature_A1
        if self.truncated:
            logits_AV = logits_AV.clone()
            for i, top_k, top_p in self.truncated:
                logits_AV[i] = truncated(logits_AV[i], top_k, top_p)
        logp_AV = torch.log_softmax(logits_AV, dim=-1)
        cumulative_AV = logp_AV.exp().cumsum(dim=-1, dtype=torch.float64)
        uniform_A1 = torch.rand(
            (len(logp_AV), 1), dtype=torch.float64, device=logp_AV.device, generator=generator
        )
        for i, own in self.seeded:
            uniform_A1[i] = torch.rand(1, dtype=torch.float64, device=logp_AV.device, generator=own)
        # The first id whose cumulative mass lies above the number: never one of probability zero.
        ids_A = torch.searchsorted(cumulative_AV, uniform_A1 * cumulative_AV[:, -1:], right=True)[:, 0]
        ids_A = ids_A.clamp_(max=logp_AV.shape[1] - 1)
        if self.greedy_A is not None:
            ids_A = torch.where(self.greedy_A, logp_AV.argmax(dim=-1), ids_A)
        return ids_A, logp_AV.gather(1, ids_A[:, None])[:, 0]

    def stopped(self, ids_A: Tensor) -> Tensor:
        """Which rows drew one of their stop ids, `[A]`."""
        return (ids_A[:, None] == self.stops_AK).any(dim=1)


def truncated(logits_V: Tensor, top_k: int, top_p: float) -> Tensor:
    """Logits with everything outside top-k, then outside the smallest set of mass `top_p`, at minus
    infinity."""
    ordered, order = logits_V.sort(descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k:
        keep[top_k:] = False
    if top_p < 1:
        mass = torch.softmax(ordered.masked_fill(~keep, -torch.inf), -1).cumsum(-1)
        keep[1:] &= mass[:-1] < top_p
    return torch.full_like(logits_V, -torch.inf).scatter(0, order[keep], ordered[keep])
