"""The states of a gateway session and what may follow what.

    queued → admitted → provisioning → ready ⇄ running → finalizing → verifying
    → done | failed | expired | cancelled

and `lost`: the sandbox does not answer. Anything may end early; nothing follows an end. A restart of the
gateway puts what had no sandbox yet back into the queue, and what had one through `lost` to ready again.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class State(StrEnum):
    QUEUED = "queued"
    """Waiting for a slot, or for the other members of its group."""
    ADMITTED = "admitted"
    """Holds a slot; waiting for the task's validation or for a turn to make a sandbox."""
    PROVISIONING = "provisioning"
    """The sandbox is made and probed."""
    READY = "ready"
    """Waiting for an action."""
    RUNNING = "running"
    """An action is being performed."""
    LOST = "lost"
    """The sandbox is gone or unreachable; after a restart of the gateway, until it is adopted."""
    FINALIZING = "finalizing"
    """Waiting for its verification, then processes are killed and the diff is taken."""
    VERIFYING = "verifying"
    """A fresh sandbox judges the diff."""
    DONE = "done"
    """There is a verdict with a reward."""
    FAILED = "failed"
    """There is a verdict without a reward; its fault says whose it is."""
    EXPIRED = "expired"
    """A deadline or the lease ended first."""
    CANCELLED = "cancelled"
    """The caller stopped it."""


ENDED = frozenset({State.DONE, State.FAILED, State.EXPIRED, State.CANCELLED})
_EARLY = frozenset({State.FAILED, State.EXPIRED, State.CANCELLED})

FOLLOWS: Mapping[State, frozenset[State]] = MappingProxyType(
    {
        State.QUEUED: _EARLY | {State.ADMITTED, State.LOST},
        State.ADMITTED: _EARLY | {State.PROVISIONING, State.QUEUED, State.LOST},
        State.PROVISIONING: _EARLY | {State.READY, State.LOST},
        State.READY: _EARLY | {State.RUNNING, State.FINALIZING, State.LOST},
        State.RUNNING: _EARLY | {State.READY, State.LOST},
        State.LOST: _EARLY | {State.READY},
        State.FINALIZING: _EARLY | {State.VERIFYING, State.DONE, State.LOST},
        State.VERIFYING: ENDED | {State.LOST},
        **dict.fromkeys(ENDED, frozenset[State]()),
    }
)
