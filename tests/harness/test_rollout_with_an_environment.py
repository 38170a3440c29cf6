"""The harness on tool environments: nothing of it knows that there is no sandbox."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tiny_tokenizer import tokenizer

from agentrl.errors import ModelError
from agentrl.inference.sampler import SampleRequest
from agentrl.inference.scripted import ScriptedSampler
from agentrl.types import Task, Termination, Trajectory
from envs import registry
from envs.builtin.simulated import User
from envs.environment import ToolEnvironment, of_class
from envs.inprocess import EnvironmentSession
from envs.inprocess import admit as admit_here
from harness.chat import ChatFormat
from harness.gold import GoldDemonstrator, written
from harness.rollout import OpenSession, RolloutSettings, run_one
from harness.speaker import SampledSpeaker


class NoBackend:
    name = "none"
    isolation = "none"


def attempt(task: Task, script: Any, chat: ChatFormat, *, open_session: OpenSession) -> Trajectory:
    async def whole() -> Trajectory:
        found = registry.of_task(task)
        assert found is not None
        return await run_one(
            task,
            sampler=ScriptedSampler(script, encode=chat.encode_reply),
            chat=chat,
            backend=NoBackend(),  # type: ignore[arg-type]
            group_id="g",
            index=0,
            signing_key=b"key",
            admission=await admit_here(task, found, backend="none", light=True),
            settings=RolloutSettings(require_log_probs=False),
            open_session=open_session,
        )

    return asyncio.run(whole())


@pytest.mark.parametrize("name", ["calculator", "search", "sql", "user", "attempt-verify-revise?scheme=pag"])
def test_the_solution_makes_a_trajectory_with_the_reward(name: str) -> None:
    found = registry.get(name)
    assert isinstance(found, ToolEnvironment)
    chat = ChatFormat(tokenizer("chatml"))
    task = found.task(7)
    script = GoldDemonstrator(found.problem(7), seed="s", spoiled_share=0.0)
    trajectory = attempt(task, script, chat, open_session=registry.open_session)
    assert trajectory.termination is Termination.FINISHED
    assert trajectory.reward is not None
    assert trajectory.reward >= 1.0
    assert trajectory.verdict.isolation == "none"


def test_spoiled_solutions_fail_and_half_of_them_are_spoiled() -> None:
    found = registry.get("calculator")
    assert isinstance(found, ToolEnvironment)
    problem = found.problem(7)
    right = written(problem.gold[-1])
    request: Any = None
    last = [GoldDemonstrator(problem, seed=str(seed))(request, 1) for seed in range(200)]
    assert 70 < sum(line == right for line in last) < 130


def test_what_a_search_returns_is_in_a_prompt_and_never_in_a_generation() -> None:
    found = registry.get("search")
    assert isinstance(found, ToolEnvironment)
    chat = ChatFormat(tokenizer("chatml"))
    script = GoldDemonstrator(found.problem(7), seed="s", spoiled_share=0.0)
    trajectory = attempt(found.task(7), script, chat, open_session=registry.open_session)
    shown = trajectory.turns[0].observations[0].text
    assert shown.startswith("[")
    assert shown in chat.decode(trajectory.calls[1].prompt_delta)
    assert all(shown not in chat.decode(call.generation_token_ids) for call in trajectory.calls)


def bound(environment: ToolEnvironment) -> OpenSession:
    async def open_session(task: Task, backend: Any, **facts: Any) -> EnvironmentSession:
        return await EnvironmentSession.open(task, environment, **facts)

    return open_session


def test_a_sampled_user_hears_the_policy_and_answers_in_its_persona() -> None:
    chat = ChatFormat(tokenizer("chatml"))
    heard: list[str] = []

    def user(request: SampleRequest, number: int) -> str:
        heard.append(chat.decode(request.prompt_token_ids))
        return "To the sea."

    speaker = SampledSpeaker(ScriptedSampler(user, encode=chat.encode_reply, name="user"), chat)
    environment = of_class(User).with_options(speaker=speaker)
    script = GoldDemonstrator(environment.problem(7), seed="s", spoiled_share=0.0)
    trajectory = attempt(environment.task(7), script, chat, open_session=bound(environment))
    assert trajectory.reward == 1.0
    assert trajectory.turns[0].observations[0].text == "To the sea."
    assert "You want to book a train ticket" in heard[0]
    assert "Where do you want to go?" in heard[0]
    assert heard[1].count("To the sea.") == 1


def test_a_user_whose_model_fails_is_a_fault_of_the_model() -> None:
    chat = ChatFormat(tokenizer("chatml"))

    def user(request: SampleRequest, number: int) -> str:
        raise ModelError("the engine is gone.", code="gone", phase="sample")

    speaker = SampledSpeaker(ScriptedSampler(user, encode=chat.encode_reply, name="user"), chat)
    environment = of_class(User).with_options(speaker=speaker)
    script = GoldDemonstrator(environment.problem(7), seed="s", spoiled_share=0.0)
    trajectory = attempt(environment.task(7), script, chat, open_session=bound(environment))
    assert trajectory.termination is Termination.FAULT
    assert trajectory.reward is None
    assert trajectory.verdict.fault is not None
    assert (trajectory.verdict.fault.owner, trajectory.verdict.fault.code) == ("model", "gone")
