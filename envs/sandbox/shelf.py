"""What lies in a state folder so that sandboxes can be made of it: who needs a thing, when it was last asked
for, and its removal.

Beside the things lies `used/`: for each an empty file whose time is when it was last asked for, and a lock.
Whoever makes a sandbox first leaves a note in the folder of its backend (`run/<backend>/`) that names what
the sandbox is made of, under a shared hold of the lock; whoever removes holds it alone, reads all notes
again, and renames the thing away. Invariants: what a note names is there, whole, for as long as the note is;
a note of a backend that nobody runs any more counts for nothing; nobody waits for the bytes to be deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import stat
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from agentrl.errors import SandboxError
from envs.sandbox.contract import StockItem, StockKind

LOCK_DEADLINE_S = 20.0
NOTE = ".uses"
"""How the names of notes end."""
HALF_DONE_S = 6 * 3600.0
"""What a killed process left half-made is removed after so long; nobody takes so long to make a thing."""
TAKES = 3
"""So often a thing is made again that was removed before it was held."""
_PAUSE_S = 0.002
_GONE = ".removed-"
T = TypeVar("T")


class Shelf:
    """The things of one state folder, by the pattern of their paths in it (`images/dir-*`)."""

    def __init__(
        self, state: Path, kinds: Mapping[str, StockKind], *, counts: Callable[[Path], bool]
    ) -> None:
        """`counts`: whether the notes of a backend's folder do; for one whose sandboxes are surely gone they
        do not."""
        self._state = state
        self._kinds = kinds
        self._counts = counts
        self._used = state / "used"

    # -- by those who make sandboxes. All of it takes a moment: call from a thread.

    def use(self, note: Path, things: Iterable[Path]) -> bool:
        """Leave a note that a sandbox is made of these. False, and no note: one of them is gone."""
        names = [self._name(thing) for thing in things]
        with self._locked(fcntl.LOCK_SH):
            if not all((self._state / name).exists() for name in names):
                return False
            note.write_text("\n".join(names))
            for name in names:
                self._mark(name)
        return True

    def ended(self, note: Path, *, remove: bool = True) -> None:
        """The sandbox of a note is gone: what it was made of was used until now. Never raises."""
        with contextlib.suppress(OSError):
            for name in note.read_text().splitlines():
                if (self._state / name).exists():
                    self._mark(name)
            if remove:
                note.unlink()

    def touch_all(self, things: Iterable[Path]) -> bool:
        """They were asked for now. False: one of them is gone. On a full disk the mark may be lost."""
        wanted = list(things)
        try:
            with self._locked(fcntl.LOCK_SH):
                for thing in wanted:
                    if thing.exists():
                        self._mark(self._name(thing))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        return all(thing.exists() for thing in wanted)

    # -- by those who look and remove

    def stock(self, *, sizes: bool) -> list[StockItem]:
        """All things, in no order. Also removes what was half-made or half-removed by somebody who died."""
        self._sweep()
        users = self._users()
        return [
            StockItem(
                id=name,
                kind=kind,
                bytes=size_of(self._state / name) if sizes else None,
                used_at=self._used_at(name),
                users=users[name],
                place=str(self._state),
            )
            for name, kind in self._names()
        ]

    def discard(self, name: str, *, unused_s: float) -> bool:
        """Remove a thing that nobody needs and nobody asked for within so many seconds. False: it stays."""
        thing = self._state / name
        away = thing.with_name(_GONE + os.urandom(6).hex())
        with self._locked(fcntl.LOCK_EX):
            if self._users()[name] or unused_for(self._used_at(name)) < unused_s:
                return False
            try:
                os.rename(thing, away)
            except FileNotFoundError:
                return False
            (self._used / name).unlink(missing_ok=True)
        remove_tree(away)
        return True

    # -- inside

    def _name(self, thing: Path) -> str:
        return str(thing.relative_to(self._state))

    def _names(self) -> Iterator[tuple[str, StockKind]]:
        for pattern, kind in self._kinds.items():
            for thing in self._state.glob(pattern):
                yield self._name(thing), kind

    def _mark(self, name: str) -> None:
        mark = self._used / name
        try:
            os.utime(mark)
        except FileNotFoundError:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()

    def _used_at(self, name: str) -> float:
        """Where nobody has asked for it yet: when it was made."""
        with contextlib.suppress(OSError):
            return (self._used / name).lstat().st_mtime
        with contextlib.suppress(OSError):
            return (self._state / name).lstat().st_ctime
        return 0.0

    def _users(self) -> Counter[str]:
        found: Counter[str] = Counter()
        counting: dict[Path, bool] = {}
        run = self._state / "run"
        for note in (*run.glob(f"*/*{NOTE}"), *run.glob(f"*/*/*{NOTE}")):  # never into a policy's files
            backend = run / note.relative_to(run).parts[0]
            if backend not in counting:
                counting[backend] = self._counts(backend)
            if counting[backend]:
                with contextlib.suppress(OSError):  # It has just ended.
                    found.update(set(note.read_text().splitlines()))
        return found

    def _sweep(self) -> None:
        for folder in {(self._state / pattern).parent for pattern in self._kinds}:
            for left in folder.glob(f"{_GONE}*"):
                remove_tree(left)
            for left in folder.glob(".building-*"):
                with contextlib.suppress(OSError):
                    if time.time() - left.stat().st_mtime > HALF_DONE_S:
                        remove_tree(left)

    @contextlib.contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        """Hold the lock, shared or alone. Whoever waits for it holds the gate, so that those who share it do
        not keep out for ever who needs it alone. Raises `SandboxError` when somebody does not let go."""
        self._used.mkdir(parents=True, exist_ok=True)
        until = time.monotonic() + LOCK_DEADLINE_S
        with contextlib.ExitStack() as holding:
            with contextlib.ExitStack() as passing:
                self._take(passing, ".gate", fcntl.LOCK_EX, until)
                self._take(holding, ".lock", how, until)
            yield

    def _take(self, holding: contextlib.ExitStack, name: str, how: int, until: float) -> None:
        handle = os.open(self._used / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        holding.callback(os.close, handle)
        while True:
            try:
                return fcntl.flock(handle, how | fcntl.LOCK_NB)
            except BlockingIOError as busy:
                if time.monotonic() > until:
                    raise SandboxError(
                        f"The lock {self._used / name} was not free within {LOCK_DEADLINE_S:g} s.",
                        fix="Another process that removes images hangs: look with `fuser`.",
                        code="images_locked",
                        phase="prepare",
                    ) from busy
                time.sleep(_PAUSE_S)


async def held_while(
    found: Callable[[], Awaitable[tuple[T, list[Path]]]], hold: Callable[[list[Path]], bool]
) -> T:
    """What `found` makes, or finds, of some things, once `hold` has a hold of them all: what is removed in
    between is made again. Raises `SandboxError` images_removed when that goes on."""
    for _ in range(TAKES):
        made, things = await found()
        if await asyncio.to_thread(hold, things):
            return made
    raise SandboxError(
        "An image is removed again and again before it can be used.",
        fix="Stop what removes it, or remove only what was not used for longer.",
        code="images_removed",
        phase="prepare",
    )


def in_order(items: Iterable[StockItem]) -> tuple[StockItem, ...]:
    """The longest unused first."""
    return tuple(sorted(items, key=lambda item: (item.used_at, item.id)))


def size_of(thing: Path) -> int:
    """Bytes that a file or a whole folder takes on its disk."""
    seen: set[tuple[int, int]] = set()
    total = 0
    waiting = [str(thing)]
    while waiting:
        path = waiting.pop()
        with contextlib.suppress(OSError):
            facts = os.lstat(path)
            if (facts.st_dev, facts.st_ino) not in seen:
                seen.add((facts.st_dev, facts.st_ino))
                total += facts.st_blocks * 512
            if stat.S_ISDIR(facts.st_mode):
                waiting += [entry.path for entry in os.scandir(path)]
    return total


def remove_tree(folder: Path) -> None:
    """Remove a folder whatever its modes; what can not be removed stays."""
    for root, folders, _ in os.walk(folder):
        for name in folders:
            with contextlib.suppress(OSError):
                if not os.path.islink(os.path.join(root, name)):
                    os.chmod(os.path.join(root, name), 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def unused_for(used_at: float) -> float:
    """Seconds since then, a Unix time; 0 where the clock that wrote it is ahead of this one."""
    return max(0.0, time.time() - used_at)
