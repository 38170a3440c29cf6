"""Rows of many trajectories to micro-batches of token tensors, by token budget.

A micro-batch holds *whole* trajectories (all their rows), so that a sequence-level ratio or a per-trajectory
mean sees everything it speaks about. Attention is decided by structure alone: blocks and lengths, never by
comparing ids with a padding id. Three layouts, one result:

- `packed`: rows stand one after another in a single width; each attends to itself only. No padding.
- `packed` with `share_prefixes`: token prefixes that rows (branches of one trajectory, members of one group)
  have in common are computed once; a block attends to its ancestors and, causally, to itself.
- `padded`: rows of similar length under each other, padded on the right; causal attention alone keeps padding
  out.

Everything is deterministic: the same rows and settings give the same micro-batches on every rank. What this
module does not do: choose trajectories, normalise losses (denominators are global and live in
`agentrl.algo`).

Legend: `_N` action tokens of the batch in the flat order of `agentrl.algo.columns.Layout`, `_M` those of one
micro-batch, `_S` trajectories, `_W` tokens of a micro-batch laid out flat (`B * L` in the padded layout).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch

from agentrl.errors import ConfigError
from agentrl.learner.samples import IntArray, Rows

LayoutName = Literal["packed", "padded"]

MIN_SHARED_TOKENS = 8
"""A common prefix shorter than this is not split off: a block costs more than it saves."""


@dataclass(frozen=True, slots=True)
class Block:
    """Tokens `start` to `end` of the packed width, following the tokens of block `parent` (-1: they begin a
    row).

    Parents stand before their children.
    """

    start: int
    end: int
    parent: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward pass over whole trajectories.

    Entry t speaks of predicting token t from tokens < t: `predict_M` holds the flat index of the token
    *before* each action, whose hidden state gives the action's distribution and the value of the state it was
    chosen in.
    """

    trajectories_S: tuple[int, ...]
    """Indices into the batch's rows; `_M` columns follow this order, then sampled order. Empty for a
    dummy."""
    ids_BL: torch.Tensor
    positions_BL: torch.Tensor
    """Position of each token in its row; int64."""
    blocks: tuple[Block, ...] | None
    """Packed structure; None: rows of the padded layout, plain causal attention."""
    predict_M: torch.Tensor
    target_M: torch.Tensor
    temperature_M: torch.Tensor
    """float32; 1 where the token is not valid evidence of a sampled distribution."""
    end_S: torch.Tensor
    """Flat index of the last token of each trajectory's end state."""
    n_tokens: int
    """Tokens computed, padding excluded."""
    n_row_tokens: int
    """Tokens of all rows; larger than `n_tokens` where prefixes are shared."""

    @property
    def width(self) -> int:
        """Tokens computed, padding included."""
        return self.ids_BL.numel()

    @property
    def n_actions(self) -> int:
        return self.target_M.numel()

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch with its tensors on `device`."""
        if self.ids_BL.device == torch.device(device):
            return self
        return MicroBatch(
            trajectories_S=self.trajectories_S,
            ids_BL=self.ids_BL.to(device),
            positions_BL=self.positions_BL.to(device),
            blocks=self.blocks,
            predict_M=self.predict_M.to(device),
            target_M=self.target_M.to(device),
            temperature_M=self.temperature_M.to(device),
            end_S=self.end_S.to(device),
            n_tokens=self.n_tokens,
            n_row_tokens=self.n_row_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How rows become micro-batches. `token_budget` bounds the tokens computed in one pass; a single
    trajectory above it gets a pass of its own, it is never cut."""

    token_budget: int = 4096
    layout: LayoutName = "packed"
    share_prefixes: bool = False

    def __post_init__(self) -> None:
        if self.token_budget < 1:
            raise ConfigError(f"token_budget must be positive, not {self.token_budget}.")
        if self.share_prefixes and self.layout != "packed":
            raise ConfigError("share_prefixes needs layout = 'packed'.", fix="Set layout to 'packed'.")


def pack(
    rows: Sequence[Rows | None],
    packing: Packing,
    *,
    indices: Sequence[int] | None = None,
    groups: Sequence[int] | None = None,
) -> list[MicroBatch]:
    """Micro-batches that together hold each of the chosen trajectories once.

    Args:
        rows: per trajectory of the batch; None where there is nothing to compute (never chosen).
        packing: budget and layout.
        indices: which trajectories (default all). Micro-batches speak of them by these indices.
        groups: group of each trajectory; with `share_prefixes`, members of a group are kept together if they
            fit.
    """
    chosen = [i for i, one in enumerate(rows) if one is not None] if indices is None else list(indices)
    known = {i: one for i in chosen if (one := rows[i]) is not None}
    if packing.share_prefixes:
        plan = _plan_shared(known, chosen, packing, groups)
    elif packing.layout == "padded":
        plan = _plan_padded(known, chosen, packing.token_budget)
    else:
        plan = _plan_packed(known, chosen, packing.token_budget)
    return [_micro_batch(known, part, packing) for part in plan]


