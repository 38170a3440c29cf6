"""The token history of one branch: exact ids, append only.

Invariant: `ids` is, token for token, what the model saw and sampled along this branch. The prompt of each
committed call followed by its generation is a prefix of every later prompt that extends it. A prompt that
does not extend is a branch: it says how many tokens it keeps and why.

It holds ids only: text, roles and templates belong to `harness.chat`.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.errors import EvidenceError
from agentrl.types import BranchReason, ModelCall, token_hash

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the next call will see: `token_ids == (parent.prompt + parent.generation)[:keep] + delta`."""

    token_ids: Ids
    parent_id: str | None
    keep: int
    delta: Ids
    reason: BranchReason | None

    @property
    def hash(self) -> str:
        return token_hash(self.token_ids)


class Transcript:
    """One line of calls. `extend` and `branch` propose a prompt; only `commit` changes anything."""

    def __init__(self, *, reason: BranchReason | None = None) -> None:
        """`reason`: why there is a second root (a sub-agent); None for the first."""
        self._ids: Ids = ()
        self._call_id: str | None = None
        self._root_reason = reason

    @property
    def ids(self) -> Ids:
        """Prompt and generation of the last committed call."""
        return self._ids

    @property
    def call_id(self) -> str | None:
        return self._call_id

    def __len__(self) -> int:
        return len(self._ids)

    def start(self, ids: Ids) -> Prompt:
        """The first prompt. `EvidenceError` when it is empty or something was committed before."""
        if self._call_id is not None:
            raise EvidenceError(
                "a transcript starts once.", fix="Use extend for new messages, branch for a changed history."
            )
        if not ids:
            raise EvidenceError("empty_prompt: a prompt has at least one token.")
        return Prompt(token_ids=ids, parent_id=None, keep=0, delta=ids, reason=self._root_reason)

    def extend(self, delta: Ids) -> Prompt:
        """The prompt that appends `delta` to everything so far."""
        return Prompt(
            token_ids=self._ids + delta,
            parent_id=self._require_call(),
            keep=len(self._ids),
            delta=delta,
            reason=None,
        )

    def branch(self, ids: Ids, reason: BranchReason) -> Prompt:
        """A prompt with another history. Keeps the longest common prefix; when that is everything, it is no
        branch and carries no reason."""
        parent = self._require_call()
        if not ids:
            raise EvidenceError("empty_prompt: a prompt has at least one token.")
        keep = common_prefix(self._ids, ids)
        return Prompt(
            token_ids=ids,
            parent_id=parent,
            keep=keep,
            delta=ids[keep:],
            reason=None if keep == len(self._ids) else reason,
        )

    def commit(self, prompt: Prompt, call: ModelCall) -> None:
        """Make a recorded call part of the history. `EvidenceError` when the record is not of this prompt."""
        if call.parent_id != self._call_id or call.prompt_hash != prompt.hash:
            raise EvidenceError(f"call {call.id} does not continue this transcript.")
        self._ids = prompt.token_ids + call.generation_token_ids
        self._call_id = call.id

    def _require_call(self) -> str:
        if self._call_id is None:
            raise EvidenceError("a transcript without a call has nothing to extend.", fix="Start it first.")
        return self._call_id


def common_prefix(a: Ids, b: Ids) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])
