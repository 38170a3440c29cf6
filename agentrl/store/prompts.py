"""Prompt deltas to prompt hashes: what `Trajectory.prompt_ids` rebuilds, hashed without rebuilding it.

The hash of a prompt that extends its parent goes on from the parent's hash state, and a branch goes on from
the state of the ancestor that its kept tokens end in. So all prompts of a trajectory cost one pass over its
deltas and generations, where rebuilding each would be quadratic in the number of calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.errors import EvidenceError
from agentrl.store.codec import ids_to_bytes
from agentrl.types import ModelCall

_ID_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBytes:
    """Token bytes of one call (int32 little-endian) and the length of its whole prompt in tokens."""

    delta: bytes
    generation: bytes
    n_prompt: int


@dataclass(frozen=True, slots=True)
class _Node:
    call: ModelCall
    before: hashlib._Hash  # after the kept tokens, before the delta
    after: hashlib._Hash  # after delta and generation
    own: bytes  # delta and generation
    whole: int  # tokens of prompt and generation


def checked_bytes(calls: Sequence[ModelCall]) -> list[CallBytes]:
    """The bytes of each call, in order, after every prompt has been found to match its hash.

    Raises:
        EvidenceError: a prompt is not the one that the engine echoed; names the call.
    """
    nodes: dict[str, _Node] = {}
    out: list[CallBytes] = []
    for call in calls:
        delta, generation = ids_to_bytes(call.prompt_delta), ids_to_bytes(call.generation_token_ids)
        before = _state_at(nodes, call)
        state = before.copy()
        state.update(delta)
        if state.hexdigest() != call.prompt_hash:
            raise EvidenceError(
                f"call {call.id}: the prompt rebuilt from its parents does not hash to `prompt_hash`.",
                fix="Record `token_hash` of the prompt that the engine echoed, and the delta to the parent.",
            )
        state.update(generation)
        n_prompt = call.prompt_keep + len(call.prompt_delta)
        whole = n_prompt + len(call.generation_token_ids)
        nodes[call.id] = _Node(call, before, state, delta + generation, whole)
        out.append(CallBytes(delta=delta, generation=generation, n_prompt=n_prompt))
    return out


def _state_at(nodes: dict[str, _Node], call: ModelCall) -> hashlib._Hash:
    """The hash state after the tokens that a call keeps of its parent."""
    if call.parent_id is None:
        return hashlib.sha256()
    node = nodes[call.parent_id]
    if call.prompt_keep == node.whole:
        return node.after
    while node.call.prompt_keep > call.prompt_keep and node.call.parent_id is not None:
        node = nodes[node.call.parent_id]
    state = node.before.copy()
    state.update(node.own[: (call.prompt_keep - node.call.prompt_keep) * _ID_BYTES])
    return state
