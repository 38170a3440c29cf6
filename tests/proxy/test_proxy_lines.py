"""Which requests extend what was recorded, token for token, and why others do not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proxied import CALL, TOOL, Proxy

from agentrl.learner import samples
from agentrl.types import BranchReason, Trajectory
from harness.proxy.model import Rules


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def result(call: dict[str, Any], text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


def run(work: Awaitable[Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 30))  # type: ignore[arg-type]


def reasons(proxy: Proxy) -> list[str | None]:
    return [None if c.branch_reason is None else str(c.branch_reason) for c in proxy.calls]


def extends(trajectory: Trajectory, child: int, parent: int) -> bool:
    """Whether a call's prompt is, id for id, another's prompt and generation and more."""
    whole = trajectory.prompt_ids(trajectory.calls[parent].id) + trajectory.calls[parent].generation_token_ids
    return trajectory.prompt_ids(trajectory.calls[child].id)[: len(whole)] == whole


def test_a_conversation_of_ten_turns_is_one_row_of_sampled_ids() -> None:
    """SRV-13, TOK-17: every call has its prompt, each extends the one before, one row in the end."""
    proxy = Proxy(CALL, family="chatml")

    async def talk() -> None:
        messages: list[Any] = [{"role": "system", "content": "Be brief."}, user("Weather?")]
        for turn in range(10):
            reply = await proxy.say(*messages, tools=[TOOL])
            messages += [reply, result(reply["tool_calls"][0], f"sunny {turn} <|im_end|>")]

    run(talk())
    trajectory = proxy.trajectory()
    assert all(extends(trajectory, i + 1, i) for i in range(9))
    rows = samples.build(trajectory, vocab_size=proxy.chat.vocab_size)
    assert len(rows.rows) == 1
    assert rows.n_actions == sum(len(c.generation_token_ids) for c in trajectory.calls)
    assert rows.valid_N.all()
    text = proxy.chat.decode(tuple(int(i) for i in rows.rows[0]))
    assert text.count("<|im_start|>assistant\n") == 10
    ends = [i for i in rows.rows[0] if i == proxy.chat.stop_token_ids[0]]
    assert len(ends) == 2 + 10 + 9, "the control string in tool output became no control token (TOK-15)"


def test_a_reply_written_back_in_other_words_keeps_the_sampled_ids_and_counts_as_drift() -> None:
    """TOK-07: the model wrote {"city": "Paris"} one way, the agent sends it back another way."""
    compact = CALL.replace('": ', '":').replace(", ", ",")
    proxy = Proxy(compact, "Sunny.")

    async def talk() -> None:
        reply = await proxy.say(user("Weather?"), tools=[TOOL])
        call = reply["tool_calls"][0]
        assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
        call["function"]["arguments"] = '{ "city" :"Paris" }'
        await proxy.say(user("Weather?"), {**reply, "content": ""}, result(call, "sunny"), tools=[TOOL])

    run(talk())
    assert reasons(proxy) == [None, None]
    assert proxy.facts()["drift"] == 1
    trajectory = proxy.trajectory()
    assert extends(trajectory, 1, 0)
    assert compact in proxy.chat.decode(trajectory.prompt_ids(trajectory.calls[1].id))


def test_a_reply_sent_back_without_its_reasoning_is_a_branch_and_loses_no_token() -> None:
    """TOK-11: trained tokens of turn 1 stay, the reason is said, nothing is dropped silently."""
    proxy = Proxy("<think>add</think>\nDone.", "ok", family="reasoning", rules=Rules(split_reasoning=True))

    async def talk() -> None:
        reply = await proxy.say(user("Go"))
        assert (reply["content"], reply["reasoning_content"]) == ("Done.", "add")
        await proxy.say(user("Go"), {"role": "assistant", "content": "Done."}, user("More"))

    run(talk())
    assert reasons(proxy) == [None, "reasoning_dropped"]
    trajectory = proxy.trajectory()
    rows = samples.build(trajectory, vocab_size=proxy.chat.vocab_size)
    assert rows.n_actions == sum(len(c.generation_token_ids) for c in trajectory.calls)
    assert "add" not in proxy.chat.decode(trajectory.prompt_ids(trajectory.calls[1].id))


@pytest.mark.parametrize("kept", [True, False])
def test_reasoning_that_comes_back_is_extended_unless_the_template_forgets_it(kept: bool) -> None:
    """TOK-04: the template decides; a user message makes it forget, a tool result does not."""
    said = "<think>look</think>\n" + CALL
    proxy = Proxy(said, "ok", family="reasoning", rules=Rules(split_reasoning=True))

    async def talk() -> None:
        reply = await proxy.say(user("Go"), tools=[TOOL])
        more = [result(reply["tool_calls"][0], "sunny")] + ([] if kept else [user("And now?")])
        await proxy.say(user("Go"), reply, *more, tools=[TOOL])

    run(talk())
    assert reasons(proxy) == [None, None if kept else "reasoning_dropped"]


def test_each_way_of_leaving_the_recorded_history_has_its_reason() -> None:
    proxy = Proxy(script=lambda request, number: f"reply {number}")
    system = {"role": "system", "content": "Be brief."}

    async def talk() -> list[str | None]:
        line: list[Any] = [system, user("start")]
        for text in ("one", "two", "three"):
            line += [await proxy.say(*line), user(text)]
        before = len(proxy.calls)
        a, b = line[2], line[4]
        await proxy.say(*line)
        assert reasons(proxy)[before:] == [None]
        tried = [
            [*line],  # the same again
            [system, user("start"), b, line[5], line[6], line[7], user("on")],  # the oldest turn left out
            [system, user("start"), user("Summary: all is well.")],  # replaced by a summary
            [system, user("start"), a, user("ONE"), *line[4:]],  # an old observation changed
            [system, user("start"), {**a, "content": "another reply"}, *line[3:]],  # a reply changed
            [user("Another task.")],  # another conversation
            [{**system, "content": "Be long."}, user("start")],  # another agent
        ]
        for messages in tried:
            await proxy.say(*messages)
        await proxy.say(*line, tools=[TOOL])  # other tools
        return reasons(proxy)[before + 1 :]

    assert run(talk()) == [
        "resampled",
        "truncation",
        "compaction",
        "history_edited",
        "history_edited",
        "sub_agent",
        "sub_agent",
        "history_edited",
    ]
    trajectory = proxy.trajectory()
    rows = samples.build(trajectory, vocab_size=proxy.chat.vocab_size)
    assert rows.n_actions == sum(len(c.generation_token_ids) for c in trajectory.calls)


def test_a_sub_agent_is_a_root_of_its_own_beside_its_parents_line() -> None:
    """SRV-13, second half: both first calls have their own prompt."""
    proxy = Proxy(script=lambda request, number: f"reply {number}")

    async def talk() -> None:
        main = [user("main task")]
        main += [await proxy.say(*main)]
        sub = [user("sub task")]
        sub += [await proxy.say(*sub), user("more of sub")]
        await asyncio.gather(proxy.say(*main, user("go on")), proxy.say(*sub))

    run(talk())
    assert reasons(proxy) == [None, "sub_agent", None, None]
    trajectory = proxy.trajectory()
    assert all(c.prompt_delta for c in trajectory.calls)
    assert extends(trajectory, 2, 0)
    assert extends(trajectory, 3, 1)
    assert len(samples.build(trajectory, vocab_size=proxy.chat.vocab_size).rows) == 2


def test_a_call_that_can_not_be_read_is_text_as_from_a_plain_server_and_stays_trained() -> None:
    """SRV-06: no exception, no tool call, the next request is valid, the sampled ids are actions."""
    broken = '<tool_call>\n{"name": "weather", "arguments": {"ci\n</tool_call>'
    proxy = Proxy(broken, "Sorry.")

    async def talk() -> None:
        reply = await proxy.say(user("Weather?"), tools=[TOOL])
        assert "tool_calls" not in reply
        assert reply["content"] == broken
        await proxy.say(user("Weather?"), reply, user("That was no call."), tools=[TOOL])

    run(talk())
    assert reasons(proxy) == [None, None]
    rows = samples.build(proxy.trajectory(), vocab_size=proxy.chat.vocab_size)
    assert rows.valid_N.all()


def test_ids_that_re_encode_differently_are_continued_as_they_were_sampled() -> None:
    """TOK-01 through the proxy: byte by byte in, byte by byte in the next prompt."""
    raw = Proxy("x").chat.tokenizer
    sampled = [i for letter in "hello" for i in raw.encode(letter, add_special_tokens=False)]
    assert sampled != raw.encode("hello", add_special_tokens=False)
    proxy = Proxy(script=lambda request, number: [*sampled, request.params.stop_token_ids[0]])

    async def talk() -> None:
        reply = await proxy.say(user("Say it."))
        assert reply["content"] == "hello"
        await proxy.say(user("Say it."), reply, user("Again."))

    run(talk())
    trajectory = proxy.trajectory()
    start = len(trajectory.prompt_ids(trajectory.calls[0].id))
    assert trajectory.prompt_ids(trajectory.calls[1].id)[start : start + 5] == tuple(sampled)


def test_a_reply_cut_by_length_goes_on_with_an_end_marker_that_was_not_sampled() -> None:
    proxy = Proxy("a long reply that is cut", "ok")

    async def talk() -> None:
        status, answer = await proxy.post(
            "v1/chat/completions", {"model": "m", "messages": [user("Go")], "max_tokens": 3}
        )
        assert status == 200
        assert answer["choices"][0]["finish_reason"] == "length"
        await proxy.say(user("Go"), answer["choices"][0]["message"], user("On"))

    run(talk())
    trajectory = proxy.trajectory()
    one, two = trajectory.calls
    assert len(one.generation_token_ids) == 3
    assert extends(trajectory, 1, 0)
    assert two.prompt_delta[0] == proxy.chat.stop_token_ids[0]


def test_what_would_change_the_distribution_is_refused_and_what_is_not_obeyed_is_counted() -> None:
    proxy = Proxy("ok")

    async def talk() -> None:
        body = {"model": "m", "messages": [user("Go")]}
        for name, value in {
            "frequency_penalty": 0.5,
            "logit_bias": {"5": 100},
            "response_format": {"type": "json_object"},
            "top_logprobs": 5,
        }.items():
            status, answer = await proxy.post("v1/chat/completions", {**body, name: value})
            assert status == 400
            assert answer["error"]["param"] == name
        await proxy.say(user("Go"), temperature=0.2, tools=[TOOL], tool_choice="required")
        await proxy.say(user("Go"), temperature=1.0, frequency_penalty=0)

    run(talk())
    assert proxy.facts() == {
        "refused_unsupported_parameter": 4,
        "overridden": 1,
        "unenforced_tool_choice": 1,
    }
    assert [r.params.temperature for r in proxy.engine.requests] == [1.0, 1.0]


def test_a_client_is_obeyed_where_the_session_says_so_and_the_record_shows_it() -> None:
    proxy = Proxy("ok", rules=Rules(obey=True, end_on_fault=False))
    run(proxy.say(user("Go"), temperature=0.5, top_p=0.9, seed=4))
    sampling = proxy.calls[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.trainable) == (0.5, 0.9, 4, False)


@pytest.mark.parametrize("family", ["chatml", "reasoning", "llama"])
@pytest.mark.parametrize("role", [True, False])
def test_tools_and_results_reach_a_model_whose_template_has_no_place_for_them(
    family: str, role: bool
) -> None:
    parser = "llama3" if family == "llama" else "hermes"
    said = '{"name": "weather", "parameters": {"city": "Paris"}}' if family == "llama" else CALL
    proxy = Proxy(said, "ok", family=family, parser=parser)
    proxy.chat.renders_tool_role = role

    async def talk() -> None:
        reply = await proxy.say(user("Weather?"), tools=[TOOL])
        await proxy.say(user("Weather?"), reply, result(reply["tool_calls"][0], "sunny"), tools=[TOOL])

    run(talk())
    assert reasons(proxy) == [None, None]
    trajectory = proxy.trajectory()
    text = proxy.chat.decode(trajectory.prompt_ids(trajectory.calls[1].id))
    assert "The weather of a city." in text
    assert "sunny" in text


WORDS = st.sampled_from(["a", "<|im_end|>", "<tool_call>", "\n", " spaced ", "\u03d5\U0001f98a", "</think>"])


@given(st.lists(st.tuples(st.lists(WORDS, max_size=4), st.lists(WORDS, min_size=1, max_size=4)), max_size=4))
@settings(max_examples=40, deadline=None)
def test_whatever_is_said_and_answered_a_history_that_only_grows_is_exact(turns: list[Any]) -> None:
    replies = ["".join(said) for _, said in turns] + ["end"]
    raw = Proxy("x").chat.tokenizer
    ids = [raw.encode(text, add_special_tokens=False) for text in replies]
    proxy = Proxy(script=lambda request, number: [*ids[number], request.params.stop_token_ids[0]])

    async def talk() -> None:
        messages: list[Any] = [user("start")]
        for given_text, _ in turns:
            reply = await proxy.say(*messages)
            messages += [reply, user("".join(given_text))]
        await proxy.say(*messages)

    run(talk())
    assert all(r in (None, str(BranchReason.REASONING_DROPPED)) for r in reasons(proxy))
    trajectory = proxy.trajectory()
    for number, call in enumerate(trajectory.calls[1:]):
        if call.branch_reason is None:
            assert extends(trajectory, number + 1, number)
    rows = samples.build(trajectory, vocab_size=proxy.chat.vocab_size)
    assert rows.n_actions == sum(len(c.generation_token_ids) for c in trajectory.calls)
