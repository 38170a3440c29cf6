"""Optimizer parts: AdamW on float32 master weights, the rate schedule in optimizer steps, clip-and-step.

The schedule has no state of its own: the rate is a function of the number of optimizer steps taken, which is
the one counter that logs and checkpoints hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from agentrl.errors import ConfigError
from agentrl.learner import parallel

Schedule = Literal["constant", "linear", "cosine"]


def rate_factor(
    step: int, *, schedule: Schedule, warmup_steps: int = 0, total_steps: int | None = None
) -> float:
    """Factor of the learning rate at the optimizer step with this number (the first is 0).

    Linear: from 1 to 0 between the end of warm-up and `total_steps`; cosine likewise along half a period.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    assert total_steps is not None
    share = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return 1.0 - share if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))


def adam(
    modules: Sequence[nn.Module],
    *,
    rate: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
    fused: bool = True,
) -> torch.optim.AdamW:
    """AdamW over everything trainable; decay on matrices only.

    Raises:
        ConfigError: a trainable weight is bfloat16 or float16: its small updates would be rounded away.
    """
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    narrow = sorted({str(p.dtype) for p in parameters if p.dtype in (torch.bfloat16, torch.float16)})
    if narrow:
        raise ConfigError(
            f"Trainable weights are {narrow[0]}: small updates would be rounded away.",
            fix="Load the model in float32 and set compute_dtype = 'bfloat16' for speed.",
        )
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=rate, betas=betas, eps=epsilon, fused=fused
    )


def clip_and_step(
    optimizer: torch.optim.Optimizer, *, rate: float, max_grad_norm: float | None, refuse: bool = False
) -> float | None:
    """Take one step with gradients that are already summed over ranks, then drop them.

    Args:
        optimizer: its weights hold the gradients.
        rate: learning rate of this step.
        max_grad_norm: gradients are scaled down to it.
        refuse: take no step whatever the gradients are.

    Returns:
        the norm before clipping; None when the step was refused or the norm is not finite: nothing has
        changed.
    """
    held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = parallel.grad_norm(held)
    if refuse or not math.isfinite(norm):
        optimizer.zero_grad(set_to_none=True)
        return None
    if max_grad_norm is not None and norm > max_grad_norm:
        for parameter in held:
            parameter.grad.mul_(max_grad_norm / (norm + 1e-6))
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
