"""The disks of a backend: nothing new is made where one is nearly full, and before that what nobody uses is
let go, the longest unused first.

Two marks, in free bytes. Below the upper (`images.spare_bytes`) things are discarded in the background, until
half as much again is free. Below the lower (`images.LOW_BYTES`) no image is made and a gateway admits nobody;
sandboxes of images that are there are still made, down to `images.SANDBOX_SHARE` of it. What a sandbox needs,
or anybody asked for within `FRESH_S`, is never let go.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from agentrl.errors import SandboxError
from envs.sandbox.contract import Stocking, StockItem
from envs.sandbox.images import SANDBOX_SHARE, free_bytes, require_room, short_of_room, spare_bytes

FRESH_S = 900.0
"""So long after somebody asked for a thing it is not let go: whoever prepared an image may be about to start
a sandbox of it, or a verifier that waits for its turn. Longer than any such wait."""
FREE_DEADLINE_S = 120.0
"""For room to be made, where a sandbox or an image waits for it."""
AGAIN_S = 30.0
"""Between two looks for what can be let go, when there was nothing."""
HALF_MORE = 1.5
"""Of the upper mark: so much is free when enough was let go."""
T = TypeVar("T")

log = logging.getLogger(__name__)


def chosen(
    items: Sequence[StockItem], *, older_s: float, keep_bytes: int | None = None, now: float
) -> tuple[StockItem, ...]:
    """What may be let go, the longest unused first: nothing that a sandbox needs, or that anybody asked for
    within `older_s` or `FRESH_S`. With `keep_bytes` (of items whose size is known) only as much of it as
    brings the sum of all down to that."""
    left = sum(item.bytes or 0 for item in items)
    found = []
    for item in sorted(items, key=lambda item: item.used_at):
        if item.users or now - item.used_at < max(older_s, FRESH_S):
            continue
        if keep_bytes is not None and left <= keep_bytes:
            break
        left -= item.bytes or 0
        found.append(item)
    return tuple(found)


class Room:
    """Of one backend, in one event loop. `places`: folders whose disks it needs."""

    def __init__(self, stocking: Stocking, places: Callable[[], Sequence[Path]]) -> None:
        self._stocking = stocking
        self._places = places
        self._freeing: asyncio.Task[int] | None = None
        self._vain_until = float("-inf")
        self.freed = 0
        """Things let go so far."""

    def short_of(self) -> str | None:
        """See `contract.Short`. Also begins to make room where that is due."""
        self.look()
        return short_of_room(*self._places())

    def look(self) -> None:
        """Begin to make room, in the background, if a disk is above the upper mark."""
        if self._freeing is not None and self._freeing.done():
            self._freeing = None
        if self._freeing is None and time.monotonic() >= self._vain_until and self._wanting(1.0):
            with contextlib.suppress(RuntimeError):  # Nobody's loop: whoever only looks makes no room.
                self._freeing = asyncio.get_running_loop().create_task(self._free(HALF_MORE))

    async def for_sandbox(self) -> None:
        """Raise `SandboxError` disk_pressure when not even a sandbox of what is there should be made."""
        self.look()
        for last in (False, True):
            try:
                for place in self._places():
                    require_room(place, share=SANDBOX_SHARE)
                return
            except SandboxError:
                if last or not await self._made():
                    raise

    async def making(self, make: Callable[[], Awaitable[T]]) -> T:
        """What `make` returns, which brings an image; again after making room, and more each time, for as
        long as it has none and there is something to let go."""
        self.look()
        part = 1.0
        while True:
            try:
                return await make()
            except SandboxError as error:
                if error.code != "disk_pressure":
                    raise
                part += not self._wanting(part)  # It takes more than should stay free anyway.
                if not await self._made(part=part):
                    raise

    async def close(self) -> None:
        if self._freeing is not None:
            self._freeing.cancel()
            await asyncio.gather(self._freeing, return_exceptions=True)
            self._freeing = None

    # -- inside

    async def _made(self, *, part: float = 1.0) -> bool:
        """Wait until there is so much of the upper mark free, and half as much again, or nothing more can be
        let go; whether anything was."""
        self.look()
        if self._freeing is None and (part > 1.0 or self._wanting(part)):
            self._freeing = asyncio.create_task(self._free(part * HALF_MORE))
        if self._freeing is None:
            return False
        done, _ = await asyncio.wait({self._freeing}, timeout=FREE_DEADLINE_S)
        return any(not each.cancelled() and each.exception() is None and each.result() for each in done)

    def _wanting(self, part: float) -> dict[int, Path]:
        """Disks with less free than that part of the upper mark, by number."""
        found: dict[int, Path] = {}
        for place in self._places():
            with contextlib.suppress(OSError):
                free, total = free_bytes(place)
                if free < part * spare_bytes(total):
                    found[os.stat(place).st_dev] = place
        return found

    async def _free(self, part: float) -> int:
        """Let go of the longest unused until so much of the upper mark is free; how many things that were."""
        gone = 0
        try:
            items = await self._stocking.stock(sizes=False)
            for item in chosen(items, older_s=FRESH_S, now=time.time()):
                wanting = await asyncio.to_thread(self._wanting, part)
                if not wanting:
                    break
                there = await asyncio.to_thread(_disk, item.place)
                if there in wanting and await self._stocking.discard(item, unused_s=FRESH_S):
                    gone += 1
                    self.freed += 1
        except (SandboxError, OSError) as error:  # Somebody asks again soon.
            log.warning("no room could be made: %s", error)
        if gone:
            log.info("%d images and folders that nobody used were let go, to make room", gone)
        else:
            self._vain_until = time.monotonic() + AGAIN_S
        return gone


def _disk(place: str) -> int | None:
    """The number of the disk that a folder is on; None: it is not here."""
    with contextlib.suppress(OSError):
        return os.stat(place).st_dev
    return None
