"""A request that is sent again is the same request; equal requests that are no retries are not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from proxied import Proxy

from agentrl.errors import ModelError
from harness.proxy.model import Rules

BODY = {"model": "m", "messages": [{"role": "user", "content": "Go"}]}
PATH = "v1/chat/completions"


def text(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def numbered(**more: Any) -> Proxy:
    return Proxy(script=lambda request, number: f"reply {number}", **more)


@pytest.mark.parametrize("headers", [{"idempotency-key": "k"}, {"x-stainless-retry-count": "1"}, {}])
def test_a_retry_joins_what_is_running_and_repeats_what_was_answered(headers: dict[str, str]) -> None:
    proxy = numbered(delay_s=0.05)
    proxy.live.door._retries.clock = lambda: 0.0

    async def talk() -> list[str]:
        first = asyncio.create_task(proxy.post(PATH, BODY, **headers))
        await asyncio.sleep(0.01)
        second = await proxy.post(PATH, BODY, **headers)
        third = await proxy.post(PATH, BODY, **headers)
        return [text(answer) for _, answer in (await first, second, third)]

    assert asyncio.run(talk()) == ["reply 0"] * 3
    assert len(proxy.calls) == len(proxy.engine.requests) == 1


def test_equal_requests_that_say_they_are_no_retries_are_separate_samples() -> None:
    proxy = numbered(delay_s=0.02)

    async def talk() -> set[str]:
        both = await asyncio.gather(
            *(proxy.post(PATH, BODY, **{"x-stainless-retry-count": "0"}) for _ in "ab")
        )
        return {text(answer) for _, answer in both}

    assert asyncio.run(talk()) == {"reply 0", "reply 1"}


def test_without_a_count_an_answer_is_repeated_only_just_after_it_was_given() -> None:
    proxy = numbered()
    now = [100.0]
    proxy.live.door._retries.clock = lambda: now[0]

    async def talk() -> list[str]:
        said = []
        for passed in (0.0, 4.0, 6.0):
            now[0] += passed
            said.append(text((await proxy.post(PATH, BODY))[1]))
        return said

    assert asyncio.run(talk()) == ["reply 0", "reply 0", "reply 1"]
    assert [str(c.branch_reason) for c in proxy.calls] == ["None", "resampled"]


def test_a_key_that_comes_with_another_body_is_refused() -> None:
    proxy = numbered()

    async def talk() -> tuple[int, Any]:
        await proxy.post(PATH, BODY, **{"idempotency-key": "k"})
        return await proxy.post(PATH, {**BODY, "max_tokens": 5}, **{"idempotency-key": "k"})

    status, answer = asyncio.run(talk())
    assert (status, answer["error"]["code"]) == (409, "idempotency_key_reused")


def test_a_failed_request_is_tried_again_and_not_repeated() -> None:
    failing = [True]

    def script(request: Any, number: int) -> str:
        if failing.pop() if failing else False:
            raise ModelError("the engine fell over.", code="engine")
        return "fine"

    proxy = Proxy(script=script)

    async def talk() -> tuple[int, int]:
        first, _ = await proxy.post(PATH, BODY, **{"x-stainless-retry-count": "0"})
        second, _ = await proxy.post(PATH, BODY, **{"x-stainless-retry-count": "1"})
        return first, second

    assert asyncio.run(talk()) == (503, 200)
    assert proxy.facts()["refused_engine"] == 1


def test_an_engine_that_says_the_prompt_is_too_long_ends_nothing() -> None:
    said = ["short enough"]

    def script(request: Any, number: int) -> str:
        if number == 0:
            raise ModelError("the prompt has 10 tokens of 5.", code="context")
        return said[0]

    proxy = Proxy(script=script, rules=Rules())

    async def talk() -> tuple[int, Any, int]:
        status, answer = await proxy.post(PATH, BODY)
        return status, answer["error"]["code"], (await proxy.post(PATH, BODY))[0]

    assert asyncio.run(talk()) == (400, "context_length_exceeded", 200)
    assert not proxy.live.door.model.context_full, "the next request fitted"


def test_in_an_attempt_a_fault_of_the_model_ends_the_session_for_good() -> None:
    def script(request: Any, number: int) -> str:
        raise ModelError("the engine fell over.", code="engine")

    proxy = Proxy(script=script, rules=Rules())

    async def talk() -> list[int]:
        return [(await proxy.post(PATH, BODY))[0] for _ in range(2)]

    assert asyncio.run(talk()) == [500, 500]
    assert proxy.live.door.model.over.is_set()
    assert len(proxy.engine.requests) == 1


def test_the_last_client_to_leave_takes_the_sampling_with_it() -> None:
    proxy = numbered(delay_s=300.0)

    async def talk() -> tuple[int, int]:
        clients = [asyncio.create_task(proxy.post(PATH, BODY)) for _ in range(2)]
        await asyncio.sleep(0.01)
        clients[0].cancel()
        await asyncio.sleep(0.01)
        one_left = proxy.engine.cancelled
        clients[1].cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        await asyncio.sleep(0.01)
        return one_left, proxy.engine.cancelled

    assert asyncio.run(talk()) == (0, 1)
    assert proxy.calls == ()


def test_a_stream_that_waits_shows_signs_of_life_and_then_the_whole_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("harness.proxy.door.FIRST_BYTE_S", 0.01)
    monkeypatch.setattr("harness.proxy.door.PING_S", 0.02)
    proxy = numbered(delay_s=0.5)
    status, said = asyncio.run(proxy.post(PATH, {**BODY, "stream": True}))
    assert status == 200
    assert said.startswith(": waiting\n\n")
    assert said.endswith("data: [DONE]\n\n")
    assert "reply 0" in said


def test_a_failure_after_the_stream_began_is_an_error_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.proxy.door.FIRST_BYTE_S", 0.01)

    def script(request: Any, number: int) -> str:
        raise ModelError("the engine fell over.", code="engine")

    proxy = Proxy(script=script, delay_s=0.4)
    body = {"model": "m", "max_tokens": 9, "messages": BODY["messages"], "stream": True}
    _, openai_said = asyncio.run(proxy.post(PATH, body))
    _, anthropic_said = asyncio.run(proxy.post("v1/messages", body))
    assert '"code":"engine"' in openai_said
    assert "event: error\n" in anthropic_said


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"{", b'"x"', b'{"messages": 5}', b'{"messages": []}', b'{"messages": [{"role": "x"}]}',
     b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
     b'{"messages": [{"role": "user", "content": "a"}], "n": 0}',
     b'{"messages": [{"role": "user", "content": "a"}], "n": true}',
     b'{"messages": [{"role": "user", "content": "a"}], "stop": [""]}',
     b'{"messages": [{"role": "user", "content": "a"}], "temperature": 9}',
     b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}',
     b'{"input": [{"type": "computer_call"}], "prompt": 5, "max_tokens": 5, "messages": [5]}'],
)  # fmt: skip
@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
def test_a_body_that_is_not_one_is_a_refusal_in_the_apis_own_words(path: str, raw: bytes) -> None:
    proxy = numbered()
    status, answer = asyncio.run(proxy.post(f"v1/{path}", raw))
    if status == 200:  # some of these bodies are valid elsewhere
        assert path in ("responses", "messages")
        return
    assert status == 400
    assert answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"
    assert proxy.engine.requests == []
