"""A task alive in a sandbox: actions in, observations out, and at the end a signed verdict.

    opened → provisioning → ready ⇄ running → finalizing → verifying → done | failed | cancelled | lost

The session collects the evidence E1 to E6 itself. What the policy does wrong comes back as an observation;
whatever is not the policy's raises a `BoundaryError`, which the caller hands to `finalize` as a fault. One
log of transitions.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import posixpath
import re
import time
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from agentrl.errors import BoundaryError, SandboxError, SandboxLost, TaskError, nearest
from agentrl.types import Action, Fault, Observation, Task, Termination, Verdict, from_json, storable, to_json
from envs import grading, tools
from envs.clock import Clock, mounts_of
from envs.evidence import CLOCK, Admission, Witness, fault_of, of_system, paced
from envs.sandbox.adoption import Outliving
from envs.sandbox.contract import (
    Backend,
    ExecRequest,
    ExecResult,
    FileChange,
    FilePart,
    Following,
    Health,
    Mount,
    time_multiplier,
)
from envs.sandbox.diff import DiffTooLarge
from envs.sandbox.images import checked_name, is_name, workspace
from envs.sandbox.oci import located, reference
from envs.sandbox.pressure import QUEUE_DEADLINE_S

CREATE_DEADLINE_S = 120.0
"""For making a sandbox; a backend keeps it, and does not count what it waits for a turn."""
PREPARE_DEADLINE_S = 3600.0
"""For pulling or building an image; a backend has shorter ones of its own."""
SUBMITTED = "submitted"
HISTORY_SEARCHED = "history_searched"
"""Flag of an attempt that looked in git for what is not checked out. It decides nothing: a task's history
holds no solution (see `admission`). How often a policy tries is worth knowing."""
_DIGGING = frozenset(
    {"reflog", "fsck", "rev-list", "cat-file", "verify-pack", "unpack-objects", "show-ref", "bundle"}
)
_LOOKING = frozenset({"log", "show", "shortlog", "branch", "diff", "checkout", "grep"})
_BEYOND = ("--all", "--reflog", "--remotes", "--walk-reflogs", "origin/", "FETCH_HEAD", "ORIG_HEAD")
_BEGUN, _DONE = "begun:", "done:"
"""Keys of what a sandbox notes for a process after this one."""


class State(StrEnum):
    PROVISIONING = "provisioning"
    """The image is prepared and the sandbox made."""
    READY = "ready"
    """Waiting for an action."""
    RUNNING = "running"
    """An action is being performed."""
    FINALIZING = "finalizing"
    """Processes are killed, health is probed, the diff is taken."""
    VERIFYING = "verifying"
    """A fresh sandbox judges the diff."""
    DONE = "done"
    """There is a verdict with a reward."""
    FAILED = "failed"
    """There is a verdict without a reward."""
    CANCELLED = "cancelled"
    """Stopped from outside, or closed without a verdict."""
    LOST = "lost"
    """The sandbox is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One line of the log."""

    at: float
    state: State
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a session begins from in place of the bare image: changes of its workdir that were taken from
    another session of the task, and the image that they are changes of."""

    image: str
    digest: str
    """`diff_hash` of the changes: what the evidence names."""
    changes: tuple[FileChange, ...]


