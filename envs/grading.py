"""A workspace diff to a signed verdict: graded in a fresh sandbox that the policy never touched.

The verifier holds the original image plus the diff, with protected paths as they were, and the package's
`tests/`, which exist nowhere else. Tests are judged by name; a missing one is not passed. Whatever is not the
policy's (a lost sandbox, an out-of-memory kill of the verifier, starvation, no report) is tried once more and
then leaves no reward. What is the policy's (broken code, an endless loop, `os._exit`) is scored. Nothing is
read from stdout.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import hmac
import json
import logging
import math
import posixpath
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from weakref import WeakKeyDictionary

from agentrl.errors import BoundaryError, SandboxError, TaskError
from agentrl.types import (
    Evidence,
    EvidenceKey,
    ExecStatus,
    Fault,
    GraderUse,
    JsonScalar,
    Task,
    TestOutcome,
    Verdict,
    step_number,
    to_json,
)
from envs.clock import Clock, mounts_of
from envs.evidence import CONTROL_DEADLINE_S, Admission, Witness, fault_of, of_system
from envs.graders import registry as graders
from envs.graders.contract import Attempt, Graded, Grader, Steps, TestsSeen
from envs.report import PROGRAM_HASH, TestReport, TestRun
from envs.sandbox.contract import (
    Backend,
    ExecRequest,
    ExecResult,
    FileChange,
    Isolation,
    Mount,
    time_multiplier,
)
from envs.sandbox.diff import DiffTooLarge, diff_hash
from envs.sandbox.images import workspace
from envs.sandbox.pressure import QUEUE_DEADLINE_S, Pressure
from envs.tasks import package

GRADER_REVISION = f"2+{PROGRAM_HASH[:16]}"
"""Changes whenever the meaning of a verdict does."""
TESTS_TARGET = "/tests"
LOGS_TARGET = "/logs/verifier"
VERIFY_ATTEMPTS = 2
CREATE_DEADLINE_S = 120.0
STARVED_SHARE = 0.25
"""A timed-out test that waited for a CPU for more than this share of its deadline was starved …"""
PRESSURE_SHARE = 0.5
"""… and so was one during which something waited for a CPU for more than this share of the time (PSI) …"""
FED_SHARE = 0.5
"""… unless it ran for this share of it all the same."""
SLOWEST = 4.0
"""A verifier that was starved gets as much more time as the pressure on the CPUs says, up to so many times
its own."""
AT_ONCE = 1 << 20
"""Verifiers at once, beyond what backends and gateways limit: any number."""
STARVED = "verifier_contention"
REWARD_FILE_BYTES = 64 * 1024
TEST_FILE_BYTES = 16 * 1024 * 1024
WORK_UNJUDGED = "work_unjudged"
"""Flag of a verdict on the image alone: what was done in the attempt can not be judged, by its own fault."""
log = logging.getLogger(__name__)

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Why a diff can not be laid over a fresh image: it takes more than the policy had."""


def sign(verdict: Verdict, key: bytes) -> Verdict:
    """The verdict with its HMAC-SHA256."""
    return replace(verdict, signature=_signature(verdict, key))


def verify_signature(verdict: Verdict, key: bytes) -> bool:
    """Whether the verdict is exactly what the holder of `key` signed."""
    return hmac.compare_digest(verdict.signature.encode(), _signature(verdict, key).encode())


def _signature(verdict: Verdict, key: bytes) -> str:
    return hmac.new(key, to_json(replace(verdict, signature="")), hashlib.sha256).hexdigest()


# -------------------------------------------------------------------------------------------------- the diff


def _is_cache(path: str) -> bool:
    return "__pycache__" in path.split("/") or path.endswith((".pyc", ".pyo"))


