"""The migrations make exactly the tables that the code uses, once, whoever comes first."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, text
from store_records import trajectory

from agentrl.errors import StoreError
from agentrl.store import Store
from agentrl.store.migrate import HEAD
from agentrl.store.schema import metadata


def driver(url: str) -> str:
    return url.replace("postgresql:", "postgresql+psycopg:")


def test_the_migrated_tables_are_those_of_the_schema(url: str) -> None:
    Store.open(url).close()
    engine = create_engine(driver(url))
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
    engine.dispose()


def test_head_is_the_tip_of_the_migrations() -> None:
    config = Config()
    config.set_main_option("script_location", "agentrl.store:migrations")
    config.set_main_option("path_separator", "os")
    assert ScriptDirectory.from_config(config).get_current_head() == HEAD


def test_a_schema_from_a_newer_version_is_refused_untouched(url: str) -> None:
    Store.open(url).close()
    engine = create_engine(driver(url))
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(
        StoreError, match=r"the store has schema 9999, and this agentrl knows .* Upgrade agentrl"
    ):
        Store.open(url)


def test_a_database_of_something_else_is_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE albums (id)")
    connection.close()
    with pytest.raises(StoreError, match=r"tables that are not a store's \(albums"):
        Store.open(path)
    (tmp_path / "notes.txt").write_text(
        "this is not a database, and it is long enough to be read as a header " * 9
    )
    with pytest.raises(StoreError, match=r"not a database.*Is this the store's file"):
        Store.open(tmp_path / "notes.txt")


def test_opening_for_reading_makes_no_file(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store at"):
        Store.open(tmp_path / "typo.db", create=False)
    assert list(tmp_path.iterdir()) == []


def test_several_that_open_a_new_store_at_once_all_get_it(tmp_path: Path, postgres: object) -> None:
    server_url = postgres.database(template="empty")  # type: ignore[attr-defined]
    for where in (f"sqlite:///{tmp_path / 'new' / 'store.db'}", server_url):
        errors: list[BaseException] = []

        def begin(where: str = where, errors: list[BaseException] = errors) -> None:
            try:
                with Store.open(where) as store:
                    run = store.begin_run("x", config={}, algo="a", seed=0).id
                    store.add_trajectory(run, trajectory(group_id=run))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=begin) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert errors == []
        with Store.open(where) as store:
            assert [run.trajectories for run in store.runs()] == [1, 1, 1, 1]