class Session:
    """One attempt's environment. Made by `open`; one action at a time; `close` always, also after an
    error."""

    def __init__(
        self,
        task: Task,
        backend: Backend,
        *,
        session_id: str,
        signing_key: bytes | None,
        admission: Admission | None,
        image: str,
        witness: Witness,
        log: list[Transition],
    ) -> None:
        self.time_multiplier = witness.sandbox.info.time_multiplier
        """See `contract.Slower`."""
        self.task = replace(task, limits=paced(task.limits, self.time_multiplier))
        """With the limits that it has in this sandbox."""
        self.id = session_id
        self.tools: list[dict[str, Any]] = tools.tool_schemas(
            task.tools, persistent_shell=tools.persistent(task)
        )
        self.submitted = False
        self.verdict: Verdict | None = None
        self._backend = backend
        self.signing_key = signing_key
        """None: not known yet; then no verdict with a reward can be made, and others are not signed."""
        self._admission = admission
        self._image = image
        self._witness = witness
        self._log = log
        self._execs = 0
        self._taken: list[tuple[Action, Observation]] | None = []
        self.past_execs: dict[str, str | None] = {}
        """Commands that a process before this one sent: the digest of each request; None: unknown."""
        self._done: dict[str, str] = {}
        self._begun: set[str] = set()
        """What a process before this one noted of calls, by key: the observation; that it was begun."""
        self._steps = 0
        self._calling: str | None = None
        """Key of the call that is being performed; its commands are named by it."""
        self._lock = asyncio.Lock()
        self._flags: dict[str, None] = {}

    @classmethod
    async def open(
        cls,
        task: Task,
        backend: Backend,
        *,
        session_id: str,
        signing_key: bytes | None,
        admission: Admission | None,
        mounts: tuple[Mount, ...] = (),
        origin: Origin | None = None,
    ) -> Session:
        """Prepare the image, create the sandbox, probe it. `mounts` are read-only folders beside the image
        (an agent's own packages); with an `origin` the workdir is as that says, and the diff that is judged
        is still the whole one, against the image. Raises `BoundaryError`; nothing is left behind then."""
        log = [Transition(at=time.time(), state=State.PROVISIONING)]
        clock = Clock.of(task)
        image = await prepare(task, backend)
        if origin is not None and origin.image != image:
            raise SandboxError(
                f"Task {task.id} has another image than when the snapshot was taken.",
                fix="Begin from the image, and take a new snapshot.",
                owner="gateway",
                code="snapshot_other_image",
                phase="prepare",
                retryable=False,
                evidence={"image": image, "snapshot_image": origin.image},
            )
        longer = time_multiplier(backend)
        try:
            async with asyncio.timeout(longer * (CREATE_DEADLINE_S + QUEUE_DEADLINE_S) + 10.0):
                sandbox = await backend.create(
                    task.sandbox,
                    image=image,
                    session=session_id,
                    mounts=(*mounts, *mounts_of(clock)),
                    apply=() if origin is None else origin.changes,
                    deadline_s=longer * CREATE_DEADLINE_S,
                )
        except TimeoutError as error:
            raise SandboxError(
                f"Session {session_id}: no sandbox within {longer * CREATE_DEADLINE_S:g} s.",
                code="no_answer",
                phase="create",
            ) from error
        except OSError as error:
            if origin is None:
                raise of_system(error, "create") from error
            raise SandboxError(
                f"Session {session_id}: the snapshot can not be laid in: {error.strerror or error}.",
                fix="Sparse and hard-linked files are whole ones in a snapshot: they may not fit the disk.",
                owner="gateway",
                code="snapshot_not_restored",
                phase="start",
                retryable=False,
            ) from error
        witness = Witness(sandbox, image=image, spec=task.sandbox, session=session_id, clock=clock)
        try:
            await witness.probe("health")
            if origin is not None:
                await witness.began_from(origin.digest)
            await witness.start_clock()
        except BaseException:
            await sandbox.close()
            raise
        witness.hand_out()
        log.append(Transition(at=time.time(), state=State.READY))
        session = cls(
            task,
            backend,
            session_id=session_id,
            signing_key=signing_key,
            admission=admission,
            image=image,
            witness=witness,
            log=log,
        )
        if origin is not None:  # what was done before it is not known here
            session._taken = None
        return session

    @classmethod
    async def resume(
        cls,
        task: Task,
        backend: Backend,
        sandbox: Outliving,
        *,
        session_id: str,
        admission: Admission | None,
    ) -> Session | None:
        """A session whose process is no more, from its sandbox; None when that was never handed out. The
        signing key comes later (`signing_key`). Raises `BoundaryError`."""
        memory = await sandbox.recall()
        image = await prepare(task, backend)
        witness = Witness.resumed(
            sandbox,
            memory,
            image=image,
            spec=task.sandbox,
            session=session_id,
            clock=Clock.of(task, noted=memory.notes.get(CLOCK)),
        )
        if witness is None:
            return None
        await witness.probe("resume")
        session = cls(
            task,
            backend,
            session_id=session_id,
            signing_key=None,
            admission=admission,
            image=image,
            witness=witness,
            log=[Transition(at=time.time(), state=State.READY, note="resumed")],
        )
        session._taken = None
        session.submitted = SUBMITTED in memory.notes
        session._done = {
            key.removeprefix(_DONE): value for key, value in memory.notes.items() if key.startswith(_DONE)
        }
        session._begun = {key.removeprefix(_BEGUN) for key in memory.notes if key.startswith(_BEGUN)}
        session.past_execs = {exec_id: memory.said.get(exec_id) for exec_id in memory.execs}
        return session

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def state(self) -> State:
        return self._log[-1].state

    @property
    def image(self) -> str:
        """Digest of the image that the workdir is compared with."""
        return self._image

    @property
    def warm(self) -> bool:
        """Its sandbox was started before it was asked for."""
        return self._witness.sandbox.info.warm

    @property
    def log(self) -> tuple[Transition, ...]:
        return tuple(self._log)

    def _move(self, state: State, note: str = "") -> None:
        self._log.append(Transition(at=time.time(), state=state, note=note))

    # ---------------------------------------------------------------------------------------------- actions

    async def call(self, action: Action, *, key: str | None = None) -> Observation:
        """Perform one action. Raises `BoundaryError` for anything that is not the policy's; the session is
        then over.

        With a `key`, a sandbox that can outlive this process remembers the call: asked again under the same
        key in a process after this one, it gives the same observation and does nothing twice.
        """
        async with self._lock:
            if key is not None:
                key = _call_key(key, action)
                if key in self._done:
                    return replace(from_json(Observation, self._done[key]), action_id=action.id)
                if key in self._begun:
                    raise SandboxError(
                        f"Session {self.id}: how far '{action.tool}' came before the restart is unknown.",
                        fix="Run the whole attempt again.",
                        owner="gateway",
                        code="lost_on_restart",
                        phase=action.tool,
                    )
                if action.tool not in tools.REPEATABLE:
                    self._note(_BEGUN + key, "")
            if self.state is not State.READY:
                raise SandboxError(
                    f"Session {self.id} is {self.state}, not ready for an action.",
                    owner="gateway",
                    code="not_ready",
                    retryable=False,
                )
            self._move(State.RUNNING, action.tool)
            started = time.perf_counter()
            self._calling, self._steps = key, 0
            try:
                result = await self._perform(action)
            except SandboxLost as error:
                self._move(State.LOST, error.code)
                raise
            except BoundaryError as error:
                self._move(State.FAILED, error.code)
                raise
            except BaseException:
                self._move(State.CANCELLED, "interrupted")
                raise
            self._move(State.READY)
            elapsed = (time.perf_counter() - started) * 1000
            queued = result.queue_ms or 0.0
            seen = Observation(
                action_id=action.id,
                text=storable(result.text),  # it may hold a name that was made up
                is_error=result.is_error,
                status=result.status,
                exit_code=result.exit_code,
                wall_ms=result.wall_ms if result.wall_ms is not None else elapsed - queued,
                queue_ms=queued,
                truncated_bytes=result.truncated_bytes,
                data=result.data,
            )
            if key is not None:
                self._note(_DONE + key, to_json(seen).decode())
            if self._taken is not None:
                self._taken.append((action, seen))
            return seen

    def called_otherwise(self, key: str, action: Action) -> bool:
        """Whether a process before this one was asked for something else under this key."""
        now = _call_key(key, action)
        return any(
            past != now and past.rpartition(".")[0] == key for of in (self._done, self._begun) for past in of
        )

    def _note(self, key: str, value: str) -> None:
        if isinstance(self._witness.sandbox, Outliving):
            self._witness.sandbox.note(key, value)

    async def _perform(self, action: Action) -> tools.ToolResult:
        if action.error is not None:
            return tools.failed(action.error)
        if self.submitted:
            return tools.failed("The work has been submitted; nothing can be done any more.")
        if action.tool not in self.task.tools:
            return tools.failed(f"Unknown tool '{action.tool}'. {nearest(action.tool, self.task.tools)}")
        return await tools.get(action.tool).call(self, action.arguments)

    # ----------------------------------------------------------------------------------- the tools' workspace

    def next_exec_id(self) -> str:
        if self._calling is not None:
            self._steps += 1
            return f"{self.id}.c.{self._calling}-{self._steps}"
        self._execs += 1
        return f"{self.id}-{self._execs}"

    async def exec(self, request: ExecRequest) -> ExecResult:
        if _searches_history(request.command or " ".join(request.argv or ())):
            self._flags[HISTORY_SEARCHED] = None
        return await self._witness.exec(request)

    def dressed(self, request: ExecRequest) -> ExecRequest:
        """A request as the sandbox is asked it: see `Witness.dressed`."""
        return self._witness.dressed(request)

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        return await self._witness.read_file(self._at(path), max_bytes=max_bytes)

    async def read_part(self, path: str, *, offset: int, max_bytes: int) -> FilePart:
        """Part of a file: see `contract.InParts`."""
        return await self._witness.read_part(self._at(path), offset=offset, max_bytes=max_bytes)

    async def write_file(self, path: str, data: bytes, *, mode: int | None) -> None:
        await self._witness.write_file(self._at(path), data, mode=mode)

    async def diff(self) -> tuple[FileChange, ...]:
        """Changes of the workdir so far, taken from outside the sandbox."""
        return await self._witness.diff()

    async def probe(self) -> Health:
        """What the sandbox says of itself. Raises `SandboxLost`."""
        return await self._witness.probe("session")

    async def follow(
        self, exec_id: str, *, stream: Literal["stdout", "stderr"], offset: int, max_bytes: int
    ) -> tuple[bytes, bool]:
        """Output of a command while it runs: see `contract.Following`."""
        return await self._following().follow(exec_id, stream=stream, offset=offset, max_bytes=max_bytes)

    async def signal(self, exec_id: str, number: int, *, key: str | None = None) -> bool:
        """Signal a running command: see `contract.Following`."""
        return await self._following().signal(exec_id, number, key=key)

    def _following(self) -> Following:
        if isinstance(self._witness.sandbox, Following):
            return self._witness.sandbox
        raise SandboxError(
            f"The {self._backend.name} backend can not be asked about a command while it runs.",
            fix="Wait for its result.",
            owner="gateway",
            code="unsupported",
            phase="exec",
            retryable=False,
        )

    def _at(self, path: str) -> str:
        return posixpath.join(self.task.sandbox.workdir, path)

    async def visible_tests(self) -> tuple[str, ...]:
        named = self.task.metadata.get("visible_tests")
        return tuple(named) if named else visible_tests(self.task)

    def submit(self) -> None:
        self.submitted = True
        self._note(SUBMITTED, "")

    def lease(self, ttl_s: float) -> None:
        """Tell a sandbox that can outlive this process how long it may, from now."""
        if isinstance(self._witness.sandbox, Outliving):
            self._witness.sandbox.lease(ttl_s)

    # ------------------------------------------------------------------------------------------- the verdict

    async def finalize(self, *, termination: Termination, fault: Fault | None, keep: bool = False) -> Verdict:
        """The verdict; asked again, the same one.

        A fault that is not scored (or a cancelled attempt) is the verdict: no reward. Otherwise every process
        is killed, the sandbox probed and its diff judged elsewhere, also when the attempt ran out of time.

        The sandbox ends before another one is asked for, so that attempts which fill the backend never wait
        for each other's room. With `keep` it stays until `close` or `release`: a process after this one can
        then judge it again.
        """
        async with self._lock:
            if self.verdict is not None:
                return self.verdict
            if fault is None and termination in (Termination.CANCELLED, Termination.FAULT):
                fault = Fault(
                    owner="gateway",
                    code=str(termination),
                    phase="run",
                    retryable=True,
                    message=f"The attempt ended as {termination}; it is not evidence of anything.",
                )
            if fault is None and self.state is not State.READY:
                fault = Fault(
                    owner="gateway",
                    code="not_ready",
                    phase="finalize",
                    retryable=True,
                    message=f"Finalized while {self.state}, after an error that nobody reported.",
                )
            self.verdict = await self._judge(fault, keep)
            if self.verdict.reward is not None:
                self._move(State.DONE)
            elif termination is Termination.CANCELLED:
                self._move(State.CANCELLED)
            else:
                self._move(State.FAILED, self.verdict.fault.code if self.verdict.fault else "")
            return self.verdict

    async def _judge(self, fault: Fault | None, keep: bool) -> Verdict:
        if fault is not None and not fault.scored:
            return self._unscored(fault)
        self._move(State.FINALIZING)
        try:
            await self._witness.kill_all()
            await self._witness.probe("finalize")
            changes = await self._witness.diff()
        except DiffTooLarge as error:  # what it left can not be judged: it counts as nothing
            changes, fault = (), fault_of(error)
            self._flags[grading.WORK_UNJUDGED] = None
        except BoundaryError as error:
            return self._unscored(fault_of(error))
        seen = self._witness.evidence()
        assert self.signing_key is not None, "the caller gives the key before it asks for a verdict"
        self._move(State.VERIFYING)
        if not keep:
            await self.release()
        return await grading.grade(
            self.task,
            self._backend,
            image=self._image,
            changes=changes,
            session=self.id,
            seen=seen,
            admission=self._admission,
            signing_key=self.signing_key,
            fault=fault,
            steps=None if self._taken is None else tuple(self._taken),
            flags=tuple(self._flags),
        )

    def _unscored(self, fault: Fault) -> Verdict:
        verdict = grading.unscored(
            fault,
            self._witness.evidence(),
            isolation=self._backend.isolation,
            flags=tuple(self._flags),
        )
        return verdict if self.signing_key is None else grading.sign(verdict, self.signing_key)

    async def release(self) -> None:
        """End the sandbox, of which everything that a verdict needs is known. Idempotent."""
        await self._witness.sandbox.close()

    async def close(self) -> None:
        """End the sandbox. Idempotent; without a verdict the session counts as cancelled."""
        await self.release()
        if self.verdict is None and self.state not in (State.CANCELLED, State.LOST, State.FAILED):
            self._move(State.CANCELLED, "closed")


