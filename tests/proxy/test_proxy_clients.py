"""The official clients talk to the proxy: what they get is what a plain server would have sent."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from proxied import CALL, TOOL, Proxy, json_bytes, served

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

USER = {"role": "user", "content": "What is the weather?"}
TWO_CALLS = CALL + "\n" + CALL.replace("Paris", "Rome")


def openai_client(url: str, proxy: Proxy, **more: Any) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=proxy.live.key, **more)


def anthropic_client(url: str, proxy: Proxy, **more: Any) -> Any:
    return anthropic.Anthropic(base_url=url, api_key=proxy.live.key, **more)


def test_an_openai_chat_completion_is_the_object_of_a_plain_server() -> None:
    proxy = Proxy("It is sunny.")
    with served(proxy) as url, openai_client(url, proxy) as client:
        got = client.chat.completions.create(model="gpt-x", messages=[USER])
    call = proxy.calls[0]
    assert got.model_dump(exclude_unset=True) == {
        "id": got.id,
        "object": "chat.completion",
        "created": got.created,
        "model": "gpt-x",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "It is sunny."},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": len(call.prompt_delta),
            "completion_tokens": len(call.generation_token_ids),
            "total_tokens": len(call.prompt_delta) + len(call.generation_token_ids),
        },
    }
    assert call.generation_token_ids[-1] in proxy.chat.stop_token_ids


def gathered(chunks: Any) -> dict[str, Any]:
    """What a stream of chat chunks adds up to, by hand."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk.choices:
            choice = choices.setdefault(part.index, {"content": "", "calls": {}, "finish": None, "logs": 0})
            choice["content"] += part.delta.content or ""
            choice["logs"] += len(part.logprobs.content) if part.logprobs else 0
            choice["finish"] = part.finish_reason or choice["finish"]
            for call in part.delta.tool_calls or []:
                known = choice["calls"].setdefault(call.index, {"id": call.id, "name": "", "arguments": ""})
                known["name"] += call.function.name or ""
                known["arguments"] += call.function.arguments or ""
    return choices


@pytest.mark.parametrize("said", ["It is sunny. " * 20, CALL, "Let me look.\n" + TWO_CALLS])
def test_an_openai_stream_adds_up_to_the_whole_answer_with_every_log_prob_once(said: str) -> None:
    """SRV-01: one log-prob per generated token whatever the channel: text, call, markers, end of turn."""
    proxy = Proxy(said, said)
    with served(proxy) as url, openai_client(url, proxy) as client:
        asked = {"model": "m", "messages": [USER], "tools": [TOOL], "logprobs": True}
        whole = client.chat.completions.create(**asked).choices[0]
        chunks = list(
            client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        )
    streamed = gathered(chunks)[0]
    assert streamed["content"] == (whole.message.content or "")
    assert [(c["name"], c["arguments"]) for c in streamed["calls"].values()] == [
        (c.function.name, c.function.arguments) for c in whole.message.tool_calls or []
    ]
    assert streamed["finish"] == whole.finish_reason == ("stop" if "tool" not in said else "tool_calls")
    assert streamed["logs"] == len(whole.logprobs.content) == chunks[-1].usage.completion_tokens
    assert chunks[-1].usage.completion_tokens == len(proxy.calls[0].generation_token_ids)


def test_parallel_tool_calls_come_back_as_one_exact_continuation() -> None:
    proxy = Proxy(TWO_CALLS, "Sunny and rainy.")
    with served(proxy) as url, openai_client(url, proxy) as client:
        messages: list[Any] = [USER]
        first = client.chat.completions.create(model="m", messages=messages, tools=[TOOL]).choices[0].message
        assert [json.loads(c.function.arguments) for c in first.tool_calls] == [
            {"city": "Paris"},
            {"city": "Rome"},
        ]
        messages.append(first)
        messages += [
            {"role": "tool", "tool_call_id": c.id, "content": text}
            for c, text in zip(first.tool_calls, ("sunny", "rainy"), strict=True)
        ]
        client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
    one, two = proxy.calls
    assert (two.parent_id, two.branch_reason) == (one.id, None)
    assert two.prompt_keep == len(one.prompt_delta) + len(one.generation_token_ids)
    turns = proxy.trajectory().turns
    assert [o.text for o in turns[0].observations] == ["sunny", "rainy"]


def test_several_choices_are_all_recorded_and_all_there() -> None:
    """SRV-12: n = 3 with 2, 5 and 3 tokens: three finish reasons, ten tokens."""
    ids = [4, 5, 6, 7]
    proxy = Proxy(
        script=lambda request, number: [*ids[: (1, 4, 2)[number % 3]], request.params.stop_token_ids[0]]
    )
    with served(proxy) as url, openai_client(url, proxy) as client:
        asked = {"model": "m", "messages": [USER], "n": 3}
        whole = client.chat.completions.create(**asked)
        streamed = gathered(client.chat.completions.create(**asked, stream=True))
    assert [len(c.generation_token_ids) for c in proxy.calls[:3]] == [2, 5, 3]
    assert [c.finish_reason for c in whole.choices] == ["stop"] * 3
    assert whole.usage.completion_tokens == 10
    assert [c["finish"] for c in streamed.values()] == ["stop"] * 3
    assert [str(c.branch_reason) for c in proxy.calls[:3]] == ["None", "resampled", "resampled"]