def guarded(task: Task) -> tuple[str, ...]:
    """The task's protected paths, and those at which an attempt would shadow what is in them: a module by the
    name of one in a protected folder of the import path, in a folder that comes before it. What the workspace
    itself brings at such a path stays the attempt's."""
    protected = tuple(posixpath.normpath(path) for path in task.grader.protected_paths)
    root = workspace(Path(task.path) / "environment")
    places = [
        posixpath.relpath(place, task.sandbox.workdir)
        for place in task.sandbox.env.get("PYTHONPATH", "").split(":")
        if place.startswith("/")
    ]
    found = list(protected)
    for number, place in enumerate(places):
        if place not in protected or not (root / place).is_dir():
            continue
        inside = [p for p in (root / place).iterdir() if p.suffix in ("", ".py")]
        names = {p.stem for p in inside if not p.stem.startswith("__")}
        before = [earlier for earlier in places[:number] if not earlier.startswith("..")]
        shadows = (
            posixpath.normpath(f"{earlier}/{name}{end}")
            for earlier in before
            for name in sorted(names)
            for end in ("", ".py", ".so", *EXTENSION_SUFFIXES)
        )
        found += [path for path in shadows if not (root / path).exists()]
    return tuple(dict.fromkeys(found))


def gradable(
    changes: tuple[FileChange, ...], protected: tuple[str, ...]
) -> tuple[tuple[FileChange, ...], int]:
    """The diff without protected paths and bytecode caches, and how many protected changes were undone.

    A protected path is undone with everything below it; a parent that was deleted or became something other
    than a folder is undone as a whole. Raises `SandboxError` on a path that leaves the workdir.
    """
    kept, undone = [], 0
    guarded = tuple(posixpath.normpath(p) for p in protected)
    for change in changes:
        path = posixpath.normpath(change.path)
        if path.startswith(("/", "../")) or path == "..":
            raise SandboxError(
                f"The diff names {change.path}, outside the workdir.", code="bad_diff", phase="diff"
            )
        below = any(path == p or path.startswith(p + "/") for p in guarded)
        above = change.kind != "dir" and any(p.startswith(path + "/") for p in guarded)
        if below or above:
            undone += 1
        elif not _is_cache(path):
            kept.append(change)
    blocked = {c.path for c in changes if c.kind in ("symlink", "file")} - {c.path for c in kept}
    return tuple(c for c in kept if not any(c.path.startswith(b + "/") for b in blocked)), undone


