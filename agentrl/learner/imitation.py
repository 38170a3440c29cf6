"""Imitation: cross-entropy on the sampled tokens of demonstrations, as mini-batches of whole trajectories.

The loss of a mini-batch is the mean over all its action tokens, over all micro-batches and ranks. What counts
as an action is what the records say was sampled; log-probs are not needed. Temperature is 1: the demonstrated
text is the target, not a sampler's distribution.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from agentrl.errors import EvidenceError
from agentrl.learner import parallel
from agentrl.learner.batch import Packing, for_ranks, pack
from agentrl.learner.model import Policy, device_of
from agentrl.learner.optimizer import Schedule, clip_and_step, rate_factor
from agentrl.learner.samples import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ImitationProgress:
    """Handed to the callback after every optimizer step of `imitate`."""

    epoch: int
    step: int
    """Of this call, from 1."""
    steps: int
    """Planned in this call."""
    loss: float
    """Mean cross-entropy per token of the mini-batch before the step, nats."""
    accuracy: float
    """Share of demonstrated tokens whose probability is above one half."""
    grad_norm: float
    tokens_per_s: float


def imitate(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    rows: Sequence[Rows],
    *,
    rate: float,
    packing: Packing,
    epochs: int = 1,
    mini_batch: int = 16,
    schedule: Schedule = "linear",
    warmup_steps: int = 0,
    max_grad_norm: float | None = 1.0,
    seed: int = 0,
    sharded: bool = False,
    progress: Callable[[ImitationProgress], None] | None = None,
) -> list[float]:
    """Train on demonstrations; each epoch passes over all rows in an order made from `(seed, epoch)`.

    Returns:
        mean cross-entropy per token before each optimizer step, nats.

    Raises:
        EvidenceError: nothing to imitate, or a loss or gradient that is not finite (that step changed
            nothing).
    """
    if not rows:
        raise EvidenceError("Nothing to imitate: no trajectories.", fix="Collect demonstrations first.")
    device = device_of(policy)
    wanted = [torch.from_numpy(~one.phantom_N) for one in rows]
    per_epoch = math.ceil(len(rows) / mini_batch)
    losses: list[float] = []
    for epoch in range(epochs):
        order = np.random.default_rng((seed, epoch)).permutation(len(rows))
        for part in np.array_split(order, per_epoch):
            started = time.perf_counter()
            members = sorted(int(i) for i in part)
            micro = pack(rows, packing, indices=members)
            count = sum(int(wanted[i].sum()) for i in members)
            if count == 0:
                raise EvidenceError(
                    "A mini-batch of demonstrations has no action token.",
                    fix="Drop demonstrations with ids outside of the tokenizer, or make mini_batch larger.",
                )
            optimizer.zero_grad(set_to_none=True)
            sums = torch.zeros(2, dtype=torch.float64)
            mine = for_ranks(micro, parallel.world())[parallel.rank()]
            for one in mine:
                with parallel.reduce_only(policy, last=one is mine[-1], sharded=sharded):
                    out = policy(one.to(device), temperature=False)
                    keep = [wanted[i] for i in one.trajectories_S]
                    mask_M = (torch.cat(keep) if keep else torch.zeros(0, dtype=torch.bool)).to(device)
                    chosen = out.log_prob_M[mask_M]
                    value = -chosen.sum() / count if keep else out.anchor * 0.0
                    torch.autograd.backward(value)
                seen = chosen.detach().to("cpu", torch.float64)
                sums += torch.stack([-seen.sum(), (seen > math.log(0.5)).sum().double()])
            parallel.sum_tensor(sums)
            if not sharded:
                parallel.sum_gradients(policy.parameters())
            factor = rate_factor(
                len(losses), schedule=schedule, warmup_steps=warmup_steps, total_steps=per_epoch * epochs
            )
            finite = math.isfinite(float(sums[0]))
            norm = clip_and_step(
                optimizer, rate=rate * factor, max_grad_norm=max_grad_norm, refuse=not finite
            )
            if norm is None:
                raise EvidenceError(
                    "Imitation: the loss or its gradient is not finite; this step changed nothing.",
                    fix="Lower the learning rate, or look for NaN in the loaded weights.",
                )
            losses.append(float(sums[0]) / count)
            if progress is not None:
                progress(
                    ImitationProgress(
                        epoch=epoch,
                        step=len(losses),
                        steps=per_epoch * epochs,
                        loss=losses[-1],
                        accuracy=float(sums[1]) / count,
                        grad_norm=norm,
                        tokens_per_s=sum(m.n_tokens for m in micro) / (time.perf_counter() - started),
                    )
                )
    return losses
