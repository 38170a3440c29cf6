"""The pool of what is started ahead, with nothing that is started: never too many, each once, none dead."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import SandboxError
from envs.sandbox import warm
from envs.sandbox.warm import Kind, WarmPool

A, B = ("image a", "{}"), ("image b", "{}")


@dataclass(eq=False)
class Thing:
    kind: Kind
    number: int
    alive: bool = True


@dataclass
class Place:
    """Where things are made, in the engine's own time; counts what it has, seen or not yet."""

    size: int
    there: int = 0
    most: int = 0
    made: list[Thing] = field(default_factory=list)
    ended: list[Thing] = field(default_factory=list)
    slow: int = 0
    broken: bool = False
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def _takes_time(self) -> None:
        for _ in range(self.slow):
            await asyncio.sleep(0)

    async def make(self, kind: Kind) -> Thing:
        self.there += 1
        self.most = max(self.most, self.there)
        await self._takes_time()
        if self.broken:
            self.there -= 1
            raise SandboxError("The engine refuses.")
        self.made.append(Thing(kind, next(self.numbers)))
        return self.made[-1]

    async def end(self, thing: Thing) -> None:
        await self._takes_time()
        self.there -= 1
        self.ended.append(thing)

    def pool(self, max_age_s: float = 60.0) -> WarmPool[Thing]:
        return WarmPool(
            self.size, make=self.make, end=self.end, alive=lambda thing: thing.alive, max_age_s=max_age_s
        )


async def settled(turns: int = 60) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


def test_it_holds_one_for_each_of_the_last_asks_and_the_first_is_a_miss() -> None:
    async def run() -> None:
        place = Place(size=3)
        pool = place.pool()
        pool.ask(A)
        assert pool.take(A) is None
        await settled()
        assert [thing.kind for thing in place.made] == [A]
        for _ in range(3):
            pool.ask(B)
        await settled()
        assert place.ended == place.made[:1]  # nobody asks for it any more
        assert (pool.state.ready, pool.state.making, pool.state.discarded) == (3, 0, 1)
        pool.ask(A)
        assert pool.take(A) is None
        await settled()
        held = [pool.take(B), pool.take(B), pool.take(A)]
        assert None not in held
        assert pool.take(A) is None
        assert pool.take(B) is None
        assert await pool.stop() == ()

    asyncio.run(run())


def test_one_that_died_or_grew_old_is_ended_and_never_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "LOOK_S", 0.01)

    async def run() -> None:
        place = Place(size=2)
        pool = place.pool()
        pool.ask(A)
        await settled()
        place.made[0].alive = False
        assert pool.take(A) is None
        async with asyncio.timeout(5):
            while len(place.made) < 2:  # noqa: ASYNC110  (it looks from outside)
                await asyncio.sleep(0.01)
        assert place.ended == [place.made[0]]
        assert pool.take(A) is place.made[1]
        await pool.stop()
        place = Place(size=2)
        now = 1000.0
        monkeypatch.setattr(warm, "time", SimpleNamespace(monotonic=lambda: now))
        pool = place.pool(max_age_s=60.0)
        pool.ask(A)
        await settled()
        now += 60.0
        assert pool.take(A) is None
        async with asyncio.timeout(5):
            while not place.ended:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await settled()
        assert (len(place.made), place.there) == (1, 0)  # nobody asked for it for so long
        await pool.stop()

    asyncio.run(run())


def test_what_can_not_be_started_is_not_tried_again_until_somebody_asks_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warm, "FIRST_PAUSE_S", 0.0)

    async def run() -> None:
        place = Place(size=2, broken=True)
        pool = place.pool()
        pool.ask(A)
        await settled()
        assert (pool.state.failed, pool.state.ready) == (1, 0)
        place.broken = False
        pool.ask(B)
        await settled()
        assert [thing.kind for thing in place.made] == [B]
        pool.ask(A)
        await settled()
        assert [thing.kind for thing in place.made] == [B, A]
        await pool.stop()

    asyncio.run(run())


def test_it_is_handed_out_by_whoever_can_give_it_and_ended_when_it_can_not_be_given() -> None:
    async def run() -> None:
        place = Place(size=2)
        pool = place.pool()
        for _ in range(2):
            pool.ask(A)
        await settled()
        first, second = place.made

        async def give(thing: Thing) -> str | None:
            if thing is first:
                raise SandboxError("It does not answer.")
            return f"{thing.number} is yours"

        assert await pool.hand_out(A, give, place.end) == "1 is yours"
        assert place.ended == [first]

        async def never(thing: Thing) -> str | None:
            return None

        await settled()
        assert await pool.hand_out(A, never, place.end) is None
        assert (pool.hits, pool.misses, pool.discarded) == (1, 1, 3)
        await settled()
        with pytest.raises(asyncio.CancelledError):
            await pool.hand_out(A, cancelled, place.end)
        assert second not in place.ended
        await pool.stop()

    async def cancelled(thing: Thing) -> str | None:
        raise asyncio.CancelledError

    asyncio.run(run())


def test_the_oldest_gives_way_and_none_is_made_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(warm, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(warm, "LOOK_S", 0.01)

    async def run() -> None:
        nonlocal now
        place = Place(size=2)
        pool = place.pool()
        for _ in range(2):
            pool.ask(A)
        await settled()
        assert pool.give_way() is place.made[0]
        pool.ask(A)
        await settled()
        assert (len(place.made), pool.state.ready, pool.state.discarded) == (2, 1, 1)
        now += warm.WAY_S
        pool.ask(A)
        await settled()
        assert (len(place.made), pool.state.ready) == (3, 2)
        for _ in range(2):
            assert pool.give_way() is not None
        assert pool.give_way() is None
        await pool.stop()

    asyncio.run(run())


@settings(max_examples=80, deadline=None)
@given(
    size=st.integers(1, 4),
    steps=st.lists(
        st.tuples(
            st.sampled_from([A, B]), st.sampled_from(["ask", "die", "break", "mend"]), st.integers(0, 9)
        ),
        max_size=40,
    ),
)
def test_however_slow_the_engine_is_there_are_never_more_than_its_size_and_each_is_had_once(
    size: int, steps: list[tuple[Kind, str, int]]
) -> None:
    async def run() -> None:
        place = Place(size=size)
        pool = place.pool()
        given_away: list[Thing] = []
        for kind, what, turns in steps:
            place.slow = turns
            match what:
                case "ask":
                    pool.ask(kind)
                    if (thing := pool.take(kind)) is not None:
                        assert thing.alive
                        assert thing.kind == kind
                        given_away.append(thing)
                        place.there -= 1  # it is the asker's now
                case "die":
                    for thing in place.made[-1:]:
                        thing.alive = False
                case _:
                    place.broken = what == "break"
            await settled(turns)
            state = pool.state
            assert state.ready + state.making <= size
        left = await pool.stop()
        assert place.most <= size
        had = [*given_away, *place.ended, *left]
        assert len({thing.number for thing in had}) == len(had)
        assert pool.state.ready == 0

    pause, warm.FIRST_PAUSE_S = warm.FIRST_PAUSE_S, 0.0
    try:
        asyncio.run(run())
    finally:
        warm.FIRST_PAUSE_S = pause