# ---------------------------------------------------------------------------------------------- verification


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What judging took. `clock_s - queued_s` is what it would have taken on a machine with nothing else to
    do, as far as the waiting for a CPU is known: it is of tests, not of scripts."""

    clock_s: float
    cpu_s: float
    """Of the verifier's commands and of what they waited for."""
    queued_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What one run of the verifier proved."""

    passed: bool
    components: dict[str, float]
    reward: float
    tests: tuple[TestOutcome, ...]
    evidence: tuple[Evidence, ...]
    flags: tuple[str, ...]
    fault: Fault | None = None

    @property
    def cost(self) -> Cost:
        """What E9 says that the verifier took."""
        facts = next(link.facts for link in self.evidence if link.key is EvidenceKey.E9_REWARD_FINITE)
        return Cost(**{name: float(facts[name] or 0) for name in ("clock_s", "cpu_s", "queued_s")})


def longest_s(task: Task, *, time_multiplier: float = 1.0) -> float:
    """The longest that the commands of a verdict may take, all of them again after they were starved, and all
    of that for the image without the work."""
    return 2 * (1 + SLOWEST) * time_multiplier * task.grader.timeout_s


async def grade(
    task: Task,
    backend: Backend,
    *,
    image: str,
    changes: tuple[FileChange, ...],
    session: str,
    seen: tuple[Evidence, ...],
    admission: Admission | None,
    signing_key: bytes,
    fault: Fault | None = None,
    steps: Steps | None = None,
    flags: tuple[str, ...] = (),
) -> Verdict:
    """Judge a diff. `seen` is the evidence about the agent's sandbox (E1 to E6); `fault` one that is scored;
    `steps` what was done, for graders of the process (None: not all of it is known); `flags` what the attempt
    is marked with, whatever it earns.

    Never raises a `BoundaryError`: what fails is recorded as the verdict's fault.
    """
    admitted = _admitted(task, image, admission)
    try:
        kept, undone = gradable(changes, guarded(task))
        result, broke = await _judged(
            task,
            backend,
            image=image,
            changes=kept,
            session=session,
            attempted=Attempted(steps=steps),
            valid=admitted.holds is True,
        )
    except BoundaryError as error:
        bare = unscored(fault_of(error), (*seen, admitted), isolation=backend.isolation, flags=flags)
        return sign(bare, signing_key)
    evidence = (*seen, *result.evidence, admitted)
    flags = (*result.flags, *(("protected_paths_restored",) if undone else ()), *flags)
    problem = result.fault or _missing(evidence)
    fault = broke or fault
    verdict = Verdict(
        reward=result.reward if problem is None else None,
        components=result.components if problem is None else {},
        evidence=_complete(evidence),
        fault=problem or fault,
        grader_revision=GRADER_REVISION,
        isolation=backend.isolation,
        tests=result.tests,
        flags=flags,
    )
    return sign(verdict, signing_key)


def unscored(
    fault: Fault, evidence: tuple[Evidence, ...], *, isolation: Isolation, flags: tuple[str, ...] = ()
) -> Verdict:
    """A verdict without reward, not yet signed: what is not known is said to be unknown."""
    return Verdict(
        reward=None,
        evidence=_complete(evidence),
        fault=fault,
        grader_revision=GRADER_REVISION,
        isolation=isolation,
        flags=flags,
    )


def _complete(evidence: tuple[Evidence, ...]) -> tuple[Evidence, ...]:
    known = {e.key: e for e in evidence}
    return tuple(known.get(key, Evidence(key=key, holds=None)) for key in EvidenceKey)


def _missing(evidence: tuple[Evidence, ...]) -> Fault | None:
    """The fault of the first link that does not hold."""
    for link in _complete(evidence):
        if link.holds is not True:
            task_own = link.key is EvidenceKey.E10_TASK_VALIDATED
            return Fault(
                owner="task" if task_own else "environment",
                code="not_admitted" if task_own else "evidence_missing",
                phase="verify",
                retryable=not task_own,
                message=f"{link.key} does not hold"
                + (
                    ": admit the task on this backend first."
                    if task_own
                    else ": the reward can not be trusted."
                ),
                evidence={"link": str(link.key), **link.facts},
            )
    return None


def _admitted(task: Task, image: str, admission: Admission | None) -> Evidence:
    key = EvidenceKey.E10_TASK_VALIDATED
    if admission is None:
        return Evidence(key=key, holds=False, facts={"admission": None})
    matches = (
        admission.task_id == task.id
        and admission.revision == task.revision
        and admission.image_digest == image
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


async def _judged(
    task: Task,
    backend: Backend,
    *,
    image: str,
    changes: tuple[FileChange, ...],
    session: str,
    attempted: Attempted,
    valid: bool,
) -> tuple[Verified, Fault | None]:
    """What the work earns; and the policy's fault when the work can not be judged: then it counts as no work,
    so that nobody learns to end a bad attempt without a score.

    Whether work or task is to blame for a verifier that can not judge is found out, not guessed: the same
    verifier judges the image without the work. Raises `BoundaryError` when it can not judge that either.
    """
    result: Verified | None = None
    problem: BoundaryError | None = None
    try:
        result = await verify(
            task, backend, image=image, changes=changes, session=session, attempted=attempted
        )
        fault = result.fault
    except BoundaryError as error:
        if error.owner not in ("policy", "task"):
            raise
        problem, fault = error, fault_of(error)
    if fault is not None and valid and changes:
        try:
            bare = await verify(
                task, backend, image=image, changes=(), session=f"{session}-without", attempted=attempted
            )
        except BoundaryError as error:
            if fault.owner == "task":
                raise
            log.warning("session %s: not even the image without the work can be judged: %s", session, error)
        else:
            if bare.fault is None and not bare.passed:
                flags = () if result is None else result.flags
                blamed = replace(fault, owner="policy", retryable=False)
                return replace(bare, flags=(*flags, WORK_UNJUDGED)), blamed
    if problem is not None:
        raise problem
    assert result is not None, "what did not raise is a result"
    return result, None


@dataclass(frozen=True, slots=True)
class Attempted:
    """An attempt behind a diff, and what was done in it, as far as that is known."""

    steps: Steps | None


async def verify(
    task: Task,
    backend: Backend,
    *,
    image: str,
    changes: tuple[FileChange, ...],
    session: str,
    attempted: Attempted | None = None,
) -> Verified:
    """Run the verifier on a gradable diff; once more when what failed was not the policy's.

    One that was starved of CPU is judged again with more time and without other verifiers of this process
    beside it. Only then is a time that is over the work's own; starved twice, it is nobody's.

    Without `attempted` (admission) there was no attempt, and only graders that decide are asked.
    """
    turn = Turn()
    for attempt in range(1, VERIFY_ATTEMPTS + 1):
        try:
            return await _once(
                task,
                backend,
                image=image,
                changes=changes,
                session=f"{session}-verify{attempt}",
                attempted=attempted,
                turn=turn,
            )
        except BoundaryError as error:
            if not error.retryable or attempt == VERIFY_ATTEMPTS:
                error.evidence.setdefault("verify_attempts", attempt)
                raise
            if error.code == STARVED:
                turn = Turn(alone=True, slower=_slower(error.evidence))
    raise AssertionError("unreachable: the last attempt returns or raises")


async def _once(
    task: Task,
    backend: Backend,
    *,
    image: str,
    changes: tuple[FileChange, ...],
    session: str,
    attempted: Attempted | None,
    turn: Turn,
) -> Verified:
    folder = Path(task.path)
    try:
        revision, files = package.revision_of(folder), package.test_files(folder)
    except OSError as error:
        raise of_system(error, "verify") from error
    if revision != task.revision:
        raise TaskError(
            f"{folder} changed after it was loaded.",
            fix="Load the task again.",
            code="task_changed",
            phase="verify",
        )
    clock = Clock.of(task)
    longer = time_multiplier(backend)
    try:
        async with asyncio.timeout(longer * (CREATE_DEADLINE_S + QUEUE_DEADLINE_S) + 10.0):
            sandbox = await backend.create(
                task.sandbox,
                image=image,
                session=session,
                mounts=(
                    Mount(source=str(folder / "tests"), target=TESTS_TARGET),
                    *mounts_of(clock),
                ),
                apply=changes,
                deadline_s=longer * CREATE_DEADLINE_S,
            )
    except TimeoutError as error:
        raise SandboxError(
            "The verifier sandbox did not start in time.", code="no_answer", phase="create"
        ) from error
    except OSError as error:
        if error.errno in NO_ROOM and changes:
            raise DiffTooLarge(
                "What was changed does not fit the disk of a fresh sandbox: sparse and linked files are whole"
                " ones there.",
                phase="verify",
                evidence={"errno": error.errno, "changes": len(changes)},
            ) from error
        raise of_system(error, "create") from error
    try:
        witness = Witness(sandbox, image=image, spec=task.sandbox, session=session, clock=clock)
        turn = replace(turn, slower=turn.slower * sandbox.info.time_multiplier)
        async with _turn(turn):
            await witness.probe("verify")
            await witness.start_clock()
            if task.grader.kind == "graders":
                verified = await _by_graders(task, witness, files, session, changes, attempted, turn)
            else:
                slowed = replace(
                    task, grader=replace(task.grader, timeout_s=turn.slower * task.grader.timeout_s)
                )
                judge = _by_tests if task.grader.kind == "tests" else _by_script
                verified = await judge(slowed, witness, files, session)
    finally:
        await sandbox.close()
    return replace(verified, evidence=(_fresh(witness, changes, turn), *verified.evidence))


@dataclass(frozen=True, slots=True)
class Turn:
    """How a verifier runs: beside others, or alone and with more time, after it was starved."""

    alone: bool = False
    slower: float = 1.0
    """Its time limits are so many times the task's."""


