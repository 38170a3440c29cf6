"""Columns that only a model can fill: one pass without gradients over a batch, before the update.

Critic values and end values, log-probs of the policy before it moves (proximal), of a frozen reference and of
a teacher. Each rank computes its micro-batches and the columns are added over ranks, so that every rank
prepares the same batch. Tokens that no pass covers stay NaN: they are not valid, and a NaN that is needed
raises in `prepare`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from agentrl.algo.objective import Columns
from agentrl.learner import parallel
from agentrl.learner.batch import MicroBatch as MicroBatch
from agentrl.learner.batch import Packing, for_ranks, pack
from agentrl.learner.evidence import Batch

Pass = Callable[[MicroBatch], Mapping[str, torch.Tensor]]
"""A micro-batch on the device to columns by name: `*_N` in its `_M` order, `*_S` per trajectory."""


def fill(batch: Batch, passes: list[Pass], packing: Packing, device: torch.device) -> Columns:
    """The batch's columns with what the passes compute on every trajectory that has a valid token.

    A column that the batch already has is left as it is.
    """
    columns, layout = batch.columns, batch.layout
    if not passes:
        return columns
    assert columns.valid_N is not None
    valid_S = torch.bincount(layout.traj_N[columns.valid_N], minlength=layout.n_trajectories) > 0
    indices = torch.nonzero(valid_S).flatten()
    micro = pack(batch.rows, packing, indices=indices.tolist(), groups=layout.group_S.tolist())
    found: dict[str, torch.Tensor] = {}
    for one in for_ranks(micro, parallel.world())[parallel.rank()]:
        at_S = torch.tensor(one.trajectories_S, dtype=torch.int64)
        at_N = layout.tokens_of(at_S)
        with torch.no_grad():
            for compute in passes:
                for name, value in compute(one.to(device)).items():
                    of_tokens = name.endswith("_N")
                    size = layout.n_tokens if of_tokens else layout.n_trajectories
                    into = found.setdefault(name, torch.zeros(size, dtype=torch.float64))
                    into[at_N if of_tokens else at_S] = value.to("cpu", torch.float64)
    covered_N = torch.zeros(layout.n_tokens, dtype=torch.bool)
    covered_N[layout.tokens_of(indices)] = True
    for name, value in found.items():
        parallel.sum_tensor(value)
        value[~(covered_N if name.endswith("_N") else valid_S)] = math.nan
    new: Any = {k: v for k, v in found.items() if k not in columns.present}
    return replace(columns, **new)
