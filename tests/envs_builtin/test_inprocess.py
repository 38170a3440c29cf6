"""What a reward of a tool environment rests on, and whose a failure is."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from env_sessions import KEY, Plain, act, attempt, opened

from agentrl.errors import BoundaryError, TaskError
from agentrl.types import EvidenceKey, ExecStatus, Fault, Split, Termination
from envs import inprocess
from envs.environment import Step, ToolEnvironment, of_class
from envs.grading import verify_signature
from envs.inprocess import EnvironmentSession
from envs.session import State

PRESS = Step(tool="press", arguments={"button": 1})


@pytest.fixture
def plain() -> Iterator[ToolEnvironment]:
    yield of_class(Plain)
    Plain.shared = 0


def test_a_right_attempt_has_the_reward_and_all_ten_pieces_of_evidence(plain: ToolEnvironment) -> None:
    seen, verdict = attempt(plain, [PRESS])
    assert [o.text for o in seen] == ["Pressed."]
    assert verdict.reward == 1.0
    assert verdict.components == {"pressed": 1.0}
    assert {e.key for e in verdict.evidence if e.holds is True} == set(EvidenceKey)
    assert verdict.isolation == "none"
    assert verdict.fault is None
    assert verify_signature(verdict, KEY)
    assert not verify_signature(replace(verdict, reward=0.5), KEY)


def test_a_wrong_attempt_is_scored_zero(plain: ToolEnvironment) -> None:
    _, verdict = attempt(plain, [Step(tool="press", arguments={"button": 2})])
    assert (verdict.reward, verdict.fault) == (0.0, None)


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (Step(tool="pres"), "Did you mean 'press'?"),
        (Step(tool="press"), "the argument button is missing"),
        (Step(tool="press", arguments={"button": "1"}), "valid integer"),
        (Step(tool="press", arguments={"buton": 1, "button": 1}), "Did you mean 'button'?"),
        (Step(tool="press", arguments={"button": -1}), "There is no such button."),
    ],
)
def test_what_the_policy_gets_wrong_is_an_observation_and_is_scored(
    plain: ToolEnvironment, step: Step, says: str
) -> None:
    seen, verdict = attempt(plain, [step, PRESS])
    assert seen[0].is_error
    assert says in seen[0].text
    assert verdict.reward == 1.0


def test_an_exception_of_a_tool_is_the_environments_and_says_where(plain: ToolEnvironment) -> None:
    async def run() -> None:
        async with await opened(plain) as session:
            with pytest.raises(BoundaryError) as caught:
                await session.call(act("crash"))
            error = caught.value
            assert (error.owner, error.code, error.retryable) == ("environment", "tool_raised", False)
            assert "KeyError" in str(error)
            assert "env_sessions.py" in str(error.evidence["where"])
            fault = inprocess.fault_of(error)
            verdict = await session.finalize(termination=Termination.FAULT, fault=fault)
            assert verdict.reward is None
            assert verdict.fault == fault
            assert {e.key: e.holds for e in verdict.evidence}[EvidenceKey.E5_NO_FOREIGN_LOSS] is not True

    asyncio.run(run())


def test_a_timeout_is_the_environments_unless_the_policy_chose_the_work(plain: ToolEnvironment) -> None:
    async def run() -> None:
        async with await opened(plain, exec_timeout_s=0.05) as session:
            with pytest.raises(BoundaryError) as caught:
                await session.call(act("slow"))
            assert (caught.value.owner, caught.value.code) == ("environment", "tool_timeout")
        async with await opened(plain, exec_timeout_s=0.05) as session:
            seen = await session.call(act("chosen"))
            assert (seen.is_error, seen.status) == (True, ExecStatus.TIMEOUT)
            await session.call(act("press", button=1))
            verdict = await session.finalize(termination=Termination.FINISHED, fault=None)
            assert verdict.reward == 1.0

    asyncio.run(run())


def test_a_tool_that_does_not_stop_leaves_no_reward(
    plain: ToolEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inprocess, "STOP_GRACE_S", 0.1)

    async def run() -> None:
        async with await opened(plain, exec_timeout_s=0.05) as session:
            with pytest.raises(BoundaryError) as caught:
                await session.call(act("stuck"))
            assert caught.value.code == "tool_stuck"
            verdict = await session.finalize(
                termination=Termination.FAULT, fault=inprocess.fault_of(caught.value)
            )
            assert verdict.reward is None
            assert {e.key: e.holds for e in verdict.evidence}[EvidenceKey.E4_EXECS_FRAMED] is False

    asyncio.run(run())


def test_calls_that_answer_otherwise_when_replayed_leave_no_reward(plain: ToolEnvironment) -> None:
    _, verdict = attempt(plain, [Step(tool="clock"), PRESS])
    assert verdict.reward is None
    assert verdict.fault is not None
    assert verdict.fault.code == "not_deterministic"
    assert {e.key: e.holds for e in verdict.evidence}[EvidenceKey.E7_FRESH_VERIFIER] is False


def test_an_attempt_that_spoils_what_instances_share_is_caught(
    plain: ToolEnvironment,
) -> None:
    _, verdict = attempt(plain, [Step(tool="spoil")])
    assert verdict.reward is None
    assert verdict.fault is not None
    assert verdict.fault.code == "canary_failed"
    assert {e.key: e.holds for e in verdict.evidence}[EvidenceKey.E8_REPORT_COMPLETE] is False


def test_without_admission_there_is_no_reward(plain: ToolEnvironment) -> None:
    async def run() -> None:
        async with await opened(plain, admitted=False) as session:
            await session.call(act("press", button=1))
            verdict = await session.finalize(termination=Termination.FINISHED, fault=None)
            assert verdict.reward is None
            assert verdict.fault is not None
            assert (verdict.fault.owner, verdict.fault.code) == ("task", "not_admitted")

    asyncio.run(run())


def test_a_budget_that_ended_is_scored_and_stays_in_the_verdict(plain: ToolEnvironment) -> None:
    budget = Fault(owner="budget", code="wall", phase="run", retryable=False, message="time is up")

    async def run() -> None:
        async with await opened(plain) as session:
            await session.call(act("press", button=1))
            verdict = await session.finalize(termination=Termination.WALL_CLOCK, fault=budget)
            assert (verdict.reward, verdict.fault) == (1.0, budget)
            assert await session.finalize(termination=Termination.FAULT, fault=None) is verdict
            assert session.state is State.DONE

    asyncio.run(run())


def test_after_it_is_done_nothing_can_be_done(plain: ToolEnvironment) -> None:
    async def run() -> None:
        async with await opened(plain) as session:
            await session.call(act("press", button=1))
            assert session.submitted
            assert (await session.call(act("press", button=2))).is_error
            assert (await session.finalize(termination=Termination.FINISHED, fault=None)).reward == 1.0

    asyncio.run(run())


def test_a_cancelled_call_ends_the_session_without_a_reward(plain: ToolEnvironment) -> None:
    async def run() -> None:
        async with await opened(plain) as session:
            calling = asyncio.create_task(session.call(act("slow")))
            await asyncio.sleep(0.01)
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
            assert session.state is State.CANCELLED
            verdict = await session.finalize(termination=Termination.CANCELLED, fault=None)
            assert verdict.reward is None

    asyncio.run(run())


def test_a_task_of_other_code_is_refused(plain: ToolEnvironment) -> None:
    async def run() -> None:
        task = replace(plain.task(0), revision="0" * 64)
        with pytest.raises(TaskError, match="not what the task was made from"):
            await EnvironmentSession.open(task, plain, session_id="s", signing_key=KEY, admission=None)

    asyncio.run(run())


def test_a_problem_whose_solution_fails_is_quarantined(plain: ToolEnvironment) -> None:
    async def run() -> None:
        Plain.shared = 1
        found = await inprocess.admit(plain.task(0), plain, backend="none", light=True)
        assert not found.valid
        assert any("empty" in reason for reason in found.reasons)

    asyncio.run(run())


def test_splits_share_no_problem_and_no_seed_whatever_the_run_seed(plain: ToolEnvironment) -> None:
    made = [plain.tasks(train=30, heldout=10, seed=seed) for seed in range(3)]
    train = {t.instruction for tasks in made for t in tasks if t.split is Split.TRAIN}
    heldout = {t.instruction for tasks in made for t in tasks if t.split is Split.HELDOUT}
    assert (len(train), len(heldout)) == (90, 30)
    assert not train & heldout


def test_the_evidence_in_the_docstring_is_all_of_it() -> None:
    told = inspect.getdoc(inprocess) or ""
    assert [f"- E{n} " in told for n in range(1, 11)] == [True] * 10
    assert Path(inspect.getfile(inprocess)).name == "inprocess.py"