_floors: WeakKeyDictionary[asyncio.AbstractEventLoop, Pressure] = WeakKeyDictionary()
"""Where the verifiers of this process run, by event loop."""


@asynccontextmanager
async def _turn(turn: Turn) -> AsyncIterator[None]:
    """Be among the verifiers that run now, or the only one. Whoever is inside waits for nothing but its own
    sandbox, so this always moves on. The wait is no part of what judging took."""
    floor = _floors.setdefault(asyncio.get_running_loop(), Pressure(AT_ONCE))
    deadline = asyncio.timeout(QUEUE_DEADLINE_S)
    try:
        async with deadline, floor.slot(teaches=False, alone=turn.alone):
            deadline.reschedule(None)
            yield
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise _environment(
            "verifier_queue", f"its turn did not come within {QUEUE_DEADLINE_S:g} s.", alone=turn.alone
        ) from error


def _starved(
    task: Task, witness: Witness, *, cpu_ms: float, queued_ms: float = -1.0, timeout_s: float | None = None
) -> dict[str, JsonScalar] | None:
    """The evidence that what ran out of time had not been given the CPU for it; None when it had, or slept.
    `queued_ms` -1: not known. Where neither it nor the pressure is known, nothing speaks for the work."""
    budget_ms = 1000 * (task.grader.timeout_s if timeout_s is None else timeout_s)
    pressure = witness.cpu_pressure()
    waited = queued_ms > STARVED_SHARE * budget_ms or (
        queued_ms < 0 if pressure is None else pressure > PRESSURE_SHARE
    )
    if not waited or cpu_ms >= FED_SHARE * min(1.0, task.sandbox.cpus) * budget_ms:
        return None
    return {
        "cpu_ms": cpu_ms,
        "queued_ms": queued_ms,
        "cpu_pressure": pressure,
        "timeout_s": budget_ms / 1000,
    }


