"""A database URL to an engine with two ways in: `read` (one snapshot) and `write` (one transaction, retried).

Writers on one SQLite file take turns: threads by a lock of this process, processes by `BEGIN IMMEDIATE`, so a
transaction never has to be upgraded and never deadlocks. PostgreSQL writers of one run take turns on the row
of its chain. Every wait ends at a deadline with an error that names what was waited for, for how long, and
who holds it.

Durability: SQLite runs in WAL mode with synchronous=NORMAL. A killed process loses nothing that was
acknowledged; a power cut may lose the last transactions, never the chain before them.
"""

from __future__ import annotations

import os
import random
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from agentrl.errors import ConfigError, StoreError

R = TypeVar("R")

_SLICE_S = 0.5
"""How long SQLite itself waits for a lock before we look at the deadline again."""
_PAGE_BYTES = 16_384
"""Page of a new SQLite file: a call of 400 tokens takes about 3.5 kB, so a page of 4 kB would fit one."""
_SHM_WRITE_LOCK = 120
"""Byte of the `-shm` file that a WAL writer locks (SQLite file format, WAL-index locks)."""
_TRANSIENT_SQLSTATES = frozenset({"40001", "40P01", "55P03", "57P01", "57P02", "57P03", "53300"})
"""Serialization failure, deadlock, lock not available, server stopping or starting, too many clients."""


class Database:
    """One database and how to wait for it."""

    def __init__(self, url: str | Path, *, wait_s: float, create: bool) -> None:
        self.url = _parse(url)
        self.wait_s = wait_s
        self.sqlite = self.url.get_backend_name() == "sqlite"
        if self.sqlite:
            path = Path(str(self.url.database))
            if not create and not path.exists():
                raise StoreError(
                    f"no store at {path}.", fix="Check the path; a training run creates its store."
                )
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StoreError(f"can not create the folder of {path}: {error.strerror}.") from error
        self._turn = threading.Lock()
        self._engine = _sqlite_engine(self.url, wait_s) if self.sqlite else _postgres_engine(self.url, wait_s)
        options: dict[str, Any] = {} if self.sqlite else {"isolation_level": "REPEATABLE READ"}
        self._reading: Engine = self._engine.execution_options(**options)
        self._writing: Engine = self._engine.execution_options(agentrl_write=True)

    def close(self) -> None:
        """Give the connections back. The object can not be used afterwards."""
        self._engine.dispose()

    def __str__(self) -> str:
        return self.url.render_as_string(hide_password=True)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """One consistent snapshot, whatever writers do meanwhile.

        Raises:
            StoreError: the database can not be read.
        """
        try:
            with self._reading.connect() as connection, connection.begin():
                yield connection
        except SQLAlchemyError as error:
            raise StoreError(f"reading {self}: {_words(error)}") from error

    def write(self, what: str, work: Callable[[Connection], R]) -> R:
        """Run `work` in one transaction; run it again when the database was busy, until the deadline.

        Args:
            what: the reason, for the error: "add trajectory 3f2a".
            work: must have no effect outside its connection, because it may run more than once.

        Raises:
            StoreError: from `work`, or the wait ended, or the database refused.
        """
        began = time.monotonic()
        deadline = began + self.wait_s
        conflicts = 0
        if self.sqlite and not self._turn.acquire(timeout=self.wait_s):
            raise StoreError(
                f"{what}: waited {self.wait_s:g} s: another thread of this process is writing to {self}.",
                fix="Look for a transaction that hangs, or open the store with a larger wait_s.",
            )
        try:
            while True:
                try:
                    with self._writing.connect() as connection, connection.begin():
                        return work(connection)
                except IntegrityError as error:
                    # Another writer inserted between our look and our insert: look once more.
                    conflicts += 1
                    if conflicts > 1:
                        raise StoreError(f"{what}: {_words(error)}") from error
                except SQLAlchemyError as error:
                    if not _transient(error):
                        raise StoreError(f"{what}: {_words(error)}") from error
                    if time.monotonic() >= deadline:
                        raise StoreError(
                            f"{what}: waited {time.monotonic() - began:.1f} s for {self}; {self._holder()}. "
                            f"The database said: {_words(error)}.",
                            fix="Stop that writer or wait for it; wait_s is the limit.",
                        ) from error
                    time.sleep(random.uniform(0.002, 0.02))
        finally:
            if self.sqlite:
                self._turn.release()

    def enable_wal(self) -> None:
        """Put a SQLite file into WAL mode; nothing to do elsewhere.

        Raises:
            StoreError: the file is not a database, or its filesystem can not do WAL (a network share).
        """
        if not self.sqlite:
            return
        deadline = time.monotonic() + self.wait_s
        while True:
            try:
                connection = sqlite3.connect(str(self.url.database), timeout=_SLICE_S)
                try:
                    connection.execute(f"PRAGMA page_size={_PAGE_BYTES}")  # heeded by a new file only
                    mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
                finally:
                    connection.close()
            except sqlite3.Error as error:
                if "locked" not in str(error) or time.monotonic() >= deadline:
                    raise StoreError(f"opening {self}: {error}.", fix="Is this the store's file?") from error
                time.sleep(random.uniform(0.002, 0.02))
                continue
            if mode != "wal":
                raise StoreError(
                    f"{self} refuses write-ahead logging (it is in mode {mode}).",
                    fix="Keep the file on a local disk, or use PostgreSQL.",
                )
            return

    def _holder(self) -> str:
        """Who is in the way, as far as the system tells."""
        if self.sqlite:
            return _sqlite_holder(Path(str(self.url.database)))
        try:
            with self._engine.connect() as connection:
                row = connection.execute(
                    text(
                        "SELECT pid, application_name, EXTRACT(EPOCH FROM clock_timestamp() - xact_start) "
                        "FROM pg_stat_activity WHERE datname = current_database() "
                        "AND pid <> pg_backend_pid() AND xact_start IS NOT NULL ORDER BY xact_start LIMIT 1"
                    )
                ).first()
        except SQLAlchemyError as error:
            return f"the server does not answer ({_words(error)})"
        if row is None:
            return "no other transaction is open now"
        return f"the oldest open transaction is of backend {row[0]} ({row[1]}), since {float(row[2]):.1f} s"