def _call_key(key: str, action: Action) -> str:
    """The caller's key of a call together with what it asks for."""
    asked = json.dumps([action.tool, action.arguments], sort_keys=True).encode()
    return f"{key}.{hashlib.sha256(asked).hexdigest()[:16]}"


def _searches_history(command: str) -> bool:
    """Whether a command has git look at what is not checked out."""
    for part in re.split(r"[\n;|&()`]", command):
        words = part.split()
        if "git" not in words:
            continue
        rest = words[words.index("git") + 1 :]
        if _DIGGING.intersection(rest):
            return True
        if _LOOKING.intersection(rest) and any(word.startswith(_BEYOND) for word in rest):
            return True
    return False


def image_of(task: Task) -> str:
    """What a backend is asked to prepare for a task: its `environment/` folder, or the image that it names.

    Raises `TaskError`, for files outside of the package too: whoever wrote it would choose what of this
    machine its sandboxes show. Whoever runs tasks names theirs elsewhere (`AGENTRL_DOCKER_BASE` and such).
    """
    image = located(task.sandbox.image, Path(task.path))
    if image.startswith("dir:"):
        image = str(Path(task.path) / "environment")
    found = reference(image)
    if found is None and is_name(image):
        return checked_name(image)
    package = os.path.realpath(task.path)
    place = os.path.realpath(image if found is None else found.path)
    if os.path.commonpath((package, place)) != package:
        raise TaskError(
            f"The image {task.sandbox.image!r:.200} of task {task.id} is files outside of its package.",
            fix="Put them into the package's environment/, or name an image of a registry.",
            code="bad_image",
            phase="prepare",
        )
    return image


async def prepare(task: Task, backend: Backend) -> str:
    """The digest of the task's image on this backend. Raises `BoundaryError`."""
    wanted = image_of(task)
    try:
        async with asyncio.timeout(PREPARE_DEADLINE_S):
            return await backend.prepare(wanted)
    except TimeoutError as error:
        raise SandboxError(
            f"The image of task {task.id} was not ready within {PREPARE_DEADLINE_S:g} s.",
            fix="Build or pull it by hand, and look at the backend's health.",
            code="no_answer",
            phase="prepare",
        ) from error
    except OSError as error:
        raise of_system(error, "prepare") from error


def visible_tests(task: Task) -> tuple[str, ...]:
    """`test_*.py` in the root and in `tests/` of the original workdir, sorted."""
    folder = workspace(Path(task.path) / "environment")
    found = (*folder.glob("test_*.py"), *folder.glob("tests/test_*.py"))
    return tuple(sorted(str(path.relative_to(folder)) for path in found))
