"""What Docker sandboxes leave here for a process that comes after theirs, and how it takes it over.

Beside each sandbox lies a `Record` of what it is; `Estate` holds the locks of the backends that are no more
and the records of those sandboxes of theirs that are its owner's. No engine is asked: it may be down.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from agentrl.errors import EvidenceError
from agentrl.types import SandboxSpec, from_json, to_json
from envs.sandbox import docker_janitor
from envs.sandbox.interpreter import base_python

RECORD = "sandbox.json"
LOCK_TRIES = 10
LOCK_PAUSE_S = 0.02
"""Others look at a lock for a moment, to see whether somebody holds it."""
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[4]); from envs.sandbox import docker_janitor as j;"
    " sys.path.pop(0); j.main(sys.argv[1], sys.argv[2], int(sys.argv[3]))"
)


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Record:
    """One sandbox, as its first process knew it."""

    owner: str
    session: str
    """Empty: nobody's yet, started ahead of who will ask for it."""
    image: str
    instance: str
    lower: str
    spec: SandboxSpec


def write(folder: Path, record: Record) -> None:
    """Into the sandbox's folder, which only this user sees; whole or not at all."""
    beside = folder / f".{RECORD}"
    beside.write_bytes(to_json(record))
    beside.rename(folder / RECORD)


class Estate:
    """Sandboxes of one owner whose processes are no more, by session; the newest of a session first."""

    def __init__(self, run: Path, owner: str) -> None:
        self._run = run
        self._owner = owner
        self._locks: dict[Path, int] = {}
        self._left: dict[Path, Record] = {}

    def enter(self) -> None:
        """Take over the folders of dead backends. Blocks for a moment: call from a thread."""
        with contextlib.suppress(OSError):
            for folder in sorted(self._run.iterdir()):
                found = {f: r for f in folder.glob("agentrl-*") if (r := self._read(f)) is not None}
                if found and folder not in self._locks and (lock := _lock(folder / "lock")) is not None:
                    self._locks[folder] = lock
                    self._left |= found

    def _read(self, folder: Path) -> Record | None:
        try:
            record = from_json(Record, (folder / RECORD).read_bytes())
        except (OSError, EvidenceError):
            return None
        return record if record.owner == self._owner else None

    def take(self, session: str) -> tuple[Path, Record] | None:
        """A sandbox of the session; it is then the caller's. One that is nobody's yet is no session's."""
        found = [f for f, record in self._left.items() if record.session == session and session]
        if not found:
            return None
        newest = max(found, key=lambda folder: (folder / RECORD).stat().st_mtime)
        return newest, self._left.pop(newest)

    def rest(self) -> list[Path]:
        """Everything that was not taken; it is then the caller's to remove."""
        left, self._left = list(self._left), {}
        return left

    def close(self) -> None:
        """Let go of the folders; those that are empty go."""
        for folder, lock in self._locks.items():
            if not any(folder.glob("agentrl-*")):
                with contextlib.suppress(OSError):
                    (folder / "lock").unlink()
                    folder.rmdir()
            os.close(lock)
        self._locks.clear()


def _lock(path: Path) -> int | None:
    """The lock of a backend that is no more; None when somebody holds it."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except OSError:
            time.sleep(LOCK_PAUSE_S)
    os.close(lock)
    return None


class Janitor:
    """The process that clears up after this one."""

    def __init__(self, folder: Path, engine: str) -> None:
        theirs, self._ours = os.pipe2(os.O_CLOEXEC)
        root = str(Path(docker_janitor.__file__).parents[2])
        words: list[Any] = [base_python(), "-I", "-S", "-c", _BOOT, str(folder), engine, str(theirs), root]
        try:
            self._process = subprocess.Popen(
                words,
                pass_fds=(theirs,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
                cwd="/",
                start_new_session=True,
            )
        finally:
            os.close(theirs)

    def dismiss(self, *, everything_gone: bool) -> None:
        """Nothing is left for it to do; or else it stays and does it."""
        if everything_gone:
            self._process.kill()
            self._process.wait()
        os.close(self._ours)
