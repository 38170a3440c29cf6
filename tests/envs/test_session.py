"""Sessions: evidence on the way, one log, and no reward when anything that is not the policy's fails."""

import asyncio
import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faulty_backend import FIX, KEY, Faults, FaultyBackend, FaultySandbox, admission_of, attempt, small_task

from agentrl.errors import SandboxError, SandboxLost
from agentrl.types import Action, EvidenceKey, ExecStatus, Fault, Task, Termination, Verdict
from envs.grading import verify_signature
from envs.sandbox.agent import SHELLS
from envs.sandbox.contract import ExecRequest, NotRun
from envs.session import HISTORY_SEARCHED, Session, State

SUBMIT = ("submit", {})


def link(verdict: Verdict, key: EvidenceKey) -> bool | None:
    return next(e.holds for e in verdict.evidence if e.key is key)


def test_a_fix_earns_one_with_every_piece_of_evidence_and_a_signature(task: Task) -> None:
    verdict = attempt(task, FIX, SUBMIT)
    assert verdict.reward == 1.0
    assert verdict.components == {"tests_passed": 1.0}
    assert [e.key for e in verdict.evidence] == list(EvidenceKey)
    assert all(e.holds for e in verdict.evidence)
    assert verdict.isolation == "none"
    assert verdict.fault is None
    assert verify_signature(verdict, KEY)


def test_doing_nothing_earns_zero_and_shows_the_share_of_tests(task: Task) -> None:
    verdict = attempt(task)
    assert verdict.reward == 0.0
    assert verdict.components == {"tests_passed": pytest.approx(1 / 3)}
    assert {t.name: t.outcome for t in verdict.tests} == {
        "test_cart.py::test_total": "failed",
        "test_hidden.py::test_negative": "failed",
        "test_cart.py::test_zero": "passed",
    }


@pytest.mark.parametrize(
    "change",
    [
        {"reward": 1.0},
        {"signature": ""},
        {"signature": "0" * 64},
        {"flags": ("x",)},
        {"grader_revision": "other"},
        {"tests": ()},
    ],
)
def test_an_edited_verdict_fails_its_signature(task: Task, change: dict[str, Any]) -> None:
    verdict = attempt(task)
    assert verify_signature(verdict, KEY)
    assert not verify_signature(replace(verdict, **change), KEY)
    assert not verify_signature(verdict, b"another key")


# ----------------------------------------------------------------------- break each link of the chain


def _raise(error: Exception, *names: str) -> Callable[[str], Any]:
    async def before(name: str) -> None:
        if name in names:
            raise error

    return before


