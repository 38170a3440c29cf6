"""Transitions to the store: in order, in batches, never lost while this process lives.

`move` notes a line and returns; `flushed` waits until everything noted so far is durable. One writer; when
the store is away it tries again, and `trouble` says why. A newer gateway of the same name ends it: then
nothing more is written, and `superseded` is set.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from agentrl.errors import StoreError
from agentrl.store import SessionMove, SessionRow, Store, Superseded

FLUSH_DEADLINE_S = 30.0
RETRY_S = 0.5
LINGER_S = 0.1
"""Lines that nobody waits for are written a little later, many at once: a commit costs more than a command.
When the process is killed first they are lost, and a successor asks the sandboxes instead."""
BATCH = 512
CLOSE_DEADLINE_S = 10.0

log = logging.getLogger(__name__)


class Journal:
    """The one writer of a gateway's log."""

    def __init__(self, store: Store, *, gateway: str, epoch: int) -> None:
        self.trouble: str | None = None
        self.superseded = False
        self._store = store
        self._gateway = gateway
        self._epoch = epoch
        self._pending: list[SessionRow | SessionMove] = []
        self._noted = 0
        self._written = 0
        self._changed = asyncio.Event()
        self._awaited = asyncio.Event()
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._writer = asyncio.create_task(self._write())

    def open(self, row: SessionRow) -> None:
        """A new session."""
        self._note(row)

    def move(self, line: SessionMove) -> None:
        """A transition."""
        self._note(line)

    def _note(self, line: SessionRow | SessionMove) -> None:
        self._pending.append(line)
        self._noted += 1
        self._changed.set()

    @property
    def mark(self) -> int:
        """Where the log is now, for `flushed`: the lines noted so far."""
        return self._noted

    async def flushed(self, deadline_s: float | None = None, *, mark: int | None = None) -> None:
        """Wait until everything noted so far, or up to the mark, is durable; never longer than
        `FLUSH_DEADLINE_S`.

        Raises:
            StoreError: it is not, within the deadline, or never will be.
        """
        mark = self._noted if mark is None else mark
        deadline_s = FLUSH_DEADLINE_S if deadline_s is None else min(deadline_s, FLUSH_DEADLINE_S)
        if self._written >= mark:
            return
        if self.superseded:
            raise StoreError(self.trouble or "superseded", fix="Use the newer gateway.")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((mark, done))
        self._awaited.set()
        try:
            async with asyncio.timeout(deadline_s):
                await done
        except TimeoutError as error:
            why = self.trouble or "the writer is behind"
            raise StoreError(
                f"waiting for the session log since {deadline_s:g} s: {why}", fix="Look at the store."
            ) from error

    async def ask(self) -> bool:
        """Whether a newer gateway of this name has started, as the store says now; when it can not be asked,
        what was known last."""
        with suppress(StoreError):
            try:
                await asyncio.to_thread(self._store.append_sessions, self._gateway, self._epoch, [], [])
            except Superseded as error:
                self._stop(str(error))
        return self.superseded

    async def _write(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._awaited.clear()
            if not self._waiters:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LINGER_S):
                        await self._awaited.wait()
            while self._pending:
                batch = self._pending[:BATCH]
                opened = [line for line in batch if isinstance(line, SessionRow)]
                moves = [line for line in batch if isinstance(line, SessionMove)]
                try:
                    await asyncio.to_thread(
                        self._store.append_sessions, self._gateway, self._epoch, opened, moves
                    )
                except Superseded as error:
                    self._stop(str(error))
                    return
                except StoreError as error:
                    self.trouble = str(error)
                    log.error("the session log can not be written, trying again: %s", error)
                    await asyncio.sleep(RETRY_S)
                    continue
                except Exception as error:  # the boundary of the log: a bug must not end its only writer
                    self.trouble = f"{type(error).__name__}: {error}"
                    log.error("the session log can not be written by an error of our own", exc_info=error)
                    await asyncio.sleep(RETRY_S)
                    continue
                self.trouble = None
                del self._pending[: len(batch)]
                self._written += len(batch)
                self._tell()

    def _tell(self) -> None:
        due = [done for mark, done in self._waiters if mark <= self._written]
        self._waiters = [(mark, done) for mark, done in self._waiters if mark > self._written]
        for done in due:
            if not done.done():
                done.set_result(None)

    def _stop(self, why: str) -> None:
        self.superseded = True
        self.trouble = why
        log.error("this gateway writes nothing more: %s", why)
        for _, done in self._waiters:
            if not done.done():
                done.set_exception(StoreError(why, fix="Use the newer gateway."))
        self._waiters.clear()

    async def close(self) -> None:
        """Write what is noted, then stop. Never raises; what could not be written is logged."""
        try:
            await self.flushed(CLOSE_DEADLINE_S)
        except StoreError as error:
            log.error("the end of the session log is not written: %s", error)
        self._writer.cancel()
        await asyncio.gather(self._writer, return_exceptions=True)
