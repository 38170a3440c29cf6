"""Sandboxes that are started before anyone asks for them, for whoever asks for the like next.

A pool holds one for each of the last `size` asks, of the same kind (image and spec): what was asked for
lately is what will be asked for next. Nobody waits for it: when it has none of a kind, that is a miss, and
the asker makes its own. Invariants: what is ready, being started and being ended is never more than `size`
together, so an engine that is slow to show what it was asked for is not asked twice; each is handed out at
most once; none that has died, or is older than `max_age_s`, is handed out; what nobody asked for within that
time is ended and not made again.

Nothing here knows what a sandbox is: a backend says how one is made, ended, and whether it still lives.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

from agentrl.errors import BoundaryError

LOOK_S = 5.0
"""Between two looks at those that wait, when nobody asks."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
"""After a start that failed."""

WAY_S = 30.0
"""After one gave way to somebody who needed its room."""

log = logging.getLogger(__name__)
R = TypeVar("R")
T = TypeVar("T")
Kind = tuple[str, str]
"""Digest of the image, and the spec as canonical JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """What a pool has and has done."""

    size: int
    ready: int
    making: int
    hits: int
    misses: int
    discarded: int
    """Ended without having been of use: dead, too old, or of a kind that is no longer asked for."""
    failed: int
    """Starts that failed; nobody waited for them."""


@runtime_checkable
class Warming(Protocol):
    """A backend that can keep sandboxes ready. `Backend` and:"""

    def keep_warm(self, size: int) -> None:
        """Have at most so many ready from now on. Before the first `create`."""
        ...

    @property
    def pool(self) -> PoolState | None:
        """None: it keeps none."""
        ...


@dataclass(frozen=True, slots=True)
class _Ready(Generic[T]):
    kind: Kind
    since: float
    one: T


class WarmPool(Generic[T]):
    """Belongs to one event loop. `make` and `end` take their time; `end` returns when what it ended is gone,
    and so does a `make` that fails."""

    def __init__(
        self,
        size: int,
        *,
        make: Callable[[Kind], Awaitable[T]],
        end: Callable[[T], Awaitable[None]],
        alive: Callable[[T], bool],
        max_age_s: float,
    ) -> None:
        self.size = size
        self.hits = 0
        self.misses = 0
        self.discarded = 0
        self._make = make
        self._end = end
        self._alive = alive
        self._max_age_s = max_age_s
        self._asked: deque[tuple[Kind, float]] = deque(maxlen=size)
        self._ready: list[_Ready[T]] = []
        """The oldest first."""
        self._making = 0
        self._failed = 0
        self._rests_until = 0.0
        self._stirred = asyncio.Event()
        self._filler: asyncio.Task[None] | None = None

    @property
    def state(self) -> PoolState:
        return PoolState(
            size=self.size,
            ready=len(self._ready),
            making=self._making,
            hits=self.hits,
            misses=self.misses,
            discarded=self.discarded,
            failed=self._failed,
        )

    def ask(self, kind: Kind) -> None:
        """Note that somebody asks for this kind, so that there will be one for the next."""
        self._asked.append((kind, time.monotonic()))
        self._stirred.set()
        if self._filler is None:
            self._filler = asyncio.get_running_loop().create_task(self._fill())

    def take(self, kind: Kind) -> T | None:
        """One of this kind; it is the caller's from now on, to use or to end. None: there is none."""
        for each in self._ready:
            if each.kind == kind and self._fit(each):
                self._ready.remove(each)
                return each.one
        return None

    async def hand_out(
        self, kind: Kind, give: Callable[[T], Awaitable[R | None]], end: Callable[[T], Awaitable[None]]
    ) -> R | None:
        """One of this kind as `give` makes it the asker's: None there, or an error of the world's, says that
        it is fit no more, and it is ended. None: a miss."""
        self.ask(kind)
        while (found := self.take(kind)) is not None:
            try:
                given = await give(found)
            except (BoundaryError, OSError):  # It died, or does not answer.
                given = None
            except BaseException:
                await end(found)
                raise
            if given is not None:
                self.hits += 1
                return given
            self.discarded += 1
            await end(found)
        self.misses += 1
        return None

    def give_way(self) -> T | None:
        """The oldest that waits, whose room somebody needs; it is the caller's to end, and for `WAY_S` none
        is made. None: there is none."""
        self._rests_until = time.monotonic() + WAY_S
        if not self._ready:
            return None
        self.discarded += 1
        return self._ready.pop(0).one

    async def stop(self) -> tuple[T, ...]:
        """Make no more. Returns what is left; it is the caller's to end."""
        if self._filler is not None:
            self._filler.cancel()
            await asyncio.gather(self._filler, return_exceptions=True)
        left, self._ready = tuple(each.one for each in self._ready), []
        return left

    def _fit(self, each: _Ready[T]) -> bool:
        return self._alive(each.one) and time.monotonic() - each.since < self._max_age_s

    async def _fill(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            useless = self._useless()
            if useless is not None:
                self._ready.remove(useless)
                self.discarded += 1
                await self._end(useless.one)
                continue
            kind = self._short()
            if kind is None:
                try:
                    async with asyncio.timeout(LOOK_S):
                        await self._stirred.wait()
                except TimeoutError:
                    pass
                self._stirred.clear()
                continue
            self._making = 1
            try:
                made = await self._make(kind)
            except Exception as error:  # the boundary to whatever starts sandboxes: nobody waits for it
                log.warning("no sandbox could be started ahead: %s", error)
                self._failed += 1
                # It is not tried again until somebody asks for it, who will be told what is wrong.
                self._asked = deque((ask for ask in self._asked if ask[0] != kind), maxlen=self.size)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            finally:
                self._making = 0
            pause_s = FIRST_PAUSE_S
            self._ready.append(_Ready(kind, time.monotonic(), made))

    def _wanted(self) -> Counter[Kind]:
        old = time.monotonic() - self._max_age_s
        while self._asked and self._asked[0][1] <= old:
            self._asked.popleft()
        return Counter(kind for kind, _ in self._asked)

    def _useless(self) -> _Ready[T] | None:
        """One that is not fit, or is more than is wanted of its kind."""
        wanted = self._wanted()
        for each in self._ready:
            if not self._fit(each) or wanted[each.kind] == 0:
                return each
            wanted[each.kind] -= 1
        return None

    def _short(self) -> Kind | None:
        """The kind of which one is lacking, the one asked for last first."""
        if time.monotonic() < self._rests_until:
            return None
        have = Counter(each.kind for each in self._ready)
        wanted = self._wanted()
        return next((k for k, _ in reversed(self._asked) if have[k] < wanted[k]), None)
