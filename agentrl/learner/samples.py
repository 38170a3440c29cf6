"""Trajectory to training rows: lossless, exact, each sampled token once.

A trajectory is a tree of model calls. A call that extends its parent token by token continues the parent's
row; any other call starts a new row that repeats the shared prefix as context. So the rows are the branches
of the call tree (its leaves), and every sampled token is an *action* in exactly one of them: the row in which
its call was placed. In every other row that repeats it, it is context.

What is an action comes only from the records (the ids that the engine returned), never from roles, text, or
special ids. Nothing is tokenized, cut, or reordered here, and each call's rebuilt prompt is compared with the
hash that the engine echoed: a row that is not what the model saw raises instead of training.

Position semantic, said once for the whole learner: *entry t of a row speaks of predicting token t from tokens
< t.*

Legend: `_N` action tokens of one trajectory in sampled order (call after call), `_L` tokens of one row.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.errors import EvidenceError
from agentrl.types import LogProbKind, ModelCall, Trajectory

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

UNKNOWN_VERSION = -1
"""In `version_N`: the sampler had no policy version. Such a token is never `valid`."""

REASONS = ("phantom_token", "no_log_prob", "raw_log_prob", "truncated_sampling", "no_version")
"""Why a sampled token can not enter a policy loss, in the order in which they are looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The training rows of one trajectory and the columns of its action tokens.

    Worked example: call a: prompt (9, 4), sampled (7, 2); call b extends it with (5, 4) and samples (8):
    `rows = ([9, 4, 7, 2, 5, 4, 8],)`, `row_N = [0, 0, 0]`, `position_N = [2, 3, 6]`, `call_N = [0, 0, 1]`.
    """

    trajectory_id: str
    rows: tuple[IntArray, ...]
    """Token ids of each branch."""
    row_N: IntArray
    position_N: IntArray
    """Where the token stands in its row; at least 1, since a prompt comes before."""
    token_N: IntArray
    log_prob_N: FloatArray
    """Behaviour log-prob as recorded; NaN where it is unknown."""
    valid_N: BoolArray
    """The token may enter a policy loss: log-prob of the sampled distribution and version are known."""
    phantom_N: BoolArray
    """The token's call holds an id outside of the tokenizer: no evidence of anything, not even to imitate."""
    version_N: IntArray
    """Policy version; `UNKNOWN_VERSION` where the sampler had none."""
    turn_N: IntArray
    """Ordinal of the turn in sampled order, non-decreasing. A call without a turn belongs to the next one."""
    call_N: IntArray
    """Index into `trajectory.calls`."""
    temperature_N: FloatArray
    """As sampled; 0 is greedy (never valid)."""
    end_row: int
    end_position: int
    """The end state: everything up to and including the last sampled token. Reading "entry `end_position`" of
    row `end_row` gives a value of the state in which the next action would have been chosen."""
    invalid: Mapping[str, int]
    """Tokens that are not valid, by reason (`REASONS`)."""

    @property
    def n_actions(self) -> int:
        return len(self.row_N)

    @property
    def n_tokens(self) -> int:
        """Tokens over all rows, repeated prefixes included."""
        return sum(len(row) for row in self.rows)

    def action_mask(self, row: int) -> BoolArray:
        """`[L]`: True at the positions of `row` that hold an action token trained there."""
        mask = np.zeros(len(self.rows[row]), dtype=np.bool_)
        mask[self.position_N[self.row_N == row]] = True
        return mask


def build(trajectory: Trajectory, *, vocab_size: int | None = None) -> Rows:
    """Merge the calls of a trajectory into rows. Linear in the tokens of the rows.

    Args:
        trajectory: the record; calls are in sampled order, parents before children.
        vocab_size: ids of the tokenizer. A call that holds a larger id is not valid evidence as a whole
            (`phantom_token`), but its ids stay in the row unchanged.

    Raises:
        EvidenceError: there are no calls, a prompt is empty, or a rebuilt prompt is not the one the engine
            echoed.
    """
    if not trajectory.calls:
        raise EvidenceError(
            f"Trajectory {trajectory.id} has no model calls, so there is nothing to train on.",
            fix="Drop it before the learner; it ended before the policy acted.",
        )
    rows: list[list[int]] = []
    tips: list[Any] = []  # one running sha256 per row, over all its tokens so far
    place: dict[str, tuple[int, int]] = {}  # call id -> (row, end of its generation in that row)
    starts: list[tuple[int, int]] = []
    for call in trajectory.calls:
        row = _row_for(call, rows, tips, place)
        rows[row].extend(call.prompt_delta)
        tips[row].update(_id_bytes(call.prompt_delta))
        start = len(rows[row])
        if start == 0:
            raise EvidenceError(f"empty_prompt: call {call.id} of trajectory {trajectory.id} has no prompt.")
        if tips[row].hexdigest() != call.prompt_hash:
            raise EvidenceError(
                f"Call {call.id} of trajectory {trajectory.id}: the prompt rebuilt from its deltas "
                f"({start} tokens) is not the prompt that the engine echoed.",
                fix="The record is corrupt or its recorder is wrong: see `agentrl verify`.",
            )
        rows[row].extend(call.generation_token_ids)
        tips[row].update(_id_bytes(call.generation_token_ids))
        place[call.id] = (row, len(rows[row]))
        starts.append((row, start))
    end_row, end_position = place[trajectory.calls[-1].id]
    return _columns(trajectory, rows, starts, end_row, end_position, vocab_size)