def _slower(facts: dict[str, JsonScalar]) -> float:
    """By how much the time is stretched in which a verifier was starved."""
    queued = float(facts["queued_ms"] or 0) / (1000 * float(facts["timeout_s"] or 1))
    waited = max(queued, float(facts["cpu_pressure"] or 0), PRESSURE_SHARE)
    return min(SLOWEST, 1 / max(1e-3, 1 - waited))


def _fresh(witness: Witness, changes: tuple[FileChange, ...], turn: Turn) -> Evidence:
    """E7: the verifier's own E1 to E5, what was laid over the image, the clock that it lived under, and how
    long something waited for a CPU meanwhile."""
    own = {e.key: e for e in witness.evidence() if e.key is not EvidenceKey.E6_PROBE_AFTER}
    facts: dict[str, JsonScalar] = {f"verifier_{key}": link.holds for key, link in own.items()}
    facts |= {
        "sandbox": witness.sandbox.info.id,
        "instance": witness.sandbox.info.instance,
        "diff": diff_hash(changes),
        "changes": len(changes),
        "test_files_match": True,  # the judges raise otherwise
        "cpu_pressure": witness.cpu_pressure(),
    }
    if witness.sandbox.info.time_multiplier != 1:
        facts["time_multiplier"] = witness.sandbox.info.time_multiplier
    if turn.alone:
        facts |= {"alone": True, "slower": turn.slower}
    if witness.clock is not None:
        facts["clock"] = witness.clock.starts.isoformat()
    return Evidence(
        key=EvidenceKey.E7_FRESH_VERIFIER, holds=all(e.holds is True for e in own.values()), facts=facts
    )


def _finite(started: float, *, cpu_ms: float, queued_ms: float = 0.0, **facts: JsonScalar) -> Evidence:
    """E9, with what the verifier took since `started`."""
    took = {
        "clock_s": round(time.monotonic() - started, 4),
        "cpu_s": round(cpu_ms / 1000, 4),
        "queued_s": round(queued_ms / 1000, 4),
    }
    return Evidence(key=EvidenceKey.E9_REWARD_FINITE, holds=True, facts={**facts, **took})


def _environment(code: str, message: str, **evidence: JsonScalar) -> SandboxError:
    return SandboxError(f"Verifier: {message}", code=code, phase="verify", evidence=evidence)


async def _ended(task: Task, witness: Witness, result: ExecResult) -> None:
    """Raise unless the verifier's command exited by itself and the kernel killed nothing for memory."""
    await witness.probe("verify")
    if result.status is ExecStatus.OOM or witness.oom_kills():
        raise _environment("verifier_oom", "something was killed for memory.", oom_kills=witness.oom_kills())
    if result.status is ExecStatus.TIMEOUT:
        if facts := _starved(task, witness, cpu_ms=result.cpu_ms):
            raise _environment(STARVED, "no answer within the grader's time on a busy machine.", **facts)
        raise TaskError(
            "The verifier gave no answer within the grader's time, of which it had the CPU.",
            fix="Give verifier.timeout_sec what the solution needs, if it is the task's.",
            code="verifier_timeout",
            phase="verify",
            evidence={"wall_ms": result.wall_ms, "cpu_ms": result.cpu_ms},
        )
    if result.reason == "output_limit":
        raise SandboxError(
            "Verifier: what was tested wrote more output than any command may.",
            fix="The task's own script writes little; look at what the attempt changed.",
            owner="policy",
            code="verifier_output",
            phase="verify",
            retryable=False,
        )
    if result.status is ExecStatus.SIGNALED and witness.oom_kills() == 0:
        # From inside: by what was tested, or by the task's own script.
        raise TaskError(
            f"The verifier was ended by signal {result.signal} before its report.",
            fix="Let nothing in tests/ signal its own parents.",
            code="verifier_killed",
            phase="verify",
            evidence={"signal": result.signal, "oom_kills": 0},
        )
    if result.status is not ExecStatus.EXITED:
        raise _environment(
            "verifier_killed", f"it was {result.status} before its report.", signal=result.signal
        )


