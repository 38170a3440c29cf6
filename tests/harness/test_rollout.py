"""One attempt: every way in which it can end, whose fault it is, and that nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fake_session import KEY, FakeSessions, NoBackend, task
from tiny_tokenizer import tokenizer

from agentrl.errors import ConfigError, EvidenceError, ModelError, SandboxError, SandboxLost, TaskError
from agentrl.inference.sampler import SampleRequest, SampleResult
from agentrl.inference.scripted import ScriptedSampler
from agentrl.types import (
    Action,
    BranchReason,
    FinishReason,
    SamplingParams,
    Termination,
    Trajectory,
)
from envs.grading import verify_signature
from harness.agent import ToolAgent
from harness.attempt import Attempt, remaining_tokens
from harness.chat import ChatFormat
from harness.rollout import RolloutSettings, run_one

LS = '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
SUBMIT = '<tool_call>{"name": "submit", "arguments": {}}</tool_call>'
BROKEN = '<tool_call>{"name": "bash", "arguments": {"comm'
CHAT = ChatFormat(tokenizer("chatml"))
SETTINGS = RolloutSettings(require_log_probs=False)


def scripted(*lines: Any) -> ScriptedSampler:
    """Says one line per call; an exception is raised instead."""

    def script(request: SampleRequest, number: int) -> Any:
        line = lines[min(number, len(lines) - 1)]
        if isinstance(line, Exception):
            raise line
        return line(request) if callable(line) else line

    return ScriptedSampler(script, encode=CHAT.encode_reply)


def attempt(
    sampler: Any,
    sessions: FakeSessions | None = None,
    *,
    settings: RolloutSettings = SETTINGS,
    agent: Any = None,
    **limits: Any,
) -> tuple[Trajectory, FakeSessions]:
    sessions = sessions or FakeSessions()
    trajectory = asyncio.run(
        run_one(
            task(**limits),
            sampler=sampler,
            chat=CHAT,
            backend=NoBackend(),
            group_id="g",
            index=1,
            signing_key=KEY,
            settings=settings,
            agent=agent,
            open_session=sessions,
        )
    )
    assert sessions.live == 0
    assert all(session.closed == 1 for session in sessions.opened.values())
    return trajectory, sessions


def raising(error: BaseException) -> Callable[[Action], str]:
    def respond(action: Action) -> str:
        raise error

    return respond


# ----------------------------------------------------------------------------------------- ends of the policy


def test_a_submitted_attempt_is_finished_graded_and_recorded_exactly() -> None:
    trajectory, sessions = attempt(
        scripted(LS, "Let me see. " + LS, SUBMIT), FakeSessions(lambda a: "calc.py")
    )
    assert (trajectory.termination, trajectory.reward) == (Termination.FINISHED, 1.0)
    assert trajectory.id == "g.1.1"
    assert trajectory.harness == "tool-agent/1"
    assert [len(t.actions) for t in trajectory.turns] == [1, 1, 1]
    assert [t.observations[0].text for t in trajectory.turns] == ["calc.py", "calc.py", "calc.py"]
    assert [a.tool for a in sessions.opened["g.1.1"].ran] == ["bash", "bash", "submit"]
    for before, after in zip(trajectory.calls, trajectory.calls[1:], strict=False):
        assert after.parent_id == before.id
        assert after.branch_reason is None
        prompt = trajectory.prompt_ids(before.id) + before.generation_token_ids
        assert trajectory.prompt_ids(after.id)[: len(prompt)] == prompt
    text = CHAT.decode(trajectory.prompt_ids(trajectory.calls[2].id))
    assert text.count("<tool_response>\ncalc.py\n</tool_response>") == 2
    assert text.count("<|im_start|>assistant\n") == 3
    assert trajectory.metadata["generated_tokens"] == sum(
        len(c.generation_token_ids) for c in trajectory.calls
    )


def test_a_reply_without_a_call_is_a_final_answer() -> None:
    trajectory, sessions = attempt(scripted("It is fixed."))
    assert trajectory.termination is Termination.FINISHED
    assert trajectory.turns[0].actions == ()
    assert sessions.opened["g.1.1"].finalized == [Termination.FINISHED]


def test_malformed_calls_are_answered_never_run_and_end_the_attempt_when_they_repeat() -> None:
    """SRV-06: tokens stay in the record with the call; the tool ran 0 times."""
    trajectory, sessions = attempt(scripted(BROKEN))
    assert (trajectory.termination, trajectory.reward) == (Termination.FORMAT, 1.0)
    assert sessions.opened["g.1.1"].ran == []
    assert len(trajectory.calls) == 3
    assert all(t.observations[0].is_error for t in trajectory.turns)
    assert "Nothing was run" in CHAT.decode(trajectory.prompt_ids(trajectory.calls[1].id))
    for call in trajectory.calls:
        assert CHAT.decode(call.generation_token_ids) == BROKEN + "<|im_end|>"


def test_one_usable_call_forgives_the_unusable_ones_before() -> None:
    trajectory, _ = attempt(scripted(BROKEN, BROKEN, LS, BROKEN, BROKEN, SUBMIT))
    assert trajectory.termination is Termination.FINISHED
    assert len(trajectory.calls) == 6


def test_a_turn_of_several_calls_is_performed_in_order() -> None:
    trajectory, sessions = attempt(scripted(LS + BROKEN + "</tool_call>" + LS, SUBMIT))
    first = trajectory.turns[0]
    assert [a.error is None for a in first.actions] == [True, False, True]
    assert [o.action_id for o in first.observations] == [a.id for a in first.actions]
    assert [a.tool for a in sessions.opened["g.1.1"].ran] == ["bash", "bash", "submit"]


# -------------------------------------------------------------------------------------------------- budgets


@pytest.mark.parametrize(
    ("generated", "prompt", "expected"), [(10, 8, 14), (10, 20, 10), (24, 8, 0), (30, 8, 0), (0, 50, 0)]
)
def test_remaining_tokens_count_what_was_generated_and_what_the_context_holds(
    generated: int, prompt: int, expected: int
) -> None:
    """SRV-09: max_new 24, context 40."""
    assert (
        remaining_tokens(max_new=24, generated=generated, context=40, occupied=prompt + generated) == expected
    )


def test_the_turn_budget_ends_the_attempt_and_the_state_is_graded() -> None:
    trajectory, sessions = attempt(scripted(LS), max_turns=3)
    assert (trajectory.termination, trajectory.reward) == (Termination.MAX_TURNS, 1.0)
    assert len(trajectory.calls) == len(trajectory.turns) == 3
    assert sessions.opened["g.1.1"].finalized == [Termination.MAX_TURNS]


def test_the_token_budget_counts_over_the_whole_trajectory() -> None:
    per_call = len(CHAT.encode_reply(LS))
    trajectory, sessions = attempt(scripted(LS), max_tokens=2 * per_call + 5)
    assert trajectory.termination is Termination.MAX_TOKENS
    assert [len(c.generation_token_ids) for c in trajectory.calls] == [per_call, per_call, 5]
    assert trajectory.calls[-1].finish_reason is FinishReason.LENGTH
    assert len(sessions.opened["g.1.1"].ran) == 2, "what was cut is not acted on"
    assert trajectory.turns[-1].observations == ()


def test_a_full_context_ends_the_attempt() -> None:
    trajectory, _ = attempt(scripted(LS), FakeSessions(lambda a: "long " * 60), max_context=700)
    assert trajectory.termination is Termination.CONTEXT_FULL
    assert trajectory.reward == 1.0
    for call in trajectory.calls:
        assert len(trajectory.prompt_ids(call.id)) + len(call.generation_token_ids) <= 700
        assert call.sampling.max_tokens <= 700 - len(trajectory.prompt_ids(call.id))


def test_an_engine_with_a_smaller_context_than_thought_is_a_full_context_too() -> None:
    error = ModelError("too long", code="context", retryable=False)
    trajectory, _ = attempt(scripted(LS, error))
    assert trajectory.termination is Termination.CONTEXT_FULL
    trajectory, _ = attempt(scripted(error))
    assert trajectory.termination is Termination.FAULT, "nothing fits: that is not the policy's doing"


def test_a_reply_cut_by_the_limit_of_one_call_is_told_so_and_the_attempt_goes_on() -> None:
    trajectory, sessions = attempt(
        scripted("I think and think and think", SUBMIT),
        settings=replace(SETTINGS, sampling=SamplingParams(max_tokens=len(CHAT.encode_reply(SUBMIT)))),
    )
    if trajectory.calls[0].finish_reason is FinishReason.STOP:
        pytest.skip("the thought fits")
    assert trajectory.termination is Termination.FINISHED
    assert trajectory.turns[0].actions[0].error is not None
    assert "cut off" in trajectory.turns[0].actions[0].error
    assert [a.tool for a in sessions.opened["g.1.1"].ran] == ["submit"]


def test_the_wall_clock_ends_the_attempt_and_the_partial_state_is_graded() -> None:
    """ENV-02: timed out and tests pass is reward 1 with the reason kept."""

    async def slow(request: SampleRequest) -> str:
        await asyncio.sleep(30)
        return LS

    for reward in (1.0, 0.0):
        sessions = FakeSessions(reward=reward)
        trajectory, _ = attempt(scripted(LS, slow), sessions, wall_s=0.3)
        assert (trajectory.termination, trajectory.reward) == (Termination.WALL_CLOCK, reward)
        assert len(trajectory.turns) == 1


def test_a_model_that_is_silent_before_the_wall_clock_is_a_fault_of_the_model() -> None:
    async def slow(request: SampleRequest) -> str:
        await asyncio.sleep(30)
        return LS

    trajectory, _ = attempt(scripted(slow), settings=replace(SETTINGS, sample_deadline_s=0.05), wall_s=20)
    assert trajectory.termination is Termination.FAULT
    assert trajectory.verdict.fault is not None
    assert (trajectory.verdict.fault.owner, trajectory.verdict.fault.code) == ("model", "deadline")


# --------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("error", "owner", "code"),
    [
        (SandboxLost("gone"), "environment", "sandbox_lost"),
        (SandboxError("no", code="no_answer"), "environment", "no_answer"),
        (SandboxError("no", owner="policy", code="broke_its_sandbox"), "policy", "broke_its_sandbox"),
        (TaskError("bad package"), "task", "task"),
        (EvidenceError("prefix broke"), "gateway", "evidence"),
        (KeyError("our bug"), "gateway", "internal"),
    ],
)
def test_the_owner_of_a_fault_is_read_off_the_exception(error: Exception, owner: str, code: str) -> None:
    trajectory, _ = attempt(scripted(LS), FakeSessions(raising(error)))
    assert trajectory.verdict.fault is not None
    assert (trajectory.verdict.fault.owner, trajectory.verdict.fault.code) == (owner, code)
    assert len(trajectory.calls) == 1, "what was sampled before is kept"
    assert trajectory.turns[0].observations == ()
    if owner != "policy":
        assert trajectory.termination is Termination.FAULT
        assert trajectory.reward is None
    else:
        assert trajectory.reward == 1.0


@pytest.mark.parametrize("phase", ["prepare", "create"])
def test_a_session_that_never_opens_leaves_a_signed_verdict_without_reward(phase: str) -> None:
    def opening(session_id: str) -> None:
        raise SandboxError("no sandbox", code="create", phase=phase)

    trajectory, sessions = attempt(scripted(LS), FakeSessions(opening=opening))
    assert sessions.opened == {}
    assert (trajectory.termination, trajectory.reward, trajectory.calls) == (Termination.FAULT, None, ())
    assert trajectory.verdict.fault is not None
    assert trajectory.verdict.fault.phase == phase
    assert verify_signature(trajectory.verdict, KEY)
    assert all(e.holds is None for e in trajectory.verdict.evidence)


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("echo", lambda r: replace(r, prompt_token_ids=r.prompt_token_ids[:-1])),
        ("empty_generation", lambda r: replace(r, token_ids=())),
        ("no_log_probs", lambda r: r),
        ("phantom_token", lambda r: replace(r, token_ids=(*r.token_ids[:-1], 10**6))),
        ("aborted", lambda r: replace(r, finish_reason=FinishReason.ABORT)),
    ],
)
def test_an_answer_that_is_no_evidence_ends_the_attempt_at_its_first_call(
    code: str, change: Callable[[SampleResult], SampleResult]
) -> None:
    """SRV-04: one call made, not 816."""
    honest = scripted(LS)
    made = 0

    class Changed:
        model = "changed"
        policy_version = None

        async def sample(self, request: SampleRequest) -> SampleResult:
            nonlocal made
            made += 1
            return change(await honest.sample(request))

        async def close(self) -> None:
            pass

    trajectory, sessions = attempt(
        Changed(), settings=replace(SETTINGS, require_log_probs=code == "no_log_probs")
    )
    assert made == 1
    assert trajectory.verdict.fault is not None
    assert (trajectory.verdict.fault.owner, trajectory.verdict.fault.code) == ("model", code)
    assert trajectory.reward is None
    assert sessions.opened["g.1.1"].ran == []


def test_the_users_mistake_is_not_recorded_as_an_attempt() -> None:
    sessions = FakeSessions(raising(ConfigError("wrong key")))
    with pytest.raises(ConfigError):
        attempt(scripted(LS), sessions)
    assert sessions.live == 0


def test_finalizing_that_fails_leaves_no_reward() -> None:
    class Failing(FakeSessions):
        async def __call__(self, *args: Any, **kwargs: Any) -> Any:
            session = await super().__call__(*args, **kwargs)

            async def finalize(**kwargs: Any) -> Any:
                raise SandboxLost("gone while grading", phase="verify")

            session.finalize = finalize
            return session

    trajectory, _ = attempt(scripted(SUBMIT), Failing())
    assert (trajectory.termination, trajectory.reward) == (Termination.FINISHED, None)
    assert trajectory.verdict.fault is not None
    assert trajectory.verdict.fault.phase == "verify"


class Unjudged(FakeSessions):
    """Sessions that can not be finalized."""

    def __init__(self, error: Exception, respond: Callable[[Action], str] = lambda action: "ok") -> None:
        super().__init__(respond)
        self._error = error

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session = await super().__call__(*args, **kwargs)

        async def finalize(**kwargs: Any) -> Any:
            raise self._error

        session.finalize = finalize  # type: ignore[method-assign]
        return session


def test_an_error_of_our_own_in_a_verdict_is_recorded_and_ends_nobody_elses_attempt() -> None:
    trajectory, _ = attempt(scripted(SUBMIT), Unjudged(OSError(24, "Too many open files")))
    assert trajectory.reward is None
    assert trajectory.verdict.fault is not None
    assert (trajectory.verdict.fault.owner, trajectory.verdict.fault.code) == ("gateway", "internal")


def test_what_fails_while_a_scored_fault_is_judged_is_not_the_policys() -> None:
    broke = SandboxError("it filled its disk", owner="policy", code="disk_quota", retryable=False)
    trajectory, _ = attempt(
        scripted(LS), Unjudged(SandboxLost("gone while grading", phase="verify"), raising(broke))
    )
    assert trajectory.reward is None
    assert trajectory.verdict.fault is not None
    assert trajectory.verdict.fault.owner == "environment"


# ----------------------------------------------------------------------------------------------- cancellation


@pytest.mark.parametrize("where", ["model", "tool"])
def test_cancelling_closes_the_session_and_passes_through(where: str) -> None:
    """ENV-03: nothing is left alive, and close() failing does not replace the cancellation."""

    async def whole() -> None:
        reached = asyncio.Event()

        async def hang(request: SampleRequest) -> str:
            reached.set()
            await asyncio.sleep(60)
            return LS

        class Hanging(FakeSessions):
            async def __call__(self, *args: Any, **kwargs: Any) -> Any:
                session = await super().__call__(*args, **kwargs)

                async def call(action: Action) -> Any:
                    reached.set()
                    await asyncio.sleep(60)

                async def close() -> None:
                    session.closed += 1
                    await asyncio.sleep(0.01)
                    session.closed += 1
                    raise ConnectionError("close failed")

                session.call, session.close = call, close
                return session

        sessions = Hanging()
        running = asyncio.create_task(
            run_one(
                task(),
                sampler=scripted(hang if where == "model" else LS),
                chat=CHAT,
                backend=NoBackend(),
                group_id="g",
                index=0,
                signing_key=KEY,
                settings=SETTINGS,
                open_session=sessions,
            )
        )
        await asyncio.wait_for(reached.wait(), 5)
        running.cancel()
        await asyncio.sleep(0)
        running.cancel()  # a second Ctrl-C does not interrupt the closing
        with pytest.raises(asyncio.CancelledError):
            await running
        assert [s.closed for s in sessions.opened.values()] == [2]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(whole())


# ----------------------------------------------------------------------------------------------- other agents


class Compacting:
    """Forgets everything but a summary after its first call, and asks a sub-agent."""

    name = "compacting/1"

    async def run(self, attempt: Attempt) -> Termination:
        main = attempt.conversation([{"role": "user", "content": "Fix the bug in add."}])
        reply = await attempt.ask(main)
        await attempt.act(reply)
        helper = attempt.conversation(
            [{"role": "user", "content": "Look."}], tools=(), reason=BranchReason.SUB_AGENT
        )
        await attempt.ask(helper)
        main.rewrite([{"role": "user", "content": "Summary: listed files."}], BranchReason.COMPACTION)
        await attempt.ask(main)
        return Termination.FINISHED


def test_compaction_and_sub_agents_are_branches_with_their_reasons() -> None:
    trajectory, _ = attempt(scripted(LS), agent=Compacting())
    first, helper, after = trajectory.calls
    assert (helper.parent_id, helper.branch_reason) == (None, BranchReason.SUB_AGENT)
    assert (after.parent_id, after.branch_reason) == (first.id, BranchReason.COMPACTION)
    assert after.prompt_keep < len(trajectory.prompt_ids(first.id)) + len(first.generation_token_ids)
    assert "Summary" in CHAT.decode(trajectory.prompt_ids(after.id))
    assert "Summary" not in CHAT.decode(trajectory.prompt_ids(helper.id))
    assert trajectory.harness == "compacting/1"


def test_dropped_reasoning_keeps_every_sampled_token_and_says_why_it_branched() -> None:
    """TOK-11: what turn 1 sampled stays in the record, though the template forgets the thought."""
    chat = ChatFormat(tokenizer("reasoning"))
    thought = "<think>add not sub</think>Done."

    class Asking:
        name = "asking/1"

        async def run(self, attempt: Attempt) -> Termination:
            talk = attempt.conversation([{"role": "user", "content": "Fix it."}])
            await attempt.ask(talk)
            talk.add({"role": "user", "content": "Sure?"})
            await attempt.ask(talk)
            return Termination.FINISHED

    sessions = FakeSessions()
    trajectory = asyncio.run(
        run_one(
            task(),
            sampler=ScriptedSampler(lambda r, n: thought, encode=chat.encode_reply),
            chat=chat,
            backend=NoBackend(),
            group_id="g",
            index=0,
            signing_key=KEY,
            settings=SETTINGS,
            agent=Asking(),
            open_session=sessions,
        )
    )
    first, second = trajectory.calls
    assert first.generation_token_ids == chat.encode_reply(thought)
    assert second.branch_reason is BranchReason.REASONING_DROPPED
    text = chat.decode(trajectory.prompt_ids(second.id))
    assert "not sub" not in text
    assert "Sure?" in text


def test_the_loop_is_limited_to_the_format_errors_it_is_told() -> None:
    trajectory, _ = attempt(scripted(BROKEN), agent=ToolAgent(max_format_errors=1))
    assert len(trajectory.calls) == 1
