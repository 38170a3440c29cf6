"""A live sandbox to the evidence about it: everything that must be known before a reward may exist.

`Witness` stands between a session (or a grader) and its sandbox, forwards the operations and notes what it
saw: which instance answered, whether every command ended with a framed result, what the kernel counted. It
never judges the policy; it says what is known. Unknown is `None`, which is not true.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from agentrl.errors import BoundaryError, ExecUnknown, SandboxError, SandboxLost
from agentrl.types import (
    Evidence,
    EvidenceKey,
    ExecStatus,
    Fault,
    JsonScalar,
    Limits,
    SandboxSpec,
    from_json,
    to_json,
)
from envs.clock import Clock
from envs.sandbox.adoption import Memory, Outliving
from envs.sandbox.contract import (
    ExecRequest,
    ExecResult,
    FileChange,
    FilePart,
    Health,
    InParts,
    NotRun,
    Sandbox,
)
from envs.sandbox.diff import DiffTooLarge, diff_hash

ANSWER_GRACE_S = 120.0
"""How much later than its own time limit a command may answer (queue, kill, transport) before it is given
up."""
ADMISSION_FRESH_S = 30 * 86_400.0
"""A task is validated again after this."""
HANDED_OUT = "handed_out"
"""Key of the note that holds the first probe."""
CLOCK = "clock"
"""Key of the note that holds the offset of the task's clock, in seconds."""
ORIGIN = "origin"
"""Key of the note that holds the digest of the snapshot from which the sandbox began."""
CONTROL_DEADLINE_S = 60.0
"""Deadline of a probe, a kill of all processes, a file operation, a diff."""


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Admission:
    """Proof that a task is gradable here: its solution passes, doing nothing fails, known exploits earn
    nothing."""

    task_id: str
    revision: str
    image_digest: str
    backend: str
    valid: bool
    mode: str
    """`full`, or `light` for suites whose generator is known: no repeats, no exploit battery."""
    repeats: int
    reasons: tuple[str, ...] = ()
    """Why it is quarantined; empty when valid."""
    attacks: tuple[str, ...] = ()
    """Exploits that were tried and earned nothing."""
    runtime_s: float
    """Longest verification seen, for deadlines and packing."""
    runtimes_s: tuple[float, ...] = ()
    """How long each verification of the solution and of the empty attempt took, the shortest first."""
    needed_s: float = 0.0
    """What a verification needs on a machine with nothing else to do; 0 where it was not measured."""
    admitted_at: float

    def old(self, now: float) -> bool:
        """Whether it is so long ago that the task is to be validated again: what passed once may depend on a
        date."""
        return now - self.admitted_at > ADMISSION_FRESH_S


def paced(limits: Limits, multiplier: float) -> Limits:
    """A task's limits where everything may take so many times longer (see `contract.Slower`)."""
    return replace(
        limits,
        exec_timeout_s=multiplier * limits.exec_timeout_s,
        wall_s=multiplier * limits.wall_s,
    )


def fault_of(error: BoundaryError) -> Fault:
    """The record of a boundary error: its owner was decided where the evidence was."""
    return Fault(
        owner=error.owner,
        code=error.code,
        phase=error.phase,
        retryable=error.retryable,
        message=str(error),
        evidence=dict(error.evidence),
    )


def of_system(error: OSError, phase: str) -> SandboxError:
    """For an error of this machine's own while a sandbox was made: nothing in it ran yet."""
    return SandboxError(
        f"No sandbox could be made: {error.strerror or error}.",
        fix="Look at this machine's descriptors, disks and rights: `agentrl doctor`.",
        code="system",
        phase=phase,
        evidence={"errno": error.errno},
    )


