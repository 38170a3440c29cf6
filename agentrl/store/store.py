"""The evidence store: one object that the rest of the system holds.

`Store` is the list of what can be done; each method is one transaction, done by the module that it names.
Methods block, so async callers run them in a thread (`anyio.to_thread.run_sync`); one store serves any number
of threads.

Guarantees, on SQLite and PostgreSQL alike:
1. A method that returned has happened, whole; one that raised has not happened at all.
2. Evidence is only ever added. Adding the same again is once; adding other content under a known id is
refused.
3. What is read back equals what was added, bit by bit, null by null.
4. A trajectory is consumed once in a lineage of runs.
5. Nothing waits longer than `wait_s`, and an ended wait says what for and who was in the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import StoreError
from agentrl.store import catalog, runs, sessions, snapshots, training, trajectories, verify, work
from agentrl.store.engine import Database
from agentrl.store.layout import Rows, assemble, explode
from agentrl.store.migrate import migrate
from agentrl.store.rows import (
    AdmissionRow,
    Claim,
    Counts,
    EventRow,
    MetricRow,
    RunRow,
    RunState,
    StalenessRow,
    TrajectoryRow,
    UpdateRow,
    VerifyReport,
)
from agentrl.store.sessions import SessionMove, SessionRow, TenantRow
from agentrl.store.snapshots import SnapshotRow
from agentrl.types import Group, PolicyVersion, Split, Task, Termination, Trajectory

TRAIN = "train"
"""The phase of trajectories that may be trained. Others by convention: `demonstration`, `heldout_before`,
`heldout_after`."""
WAIT_S = 30.0


class Store:
    """All evidence of all runs in one database. Open it with `Store.open`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    def open(cls, url: str | Path, *, wait_s: float = WAIT_S, create: bool = True) -> Store:
        """Open a store; create or upgrade its tables.

        Args:
            url: `sqlite:///store.db`, a file path, or `postgresql://user@host/name`.
            wait_s: deadline of every wait for another writer.
            create: False refuses a SQLite file that is not there (for readers).

        Raises:
            ConfigError: the URL names no store, or its driver is not installed.
            StoreError: not reachable, not a store, or written by a newer agentrl.
        """
        database = Database(url, wait_s=wait_s, create=create)
        try:
            migrate(database)
        except BaseException:
            database.close()
            raise
        return cls(database)

    @property
    def url(self) -> str:
        """Where it is, without the password."""
        return str(self._database)

    def close(self) -> None:
        """Give the connections back."""
        self._database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------ runs

    def begin_run(
        self,
        name: str,
        *,
        config: Mapping[str, Any],
        algo: str,
        seed: int,
        parent: str | None = None,
        run_id: str | None = None,
    ) -> RunRow:
        """Begin a run; `parent` is the run that it resumes. The id is made here unless given.

        Raises:
            StoreError: the id is taken, the parent unknown, or the config not JSON.
        """
        row = runs.new_row(name=name, config=config, algo=algo, seed=seed, parent_id=parent, run_id=run_id)
        return self.restore_run(row)

    def restore_run(self, row: Mapping[str, Any]) -> RunRow:
        """Begin a run from its sealed values (`begin_run` and imports); the same again is once."""
        with_row = dict(row)
        if with_row["seal"] != runs.seal(with_row):
            raise StoreError(f"run {with_row['id']} does not match its seal.", fix="Its export was changed.")
        self._database.write(f"begin run {row['id']}", lambda c: runs.begin(c, with_row))
        return self.run(with_row["id"])

    def finish_run(self, run_id: str, state: RunState | str = RunState.FINISHED) -> RunRow:
        """Close a run as finished, failed or cancelled."""
        self._database.write(f"finish run {run_id}", lambda c: runs.finish(c, run_id, RunState(state)))
        return self.run(run_id)

    def run(self, run_id: str) -> RunRow:
        """One run.

        Raises:
            StoreError: there is none; names the nearest id.
        """
        with self._database.read() as connection:
            return runs.get(connection, run_id)

    def runs(self, *, limit: int = 1000) -> tuple[RunRow, ...]:
        """The newest first."""
        with self._database.read() as connection:
            return runs.every(connection, limit=limit)

    def lineage(self, run_id: str) -> tuple[str, ...]:
        """The run, the run that it resumes, and so on."""
        with self._database.read() as connection:
            return runs.lineage(connection, run_id)

    # -------------------------------------------------------------------------------------------- evidence

    def add_trajectory(
        self, run_id: str, trajectory: Trajectory, *, phase: str = TRAIN, step: int | None = None
    ) -> bool:
        """Append a trajectory to the run's chain; True when it was not there yet.

        Args:
            phase: what it was made for; only `train` ones are offered by `unconsumed`.
            step: the optimizer step or round that it belongs to.

        Raises:
            EvidenceError: a prompt does not match its hash.
            StoreError: the id is stored with other content or in another run.
        """
        rows = explode(trajectory, phase=phase, step=step)
        return self._database.write(
            f"add trajectory {trajectory.id} to run {run_id}",
            lambda c: trajectories.add(c, run_id, [rows]) == 1,
        )

    def add_group(self, run_id: str, group: Group, *, phase: str = TRAIN, step: int | None = None) -> int:
        """Append the trajectories of a group in one transaction; returns how many were not there yet."""
        batch = [explode(trajectory, phase=phase, step=step) for trajectory in group.trajectories]
        return self._database.write(
            f"add group {group.id} to run {run_id}", lambda c: trajectories.add(c, run_id, batch)
        )

    def trajectory(self, trajectory_id: str) -> Trajectory:
        """One whole record, equal to the one that was added.

        Raises:
            StoreError: there is none.
            EvidenceError: its rows are no longer a valid record.
        """
        with self._database.read() as connection:
            rows = trajectories.one(connection, trajectory_id)
        return assemble(rows)

    def trajectory_row(self, trajectory_id: str) -> TrajectoryRow:
        """The light row of one trajectory: its run, phase and place."""
        with self._database.read() as connection:
            found = trajectories.light(
                connection,
                trajectories.by_id(trajectory_id),
                in_run=False,
                limit=1,
                offset=0,
                newest_first=False,
            )
        if not found:
            raise StoreError(
                f"no trajectory {trajectory_id!r} in this store.", fix="List them, or resolve a prefix."
            )
        return found[0]

    def group(self, run_id: str, group_id: str) -> Group:
        """The stored trajectories of a group, in the order of adding.

        Raises:
            StoreError: the run has no such group.
        """
        members = tuple(self._stream(run_id, phase=None, group=group_id))
        if not members:
            raise StoreError(
                f"run {run_id} has no group {group_id!r}.", fix="A group exists once a member is added."
            )
        records = tuple(assemble(rows) for rows in members)
        return Group(id=group_id, task_id=records[0].task_id, trajectories=records)

    def resolve(self, prefix: str) -> str:
        """The trajectory id that begins with `prefix`, if it is the only one.

        Raises:
            StoreError: none or several; names them.
        """
        with self._database.read() as connection:
            return trajectories.resolve(connection, prefix)

    def trajectories(
        self,
        run_id: str | None = None,
        *,
        task: str | None = None,
        split: Split | str | None = None,
        termination: Termination | str | None = None,
        phase: str | None = None,
        step: int | None = None,
        group: str | None = None,
        limit: int | None = 100,
        offset: int = 0,
        newest_first: bool = False,
    ) -> tuple[TrajectoryRow, ...]:
        """Light rows: of a run in the order of adding; of all runs in the order of finishing."""
        where = trajectories.conditions(
            run_id=run_id,
            task=task,
            split=split,
            termination=termination,
            phase=phase,
            step=step,
            group=group,
        )
        with self._database.read() as connection:
            return trajectories.light(
                connection,
                where,
                in_run=run_id is not None,
                limit=limit,
                offset=offset,
                newest_first=newest_first,
            )

    def iter_trajectories(
        self, run_id: str, *, phase: str | None = None, group: str | None = None
    ) -> Iterator[Trajectory]:
        """Whole records in the order of adding, a few in memory at a time; sees what is added meanwhile."""
        for rows in self._stream(run_id, phase=phase, group=group):
            yield assemble(rows)

    def iter_stored(self, run_id: str) -> Iterator[tuple[Mapping[str, Any], Trajectory]]:
        """Like `iter_trajectories` with the stored row (phase, step, hashes) beside each; for exports."""
        for rows in self._stream(run_id, phase=None, group=None):
            yield rows.trajectory, assemble(rows)

    def counts(self, run_id: str | None = None, *, phase: str | None = None) -> Counts:
        """How trajectories ended and which tools they used."""
        with self._database.read() as connection:
            return trajectories.counts(connection, trajectories.conditions(run_id=run_id, phase=phase))

    def verify(self, run_id: str, *, key: bytes | None = None) -> VerifyReport:
        """Check that a run is what was written; with a key also that every verdict is signed with it.

        Raises:
            StoreError: there is no such run. (Broken evidence is a report, not an error.)
        """
        return verify.verify(self._database, run_id, key=key)

    # -------------------------------------------------------------------------------------------- training

    def publish(self, run_id: str, version: PolicyVersion) -> bool:
        """Append a policy version that no update made (the first one); False when it is there already."""
        return self._database.write(
            f"publish version {version.number} of run {run_id}",
            lambda c: training.publish(c, run_id, version),
        )

    def record_update(
        self,
        run_id: str,
        step: int,
        trajectory_ids: Sequence[str],
        policy_version: PolicyVersion | None,
        metrics: Mapping[str, float],
    ) -> bool:
        """An optimizer update, whole: what it consumed, the version it published (if any), its metrics.

        Returns:
            False when this very update is recorded already (a retry after a crash).

        Raises:
            StoreError: a trajectory was consumed before in this lineage, or is unknown; the step does not
            grow; the version is not the next. Nothing is recorded then.
        """
        ids = tuple(trajectory_ids)
        return self._database.write(
            f"record update {step} of run {run_id}",
            lambda c: training.record_update(c, run_id, step, ids, policy_version, metrics),
        )

    def unconsumed(self, run_id: str, phase: str = TRAIN) -> tuple[TrajectoryRow, ...]:
        """What a resumed run may still train: of its lineage, oldest run first, in the order of adding."""
        with self._database.read() as connection:
            return training.unconsumed(connection, run_id, phase)

    def updates(self, run_id: str) -> tuple[UpdateRow, ...]:
        """The updates of a run, in order."""
        with self._database.read() as connection:
            return training.history(connection, run_id)

    def policy_versions(self, run_id: str) -> tuple[PolicyVersion, ...]:
        """The versions of a run, oldest first."""
        with self._database.read() as connection:
            return training.versions(connection, run_id)

    def latest_version(self, run_id: str) -> PolicyVersion | None:
        """The newest version of the run, or of the nearest run it resumes that has one."""
        with self._database.read() as connection:
            return training.latest(connection, run_id)

    def staleness(self, run_id: str, *, step: int | None = None) -> tuple[StalenessRow, ...]:
        """How old each consumed trajectory was when it was trained."""
        with self._database.read() as connection:
            return training.staleness(connection, run_id, step)

    def log(self, run_id: str, points: Iterable[tuple[int, str, float]]) -> None:
        """Metrics as (step, name, value), in one batch; the same step and name again replaces the value."""
        rows = list(points)
        self._database.write(f"log metrics of run {run_id}", lambda c: training.log(c, run_id, rows))

    def metrics(self, run_id: str, names: Sequence[str] | None = None) -> tuple[MetricRow, ...]:
        """By name, then step."""
        with self._database.read() as connection:
            return training.read_metrics(connection, run_id, names)

    # --------------------------------------------------------------------------------------------- catalog

    def note(self, run_id: str, kind: str, message: str, data: Mapping[str, Any] | None = None) -> None:
        """Append an event: a phase began, a fault was seen."""
        self._database.write(
            f"note {kind} in run {run_id}", lambda c: catalog.note(c, run_id, kind, message, data or {})
        )

    def events(self, run_id: str, *, kind: str | None = None) -> tuple[EventRow, ...]:
        """In the order of noting."""
        with self._database.read() as connection:
            return catalog.get_events(connection, run_id, kind)

    def add_task(self, task: Task) -> bool:
        """Keep a revision of a task; False when it is there already."""
        return self._database.write(f"add task {task.id}", lambda c: catalog.add_task(c, task))

    def task(self, task_id: str, revision: str | None = None) -> Task:
        """One revision of a task, or the one added last."""
        with self._database.read() as connection:
            return catalog.get_task(connection, task_id, revision)

    def add_admission(self, task_id: str, revision: str, *, valid: bool, facts: Mapping[str, Any]) -> None:
        """Note an outcome of validating a revision of a task; the newest counts."""
        self._database.write(
            f"admit {task_id}", lambda c: catalog.add_admission(c, task_id, revision, valid, facts)
        )

    def admission(self, task_id: str, revision: str) -> AdmissionRow | None:
        """The newest outcome for a revision; None: never validated."""
        with self._database.read() as connection:
            return catalog.get_admission(connection, task_id, revision)

    # ------------------------------------------------------------------------------------------------ work

    def enqueue(self, run_id: str, kind: str, items: Mapping[str, Mapping[str, Any]]) -> int:
        """Queue payloads by key; known keys are left alone. Returns how many were new."""
        return self._database.write(f"queue {kind}", lambda c: work.enqueue(c, run_id, kind, items))

    def claim(self, run_id: str, kind: str, *, lease_s: float, owner: str) -> Claim | None:
        """Lease the oldest free piece of work (queued, or its lease ended); None: nothing is free."""
        return self._database.write(f"claim {kind}", lambda c: work.claim(c, run_id, kind, lease_s, owner))

    def renew(self, claim: Claim, *, lease_s: float) -> float:
        """A longer lease from now; returns when it ends.

        Raises:
            StoreError: the lease was lost.
        """
        return self._database.write(f"renew {claim.kind}", lambda c: work.renew(c, claim, lease_s))

    def complete(self, claim: Claim, result: Mapping[str, Any] | None = None) -> None:
        """Mark leased work as done.

        Raises:
            StoreError: the lease was lost; its result must be dropped.
        """
        self._database.write(f"complete {claim.kind}", lambda c: work.complete(c, claim, result or {}))

    def expire(self, run_id: str, kind: str | None = None) -> int:
        """Put back what ended leases hold; returns how many."""
        return self._database.write("expire leases", lambda c: work.expire(c, run_id, kind))

    def work(self, run_id: str, kind: str) -> dict[str, int]:
        """How many pieces of work are queued, leased, done."""
        with self._database.read() as connection:
            return work.tally(connection, run_id, kind)

    # ------------------------------------------------------------------------------------- gateway sessions

    def add_tenant(self, row: TenantRow) -> None:
        """Add a tenant of the gateway, or replace its token and limits."""
        self._database.write(f"add tenant {row.name}", lambda c: sessions.add_tenant(c, row))

    def tenants(self) -> tuple[TenantRow, ...]:
        """By name."""
        with self._database.read() as connection:
            return sessions.all_tenants(connection)

    def begin_gateway(self, name: str) -> int:
        """The epoch of the gateway that starts now; from here on earlier ones of that name are refused."""
        return self._database.write(f"begin gateway {name}", lambda c: sessions.begin_gateway(c, name))

    def append_sessions(
        self, gateway: str, epoch: int, opened: Sequence[SessionRow], moves: Sequence[SessionMove]
    ) -> None:
        """New sessions and their transitions, in order, in one transaction; the same again is once.

        Raises:
            StoreError: the gateway was superseded, or a session has ended already.
        """
        self._database.write(
            f"append to the session log of {gateway}",
            lambda c: sessions.append(c, gateway, epoch, opened, moves),
        )

    def session(self, session_id: str) -> SessionRow:
        """One session of a gateway.

        Raises:
            StoreError: there is none; names the nearest id.
        """
        with self._database.read() as connection:
            return sessions.get(connection, session_id)

    def find_session(
        self, tenant: str, *, session_id: str | None = None, client_key: str | None = None
    ) -> SessionRow | None:
        """A tenant's session by one of the two; None: this tenant has none such."""
        with self._database.read() as connection:
            return sessions.find(connection, tenant, session_id=session_id, client_key=client_key)

    def unended_sessions(self, gateway: str) -> tuple[SessionRow, ...]:
        """Sessions of a gateway without a terminal record, the oldest first."""
        with self._database.read() as connection:
            return sessions.unended(connection, gateway)

    def admitted_sessions(self, gateway: str, since: float) -> tuple[SessionRow, ...]:
        """Sessions of a gateway that were opened since then (Unix seconds) and admitted at some time."""
        with self._database.read() as connection:
            return sessions.admitted(connection, gateway, since)

    def session_log(self, session_id: str) -> tuple[SessionMove, ...]:
        """The transitions of a session, in order."""
        with self._database.read() as connection:
            return sessions.log_of(connection, session_id)

    def add_snapshot(
        self, gateway: str, epoch: int, row: SnapshotRow, body: bytes, *, most: int, most_bytes: int
    ) -> tuple[SnapshotRow, bool]:
        """Keep a snapshot for its tenant: the one under its key, and whether that is this one.

        Raises:
            StoreError: the gateway was superseded, or (`SnapshotsFull`) the tenant may keep no more.
        """
        return self._database.write(
            f"keep snapshot {row.id}",
            lambda c: snapshots.add(c, gateway, epoch, row, body, most=most, most_bytes=most_bytes),
        )

    def find_snapshot(
        self, tenant: str, now: float, *, snapshot_id: str | None = None, client_key: str | None = None
    ) -> SnapshotRow | None:
        """A tenant's snapshot by one of the two; None: it has none such, or none any more at `now`."""
        with self._database.read() as connection:
            return snapshots.find(connection, tenant, now, snapshot_id=snapshot_id, client_key=client_key)

    def snapshot_body(self, snapshot_id: str) -> bytes | None:
        """What a snapshot holds; None: it is gone.

        Raises:
            EvidenceError: the stored column is damaged.
        """
        with self._database.read() as connection:
            return snapshots.body(connection, snapshot_id)

    def snapshots(self, tenant: str, now: float) -> tuple[SnapshotRow, ...]:
        """What a tenant keeps at `now`, the oldest first."""
        with self._database.read() as connection:
            return snapshots.of(connection, tenant, now)

    def remove_snapshot(self, tenant: str, snapshot_id: str) -> bool:
        """Forget a tenant's snapshot; False: it has none of that id."""
        return self._database.write(
            f"remove snapshot {snapshot_id}", lambda c: snapshots.remove(c, tenant, snapshot_id)
        )

    def sweep_snapshots(self, now: float) -> int:
        """Remove what has expired; returns how many."""
        return self._database.write("remove expired snapshots", lambda c: snapshots.sweep(c, now))

    # --------------------------------------------------------------------------------------------- private

    def _stream(self, run_id: str, *, phase: str | None, group: str | None) -> Iterator[Rows]:
        where = trajectories.conditions(run_id=run_id, phase=phase, group=group)
        after = 0
        with self._database.read() as connection:
            runs.get(connection, run_id)
        while True:
            with self._database.read() as connection:
                batch = trajectories.load(connection, *where, after=after, limit=trajectories.BATCH)
            yield from batch
            if len(batch) < trajectories.BATCH:
                return
            after = batch[-1].trajectory["seq"]
