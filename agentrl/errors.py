"""The exception tree: one class per boundary crossed, and every message says what to do next.

`ConfigError` is the user's, a `BoundaryError` is the world's, a bare `AssertionError` is ours. A boundary
error carries the `Fault` that is recorded when it ends a trajectory, so that the owner is decided where the
evidence is, never later from text.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Literal

FaultOwner = Literal["policy", "budget", "task", "environment", "gateway", "model"]
"""Who a fault belongs to. Only `policy` and `budget` may be scored; everyone else's means no reward."""


class AgentRLError(Exception):
    """Root of all errors raised on purpose. `fix` is the next thing to do, as a sentence."""

    exit_code = 1

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message if fix is None else f"{message} {fix}")
        self.message = message
        self.fix = fix


class ConfigError(AgentRLError):
    """The user's input is wrong: a key, a value, a path, a combination. Exit code 2, never a traceback."""

    exit_code = 2


class EvidenceError(AgentRLError):
    """A record contradicts itself or its source: lengths differ, a prefix broke, a hash does not match."""


class StoreError(AgentRLError):
    """The evidence store refused: a conflicting row, a broken chain, a schema from another version."""


class BoundaryError(AgentRLError):
    """Something outside this process failed. Carries what a `Fault` record needs."""

    owner: FaultOwner = "environment"
    code = "unknown"
    retryable = True

    def __init__(
        self,
        message: str,
        *,
        fix: str | None = None,
        owner: FaultOwner | None = None,
        code: str | None = None,
        phase: str = "run",
        retryable: bool | None = None,
        evidence: dict[str, str | int | float | bool | None] | None = None,
    ) -> None:
        super().__init__(message, fix=fix)
        self.owner = owner or type(self).owner
        self.code = code or type(self).code
        self.phase = phase
        self.retryable = type(self).retryable if retryable is None else retryable
        self.evidence = dict(evidence or {})


class SandboxError(BoundaryError):
    """A sandbox could not be created, was lost, or answered something that cannot be trusted."""

    code = "sandbox"


class SandboxLost(SandboxError):
    """The sandbox is gone (process died, connection closed) before its work was finalized."""

    code = "sandbox_lost"


class ExecUnknown(SandboxError):
    """A command was sent and its outcome cannot be known: never a success, never a failure of the policy."""

    code = "exec_unknown"


class TaskError(BoundaryError):
    """The task itself is broken: its package is malformed, its gold solution fails, it is flaky."""

    owner: FaultOwner = "task"
    code = "task"
    retryable = False


class ModelError(BoundaryError):
    """The policy server failed or answered something that is not evidence (no ids, no log-probs, a wrong
    echo)."""

    owner: FaultOwner = "model"
    code = "model"


def nearest(word: str, known: Iterable[str]) -> str:
    """A `Did you mean …?` clause for an unknown word, or the known words when nothing is close."""
    options = sorted(known)
    close = difflib.get_close_matches(word, options, n=1)
    if close:
        return f"Did you mean '{close[0]}'?"
    return f"Known: {', '.join(options)}." if options else "Nothing is known here."
