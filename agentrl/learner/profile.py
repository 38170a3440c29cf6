"""What an update cost: operations of the model, the share of the device's peak, peak memory.

Operations are those of the *model* (arXiv:2204.02311, appendix B): forward and backward of the tokens that
were computed, 6 per weight and token in the layers, 6 per weight of the output head and action, attention by
the keys that each token sees. Recomputed activations do not count, so gradient checkpointing lowers the
utilisation, as it should. The peak is not a table of products: it is what a large matrix product reaches
here, measured once per process. The passes of a separate critic count as time, not as operations.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from agentrl.learner.batch import MicroBatch
from agentrl.learner.model import causal_model, head_weight, trunk

PROBE = 1024
"""Side of the square matrices that measure the peak of a CPU; eight times that on a GPU."""
PROBE_REPEATS = 4


def layer_weights(model: Any) -> int:
    """Weights of the trunk that multiply every token: all matrices but the input embedding."""
    embedding = causal_model(model).get_input_embeddings().weight
    return sum(p.numel() for p in trunk(model).parameters() if p.dim() >= 2 and p is not embedding)


def attended(micro: MicroBatch) -> int:
    """Pairs of a token and a key it sees, over the micro-batch."""
    if micro.blocks is None:
        rows, width = micro.ids_BL.shape
        return rows * width * (width + 1) // 2
    ends: list[int] = []
    pairs = 0
    for block in micro.blocks:
        length = block.end - block.start
        before = ends[block.parent] if block.parent >= 0 else 0
        ends.append(before + length)
        pairs += length * before + length * (length + 1) // 2
    return pairs


def operations(model: Any, micro: Iterable[MicroBatch]) -> float:
    """Floating-point operations of one forward and backward pass over each of the micro-batches."""
    config = causal_model(model).config
    heads = config.num_attention_heads
    head_width = getattr(config, "head_dim", None) or config.hidden_size // heads
    head, in_layers = head_weight(model).numel(), layer_weights(model)
    total = 0.0
    for one in micro:
        total += 6.0 * in_layers * one.width + 6.0 * head * one.n_actions
        total += 12.0 * config.num_hidden_layers * heads * head_width * attended(one)
    return total


@functools.lru_cache(maxsize=8)
def peak_rate(device_type: str, dtype: torch.dtype) -> float:
    """Operations per second of a square matrix product on this device: the best of a few."""
    device = torch.device(device_type)
    size = PROBE * 8 if device_type == "cuda" else PROBE
    a = torch.ones(size, size, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(PROBE_REPEATS):
        _settle(device)
        began = time.perf_counter()
        torch.mm(a, a)
        _settle(device)
        best = min(best, time.perf_counter() - began)
    return 2.0 * size**3 / best


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak_memory_mib(device: torch.device) -> float | None:
    """Largest memory so far: of the device's tensors, or of this process on a CPU; None where nobody
    knows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    found = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
    return int(found[0].split()[1]) / 1024 if found else None


def profile(
    model: Any, micro: list[MicroBatch], *, seconds: float, compute: torch.dtype | None
) -> dict[str, float]:
    """`profile/*` of one update of this process.

    Args:
        model: the policy's transformers model.
        micro: micro-batches whose forward and backward were run here, once for each time.
        seconds: of their forward and backward.
        compute: dtype of the matrix products; None is that of the weights.

    Returns:
        `profile/operations`, and where they can be known `profile/operations_per_s`, `profile/mfu` (share of
        the measured peak, in [0, 1] up to noise) and `profile/peak_memory_mib`.
    """
    total = operations(model, micro)
    facts = {"profile/operations": total}
    weight = head_weight(model)
    if seconds > 0 and total > 0:
        facts["profile/operations_per_s"] = total / seconds
        facts["profile/mfu"] = total / seconds / peak_rate(weight.device.type, compute or weight.dtype)
    memory = peak_memory_mib(weight.device)
    return facts if memory is None else facts | {"profile/peak_memory_mib": memory}
