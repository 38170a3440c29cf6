"""A run as stored to a report: is it, entry by entry, what was written?

Each trajectory is rebuilt from its rows, its content hash and its link of the chain are computed anew, its
rows are compared with those that the rebuilt record explodes into, and every prompt is rebuilt along its
parents and hashed. So a changed byte anywhere in the evidence is found, and so is a row that is missing,
inserted or moved.

What it can not see: a history rewritten from the first change to the end, hashes included, by someone who can
write to the database. For that, compare `head` with one noted elsewhere, or check signatures with a key that
the writer lacks. The state of a run (running, finished) and bookkeeping (metrics, events, tasks, work) are
not evidence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, func, select
from sqlalchemy.exc import SQLAlchemyError

from agentrl.errors import AgentRLError
from agentrl.store import chain, runs, training
from agentrl.store.chain import ChainKind, Head
from agentrl.store.engine import Database
from agentrl.store.layout import Rows, assemble, blob_hash, differences, explode
from agentrl.store.rows import VerifyReport
from agentrl.store.schema import (
    actions,
    calls,
    chains,
    consumed,
    groups,
    policy_versions,
    trajectories,
    turns,
    updates,
    verdicts,
)
from agentrl.store.schema import runs as runs_table
from agentrl.store.trajectories import BATCH, load
from agentrl.types import Fault, PolicyVersion, Trajectory, content_hash, field_names, from_dict
from envs.grading import verify_signature

_VERSION_FIELDS = field_names(PolicyVersion)
_UNREADABLE = (AgentRLError, SQLAlchemyError, ValueError, TypeError, LookupError, ArithmeticError)
"""What reading a forged row may raise: rows hold anything once someone else has written them."""


class _Broken(Exception):
    """The first thing that is not as written; ends the check."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"{where}: {why}")
        self.where = where
        self.why = why


def _unreadable(where: str, error: Exception) -> _Broken:
    """What an error says about the evidence; one of the connection says nothing and is raised."""
    if isinstance(error, SQLAlchemyError) and "decode" not in str(error):
        raise error
    return _Broken(where, f"a row can not be read: {error}")


def verify(database: Database, run_id: str, *, key: bytes | None) -> VerifyReport:
    """Check a run from its seal to the heads of its chains, in one snapshot, whatever writers do meanwhile.

    Args:
        key: when given, every verdict must carry a valid signature under it.

    Raises:
        StoreError: there is no such run, or the database can not be read at all.
    """
    with database.read() as connection:
        if (
            connection.scalar(select(func.count()).select_from(runs_table).where(runs_table.c.id == run_id))
            == 0
        ):
            raise chain.unknown_run(connection, run_id)
        check = _Check(connection, run_id, key)
        broken: _Broken | None = None
        try:
            for part in (check.run, check.trajectories, check.groups, check.versions, check.updates):
                part()
        except _Broken as found:
            broken = found
        except _UNREADABLE as error:
            broken = _unreadable(f"run {run_id}", error)
    return VerifyReport(
        run_id=run_id,
        trajectories=check.n_trajectories,
        calls_checked=check.n_calls,
        tokens_checked=check.n_tokens,
        policy_versions=check.n_versions,
        updates=check.n_updates,
        signatures_checked=check.n_signatures,
        head=check.head.link,
        broken_id=None if broken is None else broken.where,
        why=None if broken is None else broken.why,
    )


