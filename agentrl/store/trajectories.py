"""Trajectories in and out. In: once, at the end of the run's chain. Out: light rows, one record, or a
stream."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, bindparam, case, func, insert, or_, select

from agentrl.errors import StoreError, nearest
from agentrl.store import chain
from agentrl.store.chain import ChainKind, Head
from agentrl.store.layout import Rows
from agentrl.store.rows import Counts, TrajectoryRow
from agentrl.store.schema import actions, calls, groups, trajectories, turns, verdicts
from agentrl.types import Split, Termination

BATCH = 32
"""Trajectories read at once when streaming: 32 of 10,000 tokens are about 5 MB of Python ints and floats."""
_LAST_CODE_POINT = "\U0010ffff"
_SHOWN = 5

LIGHT = (
    trajectories.c.id,
    trajectories.c.run_id,
    trajectories.c.seq,
    trajectories.c.phase,
    trajectories.c.step,
    trajectories.c.group_id,
    trajectories.c.member,
    trajectories.c.task_id,
    trajectories.c.task_revision,
    trajectories.c.harness,
    trajectories.c.split,
    trajectories.c.termination,
    trajectories.c.reward,
    trajectories.c.fault_owner,
    trajectories.c.fault_code,
    trajectories.c.n_turns,
    trajectories.c.n_calls,
    trajectories.c.n_tokens,
    trajectories.c.min_version,
    trajectories.c.max_version,
    trajectories.c.started_at,
    trajectories.c.finished_at,
    trajectories.c.content_hash,
    trajectories.c.chain,
)


# Statements of the hot path are built once: building one costs as much as running it.
_STORED = select(trajectories.c.run_id, trajectories.c.content_hash).where(
    trajectories.c.id == bindparam("trajectory")
)
_GROUP_TASK = select(groups.c.task_id).where(
    groups.c.run_id == bindparam("run"), groups.c.id == bindparam("group")
)
_INSERT = {table.name: insert(table) for table in (trajectories, groups, calls, turns, actions, verdicts)}


def add(connection: Connection, run_id: str, batch: Sequence[Rows]) -> int:
    """Append those that are not there yet; returns how many were.

    Raises:
        StoreError: an id is taken by other content, or a group by another task. Nothing is added then.
    """
    head = chain.hold(connection, run_id, ChainKind.TRAJECTORY)
    added = 0
    for rows in batch:
        row = rows.trajectory
        if _stored(connection, run_id, row):
            continue
        _join_group(connection, run_id, row)
        head = head.then(row["content_hash"])
        _insert(connection, run_id, rows, head)
        added += 1
    if added:
        chain.move(connection, run_id, ChainKind.TRAJECTORY, head)
    return added


def load(connection: Connection, *conditions: ColumnElement[bool], after: int = 0, limit: int) -> list[Rows]:
    """Whole trajectories as stored, by `seq`, from the one after `after`."""
    found = connection.execute(
        select(trajectories)
        .where(trajectories.c.seq > after, *conditions)
        .order_by(trajectories.c.seq)
        .limit(limit)
    )
    heads = [row._asdict() for row in found]
    ids = [row["id"] for row in heads]
    children = {table.name: _children(connection, table, ids) for table in (calls, turns, actions, verdicts)}
    return [
        Rows(
            trajectory=row,
            calls=children["calls"][row["id"]],
            turns=children["turns"][row["id"]],
            actions=children["actions"][row["id"]],
            verdict=(children["verdicts"][row["id"]] or [{}])[0],
        )
        for row in heads
    ]


def one(connection: Connection, trajectory_id: str) -> Rows:
    """One whole trajectory as stored.

    Raises:
        StoreError: there is none.
    """
    found = load(connection, trajectories.c.id == trajectory_id, limit=1)
    if not found:
        raise StoreError(
            f"no trajectory {trajectory_id!r} in this store.", fix="List them, or resolve a prefix."
        )
    return found[0]


def resolve(connection: Connection, prefix: str) -> str:
    """The only trajectory id that begins with `prefix` (or is it).

    Raises:
        StoreError: none does, or several do; names them.
    """
    column = trajectories.c.id
    query = select(column).where(column >= prefix, column < prefix + _LAST_CODE_POINT).order_by(column)
    found = list(connection.scalars(query.limit(_SHOWN + 1)))
    if not prefix or not found:
        newest = select(column).order_by(trajectories.c.finished_at.desc()).limit(50)
        raise StoreError(
            f"no trajectory begins with {prefix!r}.", fix=nearest(prefix, connection.scalars(newest))
        )
    if len(found) > 1 and found[0] != prefix:
        more = ", ..." if len(found) > _SHOWN else ""
        raise StoreError(f"{prefix!r} begins {', '.join(found[:_SHOWN])}{more}.", fix="Give more characters.")
    return str(found[0])


def light(
    connection: Connection,
    conditions: Sequence[ColumnElement[bool]],
    *,
    in_run: bool,
    limit: int | None,
    offset: int,
    newest_first: bool,
) -> tuple[TrajectoryRow, ...]:
    """Light rows: in a run in the order of adding, over all runs by the time they finished."""
    order = [trajectories.c.seq] if in_run else [trajectories.c.finished_at, trajectories.c.id]
    query = select(*LIGHT).where(*conditions).order_by(*(c.desc() if newest_first else c for c in order))
    return tuple(light_row(row._asdict()) for row in connection.execute(query.limit(limit).offset(offset)))


def light_row(row: Mapping[str, Any]) -> TrajectoryRow:
    """One result of a query of `LIGHT`."""
    values = dict(row)
    return TrajectoryRow(
        index=values.pop("member"),
        turns=values.pop("n_turns"),
        calls=values.pop("n_calls"),
        tokens=values.pop("n_tokens"),
        split=Split(values.pop("split")),
        termination=Termination(values.pop("termination")),
        **values,
    )


def conditions(
    *,
    run_id: str | None = None,
    task: str | None = None,
    split: Split | str | None = None,
    termination: Termination | str | None = None,
    phase: str | None = None,
    step: int | None = None,
    group: str | None = None,
) -> list[ColumnElement[bool]]:
    """The given filters as SQL.

    Raises:
        StoreError: an unknown split or termination; names the nearest.
    """
    for kind, value in ((Split, split), (Termination, termination)):
        if value is not None and value not in list(kind):
            raise StoreError(
                f"unknown {kind.__name__.lower()} {str(value)!r}.", fix=nearest(str(value), list(kind))
            )
    pairs = (
        (trajectories.c.run_id, run_id),
        (trajectories.c.task_id, task),
        (trajectories.c.split, split),
        (trajectories.c.termination, termination),
        (trajectories.c.phase, phase),
        (trajectories.c.step, step),
        (trajectories.c.group_id, group),
    )
    return [column == (str(v) if isinstance(v, str) else v) for column, v in pairs if v is not None]


def by_id(trajectory_id: str) -> list[ColumnElement[bool]]:
    """The condition that selects one trajectory."""
    return [trajectories.c.id == trajectory_id]


def counts(connection: Connection, where: Sequence[ColumnElement[bool]]) -> Counts:
    """Counted by the database, in three queries."""
    t, a = trajectories.c, actions.c
    ends: dict[str, int] = {
        row[0]: row[1]
        for row in connection.execute(
            select(t.termination, func.count()).where(*where).group_by(t.termination)
        )
    }
    owners = select(t.fault_owner, t.fault_code, func.count()).where(t.fault_owner.is_not(None), *where)
    faults = connection.execute(owners.group_by(t.fault_owner, t.fault_code))
    bad = func.sum(case((or_(a.unusable == 1, a.failed == 1), 1), else_=0))
    joined = actions.join(trajectories, t.id == a.trajectory_id)
    used = (
        select(a.tool, func.count(), bad).select_from(joined).where(*where).group_by(a.tool).order_by(a.tool)
    )
    tools = list(connection.execute(used))
    return Counts(
        trajectories=sum(ends.values()),
        termination=ends,
        fault={f"{owner}/{code}": n for owner, code, n in faults},
        tool={name: n for name, n, _ in tools},
        tool_failed={name: int(n) for name, _, n in tools if n},
    )


def _stored(connection: Connection, run_id: str, row: Mapping[str, Any]) -> bool:
    """Whether it is there with the same content."""
    there = connection.execute(_STORED, {"trajectory": row["id"]}).first()
    if there is None:
        return False
    if there.run_id != run_id:
        raise StoreError(
            f"trajectory {row['id']} belongs to run {there.run_id}.", fix="Give each its own id."
        )
    if there.content_hash != row["content_hash"]:
        raise StoreError(
            f"trajectory {row['id']} is stored with other content (or another phase or step).",
            fix="Evidence is never changed: store a new attempt under a new id.",
        )
    return True


def _join_group(connection: Connection, run_id: str, row: Mapping[str, Any]) -> None:
    """Make the group known; it is of one task."""
    task_id = connection.scalar(_GROUP_TASK, {"run": run_id, "group": row["group_id"]})
    if task_id is None:
        values = {"run_id": run_id, "id": row["group_id"], "task_id": row["task_id"]}
        connection.execute(_INSERT["groups"], values)
    elif task_id != row["task_id"]:
        raise StoreError(f"group {row['group_id']} is of task {task_id}, not of {row['task_id']}.")


def _insert(connection: Connection, run_id: str, rows: Rows, head: Head) -> None:
    placed = {**rows.trajectory, "run_id": run_id, "seq": head.length, "chain": head.link}
    connection.execute(_INSERT["trajectories"], placed)
    for table, values in ((calls, rows.calls), (turns, rows.turns), (actions, rows.actions)):
        if values:
            connection.execute(_INSERT[table.name], list(values))
    connection.execute(_INSERT["verdicts"], dict(rows.verdict))


def _children(connection: Connection, table: Table, ids: list[str]) -> dict[str, list[Mapping[str, Any]]]:
    by_id: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    query = select(table).where(table.c.trajectory_id.in_(ids)).order_by(*table.primary_key.columns)
    for row in connection.execute(query):
        by_id[row.trajectory_id].append(row._asdict())
    return by_id
