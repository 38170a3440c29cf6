"""Tool calls out of text: every format, and everything that can be wrong with them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.types import Action, from_json, to_json
from harness.actions import FORMAT_ERROR_TOOL, FORMATS, parse

ARGUMENTS = {"command": "ls"}
GOOD = {
    "hermes": '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>',
    "llama3": '{"name": "bash", "parameters": {"command": "ls"}}',
    "mistral": '[TOOL_CALLS] [{"name": "bash", "arguments": {"command": "ls"}}]',
    "fenced": '```json\n{"name": "bash", "arguments": {"command": "ls"}}\n```',
    "harmony": '<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{"command": "ls"}',
}


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_reads_its_own_call_and_its_own_example(name: str) -> None:
    for text in (GOOD[name], FORMATS[name].example):
        parsed = parse(text, turn=3, tool_format=name)
        assert parsed.actions == (Action(id="t0003a000", tool="bash", arguments=ARGUMENTS),)
        assert parsed.content == ""


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("text", ["", "All done.", "1 < 2 and {x}", "a\nb"])
def test_text_without_a_call_is_content(name: str, text: str) -> None:
    parsed = parse(text, turn=0, tool_format=name)
    assert parsed.actions == ()
    assert parsed.content == text.strip()


def test_words_around_calls_are_content_and_calls_keep_their_order() -> None:
    text = (
        "First. <tool_call>"
        + json.dumps({"name": "a", "arguments": {}})
        + "</tool_call> then <tool_call>"
        + json.dumps({"name": "b", "arguments": {"x": [1, {"y": None}]}})
        + "</tool_call> end"
    )
    parsed = parse(text, turn=1)
    assert parsed.content == "First.  then  end"
    assert [(a.id, a.tool) for a in parsed.actions] == [("t0001a000", "a"), ("t0001a001", "b")]
    assert parsed.actions[1].arguments == {"x": [1, {"y": None}]}


@pytest.mark.parametrize(
    ("body", "tool", "words"),
    [
        ('{"name": "bash", "arguments": {"comm', FORMAT_ERROR_TOOL, "not valid JSON"),
        ("", FORMAT_ERROR_TOOL, "not valid JSON"),
        ("[]", FORMAT_ERROR_TOOL, "no name"),
        ('"bash"', FORMAT_ERROR_TOOL, "no name"),
        ('{"arguments": {}}', FORMAT_ERROR_TOOL, "no name"),
        ('{"name": 3}', FORMAT_ERROR_TOOL, "no name"),
        ('{"name": "bash", "arguments": [1]}', "bash", "not an object"),
        ('{"name": "bash", "arguments": "{"}', "bash", "not valid JSON"),
        ('{"name": "bash", "arguments": {"x": NaN}}', FORMAT_ERROR_TOOL, "NaN is not JSON"),
        ('{"name": "bash", "arguments": {"x": "\\ud800"}}', FORMAT_ERROR_TOOL, "surrogate"),
        ("[" * 100_000, FORMAT_ERROR_TOOL, "nested too deeply"),
        (
            '{"name": "bash", "arguments": {"command": ' + "[" * 900 + "]" * 900 + "}}",
            FORMAT_ERROR_TOOL,
            "nested too deeply",
        ),
        ('{"name": "bash", "arguments": {"x": ' + "9" * 5000 + "}}", FORMAT_ERROR_TOOL, "not valid JSON"),
    ],
)
def test_a_malformed_call_is_an_action_that_says_what_was_wrong(body: str, tool: str, words: str) -> None:
    """SRV-06: no exception, one action, never run."""
    (action,) = parse(f"<tool_call>{body}</tool_call>", turn=0).actions
    assert action.tool == tool
    assert action.error is not None
    assert words in action.error
    assert "<tool_call>" in action.error, "the error shows how to do it"
    assert action.arguments == {}


def test_a_call_whose_closing_tag_is_missing_counts_when_its_json_is_complete() -> None:
    (good,) = parse('<tool_call>{"name": "bash", "arguments": {"command": "ls"}}', turn=0).actions
    assert good.error is None
    first, second = parse('<tool_call>{"name": "a"<tool_call>{"name": "b"}</tool_call>', turn=0).actions
    assert (first.error is not None, second.tool) == (True, "b")


def test_a_closing_tag_alone_is_a_format_error() -> None:
    (action,) = parse('{"name": "bash"}</tool_call>', turn=0).actions
    assert action.error is not None


def test_arguments_as_a_json_string_are_decoded() -> None:
    (action,) = parse(
        '<tool_call>{"name": "bash", "arguments": "{\\"command\\": \\"ls\\"}"}</tool_call>', turn=0
    ).actions
    assert action.arguments == ARGUMENTS


def test_the_other_spellings_of_llama_and_mistral_are_read() -> None:
    (tagged,) = parse(
        '<|python_tag|>{"name": "bash", "parameters": {}}', turn=0, tool_format="llama3"
    ).actions
    assert (tagged.tool, tagged.error) == ("bash", None)
    two = parse(
        '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}', turn=0, tool_format="llama3"
    )
    assert [a.tool for a in two.actions] == ["a", "b"]
    (broken,) = parse('<|python_tag|>{"name": "bash"', turn=0, tool_format="llama3").actions
    assert broken.error is not None
    for text in ('[TOOL_CALLS]bash{"command": "ls"}', '[TOOL_CALLS]bash[ARGS]{"command": "ls"}'):
        (named,) = parse(text, turn=0, tool_format="mistral").actions
        assert (named.tool, named.arguments) == ("bash", ARGUMENTS)
    pair = parse(
        '[TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]',
        turn=0,
        tool_format="mistral",
    )
    assert [a.tool for a in pair.actions] == ["a", "b"]


def test_an_unknown_format_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'hermes'"):
        parse("", turn=0, tool_format="herms")


PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        "```json\n",
        "```",
        '{"name": "bash", "arguments": {}}',
        '{"name":',
        "}",
        "\\u0000",
        ";",
        "\n",
    ]
)


@given(st.lists(PIECES | st.text(max_size=4), max_size=10).map("".join), st.sampled_from(sorted(FORMATS)))
def test_whatever_a_model_writes_is_read_without_an_exception_and_can_be_stored(text: str, name: str) -> None:
    parsed = parse(text, turn=0, tool_format=name)
    assert len({a.id for a in parsed.actions}) == len(parsed.actions)
    for action in parsed.actions:
        assert from_json(Action, to_json(action)) == action


@pytest.mark.parametrize(
    "text",
    [
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary to=functions.bash"
        '<|constrain|>json<|message|>{"command": "ls"}',
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant to=functions.bash<|channel|>commentary"
        ' json<|message|>{"command": "ls"}<|call|>',
        ' to=functions.bash<|channel|>commentary<|message|>{"command": "ls"}',
    ],
)
def test_a_call_in_channels_is_read_wherever_its_recipient_stands(text: str) -> None:
    parsed = parse(text, turn=0, tool_format="harmony")
    assert [(a.tool, a.arguments, a.error) for a in parsed.actions] == [("bash", ARGUMENTS, None)]


def test_what_is_said_in_other_channels_is_no_call_and_broken_arguments_are_told() -> None:
    final = "<|channel|>analysis<|message|>to=functions.bash is not needed<|end|><|start|>assistant"
    final += "<|channel|>final<|message|>Done."
    assert parse(final, turn=0, tool_format="harmony").actions == ()
    cut = '<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{"comm'
    (action,) = parse(cut, turn=0, tool_format="harmony").actions
    assert action.tool == "bash"
    assert action.error is not None
    assert "not valid JSON" in action.error
