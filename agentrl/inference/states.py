"""The state machine of whatever generates, in this process or behind a URL: what may follow what."""

from __future__ import annotations

from enum import StrEnum

from agentrl.errors import ModelError


class EngineState(StrEnum):
    RUNNING = "running"
    """Requests are admitted and decoded."""
    PAUSED = "paused"
    """Requests keep their place; nothing is computed."""
    UPDATING = "updating"
    """Weights are being changed."""
    CLOSED = "closed"
    """Over; every request is refused."""


TRANSITIONS = {
    EngineState.RUNNING: {EngineState.PAUSED, EngineState.CLOSED},
    EngineState.PAUSED: {EngineState.RUNNING, EngineState.UPDATING, EngineState.CLOSED},
    EngineState.UPDATING: {EngineState.PAUSED},
    EngineState.CLOSED: frozenset[EngineState](),
}
"""The whole state machine. Anything else is refused."""


def moved(now: EngineState, to: EngineState) -> EngineState:
    """`to`, if it may follow `now`. Raises `ModelError` (`state`)."""
    if to not in TRANSITIONS[now]:
        raise refused("state", f"the engine is {now} and can not become {to}.", "Pair pause and resume.")
    return to


def refused(code: str, message: str, fix: str) -> ModelError:
    """A request that would fail again the same way."""
    return ModelError(message, fix=fix, code=code, phase="sample", retryable=False)
