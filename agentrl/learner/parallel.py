"""What ranks say to each other: sums of tensors, of gradients, of plain numbers. One process: nothing at all.

Every rank sees all trajectories of a step, prepares the same columns with the same global denominators, and
computes its share of the micro-batches; gradients are *summed*, never averaged. So one rank and many give the
same step up to the order of floating-point sums.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from agentrl.errors import ConfigError, EvidenceError

BUCKET_ELEMENTS = 32 * 2**20
"""Gradients are summed in flat buffers of at most this many elements."""


def rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


def world() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


def sum_tensor(value: torch.Tensor) -> torch.Tensor:
    """Sum over ranks, in place; returned for convenience."""
    if world() > 1:
        distributed.all_reduce(value)
    return value


def sum_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Sum `.grad` over ranks; a rank without a gradient counts as zeros."""
    if world() == 1:
        return
    bucket: list[torch.Tensor] = []
    filled = 0
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        bucket.append(parameter.grad)
        filled += parameter.grad.numel()
        if filled >= BUCKET_ELEMENTS:
            _sum_bucket(bucket)
            bucket, filled = [], 0
    if bucket:
        _sum_bucket(bucket)


def _sum_bucket(gradients: list[torch.Tensor]) -> None:
    flat = torch.cat([g.reshape(-1) for g in gradients])
    distributed.all_reduce(flat)
    at = 0
    for gradient in gradients:
        gradient.copy_(flat[at : at + gradient.numel()].view_as(gradient))
        at += gradient.numel()


def gather_objects(value: Any) -> list[Any]:
    """The value of every rank, in rank order."""
    if world() == 1:
        return [value]
    out: list[Any] = [None] * world()
    distributed.all_gather_object(out, value)
    return out


def require_same(what: str, value: str) -> None:
    """`EvidenceError` if ranks disagree on `value`."""
    values = gather_objects(value)
    if len(set(values)) > 1:
        raise EvidenceError(
            f"Ranks disagree on {what}.", fix="Give every rank the same groups in the same order."
        )


def grad_norm(parameters: list[torch.nn.Parameter]) -> float:
    """2-norm of all gradients, over all shards."""
    if not parameters:
        return 0.0
    total = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    full = getattr(total, "full_tensor", None)
    return float(full() if full is not None else total)


def broadcast(modules: Iterable[torch.nn.Module]) -> None:
    """Make every rank start from rank 0's weights."""
    if world() == 1:
        return
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            distributed.broadcast(tensor.detach(), 0)


def shard(module: torch.nn.Module) -> None:
    """FSDP2: shard each decoder layer and the rest, and sum gradients over ranks instead of averaging
    them."""
    if not distributed.is_initialized():
        raise ConfigError(
            "shard = true needs several ranks.", fix="Start with torchrun, or set shard = false."
        )
    for layer in module.modules():
        if isinstance(layer, torch.nn.ModuleList) and len(layer) > 1:
            for one in layer:
                fully_shard(one)
    fully_shard(module)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


@contextlib.contextmanager
def reduce_only(module: torch.nn.Module, *, last: bool, sharded: bool) -> Iterator[None]:
    """Let a sharded module reduce its gradients only in the last micro-batch of a step."""
    if sharded:
        assert isinstance(module, FSDPModule)
        module.set_requires_gradient_sync(last)
    yield


# ---------------------------------------------------------------------------------------- whole states


def full_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The whole state of a module; shards are gathered (every rank calls, every rank gets it)."""
    if not any(isinstance(p, DTensor) for p in module.parameters()):
        return module.state_dict()
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in module.state_dict().items()
    }


def load_full_state(module: torch.nn.Module, state: dict[str, Any], sharded: bool) -> None:
    """Inverse of `full_state`."""
    if sharded:
        set_model_state_dict(module, state, options=StateDictOptions(full_state_dict=True))
    else:
        module.load_state_dict(state)


def full_optimizer_state(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, sharded: bool
) -> dict[str, Any]:
    """The whole state of an optimizer."""
    if sharded:
        return get_optimizer_state_dict(module, optimizer, options=StateDictOptions(full_state_dict=True))
    return optimizer.state_dict()


def load_full_optimizer_state(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], sharded: bool
) -> None:
    """Inverse of `full_optimizer_state`."""
    if sharded:
        set_optimizer_state_dict(module, optimizer, state, options=StateDictOptions(full_state_dict=True))
    else:
        optimizer.load_state_dict(state)


def from_rank_0(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    return gather_objects(value)[0]
