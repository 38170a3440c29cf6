"""Requests that nobody would write on purpose: each is answered, none ends more than itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proxied import CALL, TOOL, Proxy

from agentrl.errors import ModelError
from agentrl.types import ExecStatus
from envs.sandbox.contract import ExecRequest
from harness.agents.bridge import Bridge
from harness.proxy.model import Rules
from services.proxy.app import create_app

USER = {"role": "user", "content": "Weather?"}
DEEP = "[" * 100_000
ANTHROPIC = {"anthropic-version": "2023-06-01"}
NEW = {"x-stainless-retry-count": "0"}


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def chat(**more: Any) -> tuple[str, Any]:
    return "v1/chat/completions", {"model": "m", "messages": [USER], **more}


def responses(**more: Any) -> tuple[str, Any]:
    return "v1/responses", {"model": "m", "input": "Weather?", **more}


def messages(**more: Any) -> tuple[str, Any]:
    return "v1/messages", {"model": "m", "max_tokens": 20, "messages": [USER], **more}


def said(*calls: Any, **more: Any) -> Any:
    return {"role": "assistant", "content": "", "tool_calls": list(calls), **more}


def called(arguments: Any) -> Any:
    return {"id": "a", "type": "function", "function": {"name": "weather", "arguments": arguments}}


REFUSED = [
    chat(messages=[{"role": ["user"], "content": "x"}]),
    chat(messages=[{"role": {}, "content": "x"}]),
    chat(messages=[{"role": "robot", "content": "x"}]),
    chat(messages=[None]),
    chat(messages=[]),
    chat(messages={"role": "user"}),
    chat(messages=[{"role": "user", "content": 5}]),
    chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    chat(messages=[USER, {"role": "tool", "tool_call_id": "nobody", "content": "x"}]),
    chat(messages=[USER, {"role": "tool", "content": "x"}]),
    chat(messages=[USER, said(called("{not json"))]),
    chat(messages=[USER, said(called(DEEP))]),
    chat(messages=[USER, said(called("[1]"))]),
    chat(messages=[USER, said(called(7))]),
    chat(messages=[USER, said(None)]),
    chat(messages=[USER, said({"id": "a", "function": {}})]),
    chat(messages=[USER, {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]),
    chat(functions=[{"name": "f"}]),
    chat(tools=[None]),
    chat(tools=[{"type": "function", "function": {"name": "f", "parameters": "object"}}]),
    chat(tools=[{"type": "function", "function": {"parameters": {}}}]),
    chat(tools=[{"type": "web_search"}]),
    chat(n=0),
    chat(n=17),
    chat(n="2"),
    chat(max_tokens=0),
    chat(max_tokens=True),
    chat(max_completion_tokens=1.5),
    chat(stop=[""]),
    chat(stop=[1]),
    chat(stream="yes"),
    chat(temperature="hot"),
    chat(temperature=-1),
    chat(logit_bias={"1": 5}),
    chat(guided_json={"type": "object"}),
    chat(structured_outputs={"regex": "a+"}),
    chat(response_format={"type": "json_schema", "json_schema": {}}),
    chat(bad_words=["x"]),
    chat(use_beam_search=True),
    chat(stop_token_ids=[5]),
    chat(chat_template="{{ messages }}"),
    chat(continue_final_message=True),
    responses(input=[]),
    responses(input=[5]),
    responses(input=[{"role": ["user"], "content": "x"}]),
    responses(input=[{"role": "tool", "content": "x"}]),
    responses(input=[{"type": "item_reference", "id": "x"}]),
    responses(input=[{"type": "function_call_output", "call_id": "nobody", "output": "x"}]),
    responses(input=[{"type": "function_call", "name": "f", "call_id": "a", "arguments": DEEP}]),
    responses(previous_response_id="resp_of_another_session"),
    responses(conversation="conv_1"),
    responses(prompt={"id": "p"}),
    responses(text={"format": {"type": "json_object"}}),
    responses(tools=[{"type": "web_search"}]),
    messages(messages=[{"role": ["user"], "content": "x"}]),
    messages(messages=[]),
    messages(messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}]),
    messages(messages=[USER, {"role": "assistant", "content": "Once upon"}]),
    messages(messages=[USER, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]),
    messages(messages=[{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "nobody"}]}]),
    messages(max_tokens=None),
    messages(stop_sequences=[1]),
    messages(system=[{"type": "image"}]),
    messages(mcp_servers=[{"type": "url"}]),
    messages(tools=[{"type": "bash_20250124", "name": "bash"}]),
    ("v1/completions", {"model": "m", "prompt": ""}),
    ("v1/completions", {"model": "m", "prompt": [True]}),
    ("v1/completions", {"model": "m", "prompt": ["a", "b"]}),
    ("v1/completions", {"model": "m", "prompt": "a", "echo": True}),
    ("v1/chat/completions", b'{"messages": NaN}'),
    ("v1/chat/completions", b'{"temperature": Infinity, "messages": []}'),
    ("v1/chat/completions", DEEP.encode()),
    ("v1/chat/completions", b"\xff\xfe"),
    ("v1/chat/completions", []),
]


@pytest.mark.parametrize(("path", "body"), REFUSED)
def test_what_is_malformed_or_can_not_be_obeyed_is_the_clients_mistake(path: str, body: Any) -> None:
    proxy = Proxy("ok")
    if isinstance(body, dict) and body.get("max_tokens", 1) is None:
        del body["max_tokens"]
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, answer = run(proxy.post(path, raw))
    assert status == 400, answer
    assert answer["error"]["message"]
    assert proxy.engine.requests == []
    assert sum(proxy.facts().values()) == 1, "the fidelity report counts it"
    assert "refused_internal" not in proxy.facts()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "type", "text", "content", "id", "name"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
WHOLE = [
    chat(
        messages=[USER, said(called("{}")), {"role": "tool", "tool_call_id": "a", "content": "ok"}, USER],
        tools=[TOOL],
        stop=["x"],
        n=1,
        tool_choice="auto",
        stream_options={},
        temperature=1,
        max_tokens=9,
    ),
    responses(
        input=[
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
            {"type": "function_call", "name": "f", "call_id": "a", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "x"},
        ],
        tools=[{"type": "function", "name": "f", "parameters": {}}],
        text={"format": {"type": "text"}},
        metadata={},
    ),
    messages(
        system=[{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
        messages=[
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "x", "signature": ""},
                    {"type": "tool_use", "id": "a", "name": "f", "input": {}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}]},
        ],
        tools=[{"name": "f", "input_schema": {}}],
        tool_choice={"type": "auto"},
        stop_sequences=["x"],
    ),
    ("v1/completions", {"model": "m", "prompt": [5, 6], "max_tokens": 5, "stop": "x", "stream_options": {}}),
]


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, one in inside for place in places(one, (*at, key)))]


def replaced(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = replaced(value[at[0]], at[1:], new)
    return copy


@given(st.data())
@settings(max_examples=250, deadline=None)
def test_whatever_stands_in_a_field_a_request_is_answered_and_ends_nothing(data: st.DataObject) -> None:
    path, body = data.draw(st.sampled_from(WHOLE))
    at = data.draw(st.sampled_from(places(body)[1:]))
    spoiled = replaced(body, at, data.draw(VALUES))
    proxy = PROXY
    status, answer = run(proxy.post(path, json.dumps(spoiled).encode(), **NEW))
    assert status in (200, 400), answer
    assert "refused_internal" not in proxy.facts()
    status, _ = run(proxy.post(*chat(), **NEW))
    assert status == 200, "the session goes on"


PROXY = Proxy("ok")


def test_half_a_character_is_the_replacement_character_and_the_conversation_stays_exact() -> None:
    """As clients send it that cut texts by UTF-16 units, escaped or raw."""
    for half in (b'"a \\ud83d b \\ud83d\\ude00"', b'"a \xed\xa0\xbd b \xf0\x9f\x98\x80"'):
        proxy = Proxy("ok", "again")
        first = b'{"model": "m", "messages": [{"role": "user", "content": ' + half + b"}]}"
        second = first[:-2] + b', {"role": "assistant", "content": "ok"}, {"role": "user", "content": "on"}]}'
        for body in (first, second):
            assert run(proxy.post("v1/chat/completions", body))[0] == 200
        trajectory = proxy.trajectory()
        one, two = trajectory.calls
        assert (two.parent_id, two.branch_reason) == (one.id, None)
        text = proxy.chat.decode(trajectory.prompt_ids(two.id))
        assert text.count("\ufffd") in (1, 3), "raw bytes are three, none of them a character"
        assert "\U0001f600" in text


def test_several_streamed_choices_with_calls_are_each_continued_exactly() -> None:
    proxy = Proxy(CALL, CALL.replace("Paris", "Rome"), "Sunny.", "Rainy.")

    async def talk() -> list[Any]:
        status, text = await proxy.post(*chat(n=2, stream=True, tools=[TOOL]), **NEW)
        assert status == 200
        chunks = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
        calls: dict[int, Any] = {}
        for chunk in chunks:
            for choice in chunk["choices"]:
                for part in choice["delta"].get("tool_calls", ()):
                    known = calls.setdefault(choice["index"], {"id": part.get("id"), "arguments": ""})
                    known["arguments"] += part["function"]["arguments"]
        for index in (0, 1):
            call = {"id": calls[index]["id"], "type": "function"}
            call["function"] = {"name": "weather", "arguments": calls[index]["arguments"]}
            result = {"role": "tool", "tool_call_id": call["id"], "content": "?"}
            await proxy.say(USER, said(call), result, tools=[TOOL])
        return [calls[0], calls[1]]

    first, second = run(talk())
    assert [json.loads(c["arguments"])["city"] for c in (first, second)] == ["Paris", "Rome"]
    assert first["id"] != second["id"]
    one, two, three, four = proxy.calls
    assert [c.branch_reason and str(c.branch_reason) for c in proxy.calls] == [None, "resampled", None, None]
    assert (three.parent_id, four.parent_id) == (one.id, two.id)


def test_a_choice_that_fails_fails_the_request_and_what_was_sampled_stays_recorded() -> None:
    def script(request: Any, number: int) -> str:
        if number == 1:
            raise ModelError("no evidence.", code="echo", phase="record", retryable=False)
        return "ok"

    proxy = Proxy(script=script)
    status, answer = run(proxy.post(*chat(n=2), **NEW))
    assert (status, answer["error"]["code"]) == (503, "echo")
    assert run(proxy.post(*chat(), **NEW))[0] == 200
    assert len(proxy.calls) == 2
    assert proxy.trajectory().turns[-1].call_id == proxy.calls[-1].id


def test_a_client_that_is_obeyed_gets_different_choices_of_one_seed() -> None:
    proxy = Proxy("ok", rules=Rules(obey=True, end_on_fault=False))
    assert run(proxy.post(*chat(n=2, seed=7, top_k=-1, top_p=0), **NEW))[0] == 200
    assert [(c.sampling.seed, c.sampling.top_k, c.sampling.top_p) for c in proxy.calls] == [
        (7, 0, 1.0),
        (8, 0, 1.0),
    ]


def test_what_a_model_can_not_be_told_is_counted_and_answered() -> None:
    proxy = Proxy("ok")

    async def talk() -> None:
        wishes = {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}
        asked = [
            chat(**wishes),
            responses(reasoning={"effort": "low"}, tool_choice="required"),
            messages(
                thinking={"type": "enabled", "budget_tokens": 1024},
                system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
                metadata={"user_id": "u"},
            ),
        ]
        for path, body in asked:
            status, answer = await proxy.post(path, body)
            assert status == 200, answer

    run(talk())
    assert proxy.facts() == {
        "unenforced_chat_template_kwargs": 1,
        "unenforced_reasoning": 1,
        "unenforced_reasoning_effort": 1,
        "unenforced_thinking": 1,
        "unenforced_tool_choice": 1,
    }


def test_tokens_are_counted_of_any_conversation_and_nothing_is_sampled() -> None:
    proxy = Proxy("ok")
    path, body = messages(messages=[USER, {"role": "assistant", "content": "Once upon"}])
    status, answer = run(
        proxy.post(f"{path}/count_tokens", {k: v for k, v in body.items() if k != "max_tokens"})
    )
    assert status == 200
    assert answer["input_tokens"] > 10
    assert proxy.engine.requests == []


@pytest.mark.parametrize("api", [chat, responses, messages])
def test_thinking_that_is_sent_apart_comes_back_through_every_api_as_it_was_sampled(api: Any) -> None:
    proxy = Proxy("<think>\nhm\n</think>\n\nok", rules=Rules(split_reasoning=True, end_on_fault=False))

    async def talk() -> None:
        path, body = api()
        status, answer = await proxy.post(path, body, **NEW)
        assert status == 200
        match api.__name__:
            case "chat":
                message = answer["choices"][0]["message"]
                assert (message["reasoning_content"], message["content"]) == ("hm", "ok")
                body["messages"] = [USER, message, USER]
            case "responses":
                assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
                body["input"] = [USER, *answer["output"], USER]
            case _:
                assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
                body["messages"] = [USER, {"role": "assistant", "content": answer["content"]}, USER]
        status, _ = await proxy.post(path, body, **NEW)
        assert status == 200

    run(talk())
    one, two = proxy.calls
    assert (two.parent_id, two.branch_reason) == (one.id, None)
    assert proxy.facts().get("drift", 0) == 0


def test_a_template_that_breaks_refuses_the_request_and_not_the_session() -> None:
    proxy = Proxy("ok")
    template = proxy.chat.tokenizer.chat_template
    for broken in ("{{ messages[0].content + 5 }}", "{{ 1 / 0 }}", "{{ messages[99]['x']['y'] }}"):
        proxy.chat.tokenizer.chat_template = broken + template
        try:
            status, answer = run(proxy.post(*chat(), **NEW))
        finally:
            proxy.chat.tokenizer.chat_template = template
        assert (status, answer["error"]["code"]) == (400, "template"), answer
    assert run(proxy.post(*chat(), **NEW))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_our_own_is_an_answer_that_is_counted(stream: bool, monkeypatch: Any) -> None:
    proxy = Proxy("ok", delay_s=0.05)
    monkeypatch.setattr("harness.proxy.door.FIRST_BYTE_S", 0.01)
    proxy.live.door.model._read = None  # type: ignore[assignment,method-assign]
    status, answer = run(proxy.post(*chat(stream=stream), **NEW))
    told = json.loads(answer.partition("data: ")[2].partition("\n")[0]) if stream else answer
    assert (status, told["error"]["code"]) == (200 if stream else 500, "internal")
    assert proxy.facts()["refused_internal"] == 1


def test_a_client_that_left_before_the_first_byte_of_a_stream_takes_its_sampling_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("harness.proxy.door.FIRST_BYTE_S", 0.01)
    proxy = Proxy("late", delay_s=300.0)
    path, body = chat(stream=True)
    asked = iter([{"type": "http.request", "body": json.dumps(body).encode()}])

    async def receive() -> Any:
        return next(asked, None) or await asyncio.Event().wait()

    async def send(message: Any) -> None:
        raise ConnectionResetError("gone")

    scope = {
        "type": "http",
        "method": "POST",
        "path": f"/s/{proxy.live.id}/{path}",
        "headers": [(b"authorization", f"Bearer {proxy.live.key}".encode())],
    }
    with pytest.raises(ConnectionResetError):
        run(create_app(proxy.sessions, admin_key="a")(scope, receive, send))
    assert proxy.engine.cancelled == 1
    assert proxy.calls == ()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "bearer KEY"}, 200),
        ({"authorization": "Bearer  KEY"}, 200),
        ({"authorization": "Bearer KEY", "x-api-key": "placeholder"}, 200),
        ({"authorization": "Bearer placeholder", "x-api-key": "KEY"}, 200),
        ({"authorization": "Basic KEY"}, 401),
        ({"authorization": "Bearer KEYS"}, 401),
        ({"authorization": ""}, 401),
        ({"authorization": "Bearer \udcff"}, 401),
    ],
)
def test_a_key_is_taken_however_clients_send_it(headers: dict[str, str], status: int) -> None:
    proxy = Proxy("ok")
    sent = {name: value.replace("KEY", proxy.live.key) for name, value in headers.items()}
    assert run(proxy.post(*chat(), **sent))[0] == status


# ------------------------------------------------------------------------------------------- from a sandbox


class Spoiled:
    """A sandbox whose policy writes what it likes into the bridge's folder."""

    def __init__(self, *news: str, **files: bytes) -> None:
        self.news = list(news)
        self.files = {name.removeprefix("n"): data for name, data in files.items()}
        self.answered: dict[str, bytes] = {}

    def next_exec_id(self) -> str:
        return "x"

    async def exec(self, request: ExecRequest) -> Any:
        text = self.news.pop(0) if self.news else ""
        await asyncio.sleep(0 if text else 0.01)
        return Result(text)

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        name = path.rpartition("/")[2]
        if name not in self.files:
            raise FileNotFoundError(path)
        return self.files[name]

    async def write_file(self, path: str, data: bytes, *, mode: int | None) -> None:
        self.answered[path.rpartition("/")[2]] = data


