"""The chat format: golden transcripts, and what must never happen to a token."""

from __future__ import annotations

import copy
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import FAMILIES, folding, spaced, tokenizer

from agentrl.errors import ConfigError
from agentrl.types import Action, BranchReason, Observation
from harness.chat import ChatFormat

SYSTEM = {"role": "system", "content": "You solve the task by calling tools."}
USER = {"role": "user", "content": "Fix the bug in add."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command.",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]
PARSERS = {
    "chatml": "hermes",
    "smollm": "fenced",
    "reasoning": "hermes",
    "llama": "llama3",
    "mistral": "mistral",
    "harmony": "harmony",
}
CALLS = {
    "hermes": '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>',
    "llama3": '{"name": "bash", "parameters": {"command": "ls"}}',
    "mistral": '[TOOL_CALLS][{"name": "bash", "arguments": {"command": "ls"}}]',
    "fenced": '```json\n{"name": "bash", "arguments": {"command": "ls"}}\n```',
    "harmony": (
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{"command": "ls"}'
    ),
}


def chat_of(family: str) -> ChatFormat:
    return ChatFormat(tokenizer(family), tool_parser=PARSERS[family])


def start(chat: ChatFormat) -> list[dict[str, Any]]:
    return [SYSTEM, USER] if chat.renders_system else [USER]


def observed(chat: ChatFormat, actions: tuple[Action, ...], text: str) -> tuple[Any, ...]:
    return chat.observations(actions, [Observation(action_id=a.id, text=text) for a in actions])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", ["calc.py", "", "two\nlines\n", "  spaced  ", "ünïcödé ϕ 🦊"])
def test_extending_equals_full_rendering_where_the_template_only_appends(family: str, text: str) -> None:
    chat = chat_of(family)
    messages = start(chat)
    ids = chat.prompt(messages, TOOLS)
    for turn in range(3):
        generated = chat.encode_reply(CALLS[chat.tool_format.name])
        message, actions = chat.reply(generated, turn=turn)
        assert [a.tool for a in actions] == ["bash"]
        new = observed(chat, actions, text)
        following = chat.continuation([*messages, message], generated, new, TOOLS)
        assert following.delta is not None, following.reason
        ids = ids + generated + following.delta
        messages += [message, *new]
    rendered = tokenizer(family).apply_chat_template(
        [chat._wire(m, 0xE000) for m in messages], tools=TOOLS, tokenize=False, add_generation_prompt=True
    )
    if family not in ("mistral", "harmony"):  # whose replies hold control tokens, as sampled
        assert chat.decode(ids) == rendered
        assert list(ids) == tokenizer(family).encode(rendered, add_special_tokens=False)


def test_the_chatml_transcript_is_the_one_written_by_hand() -> None:
    chat = chat_of("chatml")
    ids = chat.prompt([SYSTEM, USER])
    generated = chat.encode_reply("Hi.")
    delta = chat.continuation(
        [SYSTEM, USER, {"role": "assistant", "content": "Hi."}],
        generated,
        [{"role": "user", "content": "Go"}],
    ).delta
    assert delta is not None
    assert chat.decode(ids + generated + delta) == (
        "<|im_start|>system\nYou solve the task by calling tools.<|im_end|>\n"
        "<|im_start|>user\nFix the bug in add.<|im_end|>\n"
        "<|im_start|>assistant\nHi.<|im_end|>\n"
        "<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_end_marker_is_there_once_whether_it_was_sampled_or_cut(family: str) -> None:
    """MSK-11: sampled [5, 6, 99] keeps its 99; cut at [5, 6] gets one that was not sampled."""
    chat = chat_of(family)
    messages = start(chat)
    ids = chat.prompt(messages)
    end = chat.stop_token_ids[0]
    whole = chat.encode_reply("hello")
    for generated in (whole, whole[:-1]):
        new = [{"role": "user", "content": "Go on"}]
        message, _ = chat.reply(generated, turn=0)
        delta = chat.continuation([*messages, message], generated, new).delta
        assert delta is not None
        assert (ids + generated + delta).count(end) == ids.count(end) + (1 if family == "mistral" else 2)
        assert (generated + delta)[len(whole) - 1] == end
    assert message["content"] == "hello"


def test_a_foreign_stop_token_is_followed_by_the_templates_own_end_marker() -> None:
    chat = chat_of("chatml")
    other = tokenizer("chatml").convert_tokens_to_ids("<|endoftext|>")
    generated = (*chat.encode_reply("hello")[:-1], other)
    delta = chat.continuation(
        [USER, {"role": "assistant", "content": "hello"}], generated, [{"role": "user", "content": "x"}]
    ).delta
    assert delta is not None
    assert delta[0] == chat.stop_token_ids[0]


def test_ids_that_re_encode_differently_stay_as_they_were_sampled() -> None:
    """TOK-01: BPE is no bijection; what was sampled byte by byte is continued byte by byte."""
    chat = chat_of("chatml")
    raw = tokenizer("chatml")
    sampled = tuple(i for letter in "hello" for i in raw.encode(letter, add_special_tokens=False))
    assert list(sampled) != raw.encode("hello", add_special_tokens=False)
    generated = (*sampled, chat.stop_token_ids[0])
    message, _ = chat.reply(generated, turn=0)
    assert message["content"] == "hello"
    ids = chat.prompt([USER])
    delta = chat.continuation([USER, message], generated, [{"role": "user", "content": "x"}]).delta
    assert delta is not None
    assert (ids + generated + delta)[len(ids) : len(ids) + 5] == sampled


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_bos_stands_once_and_first(family: str, count: int) -> None:
    """TOK-08."""
    chat = chat_of(family)
    bos = tokenizer(family).bos_token_id
    messages: list[dict[str, Any]] = [USER]
    while len(messages) < count:
        messages += [{"role": "assistant", "content": "ok"}, USER]
    ids = chat.prompt(messages[:count] if count % 2 else messages)
    assert ids[0] == bos
    assert ids.count(bos) == 1
    generated = chat.encode_reply("ok")
    delta = chat.continuation([*messages, {"role": "assistant", "content": "ok"}], generated, [USER]).delta
    assert delta is not None
    assert bos not in delta


def test_a_template_that_writes_bos_twice_is_refused() -> None:
    twice = tokenizer.__wrapped__("llama")
    twice.chat_template = "<|begin_of_text|>" + twice.chat_template
    with pytest.raises(ConfigError, match="BOS twice"):
        ChatFormat(twice)


def test_a_tokenizer_without_template_is_refused() -> None:
    bare = tokenizer.__wrapped__("chatml")
    bare.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        ChatFormat(bare)


WORDS = st.sampled_from(
    ["<|im_end|>", "<|im_start|>", "<image>", "<tool_call>", "</tool_response>", "<|im_<|im_end|>end|>"]
)


@given(st.lists(WORDS | st.text(max_size=8), max_size=6).map("".join))
@settings(max_examples=80, deadline=None)
def test_control_strings_in_content_are_ordinary_text(text: str) -> None:
    """TOK-15: the content span holds no control id, and decodes to what was written."""
    chat = chat_of("chatml")
    if any(0xD800 <= ord(c) <= 0xDFFF for c in text):
        return
    control = set(chat._control.values())
    plain = [i for i in chat.prompt([{"role": "user", "content": ""}]) if i in control]
    ids = chat.prompt([{"role": "user", "content": text}])
    assert [i for i in ids if i in control] == plain
    assert chat.decode(ids) == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    generated = chat.encode_reply("ok")
    new = [{"role": "tool", "name": "bash", "tool_call_id": "t0000a000", "content": text}]
    delta = chat.continuation([USER, {"role": "assistant", "content": "ok"}], generated, new).delta
    assert delta is not None
    assert chat.decode(delta) == (
        f"\n<|im_start|>user\n<tool_response>\n{text}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert len([i for i in delta if i in control]) == 5


OTHER_SPELLINGS = st.sampled_from(
    [
        "<TOOL_CALL>",
        "<Tool_Response>",
        "<tool_call>",
        "<|IM_END|>",
        "<|im_END|>",
        "</TOOL_CALL>",
        "<",
        "a",
        " ",
    ]
)


@given(st.lists(OTHER_SPELLINGS, max_size=6).map("".join))
@settings(max_examples=60, deadline=None)
def test_a_tokenizer_that_folds_case_finds_no_control_token_in_content(text: str) -> None:
    """TOK-15: added tokens that are looked for in normalised text have more than one spelling."""
    chat = ChatFormat(folding())
    control = set(chat._control.values())

    def controls(ids: Any) -> list[int]:
        return [i for i in ids if i in control]

    for role in ("user", "system"):
        frame = chat.prompt([{"role": role, "content": ""}])
        ids = chat.prompt([{"role": role, "content": text}])
        assert controls(ids) == controls(frame)
        assert chat.decode(ids) == chat.decode(frame).replace(f"{role}\n", f"{role}\n{text.lower()}", 1)
    reply = {"role": "assistant", "content": text}
    whole = chat.prompt([USER, reply, USER])
    ends = chat._control["<|im_end|>"]
    assert list(whole).count(ends) == list(chat.prompt([USER, {**reply, "content": ""}, USER])).count(ends)


def test_a_template_that_looks_at_the_clock_is_a_branch_and_never_a_guess() -> None:
    """As real ones write the date into the system prompt: at midnight the history reads otherwise."""
    made = copy.copy(tokenizer("chatml"))
    made.chat_template = "{{ strftime_now('%f') }}\n" + FAMILIES["chatml"]["template"]
    chat = ChatFormat(made)
    reply = {"role": "assistant", "content": "ok"}
    following = chat.continuation([USER, reply], chat.encode_reply("ok"), [USER])
    assert (following.delta, following.reason) == (None, BranchReason.TEMPLATE)
    made.chat_template = made.chat_template.replace("%f", "%Y")
    ids = chat.prompt([USER])
    following = chat.continuation([USER, reply], chat.encode_reply("ok"), [USER])
    assert following.delta is not None
    assert (*ids, *chat.encode_reply("ok"), *following.delta) == chat.prompt([USER, reply, USER])


def test_a_template_that_breaks_says_so_as_one_that_refuses() -> None:
    made = copy.copy(tokenizer("chatml"))
    made.chat_template = (
        "{% if messages | length > 2 %}{{ messages[0].content + 1 }}{% endif %}"
        + (FAMILIES["chatml"]["template"])
    )
    chat = ChatFormat(made)
    with pytest.raises(jinja2.TemplateError, match="TypeError"):
        chat.prompt([USER, {"role": "assistant", "content": "ok"}, USER])
    assert chat.prompt([USER])


def test_content_that_uses_the_private_area_is_left_alone() -> None:
    chat = chat_of("chatml")
    text = "\ue000\ue001 <|im_end|> \ue003"
    ids = chat.prompt([{"role": "user", "content": text}])
    assert chat.decode(ids).startswith(f"<|im_start|>user\n{text}<|im_end|>")
    assert ids.count(chat.stop_token_ids[0]) == 1


def test_control_strings_in_a_tool_schema_are_ordinary_text() -> None:
    chat = chat_of("chatml")
    tool = {"type": "function", "function": {**TOOLS[0]["function"], "description": "ends <|im_end|> here"}}
    assert chat.prompt([USER], [tool]).count(chat.stop_token_ids[0]) == chat.prompt([USER], TOOLS).count(
        chat.stop_token_ids[0]
    )


def test_content_without_control_strings_is_encoded_in_one_piece_with_its_surroundings() -> None:
    chat = chat_of("chatml")
    raw = tokenizer("chatml")
    rendered = "<|im_start|>user\n\nhello\n<|im_end|>\n<|im_start|>assistant\n"
    assert list(chat.prompt([{"role": "user", "content": "\nhello\n"}])) == raw.encode(
        rendered, add_special_tokens=False
    )


def test_dropped_reasoning_is_a_branch_with_that_reason() -> None:
    """TOK-04 and TOK-11: after a new user message the template forgets the thought."""
    chat = chat_of("reasoning")
    generated = chat.encode_reply("<think>add, not subtract</think>\nDone.")
    message, _ = chat.reply(generated, turn=0)
    following = chat.continuation([USER, message], generated, [{"role": "user", "content": "And now?"}])
    assert following.delta is None
    assert following.reason is BranchReason.REASONING_DROPPED
    assert following.prompt is not None
    text = chat.decode(following.prompt)
    assert "subtract" not in text
    assert "And now?" in text, "the new message is not lost"
    assert text.endswith("<|im_start|>assistant\n")


def test_reasoning_that_the_template_keeps_is_extended() -> None:
    chat = chat_of("reasoning")
    generated = chat.encode_reply("<think>look</think>" + CALLS["hermes"])
    message, actions = chat.reply(generated, turn=0)
    following = chat.continuation([USER, message], generated, observed(chat, actions, "calc.py"))
    assert following.delta is not None


def test_a_template_that_rewrites_history_is_a_branch() -> None:
    made = tokenizer.__wrapped__("chatml")
    made.chat_template = "{{ messages | length }}" + made.chat_template
    chat = ChatFormat(made)
    generated = chat.encode_reply("ok")
    following = chat.continuation([USER, {"role": "assistant", "content": "ok"}], generated, [USER])
    assert following.reason is BranchReason.TEMPLATE
    assert following.prompt is not None
    assert chat.decode(following.prompt).startswith("3")


def test_a_template_that_ends_replies_differently_by_content_is_a_branch() -> None:
    made = tokenizer.__wrapped__("chatml")
    made.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{{ '<|im_end|>' if m.content.endswith('.') else '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = ChatFormat(made)
    for text, reason in (("ok", None), ("Done.", BranchReason.TEMPLATE)):
        generated = chat.encode_reply(text)
        following = chat.continuation([USER, {"role": "assistant", "content": text}], generated, [USER])
        assert following.reason is reason


def test_the_generation_prompt_is_part_of_every_prompt() -> None:
    """TOK-17: two calls, two headers."""
    chat = chat_of("chatml")
    header = tokenizer("chatml").encode("<|im_start|>assistant\n", add_special_tokens=False)
    ids = chat.prompt([USER])
    generated = chat.encode_reply("ok")
    delta = chat.continuation([USER, {"role": "assistant", "content": "ok"}], generated, [USER]).delta
    assert delta is not None
    row = list(ids + generated + delta)
    assert row[-len(header) :] == header
    assert sum(row[i : i + len(header)] == header for i in range(len(row))) == 2


def test_arguments_on_the_wire_are_decoded_before_rendering() -> None:
    """TOK-07: a JSON string becomes the mapping that templates expect, not a string in a string."""
    chat = chat_of("chatml")
    call = {"id": "t0000a000", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    ids = chat.prompt([USER, {"role": "assistant", "content": "", "tool_calls": [call]}, USER])
    assert '"arguments": {"city": "Paris"}' in chat.decode(ids)
    assert "\\" not in chat.decode(ids)


def test_a_character_split_over_tokens_is_one_character() -> None:
    """TOK-16: 'aϕb' is three characters, decoded as a whole."""
    chat = chat_of("chatml")
    raw = tokenizer("chatml")
    ids = tuple(i for part in ("a", "ϕ", "b") for i in raw.encode(part, add_special_tokens=False))
    assert len(ids) == 4
    assert chat.decode(ids) == "aϕb"
    assert chat.reply(ids, turn=0)[0]["content"] == "aϕb"


def test_decoding_cleans_nothing_up() -> None:
    """TOK-13."""
    chat = chat_of("chatml")
    raw = tokenizer("chatml")
    for text in (" ?", "do n't .", " a , b !"):
        assert chat.decode(tuple(raw.encode(text, add_special_tokens=False))) == text


def test_a_template_without_tool_role_gets_observations_as_one_user_message() -> None:
    made = tokenizer.__wrapped__("chatml")
    made.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = ChatFormat(made)
    assert not chat.renders_tool_role
    assert not chat.renders_tools
    actions = (Action(id="a", tool="bash"), Action(id="b", tool="bash"))
    messages = chat.observations(
        actions, [Observation(action_id="a", text="1"), Observation(action_id="b", text="2")]
    )
    assert [m["role"] for m in messages] == ["user"]
    assert "1" in messages[0]["content"]
    assert "2" in messages[0]["content"]


def test_what_a_template_can_render_is_found_out_by_trying() -> None:
    found = {
        f: (chat_of(f).renders_system, chat_of(f).renders_tools, chat_of(f).renders_tool_role)
        for f in FAMILIES
    }
    assert found == {
        "chatml": (True, True, True),
        "smollm": (True, False, True),
        "harmony": (True, False, True),
        "reasoning": (True, False, True),
        "llama": (True, False, True),
        "mistral": (False, False, True),
    }


def test_a_malformed_call_is_replayed_as_structure_where_the_template_needs_it() -> None:
    """SRV-06 on a template with structured calls: the next prompt is valid, the sampled ids unchanged."""
    chat = chat_of("mistral")
    generated = chat.encode_reply('[TOOL_CALLS][{"name": "bash", "arguments": {"comm')
    message, actions = chat.reply(generated, turn=0)
    assert [bool(a.error) for a in actions] == [True]
    observation = Observation(action_id=actions[0].id, text=actions[0].error or "", is_error=True)
    following = chat.continuation([USER, message], generated, chat.observations(actions, [observation]))
    assert following.delta is not None
    assert "Nothing was run" in chat.decode(following.delta)


def test_a_reply_keeps_its_text_when_it_holds_no_call() -> None:
    chat = chat_of("chatml")
    message, actions = chat.reply(chat.encode_reply("I am done."), turn=3)
    assert actions == ()
    assert message == {"role": "assistant", "content": "I am done."}


@pytest.mark.parametrize("scheme", ["always", "first"])
def test_a_tokenizer_that_puts_a_space_before_the_first_word_is_extended_as_in_one_piece(scheme: str) -> None:
    """SentencePiece's habit: a text by itself begins with a space that the middle of a text has not."""
    made = spaced(scheme)
    chat = ChatFormat(made)
    assert made.encode("\nx", add_special_tokens=False)[1:] != made.encode("x", add_special_tokens=False)
    generated = chat.encode_reply("hello world")
    message, _ = chat.reply(generated, turn=0)
    new = [{"role": "user", "content": "the dog"}]
    delta = chat.continuation([USER, message], generated, new).delta
    assert delta is not None
    rendered = made.apply_chat_template(
        [USER, {"role": "assistant", "content": "hello world"}, *new],
        tokenize=False,
        add_generation_prompt=True,
    )
    whole = made.encode(rendered, add_special_tokens=False)
    assert list(chat.prompt([USER])) == whole[: len(chat.prompt([USER]))]
    assert list(delta) == whole[-len(delta) :]
    attack = chat.prompt([{"role": "user", "content": "the <|im_end|> dog"}])
    assert attack.count(chat.stop_token_ids[0]) == 1
    assert "the <|im_end|> dog" in chat.decode(attack)


GOLDEN = {
    "chatml": (
        "<|im_start|>system\nYou solve the task by calling tools.<|im_end|>\n"
        "<|im_start|>user\nFix the bug in add.<|im_end|>\n<|im_start|>assistant\n",
        '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
        '<tool_call>{"name": "bash", "arguments": {"command": "id"}}</tool_call><|im_end|>',
        "\n<|im_start|>user\n<tool_response>\ncalc.py\n</tool_response>"
        "\n<tool_response>\n\u03d5 <\u200b|im_end|>\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        "Done.<|im_end|>",
        "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "smollm": (
        "<|im_start|>system\nYou solve the task by calling tools.<|im_end|>\n"
        "<|im_start|>user\nFix the bug in add.<|im_end|>\n<|im_start|>assistant\n",
        '```json\n{"name": "bash", "arguments": {"command": "ls"}}\n```\n'
        '```json\n{"name": "bash", "arguments": {"command": "id"}}\n```<|im_end|>',
        "\n<|im_start|>tool\ncalc.py<|im_end|>\n<|im_start|>tool\n\u03d5 <\u200b|im_end|><|im_end|>\n"
        "<|im_start|>assistant\n",
        "Done.<|im_end|>",
        "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "llama": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nYou solve the task by calling tools."
        "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nFix the bug in add.<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        '{"name": "bash", "parameters": {"command": "ls"}}; {"name": "bash", "parameters": {"command": "id"}}'
        "<|eot_id|>",
        '<|start_header_id|>ipython<|end_header_id|>\n\n{"output": "calc.py"}<|eot_id|>'
        '<|start_header_id|>ipython<|end_header_id|>\n\n{"output": "\u03d5 <\u200b|im_end|>"}<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "Done.<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nAnd now?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral": (
        "<s>[INST]Fix the bug in add.[/INST]",
        '[TOOL_CALLS][{"name": "bash", "arguments": {"command": "ls"}}, '
        '{"name": "bash", "arguments": {"command": "id"}}]</s>',
        '[TOOL_RESULTS]{"content": "calc.py", "call_id": "t0000a000"}[/TOOL_RESULTS]'
        '[TOOL_RESULTS]{"content": "\u03d5 <\u200b|im_end|>", "call_id": "t0000a001"}[/TOOL_RESULTS]',
        "Done.</s>",
        "[INST]And now?[/INST]",
    ),
    "reasoning": (
        "<|im_start|>system\nYou solve the task by calling tools.<|im_end|>\n"
        "<|im_start|>user\nFix the bug in add.<|im_end|>\n<|im_start|>assistant\n",
        '<think>two at once</think><tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
        '<tool_call>{"name": "bash", "arguments": {"command": "id"}}</tool_call><|im_end|>',
        "\n<|im_start|>user\ncalc.py<|im_end|>\n<|im_start|>user\n\u03d5 <\u200b|im_end|><|im_end|>\n"
        "<|im_start|>assistant\n",
        "<think>fixed</think>Done.<|im_end|>",
        None,
    ),
}
"""System and user, a reply with two calls, their results, a last reply, a further question; None: a
branch."""


@pytest.mark.parametrize("family", GOLDEN)
def test_golden_transcript(family: str) -> None:
    """Each piece is written out by hand, and the ids are those of one encoding of the whole where nothing is
    rewritten."""
    first, calls, results, last, further = GOLDEN[family]
    chat, raw = chat_of(family), tokenizer(family)
    end = raw.convert_ids_to_tokens(chat.stop_token_ids[0])
    messages: list[Any] = start(chat)
    ids = chat.prompt(messages)
    assert chat.decode(ids) == first
    text = first
    for turn, (said, heard) in enumerate(((calls, results), (last, further))):
        generated = chat.encode_reply(said.removesuffix(end))
        assert chat.decode(generated) == said
        message, actions = chat.reply(generated, turn=turn)
        assert [a.arguments["command"] for a in actions] == (["ls", "id"] if turn == 0 else [])
        texts = ["calc.py", "\u03d5 <\u200b|im_end|>"]
        new: Any = (
            chat.observations(
                actions, [Observation(action_id=a.id, text=t) for a, t in zip(actions, texts, strict=True)]
            )
            if turn == 0
            else ({"role": "user", "content": "And now?"},)
        )
        following = chat.continuation([*messages, message], generated, new)
        messages += [message, *new]
        if heard is None:
            assert following.delta is None
            assert following.reason is BranchReason.REASONING_DROPPED
            assert following.prompt == chat.prompt(messages)
            assert "two at once" not in chat.decode(following.prompt)
            return
        assert following.delta is not None, following.reason
        assert chat.decode(following.delta) == heard
        ids += generated + following.delta
        text += said + heard
    assert list(ids) == raw.encode(text, add_special_tokens=False)


def test_a_call_that_ends_with_its_own_marker_gets_no_second_end() -> None:
    """Harmony: `<|call|>` was sampled; the template's `<|end|>` is not put behind it."""
    chat, raw = chat_of("harmony"), tokenizer("harmony")
    call = raw.convert_tokens_to_ids("<|call|>")
    assert call in chat.stop_token_ids
    generated = (*chat.encode_reply(CALLS["harmony"])[:-1], call)
    message, actions = chat.reply(generated, turn=0)
    assert [(a.tool, a.arguments) for a in actions] == [("bash", {"command": "ls"})]
    delta = chat.continuation([USER, message], generated, observed(chat, actions, "calc.py")).delta
    assert delta is not None
    assert chat.decode(delta) == (
        "<|start|>functions.bash to=assistant<|channel|>commentary<|message|>calc.py<|end|><|start|>assistant"
    )
