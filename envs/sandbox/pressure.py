"""How many operations may be under way at once, learned from how long they take: additive increase,
multiplicative decrease.

An engine that is asked for more than it can do at once gets slower for everyone. A `Limit` starts at its
maximum; an operation that took several times as long as the quickest ones, or failed, halves it, at most once
per second; each good one raises it a little. `Pressure` lets in so many, first come, first served. The
invariant: never more than `maximum` at once. What an operation waits for its turn is no time of its own: see
`Deadline`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import TracebackType

from agentrl.errors import BoundaryError, SandboxError
from agentrl.types import JsonScalar

SLOW_FACTOR = 6.0
"""So many times the quickest latency counts as overload; less is what sharing the machine costs anyway."""
FLOOR_S = 0.5
"""Less than this is never overload, however quick the quickest was."""
REST_S = 1.0
"""Between two decreases: operations that began before the first one say nothing new."""
_FORGET = 1.02
"""The quickest latency is forgotten at this rate, so that a machine that became slower is accepted."""
QUEUE_DEADLINE_S = 1800.0
"""Longest wait for a turn: with a healthy engine, thousands of sandboxes before it."""


@dataclass(slots=True)
class Measured:
    """An operation under way."""

    counts: bool = True
    """False: it turned out to be another kind of work than the limit is for."""


class Limit:
    """The number: between 1 and `maximum`, moved by what is learned."""

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self.limit = float(maximum)
        self.decreased = 0
        """How often it was halved."""
        self._quickest: float | None = None
        self._decreased_at = 0.0

    def learn(self, latency_s: float, *, failed: bool = False) -> None:
        """Move the limit after an operation."""
        quickest = self._quickest
        slow = quickest is not None and latency_s > max(FLOOR_S, SLOW_FACTOR * quickest)
        if failed or slow:
            now = time.monotonic()
            if now - self._decreased_at >= REST_S:
                self.limit = max(1.0, self.limit / 2)
                self.decreased += 1
                self._decreased_at = now
        else:
            self.limit = min(float(self.maximum), self.limit + 1.0 / self.limit)
        if not failed:
            self._quickest = latency_s if quickest is None else min(latency_s, quickest * _FORGET)

    @contextmanager
    def measured(self) -> Iterator[Measured]:
        """An operation that the limit learns from. One that was cancelled, or failed by something that is
        not the environment's, says nothing of it."""
        begun = time.monotonic()
        measured = Measured()
        try:
            yield measured
        except asyncio.CancelledError:
            raise
        except BoundaryError as error:
            if error.owner == "environment":
                self.learn(time.monotonic() - begun, failed=True)
            raise
        except BaseException:
            self.learn(time.monotonic() - begun, failed=True)
            raise
        if measured.counts:
            self.learn(time.monotonic() - begun)


class Pressure:
    """So many at once as a `Limit` says. Belongs to one event loop."""

    def __init__(self, maximum: int) -> None:
        self.number = Limit(maximum)
        self.in_flight = 0
        self.peak = 0
        self._waiting: deque[tuple[asyncio.Future[None], bool]] = deque()
        self._alone = False

    @property
    def limit(self) -> float:
        return self.number.limit

    @property
    def waiting(self) -> int:
        """How many wait for a turn."""
        return sum(not turn.done() for turn, _ in self._waiting)

    @asynccontextmanager
    async def slot(self, *, teaches: bool = True, alone: bool = False) -> AsyncIterator[float]:
        """Hold one slot: the seconds that were waited for it. The time inside is what the limit learns from,
        unless it is spent on other things too. `alone`: nobody else holds one meanwhile, and nobody who comes
        later is let in before. The caller sets the deadline."""
        begun = time.monotonic()
        await self._acquire(alone)
        waited_s = time.monotonic() - begun
        try:
            if teaches:
                with self.number.measured():
                    yield waited_s
            else:
                yield waited_s
        finally:
            self._leave()

    async def _acquire(self, alone: bool) -> None:
        if self._waiting or not self._room(alone):
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((turn, alone))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._leave()  # The slot was given in the moment that its taker gave up.
                elif (turn, alone) in self._waiting:  # Else it was passed over already, as one that gave up.
                    self._waiting.remove((turn, alone))
                    self._wake()
                raise
            return
        self._take(alone)

    def _room(self, alone: bool) -> bool:
        return not self._alone and (self.in_flight == 0 if alone else self.in_flight < int(self.limit))

    def _take(self, alone: bool) -> None:
        self.in_flight += 1
        self._alone = alone
        self.peak = max(self.peak, self.in_flight)

    def _leave(self) -> None:
        self.in_flight -= 1
        self._alone = False
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            turn, alone = self._waiting[0]
            if turn.done():
                self._waiting.popleft()
            elif self._room(alone):
                self._waiting.popleft()
                self._take(alone)
                turn.set_result(None)
            else:
                return


class Deadline:
    """When an operation must be over, not counting its wait for a turn. An asynchronous context around the
    operation: ends it with `TimeoutError`."""

    def __init__(self, seconds: float, *, queue_s: float | None = None) -> None:
        self._seconds = seconds
        self._queue_s = QUEUE_DEADLINE_S if queue_s is None else queue_s
        self._until = time.monotonic() + seconds
        self._limit = asyncio.timeout(seconds)
        self.queued = False
        """It waits for its turn."""
        self._postponed_s = 0.0

    async def __aenter__(self) -> Deadline:
        await self._limit.__aenter__()
        self._move(self._seconds)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._limit.__aexit__(kind, error, tb)

    def left(self) -> float:
        """Seconds of its own; never none at all, so that whoever waits is ended by the deadline itself."""
        return max(0.01, self._until - time.monotonic())

    @asynccontextmanager
    async def turn(self, pressure: Pressure) -> AsyncIterator[None]:
        """Hold a slot. The deadline stands still while it is waited for, at most `queue_s`."""
        left_s = self.left()
        self._move(self._queue_s)
        self.queued = True
        async with pressure.slot():
            self.queued = False
            self._move(left_s)
            yield

    def postpone(self, seconds: float) -> None:
        """Not count so many seconds that were spent in somebody else's queue, `queue_s` in all."""
        if self._postponed_s + seconds <= self._queue_s:
            self._postponed_s += seconds
            self._move(self.left() + seconds)

    def _move(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self._limit.reschedule(asyncio.get_running_loop().time() + seconds)


def not_ready(
    name: str,
    within_s: float,
    *,
    phase: str,
    place: str = "machine",
    more: str = "",
    evidence: dict[str, JsonScalar] | None = None,
) -> SandboxError:
    """For a sandbox that had its turn and whose start took too long: what it waited for, and what to do where
    it was to run."""
    return SandboxError(
        f"Sandbox {name} was not ready within {within_s:g} s: waiting for '{phase}'.",
        fix=f"The {place} is overloaded: start fewer sandboxes at once{more}.",
        code="start_timeout",
        phase=phase,
        evidence=evidence,
    )


def waited_in_vain(name: str) -> SandboxError:
    """For a sandbox whose turn to be started did not come."""
    return SandboxError(
        f"Sandbox {name} waited {QUEUE_DEADLINE_S:g} s for its turn to be started.",
        fix="Run fewer sandboxes at once: the engine starts them more slowly than they are asked for.",
        code="start_timeout",
        phase="queue",
    )
