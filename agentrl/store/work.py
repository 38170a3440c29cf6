"""Work that many processes share: a row is queued once, leased to one owner at a time, completed once.

A lease that ends without `complete` or `renew` may be claimed by anyone; the late owner is then refused,
because each claim raises the `epoch` and only the newest epoch may complete. Keys make queuing idempotent: a
resumed run queues everything again and only what is new is added.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, func, insert, or_, select, update

from agentrl.errors import StoreError
from agentrl.store.engine import now
from agentrl.store.layout import canonical
from agentrl.store.rows import Claim
from agentrl.store.schema import work

_KEYS_PER_QUERY = 500


def enqueue(connection: Connection, run_id: str, kind: str, items: Mapping[str, Mapping[str, Any]]) -> int:
    """Queue payloads under their keys; returns how many were new."""
    keys = list(items)
    known: set[str] = set()
    for at in range(0, len(keys), _KEYS_PER_QUERY):
        some = work.c.key.in_(keys[at : at + _KEYS_PER_QUERY])
        known |= set(
            connection.scalars(select(work.c.key).where(work.c.run_id == run_id, work.c.kind == kind, some))
        )
    rows = [
        {
            "run_id": run_id,
            "kind": kind,
            "key": key,
            "payload": canonical(dict(payload)),
            "state": "queued",
            "epoch": 0,
        }
        for key, payload in items.items()
        if key not in known
    ]
    if rows:
        connection.execute(insert(work), rows)
    return len(rows)


def claim(connection: Connection, run_id: str, kind: str, lease_s: float, owner: str) -> Claim | None:
    """The oldest work that is queued or whose lease has ended; None when there is none. Never waits for a
    row."""
    at = now(connection)
    free = or_(work.c.state == "queued", _ended(at))
    query = (
        select(work).where(work.c.run_id == run_id, work.c.kind == kind, free).order_by(work.c.id).limit(1)
    )
    row = connection.execute(query.with_for_update(skip_locked=True)).first()
    if row is None:
        return None
    taken = connection.execute(
        update(work)
        .where(work.c.id == row.id, work.c.epoch == row.epoch)
        .values(state="leased", owner=owner, epoch=row.epoch + 1, lease_until=at + lease_s)
    )
    if taken.rowcount != 1:
        return None
    return Claim(
        id=row.id,
        run_id=row.run_id,
        kind=row.kind,
        key=row.key,
        payload=json.loads(row.payload),
        owner=owner,
        epoch=row.epoch + 1,
        lease_until=at + lease_s,
    )


def complete(connection: Connection, held: Claim, result: Mapping[str, Any]) -> None:
    """Done, with its result.

    Raises:
        StoreError: the lease ended and someone else has the work.
    """
    done = connection.execute(
        update(work).where(_held(held)).values(state="done", result=canonical(dict(result)), lease_until=None)
    )
    _require(connection, done.rowcount, held)


def renew(connection: Connection, held: Claim, lease_s: float) -> float:
    """A longer lease from now on; returns when it ends.

    Raises:
        StoreError: the lease ended and someone else has the work.
    """
    until = now(connection) + lease_s
    _require(
        connection,
        connection.execute(update(work).where(_held(held)).values(lease_until=until)).rowcount,
        held,
    )
    return until


def expire(connection: Connection, run_id: str, kind: str | None) -> int:
    """Put back what ended leases hold; returns how many. For reports: `claim` takes such work anyway."""
    where = [
        work.c.run_id == run_id,
        _ended(now(connection)),
        *([] if kind is None else [work.c.kind == kind]),
    ]
    back = connection.execute(update(work).where(*where).values(state="queued", owner=None, lease_until=None))
    return back.rowcount


def tally(connection: Connection, run_id: str, kind: str) -> dict[str, int]:
    """How many are queued, leased, done."""
    query = select(work.c.state, func.count()).where(work.c.run_id == run_id, work.c.kind == kind)
    return {row[0]: row[1] for row in connection.execute(query.group_by(work.c.state))}


def _ended(at: float) -> ColumnElement[bool]:
    return and_(work.c.state == "leased", work.c.lease_until < at)


def _held(held: Claim) -> ColumnElement[bool]:
    return and_(work.c.id == held.id, work.c.epoch == held.epoch, work.c.state == "leased")


def _require(connection: Connection, changed: int, held: Claim) -> None:
    if changed == 1:
        return
    row = connection.execute(
        select(work.c.state, work.c.owner, work.c.epoch).where(work.c.id == held.id)
    ).first()
    seen = "is gone" if row is None else f"is {row.state}, owner {row.owner}, claim {row.epoch}"
    raise StoreError(
        f"{held.owner} no longer holds {held.kind} {held.key} (claim {held.epoch}): it {seen}.",
        fix="Drop the result, or renew the lease in time.",
    )