class Witness:
    """One sandbox, pinned to the instance that answered first. Not shared between sessions."""

    def __init__(
        self, sandbox: Sandbox, *, image: str, spec: SandboxSpec, session: str, clock: Clock | None = None
    ) -> None:
        self.sandbox = sandbox
        self.clock = clock
        """Every command runs under it; None: under the machine's own."""
        self._image = image
        self._spec = spec
        self._session = session
        self._before: Health | None = None
        self._after: Health | None = None
        self._probes = 0
        self._strangers = 0
        self._stalls: tuple[tuple[float, int], ...] = ()
        """When the first and the last probe were answered, and what each said of `cpu_stalled_us`."""
        self._execs: set[str] = set()
        self._framed: set[str] = set()
        self._unverified_kills = 0
        self._killed_by_others = 0
        self._diff_taken = False
        self._origin: str | None = None
        """Digest of the snapshot that was laid over the image; None: the bare image."""

    @classmethod
    def resumed(
        cls,
        sandbox: Sandbox,
        memory: Memory,
        *,
        image: str,
        spec: SandboxSpec,
        session: str,
        clock: Clock | None = None,
    ) -> Witness | None:
        """The witness of a sandbox that was handed out by a process that is no more, from what the sandbox
        remembers; None when it was not handed out. What is not remembered stays unknown."""
        noted = memory.notes.get(HANDED_OUT)
        if noted is None:
            return None
        witness = cls(sandbox, image=image, spec=spec, session=session, clock=clock)
        witness._before = witness._after = from_json(Health, noted)
        witness._probes = 1
        witness._origin = memory.notes.get(ORIGIN)
        witness._strangers = int(witness._before.instance != sandbox.info.instance)
        for exec_id, past in memory.execs.items():
            witness._execs.add(exec_id)
            if past is None or past.status is ExecStatus.UNKNOWN:
                continue
            if past.kill_verified is False:
                witness._unverified_kills += 1
            elif past.status is ExecStatus.KILLED and past.reason != "output_limit":
                witness._killed_by_others += 1
            else:
                witness._framed.add(exec_id)
        return witness

    def hand_out(self) -> None:
        """Have a sandbox that can outlive this process remember how it was when it was handed out."""
        if isinstance(self.sandbox, Outliving) and self._before is not None:
            if self._origin is not None:  # first: whoever finds the other note finds this one
                self.sandbox.note(ORIGIN, self._origin)
            if self.clock is not None:
                self.sandbox.note(CLOCK, str(self.clock.offset_s))
            self.sandbox.note(HANDED_OUT, to_json(self._before).decode())

    async def _within(self, what: str, operation: Any, deadline_s: float = CONTROL_DEADLINE_S) -> Any:
        try:
            async with asyncio.timeout(deadline_s):
                return await operation
        except TimeoutError as error:
            raise SandboxError(
                f"Sandbox {self.sandbox.info.id}: {what} did not answer within {deadline_s:g} s.",
                fix="Look at the backend's health.",
                code="no_answer",
                phase=what,
            ) from error

    # ------------------------------------------------------------------------------------------- operations

    async def probe(self, phase: str) -> Health:
        """A health probe; raises `SandboxLost` when it is dead or another instance answered."""
        health: Health = await self._within("probe", self.sandbox.probe())
        self._probes += 1
        if health.cpu_stalled_us is not None:
            self._stalls = (*self._stalls[:1], (time.monotonic(), health.cpu_stalled_us))
        self._before, self._after = self._before or health, health
        if health.instance != self.sandbox.info.instance:
            self._strangers += 1
        if not health.alive or self._strangers:
            raise SandboxLost(
                f"Sandbox {self.sandbox.info.id} is "
                + ("another instance than at its start." if self._strangers else "not alive."),
                phase=phase,
                evidence={"expected": self.sandbox.info.instance, "instance": health.instance},
            )
        return health

    async def began_from(self, digest: str) -> None:
        """Require that the workdir, before anything was done in it, is what the snapshot of this digest
        holds. Raises `SandboxError`."""
        found = diff_hash(await self._within("diff", self.sandbox.diff()))
        if found != digest:
            raise SandboxError(
                f"Sandbox {self.sandbox.info.id} does not begin as the snapshot says.",
                fix="Take the snapshot again, with no process writing into the workdir.",
                owner="gateway",
                code="snapshot_not_restored",
                phase="start",
                retryable=False,
                evidence={"snapshot": digest, "found": found},
            )
        self._origin = digest

    async def start_clock(self) -> None:
        """Require that the task's clock, where it has one, stands inside. Raises `TaskError`."""
        if self.clock is not None:
            await self.clock.hold(self.exec, f"{self._session}-clock")

    def dressed(self, request: ExecRequest) -> ExecRequest:
        """A request as the sandbox is asked it: under the task's clock."""
        return request if self.clock is None else self.clock.dressed(request)

    async def exec(self, request: ExecRequest) -> ExecResult:
        """Run a command and require a framed answer. `ExecUnknown` when the outcome can not be known."""
        request = self.dressed(request)
        new = request.exec_id not in self._execs
        self._execs.add(request.exec_id)
        try:
            result: ExecResult = await self._within(
                "exec", self.sandbox.exec(request), request.timeout_s + ANSWER_GRACE_S
            )
        except NotRun:
            if new:
                self._execs.discard(request.exec_id)
            raise
        if result.status is ExecStatus.UNKNOWN or result.exec_id != request.exec_id:
            raise ExecUnknown(
                f"The outcome of command {request.exec_id} in sandbox {self.sandbox.info.id} is unknown.",
                phase="exec",
            )
        if result.kill_verified is False:
            self._unverified_kills += 1
            raise SandboxError(
                f"Sandbox {self.sandbox.info.id}: command {request.exec_id} survived its kill.",
                code="kill_unverified",
                phase="exec",
            )
        if result.status is ExecStatus.KILLED and result.reason != "output_limit":
            self._killed_by_others += 1
            raise ExecUnknown(
                f"Command {request.exec_id} in sandbox {self.sandbox.info.id} was killed ({result.reason}).",
                code="exec_killed",
                phase="exec",
            )
        self._framed.add(request.exec_id)
        return result

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        raw: bytes = await self._within("read_file", self.sandbox.read_file(path, max_bytes=max_bytes))
        return raw

    async def read_part(self, path: str, *, offset: int, max_bytes: int) -> FilePart:
        if not isinstance(self.sandbox, InParts):
            raise SandboxError(
                f"The {self.sandbox.info.backend} backend reads no file in parts.",
                fix="Read it whole, or look at a part of it with a command.",
                owner="gateway",
                code="unsupported",
                phase="read_file",
                retryable=False,
            )
        part: FilePart = await self._within(
            "read_file", self.sandbox.read_part(path, offset=offset, max_bytes=max_bytes)
        )
        return part

    async def write_file(self, path: str, data: bytes, *, mode: int | None) -> None:
        await self._within("write_file", self.sandbox.write_file(path, data, mode=mode))

    async def kill_all(self) -> int:
        count: int = await self._within("kill_all", self.sandbox.kill_all())
        return count

    async def diff(self) -> tuple[FileChange, ...]:
        """Changes of the workdir, taken from outside. Raises `DiffTooLarge`, which is known of it then, and
        `SandboxError` for what this machine refuses."""
        try:
            changes: tuple[FileChange, ...] = await self._within("diff", self.sandbox.diff())
        except DiffTooLarge:
            self._diff_taken = True
            raise
        except OSError as error:
            raise SandboxError(
                f"Sandbox {self.sandbox.info.id}: its diff could not be taken: {error.strerror or error}.",
                fix="Look at this machine's descriptors, disks and rights: `agentrl doctor`.",
                code="system",
                phase="diff",
                evidence={"errno": error.errno},
            ) from error
        self._diff_taken = True
        return changes

    # --------------------------------------------------------------------------------------------- evidence

    def cpu_pressure(self) -> float | None:
        """Share of the time between the first and the last probe in which something waited for a CPU; None
        when the kernel does not tell."""
        if len(self._stalls) < 2:
            return None
        (begun, before), (now, after) = self._stalls
        return min(1.0, max(0, after - before) / 1e6 / max(now - begun, 1e-3))

    def oom_kills(self) -> int | None:
        """Kills for memory between the first and the last probe; None when the kernel does not tell."""
        first, last = self._before, self._after
        if first is None or last is None or first.oom_kills is None or last.oom_kills is None:
            return None
        return last.oom_kills - first.oom_kills

    def _link(self, key: EvidenceKey, holds: bool | None, **facts: JsonScalar) -> Evidence:
        return Evidence(key=key, holds=holds, facts=facts)

    def evidence(self) -> tuple[Evidence, ...]:
        """E1 to E6 as far as they are known now."""
        info = self.sandbox.info
        unlimited = "memory" not in info.limits_enforced
        counted = self.oom_kills() is not None or unlimited
        origin: dict[str, JsonScalar] = {} if self._origin is None else {"snapshot": self._origin}
        if info.warm:
            origin["warm"] = True
        if info.time_multiplier != 1:
            origin["time_multiplier"] = info.time_multiplier
        if self.clock is not None:
            origin["clock"] = self.clock.starts.isoformat()
        return (
            self._link(
                EvidenceKey.E1_START,
                info.image_digest == self._image and info.spec == self._spec,
                session=self._session,
                sandbox=info.id,
                backend=info.backend,
                isolation=info.isolation,
                image=info.image_digest,
                expected_image=self._image,
                limits=",".join(info.limits_enforced),
                **origin,
            ),
            self._link(
                EvidenceKey.E2_PROBE_BEFORE,
                None if self._before is None else self._before.alive,
                processes=None if self._before is None else self._before.processes,
            ),
            self._link(
                EvidenceKey.E3_SAME_INSTANCE,
                None if self._probes < 2 else self._strangers == 0,
                instance=info.instance,
                probes=self._probes,
            ),
            self._link(
                EvidenceKey.E4_EXECS_FRAMED,
                self._framed == self._execs and not self._unverified_kills,
                execs=len(self._execs),
                framed=len(self._framed),
            ),
            self._link(
                EvidenceKey.E5_NO_FOREIGN_LOSS,
                None
                if self._probes < 2 or not counted
                else self._killed_by_others == 0 and self._after is not None and self._after.alive,
                oom_kills=self.oom_kills(),
                memory_limit_enforced=not unlimited,
                disk_free_bytes=self._after.disk_free_bytes if self._after else None,
            ),
            self._link(
                EvidenceKey.E6_PROBE_AFTER,
                None if not self._diff_taken else self._after is not None and self._after.alive,
                diff_taken=self._diff_taken,
            ),
        )
