"""What training leaves behind: policy versions, updates, what each has consumed, metrics.

An update is one transaction: the marks of the trajectories it consumed, the version it published and its
metrics are all there or none is. A trajectory is trained once per lineage (a run and the runs it resumes),
whatever crashed when.
"""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, insert, select
from sqlalchemy.dialects import postgresql, sqlite

from agentrl.errors import StoreError
from agentrl.store import chain, runs
from agentrl.store.chain import ChainKind
from agentrl.store.layout import canonical
from agentrl.store.rows import MetricRow, StalenessRow, TrajectoryRow, UpdateRow
from agentrl.store.schema import consumed, metrics, policy_versions, trajectories, updates
from agentrl.store.trajectories import LIGHT, light_row
from agentrl.types import PolicyVersion, content_hash, field_names, to_json

_IDS_PER_QUERY = 500
_VERSION_FIELDS = field_names(PolicyVersion)
Point = tuple[int, str, float]
"""Step, name, value."""


# -------------------------------------------------------------------------------------------------- versions


def publish(connection: Connection, run_id: str, version: PolicyVersion) -> bool:
    """Append a policy version; the same one again is once (False).

    Raises:
        StoreError: its number does not follow the newest of the run (for the first one of a run that resumes
            another: a version of that lineage), or it is taken by other content.
    """
    head = chain.hold(connection, run_id, ChainKind.VERSION)
    same = _version(connection, run_id, version.number)
    if same is not None:
        if same == version:
            return False
        raise StoreError(f"policy version {version.number} of run {run_id} exists with other content.")
    newest = latest_number(connection, (run_id,))
    if newest is None:
        ancestors = runs.lineage(connection, run_id)[1:]
        before = latest_number(connection, ancestors)
        allowed = version.parent is None if before is None else version.parent in range(before + 1)
        wanted = (
            "number 0"
            if before is None
            else f"the child of one of the versions 0 to {before} that it resumes"
        )
    else:
        allowed, wanted = version.parent == newest, f"number {newest + 1}"
    if not allowed:
        raise StoreError(
            f"policy version {version.number} (parent {version.parent}) can not follow in run {run_id}: "
            f"the next is {wanted}.",
            fix="Publish versions in order, one at a time.",
        )
    head = head.then(version_hash(version))
    values = {name: getattr(version, name) for name in _VERSION_FIELDS}
    connection.execute(insert(policy_versions), [{**values, "run_id": run_id, "chain": head.link}])
    chain.move(connection, run_id, ChainKind.VERSION, head)
    return True


def version_hash(version: PolicyVersion) -> str:
    """Content hash of a version."""
    return content_hash(to_json(version))


def versions(connection: Connection, run_id: str) -> tuple[PolicyVersion, ...]:
    """Of one run, oldest first."""
    columns = [policy_versions.c[name] for name in _VERSION_FIELDS]
    query = select(*columns).where(policy_versions.c.run_id == run_id).order_by(policy_versions.c.number)
    return tuple(PolicyVersion(**row._mapping) for row in connection.execute(query))


def latest(connection: Connection, run_id: str) -> PolicyVersion | None:
    """The newest version of the run, or of the nearest ancestor that has one."""
    for ancestor in runs.lineage(connection, run_id):
        number = latest_number(connection, (ancestor,))
        if number is not None:
            return _version(connection, ancestor, number)
    return None


def latest_number(connection: Connection, run_ids: Sequence[str]) -> int | None:
    """Number of the newest version of the first of these runs that has one."""
    for run_id in run_ids:
        where = policy_versions.c.run_id == run_id
        query = (
            select(policy_versions.c.number).where(where).order_by(policy_versions.c.number.desc()).limit(1)
        )
        number: int | None = connection.scalar(query)
        if number is not None:
            return number
    return None


def _version(connection: Connection, run_id: str, number: int) -> PolicyVersion | None:
    columns = [policy_versions.c[name] for name in _VERSION_FIELDS]
    where = (policy_versions.c.run_id == run_id, policy_versions.c.number == number)
    row = connection.execute(select(*columns).where(*where)).first()
    return None if row is None else PolicyVersion(**row._mapping)