def _row_for(
    call: ModelCall, rows: list[list[int]], tips: list[Any], place: Mapping[str, tuple[int, int]]
) -> int:
    """The row that this call's tokens are appended to: its parent's if it extends the tip, else a new one."""
    if call.parent_id is None:
        rows.append([])
        tips.append(hashlib.sha256())
        return len(rows) - 1
    parent_row, parent_end = place[call.parent_id]
    if call.prompt_keep == parent_end == len(rows[parent_row]):
        return parent_row
    prefix = rows[parent_row][: call.prompt_keep]
    rows.append(prefix)
    tips.append(hashlib.sha256(_id_bytes(prefix)))
    return len(rows) - 1


def _id_bytes(ids: tuple[int, ...] | list[int]) -> bytes:
    return np.asarray(ids, dtype="<u4").tobytes()


def _columns(
    trajectory: Trajectory,
    rows: list[list[int]],
    starts: list[tuple[int, int]],
    end_row: int,
    end_position: int,
    vocab_size: int | None,
) -> Rows:
    calls = trajectory.calls
    count_C = np.array([len(call.generation_token_ids) for call in calls], dtype=np.int64)
    row_C = np.array([row for row, _ in starts], dtype=np.int64)
    start_C = np.array([start for _, start in starts], dtype=np.int64)
    offset_N = np.arange(count_C.sum()) - np.repeat(np.cumsum(count_C) - count_C, count_C)
    invalid: Counter[str] = Counter()
    log_probs: list[FloatArray] = []
    valid: list[BoolArray] = []
    versions: list[IntArray] = []
    phantom: list[bool] = []
    for call in calls:
        log_prob_T, valid_T, version_T, reasons = _evidence(call, vocab_size)
        log_probs.append(log_prob_T)
        valid.append(valid_T)
        versions.append(version_T)
        phantom.append("phantom_token" in reasons)
        invalid.update(reasons)
    return Rows(
        trajectory_id=trajectory.id,
        rows=tuple(np.array(row, dtype=np.int64) for row in rows),
        row_N=np.repeat(row_C, count_C),
        position_N=np.repeat(start_C, count_C) + offset_N,
        token_N=np.array([i for call in calls for i in call.generation_token_ids], dtype=np.int64),
        log_prob_N=np.concatenate(log_probs),
        valid_N=np.concatenate(valid),
        phantom_N=np.repeat(np.array(phantom, dtype=np.bool_), count_C),
        version_N=np.concatenate(versions),
        turn_N=np.repeat(_turn_of_calls(trajectory), count_C),
        call_N=np.repeat(np.arange(len(calls), dtype=np.int64), count_C),
        temperature_N=np.repeat(np.array([c.sampling.temperature for c in calls], dtype=np.float32), count_C),
        end_row=end_row,
        end_position=end_position,
        invalid=MappingProxyType(dict(invalid)),
    )


def _evidence(
    call: ModelCall, vocab_size: int | None
) -> tuple[FloatArray, BoolArray, IntArray, Counter[str]]:
    """Log-probs, validity and versions of one call's tokens, and the reasons of those that are not valid."""
    n = len(call.generation_token_ids)
    known = call.generation_log_probs
    log_prob_T = np.array(
        [np.nan if p is None else p for p in known] if known is not None else [np.nan] * n, dtype=np.float32
    )
    version_T = np.array(call.versions_T() or [UNKNOWN_VERSION] * n, dtype=np.int64)
    known_T = np.isfinite(log_prob_T)
    reason: str | None = None
    if vocab_size is not None and max(call.generation_token_ids) >= vocab_size:
        reason = "phantom_token"
    elif not known_T.any():
        reason = "no_log_prob"
    elif not call.sampling.trainable:
        reason = "truncated_sampling"
    elif call.log_prob_kind is not LogProbKind.PROCESSED and call.sampling.temperature != 1.0:
        reason = "raw_log_prob"
    elif not call.policy_versions:
        reason = "no_version"
    if reason is not None:
        return log_prob_T, np.zeros(n, dtype=np.bool_), version_T, Counter({reason: n})
    missing = n - int(known_T.sum())
    return log_prob_T, known_T, version_T, Counter({"no_log_prob": missing} if missing else {})


def _turn_of_calls(trajectory: Trajectory) -> IntArray:
    """`[C]`: turn ordinal of each call, in the order in which the turns' calls were sampled."""
    has_turn = {turn.call_id for turn in trajectory.turns}
    acted_C = np.array([call.id in has_turn for call in trajectory.calls], dtype=np.int64)
    return np.cumsum(acted_C) - acted_C
