"""A task of a tool environment, alive in this process: calls in, observations out, then a signed verdict.

There is no sandbox: verdicts say `isolation: none`. The ten pieces of evidence mean the same as in a sandbox,
and each is checked here or does not hold:

- E1 the class's file has the hash, and the seed makes the problem, that the task's revision was made from;
- E2 `reset` returned in time, and the instance has exactly the tools of the task;
- E3 from first to last call the same instance answered, in the same process;
- E4 every call ended: with a result, or with a timeout after which the tool was seen to stop;
- E5 no tool raised anything that is not the policy's;
- E6 after the last call the instance still has its tools, and what is judged was taken from the session's own
  record of calls (or from `state()`), not from the instance;
- E7 the judge is a fresh instance that holds only the problem and those calls; every observation came out the
  same again (with `state()`/`restore()`: only the problem and that state);
- E8 its grade is complete, and in the same process an instance that nothing was done to is not a success, and
  one to which the solution was done is one: class state spoiled by an attempt is caught here;
- E9 reward and components are finite numbers, made now;
- E10 an `Admission` of this revision: the solution passes, doing nothing fails.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from agentrl.errors import BoundaryError, ConfigError, FaultOwner, SandboxError, TaskError, nearest
from agentrl.types import (
    Action,
    Evidence,
    EvidenceKey,
    ExecStatus,
    Fault,
    JsonScalar,
    Observation,
    Task,
    Termination,
    Verdict,
)
from envs import grading, text
from envs.environment import (
    Grade,
    Problem,
    Refused,
    Step,
    ToolEnvironment,
    ToolLike,
    code_digest,
    settled,
    timeout_owner,
    tools_of,
    within,
)
from envs.evidence import Admission, fault_of
from envs.session import State, Transition
from envs.tools import ToolResult, failed

GRADER = "environment/1"
"""Changes whenever the meaning of these verdicts does; the class's own hash follows it."""
STOP_GRACE_S = 2.0
"""How long a cancelled tool may take to stop before it counts as stuck."""
RESET_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Performed:
    """One call that was made, and what the policy was shown."""

    step: Step
    text: str
    is_error: bool
    timed_out: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What a fresh instance said, and the evidence E7 to E9."""

    grade: Grade | None
    evidence: tuple[Evidence, ...]
    fault: Fault | None = None

    @property
    def success(self) -> bool:
        return self.fault is None and self.grade is not None and self.grade.reward >= 1.0


class TimedOut(Exception):
    """A tool took too long, and stopped when it was told to."""


def summary(error: BaseException) -> str:
    """The last frames of a traceback in one line: what an author needs, without values."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return " < ".join(f"{os.path.basename(f.filename)}:{f.lineno} {f.name}" for f in reversed(frames))


