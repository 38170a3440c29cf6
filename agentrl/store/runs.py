"""Runs: begun, finished, resumed by another. A run's lineage is itself, the run it resumes, and so on."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Select, insert, select, update

from agentrl.errors import StoreError
from agentrl.store import chain
from agentrl.store.layout import canonical
from agentrl.store.rows import RunRow, RunState
from agentrl.store.schema import chains, runs
from agentrl.types import content_hash

_SEALED = ("id", "name", "algo", "seed", "config", "config_hash", "parent_id", "started_at")


def new_row(
    *, name: str, config: Mapping[str, Any], algo: str, seed: int, parent_id: str | None, run_id: str | None
) -> dict[str, Any]:
    """The values of a new run, sealed.

    Raises:
        StoreError: the config is not JSON.
    """
    text = canonical(dict(config))
    row: dict[str, Any] = {
        "id": run_id or uuid.uuid4().hex[:12],
        "name": name,
        "algo": algo,
        "seed": seed,
        "config": text,
        "config_hash": content_hash(text.encode()),
        "parent_id": parent_id,
        "started_at": time.time(),
        "state": RunState.RUNNING.value,
        "finished_at": None,
    }
    return {**row, "seal": seal(row)}


def seal(row: Mapping[str, Any]) -> str:
    """The hash of what is fixed when a run begins."""
    return content_hash(canonical([row[column] for column in _SEALED]).encode())


def begin(connection: Connection, row: Mapping[str, Any]) -> None:
    """Insert a run and its empty chains.

    Raises:
        StoreError: the id is taken, or the parent is unknown.
    """
    if row["parent_id"] is not None:
        get(connection, row["parent_id"])
    taken = connection.scalar(select(runs.c.seal).where(runs.c.id == row["id"]))
    if taken == row["seal"]:
        return
    if taken is not None:
        raise StoreError(
            f"there is another run {row['id']} already.", fix="Leave run_id out, or choose another."
        )
    connection.execute(insert(runs), [dict(row)])
    chain.begin(connection, row["id"], row["seal"])


def finish(connection: Connection, run_id: str, state: RunState) -> None:
    """Close a run; closing it twice in the same way is once.

    Raises:
        StoreError: it is closed in another way already.
    """
    present = get(connection, run_id).state
    if present is state:
        return
    if present is not RunState.RUNNING or state is RunState.RUNNING:
        raise StoreError(
            f"run {run_id} is {present}; it can not become {state}.", fix="Begin a run that resumes it."
        )
    connection.execute(
        update(runs).where(runs.c.id == run_id).values(state=state.value, finished_at=time.time())
    )


def get(connection: Connection, run_id: str) -> RunRow:
    """One run.

    Raises:
        StoreError: there is none.
    """
    row = connection.execute(_query().where(runs.c.id == run_id)).first()
    if row is None:
        raise chain.unknown_run(connection, run_id)
    return _row(row._mapping)


def every(connection: Connection, *, limit: int) -> tuple[RunRow, ...]:
    """The newest runs first."""
    found = connection.execute(_query().order_by(runs.c.started_at.desc(), runs.c.id).limit(limit))
    return tuple(_row(row._mapping) for row in found)


def lineage(connection: Connection, run_id: str) -> tuple[str, ...]:
    """The run, the run that it resumes, and so on: youngest first."""
    ids: list[str] = []
    at: str | None = run_id
    while at is not None and at not in ids:
        ids.append(at)
        row = connection.execute(select(runs.c.parent_id).where(runs.c.id == at)).first()
        if row is None:
            raise chain.unknown_run(connection, at)
        at = row.parent_id
    return tuple(ids)


def _query() -> Select[Any]:
    joined = runs.join(
        chains, (chains.c.run_id == runs.c.id) & (chains.c.kind == chain.ChainKind.TRAJECTORY.value)
    )
    return select(runs, chains.c.length, chains.c.head).select_from(joined)


def _row(row: Mapping[Any, Any]) -> RunRow:
    return RunRow(
        **{column: row[column] for column in _SEALED if column != "config"},
        config=json.loads(row["config"]),
        seal=row["seal"],
        state=RunState(row["state"]),
        finished_at=row["finished_at"],
        trajectories=row["length"],
        head=row["head"],
    )
