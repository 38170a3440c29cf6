"""Bookkeeping beside the evidence: tasks by revision, their admissions, events of a run."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, insert, select

from agentrl.errors import StoreError, nearest
from agentrl.store.layout import canonical
from agentrl.store.rows import AdmissionRow, EventRow
from agentrl.store.schema import admissions, events, tasks
from agentrl.types import Task, from_json, to_json


def add_task(connection: Connection, task: Task) -> bool:
    """Keep a revision of a task; the same again is once (False). The folder's path is not part of its
    identity.

    Raises:
        StoreError: the revision is stored with other content.
    """
    body = connection.scalar(
        select(tasks.c.body).where(tasks.c.id == task.id, tasks.c.revision == task.revision)
    )
    if body is None:
        row = {
            "id": task.id,
            "revision": task.revision,
            "body": to_json(task).decode(),
            "added_at": time.time(),
        }
        connection.execute(insert(tasks), [row])
        return True
    if to_json(replace(from_json(Task, body), path=task.path)) != to_json(task):
        raise StoreError(
            f"task {task.id} at revision {task.revision[:12]} is stored with other content.",
            fix="The revision is the hash of the folder: load the task again.",
        )
    return False


def get_task(connection: Connection, task_id: str, revision: str | None) -> Task:
    """One revision, or the one added last.

    Raises:
        StoreError: there is none.
    """
    where = [tasks.c.id == task_id, *([] if revision is None else [tasks.c.revision == revision])]
    body = connection.scalar(select(tasks.c.body).where(*where).order_by(tasks.c.added_at.desc()).limit(1))
    if body is None:
        known = connection.scalars(select(tasks.c.id).distinct())
        raise StoreError(f"no task {task_id!r} at revision {revision or 'any'}.", fix=nearest(task_id, known))
    return from_json(Task, body)


def add_admission(
    connection: Connection, task_id: str, revision: str, valid: bool, facts: Mapping[str, Any]
) -> None:
    """Note an outcome of validating a task; the newest counts."""
    row = {"task_id": task_id, "revision": revision, "valid": valid, "facts": canonical(dict(facts))}
    connection.execute(insert(admissions), [{**row, "at": time.time()}])


def get_admission(connection: Connection, task_id: str, revision: str) -> AdmissionRow | None:
    """The newest outcome for a revision, or None."""
    a = admissions.c
    query = (
        select(admissions).where(a.task_id == task_id, a.revision == revision).order_by(a.id.desc()).limit(1)
    )
    row = connection.execute(query).first()
    if row is None:
        return None
    facts = json.loads(row.facts)
    return AdmissionRow(task_id=row.task_id, revision=row.revision, valid=row.valid, facts=facts, at=row.at)


def note(connection: Connection, run_id: str, kind: str, message: str, data: Mapping[str, Any]) -> None:
    """Append an event. A NUL in the message (PostgreSQL text has none) becomes U+FFFD."""
    message = message.replace("\0", "\ufffd")
    row = {
        "run_id": run_id,
        "at": time.time(),
        "kind": kind,
        "message": message,
        "data": canonical(dict(data)),
    }
    connection.execute(insert(events), [row])


def get_events(connection: Connection, run_id: str, kind: str | None) -> tuple[EventRow, ...]:
    """In the order of noting."""
    where = [events.c.run_id == run_id, *([] if kind is None else [events.c.kind == kind])]
    found = connection.execute(select(events).where(*where).order_by(events.c.id))
    return tuple(EventRow(at=r.at, kind=r.kind, message=r.message, data=json.loads(r.data)) for r in found)
