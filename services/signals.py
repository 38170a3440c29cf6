"""Signals of a serving process: noted, so that it is stopped in order before it ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def noted(stopped: list[int]) -> Iterator[None]:
    """The server handles SIGINT and SIGTERM while it serves and raises them again afterwards: here they are
    noted in `stopped`, so that what is behind it is stopped before the process ends."""

    def note(number: int, _frame: FrameType | None) -> None:
        stopped.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
