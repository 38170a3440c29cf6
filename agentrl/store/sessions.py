"""Sessions of an environment gateway: a row each, one append-only log of transitions, one terminal record.

A gateway writes its log in batches (`append`), and every batch is fenced: refused unless the gateway's epoch
is still the newest, so that a gateway that was replaced can write nothing more. A row that has ended never
changes again, and a transition is inserted once (`session`, `seq`), so a batch that is sent again is once.

Tenants are rows too: a bearer token is kept only as its sha256.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, func, insert, select, update

from agentrl.errors import StoreError, nearest
from agentrl.store.schema import gateways, session_log, sessions, tenants

_MOVED = ("state", "lease_epoch", "lease_until", "ended_at", "verdict")
"""What a transition changes in the row of its session."""


class Superseded(StoreError):
    """A newer gateway of the same name has started; the older one may write nothing more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRow:
    """Who may use a gateway, and how much of it."""

    name: str
    token_hash: str
    """sha256 of the bearer token, in hex."""
    weight: float
    """Share of the gateway beside other waiting tenants."""
    max_sessions: int
    """Sessions alive at once."""
    max_queue: int
    """Sessions waiting at once; more are answered with 429."""
    added_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRow:
    """One request for a session and how it ended."""

    id: str
    gateway: str
    epoch: int
    """The gateway's epoch that took it."""
    tenant: str
    client_key: str
    body_hash: str
    body: str
    """The request, as JSON."""
    task_id: str
    task_revision: str
    created_at: float
    state: str
    lease_epoch: int
    lease_until: float
    ended_at: float | None = None
    """None: not ended."""
    verdict: str | None = None
    """The verdict, as JSON; every ended session has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionMove:
    """One line of the log. `ended` with the verdict makes it the terminal record."""

    session_id: str
    seq: int
    at: float
    epoch: int
    state: str
    owner: str | None
    code: str | None
    note: str
    lease_epoch: int
    lease_until: float
    ended: bool = False
    verdict: str | None = None


def add_tenant(connection: Connection, row: TenantRow) -> None:
    """Add a tenant, or give it a new token and other limits."""
    values = {name: getattr(row, name) for name in TenantRow.__slots__}
    known = connection.scalar(select(tenants.c.name).where(tenants.c.name == row.name))
    if known is None:
        connection.execute(insert(tenants), [values])
    else:
        connection.execute(update(tenants).where(tenants.c.name == row.name).values(values))


def all_tenants(connection: Connection) -> tuple[TenantRow, ...]:
    """By name."""
    found = connection.execute(select(tenants).order_by(tenants.c.name)).mappings()
    return tuple(TenantRow(**row) for row in found)


def begin_gateway(connection: Connection, name: str) -> int:
    """The epoch of a gateway that starts now: one more than the last of that name."""
    last = connection.scalar(select(gateways.c.epoch).where(gateways.c.name == name).with_for_update())
    epoch = (last or 0) + 1
    values = {"epoch": epoch, "started_at": time.time()}
    if last is None:
        connection.execute(insert(gateways), [{"name": name, **values}])
    else:
        connection.execute(update(gateways).where(gateways.c.name == name).values(values))
    return epoch


def fence(connection: Connection, gateway: str, epoch: int) -> None:
    """Let nothing be written by a gateway that was replaced.

    Raises:
        Superseded: another gateway of that name has started since.
    """
    newest = connection.scalar(select(gateways.c.epoch).where(gateways.c.name == gateway).with_for_update())
    if newest != epoch:
        raise Superseded(
            f"gateway {gateway!r} was superseded: epoch {newest} has started, this one is {epoch}.",
            fix="Stop this gateway; the newer one serves.",
        )


def append(
    connection: Connection,
    gateway: str,
    epoch: int,
    opened: Sequence[SessionRow],
    moves: Sequence[SessionMove],
) -> None:
    """New sessions and transitions, whole.

    Raises:
        Superseded: another gateway of that name has started since.
        StoreError: a session has ended already.
    """
    fence(connection, gateway, epoch)
    if opened:
        there = set(
            connection.scalars(select(sessions.c.id).where(sessions.c.id.in_([r.id for r in opened])))
        )
        rows = [{n: getattr(row, n) for n in SessionRow.__slots__} for row in opened if row.id not in there]
        if rows:
            connection.execute(insert(sessions), rows)
    if moves:
        _move(connection, moves)


def _move(connection: Connection, moves: Sequence[SessionMove]) -> None:
    """A few statements for any number of lines: a busy gateway writes thousands."""
    ids = sorted({move.session_id for move in moves})
    log = session_log.c
    highest = (
        select(log.session_id, func.max(log.seq)).where(log.session_id.in_(ids)).group_by(log.session_id)
    )
    last = {row[0]: row[1] for row in connection.execute(highest)}
    new = [move for move in moves if move.seq > last.get(move.session_id, -1)]
    for move in moves:
        if move.seq <= last.get(move.session_id, -1):
            _same(connection, move)
    over = select(sessions.c.id).where(sessions.c.id.in_(ids), sessions.c.ended_at.is_not(None))
    ended = set(connection.scalars(over))
    for move in new:
        if move.session_id in ended:
            raise StoreError(f"session {move.session_id} has ended; it can not become {move.state}.")
        if move.ended:
            ended.add(move.session_id)
    if not new:
        return
    names = ("session_id", "seq", "at", "epoch", "state", "owner", "code", "note")
    connection.execute(insert(session_log), [{name: getattr(move, name) for name in names} for move in new])
    newest = {move.session_id: move for move in new}
    connection.execute(
        update(sessions)
        .where(sessions.c.id == bindparam("session"))
        .values({name: bindparam(f"to_{name}") for name in _MOVED}),
        [
            {
                "session": move.session_id,
                "to_state": move.state,
                "to_lease_epoch": move.lease_epoch,
                "to_lease_until": move.lease_until,
                "to_ended_at": move.at if move.ended else None,
                "to_verdict": move.verdict,
            }
            for move in newest.values()
        ],
    )


def _same(connection: Connection, move: SessionMove) -> None:
    """A line that is there already must be this one: a batch that was sent again."""
    where = (session_log.c.session_id == move.session_id, session_log.c.seq == move.seq)
    known = connection.execute(select(session_log.c.state, session_log.c.at).where(*where)).first()
    if known is None or (known.state, known.at) != (move.state, move.at):
        raise StoreError(f"session {move.session_id}: transition {move.seq} is not {move.state} in the log.")


def get(connection: Connection, session_id: str) -> SessionRow:
    """One session.

    Raises:
        StoreError: there is none.
    """
    row = connection.execute(select(sessions).where(sessions.c.id == session_id)).mappings().first()
    if row is None:
        known = connection.scalars(select(sessions.c.id).order_by(sessions.c.created_at.desc()).limit(1000))
        raise StoreError(f"no session {session_id!r}.", fix=nearest(session_id, known))
    return SessionRow(**row)


def find(
    connection: Connection, tenant: str, *, session_id: str | None = None, client_key: str | None = None
) -> SessionRow | None:
    """A tenant's session by id or by client key; another tenant's is not found."""
    where = sessions.c.id == session_id if session_id is not None else sessions.c.client_key == client_key
    row = connection.execute(select(sessions).where(sessions.c.tenant == tenant, where)).mappings().first()
    return None if row is None else SessionRow(**row)


def unended(connection: Connection, gateway: str) -> tuple[SessionRow, ...]:
    """Sessions of a gateway without a terminal record, the oldest first."""
    where = (sessions.c.gateway == gateway, sessions.c.ended_at.is_(None))
    found = connection.execute(select(sessions).where(*where).order_by(sessions.c.created_at)).mappings()
    return tuple(SessionRow(**row) for row in found)


def admitted(connection: Connection, gateway: str, since: float) -> tuple[SessionRow, ...]:
    """Sessions of a gateway that were opened since then and admitted at some time, ended or not, the oldest
    first."""
    was = select(session_log.c.session_id).where(session_log.c.state == "admitted")
    where = (sessions.c.gateway == gateway, sessions.c.created_at >= since, sessions.c.id.in_(was))
    found = connection.execute(select(sessions).where(*where).order_by(sessions.c.created_at)).mappings()
    return tuple(SessionRow(**row) for row in found)


def log_of(connection: Connection, session_id: str) -> tuple[SessionMove, ...]:
    """The transitions of a session in order. Leases and verdict are the row's, not the log's."""
    found = connection.execute(
        select(session_log).where(session_log.c.session_id == session_id).order_by(session_log.c.seq)
    ).mappings()
    return tuple(SessionMove(**row, lease_epoch=0, lease_until=0.0) for row in found)