class Live:
    """One instance of an environment, every operation on it bounded and its failures classified."""

    def __init__(self, environment: ToolEnvironment, problem: Problem, *, limit_bytes: int, id: str) -> None:
        self.environment = environment
        self.problem = problem
        self.id = id
        self.instance: Any = None
        self.tools: Mapping[str, ToolLike] = {}
        self.begun = 0
        self.ended = 0
        self.losses = 0
        self._limit_bytes = limit_bytes

    def _broken(self, code: str, phase: str, error: BaseException) -> BoundaryError:
        self.losses += 1
        if isinstance(error, BoundaryError):
            return error
        return SandboxError(
            f"Environment {self.environment.name}: {phase} raised {type(error).__name__}: {error}"
            f" ({summary(error)}).",
            fix="Raise Refused for what is the policy's doing; mend the rest.",
            code=code,
            phase=phase,
            retryable=False,
            evidence={"where": summary(error), "error": type(error).__name__},
        )

    async def bounded(self, function: Any, *args: Any, limit_s: float, phase: str) -> Any:
        """Call into the author's code. Raises `TimedOut`, `Refused`, or a classified `BoundaryError`."""
        self.begun += 1
        try:
            value, in_time, ended = await within(settled(function, *args), limit_s, grace_s=STOP_GRACE_S)
        except Refused:
            self.ended += 1
            raise
        except Exception as error:  # the boundary to an author's code: classified
            self.ended += 1
            raise self._broken(f"{phase}_raised", phase, error) from error
        if not ended:
            self.losses += 1
            raise SandboxError(
                f"Environment {self.environment.name}: {phase} did not stop {STOP_GRACE_S:g} s after"
                f" its limit of {limit_s:g} s.",
                fix="Use async code that can be cancelled, or a limit inside the tool.",
                code=f"{phase}_stuck",
                phase=phase,
                retryable=False,
            )
        self.ended += 1
        if not in_time:
            raise TimedOut
        return value

    async def _prompt(self, function: Any, *args: Any, phase: str, limit_s: float = RESET_DEADLINE_S) -> Any:
        """Like `bounded`, for what the policy has no part in: late or refused is a fault too."""
        try:
            return await self.bounded(function, *args, limit_s=limit_s, phase=phase)
        except Refused as error:
            raise self._broken(f"{phase}_raised", phase, error) from error
        except TimedOut as error:
            self.losses += 1
            raise SandboxError(
                f"Environment {self.environment.name}: {phase} took more than {limit_s:g} s.",
                code=f"{phase}_timeout",
                phase=phase,
            ) from error

    async def open(self) -> None:
        """Make the instance and reset it."""
        self.instance = await self._prompt(self.environment.make, phase="make")
        await self._prompt(self.instance.reset, self.problem, phase="reset")
        self.tools = tools_of(self.instance)

    async def perform(self, step: Step, *, limit_s: float) -> ToolResult:
        """Do one call. The policy's own mistakes are error results."""
        chosen = self.tools.get(step.tool)
        if chosen is None:
            return failed(f"Unknown tool '{step.tool}'. {nearest(step.tool, self.tools)}")
        try:
            result: ToolResult = await self.bounded(
                chosen.call, self.instance, step.arguments, limit_s=limit_s, phase="tool"
            )
        except Refused as refusal:
            result = failed(str(refusal))
        shown, omitted = text.model_view(result.text.encode("utf-8", "backslashreplace"), self._limit_bytes)
        return ToolResult(
            text=shown,
            is_error=result.is_error,
            truncated_bytes=omitted + result.truncated_bytes,
            data=result.data,
            status=result.status,
        )

    async def grade(self, *, limit_s: float) -> Grade:
        grade = await self._prompt(self.instance.grade, phase="grade", limit_s=limit_s)
        if not isinstance(grade, Grade) or not grade.finite():
            raise TaskError(
                f"Environment {self.environment.name}: grade() returned {grade!r}.",
                fix="Return a Grade of finite numbers.",
                code="grade",
                phase="grade",
            )
        return grade

    async def state(self) -> str:
        """`state()` as canonical JSON."""
        value = await self._prompt(self.instance.state, phase="state")
        try:
            return json.dumps(value, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise self._broken("state_raised", "state", error) from error

    async def close(self) -> None:
        """`close()` of the instance, where it has one; it is asked once."""
        instance, self.instance = self.instance, None
        if callable(getattr(instance, "close", None)):
            await self._prompt(instance.close, phase="close")


class EnvironmentSession:
    """One attempt at a task of a tool environment; what `envs.session.Session` is for a sandbox."""

    def __init__(
        self, task: Task, live: Live, *, session_id: str, signing_key: bytes, admission: Admission | None
    ) -> None:
        self.task = task
        self.id = session_id
        self.tools: list[dict[str, Any]] = [each.schema() for each in live.tools.values()]
        self.submitted = False
        self.verdict: Verdict | None = None
        self.performed: list[Performed] = []
        self._live = live
        self._instance = live.instance
        self._pid = os.getpid()
        self._signing_key = signing_key
        self._admission = admission
        self._log = [Transition(at=time.time(), state=State.READY)]
        self._lock = asyncio.Lock()
        self._after: tuple[bool, str] | None = None

    @classmethod
    async def open(
        cls,
        task: Task,
        environment: ToolEnvironment,
        *,
        session_id: str,
        signing_key: bytes,
        admission: Admission | None,
    ) -> EnvironmentSession:
        """Make the problem of the task's seed again, an instance, and reset it.

        Raises:
            TaskError: the code or the problem is not what the task was made from.
            SandboxError: the environment's own code failed.
        """
        try:
            value, in_time, _ = await within(
                settled(environment.made, int(task.metadata["seed"]), task.split),
                RESET_DEADLINE_S,
                grace_s=STOP_GRACE_S,
            )
        except ConfigError as error:
            raise TaskError(str(error), code="environment", phase="open") from error
        if not in_time or value is None:
            raise TaskError(
                f"Task {task.id}: problem({task.metadata['seed']}) took more than {RESET_DEADLINE_S:g} s.",
                fix="Make problems quickly; do slow work in reset.",
                code="problem_timeout",
                phase="open",
            )
        problem, made = value
        if code_digest(environment.factory) != environment.code or made.revision != task.revision:
            raise TaskError(
                f"Task {task.id}: environment {environment.name} is not what the task was made from.",
                fix="Make the tasks again, in a new run.",
                code="task_changed",
                phase="open",
                evidence={"revision": task.revision, "made": made.revision},
            )
        live = Live(environment, problem, limit_bytes=task.limits.observation_bytes, id=session_id)
        await live.open()
        if tuple(live.tools) != task.tools:
            await live.close()
            raise TaskError(
                f"Task {task.id}: after reset the tools are {', '.join(live.tools)},"
                f" not {', '.join(task.tools)}.",
                code="tools_changed",
                phase="open",
            )
        return cls(task, live, session_id=session_id, signing_key=signing_key, admission=admission)

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
    def log(self) -> tuple[Transition, ...]:
        return tuple(self._log)

    @property
    def problem(self) -> Problem:
        return self._live.problem

    def _move(self, state: State, note: str = "") -> None:
        self._log.append(Transition(at=time.time(), state=state, note=note))

    # ---------------------------------------------------------------------------------------------- actions

    async def call(self, action: Action) -> Observation:
        """Perform one action. Raises `BoundaryError` (not the policy's): the session is then over."""
        async with self._lock:
            if self.state is not State.READY:
                raise SandboxError(
                    f"Session {self.id} is {self.state}, not ready for an action.",
                    owner="gateway",
                    code="not_ready",
                    retryable=False,
                )
            self._move(State.RUNNING, action.tool)
            started = time.perf_counter()
            try:
                result = await self._perform(action)
            except BoundaryError as error:
                self._move(State.FAILED, error.code)
                raise
            except BaseException:
                self._move(State.CANCELLED, "interrupted")
                raise
            self._move(State.READY)
            return Observation(
                action_id=action.id,
                text=result.text,
                is_error=result.is_error,
                status=result.status,
                wall_ms=(time.perf_counter() - started) * 1000,
                queue_ms=0.0,
                truncated_bytes=result.truncated_bytes,
                data=result.data,
            )

    async def _perform(self, action: Action) -> ToolResult:
        if action.error is not None:
            return failed(action.error)
        if self.submitted:
            return failed("The work has been submitted; nothing can be done any more.")
        step = Step(tool=action.tool, arguments=action.arguments)
        timed_out = False
        try:
            result = await self._live.perform(step, limit_s=self.task.limits.exec_timeout_s)
        except TimedOut:
            result = self._late(action.tool)
            timed_out = True
        self.performed.append(
            Performed(step=step, text=result.text, is_error=result.is_error, timed_out=timed_out)
        )
        self.submitted = bool(getattr(self._live.instance, "done", False))
        return result

    def _late(self, tool: str) -> ToolResult:
        """A tool that timed out and stopped: an observation when the work was the policy's choice."""
        limit_s = self.task.limits.exec_timeout_s
        owner: FaultOwner = timeout_owner(self._live.environment.factory, tool)
        if owner != "policy":
            raise SandboxError(
                f"Environment {self._live.environment.name}: {tool} took more than {limit_s:g} s.",
                fix="Make it faster, or mark it @tool(timeout_owner='policy') if the policy chose the work.",
                owner=owner,
                code="tool_timeout",
                phase="tool",
            )
        return ToolResult(
            text=f"[timed out after {limit_s:g} s, nothing was changed]",
            is_error=True,
            status=ExecStatus.TIMEOUT,
        )

    # ------------------------------------------------------------------------------------------- the verdict

    async def finalize(self, *, termination: Termination, fault: Fault | None) -> Verdict:
        """The verdict; asked again, the same one. A fault that is not scored is the verdict: no reward."""
        async with self._lock:
            if self.verdict is not None:
                return self.verdict
            if fault is None and termination in (Termination.CANCELLED, Termination.FAULT):
                fault = _fault("gateway", str(termination), f"The attempt ended as {termination}.")
            if fault is None and self.state is not State.READY:
                fault = _fault("gateway", "not_ready", f"Finalized while {self.state}, unreported.")
            self.verdict = grading.sign(await self._judge(fault), self._signing_key)
            if self.verdict.reward is not None:
                self._move(State.DONE)
            else:
                self._move(State.CANCELLED if termination is Termination.CANCELLED else State.FAILED)
            return self.verdict

    async def _judge(self, fault: Fault | None) -> Verdict:
        if fault is not None and not fault.scored:
            return self._verdict(None, self._seen(), fault)
        self._move(State.FINALIZING)
        judged = await self.judged()
        evidence = (*self._seen(), *judged.evidence, self._admitted())
        problem = judged.fault or _missing(evidence)
        return self._verdict(judged.grade if problem is None else None, evidence, problem or fault)

    def _verdict(self, grade: Grade | None, evidence: tuple[Evidence, ...], fault: Fault | None) -> Verdict:
        known = {each.key: each for each in evidence}
        return Verdict(
            reward=None if grade is None else float(grade.reward),
            components={} if grade is None else {k: float(v) for k, v in grade.components.items()},
            evidence=tuple(known.get(key, Evidence(key=key, holds=None)) for key in EvidenceKey),
            fault=fault,
            grader_revision=f"{GRADER}+{self._live.environment.code[:16]}",
            isolation="none",
        )

    async def judged(self) -> Judged:
        """A fresh instance's judgement of what was done here. Never raises a `BoundaryError`."""
        live = self._live
        try:
            still = live.instance is self._instance and tuple(tools_of(live.instance)) == self.task.tools
            by_state = callable(getattr(live.instance, "state", None))
            state = await live.state() if by_state else None
            record = [[p.step.tool, dict(p.step.arguments), p.text] for p in self.performed]
            taken = state if state is not None else json.dumps(record, sort_keys=True, default=str)
            digest = hashlib.sha256(taken.encode()).hexdigest()
            self._after = (still, digest)
            self._move(State.VERIFYING)
            started = time.monotonic()
            grade, differing = await self._fresh(state, self.performed)
            empty, _ = await self._fresh(None, ())
            gold = None
            if not by_state and self.problem.gold:
                gold, _ = await self._fresh(None, [_planned(step) for step in self.problem.gold])
        except BoundaryError as error:
            return Judged(grade=None, evidence=(), fault=fault_of(error))
        except Exception as error:  # what the policy sent may not be writable as JSON, and such
            return Judged(
                grade=None,
                evidence=(),
                fault=_fault("environment", "judge_failed", f"{error} ({summary(error)})"),
            )
        canaries = empty.reward < 1.0 and (gold is None or gold.reward >= 1.0)
        facts: dict[str, JsonScalar] = {f"grade_{k}": v for k, v in grade.facts.items()}
        evidence = (
            Evidence(
                key=EvidenceKey.E7_FRESH_VERIFIER,
                holds=differing is None,
                facts={
                    "by": "state" if by_state else "replay",
                    "calls": len(self.performed),
                    "judged": digest,
                    "first_difference": differing,
                },
            ),
            Evidence(
                key=EvidenceKey.E8_REPORT_COMPLETE,
                holds=canaries,
                facts={
                    "canary_empty": empty.reward,
                    "canary_gold": None if gold is None else gold.reward,
                    **facts,
                },
            ),
            Evidence(
                key=EvidenceKey.E9_REWARD_FINITE,
                holds=grade.finite(),
                facts={"reward": float(grade.reward), "verify_s": round(time.monotonic() - started, 4)},
            ),
        )
        fault = None
        if differing is not None:
            fault = _fault(
                "environment", "not_deterministic", f"Replayed, call {differing} answers otherwise."
            )
        elif not canaries:
            fault = _fault(
                "environment", "canary_failed", "Doing nothing succeeds, or the solution does not."
            )
        return Judged(grade=grade, evidence=evidence, fault=fault)

    async def _fresh(self, state: str | None, calls: Sequence[Performed]) -> tuple[Grade, int | None]:
        """The grade of a new instance after these calls (or in this state); the first that differed."""
        live = Live(
            self._live.environment, self.problem, limit_bytes=self.task.limits.observation_bytes, id=self.id
        )
        differing: int | None = None
        try:
            await live.open()
            if state is not None:
                await live._prompt(live.instance.restore, json.loads(state), phase="restore")
            else:
                for number, call in enumerate(calls):
                    if call.timed_out:
                        continue
                    try:
                        result = await live.perform(call.step, limit_s=2 * self.task.limits.exec_timeout_s)
                        shown = (result.text, result.is_error)
                        same = call.text == _UNKNOWN or shown == (call.text, call.is_error)
                    except TimedOut:
                        same = False
                    differing = differing if same or differing is not None else number
            return await live.grade(limit_s=self.task.grader.timeout_s), differing
        finally:
            await live.close()

    # --------------------------------------------------------------------------------------------- evidence

    def _seen(self) -> tuple[Evidence, ...]:
        """E1 to E6 as far as they are known now."""
        live, environment = self._live, self._live.environment
        still, digest = self._after if self._after is not None else (None, None)
        calls: dict[str, JsonScalar] = {"calls": live.begun, "ended": live.ended}
        file = inspect.getsourcefile(environment.factory)
        return (
            Evidence(
                key=EvidenceKey.E1_START,
                holds=code_digest(environment.factory) == environment.code,
                facts={
                    "environment": environment.name,
                    "code": environment.code,
                    "file": os.path.basename(file or ""),
                    "revision": self.task.revision,
                    "isolation": "none",
                },
            ),
            Evidence(
                key=EvidenceKey.E2_PROBE_BEFORE,
                holds=tuple(t["function"]["name"] for t in self.tools) == self.task.tools,
                facts={"reset": True, "tools": ",".join(self.task.tools)},
            ),
            Evidence(
                key=EvidenceKey.E3_SAME_INSTANCE,
                holds=None if still is None else still and os.getpid() == self._pid,
                facts={"pid": self._pid},
            ),
            Evidence(key=EvidenceKey.E4_EXECS_FRAMED, holds=live.begun == live.ended, facts=calls),
            Evidence(
                key=EvidenceKey.E5_NO_FOREIGN_LOSS,
                holds=None if still is None else live.losses == 0,
                facts={"losses": live.losses},
            ),
            Evidence(key=EvidenceKey.E6_PROBE_AFTER, holds=still, facts={"taken": digest}),
        )

    def _admitted(self) -> Evidence:
        key, admission = EvidenceKey.E10_TASK_VALIDATED, self._admission
        if admission is None:
            return Evidence(key=key, holds=False, facts={"admission": None})
        matches = (admission.task_id, admission.revision, admission.image_digest) == (
            self.task.id,
            self.task.revision,
            self.task.sandbox.image,
        )
        return Evidence(
            key=key,
            holds=admission.valid and matches,
            facts={
                "revision": admission.revision,
                "matches": matches,
                "valid": admission.valid,
                "mode": admission.mode,
                "repeats": admission.repeats,
                "admitted_at": admission.admitted_at,
            },
        )

    async def close(self) -> None:
        """End the instance. Idempotent; without a verdict the session counts as cancelled."""
        if self.verdict is None and self.state not in (State.CANCELLED, State.FAILED):
            self._move(State.CANCELLED, "closed")
        await self._live.close()


_UNKNOWN = "\0"
"""Text of a planned call: whatever it shows is right."""


def _planned(step: Step) -> Performed:
    return Performed(step=step, text=_UNKNOWN, is_error=False, timed_out=False)


def _fault(owner: FaultOwner, code: str, message: str) -> Fault:
    return Fault(owner=owner, code=code, phase="verify", retryable=owner == "gateway", message=message)


def _missing(evidence: Sequence[Evidence]) -> Fault | None:
    """The fault of the first link that does not hold."""
    known = {each.key: each for each in evidence}
    for key in EvidenceKey:
        link = known.get(key)
        if link is not None and link.holds is True:
            continue
        if key is EvidenceKey.E10_TASK_VALIDATED:
            return _fault("task", "not_admitted", f"{key} does not hold: admit the task first.")
        return _fault("environment", "evidence_missing", f"{key} does not hold: no reward can be trusted.")
    return None


# -------------------------------------------------------------------------------------------------- admission


async def admit(
    task: Task, environment: ToolEnvironment, *, backend: str, repeats: int = 3, light: bool = False
) -> Admission:
    """Whether a task can be graded: its solution succeeds and doing nothing does not, every time.

    There is no exploit battery in a process: what an exploit would be differs per environment, and the
    canaries of every verdict (E8) catch spoiled class state. `backend` is noted; nothing runs on it.
    """
    repeats = 1 if light else repeats
    reasons: list[str] = []
    slowest = 0.0
    for number in range(repeats):
        for label, wanted in (("solution", True), ("empty", False)):
            began = time.monotonic()
            why = await _tried(task, environment, solution=wanted)
            slowest = max(slowest, time.monotonic() - began)
            if why is not None:
                reasons.append(f"{label}: run {number + 1}: {why}")
    return Admission(
        task_id=task.id,
        revision=task.revision,
        image_digest=task.sandbox.image,
        backend=backend,
        valid=not reasons,
        mode="light" if light else "full",
        repeats=repeats,
        reasons=tuple(reasons),
        attacks=(),
        runtime_s=round(slowest, 4),
        admitted_at=time.time(),
    )


async def _tried(task: Task, environment: ToolEnvironment, *, solution: bool) -> str | None:
    """None when the solution succeeds (or doing nothing does not); else why the task is not fit."""
    try:
        session = await EnvironmentSession.open(
            task, environment, session_id=f"admit-{task.id}", signing_key=b"admission", admission=None
        )
    except BoundaryError as error:
        return str(error)
    async with session:
        if solution and not session.problem.gold:
            return "the problem has no solution (Problem.gold)"
        for number, step in enumerate(session.problem.gold if solution else ()):
            try:
                seen = await session.call(
                    Action(id=f"t{number:04d}a000", tool=step.tool, arguments=dict(step.arguments))
                )
            except BoundaryError as error:
                return str(error)
            if seen.is_error:
                return f"{step.tool} answers: {seen.text[:200]}"
        judged = await session.judged()
    if judged.fault is not None:
        return judged.fault.message
    if judged.success is not solution:
        return f"reward {judged.grade.reward if judged.grade else None}"
    return None
