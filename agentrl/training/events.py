"""What a run tells while it goes on, apart from how it is shown: a bar, plain lines, JSON lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from agentrl.store.store import Store


class Listener(Protocol):
    """Receives the progress of a run. Calls come from one thread; none may raise or block for long."""

    def begin(self, phase: str, *, total: int | None, unit: str) -> None:
        """A phase starts: `images`, `tasks`, `demonstration`, `imitation`, `heldout_before`, `train`,
        `heldout_after`, `report`.
        `total` counts `unit`s; None when unknown."""
        ...

    def advance(self, n: int = 1, **facts: float | int | str) -> None:
        """`n` more units of the current phase are done; `facts` are its current numbers (reward, loss,
        faults)."""
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
    """Shows nothing and keeps what it was told: for programs that only want the result.

    phases: names, in the order they began.
    numbers: of every update.
    notes: what a person should have read.
    """

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.numbers: list[Mapping[str, float]] = []
        self.notes: list[str] = []

    def begin(self, phase: str, *, total: int | None, unit: str) -> None:
        self.phases.append(phase)

    def advance(self, n: int = 1, **facts: float | int | str) -> None: ...

    def end(self, **facts: float | int | str) -> None: ...

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.numbers.append(values)

    def note(self, message: str) -> None:
        self.notes.append(message)


class Noting:
    """Passes everything on, and keeps the notes with the run."""

    def __init__(self, listener: Listener, store: Store, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        self._listener = listener
        self.begin = listener.begin
        self.advance = listener.advance
        self.end = listener.end
        self.metrics = listener.metrics

    def note(self, message: str) -> None:
        self._store.note(self._run_id, "note", message)
        self._listener.note(message)
