"""The hash chains of a run: `link = sha256(previous link || content hash)`, beginning at the run's seal.

An entry's link depends on the content of all entries before it, so a changed, removed, inserted or re-ordered
entry breaks the chain from there on; the length and the last link are kept beside it, so that a cut tail is
seen too.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import Connection, bindparam, insert, select, update

from agentrl.errors import StoreError, nearest
from agentrl.store.schema import chains, runs

# Statements of the hot path are built once: building one costs as much as running it.
_HOLD = (
    select(chains.c.length, chains.c.head)
    .where(chains.c.run_id == bindparam("run"), chains.c.kind == bindparam("which"))
    .with_for_update()
)
_MOVE = (
    update(chains)
    .where(chains.c.run_id == bindparam("run"), chains.c.kind == bindparam("which"))
    .values(length=bindparam("new_length"), head=bindparam("new_head"))
)


class ChainKind(StrEnum):
    TRAJECTORY = "trajectory"
    VERSION = "version"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class Head:
    """Where a chain stands: how many links, and the last."""

    length: int
    link: str

    def then(self, content: str) -> Head:
        """The head after one more entry."""
        return Head(self.length + 1, link(self.link, content))


def link(previous: str, content: str) -> str:
    """The next link, in hex, of two hex digests."""
    return hashlib.sha256(bytes.fromhex(previous) + bytes.fromhex(content)).hexdigest()


def begin(connection: Connection, run_id: str, seal: str) -> None:
    """The empty chains of a new run."""
    rows = [{"run_id": run_id, "kind": kind.value, "length": 0, "head": seal} for kind in ChainKind]
    connection.execute(insert(chains), rows)


def hold(connection: Connection, run_id: str, kind: ChainKind) -> Head:
    """The head of a chain, held against other writers until the transaction ends.

    Raises:
        StoreError: there is no such run.
    """
    row = connection.execute(_HOLD, {"run": run_id, "which": kind.value}).first()
    if row is None:
        raise unknown_run(connection, run_id)
    return Head(row.length, row.head)


def move(connection: Connection, run_id: str, kind: ChainKind, head: Head) -> None:
    """Write the new head of a chain that is held."""
    values = {"run": run_id, "which": kind.value, "new_length": head.length, "new_head": head.link}
    connection.execute(_MOVE, values)


def unknown_run(connection: Connection, run_id: str) -> StoreError:
    """The error that names the runs there are."""
    newest = select(runs.c.id).order_by(runs.c.started_at.desc()).limit(50)
    return StoreError(f"no run {run_id!r} in this store.", fix=nearest(run_id, connection.scalars(newest)))