# --------------------------------------------------------------------------------------------------- updates


def record_update(
    connection: Connection,
    run_id: str,
    step: int,
    trajectory_ids: Sequence[str],
    version: PolicyVersion | None,
    values: Mapping[str, float],
) -> bool:
    """Marks, version and metrics of one optimizer update; the same update again is once (False).

    Raises:
        StoreError: the step does not grow, a trajectory is unknown, given twice, or consumed before; names
        it.
    """
    ids = sorted(trajectory_ids)
    twice = next((a for a, b in itertools.pairwise(ids) if a == b), None)
    if twice is not None:
        raise StoreError(f"update {step}: trajectory {twice} is given twice.")
    published = None if version is None else version.number
    head = chain.hold(connection, run_id, ChainKind.UPDATE)
    u = updates.c
    there = connection.execute(select(u.published).where(u.run_id == run_id, u.step == step)).first()
    if there is not None:
        same_version = version is None or _version(connection, run_id, version.number) == version
        if there.published == published and same_version and marks(connection, run_id, step) == ids:
            return False
        raise StoreError(
            f"update {step} of run {run_id} is recorded with other trajectories or another version."
        )
    last = connection.scalar(select(u.step).where(u.run_id == run_id).order_by(u.step.desc()).limit(1))
    if last is not None and step <= last:
        raise StoreError(f"update {step} of run {run_id} comes after update {last}.", fix="Steps only grow.")
    lineage = runs.lineage(connection, run_id)
    _refuse_consumed(connection, lineage, step, ids)
    trained = latest_number(connection, lineage) if version is None else version.parent
    if version is not None:
        publish(connection, run_id, version)
    head = head.then(update_hash(step, trained, published, ids))
    row = {
        "run_id": run_id,
        "step": step,
        "trained_version": trained,
        "published": published,
        "n_trajectories": len(ids),
        "content_hash": update_hash(step, trained, published, ids),
        "chain": head.link,
    }
    connection.execute(insert(updates), [row])
    if ids:
        connection.execute(
            insert(consumed), [{"run_id": run_id, "trajectory_id": i, "step": step} for i in ids]
        )
    chain.move(connection, run_id, ChainKind.UPDATE, head)
    log(connection, run_id, [(step, name, value) for name, value in values.items()])
    return True


def update_hash(step: int, trained: int | None, published: int | None, ids: Sequence[str]) -> str:
    """Content hash of an update; `ids` sorted."""
    return content_hash(canonical([step, trained, published, list(ids)]).encode())


def marks(connection: Connection, run_id: str, step: int) -> list[str]:
    """Ids of the trajectories that an update consumed, sorted."""
    where = (consumed.c.run_id == run_id, consumed.c.step == step)
    return list(
        connection.scalars(select(consumed.c.trajectory_id).where(*where).order_by(consumed.c.trajectory_id))
    )


def history(connection: Connection, run_id: str) -> tuple[UpdateRow, ...]:
    """The updates of a run, in order."""
    found = connection.execute(select(updates).where(updates.c.run_id == run_id).order_by(updates.c.step))
    return tuple(
        UpdateRow(
            step=r.step,
            trained_version=r.trained_version,
            published=r.published,
            trajectories=r.n_trajectories,
        )
        for r in found
    )


def unconsumed(connection: Connection, run_id: str, phase: str) -> tuple[TrajectoryRow, ...]:
    """Trajectories of a phase, of the run and those it resumes, that none of them has trained: oldest run
    first."""
    lineage = runs.lineage(connection, run_id)
    t = trajectories.c
    used = select(consumed.c.trajectory_id).where(consumed.c.run_id.in_(lineage))
    query = select(*LIGHT).where(t.run_id.in_(lineage), t.phase == phase, t.id.not_in(used)).order_by(t.seq)
    rows = [light_row(row._asdict()) for row in connection.execute(query)]
    return tuple(sorted(rows, key=lambda row: (-lineage.index(row.run_id), row.seq)))


