"""What a run tells while it goes on, apart from how it is shown: a bar, plain lines, JSON lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Listener(Protocol):
    """Receives the progress of a run. Calls come from one thread; none may raise or block for long."""

    def begin(self, phase: str, *, total: int | None, unit: str) -> None:
        """A phase starts: `tasks`, `demonstrations`, `imitation`, `heldout_before`, `train`, `heldout_after`, `report`.
        `total` counts `unit`s; None when unknown."""
        ...

    def advance(self, n: int = 1, **facts: float | int | str) -> None:
        """`n` more units of the current phase are done; `facts` are its current numbers (reward, loss, faults)."""
        ...

    def end(self, **facts: float | int | str) -> None:
        """The current phase is over."""
        ...

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of one update."""
        ...

    def note(self, message: str) -> None:
        """Something a person should read: a fall-back, a resume, a fault."""
        ...


class Silent:
    """Shows nothing."""

    def begin(self, phase: str, *, total: int | None, unit: str) -> None: ...

    def advance(self, n: int = 1, **facts: float | int | str) -> None: ...

    def end(self, **facts: float | int | str) -> None: ...

    def metrics(self, step: int, values: Mapping[str, float]) -> None: ...

    def note(self, message: str) -> None: ...
