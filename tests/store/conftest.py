"""Tests that take `url` or `store` run on SQLite and on a PostgreSQL that lives as long as the session."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from agentrl.store import Store

BACKENDS = ("sqlite", "postgresql")


class Postgres:
    """A server on a socket in its own folder, run by the user `postgres` when we are root."""

    def __init__(self, binaries: Path) -> None:
        self._binaries = binaries
        self._folder = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))
        self._user = "postgres" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
        if os.geteuid() == 0:
            shutil.chown(self._folder, "postgres")
        data = self._folder / "data"
        self._run(
            "initdb", "-D", str(data), "-U", "postgres", "-A", "trust", "-N", "-E", "UTF8", "--locale=C"
        )
        options = f"-c listen_addresses= -k {self._folder} -c fsync=off -c max_connections=60"
        self._run(
            "pg_ctl",
            "-D",
            str(data),
            "-w",
            "-t",
            "30",
            "-l",
            str(self._folder / "log"),
            "-o",
            options,
            "start",
        )
        with Store.open(self.database("blank")):
            pass  # migrated once; the others are copies of it

    def database(self, template: str | None = None) -> str:
        """The URL of a new database: migrated, or empty under a given name."""
        name = template or f"t{uuid.uuid4().hex[:12]}"
        extra = () if template else ("-T", "blank")
        self._run("createdb", "-h", str(self._folder), "-U", "postgres", *extra, name)
        return f"postgresql://postgres@/{name}?host={self._folder}"

    def stop(self) -> None:
        self._run("pg_ctl", "-D", str(self._folder / "data"), "-m", "immediate", "-w", "-t", "30", "stop")
        shutil.rmtree(self._folder)

    def _run(self, program: str, *words: str) -> None:
        subprocess.run(
            [str(self._binaries / program), *words],
            check=True,
            timeout=60,
            cwd=self._folder,
            stdout=subprocess.DEVNULL,
            user=self._user,
        )


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"))
    if not found:
        pytest.skip("no PostgreSQL binaries in /usr/lib/postgresql")
    if find_spec("psycopg") is None:
        pytest.skip("psycopg is not installed (pip install 'agentrl[postgres]')")
    server = Postgres(found[-1].parent)
    yield server
    server.stop()


@pytest.fixture(params=BACKENDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new, empty store."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'store.db'}"
    server: Postgres = request.getfixturevalue("postgres")
    return server.database()


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as opened:
        yield opened


@pytest.fixture(scope="module", params=BACKENDS)
def shared_store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """One store for all examples of a property test; each example begins its own run."""
    if request.param == "sqlite":
        where = f"sqlite:///{tmp_path_factory.mktemp('shared') / 'store.db'}"
    else:
        where = request.getfixturevalue("postgres").database()
    with Store.open(where) as opened:
        yield opened


@pytest.fixture
def run_id(store: Store) -> str:
    return store.begin_run("test", config={"lr": 1e-5, "name": "ü"}, algo="grpo", seed=7).id