def now(connection: Connection) -> float:
    """The time that leases are measured by: the server's clock, or this machine's for a file."""
    if connection.dialect.name == "postgresql":
        return float(connection.scalar(text("SELECT EXTRACT(EPOCH FROM clock_timestamp())")) or 0.0)
    return time.time()


def _parse(url: str | Path) -> URL:
    if isinstance(url, Path) or "://" not in url:
        parsed = URL.create("sqlite", database=str(url))
    else:
        try:
            parsed = make_url(url)
        except ArgumentError as error:
            raise ConfigError(
                f"{url!r} is not a database URL.",
                fix="Use sqlite:///store.db or postgresql://user@host/name.",
            ) from error
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        if parsed.database in (None, "", ":memory:"):
            raise ConfigError("A store in memory can not be shared.", fix="Use a file: sqlite:///store.db.")
        return parsed.set(drivername="sqlite")
    if backend != "postgresql":
        raise ConfigError(
            f"No store on {backend}.", fix="Use sqlite:///store.db or postgresql://user@host/name."
        )
    if find_spec("psycopg") is None:
        raise ConfigError("PostgreSQL needs the driver psycopg.", fix="pip install 'agentrl[postgres]'")
    return parsed.set(drivername="postgresql+psycopg")


def _sqlite_engine(url: URL, wait_s: float) -> Engine:
    engine = create_engine(
        url,
        connect_args={"timeout": min(_SLICE_S, wait_s), "check_same_thread": False},
        pool_size=8,
        max_overflow=24,
        pool_timeout=wait_s,
    )

    @event.listens_for(engine, "connect")
    def _configure(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None  # we begin transactions ourselves, below
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA foreign_keys=ON")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        writing = connection.get_execution_options().get("agentrl_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writing else "BEGIN")

    return engine


def _postgres_engine(url: URL, wait_s: float) -> Engine:
    engine = create_engine(
        url,
        connect_args={
            "application_name": f"agentrl {socket.gethostname()}:{os.getpid()}",
            "connect_timeout": max(2, int(wait_s)),
        },
        pool_size=8,
        max_overflow=24,
        pool_timeout=wait_s,
        pool_pre_ping=True,
    )

    @event.listens_for(engine, "connect")
    def _configure(connection: Any, _record: object) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"SET lock_timeout = {int(wait_s * 1000)}")
        connection.commit()

    return engine


def _transient(error: SQLAlchemyError) -> bool:
    if isinstance(error, PoolTimeout):
        return True
    if not isinstance(error, DBAPIError):
        return False
    if isinstance(error.orig, sqlite3.OperationalError):
        return "locked" in str(error.orig) or "busy" in str(error.orig)
    sqlstate = getattr(error.orig, "sqlstate", None)
    return error.connection_invalidated or sqlstate in _TRANSIENT_SQLSTATES


def _words(error: SQLAlchemyError) -> str:
    """The database's own sentence, without statement and parameters (they hold token ids by the thousand)."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {'; '.join(line.strip() for line in lines[:3])}"


def _sqlite_holder(path: Path) -> str:
    """The process that holds the write lock of a SQLite file, from the kernel's lock table (Linux)."""
    try:
        inode = Path(f"{path}-shm").stat().st_ino
        table = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return "another process is writing"
    for line in table:
        words = line.split()
        # "7: POSIX ADVISORY WRITE 4242 08:01:131 120 120": pid, device and inode, first byte, last byte
        if len(words) != 8 or words[3] != "WRITE" or not words[5].endswith(f":{inode}"):
            continue
        if int(words[6]) > _SHM_WRITE_LOCK or (words[7] != "EOF" and int(words[7]) < _SHM_WRITE_LOCK):
            continue
        try:
            command = (
                Path(f"/proc/{words[4]}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
        except OSError:
            command = "gone by now"
        return f"process {words[4]} is writing ({command.strip()[:120]})"
    return "another process was writing"
