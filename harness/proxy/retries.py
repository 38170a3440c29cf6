"""One request, one sampling: what a client sends again is answered with what it asked for before.

A request is recognised as a retry by
- an `Idempotency-Key` that was used before (with another body it is refused);
- the retry count that official clients send, above 0: the same body, still running or answered;
- else, from a client that sends neither: the same body, while that is running or just after its answer.

A retry count of 0 says that it is no retry: equal requests at once are then separate samples, as a client
that wants several samples expects. The last client to leave takes the sampling with it.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from harness.proxy.exchange import Refusal

RETRY_S = 600.0
"""How long after its answer a request can be retried by count; longer than any client waits."""
JUST_ANSWERED_S = 5.0
"""The same without a count: an answer that was lost on its way is asked for again at once."""
KEPT = 1024
"""Answers kept for retries; the oldest go first."""
COUNT_HEADER = "x-stainless-retry-count"

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Running(Generic[T]):
    task: asyncio.Task[T]
    body: str
    waiting: int = 0
    answered_at: float | None = None


@dataclass(slots=True)
class Retries(Generic[T]):
    """Requests of one session by key and by body."""

    clock: Callable[[], float] = time.monotonic
    joined: int = 0
    """Retries that were answered with an earlier sampling."""
    _by_key: dict[str, _Running[T]] = field(default_factory=dict)
    _by_body: dict[str, _Running[T]] = field(default_factory=dict)

    async def once(
        self, path: str, headers: Mapping[str, str], body: bytes, start: Callable[[], Awaitable[T]]
    ) -> T:
        """The answer to a request: of `start()`, or of the request that this one repeats. A failed one is
        tried again. Raises what `start` raises, and `Refusal` for a key used twice."""
        print_ = hashlib.sha256(path.encode() + b"\0" + body).hexdigest()
        key = headers.get("idempotency-key")
        running = self._before(key, headers.get(COUNT_HEADER), print_)
        if running is None:
            running = _Running(task=asyncio.ensure_future(_awaited(start)), body=print_)
            if key is not None:
                self._keep(self._by_key, key, running)
            self._keep(self._by_body, print_, running)
        else:
            self.joined += 1
        running.waiting += 1
        try:
            answer = await asyncio.shield(running.task)
            if running.answered_at is None:
                running.answered_at = self.clock()
            return answer
        except BaseException:
            if running.task.done():
                self._forget(running)
            raise
        finally:
            running.waiting -= 1
            if running.waiting == 0 and not running.task.done():
                running.task.cancel()
                self._forget(running)

    def _before(self, key: str | None, count: str | None, body: str) -> _Running[T] | None:
        if key is not None:
            found = self._by_key.get(key)
            if found is not None and found.body != body:
                raise Refusal(
                    "This Idempotency-Key was used for another request. Use a new one.",
                    status=409,
                    kind="idempotency_error",
                    code="idempotency_key_reused",
                )
            return found
        if count == "0":
            return None
        found = self._by_body.get(body)
        if found is None or found.answered_at is None:
            return found
        within = RETRY_S if count is not None else JUST_ANSWERED_S
        return found if self.clock() - found.answered_at <= within else None

    def _keep(self, where: dict[str, _Running[T]], name: str, running: _Running[T]) -> None:
        where.pop(name, None)
        where[name] = running
        while len(where) > KEPT:
            oldest = next(iter(where))
            if where[oldest].answered_at is None:
                break
            del where[oldest]

    def _forget(self, running: _Running[T]) -> None:
        for where in (self._by_key, self._by_body):
            for name in [n for n, r in where.items() if r is running]:
                del where[name]


async def _awaited(start: Callable[[], Awaitable[T]]) -> T:
    return await start()