class _Check:
    """One walk over one run; counts what has been found to be as written."""

    def __init__(self, connection: Connection, run_id: str, key: bytes | None) -> None:
        self.connection = connection
        self.run_id = run_id
        self.key = key
        self.seal = ""
        self.head = Head(0, "")
        self.n_trajectories = self.n_calls = self.n_tokens = 0
        self.n_versions = self.n_updates = self.n_signatures = 0

    def run(self) -> None:
        """The run's own row still hashes to its seal, and its three chains are there."""
        where = f"run {self.run_id}"
        try:
            found = self.connection.execute(select(runs_table).where(runs_table.c.id == self.run_id)).one()
            row = found._asdict()
            if row["config_hash"] != content_hash(row["config"].encode()):
                raise _Broken(where, "its config is not the one that was hashed")
            self.seal = runs.seal(row)
        except _UNREADABLE as error:
            raise _unreadable(where, error) from error
        if self.seal != row["seal"]:
            raise _Broken(where, "its row does not match its seal")
        kinds = set(self.connection.scalars(select(chains.c.kind).where(chains.c.run_id == self.run_id)))
        if kinds != set(ChainKind):
            raise _Broken(where, f"its chains are {sorted(kinds)}")

    def trajectories(self) -> None:
        """Every trajectory, in the order of the chain."""
        self.head = Head(0, self.seal)
        for rows in self._stored():
            where = str(rows.trajectory["id"])
            if rows.trajectory["seq"] != self.head.length + 1:
                raise _Broken(f"#{self.head.length + 1}", f"missing: the next one stored is {where}")
            try:
                record = self._trajectory(where, rows)
            except _UNREADABLE as error:
                raise _unreadable(where, error) from error
            self.head = self.head.then(rows.trajectory["content_hash"])
            if self.head.link != rows.trajectory["chain"]:
                raise _Broken(
                    where, "its link does not continue the chain: an entry before it was changed or moved"
                )
            self.n_trajectories += 1
            self.n_calls += len(record.calls)
            self.n_tokens += sum(len(call.generation_token_ids) for call in record.calls)
        self._ends(ChainKind.TRAJECTORY, self.head)
        for table in (calls, turns, actions, verdicts):
            owner = table.c.trajectory_id
            orphan = select(owner).where(owner.not_in(select(trajectories.c.id))).limit(1)
            for found in self.connection.scalars(orphan):
                raise _Broken(str(found), f"rows in {table.name} belong to no trajectory")

    def groups(self) -> None:
        """Groups and trajectories name each other, and one task."""
        t, g = trajectories.c, groups.c
        pairs = groups.outerjoin(trajectories, (t.run_id == g.run_id) & (t.group_id == g.id))
        odd = select(g.id).select_from(pairs).where(g.run_id == self.run_id)
        for found in self.connection.scalars(odd.where(t.id.is_(None) | (t.task_id != g.task_id)).limit(1)):
            raise _Broken(f"group {found}", "it has no trajectory, or one of another task")
        known = select(g.id).where(g.run_id == self.run_id)
        for found in self.connection.scalars(
            select(t.id).where(t.run_id == self.run_id, t.group_id.not_in(known)).limit(1)
        ):
            raise _Broken(str(found), "its group is not in the store")

    def versions(self) -> None:
        """Each policy version is the child of the one before it."""
        head, before = Head(0, self.seal), None
        v = policy_versions.c
        for row in self.connection.execute(
            select(policy_versions).where(v.run_id == self.run_id).order_by(v.number)
        ):
            where = f"version {row.number}"
            try:
                version = from_dict(PolicyVersion, {name: row._mapping[name] for name in _VERSION_FIELDS})
            except _UNREADABLE as error:
                raise _unreadable(where, error) from error
            if before is not None and version.parent != before:
                raise _Broken(where, f"its parent is {version.parent} where version {before} comes before it")
            head, before = head.then(training.version_hash(version)), version.number
            if head.link != row.chain:
                raise _Broken(where, "its link does not continue the chain of versions")
            self.n_versions += 1
        self._ends(ChainKind.VERSION, head)

    def updates(self) -> None:
        """Each update, with exactly the marks that it left."""
        head, marked = Head(0, self.seal), 0
        u = updates.c
        for row in self.connection.execute(select(updates).where(u.run_id == self.run_id).order_by(u.step)):
            ids = training.marks(self.connection, self.run_id, row.step)
            content = training.update_hash(row.step, row.trained_version, row.published, ids)
            head = head.then(content)
            if content != row.content_hash or len(ids) != row.n_trajectories or head.link != row.chain:
                raise _Broken(f"update {row.step}", "it or its marks of consumed trajectories were changed")
            self.n_updates += 1
            marked += len(ids)
        self._ends(ChainKind.UPDATE, head)
        mine = select(func.count()).select_from(consumed).where(consumed.c.run_id == self.run_id)
        if self.connection.scalar(mine) != marked:
            raise _Broken(
                f"run {self.run_id}", "trajectories are marked as consumed by an update that is not there"
            )

    def _stored(self) -> Iterator[Rows]:
        mine = trajectories.c.run_id == self.run_id
        after = 0
        while True:
            try:
                batch = load(self.connection, mine, after=after, limit=BATCH)
            except _UNREADABLE:
                batch = self._alone(after)  # one by one from here, to find out which one it is
            if not batch:
                return
            for rows in batch:
                yield rows
                after = self.head.length

    def _alone(self, after: int) -> list[Rows]:
        try:
            return load(self.connection, trajectories.c.run_id == self.run_id, after=after, limit=1)
        except _UNREADABLE as error:
            raise _unreadable(f"#{after + 1}", error) from error

    def _trajectory(self, where: str, rows: Rows) -> Trajectory:
        """All checks of one trajectory but its link.

        Raises:
            _Broken: the first difference.
        """
        row, verdict = rows.trajectory, rows.verdict
        if verdict and verdict["reward"] is not None and verdict["fault"] is not None:
            owner = row["fault_owner"]
            if owner not in Fault.SCORED:
                raise _Broken(where, f"it has a reward and a fault of the {owner}")
        if blob_hash(rows.calls, rows.turns) != row["blob_hash"]:
            raise _Broken(where, "a binary column (tokens, log-probs or turns) is not as it was written")
        record = assemble(rows)
        expected = explode(record, phase=row["phase"], step=row["step"])
        if expected.trajectory["content_hash"] != row["content_hash"]:
            raise _Broken(where, "its content has another hash than when it was added")
        odd = differences(rows, expected)
        if odd is not None:
            raise _Broken(where, odd)
        if self.key is not None:
            signature = record.verdict.signature
            if not signature.isascii() or not verify_signature(record.verdict, self.key):
                raise _Broken(
                    where, "its verdict is not signed with this key" if signature else "it is not signed"
                )
            self.n_signatures += 1
        return record

    def _ends(self, kind: ChainKind, head: Head) -> None:
        """The chain ends where its head says: nothing was cut off."""
        where = (chains.c.run_id == self.run_id, chains.c.kind == kind.value)
        row: Any = self.connection.execute(select(chains).where(*where)).one()
        if row.length != head.length:
            raise _Broken(
                f"#{head.length + 1}", f"the chain of {kind} entries has {row.length}, {head.length} are left"
            )
        if row.head != head.link:
            raise _Broken(
                f"run {self.run_id}", f"the chain of {kind} entries ends in another link than was written"
            )
