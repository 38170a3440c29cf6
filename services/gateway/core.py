"""The gateway without HTTP: requests for sessions become sessions, and each ends with one terminal record.

Memory is a cache of the log: every transition goes through `_move`, which refuses what `FOLLOWS` does not
allow and hands the line to the journal; what a caller is told about an end is durable first. Every operation
of a caller runs in a task of the gateway, so that a dropped connection loses nothing; asked again under the
same key it is the same operation.

Waiting for a slot, for a run permit or for a turn to be verified is queue time: no time limit of a command or
of the environment runs meanwhile. Whatever ends a session goes through `_end`, once.

It does not speak HTTP, and knows no backend by name.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from agentrl.errors import (
    BoundaryError,
    EvidenceError,
    SandboxError,
    SandboxLost,
    StoreError,
    TaskError,
    nearest,
)
from agentrl.store import SessionMove, SessionRow, SnapshotRow, Store, TenantRow
from agentrl.types import (
    Action,
    Fault,
    Observation,
    Task,
    Termination,
    Verdict,
    from_dict,
    from_json,
    to_dict,
    to_json,
)
from envs import grading
from envs.admission import admit
from envs.evidence import ADMISSION_FRESH_S, Admission, fault_of
from envs.sandbox.adoption import Adopting
from envs.sandbox.contract import (
    Backend,
    ExecResult,
    Expired,
    FileChange,
    Foreseeing,
    Isolation,
    Mount,
    NotRun,
    Pulling,
    Sandbox,
    Short,
    time_multiplier,
)
from envs.sandbox.diff import DiffTooLarge
from envs.sandbox.warm import PoolState, Warming
from envs.session import Session, image_of, prepare
from envs.tasks import archive
from envs.tasks.package import load_task
from harness.gateway import wire
from services.gateway.journal import Journal
from services.gateway.limiters import Limiters
from services.gateway.metrics import Metrics
from services.gateway.preparing import Preparations
from services.gateway.ration import Claim, Ration
from services.gateway.refused import Over, Refused, key_reused
from services.gateway.snapshots import Snapshots, request_hash
from services.gateway.states import ENDED, FOLLOWS, State

PERMIT_DEADLINE_S = 600.0
"""Longest wait for a run permit or for a turn to be verified."""
FINALIZE_GRACE_S = 300.0
"""What finalizing may take beyond twice the grader's own limit (it may verify twice)."""
ROOM_S = 15.0
"""So long a verifier may wait for its sandbox before the attempt's own one makes room for it."""
INTERRUPT_DEADLINE_S = 30.0
CLOSE_DEADLINE_S = 60.0
FENCE_S = 5.0
"""Between two looks for a newer gateway; longest wait for the store to say so before a sandbox is closed."""
STOP_DEADLINE_S = 90.0
"""For what ends with the gateway: sandboxes (each has `CLOSE_DEADLINE_S`), then the backend."""
ADMIT_DEADLINE_S = 3600.0
ONCE_DEADLINE_S = 120.0
"""A file operation or a diff, waiting for the command before it included."""
GROUP_REMEMBERED_S = 6 * 3600.0
ADOPTIONS_AT_ONCE = 16
MAX_PENDING = 16
"""Operations of one session that may wait for each other."""
FOLLOW_BYTES = 1 << 20
FOLLOW_PAUSE_S = 0.05
"""Between two looks at a command that has said nothing new."""
KEPT_RESULTS = 32
"""Results of a session that can be asked for again; an older one is forgotten, but never run twice."""
KEPT_ENDED = 2048
"""Ended sessions kept in memory; older ones are read from the store."""
TENANTS_FRESH_S = 5.0
UNKNOWN_AGAIN_S = 0.5
"""Guessed tokens make the store be asked no more often than this."""
BREAKER_FAILURES = 5
BREAKER_PAUSE_S = 10.0
SWEEP_EVERY_S = 600.0
"""Expired snapshots are no longer found; their bytes are given back so often, and whenever one is taken."""

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How much there is, and how it is kept."""

    name: str = "gateway"
    slots: int = 32
    """Sessions alive at once."""
    memory_mib: float = 65_536.0
    """Sum of the memory limits of live sessions."""
    permits: int = 4
    """Commands running at once."""
    verify: int = 4
    """Verifications at once: a share of their own, so that finished work never waits behind new work."""
    creates: int = 4
    """Sandboxes made at once, at most."""
    snapshots: int = 64
    """Snapshots that a tenant may keep."""
    download_mib: float = 1024.0
    """Largest file that can be read in parts."""
    snapshot_mib: float = 1024.0
    """Sum of their bytes, of a tenant."""
    admission: str = "light"
    """`light`, `full`, or `stored`: only what an earlier validation left in the store."""
    reap_every_s: float = 1.0


@dataclass(slots=True)
class _Gathering:
    """A group on its way to be whole."""

    size: int
    claims: list[Claim]

    @property
    def present(self) -> list[Claim]:
        """Of members that still wait."""
        return [claim for claim in self.claims if not claim.released]


@dataclass(slots=True)
class Operation:
    """Something asked for under a key. `task` None: its result is forgotten; `digest` None: what was asked is
    not known here."""

    digest: str | None
    task: asyncio.Task[Any] | None


@dataclass(slots=True, kw_only=True, eq=False)
class Live:
    """One session in memory."""

    id: str
    tenant: str
    request: wire.OpenRequest
    body_hash: str
    task: Task
    signing_key: bytes | None
    """None after a restart, until its tenant asks for something: it is made from the token."""
    created_at: float
    queue_until: float
    """Of the gateway's steady clock, like `lease_until`: who sets the machine's clock ends no session."""
    claim: Claim
    lease_ttl_s: float
    lease_until: float
    lease_epoch: int = 1
    limited_s: float = 0.0
    """Waited for a turn of its image, and to be made."""
    asking: int = 0
    """Requests that wait until it is made."""
    lease_told: float = float("-inf")
    """Until when the sandbox itself believes that it is held."""
    state: State = State.QUEUED
    seq: int = 0
    session: Session | None = None
    verdict: Verdict | None = None
    driver: asyncio.Task[None] | None = None
    finalizing: asyncio.Task[None] | None = None
    ending: asyncio.Task[None] | None = None
    end_mark: int | None = None
    """Where its terminal record is in the log of this process."""
    operations: dict[tuple[str, str], Operation] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def fault(self) -> Fault | None:
        return None if self.verdict is None else self.verdict.fault


@dataclass(frozen=True, slots=True)
class _CallersOwn:
    """What a file operation found wrong with its path."""

    error: OSError | ValueError


class _Observed:
    """The backend of one session, or of a task's validation (None); says when the verifier's sandbox is
    made."""

    def __init__(self, gateway: Gateway, live: Live | None) -> None:
        self._gateway = gateway
        self._inner = gateway.backend
        self._live = live

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def isolation(self) -> Isolation:
        return self._inner.isolation

    @property
    def time_multiplier(self) -> float:
        return time_multiplier(self._inner)

    async def prepare(self, environment_dir: str) -> str:
        digest, waited_s = await self._gateway.limiters.prepare(self._inner, environment_dir)
        self._gateway.metrics.limited("prepare", waited_s)
        if self._live is not None:
            self._live.limited_s += waited_s
        return digest

    async def pulled_for(self, digest: str) -> str:
        return await self._inner.pulled_for(digest) if isinstance(self._inner, Pulling) else digest

    async def has(self, environment_dir: str) -> bool | None:
        return await self._inner.has(environment_dir) if isinstance(self._inner, Foreseeing) else None

    async def create(
        self,
        spec: Any,
        *,
        image: str,
        session: str,
        mounts: tuple[Mount, ...] = (),
        apply: tuple[FileChange, ...] = (),
        deadline_s: float = 120.0,
    ) -> Sandbox:
        with ExitStack() as waiting:
            if self._live is not None and session != self._live.id:
                self._gateway.verifying(self._live)
                loop = asyncio.get_running_loop()
                timer = loop.call_later(ROOM_S, self._gateway.make_room, self._live)
                waiting.callback(timer.cancel)
            return await self._inner.create(
                spec, image=image, session=session, mounts=mounts, apply=apply, deadline_s=deadline_s
            )

    async def close(self) -> None:
        """The backend is the gateway's."""