class Result:
    """A command that ended well and said something."""

    def __init__(self, text: str) -> None:
        self.status, self.exit_code, self.stdout, self._text = ExecStatus.EXITED, 0, self, text

    def text(self) -> str:
        return self._text


def test_a_policy_that_spoils_the_bridges_files_ends_nothing_but_its_own_requests() -> None:
    """Otherwise it could turn a zero into a fault that is nobody's."""
    proxy = Proxy("ok")
    head = {"method": "POST", "path": "/v1/chat/completions", "headers": {}}
    head["headers"] = {"authorization": f"Bearer {proxy.live.key}"}
    whole = json.dumps(head).encode() + b"\n" + json.dumps(chat()[1]).encode()
    place = Spoiled(
        "+1 +2 +3 +4 +5 +6 +7 +8\n",
        "+² +" + "9" * 5000 + " + - +x -99 \x00 +-1\n",
        "+9\n",
        n1=b"",
        n2=b"[]\n{}",
        n3=b"{}\n{}",
        n4=b'{"headers": 5}\n{}',
        n5=DEEP.encode() + b"\n{}",
        n6=b'{"method": null, "path": 7, "headers": {"a": []}}\n{}',
        n7=b"\xff\xfe\n{}",
        n9=whole,
    )
    bridge = Bridge(place, "/tmp/x", proxy.live.door)  # type: ignore[arg-type]

    async def whole_time() -> None:
        running = asyncio.create_task(bridge.run())
        async with asyncio.timeout(120):
            while "9" not in place.answered:
                assert not running.done(), running.exception()
                await asyncio.sleep(0.01)
        bridge._over = True
        await running

    run(whole_time())
    assert json.loads(place.answered["9"].partition(b"\n")[0])["status"] == 200
    assert json.loads(place.answered["6"].partition(b"\n")[0])["status"] in (401, 404)
    assert len(proxy.calls) == 1
