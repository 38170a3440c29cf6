"""Key/value memory of the in-process sampler: ragged rows that decode together without being moved or copied.

Each resident token sequence has a *slot*: one row of the preallocated tensors `[S, H_kv, C, D]` of every
layer. A decode step runs the model on the active rows only; its attention reads each row's keys and values
where they lie (`Run`: neighbouring slots in one kernel call, cut at the run's own longest length). A prefill
gathers its rows, because its cost is in the new tokens.

Invariant: position `p` of slot `s` holds the keys and values of the token at position `p` of that slot's
sequence, computed by the current weights, for every `p` below the length that the engine states. Values
beyond are finite garbage behind the mask. This module knows nothing of requests, sampling or versions.

Legend: `S` slots, `A` active rows, `P` rows of a prefill, `C` capacity in tokens, `L` longest row, `D` head
size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

SLOT_ATTENTION = "agentrl_slots"
"""Name of the attention implementation registered with transformers; without runs it is exactly `sdpa`."""
RUN_ROWS = 16
"""Longest run of neighbouring slots in one kernel call: short enough that one long row does not make all
others pay for its length, long enough that the calls per layer stay few."""


@dataclass(frozen=True, slots=True)
class Run:
    """Rows `first` to `last` (exclusive) of the batch lie in the slots from `slot` on; `mask` is `[n, 1, 1,
    L]` additive float, `L` the longest of them."""

    first: int
    last: int
    slot: int
    length: int
    mask: Tensor | None


class SlotStore:
    """The key and value tensors of all layers. Grows by doubling, in slots and in capacity; never shrinks."""

    def __init__(self, *, max_capacity: int) -> None:
        self.max_capacity = max_capacity
        self.slots = 0
        self.capacity = 0
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values per token, over the layers seen so far."""
        sides = (*self.keys.values(), *self.values.values())
        return sum(t.shape[1] * t.shape[3] * t.element_size() for t in sides)

    def reserve(self, *, slots: int, capacity: int) -> None:
        """Make room for that many slots and tokens per slot; contents stay."""
        if slots <= self.slots and capacity <= self.capacity:
            return
        self.slots = max(slots, self.slots)
        if capacity > self.capacity:
            self.capacity = min(self.max_capacity, max(capacity, 2 * self.capacity, 64))
        for side in (self.keys, self.values):
            for layer, old in side.items():
                side[layer] = self._grown(old)

    def _grown(self, old: Tensor) -> Tensor:
        new = old.new_zeros(self.slots, old.shape[1], self.capacity, old.shape[3])
        new[: old.shape[0], :, : old.shape[2]] = old
        return new

    def layer(self, index: int, like_key: Tensor, like_value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, allocated on first use in the shape the model turns out to produce."""
        if index not in self.keys:
            for side, like in ((self.keys, like_key), (self.values, like_value)):
                side[index] = like.new_zeros(self.slots, like.shape[1], self.capacity, like.shape[3])
        return self.keys[index], self.values[index]

    def copy_prefix(self, *, source: int, target: int, length: int) -> None:
        """Give `target` the first `length` positions of `source`."""
        for side in (self.keys, self.values):
            for tensor in side.values():
                tensor[target, :, :length] = tensor[source, :, :length]

    def clear(self, slot: int) -> None:
        """Zero a slot: the only way to get rid of non-finite values, which a mask does not stop (0 · NaN)."""
        for side in (self.keys, self.values):
            for tensor in side.values():
                tensor[slot].zero_()


class DecodeView:
    """What a decode forward sees as its cache: writes one position per row, reads whole slots in place."""

    is_compileable = False

    def __init__(self, store: SlotStore, slots_A: Tensor, positions_A: Tensor) -> None:
        self._store = store
        self._slots_A = slots_A
        self._positions_A = positions_A

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._store.layer(layer_idx, key, value)
        keys[self._slots_A, :, self._positions_A] = key[:, :, 0]
        values[self._slots_A, :, self._positions_A] = value[:, :, 0]
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class PrefillView:
    """What a prefill forward sees as its cache: scatters the new positions that are not padding, gathers the
    rows.

    `write_rows`, `write_columns` index the new tokens `[P, n]` that are real; `write_slots`,
    `write_positions` say where each goes.
    """

    is_compileable = False

    def __init__(
        self,
        store: SlotStore,
        slots_P: Tensor,
        *,
        length: int,
        write_rows: Tensor,
        write_columns: Tensor,
        write_slots: Tensor,
        write_positions: Tensor,
    ) -> None:
        self._store = store
        self._slots_P = slots_P
        self._length = length
        self._from = (write_rows, write_columns)
        self._to = (write_slots, write_positions)

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._store.layer(layer_idx, key, value)
        rows, columns = self._from
        slots, positions = self._to
        keys[slots, :, positions] = key[rows, :, columns]
        values[slots, :, positions] = value[rows, :, columns]
        return keys[self._slots_P, :, : self._length], values[self._slots_P, :, : self._length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def plan_runs(slots: list[int], lengths: list[int], positions_A: Tensor, *, dtype: torch.dtype) -> list[Run]:
    """Cut the active rows (sorted by slot) into runs of neighbouring slots. `lengths` count the token being
    fed."""
    runs: list[Run] = []
    first = 0
    for at in range(1, len(slots) + 1):
        if at < len(slots) and slots[at] == slots[at - 1] + 1 and at - first < RUN_ROWS:
            continue
        rows = lengths[first:at]
        length = max(rows)
        mask: Tensor | None = None
        if min(rows) < length:
            columns = torch.arange(length, device=positions_A.device)
            hidden = columns > positions_A[first:at, None]
            mask = torch.zeros(hidden.shape, dtype=dtype, device=positions_A.device)
            mask.masked_fill_(hidden, torch.finfo(dtype).min)
            mask = mask[:, None, None, :]
        runs.append(Run(first, at, slots[first], length, mask))
        first = at
    return runs


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    slot_runs: list[Run] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one new token per row over keys and values that stay in their slots.

    `query` is `[A, H, 1, D]`, `key` and `value` are whole layers `[S, H_kv, C, D]`; returns `[A, 1, H, D]`.
    Query heads that share a key head ride as extra query positions, so grouped heads need no copy of the
    keys.
    """
    if slot_runs is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output, None
    rows, heads, _, size = query.shape
    shared = key.shape[1]
    packed = query.reshape(rows, shared, heads // shared, size)
    pieces = [
        scaled_dot_product_attention(
            packed[run.first : run.last],
            key[run.slot : run.slot + run.last - run.first, :, : run.length],
            value[run.slot : run.slot + run.last - run.first, :, : run.length],
            attn_mask=run.mask,
            scale=scaling,
        )
        for run in slot_runs
    ]
    output = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return output.reshape(rows, 1, heads, value.shape[-1]), None


AttentionInterface.register(SLOT_ATTENTION, slot_attention)
AttentionMaskInterface.register(SLOT_ATTENTION, sdpa_mask)