def for_ranks(micro: Sequence[MicroBatch], world: int) -> list[list[MicroBatch]]:
    """Micro-batches of each rank, balanced by tokens; every rank gets the same number.

    Ranks that would have fewer get dummies: a pass over two tokens that has no action and changes no number,
    so that collective operations inside a pass meet on all ranks.
    """
    order = sorted(range(len(micro)), key=lambda i: (-micro[i].width, i))
    loads = [0] * world
    shares: list[list[int]] = [[] for _ in range(world)]
    for i in order:
        rank = min(range(world), key=lambda r: (loads[r], r))
        shares[rank].append(i)
        loads[rank] += micro[i].width
    most = max((len(share) for share in shares), default=0)
    return [[micro[i] for i in sorted(share)] + [dummy()] * (most - len(share)) for share in shares]


def dummy() -> MicroBatch:
    """A micro-batch without trajectories and actions."""
    none = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        trajectories_S=(),
        ids_BL=torch.zeros((1, 2), dtype=torch.int64),
        positions_BL=torch.arange(2).reshape(1, 2),
        blocks=(Block(0, 2),),
        predict_M=none,
        target_M=none,
        temperature_M=torch.zeros(0),
        end_S=none,
        n_tokens=0,
        n_row_tokens=0,
    )


def padding_share(micro: Sequence[MicroBatch]) -> float:
    """Share of computed tokens that are padding, in [0, 1]."""
    width = sum(m.width for m in micro if m.trajectories_S)
    return 1.0 - sum(m.n_tokens for m in micro) / width if width else 0.0


# ------------------------------------------------------------------------------------------------------ plans


def _plan_packed(rows: Mapping[int, Rows], chosen: list[int], budget: int) -> list[list[int]]:
    """First fit decreasing into bins of `budget` tokens; ties by index, bins in ascending order of
    members."""
    order = sorted(chosen, key=lambda i: (-rows[i].n_tokens, i))
    bins: list[list[int]] = []
    free: list[int] = []
    for i in order:
        size = rows[i].n_tokens
        fit = next((b for b, space in enumerate(free) if size <= space), None)
        if fit is None:
            bins.append([i])
            free.append(budget - size)
        else:
            bins[fit].append(i)
            free[fit] -= size
    return [sorted(part) for part in bins]


def _plan_padded(rows: Mapping[int, Rows], chosen: list[int], budget: int) -> list[list[int]]:
    """Runs of trajectories sorted by their longest row, cut where the padded rectangle would exceed the
    budget."""
    order = sorted(chosen, key=lambda i: (-max(len(row) for row in rows[i].rows), i))
    bins: list[list[int]] = []
    height = width = 0
    for i in order:
        longest = max(len(row) for row in rows[i].rows)
        if bins and (height + len(rows[i].rows)) * width <= budget:
            bins[-1].append(i)
            height += len(rows[i].rows)
        else:
            bins.append([i])
            height, width = len(rows[i].rows), longest
    return [sorted(part) for part in bins]


def _plan_shared(
    rows: Mapping[int, Rows], chosen: list[int], packing: Packing, groups: Sequence[int] | None
) -> list[list[int]]:
    """Neighbours that share tokens stay together: trajectories in order of group, then of their first row's
    ids."""
    by_group: dict[int, list[int]] = {}
    for i in chosen:
        by_group.setdefault(groups[i] if groups is not None else 0, []).append(i)
    bins: list[list[int]] = []
    used = 0
    for group in sorted(by_group):
        members = sorted(by_group[group], key=lambda i: (rows[i].rows[0].tolist(), i))
        run: list[int] = []
        cost = 0
        for i in members:
            grown = _tree_tokens([row for j in (*run, i) for row in rows[j].rows])
            if run and grown > packing.token_budget:
                bins.append(run)
                run, cost, used = [], 0, packing.token_budget
                grown = _tree_tokens(list(rows[i].rows))
            run.append(i)
            cost = grown
        if bins and used + cost <= packing.token_budget:
            bins[-1].extend(run)
            used += cost
        else:
            bins.append(run)
            used = cost
    return [sorted(part) for part in bins]


# ---------------------------------------------------------------------------------------------- prefix trees


def _common_prefix(a: IntArray, b: IntArray) -> int:
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def _tree_tokens(rows: list[IntArray]) -> int:
    """Tokens that a prefix tree over `rows` computes."""
    order = sorted(rows, key=lambda row: row.tolist())
    shared = sum(_splits_off(_common_prefix(a, b)) for a, b in pairwise(order))
    return sum(len(row) for row in rows) - shared


def _splits_off(length: int) -> int:
    return length if length >= MIN_SHARED_TOKENS else 0