# --------------------------------------------------------------------------------------------- tests by name


async def _by_tests(task: Task, witness: Witness, files: dict[str, str], session: str) -> Verified:
    required = (*task.grader.fail_to_pass, *task.grader.pass_to_pass)
    names = tuple(dict.fromkeys(name.partition("::")[0] for name in required))
    run = TestRun.of(
        tuple(f"{TESTS_TARGET}/{name}" for name in names),
        root=TESTS_TARGET + "/",
        exec_id=f"{session}-tests",
        timeout_s=task.grader.timeout_s,
        processes=task.sandbox.pids,
        grading=True,
    )
    started = time.monotonic()
    result = await witness.exec(run.request)
    await _ended(task, witness, result)
    report = run.parse(result.report)
    _believable(task, witness, report, files)
    outcomes = {test.name: test for test in report.tests}
    tests = tuple(outcomes.get(name, TestOutcome(name=name, outcome="missing")) for name in required)
    if all(test.outcome == "missing" for test in tests):
        raise TaskError("None of the named tests exists in tests/.", code="nothing_collected", phase="verify")
    share = sum(test.outcome == "passed" for test in tests) / len(tests)
    passed = share == 1.0 and report.canaries == "behaved"
    e8 = Evidence(
        key=EvidenceKey.E8_REPORT_COMPLETE,
        holds=report.canaries != "forged",
        facts={
            "exit_code": result.exit_code,
            "complete": report.complete,
            "canaries": report.canaries,
            "parent_hidden": report.hidden,
            "tests": len(tests),
            "report": hashlib.sha256(result.report or b"").hexdigest(),
        },
    )
    queued_ms = sum(max(0.0, seen.queued_ms) for seen in report.files)
    e9 = _finite(started, cpu_ms=result.cpu_ms, queued_ms=queued_ms)
    forged = report.canaries == "forged"
    return Verified(
        passed=passed,
        reward=1.0 if passed else 0.0,
        components={"tests_passed": share},
        tests=tests,
        evidence=(e8, e9),
        flags=("verifier_untrusted",) if forged else (),
        fault=Fault(
            owner="policy",
            code="report_forged",
            phase="verify",
            retryable=False,
            message="A canary test was answered wrongly: the tested code tampered with the test process.",
        )
        if forged
        else None,
    )


def _believable(task: Task, witness: Witness, report: TestReport, files: dict[str, str]) -> None:
    """Raise unless the report is whole, of the package's own files, and no timeout was the machine's."""
    if not report.complete:
        raise _environment(
            "verifier_no_report", "its report is missing or incomplete.", started=report.started
        )
    for seen in report.files:
        relative = seen.path.removeprefix(TESTS_TARGET + "/")
        if seen.sha256 != files.get(relative):
            raise _environment("tests_differ", f"{relative} is not the package's.", sha256=seen.sha256)
        if seen.problem:
            raise TaskError(
                f"tests/{relative}: {seen.problem}",
                fix="Correct the test file.",
                code="test_file",
                phase="verify",
            )
        if seen.ended == "timeout" and (
            facts := _starved(task, witness, cpu_ms=seen.cpu_ms, queued_ms=seen.queued_ms)
        ):
            raise _environment(STARVED, f"{relative} timed out on a busy machine.", **facts)
        if seen.ended == "signal 9" and witness.oom_kills() is None:
            raise _environment("verifier_killed", f"{relative} was killed and nobody counted why.")


# ----------------------------------------------------------------------------------------- the Harbor script