class Gateway:
    """All sessions of one process. `start` first, `stop` last."""

    def __init__(
        self,
        *,
        store: Store,
        backend: Backend,
        tasks: Iterable[Task],
        settings: Settings | None = None,
        uploads: Path | None = None,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` says what time it is, for deadlines and records; `steady` how much time passes, for leases
        and patience: nobody sets it."""
        self.settings = settings or Settings()
        self.backend = backend
        self.tasks = {task.id: task for task in tasks}
        self._uploads = uploads
        """Where packages of tenants are kept; None: there are none."""
        self.epoch = 0
        self.metrics = Metrics()
        self.leaked = 0
        self._store = store
        self._clock = clock
        self._steady = steady
        self._journal: Journal | None = None
        self._live: dict[str, Live] = {}
        self._by_key: dict[tuple[str, str], Live] = {}
        self._gathering: dict[tuple[str, str], _Gathering] = {}
        """Groups some of whose members wait for the rest."""
        self._gathered: dict[tuple[str, str], float] = {}
        """Groups that were complete once, and since when (monotonic): a later member goes alone."""
        self._admissions: dict[str, asyncio.Task[Admission]] = {}
        self._admissions_at: dict[str, float] = {}
        """Since when they are known (steady)."""
        self._tenants: dict[str, TenantRow] = {}
        self._tenants_at = float("-inf")
        self._background: set[asyncio.Task[Any]] = set()
        self._reaper: asyncio.Task[None] | None = None
        self._failures = 0
        self._held_s: float | None = None
        self._snapshots: Snapshots | None = None
        self._swept_at = float("-inf")
        self._asked_at = time.monotonic()
        """When the store was last asked for a newer gateway."""
        self.slots = Ration(slots=self.settings.slots, memory_mib=self.settings.memory_mib)
        self.permits = Ration(permits=self.settings.permits)
        self.verification = Ration(verifications=self.settings.verify)
        self.limiters = Limiters(creates=self.settings.creates, permits=self.permits)
        self._preparations = Preparations(
            _Observed(self, None), fetches=isinstance(backend, Pulling), turn=self._as_verifier
        )

    # --------------------------------------------------------------------------------------------- lifecycle

    async def start(self) -> None:
        """Begin a new epoch: adopt what the last one left alive, queue again what had no sandbox yet, and
        end the rest."""
        self.epoch = await asyncio.to_thread(self._store.begin_gateway, self.settings.name)
        self._journal = Journal(self._store, gateway=self.settings.name, epoch=self.epoch)
        self._snapshots = Snapshots(
            self._store,
            gateway=self.settings.name,
            epoch=self.epoch,
            most=self.settings.snapshots,
            most_bytes=int(self.settings.snapshot_mib * 2**20),
            clock=self._clock,
        )
        await self._load_tenants()
        if self._uploads is not None:
            for task in await asyncio.to_thread(_uploaded, self._uploads):
                self.tasks.setdefault(task.id, task)
        if isinstance(self.backend, Adopting):
            self.backend.outlive(self._owner())
        rows = await asyncio.to_thread(self._store.unended_sessions, self.settings.name)
        await self._remember_groups()
        limit = asyncio.Semaphore(ADOPTIONS_AT_ONCE)

        async def recover(row: SessionRow) -> None:
            async with limit:
                await self._recover(row)

        await asyncio.gather(*(recover(row) for row in rows))
        if isinstance(self.backend, Adopting):
            await self.backend.forget()
        await self._journal.flushed()
        self._reaper = asyncio.create_task(self._reap())

    async def _remember_groups(self) -> None:
        """Groups that were whole in an earlier epoch: whoever comes to one later goes alone."""
        now = self._clock()
        since = now - GROUP_REMEMBERED_S
        rows = await asyncio.to_thread(self._store.admitted_sessions, self.settings.name, since)
        for row in rows:
            with suppress(ValueError):  # of another version of this program
                group = wire.OpenRequest.model_validate_json(row.body).group_id
                if group is not None:
                    self._gathered[row.tenant, group] = time.monotonic() - max(0.0, now - row.created_at)

    def _owner(self) -> str:
        """Whose sandboxes they are: this gateway's, whichever process it is."""
        store = hashlib.sha256(self._store.url.encode()).hexdigest()[:12]
        return f"{self.settings.name}@{store}"

    async def _recover(self, row: SessionRow) -> None:
        """One session of an earlier epoch."""
        seq = len(await asyncio.to_thread(self._store.session_log, row.id))
        try:
            request = wire.OpenRequest.model_validate_json(row.body)
            was = State(row.state)
        except ValueError as error:  # of another version of this program, or damaged
            log.error("session %s can not be read: %s", row.id, error)
            self._bury(row, seq, "its request can not be read any more")
            return
        task = self.tasks.get(row.task_id)
        if task is None or task.revision != row.task_revision or row.tenant not in self._tenant_names():
            self._bury(row, seq, "its task or its tenant is no longer here")
            return
        live = self._relive(row, seq, request, task)
        self.metrics.moved(None, was)
        note = f"restart: was {was} in epoch {row.epoch}"
        try:  # whatever the log says last: its newest lines may have been lost with the process
            live.session = await self._adopted(live)
        except Exception as error:  # the boundary of an adoption: one that fails is a session lost, not all
            log.error("session %s could not be adopted: %s: %s", live.id, type(error).__name__, error)
        if live.session is None and was in (State.QUEUED, State.ADMITTED):
            if was is not State.QUEUED:
                self._move(live, State.QUEUED, note=note)
            self._enqueue(live)
            live.driver = asyncio.create_task(self._drive(live))
            live.driver.add_done_callback(_retrieved)
            return
        self.slots.seize(live.claim)
        if was is not State.LOST:
            self._move(live, State.LOST, note=note)
        if live.session is None:
            await self._end(live, State.FAILED, self._not_outlived(row))
            return
        if request.group_id is not None:
            self._gathered[row.tenant, request.group_id] = time.monotonic()
        self._move(live, State.READY, note="adopted")
        self.metrics.adopted()
        self._tell_lease(live)

    async def _adopted(self, live: Live) -> Session | None:
        if not isinstance(self.backend, Adopting):
            return None
        sandbox = await self.backend.adopt(live.id)
        if sandbox is None:
            return None
        try:
            session = await Session.resume(
                live.task,
                _Observed(self, live),
                sandbox,
                session_id=live.id,
                admission=await self._stored_admission(live.task, old=True),
            )
        except BaseException:
            await sandbox.close()
            raise
        if session is None:
            await sandbox.close()
        return session

    def _tenant_names(self) -> set[str]:
        return {tenant.name for tenant in self._tenants.values()}

    def _relive(self, row: SessionRow, seq: int, request: wire.OpenRequest, task: Task) -> Live:
        """A session of an earlier epoch in memory again. Its lease begins anew: for the time without a
        gateway its holder is not to blame."""
        if request.limits is not None:
            task = replace(task, limits=request.limits)
        now = self._steady()
        patience_s = min(row.created_at + request.queue_timeout_s - self._clock(), request.queue_timeout_s)
        claim = self.slots.claim(row.tenant, slots=1, memory_mib=task.sandbox.memory_mib)
        live = Live(
            id=row.id,
            tenant=row.tenant,
            request=request,
            body_hash=row.body_hash,
            task=task,
            signing_key=None,
            created_at=row.created_at,
            queue_until=now + max(patience_s, 1.0),
            claim=claim,
            lease_ttl_s=request.lease_ttl_s,
            lease_until=now + request.lease_ttl_s,
            lease_epoch=row.lease_epoch,
            state=State(row.state),
            seq=seq - 1,
        )
        self._live[live.id] = self._by_key[row.tenant, request.client_key] = live
        return live

    def _not_outlived(self, row: SessionRow) -> Fault:
        return Fault(
            owner="environment",
            code="lost_on_restart",
            phase="restart",
            retryable=True,
            message=f"The gateway was started again (epoch {self.epoch}); the sandbox of session {row.id}"
            f" did not outlive it (it was {row.state}).",
            evidence={"was": row.state, "epoch": row.epoch},
        )

    def _bury(self, row: SessionRow, seq: int, why: str) -> None:
        """End a session that can not even live in memory."""
        fault = replace(self._not_outlived(row), message=f"The gateway was started again: {why}.")
        verdict = grading.unscored(fault, (), isolation=self.backend.isolation)
        self._written().move(
            SessionMove(
                session_id=row.id,
                seq=seq,
                at=self._clock(),
                epoch=self.epoch,
                state=State.FAILED,
                owner=fault.owner,
                code=fault.code,
                note=f"was {row.state} in epoch {row.epoch}",
                lease_epoch=row.lease_epoch,
                lease_until=row.lease_until,
                ended=True,
                verdict=to_json(verdict).decode(),
            )
        )
        self.metrics.ended(State.FAILED, fault, row.task_id)

    async def stop(self) -> None:
        """End every session, close the backend, write the log. Idempotent."""
        if self._reaper is not None:
            self._reaper.cancel()
            await asyncio.gather(self._reaper, return_exceptions=True)
            self._reaper = None
        fault = self._own("stopped", "The gateway was stopped.", retryable=True)
        await asyncio.gather(
            *(self._end(live, State.FAILED, fault) for live in list(self._live.values()) if not live.ended),
            return_exceptions=True,  # the log may be closed to us: everything is ended all the same
        )
        for task in self._admissions.values():
            task.cancel()
        ending: set[asyncio.Future[Any]] = {*self._background, *self._admissions.values()}
        ending |= self._preparations.cancel()
        await _over(ending, STOP_DEADLINE_S, "sandboxes to close")
        if not (self._superseded and isinstance(self.backend, Adopting)):  # else they are the newer gateway's
            await _over(
                {asyncio.ensure_future(self.backend.close())}, STOP_DEADLINE_S, "the backend to close"
            )
        if self._journal is not None:
            await self._journal.close()
            self._journal = None

    def trouble(self) -> str | None:
        """Why the gateway can not serve now; None: it can."""
        if self._journal is None:
            return "not started"
        return self._journal.trouble

    @property
    def _superseded(self) -> bool:
        return self._journal is not None and self._journal.superseded

    def _serving(self) -> None:
        """Raise `Refused` when a newer gateway has taken over: its sessions are not ours to act in."""
        if self._superseded:
            raise Refused(
                503,
                "superseded",
                f"Another gateway has taken over: {self.trouble()}",
                fix="Ask the newer gateway; stop this one.",
                owner="gateway",
                retryable=True,
                retry_after_s=2.0,
            )

    def _written(self) -> Journal:
        assert self._journal is not None, "start() first"
        return self._journal

    @property
    def snapshots(self) -> Snapshots:
        """What tenants keep."""
        assert self._snapshots is not None, "start() first"
        return self._snapshots

    # ----------------------------------------------------------------------------------------------- tenants

    async def tenant_of(self, token: str) -> TenantRow:
        """The tenant of a bearer token. Raises `Refused` 401."""
        digest = hashlib.sha256(token.encode()).hexdigest()
        age_s = time.monotonic() - self._tenants_at
        if age_s > (TENANTS_FRESH_S if digest in self._tenants else UNKNOWN_AGAIN_S):
            try:
                await self._load_tenants()
            except StoreError:
                if digest not in self._tenants:
                    raise
        found = self._tenants.get(digest)
        if found is None:
            raise Refused(
                401, "unauthorized", "This token is no tenant's.", fix="Make one: agentrl serve tenant NAME."
            )
        return found

    async def knows(self, token: str) -> bool:
        """Whether a bearer token is some tenant's, as far as the store can say now."""
        try:
            await self.tenant_of(token)
        except (Refused, StoreError):
            return False
        return True

    async def _load_tenants(self) -> None:
        rows = await asyncio.to_thread(self._store.tenants)
        self._tenants = {row.token_hash: row for row in rows}
        self._tenants_at = time.monotonic()
        for row in rows:
            self.slots.tenant(row.name, weight=row.weight, quota=row.max_sessions)
            self.permits.tenant(row.name, weight=row.weight)
            self.verification.tenant(row.name, weight=row.weight)

    # -------------------------------------------------------------------------------------- tasks, admissions

    def task(self, wanted: wire.TaskRef) -> Task:
        """A task of this gateway, at the wanted revision. Raises `Refused`."""
        task = self.tasks.get(wanted.id)
        if task is None:
            raise Refused(
                404, "unknown_task", f"There is no task {wanted.id} here.", fix=nearest(wanted.id, self.tasks)
            )
        if wanted.revision not in (None, task.revision):
            raise Refused(
                409,
                "other_revision",
                f"Task {task.id} is at revision {task.revision[:12]} here, not {wanted.revision:.12}.",
                fix="Give the gateway the same package folder, or ask for its revision.",
            )
        return task

    async def upload(self, data: bytes) -> tuple[Task, bool]:
        """The task of an archive, for every tenant from now on, and whether it is new. Raises `Refused`."""
        if self._uploads is None:
            raise Refused(
                403,
                "no_uploads",
                "This gateway takes no task packages.",
                fix="Serve it with --uploads DIR, or give it the package with --tasks.",
            )
        try:
            task = await asyncio.to_thread(archive.unpack, data, self._uploads)
        except TaskError as error:
            raise Refused(422, error.code, error.message, fix=error.fix or "Correct the package.") from error
        except OSError as error:
            raise Refused(
                503,
                "uploads_disk",
                f"The package could not be kept: {error.strerror or type(error).__name__}.",
                fix="Look at the disk of the gateway's --uploads folder.",
                owner="gateway",
                retryable=True,
                retry_after_s=10.0,
            ) from error
        try:
            await asyncio.to_thread(image_of, task)
        except TaskError as error:
            await asyncio.to_thread(shutil.rmtree, task.path, True)
            raise Refused(422, error.code, error.message, fix=error.fix or "Correct the package.") from error
        known = self.tasks.setdefault(task.id, task)
        if known.revision != task.revision:
            await asyncio.to_thread(shutil.rmtree, task.path, True)
            raise Refused(
                409,
                "other_revision",
                f"Task {task.id} is here at revision {known.revision[:12]}, not {task.revision[:12]}.",
                fix="Give the changed task another name: results of one name are compared.",
            )
        return known, known is task

    def admitted(self, task: Task) -> bool | None:
        """Whether a task can earn a reward here; None: not known yet."""
        made = self._admissions.get(task.id)
        if made is None or not made.done() or made.cancelled() or made.exception() is not None:
            return None
        return made.result().valid

    async def admission(self, tenant: str, task: Task) -> Admission:
        """The proof that a task can be graded here: stored, or made now; once for all who ask at the same
        time. Raises `BoundaryError`."""
        made = self._admissions.get(task.id)
        now = self._steady()
        if (
            made is None
            or (made.done() and (made.cancelled() or made.exception() is not None))
            or (made.done() and now - self._admissions_at[task.id] > ADMISSION_FRESH_S)
        ):
            made = self._admissions[task.id] = asyncio.create_task(self._admit(tenant, task))
            self._admissions_at[task.id] = now
            made.add_done_callback(_retrieved)
        return await asyncio.shield(made)

    async def _stored_admission(self, task: Task, *, old: bool) -> Admission | None:
        """What an earlier validation found, here or elsewhere. `old`: however long ago that was."""
        row = await asyncio.to_thread(self._store.admission, task.id, task.revision)
        if row is None or row.facts.get("backend") != self.backend.name:
            return None
        if not old and self._clock() - row.at > ADMISSION_FRESH_S:
            return None
        return from_dict(Admission, dict(row.facts))

    async def _admit(self, tenant: str, task: Task) -> Admission:
        stored = await self._stored_admission(task, old=self.settings.admission == "stored")
        if stored is not None:
            return stored
        if self.settings.admission == "stored":
            raise SandboxError(
                f"Task {task.id} was never validated on {self.backend.name}.",
                fix="Run agentrl tasks validate with --store, or serve with --admission light.",
                owner="task",
                code="not_admitted",
                phase="admission",
                retryable=False,
            )
        place = _Observed(self, None)
        await prepare(task, place)  # first: a build takes its own turn, not that of a verification
        async with self._as_verifier(tenant):
            try:
                async with asyncio.timeout(ADMIT_DEADLINE_S):
                    made = await admit(task, place, light=self.settings.admission == "light")
            except TimeoutError as error:
                raise SandboxError(
                    f"Task {task.id} was not validated within {ADMIT_DEADLINE_S:g} s.",
                    code="no_answer",
                    phase="admission",
                ) from error
        await asyncio.to_thread(self._store.add_task, task)
        await asyncio.to_thread(
            lambda: self._store.add_admission(task.id, task.revision, valid=made.valid, facts=to_dict(made))
        )
        return made

    @asynccontextmanager
    async def _as_verifier(self, tenant: str) -> AsyncIterator[None]:
        """Whoever makes a sandbox beside those of sessions has the turn of a verification."""
        claim = await self._turn(self.verification, tenant, "verification", verifications=1)
        try:
            yield
        finally:
            self.verification.release(claim)

    async def prepare_images(
        self, tenant: str, request: wire.PrepareRequest, *, wait_s: float
    ) -> wire.PreparationView:
        """Have the images of tasks made ready, once per key; how far it has come after so long at most.
        Raises `Refused`."""
        self._serving()
        return await self._preparations.ask(
            tenant, request, [self.task(each) for each in request.tasks], wait_s=wait_s
        )

    # ------------------------------------------------------------------------------------------------ opening

    async def open(self, tenant: TenantRow, token: str, request: wire.OpenRequest) -> tuple[Live, bool]:
        """The session of a request, and whether it is new. Raises `Refused`; then there is none."""
        self._serving()
        if request.tenant not in (None, tenant.name):
            raise Refused(
                403,
                "other_tenant",
                f"The token is {tenant.name}'s, not {request.tenant}'s.",
                fix="Leave tenant out, or use that tenant's token.",
            )
        unsaid = {"tenant"} if request.from_snapshot is not None else {"tenant", "from_snapshot"}
        body = request.model_dump_json(exclude=unsaid)  # as before there were snapshots
        digest = hashlib.sha256(body.encode()).hexdigest()
        key = (tenant.name, request.client_key)
        if key not in self._by_key:
            row = await asyncio.to_thread(
                lambda: self._store.find_session(tenant.name, client_key=request.client_key)
            )
            if row is not None and key not in self._by_key:
                self._same_body(digest, row.body_hash, request)
                return self._remembered(row), False
        if key not in self._by_key and request.from_snapshot is not None:
            await self.snapshots.require(tenant.name, request.from_snapshot, self.task(request.task))
        known = self._by_key.get(key)
        if known is not None:
            self._same_body(digest, known.body_hash, request)
            return known, False
        live = self._new(tenant, token, request, digest)
        self._by_key[key] = self._live[live.id] = live
        self._written().open(
            SessionRow(
                id=live.id,
                gateway=self.settings.name,
                epoch=self.epoch,
                tenant=live.tenant,
                client_key=request.client_key,
                body_hash=digest,
                body=body,
                task_id=live.task.id,
                task_revision=live.task.revision,
                created_at=live.created_at,
                state=State.QUEUED,
                lease_epoch=live.lease_epoch,
                lease_until=self._wall(live.lease_until),
            )
        )
        self._line(live, None, None, "")
        self._enqueue(live)
        live.driver = asyncio.create_task(self._drive(live))
        live.driver.add_done_callback(_retrieved)
        await self._written().flushed()
        return live, True

    def _same_body(self, digest: str, known: str, request: wire.OpenRequest) -> None:
        if digest != known:
            raise key_reused(request.client_key)

    def _new(self, tenant: TenantRow, token: str, request: wire.OpenRequest, digest: str) -> Live:
        task = self.task(request.task)
        now = self._clock()
        if request.deadline_at is not None and request.deadline_at <= now:
            raise Refused(
                422,
                "deadline_passed",
                f"deadline_at is {now - request.deadline_at:.1f} s ago.",
                fix="Give a time to come, in Unix seconds.",
            )
        if request.limits is not None:
            if request.limits.exec_timeout_s > wire.MAX_EXEC_S:
                raise Refused(
                    422,
                    "limit_too_large",
                    f"exec_timeout_s is {request.limits.exec_timeout_s:g}, the most is {wire.MAX_EXEC_S:g}.",
                    fix="Lower it.",
                )
            task = replace(task, limits=request.limits)
        why = self.slots.impossible(
            tenant.name, {"slots": 1, "memory_mib": task.sandbox.memory_mib}, request.group_size
        )
        if why is not None:
            raise Refused(
                422,
                "never_fits",
                f"This can never be admitted together: {why}.",
                fix="Use a smaller group_size, or give the gateway or the tenant more.",
            )
        if self._crowded(tenant, request):
            raise Refused(
                429,
                "queue_full",
                f"{self.slots.waiting(tenant.name)} sessions of {tenant.name} wait already.",
                fix="Wait for Retry-After and send the same request again.",
                owner="environment",
                retryable=True,
                retry_after_s=min(60.0, max(1.0, self._held_s or 1.0)),
            )
        return Live(
            id=f"s-{secrets.token_hex(10)}",
            tenant=tenant.name,
            request=request,
            body_hash=digest,
            task=task,
            signing_key=wire.signing_key(token),
            created_at=now,
            queue_until=self._steady() + request.queue_timeout_s,
            claim=self.slots.claim(tenant.name, slots=1, memory_mib=task.sandbox.memory_mib),
            lease_ttl_s=request.lease_ttl_s,
            lease_until=self._steady() + request.lease_ttl_s,
        )

    def _group(self, tenant: str, request: wire.OpenRequest) -> tuple[str, str] | None:
        """The group whose other members a request waits for; None: it goes alone."""
        if request.group_id is None or request.group_size == 1:
            return None
        key = (tenant, request.group_id)
        return None if key in self._gathered else key

    def _crowded(self, tenant: TenantRow, request: wire.OpenRequest) -> bool:
        """Whether the tenant's queue has no place left. The first member of a group takes places for all of
        it: groups that each wait for a member without one would wait for ever. Raises `Refused`."""
        key = self._group(tenant.name, request)
        if key is not None and request.group_size > tenant.max_queue:
            raise Refused(
                422,
                "never_fits",
                f"A group of {request.group_size} never fits a queue of {tenant.max_queue}.",
                fix="Use a smaller group_size, or give the tenant a longer queue.",
            )
        groups = {k: g for k, g in self._gathering.items() if k[0] == tenant.name and g.present}
        if key is not None and key in groups:
            if groups[key].size != request.group_size:
                raise Refused(
                    409,
                    "other_group_size",
                    f"Group {key[1]} waits for {groups[key].size} members, not {request.group_size}.",
                    fix="Give every member of a group the same group_size, or another group_id.",
                )
            return False
        taken = self.slots.waiting(tenant.name) + sum(g.size - len(g.present) for g in groups.values())
        return taken + (1 if key is None else request.group_size) > tenant.max_queue

    def _enqueue(self, live: Live) -> None:
        """Alone, or with its group once all members are there."""
        key = self._group(live.tenant, live.request)
        if key is None:
            self.slots.queue([live.claim])
            return
        known = self._gathering.pop(key, None)
        present = [*([] if known is None else known.present), live.claim]
        if len(present) >= live.request.group_size:
            self._gathered[key] = time.monotonic()
            self.slots.queue(present)
        else:
            self._gathering[key] = _Gathering(live.request.group_size, present)

    async def _drive(self, live: Live) -> None:
        """From the queue to ready."""
        try:
            await live.claim.granted
            self.metrics.queued(live.claim.waited_s)
            self._move(live, State.ADMITTED)
            admission = await self.admission(live.tenant, live.task)
            place = _Observed(self, live)
            await prepare(live.task, place)  # first: what waits for an image holds no turn to be made
            async with self.limiters.create.slot(teaches=False) as waited_s:
                live.limited_s += waited_s
                self.metrics.limited("create", waited_s)
                self._move(live, State.PROVISIONING)
                # Who comes after a restart must know that there may have been a sandbox: a session is never
                # given another one behind its holder's back.
                await self._written().flushed()
                wanted = live.request.from_snapshot
                origin = None if wanted is None else await self.snapshots.origin(live.tenant, wanted)
                with self.limiters.create.number.measured() as making:
                    live.session = await Session.open(
                        live.task,
                        place,
                        session_id=live.id,
                        signing_key=live.signing_key,
                        admission=admission,
                        origin=origin,
                    )
                    making.counts = not live.session.warm  # one that waited says nothing of making one
            self._breaker(None)
            self._move(live, State.READY)
            self._tell_lease(live)
        except BoundaryError as error:
            self._breaker(error)
            self._begin_end(live, State.FAILED, fault_of(error))
        except StoreError as error:
            self._begin_end(live, State.FAILED, self._own("store", error.message, retryable=True))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the boundary of a session's opening: classified and recorded
            log.error("session %s could not be opened by an error of our own", live.id, exc_info=error)
            self._begin_end(live, State.FAILED, self._bug(error))

    def make_room(self, live: Live) -> None:
        """Its verifier's sandbox does not come: perhaps for want of the room that its own one takes. That one
        ends now, at the price that a restart can not judge the attempt again."""
        assert live.session is not None
        log.warning("session %s: its sandbox ends before its verdict, to make room for the verifier", live.id)
        self._aside(live.session.release())

    def verifying(self, live: Live) -> None:
        """Its verifier's sandbox is made now."""
        if live.state is State.FINALIZING:
            self._move(live, State.VERIFYING)

    def _breaker(self, error: BoundaryError | None) -> None:
        """Several failed creations in a row stop admissions for a while; nobody is failed for waiting."""
        if error is None or error.owner != "environment":
            self._failures = 0
            return
        self._failures += 1
        if self._failures >= BREAKER_FAILURES and self.slots.paused is None:
            self.slots.pause(f"{self._failures} sandboxes in a row could not be made: {error.code}")
            asyncio.get_running_loop().call_later(BREAKER_PAUSE_S, self.slots.resume)

    # -------------------------------------------------------------------------------------------- transitions

    def _move(self, live: Live, state: State, fault: Fault | None = None, note: str = "") -> None:
        assert state in FOLLOWS[live.state], f"session {live.id}: {live.state} to {state}"
        self.metrics.moved(live.state, state)
        live.state = state
        live.seq += 1
        self._line(live, None if fault is None else fault.owner, None if fault is None else fault.code, note)
        live.changed.set()
        live.changed = asyncio.Event()

    def _line(self, live: Live, owner: str | None, code: str | None, note: str) -> None:
        if live.seq == 0:
            self.metrics.moved(None, live.state)
        self._written().move(
            SessionMove(
                session_id=live.id,
                seq=live.seq,
                at=self._clock(),
                epoch=self.epoch,
                state=live.state,
                owner=owner,
                code=code,
                note=note,
                lease_epoch=live.lease_epoch,
                lease_until=self._wall(live.lease_until),
                ended=live.ended,
                verdict=to_json(live.verdict).decode() if live.ended and live.verdict is not None else None,
            )
        )

    # ------------------------------------------------------------------------------------------------ looking

    async def get(
        self,
        tenant: TenantRow,
        session_id: str,
        *,
        token: str | None = None,
        lease_epoch: int | None = None,
    ) -> Live:
        """A session of the tenant, its lease renewed. Raises `Refused`: 404, or 409 for a stale holder."""
        self._serving()
        live = self._live.get(session_id)
        if live is None or live.tenant != tenant.name:
            row = None
            if live is None:
                row = await asyncio.to_thread(
                    lambda: self._store.find_session(tenant.name, session_id=session_id)
                )
            if row is None:
                raise Refused(
                    404,
                    "unknown_session",
                    f"{tenant.name} has no session {session_id:.64}.",
                    fix="Open one, or use the token of the tenant that did.",
                )
            return self._remembered(row)
        self._hold(live, lease_epoch)
        if token is not None and not live.ended:  # not known after a restart; another since it was replaced
            live.signing_key = wire.signing_key(token)
            if live.session is not None:
                live.session.signing_key = live.signing_key
        if live.ended and live.ending is not None:
            await asyncio.shield(live.ending)
            await self._durable(live)
        return live

    async def _durable(self, live: Live, within_s: float | None = None) -> None:
        """An end is told when it is in the log. Raises `StoreError`: it is not yet; ask again."""
        if live.end_mark is not None:
            await self._written().flushed(within_s, mark=live.end_mark)

    def _wall(self, steady: float) -> float:
        """A moment of the steady clock in Unix seconds, as the machine's clock says now."""
        return self._clock() + steady - self._steady()

    def _hold(self, live: Live, epoch: int | None) -> None:
        if epoch is not None and epoch < live.lease_epoch:
            raise Refused(
                409,
                "stale_lease",
                f"Session {live.id} is held under epoch {live.lease_epoch}, not {epoch}.",
                fix="Someone took it over; leave it to them, or lease it with a higher epoch.",
            )
        live.lease_until = max(live.lease_until, self._steady() + live.lease_ttl_s)
        self._tell_lease(live)

    @contextmanager
    def _asking(self, live: Live) -> Iterator[None]:
        """Somebody waits for the session to be made, which is ours: its lease does not end meanwhile."""
        live.asking += 1
        try:
            yield
        finally:
            live.asking -= 1
            self._hold(live, None)

    def _tell_lease(self, live: Live) -> None:
        """The sandbox itself must know until when it is held, should this process end; to a tenth."""
        if live.session is not None and abs(live.lease_until - live.lease_told) > live.lease_ttl_s / 10:
            live.session.lease(max(0.1, live.lease_until - self._steady()))
            live.lease_told = live.lease_until

    def _remembered(self, row: SessionRow) -> Live:
        """An ended session from the store. What was ended by a restart is signed when its tenant asks."""
        task = self.tasks.get(row.task_id)
        request: wire.OpenRequest | None = None
        with suppress(ValueError):  # else it is of another version of this program
            request = wire.OpenRequest.model_validate_json(row.body)
        if row.ended_at is None or row.verdict is None or task is None or request is None:
            raise Refused(
                409,
                "elsewhere",
                f"Session {row.id} belongs to gateway {row.gateway} (epoch {row.epoch}).",
                fix="Ask that gateway.",
            )
        try:
            verdict = from_json(Verdict, row.verdict)
        except EvidenceError as error:
            raise _damaged(row.id, error.message) from error
        claim = self.slots.claim(row.tenant)
        self.slots.release(claim)
        return Live(
            id=row.id,
            tenant=row.tenant,
            request=request,
            body_hash=row.body_hash,
            task=task,
            signing_key=None,
            created_at=row.created_at,
            queue_until=self._steady(),
            claim=claim,
            lease_ttl_s=request.lease_ttl_s,
            lease_until=self._steady() + row.lease_until - self._clock(),
            lease_epoch=row.lease_epoch,
            state=State(row.state),
            verdict=verdict,
        )

    def lease(self, live: Live, request: wire.LeaseRequest) -> None:
        """Renew, or take over with a higher epoch."""
        self._alive(live)
        self._hold(live, request.epoch)
        live.lease_epoch = request.epoch
        live.lease_ttl_s = request.ttl_s
        live.lease_until = self._steady() + request.ttl_s
        self._tell_lease(live)

    def _alive(self, live: Live) -> None:
        if live.ended or live.ending is not None:
            raise Over(live.state, live.fault)

    def view(self, live: Live) -> wire.SessionView:
        position = None if live.state is not State.QUEUED else self.slots.position(live.claim)
        eta = None
        if position is not None and self._held_s is not None:
            eta = position * self._held_s / self.settings.slots
        queued = not live.claim.released or live.claim.granted_at is not None
        return wire.SessionView(
            id=live.id,
            state=live.state,
            task=wire.TaskRef(id=live.task.id, revision=live.task.revision),
            group_id=live.request.group_id,
            position=position,
            eta_s=eta,
            queue_ms=1000 * (live.limited_s + (live.claim.waited_s if queued else 0.0)),
            time_multiplier=time_multiplier(self.backend),
            lease=self.lease_view(live),
            deadline_at=live.request.deadline_at,
            isolation=self.backend.isolation,
            tools=[] if live.session is None else live.session.tools,
            submitted=live.session is not None and live.session.submitted,
            from_snapshot=live.request.from_snapshot,
            fault=live.fault,
        )

    def lease_view(self, live: Live) -> wire.LeaseView:
        return wire.LeaseView(
            epoch=live.lease_epoch,
            ttl_s=live.lease_ttl_s,
            until=self._wall(live.lease_until),
            gateway_epoch=self.epoch,
        )

    async def settled(self, live: Live, wait_s: float) -> None:
        """Wait, at most so long, until it is ready or ended."""
        until = time.monotonic() + wait_s
        with self._asking(live):
            while live.state in (State.QUEUED, State.ADMITTED, State.PROVISIONING):
                changed = live.changed
                try:
                    async with asyncio.timeout(until - time.monotonic()):
                        await changed.wait()
                except TimeoutError:
                    return

    def capacity(self, tenant: str) -> wire.CapacityView:
        pool = self.pool()
        mine = Counter(str(live.state) for live in self._live.values() if live.tenant == tenant)
        return wire.CapacityView(
            slots=_ration_view(self.slots, tenant),
            permits=_ration_view(self.permits, tenant),
            verification=_ration_view(self.verification, tenant),
            limiters=self.limiters.views(),
            warm=None if pool is None else wire.WarmView.model_validate(asdict(pool)),
            breaker="closed" if self.slots.paused is None else "open",
            leaked=self.leaked,
            sessions=dict(mine),
        )

    def pool(self) -> PoolState | None:
        """What the backend keeps ready; None: nothing."""
        return self.backend.pool if isinstance(self.backend, Warming) else None

    # --------------------------------------------------------------------------------------------- operations

    async def call(self, live: Live, action: Action, *, call_id: str, wait_s: float) -> Observation | None:
        """A typed tool call; None: not done yet, ask again. Raises `Refused`, `Over` or `BoundaryError`."""

        outliving = isinstance(self.backend, Adopting)

        async def work(session: Session, queue_ms: float) -> Observation:
            began = time.monotonic()
            seen = await session.call(action, key=call_id if outliving else None)
            own_ms = (seen.wall_ms or 0.0) + (seen.queue_ms or 0.0)
            self.limiters.ran(began, status=seen.status, own_ms=own_ms)
            return replace(seen, queue_ms=(seen.queue_ms or 0.0) + queue_ms)

        what = action.tool if action.tool in live.task.tools else "unknown_tool"
        try:
            if live.session is not None and live.session.called_otherwise(call_id, action):
                raise _reused("call", call_id)
            body = json.dumps([action.tool, action.arguments], sort_keys=True).encode()
        except RecursionError as error:
            raise Refused(
                422, "malformed", "The arguments are nested too deeply.", fix="Nest them less."
            ) from error
        seen: Observation | None = await self._result(
            live, self._operation(live, ("call", call_id), body, what, work), wait_s
        )
        return seen

    async def exec(self, live: Live, body: wire.ExecBody, *, wait_s: float) -> wire.ExecView | None:
        """A command; None: not done yet."""
        past = None if live.session is None else live.session.past_execs.get(f"{live.id}.x.{body.exec_id}")
        if (
            past is not None
            and live.session is not None
            and past != live.session.dressed(body.request(live.id)).digest()
        ):
            raise _reused("exec", body.exec_id)
        return await self._exec(live, body, body.model_dump_json().encode(), wait_s=wait_s)

    async def _exec(
        self, live: Live, body: wire.ExecBody, said: bytes | None, *, wait_s: float
    ) -> wire.ExecView | None:
        async def work(session: Session, queue_ms: float) -> wire.ExecView:
            began = time.monotonic()
            try:
                result: ExecResult = await session.exec(body.request(live.id))
            except Expired as error:
                raise _forgotten() from error
            except NotRun as error:
                raise Refused(
                    409,
                    "shell_refused",
                    f"Nothing was run: {error}.",
                    fix="Send it under a new exec_id, in a shell that there is or in none.",
                ) from error
            self.limiters.ran(began, status=result.status, own_ms=result.wall_ms + result.queue_ms)
            return wire.ExecView.of(result, exec_id=body.exec_id, queue_ms=queue_ms)

        view: wire.ExecView | None = await self._result(
            live, self._operation(live, ("exec", body.exec_id), said, "exec", work), wait_s
        )
        return view

    async def exec_again(self, live: Live, exec_id: str, *, wait_s: float) -> wire.ExecView | None:
        """The result of a command that was sent before."""
        known = self._sent(live, exec_id)
        if known is None:
            again = wire.ExecBody(exec_id=exec_id, argv=("true",), timeout_s=wire.MAX_EXEC_S)
            return await self._exec(live, again, None, wait_s=wait_s)  # the sandbox answers as it did then
        view: wire.ExecView | None = await self._result(live, known, wait_s)
        return view

    async def follow(
        self,
        live: Live,
        exec_id: str,
        *,
        stream: Literal["stdout", "stderr"],
        offset: int,
        wait_s: float,
    ) -> tuple[bytes, bool]:
        """Output of a command from a byte on, while it runs and after, and whether it has ended. Waits until
        there is some, or it has ended, or `wait_s` is over. Takes no permit and no turn."""
        operation = self._sent(live, exec_id)
        until = time.monotonic() + wait_s
        while True:
            if live.session is None or live.ended or live.ending is not None:
                raise Over(live.state, live.fault)
            try:
                data, ended = await live.session.follow(
                    f"{live.id}.x.{exec_id}", stream=stream, offset=offset, max_bytes=FOLLOW_BYTES
                )
            except FileNotFoundError:  # it still waits for its turn
                data = b""
                ended = operation is not None and operation.task is not None and operation.task.done()
            if data or ended or time.monotonic() >= until:
                self._hold(live, None)
                return data, ended
            await asyncio.sleep(FOLLOW_PAUSE_S)

    async def signal(self, live: Live, exec_id: str, number: int, signal_id: str | None = None) -> bool:
        """Signal a running command; False when it had ended, or has not begun."""
        self._sent(live, exec_id)
        self._alive(live)
        assert live.session is not None, "a command was sent, so there is a session"
        try:
            return await live.session.signal(f"{live.id}.x.{exec_id}", number, key=signal_id)
        except FileNotFoundError:
            return False
        except ValueError as error:
            raise _reused("signal", str(signal_id)) from error

    def _sent(self, live: Live, exec_id: str) -> Operation | None:
        """A command that was sent; None: by a process before this one."""
        known = live.operations.get(("exec", exec_id))
        if known is None and (
            live.session is None or f"{live.id}.x.{exec_id}" not in live.session.past_execs
        ):
            raise Refused(
                404,
                "unknown_exec",
                f"Session {live.id} ran no command {exec_id}.",
                fix="Send it with POST …/exec.",
            )
        return known

    async def once(self, live: Live, what: str, work: Callable[[Session], Awaitable[T]]) -> T:
        """A file operation or a diff: short, so its answer is waited for."""

        async def noting(session: Session, _: float) -> T | _CallersOwn:
            try:
                return await work(session)
            except (OSError, ValueError) as error:  # no such file, a folder, too large: nobody's fault
                return _CallersOwn(error)

        key = (what, secrets.token_hex(8))
        try:
            result: T | _CallersOwn | None = await self._result(
                live, self._operation(live, key, b"", what, noting), ONCE_DEADLINE_S
            )
        finally:
            live.operations.pop(key, None)  # nobody can ask for it again, and it may be large
        if isinstance(result, _CallersOwn):
            raise result.error
        if result is None:
            raise SandboxError(
                f"Session {live.id}: {what} did not finish within {ONCE_DEADLINE_S:g} s.",
                fix="Ask again; the session may be busy with a long command.",
                code="no_answer",
                phase=what,
            )
        return result

    async def snapshot(
        self, live: Live, body: wire.SnapshotBody, *, wait_s: float
    ) -> tuple[SnapshotRow, bool] | None:
        """Keep the workdir for sessions to come: the snapshot of this key, and whether it is new; None: not
        done yet. Raises `Refused`, also while a command runs: what it is writing would be half of it."""
        key, digest = ("snapshot", body.client_key), request_hash(body, live.id)
        sent = live.operations.get(key)
        if sent is not None and (sent.task is None or sent.task.done()):
            del live.operations[key]  # what was made is in the store, and what failed may be tried again
        if key not in live.operations:
            known = await self.snapshots.known(live.tenant, body, live.id)
            if known is not None:
                return known, False
        if key not in live.operations and self._busy(live):
            raise Refused(
                409,
                "busy",
                f"A command runs in session {live.id}.",
                fix="Wait for its answer, then take the snapshot.",
                retryable=True,
            )

        async def work(session: Session, _: float) -> tuple[SnapshotRow, bool]:
            health = await session.probe()
            try:
                changes = await session.diff()
            except DiffTooLarge as error:
                raise Refused(
                    413,
                    "snapshot_too_large",
                    error.message,
                    fix="Remove what need not be kept, such as caches and logs.",
                ) from error
            return await self.snapshots.keep(
                changes,
                tenant=live.tenant,
                body=body,
                session_id=live.id,
                task=live.task,
                image=session.image,
                processes=health.processes,
            )

        operation = self._operation(live, key, digest.encode(), "snapshot", work)
        made: tuple[SnapshotRow, bool] | None = await self._result(live, operation, wait_s)
        return made

    def _busy(self, live: Live) -> bool:
        return live.lock.locked() or any(
            o.task is not None and not o.task.done() for o in live.operations.values()
        )

    def _operation(
        self,
        live: Live,
        key: tuple[str, str],
        body: bytes | None,
        what: str,
        work: Callable[[Session, float], Awaitable[Any]],
    ) -> Operation:
        """The one of this key, begun now if it is new. `body` None: what it was asked was said to another
        process."""
        digest = None if body is None else hashlib.sha256(body).hexdigest()
        known = live.operations.get(key)
        if known is not None:
            if None not in (known.digest, digest) and known.digest != digest:
                raise _reused(*key)
            return known
        self._alive(live)
        if live.session is None or live.state not in (State.READY, State.RUNNING):
            raise Refused(
                409,
                "not_ready",
                f"Session {live.id} is {live.state}, not ready for an action.",
                fix="Wait until GET says ready."
                if live.session is None
                else "It is being judged: nothing can be done in it any more.",
                retryable=live.session is None,
            )
        pending = sum(o.task is not None and not o.task.done() for o in live.operations.values())
        if pending >= MAX_PENDING:
            raise Refused(
                429,
                "too_many_pending",
                f"{pending} operations of session {live.id} wait for each other.",
                fix="A session does one thing at a time: wait for answers.",
                retryable=True,
                retry_after_s=1.0,
            )
        task = asyncio.create_task(self._operate(live, what, work))
        task.add_done_callback(_retrieved)
        operation = live.operations[key] = Operation(digest, task)
        self._forget(live)
        return operation

    def _forget(self, live: Live) -> None:
        remembered = [o for o in live.operations.values() if o.task is not None and o.task.done()]
        for operation in remembered[: max(0, len(remembered) - KEPT_RESULTS)]:
            operation.task = None

    async def _result(self, live: Live, operation: Operation, wait_s: float) -> Any:
        if operation.task is None:
            raise _forgotten()
        if not operation.task.done():
            await asyncio.wait({operation.task}, timeout=wait_s)
        if not operation.task.done():
            return None
        if operation.task.cancelled():
            if live.ending is not None:
                await asyncio.wait({live.ending}, timeout=wait_s)
                await self._durable(live)
            raise Over(live.state, live.fault)
        return operation.task.result()

    async def _operate(self, live: Live, what: str, work: Callable[[Session, float], Awaitable[Any]]) -> Any:
        async with live.lock:
            self._ready(live)
            claim = await self._turn(self.permits, live.tenant, what, permits=1)
            try:
                self._ready(live)
                assert live.session is not None
                self._move(live, State.RUNNING, note=what)
                began = time.monotonic()
                try:
                    return await work(live.session, claim.waited_s * 1000)
                finally:
                    self.metrics.ran(what, time.monotonic() - began, claim.waited_s)
            except BoundaryError as error:
                self.limiters.broke(error)
                fault = fault_of(error)
                if fault.scored:
                    raise  # the policy's own doing: the caller finalizes with it, and it is judged
                if isinstance(error, SandboxLost) and live.state is State.RUNNING:
                    self._move(live, State.LOST, fault)
                self._begin_end(live, State.FAILED, fault)
                raise
            except (Refused, Over):
                raise
            except asyncio.CancelledError:
                raise
            except Exception as error:  # the boundary of an operation: classified and recorded
                log.error("session %s: %s ended by an error of our own", live.id, what, exc_info=error)
                self._begin_end(live, State.FAILED, self._bug(error))
                raise
            finally:
                self.permits.release(claim)
                if live.state is State.RUNNING and live.ending is None:
                    self._move(live, State.READY)

    def _ready(self, live: Live) -> None:
        self._alive(live)
        if live.state is not State.READY:
            raise Refused(
                409,
                "not_ready",
                f"Session {live.id} is {live.state}, not ready for an action.",
                fix="Nothing can be done in it any more.",
            )

    async def _turn(self, ration: Ration, tenant: str, what: str, **needs: float) -> Claim:
        """Wait for a share; give it back with `release`."""
        claim = ration.claim(tenant, **needs)
        ration.queue([claim])
        try:
            async with asyncio.timeout(PERMIT_DEADLINE_S):
                await claim.granted
        except TimeoutError as error:
            ration.release(claim)
            raise SandboxError(
                f"waiting for a turn of {what} since {PERMIT_DEADLINE_S:g} s: all are taken.",
                fix="Give the gateway more permits, or fewer sessions.",
                code="no_permit",
                phase="queue",
            ) from error
        except BaseException:
            ration.release(claim)
            raise
        return claim

    # --------------------------------------------------------------------------------------------------- ends

    async def finalize(
        self, live: Live, termination: Termination, fault: Fault | None, *, wait_s: float
    ) -> Verdict | None:
        """The verdict; None: not yet, ask again. Asked again, the same one."""
        if live.verdict is None or not live.ended:
            if live.ending is None and live.finalizing is None:
                if live.session is None:
                    raise Refused(
                        409,
                        "not_ready",
                        f"Session {live.id} is {live.state}: there is nothing to judge.",
                        fix="Wait until it is ready, or DELETE it.",
                        retryable=True,
                    )
                live.finalizing = asyncio.create_task(self._finalize(live, termination, fault))
                live.finalizing.add_done_callback(_retrieved)
            waiting = live.finalizing if live.ending is None else live.ending
            assert waiting is not None
            await asyncio.wait({waiting}, timeout=wait_s)
        if live.ending is not None:
            await asyncio.wait({live.ending}, timeout=wait_s)
            if live.ending.done():
                live.ending.result()
        if not live.ended or (live.ending is not None and not live.ending.done()):
            return None
        try:
            await self._durable(live, wait_s)
        except StoreError:
            if self._written().trouble is not None:
                raise
            return None
        assert live.verdict is not None
        return live.verdict

    def signed(self, live: Live, verdict: Verdict, token: str) -> Verdict:
        """The verdict as the holder of this token can check it. Raises `Refused`: its reward is unsigned."""
        key = wire.signing_key(token)
        made_here = live.end_mark is not None
        nobodys = (
            not verdict.signature and verdict.reward is None
        )  # ended by a restart, when no key was there
        if grading.verify_signature(verdict, key):
            return verdict
        if made_here or nobodys:
            return grading.sign(verdict, key)
        if verdict.signature:  # of a token that was replaced: who still has that can check it
            return verdict
        raise _damaged(live.id, "it has a reward that nobody signed")

    async def _finalize(self, live: Live, termination: Termination, fault: Fault | None) -> None:
        async with live.lock:
            if live.ended or live.ending is not None:
                return
            assert live.session is not None
            assert live.state is State.READY, f"session {live.id} is {live.state} and nobody holds it"
            self._move(live, State.FINALIZING, fault, str(termination))
            judged = (  # as the session decides it: a fault that is scored is judged however it ended
                termination not in (Termination.CANCELLED, Termination.FAULT)
                if fault is None
                else fault.scored
            )
            claim: Claim | None = None
            try:
                if judged:
                    claim = await self._turn(self.verification, live.tenant, "verification", verifications=1)
                longest_s = grading.longest_s(live.task, time_multiplier=time_multiplier(self.backend))
                async with asyncio.timeout(longest_s + FINALIZE_GRACE_S):
                    verdict = await live.session.finalize(termination=termination, fault=fault, keep=True)
            except TimeoutError:
                self._begin_end(live, State.FAILED, _silent(live))
                return
            except BoundaryError as error:
                self._begin_end(live, State.FAILED, fault_of(error))
                return
            except asyncio.CancelledError:
                raise
            except Exception as error:  # the boundary of a verdict: classified and recorded
                log.error("session %s could not be judged by an error of our own", live.id, exc_info=error)
                self._begin_end(live, State.FAILED, self._bug(error))
                return
            finally:
                if claim is not None:
                    self.verification.release(claim)
            if verdict.reward is not None:
                state = State.DONE
            else:
                state = State.CANCELLED if termination is Termination.CANCELLED else State.FAILED
            ending = self._begin_end(live, state, verdict.fault, verdict)
        await asyncio.shield(ending)

    async def cancel(self, live: Live) -> None:
        """End it now, without a reward. Idempotent; its slot is given back when the sandbox is gone."""
        if not live.ended:
            await self._end(
                live,
                State.CANCELLED,
                self._own("cancelled", "The caller deleted the session.", retryable=True),
            )
        await self._durable(live)

    async def _end(self, live: Live, state: State, fault: Fault) -> None:
        await asyncio.shield(self._begin_end(live, state, fault))

    def _begin_end(
        self, live: Live, state: State, fault: Fault | None, verdict: Verdict | None = None
    ) -> asyncio.Task[None]:
        """Start the one ending of a session; a second one has no effect. Returns the one."""
        if live.ending is None:
            assert not live.ended, "an ended session from the store does not end again"
            live.ending = asyncio.create_task(self._ending(live, state, fault, verdict))
            live.ending.add_done_callback(_retrieved)
            self._background.add(live.ending)
            live.ending.add_done_callback(self._background.discard)
        return live.ending

    async def _ending(self, live: Live, state: State, fault: Fault | None, verdict: Verdict | None) -> None:
        if verdict is None:
            assert fault is not None
            await self._interrupt(live)
            verdict = await self._unscored(live, state, fault)
            if verdict.reward is not None:  # it was judged already when the deadline came
                state = State.DONE
        live.verdict = verdict
        self._move(live, state, verdict.fault)
        live.end_mark = self._written().mark
        self.metrics.ended(state, verdict.fault, live.task.id)
        self._aside(self._close(live))

    async def _interrupt(self, live: Live) -> None:
        """Cancel whatever is done for the session and wait until it stopped."""
        running = [live.driver, live.finalizing, *(o.task for o in live.operations.values())]
        stopping = {task for task in running if task is not None and not task.done()}
        for task in stopping:
            task.cancel()
        if stopping:
            _, stuck = await asyncio.wait(stopping, timeout=INTERRUPT_DEADLINE_S)
            if stuck:
                log.error("session %s: %d operations did not stop when cancelled", live.id, len(stuck))

    async def _unscored(self, live: Live, state: State, fault: Fault) -> Verdict:
        """The verdict of an end without judgement, with whatever evidence there is."""
        if live.session is not None:
            termination = Termination.CANCELLED if state is State.CANCELLED else Termination.FAULT
            unscored = fault if not fault.scored else self._own(fault.code, fault.message, retryable=False)
            try:
                async with asyncio.timeout(INTERRUPT_DEADLINE_S):
                    return await live.session.finalize(termination=termination, fault=unscored)
            except (BoundaryError, TimeoutError) as error:
                log.error("session %s: no evidence of its end: %s", live.id, error)
        bare = grading.unscored(fault, (), isolation=self.backend.isolation)
        return bare if live.signing_key is None else grading.sign(bare, live.signing_key)

    async def _is_a_successors(self, live: Live) -> bool:
        """Whether a newer gateway has taken over, and with it the sandbox: its log did not take the end."""
        if isinstance(self.backend, Adopting):
            with suppress(StoreError):
                await self._written().flushed(FENCE_S, mark=live.end_mark)
        return isinstance(self.backend, Adopting) and self._written().superseded

    async def _close(self, live: Live) -> None:
        """The sandbox goes, then its slot is free. The terminal record does not wait for it. A sandbox that
        is a newer gateway's by now is left alone."""
        if live.session is not None and not await self._is_a_successors(live):
            async with self.limiters.delete.slot(teaches=False) as waited_s:
                self.metrics.limited("delete", waited_s)
                began = time.monotonic()
                closing = asyncio.ensure_future(live.session.close())
                await asyncio.wait({closing}, timeout=CLOSE_DEADLINE_S)
                hangs = not closing.done()
                self.limiters.delete.number.learn(time.monotonic() - began, failed=hangs)
            # One that hangs does not hold up the others.
            try:
                async with asyncio.timeout(0):
                    await asyncio.shield(closing)
            except TimeoutError:
                self.leaked += 1
                log.error("session %s: its sandbox did not close within %g s", live.id, CLOSE_DEADLINE_S)
                await asyncio.gather(closing, return_exceptions=True)
                self.leaked -= 1
            except Exception as error:  # a backend that breaks its promise never to raise
                log.error("session %s: closing its sandbox failed", live.id, exc_info=error)
        if live.claim.granted_at is not None:
            held = time.monotonic() - live.claim.granted_at
            self._held_s = held if self._held_s is None else 0.9 * self._held_s + 0.1 * held
        self.slots.release(live.claim)
        live.operations = {
            key: Operation(o.digest, o.task if _failed(o.task) else None)
            for key, o in live.operations.items()
        }
        self._evict()

    def _evict(self) -> None:
        ended = [live for live in self._live.values() if live.ended and live.claim.released]
        for live in ended[: max(0, len(ended) - KEPT_ENDED)]:
            del self._live[live.id]
            self._by_key.pop((live.tenant, live.request.client_key), None)

    async def _reap(self) -> None:
        """End what has outlived its lease, its deadline or its patience in the queue."""
        while True:
            await asyncio.sleep(self.settings.reap_every_s)
            for live in list(self._live.values()):
                if live.ended or live.ending is not None:
                    continue
                why = self._overdue(live)
                if why is not None:
                    self._begin_end(live, State.EXPIRED, why)
            self._end_hopeless()
            self._look_for_room()
            if time.monotonic() - self._swept_at > SWEEP_EVERY_S:
                self._swept_at = time.monotonic()
                self._aside(self._sweep())
            if time.monotonic() - self._asked_at > FENCE_S and not self._superseded:
                self._asked_at = time.monotonic()
                self._aside(self._written().ask())
            old = time.monotonic() - GROUP_REMEMBERED_S
            self._gathered = {key: at for key, at in self._gathered.items() if at > old}
            self._gathering = {key: group for key, group in self._gathering.items() if group.present}

    def _aside(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _end_hopeless(self) -> None:
        """End what waits for more than there is by now (fewer slots since a restart, a smaller quota): nobody
        overtakes it, so it would hold up everybody."""
        for claim, why in self.slots.hopeless():
            live = next(one for one in self._live.values() if one.claim is claim)
            fault = Fault(
                owner="environment",
                code="never_fits",
                phase="queue",
                retryable=False,
                message=f"It can not be admitted any more: {why}.",
            )
            self._begin_end(live, State.FAILED, fault)

    def _look_for_room(self) -> None:
        """While the backend is short of room nobody new is admitted; who waits and who lives goes on."""
        short = self.backend.short_of() if isinstance(self.backend, Short) else None
        if short is not None and self.slots.paused is None:
            self.slots.pause(f"disk_pressure: {short}")
        elif short is None and (self.slots.paused or "").startswith("disk_pressure"):
            self.slots.resume()

    async def _sweep(self) -> None:
        try:
            await self.snapshots.sweep()
        except StoreError as error:
            log.error("expired snapshots are not removed, and will be later: %s", error)

    def _overdue(self, live: Live) -> Fault | None:
        deadline, now = live.request.deadline_at, self._steady()
        if deadline is not None and self._clock() >= deadline:
            return self._own("deadline", f"deadline_at passed while {live.state}.", retryable=False)
        if live.state is State.QUEUED and now >= live.queue_until:
            return Fault(
                owner="environment",
                code="queue_timeout",
                phase="queue",
                retryable=True,
                message=f"Not admitted within {live.request.queue_timeout_s:g} s: "
                + ("other members of its group are missing." if self._alone(live) else "no slot was free."),
            )
        if now >= live.lease_until and not live.asking:
            return self._own(
                "lease_expired",
                f"Nobody renewed the lease for {live.lease_ttl_s:g} s (state {live.state}).",
                retryable=True,
            )
        return None

    def _alone(self, live: Live) -> bool:
        return self.slots.position(live.claim) is None

    def _own(self, code: str, message: str, *, retryable: bool) -> Fault:
        return Fault(owner="gateway", code=code, phase="session", retryable=retryable, message=message)

    def _bug(self, error: Exception) -> Fault:
        return self._own("internal", f"{type(error).__name__}: {error}", retryable=True)


def _uploaded(folder: Path) -> list[Task]:
    """The packages that tenants gave, the oldest first. One that can not be read is left out: it is one
    tenant's, and the gateway is everybody's."""
    found = []
    for file in sorted(folder.glob("*/task.toml"), key=lambda file: file.stat().st_mtime):
        try:
            task = load_task(file.parent)
            image_of(task)
            found.append(task)
        except (TaskError, OSError) as error:
            log.error("an uploaded package is left out: %s", error)
    return found


def _reused(what: str, key: str) -> Refused:
    return Refused(
        409,
        f"{what}_id_reused",
        f"{what}_id {key} was used for something else.",
        fix="Use a new id for a new request, or send the same body.",
    )


def _forgotten() -> Refused:
    return Refused(
        410,
        "forgotten",
        "This was done long ago and its result is no longer kept.",
        fix="Use a new id.",
    )


def _damaged(session_id: str, why: str) -> Refused:
    return Refused(
        503,
        "verdict_damaged",
        f"The stored verdict of session {session_id} is not what was judged: {why}."[:1000],
        fix="Look at who writes into the store; run the attempt again.",
        owner="gateway",
        phase="finalize",
    )


def _silent(live: Live) -> Fault:
    return Fault(
        owner="environment",
        code="no_answer",
        phase="finalize",
        retryable=True,
        message=f"Session {live.id}: no verdict within its time.",
    )


def _ration_view(ration: Ration, tenant: str) -> wire.RationView:
    return wire.RationView(
        capacity=dict(ration.capacity),
        in_use=dict(ration.in_use),
        waiting={tenant: ration.waiting(tenant)},
        waiting_total=ration.waiting(),
        paused=ration.paused,
    )


async def _over(tasks: set[asyncio.Future[Any]], deadline_s: float, what: str) -> None:
    """Wait for them, but not for ever: what hangs is left to the lease that it was told, and said."""
    if not tasks:
        return
    _, hang = await asyncio.wait(tasks, timeout=deadline_s)
    for task in hang:
        task.cancel()
    if hang:
        log.error("waited %g s for %s: %d hang and are left behind", deadline_s, what, len(hang))


def _failed(task: asyncio.Task[Any] | None) -> bool:
    """Whether it ended by an error, which is small and may be asked for again."""
    return task is not None and task.done() and not task.cancelled() and task.exception() is not None


def _retrieved(task: asyncio.Task[Any]) -> None:
    """Its error is read by whoever asks for the result; nobody need ask."""
    if not task.cancelled():
        task.exception()
