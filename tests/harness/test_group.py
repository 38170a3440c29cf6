"""Groups: the same task several times, faulted members again, and a stream of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing
from itertools import count
from typing import Any

import pytest
from fake_session import KEY, FakeSessions, NoBackend, task
from tiny_tokenizer import tokenizer

from agentrl.errors import ConfigError, ModelError, SandboxError, TaskError
from agentrl.inference.scripted import ScriptedSampler
from agentrl.types import Task, Trajectory
from harness.chat import ChatFormat
from harness.group import GroupRequest, MakeAttempt, run, run_many
from harness.rollout import RolloutSettings, run_one

SUBMIT = '<tool_call>{"name": "submit", "arguments": {}}</tool_call>'
CHAT = ChatFormat(tokenizer("chatml"))


def maker(sessions: FakeSessions, says: Any = lambda r, n: SUBMIT) -> MakeAttempt:
    sampler = ScriptedSampler(says, encode=CHAT.encode_reply)

    async def make(given: Task, group_id: str, index: int, attempt: int) -> Trajectory:
        return await run_one(
            given,
            sampler=sampler,
            chat=CHAT,
            backend=NoBackend(),
            group_id=group_id,
            index=index,
            attempt=attempt,
            signing_key=KEY,
            settings=RolloutSettings(require_log_probs=False),
            open_session=sessions,
        )

    return make


def request(name: str = "g", size: int = 4) -> GroupRequest:
    return GroupRequest(id=name, task=task(), size=size)


def test_a_group_has_every_member_once_under_one_group_id() -> None:
    """TRJ-02: the size that was asked for, one key."""
    sessions = FakeSessions()
    outcome = asyncio.run(run(request(), maker(sessions)))
    assert [t.index for t in outcome.group.trajectories] == [0, 1, 2, 3]
    assert {t.group_id for t in outcome.group.trajectories} == {"g"}
    assert outcome.faulted == ()
    assert sessions.live == 0


def test_only_the_faulted_member_is_run_again_and_its_first_attempt_is_handed_back() -> None:
    def opening(session_id: str) -> None:
        if session_id == "g.2.1":
            raise SandboxError("no sandbox", code="create")

    outcome = asyncio.run(run(request(), maker(FakeSessions(opening=opening))))
    assert [t.id for t in outcome.group.trajectories] == ["g.0.1", "g.1.1", "g.2.2", "g.3.1"]
    assert [t.reward for t in outcome.group.trajectories] == [1.0] * 4
    assert [t.id for t in outcome.faulted] == ["g.2.1"]
    assert outcome.group.trajectories[2].metadata["attempt"] == 2
    assert len(outcome.trajectories) == 5


def test_a_member_that_faults_every_time_stays_without_a_reward() -> None:
    def opening(session_id: str) -> None:
        if session_id.startswith("g.1."):
            raise SandboxError("no sandbox", code="create")

    outcome = asyncio.run(run(request(), maker(FakeSessions(opening=opening))))
    assert [t.id for t in outcome.faulted] == ["g.1.1", "g.1.2"]
    assert outcome.group.trajectories[1].id == "g.1.3"
    assert outcome.group.trajectories[1].reward is None


@pytest.mark.parametrize(
    "error",
    [TaskError("gold fails"), SandboxError("no", retryable=False), SandboxError("own", owner="policy")],
)
def test_what_another_try_would_not_change_is_not_tried_again(error: Exception) -> None:
    def respond(action: Any) -> str:
        raise error

    outcome = asyncio.run(run(request(), maker(FakeSessions(respond))))
    assert outcome.faulted == ()
    assert [t.metadata["attempt"] for t in outcome.group.trajectories] == [1] * 4


def test_a_fault_of_the_model_is_run_again_as_a_whole() -> None:
    failed: Counter[str] = Counter()

    def says(sample: Any, number: int) -> str:
        if sample.session == "g.0.1":
            failed[sample.session] += 1
            raise ModelError("connection reset", code="connection")
        return SUBMIT

    outcome = asyncio.run(run(request(size=2), maker(FakeSessions(), says)))
    assert failed == {"g.0.1": 1}
    assert [t.id for t in outcome.group.trajectories] == ["g.0.2", "g.1.1"]


def test_a_users_mistake_ends_the_group_and_closes_the_others() -> None:
    def respond(action: Any) -> str:
        raise ConfigError("wrong key")

    sessions = FakeSessions(respond)
    with pytest.raises(ConfigError):
        asyncio.run(run(request(), maker(sessions)))
    assert sessions.live == 0


def test_many_groups_come_as_they_finish_within_the_bound() -> None:
    running = most = 0

    async def whole() -> Counter[str]:
        sessions = FakeSessions()
        make = maker(sessions)

        async def counted(given: Task, group_id: str, index: int, attempt: int) -> Trajectory:
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                await asyncio.sleep(0.001 * (index + 1))
                return await make(given, group_id, index, attempt)
            finally:
                running -= 1

        seen: Counter[str] = Counter()
        async for outcome in run_many((request(f"g{n}", 3) for n in range(7)), counted, concurrency=4):
            seen.update(t.id for t in outcome.trajectories)
        assert sessions.live == 0
        return seen

    seen = asyncio.run(whole())
    assert seen == {f"g{n}.{i}.1": 1 for n in range(7) for i in range(3)}, "each exactly once"
    assert most == 4


def test_an_endless_source_is_taken_from_only_as_there_is_room_and_stops_clean() -> None:
    taken = 0

    def source() -> Any:
        nonlocal taken
        for n in count():
            taken += 1
            yield request(f"g{n}", 2)

    async def whole() -> None:
        sessions = FakeSessions()
        outcomes = 0
        async with aclosing(run_many(source(), maker(sessions), concurrency=4)) as stream:
            async for _ in stream:
                outcomes += 1
                assert taken <= outcomes + 4
                if outcomes == 5:
                    break
        assert sessions.live == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(whole())


def test_cancelling_the_consumer_closes_every_session() -> None:
    async def whole() -> None:
        async def hang(sample: Any) -> str:
            await asyncio.sleep(60)
            return SUBMIT

        sessions = FakeSessions()

        async def consume() -> None:
            make = maker(sessions, lambda r, n: hang(r))
            async with aclosing(run_many([request("a", 3), request("b", 3)], make, concurrency=4)) as stream:
                async for _ in stream:
                    pass

        consuming = asyncio.create_task(consume())
        await asyncio.sleep(0.05)
        assert sessions.live == 4
        consuming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consuming
        assert sessions.live == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(whole())