async def _by_script(task: Task, witness: Witness, files: dict[str, str], session: str) -> Verified:
    """`tests/test.sh` writes `reward.json` (wins) or `reward.txt`. It runs as the sandbox's root."""
    if witness.sandbox.info.isolation == "none":
        raise SandboxError(
            f"A script grader writes {LOGS_TARGET}, which is not its own without isolation.",
            fix="Use the local, docker or kubernetes backend for this task.",
            code="needs_isolation",
            phase="verify",
            retryable=False,
        )
    for name, digest in files.items():
        try:
            raw = await witness.read_file(f"{TESTS_TARGET}/{name}", max_bytes=TEST_FILE_BYTES)
        except (OSError, ValueError) as error:
            raise TaskError(
                f"tests/{name} can not be read in the verifier's sandbox: {error}",
                fix=f"Keep it a plain file, readable for all, of at most {TEST_FILE_BYTES >> 20} MiB.",
                code="test_file",
                phase="verify",
            ) from error
        if hashlib.sha256(raw).hexdigest() != digest:
            raise _environment("tests_differ", f"{name} is not the package's.")
    for stale in ("reward.json", "reward.txt"):
        if await _reward_file(witness, stale) is not None:
            raise _environment("stale_reward", f"{LOGS_TARGET}/{stale} exists in a fresh sandbox.")
    started = time.monotonic()
    result = await witness.exec(
        ExecRequest(
            exec_id=f"{session}-script",
            argv=("bash", "-c", f"mkdir -p {LOGS_TARGET} && exec bash {TESTS_TARGET}/test.sh"),
            timeout_s=task.grader.timeout_s,
            user="root",
        )
    )
    await _ended(task, witness, result)
    if result.exit_code != 0:
        raise TaskError(
            f"tests/test.sh exited {result.exit_code}.",
            fix="It must exit 0 whatever the reward; anything else means that it could not judge.",
            code="script_failed",
            phase="verify",
        )
    if result.leftovers_alive or result.leftovers_killed:
        raise TaskError(
            "Processes outlived tests/test.sh and may have written the reward.",
            evidence={"processes": result.leftovers_alive + result.leftovers_killed},
            fix="End in test.sh what it starts.",
            code="script_leftovers",
            phase="verify",
        )
    components = await _reward(witness)
    reward = components["reward"]
    e8 = Evidence(
        key=EvidenceKey.E8_REPORT_COMPLETE,
        holds=True,
        facts={"exit_code": 0, "canaries": "admission"},
    )
    e9 = _finite(started, cpu_ms=result.cpu_ms, stale=False)
    return Verified(
        passed=reward >= 1.0, reward=reward, components=components, tests=(), evidence=(e8, e9), flags=()
    )


# ------------------------------------------------------------------------------------------ graders by name


async def _by_graders(
    task: Task,
    witness: Witness,
    files: dict[str, str],
    session: str,
    changes: tuple[FileChange, ...],
    attempted: Attempted | None,
    turn: Turn,
) -> Verified:
    """The weighted sum of what the task's graders say. One that can not judge leaves no reward at all."""
    started = time.monotonic()
    spent: list[float] = []

    async def run(request: ExecRequest) -> ExecResult:
        request = replace(request, timeout_s=turn.slower * request.timeout_s)
        result = await witness.exec(request)
        spent.append(result.cpu_ms)
        await witness.probe("verify")
        if result.status is ExecStatus.OOM or witness.oom_kills():
            raise _environment("verifier_oom", "something was killed for memory.")
        if result.status is ExecStatus.TIMEOUT and (
            facts := _starved(task, witness, cpu_ms=result.cpu_ms, timeout_s=request.timeout_s)
        ):
            raise _environment(STARVED, "a grader's command timed out on a busy machine.", **facts)
        return result

    async def run_tests(fails: tuple[str, ...], passes: tuple[str, ...]) -> TestsSeen:
        slowed = turn.slower * task.grader.timeout_s
        named = replace(
            task,
            grader=replace(task.grader, fail_to_pass=fails, pass_to_pass=passes, timeout_s=slowed),
        )
        seen = await _by_tests(named, witness, files, session)
        spent.append(1000 * seen.cost.cpu_s)
        e8 = next(link for link in seen.evidence if link.key is EvidenceKey.E8_REPORT_COMPLETE)
        return TestsSeen(
            passed=seen.passed,
            share=seen.components["tests_passed"],
            tests=seen.tests,
            facts=e8.facts,
            fault=seen.fault,
        )

    attempt = Attempt(
        task=task,
        session=session,
        changes=changes,
        steps=attempted.steps if attempted is not None else None,
        run=run,
        run_tests=run_tests,
    )
    said: dict[str, Graded] = {}
    deciding: list[float] = []
    for use in task.grader.graders:
        grader = graders.make(use)
        if attempted is None and not grader.decides:
            continue
        said[use.name] = await _graded(use, grader, attempt, turn)
        if grader.decides:
            deciding.append(said[use.name].value)
    await witness.probe("verify")  # whatever the graders did: it is still the same sandbox, and whole
    weights = {use.name: use.weight for use in task.grader.graders}
    fault = next((each.fault for each in said.values() if each.fault is not None), None)
    components = {name: each.value for name, each in said.items()}
    for name, each in said.items():
        for key, value in each.components.items():
            share = 1.0 if step_number(key) is None else weights[name]
            components[f"{name}/{key}"] = share * float(value)
    facts: dict[str, JsonScalar] = {
        f"{name}.{key}": value for name, each in said.items() for key, value in each.facts.items()
    }
    return Verified(
        passed=all(value >= 1.0 for value in deciding) and bool(deciding) and fault is None,
        reward=math.fsum(weights[name] * each.value for name, each in said.items()),
        components=components,
        tests=tuple(test for each in said.values() for test in each.tests),
        evidence=(
            Evidence(key=EvidenceKey.E8_REPORT_COMPLETE, holds=fault is None, facts=facts),
            _finite(started, cpu_ms=sum(spent), graders=len(said)),
        ),
        flags=("verifier_untrusted",) if fault is not None else (),
        fault=fault,
    )


