"""Sandboxes that outlive the process that made them: what their backend and they themselves can do beside
`contract`.

A process that wants its sandboxes to survive it says `outlive` before it makes any, tells each sandbox its
lease and notes in it what must not be forgotten. Its successor under the same name asks for them by session
(`adopt`), reads what was done there (`recall`) and ends the rest (`forget`). Nobody's successor comes: then
each sandbox ends itself when its lease is over, and what it had on the machine goes with it.

The sandbox's own agent remembers; the policy can not reach it. Nothing here decides what a memory is worth.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from agentrl.types import ExecStatus
from envs.sandbox.contract import Sandbox


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class PastExec:
    """How a command ended, as far as its evidence needs it."""

    status: ExecStatus
    reason: str | None
    kill_verified: bool | None


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Memory:
    """What a sandbox remembers of its life so far."""

    execs: dict[str, PastExec | None] = Field(default_factory=dict)
    """By exec id, in order; None: still running."""
    notes: dict[str, str] = Field(default_factory=dict)
    said: dict[str, str] = Field(default_factory=dict)
    """By exec id: `ExecRequest.digest` of what was asked."""
    lease_left_s: float | None
    """None: it was never told of a lease."""


@runtime_checkable
class Outliving(Sandbox, Protocol):
    """A sandbox that can outlive its host."""

    def lease(self, ttl_s: float) -> None:
        """Live for `ttl_s` more at most, when the host goes away or renews nothing. Not waited for."""
        ...

    def note(self, key: str, value: str) -> None:
        """Remember this; an earlier note of the same key is replaced. Not waited for, but in order with every
        other request. Of keys with a colon only the newest are kept."""
        ...

    async def recall(self) -> Memory: ...


@runtime_checkable
class Adopting(Protocol):
    """A backend whose sandboxes can outlive this process. `Backend` and:"""

    def outlive(self, owner: str) -> None:
        """From now on sandboxes are made to outlive this process, for an owner of this name. Before the first
        `create`."""
        ...

    async def adopt(self, session: str) -> Outliving | None:
        """The live sandbox that this owner made for a session in another process; None when it is gone."""
        ...

    async def forget(self) -> int:
        """End every sandbox of this owner that was made by a process which is no more and was not adopted.
        Returns how many."""
        ...