def _later(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Change every value but the first."""
    seen: list[int] = []

    def apply(value: Any) -> Any:
        seen.append(1)
        return value if len(seen) == 1 else change(value)

    return apply


LOST = SandboxLost("gone")
BREAKS: dict[str, tuple[EvidenceKey, Faults]] = {
    "wrong image": (
        EvidenceKey.E1_START,
        Faults(where="agent", info=lambda i: replace(i, image_digest="dir:" + "0" * 64)),
    ),
    "other limits": (
        EvidenceKey.E1_START,
        Faults(
            where="agent", info=lambda i: replace(i, spec=replace(i.spec, memory_mib=i.spec.memory_mib * 2))
        ),
    ),
    "another instance at the end": (
        EvidenceKey.E3_SAME_INSTANCE,
        Faults(where="agent", health=_later(lambda h: replace(h, instance="another"))),
    ),
    "dead at the end": (
        EvidenceKey.E6_PROBE_AFTER,
        Faults(where="agent", health=_later(lambda h: replace(h, alive=False))),
    ),
    "no probe at the end": (
        EvidenceKey.E6_PROBE_AFTER,
        Faults(where="agent", before=_raise(LOST, "kill_all")),
    ),
    "no diff": (EvidenceKey.E6_PROBE_AFTER, Faults(where="agent", before=_raise(LOST, "diff"))),
    "out-of-memory kills not counted": (
        EvidenceKey.E5_NO_FOREIGN_LOSS,
        Faults(
            where="agent",
            info=lambda i: replace(i, limits_enforced=("memory",)),
            health=lambda h: replace(h, oom_kills=None),
        ),
    ),
    "verifier of another image": (
        EvidenceKey.E7_FRESH_VERIFIER,
        Faults(where="verify", info=lambda i: replace(i, image_digest="dir:" + "0" * 64)),
    ),
    "verifier lost": (EvidenceKey.E7_FRESH_VERIFIER, Faults(where="verify", before=_raise(LOST, "exec"))),
    "no report": (
        EvidenceKey.E8_REPORT_COMPLETE,
        Faults(where="verify", result=lambda r: replace(r, report=b"")),
    ),
    "report cut": (
        EvidenceKey.E8_REPORT_COMPLETE,
        Faults(where="verify", result=lambda r: replace(r, report=(r.report or b"")[:-40])),
    ),
    "verifier killed": (
        EvidenceKey.E8_REPORT_COMPLETE,
        Faults(
            where="verify",
            result=lambda r: replace(r, status=ExecStatus.SIGNALED, signal=9, exit_code=None, report=b""),
        ),
    ),
    "verifier out of memory": (
        EvidenceKey.E8_REPORT_COMPLETE,
        Faults(where="verify", health=_later(lambda h: replace(h, oom_kills=(h.oom_kills or 0) + 1))),
    ),
    "verifier unknown": (
        EvidenceKey.E8_REPORT_COMPLETE,
        Faults(where="verify", result=lambda r: replace(r, status=ExecStatus.UNKNOWN, exit_code=None)),
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_link_leaves_no_reward(task: Task, name: str) -> None:
    key, faults = BREAKS[name]
    if name == "verifier out of memory":
        counted = Faults(where="verify", health=_counting())
        verdict = attempt(task, FIX, SUBMIT, faults=(counted,))
    else:
        verdict = attempt(task, FIX, SUBMIT, faults=(faults,))
    assert verdict.reward is None
    assert verdict.fault is not None
    assert verdict.fault.owner == "environment"
    assert link(verdict, key) is not True
    assert verify_signature(verdict, KEY)


def _counting() -> Callable[[Any], Any]:
    seen = iter(range(1000))
    return lambda health: replace(health, oom_kills=next(seen))


def test_an_unprobed_start_is_no_start(task: Task) -> None:
    faults = Faults(where="agent", health=lambda h: replace(h, alive=False))

    async def run() -> int:
        backend = FaultyBackend(faults)
        try:
            with pytest.raises(SandboxLost):
                await Session.open(task, backend, session_id="agent", signing_key=KEY, admission=None)
            return len(backend.inner._live)
        finally:
            await backend.close()

    assert asyncio.run(run()) == 0, "the sandbox of a failed open is closed"


@pytest.mark.parametrize(
    "admission",
    [
        {"valid": False, "reasons": ("flaky",)},
        {"revision": "0" * 64},
        {"image_digest": "dir:other"},
        {"task_id": "small/other"},
    ],
)
def test_a_task_that_is_not_admitted_earns_nothing(task: Task, admission: dict[str, Any]) -> None:
    verdict = attempt(task, FIX, SUBMIT, admission=admission)
    assert (verdict.reward, verdict.fault and verdict.fault.owner) == (None, "task")
    assert link(verdict, EvidenceKey.E10_TASK_VALIDATED) is False
    without = attempt(task, FIX, SUBMIT, admitted=False)
    assert (without.reward, without.fault and without.fault.code) == (None, "not_admitted")


def test_a_package_that_changed_after_loading_is_not_graded(tmp_path: Path) -> None:
    task = small_task(tmp_path / "t")
    (tmp_path / "t" / "tests" / "test_hidden.py").write_text("def test_negative():\n    pass\n")
    verdict = attempt(task, SUBMIT)
    assert (verdict.reward, verdict.fault and verdict.fault.code) == (None, "task_changed")


# ----------------------------------------------------------------------------------- lives and deaths


def test_killing_the_sandbox_in_the_middle_is_the_environments_fault(task: Task) -> None:
    async def run() -> tuple[Verdict, list[State]]:
        backend = FaultyBackend()
        try:
            record = await admission_of(task, backend)
            async with await Session.open(
                task, backend, session_id="agent", signing_key=KEY, admission=record
            ) as session:
                await session.call(Action(id="0", tool=FIX[0], arguments=FIX[1]))
                await backend.live["agent"].close()
                with pytest.raises(SandboxError) as caught:
                    await session.call(Action(id="1", tool="bash", arguments={"command": "true"}))
                error = caught.value
                fault = Fault(
                    owner=error.owner,
                    code=error.code,
                    phase=error.phase,
                    retryable=error.retryable,
                    message=str(error),
                )
                verdict = await session.finalize(termination=Termination.FAULT, fault=fault)
                return verdict, [t.state for t in session.log]
        finally:
            await backend.close()

    verdict, states = asyncio.run(run())
    assert verdict.reward is None
    assert verdict.fault is not None
    assert verdict.fault.owner == "environment"
    assert states[-1] is State.FAILED


def test_a_sandbox_that_dies_before_finalize_leaves_no_reward(task: Task) -> None:
    async def kill(backend: FaultyBackend, session: Session) -> None:
        await backend.live["agent"].close()

    verdict = attempt(task, FIX, SUBMIT, then=kill)
    assert verdict.reward is None
    assert verdict.fault is not None
    assert verdict.fault.owner == "environment"


def test_a_verifier_that_fails_once_is_tried_again(task: Task) -> None:
    left = [1]

    async def once(name: str) -> None:
        if name == "exec" and left:
            left.pop()
            raise SandboxLost("gone")

    verdict = attempt(task, FIX, SUBMIT, faults=(Faults(where="verify", before=once),))
    assert verdict.reward == 1.0
    twice = attempt(task, FIX, SUBMIT, faults=(Faults(where="verify", before=_raise(LOST, "exec")),))
    assert twice.reward is None
    assert twice.fault is not None
    assert twice.fault.evidence["verify_attempts"] == 2


def test_the_log_tells_one_life(task: Task) -> None:
    async def run() -> list[State]:
        backend = FaultyBackend()
        try:
            record = await admission_of(task, backend)
            session = await Session.open(task, backend, session_id="agent", signing_key=KEY, admission=record)
            await session.call(Action(id="0", tool="submit"))
            first = await session.finalize(termination=Termination.FINISHED, fault=None)
            assert await session.finalize(termination=Termination.CANCELLED, fault=None) is first
            with pytest.raises(SandboxError, match="not ready"):
                await session.call(Action(id="1", tool="submit"))
            await session.close()
            await session.close()
            return [t.state for t in session.log]
        finally:
            await backend.close()

    assert asyncio.run(run()) == [
        State.PROVISIONING,
        State.READY,
        State.RUNNING,
        State.READY,
        State.FINALIZING,
        State.VERIFYING,
        State.DONE,
    ]


def test_cancelling_leaves_no_sandbox(task: Task) -> None:
    async def run() -> tuple[int, list[State]]:
        backend = FaultyBackend()
        sessions: list[Session] = []
        opened = asyncio.Event()

        async def work() -> None:
            async with await Session.open(
                task, backend, session_id="agent", signing_key=KEY, admission=None
            ) as session:
                sessions.append(session)
                opened.set()
                await session.call(Action(id="0", tool="bash", arguments={"command": "sleep 30"}))

        try:
            running = asyncio.create_task(work())
            await opened.wait()
            await asyncio.sleep(0.1)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            return len(backend.inner._live), [t.state for t in sessions[0].log]
        finally:
            await backend.close()

    live, states = asyncio.run(run())
    assert live == 0
    assert states[-1] is State.CANCELLED


# ---------------------------------------------------- ENV-02: a timeout is graded and stays a timeout

TIME = Fault(owner="budget", code="wall_clock", phase="run", retryable=False, message="time is up")


def test_a_timed_out_attempt_is_graded_as_it_is(task: Task) -> None:
    solved = attempt(task, FIX, termination=Termination.WALL_CLOCK, fault=TIME)
    assert (solved.reward, solved.fault) == (1.0, TIME)
    unsolved = attempt(task, termination=Termination.WALL_CLOCK, fault=TIME)
    assert (unsolved.reward, unsolved.fault) == (0.0, TIME)
    assert attempt(task, FIX, termination=Termination.MAX_TURNS).reward == 1.0


def test_a_timed_out_attempt_whose_verifier_timed_out_is_unscored(task: Task) -> None:
    late = Faults(
        where="verify",
        pressure=1.0,
        result=lambda r: replace(r, status=ExecStatus.TIMEOUT, exit_code=None, report=b"", cpu_ms=1.0),
    )
    verdict = attempt(task, FIX, termination=Termination.WALL_CLOCK, fault=TIME, faults=(late,))
    assert verdict.reward is None
    assert verdict.fault is not None
    assert (verdict.fault.owner, verdict.fault.code) == ("environment", "verifier_contention")


def test_a_command_that_was_refused_before_it_ran_costs_no_evidence(task: Task) -> None:
    async def too_many(_: FaultyBackend, session: Session) -> None:
        requests = [
            ExecRequest(exec_id=f"n{n}", command="true", shell=f"n{n}", timeout_s=60)
            for n in range(SHELLS + 1)
        ]
        for request in requests[:-1]:
            await session.exec(request)
        with pytest.raises(NotRun, match="shells are in use"):
            await session.exec(requests[-1])

    verdict = attempt(task, FIX, then=too_many)
    assert (verdict.reward, verdict.fault) == (1.0, None)


def test_a_cancelled_attempt_is_evidence_of_nothing(task: Task) -> None:
    verdict = attempt(task, FIX, termination=Termination.CANCELLED)
    assert verdict.reward is None
    assert verdict.fault is not None
    assert verdict.fault.code == "cancelled"


def test_what_no_system_takes_as_a_command_is_the_policys_mistake_and_it_is_judged(task: Task) -> None:
    """A policy must not learn to end a bad attempt without a score by a byte that it writes."""
    verdict = attempt(task, ("bash", {"command": "echo a\0b"}), ("read_file", {"path": "a\0b"}), FIX, SUBMIT)
    assert (verdict.reward, verdict.fault) == (1.0, None)


@pytest.mark.parametrize(
    ("command", "flagged"),
    [
        ("git log --all -p | head", True),
        ("cd /app && git reflog", True),
        ("git fsck --lost-found; true", True),
        ("git -c core.pager=cat show origin/main:cart.py", True),
        ("git log --oneline", False),
        ("git status; git diff", False),
        ("grep -r reflog .", False),
        ("echo digit reflog", False),
    ],
)
def test_looking_for_the_solution_in_the_history_is_marked_and_decides_nothing(
    task: Task, command: str, flagged: bool
) -> None:
    verdict = attempt(task, ("bash", {"command": f"{command} || true"}), FIX, SUBMIT)
    assert (verdict.reward, verdict.flags) == (1.0, (HISTORY_SEARCHED,) if flagged else ())
    assert verify_signature(verdict, KEY)
    ended = attempt(task, ("bash", {"command": f"{command} || true"}), termination=Termination.CANCELLED)
    assert ended.flags == ((HISTORY_SEARCHED,) if flagged else ())


class Cramped:
    """A backend of which some sandboxes can not be made: the system refuses."""

    name = "plain"
    isolation = "none"

    def __init__(self, code: int, where: str) -> None:
        self.inner = FaultyBackend()
        self._code = code
        self._where = where

    async def prepare(self, environment_dir: str) -> str:
        return await self.inner.prepare(environment_dir)

    async def create(self, spec: Any, *, session: str, **rest: Any) -> Any:
        if self._where in session:
            raise OSError(self._code, os.strerror(self._code))
        return await self.inner.create(spec, session=session, **rest)

    async def close(self) -> None:
        await self.inner.close()


@pytest.mark.parametrize(
    ("code", "owner", "fault"),
    [
        (errno.ENOSPC, "policy", "diff_too_large"),
        (errno.EMFILE, "environment", "system"),
        (errno.EACCES, "environment", "system"),
    ],
)
def test_work_that_does_not_fit_a_fresh_sandbox_is_the_policys_and_a_bare_error_of_the_system_is_not(
    task: Task, code: int, owner: str, fault: str
) -> None:
    async def run() -> Verdict:
        backend = Cramped(code, "-verify")
        admission = await admission_of(task, backend)
        session = await Session.open(task, backend, session_id="s", signing_key=KEY, admission=admission)
        async with session:
            await session.call(Action(id="0", tool=FIX[0], arguments=FIX[1]))
            verdict = await session.finalize(termination=Termination.FINISHED, fault=None)
        with pytest.raises(SandboxError) as refused:
            await Session.open(task, backend, session_id="t-verify", signing_key=KEY, admission=admission)
        assert (refused.value.owner, refused.value.code) == ("environment", "system")
        await backend.close()
        return verdict

    verdict = asyncio.run(run())
    assert verdict.reward is None
    assert verdict.fault is not None
    assert (verdict.fault.owner, verdict.fault.code) == (owner, fault)


# ------------------------------------------------------------------------------------------------- its room


class SmallBackend(FaultyBackend):
    """Has room for so many sandboxes at once; whoever comes later waits."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = asyncio.Semaphore(room)

    async def create(self, spec: Any, *, session: str, **rest: Any) -> FaultySandbox:
        await self._room.acquire()
        sandbox = await super().create(spec, session=session, **rest)
        closing, room = sandbox.close, self._room
        given_back: list[str] = []

        async def close() -> None:
            await closing()
            if not given_back:
                given_back.append(session)
                room.release()

        sandbox.close = close  # type: ignore[method-assign]
        return sandbox


def test_attempts_that_fill_the_backend_do_not_wait_for_each_others_room(task: Task) -> None:
    """A cluster with room for 53 pods, 64 attempts at once: each held one and waited for a verifier's."""

    async def one(backend: SmallBackend, number: int, together: asyncio.Barrier) -> Verdict:
        record = await admission_of(task, backend)
        async with await Session.open(
            task, backend, session_id=f"agent{number}", signing_key=KEY, admission=record
        ) as session:
            await session.call(Action(id="0", tool=FIX[0], arguments=FIX[1]))
            await together.wait()
            return await session.finalize(termination=Termination.FINISHED, fault=None)

    async def run() -> list[Verdict]:
        backend, together = SmallBackend(3), asyncio.Barrier(3)
        try:
            async with asyncio.timeout(30):
                return await asyncio.gather(*(one(backend, number, together) for number in range(3)))
        finally:
            await backend.close()

    assert [verdict.reward for verdict in asyncio.run(run())] == [1.0, 1.0, 1.0]


def test_a_sandbox_that_is_kept_lives_until_it_is_released(task: Task) -> None:
    async def run() -> None:
        backend = FaultyBackend()
        record = await admission_of(task, backend)
        async with await Session.open(
            task, backend, session_id="agent", signing_key=KEY, admission=record
        ) as session:
            await session.finalize(termination=Termination.FINISHED, fault=None, keep=True)
            assert (await backend.live["agent"].probe()).alive
            await session.release()
            with pytest.raises(SandboxError):
                await backend.live["agent"].probe()
            assert session.state is State.DONE
        await backend.close()

    asyncio.run(run())