def staleness(connection: Connection, run_id: str, step: int | None) -> tuple[StalenessRow, ...]:
    """How old each consumed trajectory was at its update, from versions and publication times of the lineage.

    Which version was the newest when a trajectory began or ended is read from the times of publication, so
    with clocks that differ between machines `submit` and `queue` are as good as the clocks; the token ages
    are exact.
    """
    lineage = runs.lineage(connection, run_id)
    published = [v for ancestor in reversed(lineage) for v in versions(connection, ancestor)]
    published.sort(key=lambda v: (v.published_at, v.number))
    times = [v.published_at for v in published]

    def newest_at(at: float) -> int | None:
        index = bisect.bisect_right(times, at)
        return published[index - 1].number if index else None

    t, c, u = trajectories.c, consumed.c, updates.c
    joined = consumed.join(updates, (u.run_id == c.run_id) & (u.step == c.step)).join(
        trajectories, t.id == c.trajectory_id
    )
    columns = (
        c.trajectory_id,
        c.step,
        u.trained_version,
        t.min_version,
        t.max_version,
        t.started_at,
        t.finished_at,
    )
    where = [c.run_id == run_id, *([] if step is None else [c.step == step])]
    query = select(*columns).select_from(joined).where(*where).order_by(c.step, c.trajectory_id)
    return tuple(
        StalenessRow(
            trajectory_id=row.trajectory_id,
            step=row.step,
            trained_version=row.trained_version,
            submit=_age(row.trained_version, newest_at(row.started_at)),
            oldest_token=_age(row.trained_version, row.min_version),
            newest_token=_age(row.trained_version, row.max_version),
            queue=_age(row.trained_version, newest_at(row.finished_at)),
        )
        for row in connection.execute(query)
    )


def _age(trained: int | None, version: int | None) -> int | None:
    return None if trained is None or version is None else trained - version


def _refuse_consumed(connection: Connection, lineage: Sequence[str], step: int, ids: Sequence[str]) -> None:
    for at in range(0, len(ids), _IDS_PER_QUERY):
        some = ids[at : at + _IDS_PER_QUERY]
        where = (consumed.c.trajectory_id.in_(some), consumed.c.run_id.in_(lineage))
        used = connection.execute(select(consumed).where(*where).limit(1)).first()
        if used is not None:
            raise StoreError(
                f"update {step}: trajectory {used.trajectory_id} was consumed by update {used.step} of run "
                f"{used.run_id}.",
                fix="A trajectory is trained once; take `unconsumed` ones.",
            )
        known = set(connection.scalars(select(trajectories.c.id).where(trajectories.c.id.in_(some))))
        missing = next((i for i in some if i not in known), None)
        if missing is not None:
            raise StoreError(
                f"update {step}: trajectory {missing} is not in the store.", fix="Store it first."
            )


# --------------------------------------------------------------------------------------------------- metrics


def log(connection: Connection, run_id: str, points: Iterable[Point]) -> None:
    """Metrics in one batch; the same step and name again replaces the value (a resumed run measures anew)."""
    at = time.time()
    newest = {(step, name): value for step, name, value in points}
    if not newest:
        return
    rows = [
        {"run_id": run_id, "name": n, "step": s, "value": None if math.isnan(v) else float(v), "at": at}
        for (s, n), v in newest.items()
    ]
    keys = ["run_id", "name", "step"]
    if connection.dialect.name == "postgresql":
        into = postgresql.insert(metrics)
        connection.execute(
            into.on_conflict_do_update(index_elements=keys, set_=_replaced(into.excluded)), rows
        )
    else:
        put = sqlite.insert(metrics)
        connection.execute(put.on_conflict_do_update(index_elements=keys, set_=_replaced(put.excluded)), rows)


def _replaced(new: Any) -> dict[str, Any]:
    return {"value": new.value, "at": new.at}


def read_metrics(connection: Connection, run_id: str, names: Sequence[str] | None) -> tuple[MetricRow, ...]:
    """By name, then step."""
    m = metrics.c
    where = [m.run_id == run_id, *([] if names is None else [m.name.in_(names)])]
    found = connection.execute(select(m.step, m.name, m.value, m.at).where(*where).order_by(m.name, m.step))
    return tuple(
        MetricRow(step=r.step, name=r.name, value=math.nan if r.value is None else r.value, at=r.at)
        for r in found
    )
