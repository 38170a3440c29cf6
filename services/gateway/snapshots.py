"""Workdirs that tenants keep: from a diff to the store, and back to what a session begins from.

A snapshot is of one tenant, one revision of a task and one image, and nobody else is told that it is there.
Its bytes are one line of JSON (path, kind, mode and length of every change), then the contents in that order;
read back they are believed only if they have the digest that was noted when they were taken.

Nothing here touches a sandbox.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Callable
from itertools import accumulate

from agentrl.errors import EvidenceError, SandboxError, StoreError
from agentrl.store import SnapshotRow, SnapshotsFull, Store
from agentrl.types import Task
from envs.sandbox.contract import FileChange
from envs.sandbox.diff import diff_hash
from envs.session import Origin
from harness.gateway import wire
from services.gateway.refused import Refused


class Snapshots:
    """What the tenants of a gateway keep in its store; `most` and `most_bytes` are each tenant's."""

    def __init__(
        self,
        store: Store,
        *,
        gateway: str,
        epoch: int,
        most: int,
        most_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._gateway = gateway
        self._epoch = epoch
        self._most = most
        self._most_bytes = most_bytes
        self._clock = clock

    async def known(self, tenant: str, body: wire.SnapshotBody, session_id: str) -> SnapshotRow | None:
        """The snapshot that was taken under this key. Raises `Refused` when it was taken for something
        else."""
        row = await asyncio.to_thread(
            lambda: self._store.find_snapshot(tenant, self._clock(), client_key=body.client_key)
        )
        if row is not None:
            self._same(row, body, session_id)
        return row

    def _same(self, row: SnapshotRow, body: wire.SnapshotBody, session_id: str) -> None:
        if row.body_hash != request_hash(body, session_id):
            raise Refused(
                409,
                "client_key_reused",
                f"client_key {body.client_key} was used for another snapshot.",
                fix="Use a new key for a new snapshot, or send the same body.",
            )

    async def keep(
        self,
        changes: tuple[FileChange, ...],
        *,
        tenant: str,
        body: wire.SnapshotBody,
        session_id: str,
        task: Task,
        image: str,
        processes: int,
    ) -> tuple[SnapshotRow, bool]:
        """Keep a diff. Returns the snapshot of this key, and whether it is new. Raises `Refused`."""
        now = self._clock()

        def write() -> tuple[SnapshotRow, bool]:
            packed = pack(changes)
            row = SnapshotRow(
                id=f"w-{secrets.token_hex(10)}",
                tenant=tenant,
                client_key=body.client_key,
                body_hash=request_hash(body, session_id),
                session_id=session_id,
                task_id=task.id,
                task_revision=task.revision,
                image_digest=image,
                digest=diff_hash(changes),
                changes=len(changes),
                bytes=len(packed),
                processes=processes,
                created_at=now,
                expires_at=now + body.ttl_s,
            )
            return self._store.add_snapshot(
                self._gateway, self._epoch, row, packed, most=self._most, most_bytes=self._most_bytes
            )

        try:
            row, new = await asyncio.to_thread(write)
        except SnapshotsFull as error:
            raise Refused(403, "snapshots_full", error.message, fix=error.fix or "Delete one.") from error
        except StoreError as error:  # nothing is wrong with the session: it goes on
            raise Refused(
                503,
                "store",
                error.message,
                fix=error.fix or "Look at the store.",
                owner="gateway",
                retryable=True,
                retry_after_s=5.0,
            ) from error
        self._same(row, body, session_id)
        return row, new

    async def require(self, tenant: str, snapshot_id: str, task: Task) -> None:
        """Raise `Refused` unless a session of this task can begin from it."""
        row = await asyncio.to_thread(
            lambda: self._store.find_snapshot(tenant, self._clock(), snapshot_id=snapshot_id)
        )
        if row is None:
            raise Refused(
                404,
                "unknown_snapshot",
                f"{tenant} has no snapshot {snapshot_id:.64}; it may have expired.",
                fix="See GET /v1/snapshots, or take one: POST /v1/sessions/ID/snapshot.",
            )
        if (row.task_id, row.task_revision) != (task.id, task.revision):
            raise Refused(
                409,
                "other_task",
                f"Snapshot {row.id} is of task {row.task_id} at revision {row.task_revision[:12]},"
                f" not of {task.id} at {task.revision[:12]}.",
                fix="Open a session of that task, or take a snapshot in a session of this one.",
            )

    async def origin(self, tenant: str, snapshot_id: str) -> Origin:
        """What a session begins from. Raises `SandboxError`: it is gone, or not what was taken."""

        def read() -> Origin | None:
            row = self._store.find_snapshot(tenant, self._clock(), snapshot_id=snapshot_id)
            if row is None:
                return None
            try:
                packed = self._store.snapshot_body(row.id)
            except EvidenceError as error:
                raise _damaged(row) from error
            return None if packed is None else unpack(row, packed)

        found = await asyncio.to_thread(read)
        if found is None:
            raise SandboxError(
                f"Snapshot {snapshot_id} was deleted or has expired before the session was made.",
                fix="Keep a snapshot until every session that begins from it is ready.",
                owner="gateway",
                code="snapshot_gone",
                phase="start",
                retryable=False,
            )
        return found

    async def of(self, tenant: str) -> tuple[SnapshotRow, ...]:
        """A tenant's, the oldest first."""
        return await asyncio.to_thread(lambda: self._store.snapshots(tenant, self._clock()))

    async def remove(self, tenant: str, snapshot_id: str) -> bool:
        """Forget one; False: the tenant has none of that id."""
        return await asyncio.to_thread(self._store.remove_snapshot, tenant, snapshot_id)

    async def sweep(self) -> None:
        """Remove what has expired, of every tenant. Raises `StoreError`."""
        await asyncio.to_thread(self._store.sweep_snapshots, self._clock())


def request_hash(body: wire.SnapshotBody, session_id: str) -> str:
    """What makes two requests for a snapshot the same."""
    return hashlib.sha256(json.dumps([session_id, body.model_dump_json()]).encode()).hexdigest()


def view(row: SnapshotRow) -> wire.SnapshotView:
    """As its tenant sees it."""
    return wire.SnapshotView(
        id=row.id,
        session_id=row.session_id,
        task=wire.TaskRef(id=row.task_id, revision=row.task_revision),
        image_digest=row.image_digest,
        digest=row.digest,
        changes=row.changes,
        bytes=row.bytes,
        processes=row.processes,
        created_at=row.created_at,
        expires_at=row.expires_at,
    )


def pack(changes: tuple[FileChange, ...]) -> bytes:
    """A diff as bytes."""
    rows = [[c.path, c.kind, c.mode, None if c.content is None else len(c.content)] for c in changes]
    return json.dumps(rows).encode("ascii") + b"\n" + b"".join(c.content or b"" for c in changes)


def unpack(row: SnapshotRow, body: bytes) -> Origin:
    """What a session begins from.

    Raises:
        SandboxError: these are not the changes that were taken.
    """
    try:
        line, _, contents = body.partition(b"\n")
        rows = json.loads(line)
        ends = list(accumulate((size or 0 for _, _, _, size in rows), initial=0))
        changes = tuple(
            FileChange(
                path=path, kind=kind, mode=mode, content=None if size is None else contents[at : at + size]
            )
            for (path, kind, mode, size), at in zip(rows, ends, strict=False)
        )
        whole = ends[-1] == len(contents) and diff_hash(changes) == row.digest
    except (ValueError, TypeError):
        whole = False
    if not whole:
        raise _damaged(row)
    return Origin(image=row.image_digest, digest=row.digest, changes=changes)


def _damaged(row: SnapshotRow) -> SandboxError:
    return SandboxError(
        f"Snapshot {row.id} is not what was taken: its stored bytes have changed.",
        fix="Delete it and take another; look at the store's disk.",
        owner="gateway",
        code="snapshot_damaged",
        phase="start",
        retryable=False,
    )