async def _graded(use: GraderUse, grader: Grader, attempt: Attempt, turn: Turn) -> Graded:
    """What one grader says; a `BoundaryError` when it can not judge, whatever it raised."""
    try:
        async with asyncio.timeout(turn.slower * attempt.task.grader.timeout_s + CONTROL_DEADLINE_S):
            graded = await grader.grade(attempt)
    except BoundaryError:
        raise
    except TimeoutError as error:
        raise TaskError(
            f"Grader {use.name} takes too long.", code="grader_timeout", phase="verify"
        ) from error
    except Exception as error:  # the boundary to somebody else's grader: classified
        raise TaskError(
            f"Grader {use.name} ({use.use}) raised {type(error).__name__}: {error}.",
            fix="Mend the grader: what it can not judge must be a BoundaryError.",
            code="grader_raised",
            phase="verify",
        ) from error
    values = (graded.value, *graded.components.values()) if isinstance(graded, Graded) else (math.nan,)
    if not all(map(_finite_number, values)):
        raise TaskError(
            f"Grader {use.name} ({use.use}) gives {graded!r:.200}, not finite numbers.",
            code="reward_not_finite",
            phase="verify",
        )
    return graded


def _finite_number(value: object) -> bool:
    """Whether it is a number that a float can hold; a whole number of 400 digits is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


async def _reward_file(witness: Witness, name: str) -> bytes | None:
    try:
        return await witness.read_file(f"{LOGS_TARGET}/{name}", max_bytes=REWARD_FILE_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TaskError(f"{LOGS_TARGET}/{name}: {error}", code="reward_file", phase="verify") from error


async def _reward(witness: Witness) -> dict[str, float]:
    """The finite numbers of the reward file, `reward` among them; `TaskError` when there is none."""
    raw = await _reward_file(witness, "reward.json")
    try:
        if raw is not None:
            values = json.loads(raw)
        else:
            raw = await _reward_file(witness, "reward.txt")
            values = None if raw is None else {"reward": float(raw.decode("ascii").strip())}
    except (ValueError, RecursionError) as error:
        raise TaskError(
            f"The reward file holds no number: {error}", code="reward_file", phase="verify"
        ) from error
    if values is None:
        raise TaskError(
            f"tests/test.sh wrote neither {LOGS_TARGET}/reward.json nor reward.txt.",
            code="no_reward",
            phase="verify",
        )
    numbers = {}
    for name, value in values.items() if isinstance(values, dict) else ():
        if not _finite_number(value):
            raise TaskError(
                f"reward.json: {name!r:.100} is not a finite number.",
                code="reward_not_finite",
                phase="verify",
            )
        numbers[str(name)] = float(value)
    if "reward" not in numbers:
        if len(numbers) != 1:
            raise TaskError("reward.json has no key 'reward'.", code="reward_file", phase="verify")
        numbers = {"reward": next(iter(numbers.values()))}
    return numbers
