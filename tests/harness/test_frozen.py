"""A chat endpoint that speaks OpenAI's protocol on loopback, evaluated like a policy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fake_session import KEY, FakeSessions, NoBackend, task
from tiny_tokenizer import tokenizer

from agentrl.errors import ModelError
from agentrl.inference.openai import ChatEndpoint
from agentrl.learner.samples import build
from agentrl.types import Termination, Trajectory
from harness.chat import ChatFormat
from harness.frozen import FrozenPolicy
from harness.rollout import RolloutSettings, run_one

Reply = dict[str, Any] | int | None


def message(text: str, *calls: tuple[str, str], finish: str = "stop") -> dict[str, Any]:
    wire = [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return {
        "choices": [{"message": {"content": text, "tool_calls": wire}, "finish_reason": finish}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }


def with_endpoint(
    replies: list[Reply], work: Callable[[ChatEndpoint, list[dict[str, Any]]], Awaitable[Any]]
) -> Any:
    """Serve `replies` one after the other (a number: that status; None: the connection breaks)."""
    asked: list[dict[str, Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        length = 0
        await reader.readline()
        while (header := await reader.readline()).strip():
            name, _, value = header.decode().partition(":")
            length = int(value) if name.lower() == "content-length" else length
        asked.append(json.loads(await reader.readexactly(length)))
        reply = replies.pop(0)
        if reply is not None:
            code, body = (reply, {"error": "injected"}) if isinstance(reply, int) else (200, reply)
            data = json.dumps(body).encode()
            head = f"HTTP/1.1 {code} X\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n"
            writer.write(head.encode() + data)
            await writer.drain()
        writer.close()

    async def whole() -> Any:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        endpoint = ChatEndpoint(f"http://127.0.0.1:{port}/v1/", model="judge", key="k")
        try:
            async with asyncio.timeout(30):
                return await work(endpoint, asked)
        finally:
            await endpoint.close()
            server.close()
            await server.wait_closed()

    return asyncio.run(whole())


def attempt(family: str, replies: list[Reply]) -> tuple[Trajectory, list[dict[str, Any]], FakeSessions]:
    chat = ChatFormat(tokenizer(family))
    sessions = FakeSessions(lambda action: "calc.py")

    async def work(endpoint: ChatEndpoint, asked: list[dict[str, Any]]) -> Any:
        frozen = FrozenPolicy(endpoint, chat)
        made = await run_one(
            task(),
            sampler=frozen.sampler,
            chat=chat,
            backend=NoBackend(),
            group_id="g",
            index=0,
            signing_key=KEY,
            settings=RolloutSettings(require_log_probs=False),
            agent=frozen.agent,
            open_session=sessions,
        )
        return made, asked, sessions

    found: tuple[Trajectory, list[dict[str, Any]], FakeSessions] = with_endpoint(replies, work)
    return found


@pytest.mark.parametrize("family", ["chatml", "mistral", "smollm"])
def test_an_endpoint_is_evaluated_like_a_policy(family: str) -> None:
    trajectory, asked, sessions = attempt(
        family,
        [
            message("Let me see.", ("bash", '{"command": "ls"}'), ("bash", '{"command": "id"}')),
            message("", ("submit", "{}")),
        ],
    )
    assert trajectory.termination is Termination.FINISHED
    assert trajectory.reward == 1.0
    assert trajectory.harness == "tool-agent/1+frozen"
    assert [a.tool for a in sessions.opened["g.0.1"].ran] == ["bash", "bash", "submit"]
    assert [call.model for call in trajectory.calls] == ["judge", "judge"]
    assert asked[0]["tools"][0]["function"]["name"] == "bash"
    second = asked[1]["messages"]
    assert [m["role"] for m in second][-3:] == ["assistant", "tool", "tool"]
    ids = [call["id"] for call in second[-3]["tool_calls"]]
    assert [m["tool_call_id"] for m in second[-2:]] == ids
    assert second[-3]["content"] == "Let me see."
    assert json.loads(second[-3]["tool_calls"][0]["function"]["arguments"]) == {"command": "ls"}


def test_nothing_that_a_frozen_model_said_can_enter_a_policy_loss() -> None:
    trajectory, _, _ = attempt("chatml", [message("It is fixed.")])
    (call,) = trajectory.calls
    assert (call.generation_log_probs, call.policy_versions) == (None, ())
    assert not build(trajectory).valid_N.any()


def test_arguments_that_are_no_json_are_answered_and_the_next_request_is_valid() -> None:
    """SRV-06 for an endpoint: the tool runs 0 times, the call has its reply, the attempt goes on."""
    trajectory, asked, sessions = attempt(
        "chatml", [message("", ("bash", '{"command": "ls')), message("Done.")]
    )
    assert trajectory.termination is Termination.FINISHED
    assert sessions.opened["g.0.1"].ran == []
    assert trajectory.turns[0].observations[0].is_error
    reply, heard = asked[1]["messages"][-2:]
    assert json.loads(reply["tool_calls"][0]["function"]["arguments"]) == {}
    assert heard["tool_call_id"] == reply["tool_calls"][0]["id"]
    assert "Nothing was run" in heard["content"]


def test_lost_tries_are_repeated_and_a_refused_request_is_not() -> None:
    async def twice(endpoint: ChatEndpoint, asked: list[dict[str, Any]]) -> int:
        reply = await endpoint.complete([{"role": "user", "content": "x"}], max_tokens=5)
        assert (reply.text, reply.calls, reply.cut) == ("yes", (), False)
        assert asked[-1]["max_tokens"] == 5
        return len(asked)

    assert with_endpoint([503, None, 429, message("yes")], twice) == 4

    async def once(endpoint: ChatEndpoint, asked: list[dict[str, Any]]) -> None:
        with pytest.raises(ModelError, match="refused it with 404") as caught:
            await endpoint.complete([{"role": "user", "content": "x"}])
        assert not caught.value.retryable
        assert len(asked) == 1

    with_endpoint([404], once)


def test_an_endpoint_that_is_none_and_one_that_never_answers_are_named() -> None:
    async def strange(endpoint: ChatEndpoint, asked: list[dict[str, Any]]) -> None:
        with pytest.raises(ModelError, match="does not answer as a chat endpoint does"):
            await endpoint.complete([{"role": "user", "content": "x"}])

    with_endpoint([{"object": "list"}], strange)

    async def never(endpoint: ChatEndpoint, asked: list[dict[str, Any]]) -> None:
        with pytest.raises(ModelError, match=r"waiting for judge since 1\.5 s: 503") as caught:
            await endpoint.complete([{"role": "user", "content": "x"}], deadline_s=1.5)
        assert caught.value.code == "deadline"

    with_endpoint([503] * 20, never)
