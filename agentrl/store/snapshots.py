"""Snapshots that tenants of a gateway keep: a row each, with what it holds as one compressed column.

A key of a tenant names one snapshot; adding it again gives the one that is there. What a tenant keeps is
bounded by number and bytes, counted under a lock on its row, so that two at once do not both fit. After
`expires_at` a snapshot is as good as gone: it is not found, not counted, and removed by whoever comes next.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from sqlalchemy import ColumnElement, Connection, Row, delete, func, insert, select

from agentrl.errors import StoreError
from agentrl.store import codec
from agentrl.store.schema import snapshots, tenants
from agentrl.store.sessions import fence


class SnapshotsFull(StoreError):
    """The tenant keeps as many snapshots as it may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRow:
    """One snapshot, without what it holds."""

    id: str
    tenant: str
    client_key: str
    body_hash: str
    session_id: str
    """The session whose workdir it is."""
    task_id: str
    task_revision: str
    image_digest: str
    digest: str
    """sha256 of the changes."""
    changes: int
    bytes: int
    """Of what it holds, before compression: what a tenant's share is counted in."""
    processes: int
    """Alive in the sandbox when it was taken."""
    created_at: float
    expires_at: float


_TOLD = [snapshots.c[field.name] for field in fields(SnapshotRow)]


def add(
    connection: Connection,
    gateway: str,
    epoch: int,
    row: SnapshotRow,
    body: bytes,
    *,
    most: int,
    most_bytes: int,
) -> tuple[SnapshotRow, bool]:
    """Keep a snapshot. Returns the one under its key, and whether that is this one.

    Raises:
        Superseded: another gateway of that name has started since.
        SnapshotsFull: with it the tenant would keep more than `most`, or more than `most_bytes`.
    """
    fence(connection, gateway, epoch)
    connection.execute(select(tenants.c.name).where(tenants.c.name == row.tenant).with_for_update())
    sweep(connection, row.created_at)
    known = _first(connection, snapshots.c.tenant == row.tenant, snapshots.c.client_key == row.client_key)
    if known is not None:
        return known, False
    count, held = connection.execute(
        select(func.count(), func.coalesce(func.sum(snapshots.c.bytes), 0)).where(
            snapshots.c.tenant == row.tenant
        )
    ).one()
    if count + 1 > most or held + row.bytes > most_bytes:
        raise SnapshotsFull(
            f"{row.tenant} keeps {count} snapshots of {held} bytes; this one has {row.bytes},"
            f" and {most} of {most_bytes} bytes in all may be kept.",
            fix="Delete one that is no longer needed, or wait until it expires.",
        )
    values = {field.name: getattr(row, field.name) for field in fields(SnapshotRow)}
    connection.execute(insert(snapshots), [{**values, "body": codec.compress(body)}])
    return row, True


def find(
    connection: Connection,
    tenant: str,
    now: float,
    *,
    snapshot_id: str | None = None,
    client_key: str | None = None,
) -> SnapshotRow | None:
    """A tenant's snapshot by id or by key; another tenant's, or one that has expired, is not found."""
    named = snapshots.c.id == snapshot_id if snapshot_id is not None else snapshots.c.client_key == client_key
    return _first(connection, snapshots.c.tenant == tenant, snapshots.c.expires_at > now, named)


def body(connection: Connection, snapshot_id: str) -> bytes | None:
    """What a snapshot holds; None: it is gone. Raises `EvidenceError` when it can not be unpacked."""
    found = connection.execute(
        select(snapshots.c.body, snapshots.c.bytes).where(snapshots.c.id == snapshot_id)
    ).first()
    return None if found is None else codec.decompress(found.body, size=found.bytes)


def of(connection: Connection, tenant: str, now: float) -> tuple[SnapshotRow, ...]:
    """A tenant's snapshots, the oldest first."""
    found = connection.execute(
        select(*_TOLD)
        .where(snapshots.c.tenant == tenant, snapshots.c.expires_at > now)
        .order_by(snapshots.c.created_at, snapshots.c.id)
    )
    return tuple(_row(each) for each in found)


def remove(connection: Connection, tenant: str, snapshot_id: str) -> bool:
    """Forget a tenant's snapshot; False: it has none of that id."""
    where = (snapshots.c.tenant == tenant, snapshots.c.id == snapshot_id)
    return connection.execute(delete(snapshots).where(*where)).rowcount > 0


def sweep(connection: Connection, now: float) -> int:
    """Remove what has expired, of every tenant; returns how many."""
    return connection.execute(delete(snapshots).where(snapshots.c.expires_at <= now)).rowcount


def _first(connection: Connection, *where: ColumnElement[bool]) -> SnapshotRow | None:
    found = connection.execute(select(*_TOLD).where(*where)).first()
    return None if found is None else _row(found)


def _row(found: Row[tuple[object, ...]]) -> SnapshotRow:
    return SnapshotRow(**found._mapping)
