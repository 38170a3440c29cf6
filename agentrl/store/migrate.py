"""A database of any age to one with today's tables, or a refusal.

The version of the schema is Alembic's: `migrations/versions` holds one script per step, and the tip is
`HEAD`. Two processes that open a new store at once migrate it once.
"""

from __future__ import annotations

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, inspect, text

from agentrl.errors import StoreError
from agentrl.store.engine import Database

HEAD = "0003"
"""The tip of `migrations/versions`: an up-to-date store is recognised by one query."""
_ADVISORY_LOCK = 0x61_67_65_6E_74_72_6C
"""Key of the PostgreSQL advisory lock: "agentrl" in ASCII."""


def migrate(database: Database) -> None:
    """Create or upgrade the tables.

    Raises:
        StoreError: the schema is newer than this agentrl, or the database belongs to something else.
    """
    database.enable_wal()
    with database.read() as connection:
        if _revision(connection) == HEAD:
            return
    database.write("create or upgrade the tables", _upgrade)


def _upgrade(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
    revision = _revision(connection)
    if revision == HEAD:
        return
    tables = inspect(connection).get_table_names()
    if revision is None and tables:
        raise StoreError(
            f"the database holds tables that are not a store's ({', '.join(sorted(tables)[:3])}).",
            fix="Use another database or file.",
        )
    if revision is not None and revision > HEAD:
        raise StoreError(
            f"the store has schema {revision}, and this agentrl knows schemas up to {HEAD}.",
            fix="Upgrade agentrl, or open the store with the version that wrote it.",
        )
    config = Config()
    config.set_main_option("script_location", "agentrl.store:migrations")
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _revision(connection: Connection) -> str | None:
    """The schema version that the database says it has, or None. Versions sort as text."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return revision