def test_the_responses_endpoint_is_read_by_the_official_client_whole_and_streamed() -> None:
    proxy = Proxy("Let me look.\n" + CALL, "Sunny.", "Sunny.")
    tool = {"type": "function", "strict": False, **TOOL["function"]}
    with served(proxy) as url, openai_client(url, proxy) as client:
        first = client.responses.create(model="m", input="Weather?", instructions="Be brief.", tools=[tool])
        assert [item.type for item in first.output] == ["message", "function_call"]
        assert first.output_text == "Let me look."
        call = first.output[1]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        second = client.responses.create(
            model="m",
            input=[result],
            previous_response_id=first.id,
            instructions="Be brief.",
            tools=[tool],
        )
        history: list[Any] = [{"role": "user", "content": "Weather?"}, *first.output, result]
        with client.responses.stream(
            model="m", input=history, instructions="Be brief.", tools=[tool]
        ) as stream:
            kinds = [event.type for event in stream]
            third = stream.get_final_response()
    assert second.output_text == third.output_text == "Sunny."
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    one, two, three = proxy.calls
    assert (two.parent_id, two.branch_reason) == (one.id, None)
    assert (three.parent_id, str(three.branch_reason)) == (one.id, "resampled")


def test_the_completions_endpoint_continues_raw_text_and_ids_exactly() -> None:
    proxy = Proxy(" a dog.", " And a cat.", " End.")
    with served(proxy) as url, openai_client(url, proxy) as client:
        first = client.completions.create(model="m", prompt="This is", max_tokens=50)
        prompt = "This is" + first.choices[0].text + " So"
        second = client.completions.create(model="m", prompt=prompt, max_tokens=50)
        streamed = client.completions.create(model="m", prompt=[5, 6, 7], max_tokens=50, stream=True)
        text = "".join(chunk.choices[0].text for chunk in streamed)
    assert (first.choices[0].text, second.choices[0].text, text) == (" a dog.", " And a cat.", " End.")
    one, two, three = proxy.calls
    assert (two.parent_id, two.branch_reason) == (one.id, None)
    assert (three.prompt_delta, str(three.branch_reason)) == ((5, 6, 7), "sub_agent")


@pytest.mark.parametrize("streamed", [False, True])
def test_an_anthropic_conversation_with_tools_is_exact_and_its_objects_are_theirs(streamed: bool) -> None:
    proxy = Proxy("I look.\n" + TWO_CALLS, "Sunny and rainy.")
    tool = {
        "name": "weather",
        "description": "The weather of a city.",
        "input_schema": TOOL["function"]["parameters"],
    }

    def ask(client: Any, messages: list[Any]) -> Any:
        asked = {"model": "claude-x", "max_tokens": 100, "messages": messages, "tools": [tool]}
        if not streamed:
            return client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            return stream.get_final_message()

    with served(proxy) as url, anthropic_client(url, proxy) as client:
        messages: list[Any] = [{"role": "user", "content": "Weather?"}]
        counted = client.messages.count_tokens(model="claude-x", messages=messages, tools=[tool])
        first = ask(client, messages)
        assert [block.type for block in first.content] == ["text", "tool_use", "tool_use"]
        assert (first.stop_reason, first.content[0].text) == ("tool_use", "I look.")
        assert [block.input for block in first.content[1:]] == [{"city": "Paris"}, {"city": "Rome"}]
        assert counted.input_tokens == first.usage.input_tokens
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "ok"}]}
            for block in first.content[1:]
        ]
        messages += [
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": results},
        ]
        second = ask(client, messages)
    assert (second.stop_reason, second.content[0].text) == ("end_turn", "Sunny and rainy.")
    one, two = proxy.calls
    assert (two.parent_id, two.branch_reason) == (one.id, None)
    assert second.usage.output_tokens == len(two.generation_token_ids)


def test_a_stop_sequence_is_named_and_the_next_prompt_is_built_from_the_whole_ids() -> None:
    proxy = Proxy("abc</s>xyz", "ok")
    with served(proxy) as url, anthropic_client(url, proxy) as client:
        messages: list[Any] = [{"role": "user", "content": "Go"}]
        first = client.messages.create(model="m", max_tokens=50, messages=messages, stop_sequences=["</s>"])
        assert (first.stop_reason, first.stop_sequence) == ("stop_sequence", "</s>")
        assert first.content[0].text == "abc"
        messages += [{"role": "assistant", "content": "abc"}, {"role": "user", "content": "on"}]
        client.messages.create(model="m", max_tokens=50, messages=messages)
    one, two = proxy.calls
    assert two.branch_reason is None
    assert two.prompt_keep == len(one.prompt_delta) + len(one.generation_token_ids)