def _tree(rows: list[IntArray]) -> tuple[list[tuple[IntArray, int, int]], list[list[int]]]:
    """A prefix tree over rows.

    Returns:
        blocks as (ids, position of the first id in its row, parent block), parents first, and for each row
        the path of blocks from its beginning to its end.
    """
    order = sorted(range(len(rows)), key=lambda i: (rows[i].tolist(), i))
    shared = [_splits_off(_common_prefix(rows[a], rows[b])) for a, b in pairwise(order)]
    blocks: list[tuple[IntArray, int, int]] = []
    paths: list[list[int]] = [[] for _ in rows]
    # (first, last + 1) of sorted rows that agree up to `depth`, which the blocks of `path` already hold
    open_ranges: list[tuple[int, int, int, list[int]]] = [(0, len(order), 0, [])]
    while open_ranges:
        first, end, depth, path = open_ranges.pop()
        row = rows[order[first]]
        common = len(row) if end - first == 1 else min(shared[first : end - 1])
        if common > depth:
            blocks.append((row[depth:common], depth, path[-1] if path else -1))
            path = [*path, len(blocks) - 1]
        if end - first == 1:
            paths[order[first]] = path
            continue
        splits = [k + 1 for k in range(first, end - 1) if shared[k] == common]
        for a, b in pairwise([first, *splits, end]):
            open_ranges.append((a, b, common, path))
    return blocks, paths


# ------------------------------------------------------------------------------------------------ micro-batch


def _micro_batch(rows: Mapping[int, Rows], part: list[int], packing: Packing) -> MicroBatch:
    members = [rows[i] for i in part]
    branches = [row for member in members for row in member.rows]
    first_row = np.cumsum([0, *(len(member.rows) for member in members)])
    if packing.layout == "padded":
        ids_BL, positions_BL, at = _padded(branches)
        blocks: tuple[Block, ...] | None = None
        n_tokens = sum(len(row) for row in branches)
    else:
        ids_BL, positions_BL, blocks, at = _packed(branches, packing.share_prefixes)
        n_tokens = ids_BL.size
    predict = [
        at(int(first_row[k]) + member.row_N, member.position_N - 1) for k, member in enumerate(members)
    ]
    end = [
        at(first_row[k : k + 1] + member.end_row, np.array([member.end_position - 1]))
        for k, member in enumerate(members)
    ]
    return MicroBatch(
        trajectories_S=tuple(part),
        ids_BL=torch.from_numpy(ids_BL),
        positions_BL=torch.from_numpy(positions_BL),
        blocks=blocks,
        predict_M=torch.from_numpy(np.concatenate(predict)),
        target_M=torch.from_numpy(np.concatenate([member.token_N for member in members])),
        temperature_M=torch.from_numpy(
            np.concatenate([np.where(m.valid_N, m.temperature_N, np.float32(1)) for m in members])
        ),
        end_S=torch.from_numpy(np.concatenate(end)),
        n_tokens=n_tokens,
        n_row_tokens=sum(len(row) for row in branches),
    )


class _FlatIndex:
    """Flat index of (row, position) pairs: `base[row, block of position] + position`."""

    def __init__(self, edges: list[IntArray], bases: list[IntArray]) -> None:
        self._edges, self._bases = edges, bases

    def __call__(self, row_N: IntArray, position_N: IntArray) -> IntArray:
        out = np.empty(len(row_N), dtype=np.int64)
        for row in np.unique(row_N):
            here = row_N == row
            block = np.searchsorted(self._edges[row], position_N[here], side="right")
            out[here] = self._bases[row][block] + position_N[here]
        return out


def _padded(branches: list[IntArray]) -> tuple[IntArray, IntArray, _FlatIndex]:
    width = max(len(row) for row in branches)
    ids_BL = np.zeros((len(branches), width), dtype=np.int64)
    for b, row in enumerate(branches):
        ids_BL[b, : len(row)] = row
    positions_BL = np.broadcast_to(np.arange(width, dtype=np.int64), ids_BL.shape).copy()
    none = np.zeros(0, dtype=np.int64)
    bases = [np.array([b * width], dtype=np.int64) for b in range(len(branches))]
    return ids_BL, positions_BL, _FlatIndex([none] * len(branches), bases)


def _packed(
    branches: list[IntArray], share: bool
) -> tuple[IntArray, IntArray, tuple[Block, ...], _FlatIndex]:
    if share:
        parts, paths = _tree(branches)
    else:
        parts, paths = [(row, 0, -1) for row in branches], [[b] for b in range(len(branches))]
    starts = np.cumsum([0, *(len(ids) for ids, _, _ in parts)])
    blocks = tuple(
        Block(int(starts[k]), int(starts[k + 1]), parent) for k, (_, _, parent) in enumerate(parts)
    )
    edges = [np.array([parts[k][1] for k in path[1:]], dtype=np.int64) for path in paths]
    bases = [np.array([starts[k] - parts[k][1] for k in path], dtype=np.int64) for path in paths]
    ids = np.concatenate([ids for ids, _, _ in parts])
    positions = np.concatenate([np.arange(at, at + len(ids), dtype=np.int64) for ids, at, _ in parts])
    return ids[None], positions[None], blocks, _FlatIndex(edges, bases)