def test_errors_are_the_clients_own_exceptions_and_are_not_tried_again() -> None:
    proxy = Proxy("ok", max_context=64)
    with served(proxy) as url:
        with openai_client(url, proxy) as client:
            long = [{"role": "user", "content": "word " * 500}]
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(model="m", messages=long)
            assert caught.value.code == "context_length_exceeded"
            with pytest.raises(openai.BadRequestError, match="frequency_penalty"):
                client.chat.completions.create(model="m", messages=[USER], frequency_penalty=0.5)
            stray = {"role": "tool", "tool_call_id": "x", "content": "?"}
            with pytest.raises(openai.BadRequestError, match="no message before"):
                client.chat.completions.create(model="m", messages=[USER, stray])
            with pytest.raises(openai.NotFoundError):
                client.embeddings.create(model="m", input="x")
            assert client.models.list().data[0].id == "tiny"
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong").models.list()
        with anthropic_client(url, proxy) as other:
            with pytest.raises(anthropic.BadRequestError) as refused:
                other.messages.create(
                    model="m", max_tokens=10, messages=[{"role": "user", "content": "word " * 500}]
                )
            assert refused.value.body["type"] == "error"
            assert refused.value.body["error"]["type"] == "invalid_request_error"
        with pytest.raises(anthropic.AuthenticationError):
            anthropic.Anthropic(base_url=url, api_key="wrong").messages.create(
                model="m", max_tokens=10, messages=[{"role": "user", "content": "a"}]
            )
    assert proxy.engine.requests == []
    assert proxy.facts()["refused_context_length_exceeded"] == 2


def test_a_client_that_retries_after_a_lost_answer_gets_that_answer_and_one_call_is_recorded() -> None:
    proxy = Proxy("once")
    lose = [True]

    class Losing(httpx.HTTPTransport):
        """Delivers the request and loses the first answer on its way back."""

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            response = super().handle_request(request)
            if lose.pop() if lose else False:
                response.read()
                raise httpx.ReadError("lost", request=request)
            return response

    with served(proxy) as url:
        body = {"model": "m", "messages": [USER]}
        with httpx.Client(transport=Losing(), headers={"authorization": f"Bearer {proxy.live.key}"}) as http:
            with pytest.raises(httpx.ReadError):
                http.post(f"{url}/v1/chat/completions", json=body, headers={"x-stainless-retry-count": "0"})
            again = http.post(
                f"{url}/v1/chat/completions", json=body, headers={"x-stainless-retry-count": "1"}
            )
    assert again.json()["choices"][0]["message"]["content"] == "once"
    assert len(proxy.calls) == 1


def test_a_client_that_hangs_up_aborts_the_sampling_and_nothing_is_recorded() -> None:
    proxy = Proxy("late", delay_s=300.0)
    with served(proxy) as url:
        for number, stream in enumerate((False, True)):
            body = json_bytes({"model": "m", "messages": [USER], "stream": stream, "n": 1 + number})
            where = httpx.URL(url)
            with socket.create_connection((where.host, where.port or 80)) as client:
                head = (
                    f"POST {where.path}/v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
                    f"authorization: Bearer {proxy.live.key}\r\ncontent-length: {len(body)}\r\n\r\n"
                )
                client.sendall(head.encode() + body)
                until(lambda: len(proxy.engine.requests) == (1, 3)[number])  # noqa: B023
            until(lambda: proxy.engine.cancelled == (1, 3)[number])  # noqa: B023
    assert proxy.calls == ()


def until(true: Callable[[], bool], *, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_sessions_are_opened_reported_and_closed_over_http() -> None:
    proxy = Proxy("hi")
    with served(proxy) as url:
        base = url.partition("/s/")[0]
        admin = {"authorization": "Bearer admin"}
        assert httpx.post(f"{base}/sessions", json={}).status_code == 401
        opened = httpx.post(
            f"{base}/sessions", json={"name": "mine", "harness": "loop/1"}, headers=admin
        ).json()
        with openai.OpenAI(base_url=opened["openai_base_url"], api_key=opened["key"]) as client:
            client.chat.completions.create(model="m", messages=[USER])
        report = httpx.get(f"{base}/sessions/{opened['session']}", headers=admin).json()
        closed = httpx.post(f"{base}/sessions/{opened['session']}/close", headers=admin).json()
        assert httpx.get(f"{base}/sessions/{opened['session']}", headers=admin).status_code == 404
    assert report["fidelity"]["exact_share"] == 1.0
    assert closed["trajectory"] == opened["session"]
    kept = proxy.kept[0]
    assert (kept.harness, kept.reward, len(kept.calls)) == ("loop/1", None, 1)
    assert kept.verdict.fault is not None
    assert kept.verdict.fault.code == "not_graded"
