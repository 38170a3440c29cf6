"""Messages to token ids through the model's own chat template, appending only what is new.

The ids of a conversation are never made twice. The first prompt is one rendering; after that only the text of
the new messages is encoded, found as the difference between two renderings of the same history (with and
without them) and only if the first is literally the beginning of the second. Where it is not (a template that
drops earlier reasoning, one that rewrites history), the result is a branch with its reason, never a guess.

What is data stays data: control tokens spelled inside instructions, tool output or schemas are encoded as
ordinary text, in every spelling that the tokenizer would read as one (it may fold case or width first).
Rendered text is encoded without added special tokens, so that a template's BOS is the only one.

Decoding is for reading alone (parsing tool calls, reports): nothing decoded here is ever encoded for
training, except on a branch, which is a new prompt and says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jinja2

from agentrl.errors import ConfigError, EvidenceError
from agentrl.types import Action, BranchReason, Observation
from harness import actions as tool_calls
from harness.prompt import Message
from harness.transcript import Ids

_PRIVATE_AREAS = (0xE000, 0xF0000, 0x100000)
"""Starts of Unicode's private-use areas: one code point stands for each control string found in content, in
an area that no text of the conversation uses."""
_PROBE = "Qx7probe"
_REASONING_END = "</think>"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """What comes after a generation: `delta` to append, or a whole new `prompt` with the reason for
    leaving."""

    delta: Ids | None = None
    prompt: Ids | None = None
    reason: BranchReason | None = None


class ChatFormat:
    """One tokenizer with its chat template and its way of writing tool calls.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        tool_parser: a row of `harness.actions.FORMATS`.

    Raises:
        ConfigError: no template, or one that does not render a plain exchange or begins with two BOS.
    """

    def __init__(self, tokenizer: Any, *, tool_parser: str = "hermes") -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "the tokenizer has no chat template.",
                fix="Set tokenizer.chat_template, or use the instruct variant of the model.",
            )
        self.tokenizer = tokenizer
        self.tool_format = tool_calls.get(tool_parser)
        added = {t.content: (i, bool(t.special)) for i, t in tokenizer.added_tokens_decoder.items()}
        self._control = {word: i for word, (i, _) in added.items() if word.strip()}
        self._special = frozenset(word for word, (_, special) in added.items() if special and word.strip())
        self._all_words = _any_of(self._control)
        self._special_words = _any_of(self._special)
        self._mark_of = {word: n for n, word in enumerate(sorted(self._control))}
        self._word_of = sorted(self._control)
        self._other_spellings = _reads_other_spellings(tokenizer)
        self._newline = self._encode("\n")
        self._prefixes = self._encode("\nx")[len(self._newline) :] != self._encode("x")
        self._structured = False
        self._tail = self._find_tail()
        tail_ids = self._encode(self._tail) if self._tail else []
        ends = [tail_ids[0]] if tail_ids and tail_ids[0] in self._control.values() else []
        self._end_id = ends[0] if ends else None
        of_calls = [self._control[word] for word in self.tool_format.ends if word in self._control]
        self._ends = frozenset([*ends, *of_calls])
        eos = tokenizer.eos_token_id
        self.stop_token_ids: Ids = tuple(
            dict.fromkeys([*ends, *([eos] if eos is not None else []), *of_calls])
        )
        self.vocab_size = len(tokenizer)
        self.renders_system = self._shows([{"role": "system", "content": _PROBE}, _user("a")])
        self.renders_tools = self._shows([_user("a")], tools=[_PROBE_TOOL])
        self.renders_tool_role = self._shows(
            [_user("a"), _assistant("b", _PROBE_ACTION), _tool_message(_PROBE)]
        )
        self.renders_tool_calls = self._shows(
            [
                _user("a"),
                {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]},
                _tool_message("b"),
            ]
        )

    # -------------------------------------------------------------------------------------------- to tokens

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Ids:
        """The ids of a whole conversation, ready for the next generation."""
        area = self._private_area(messages, tools)
        text = self._render(lambda: self._text(messages, tools, generate=True, area=area))
        return self._encode_rendered(text, area)

    def continuation(
        self,
        history: Sequence[Message],
        generated: Ids,
        new: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Continuation:
        """What to append to the exact ids so far.

        Args:
            history: all messages so far; the last is the reply that `generated` was read as.
            generated: the sampled ids of that reply, with the end-of-turn token if it was sampled.
            new: what happened since (observations, user messages).
        """
        area = self._private_area([*history, *new], tools)
        before, after = self._render(
            lambda: (
                self._text(history, tools, generate=False, area=area),
                self._text([*history, *new], tools, generate=True, area=area),
            )
        )
        if not after.startswith(before) or not before.endswith(self._tail):
            reason = BranchReason.REASONING_DROPPED if _drops(before, after) else BranchReason.TEMPLATE
            return Continuation(prompt=self._encode_rendered(after, area), reason=reason)
        ids = self._encode_rendered(self._tail + after[len(before) :], area, middle=True)
        if ids[:1] == (self._end_id,) and generated and generated[-1] in self._ends:
            ids = ids[1:]
        return Continuation(delta=ids)

    def reply(self, generated: Ids, *, turn: int, cut: bool = False) -> tuple[Message, tuple[Action, ...]]:
        """The assistant message that the ids amount to, and the actions in it.

        `cut`: the generation ran into a limit. If no call was written before that, it is no answer but a
        format error, and the model is told so.
        """
        ids = list(generated)
        while ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        text = self.decode(tuple(ids))
        parsed = tool_calls.parse(text, turn=turn, tool_format=self.tool_format.name)
        actions = parsed.actions
        if cut and not actions:
            actions = (tool_calls.cut_off(len(ids), turn=turn, tool_format=self.tool_format.name),)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if actions:
            message |= {"outside": parsed.content, "actions": actions}
        return message, actions

    def observations(
        self, actions: Sequence[Action], observations: Sequence[Observation]
    ) -> tuple[Message, ...]:
        """One tool message per observation; one user message for all where a template has no such role."""
        if self.renders_tool_role:
            return tuple(
                {"role": "tool", "name": a.tool, "tool_call_id": a.id, "content": o.text}
                for a, o in zip(actions, observations, strict=True)
            )
        parts = [f"<tool_response>\n{o.text}\n</tool_response>" for o in observations]
        return ({"role": "user", "content": "\n".join(parts)},) if parts else ()

    def decode(self, ids: Ids) -> str:
        """The text of an id sequence as a whole (bytes of one character may span tokens), nothing cleaned
        up."""
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def encode_text(self, text: str, *, middle: bool) -> Ids:
        """Ids of raw text in which control strings are control tokens: for callers that write the template
        themselves. `middle`: it continues a sequence; otherwise the tokenizer's own beginning is added."""
        if middle:
            return tuple(self._encode(text, middle=True))
        return tuple(self.tokenizer.encode(text))

    def encode_reply(self, text: str) -> Ids:
        """Ids that a demonstrator's text would have had, ended by the end-of-turn token.

        Control strings of the text stay control tokens: a demonstrator writes tool calls as a model samples
        them.
        """
        return (*self._encode(text, middle=True), *self.stop_token_ids[:1])

    # -------------------------------------------------------------------------------------------- rendering

    def _render(self, text: Callable[[], T]) -> T:
        """One or more renderings, all in the same way. A template that refuses a reply as text gets the
        calls of all replies as structure, from then on."""
        try:
            return text()
        except jinja2.TemplateError:
            if self._structured:
                raise
            self._structured = True
            return text()

    def _text(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, generate: bool, area: int
    ) -> str:
        """The template's text, with a private character in place of every control string in content."""
        try:
            text: str = self.tokenizer.apply_chat_template(
                [self._wire(message, area) for message in messages],
                tools=[self._neutral(dict(tool), area, self._all_words) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=generate,
            )
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            # A template is a program: on messages that its author did not think of it breaks in any way.
            raise jinja2.TemplateRuntimeError(f"{type(error).__name__}: {error}") from error
        return text

    def _wire(self, message: Message, area: int) -> dict[str, Any]:
        """A message as the template gets it. A reply keeps its ordinary added tokens (`<tool_call>`,
        `<think>`), which templates look for and which were sampled as such; everything else is data."""
        if message["role"] != "assistant":
            return {
                key: self._neutral(value, area, self._all_words) if key != "role" else value
                for key, value in message.items()
            }
        content = self._neutral(message["content"], area, self._special_words)
        wire: dict[str, Any] = {"role": "assistant", "content": content}
        calls: list[dict[str, Any]] = [
            {"id": a.id, "type": "function", "function": {"name": a.tool, "arguments": a.arguments}}
            for a in message.get("actions", ())
        ]
        if calls and self._structured:
            wire["content"] = self._neutral(message["outside"], area, self._special_words)
        elif not calls and message.get("tool_calls"):
            calls = [_decoded(call) for call in message["tool_calls"]]
        else:
            return wire
        wire["tool_calls"] = self._neutral(calls, area, self._special_words)
        return wire

    def _neutral(self, value: Any, area: int, words: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            marked = words.sub(lambda found: chr(area + self._mark_of[found.group()]), value)
            return self._cut_spellings(marked, area, words) if self._other_spellings else marked
        if isinstance(value, Mapping):
            return {self._neutral(k, area, words): self._neutral(v, area, words) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._neutral(item, area, words) for item in value]
        return value

    def _cut_spellings(self, text: str, area: int, words: re.Pattern[str]) -> str:
        """Content in which the tokenizer finds no control token: a mark after the first character of each
        spelling that it would read as one."""
        ids = {self._control[word] for word in self._word_of if words.fullmatch(word)}
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        cuts = [
            start + len(text[start:end]) - len(text[start:end].lstrip()) + 1
            for token, (start, end) in zip(found["input_ids"], found["offset_mapping"], strict=True)
            if token in ids and end - start > 1
        ]
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        return chr(area + len(self._word_of)).join(pieces)

    def _private_area(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> int:
        text = "".join(_strings(messages)) + "".join(_strings(tools))
        for start in _PRIVATE_AREAS:
            used = re.compile(f"[{chr(start)}-{chr(start + len(self._word_of))}]")
            if not used.search(text):
                return start
        raise EvidenceError(
            "a conversation uses every private-use area of Unicode.",
            fix="Strip such characters from tool output.",
        )

    # --------------------------------------------------------------------------------------------- encoding

    def _encode(self, text: str, *, middle: bool = False) -> list[int]:
        """Ids of a text, control strings as control tokens. `middle`: it does not begin the sequence, so a
        tokenizer that puts a space before the first word must not."""
        if middle and self._prefixes:
            ids: list[int] = self.tokenizer.encode("\n" + text, add_special_tokens=False)
            if ids[: len(self._newline)] == self._newline:
                return ids[len(self._newline) :]
        whole: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return whole

    def _encode_rendered(self, text: str, area: int, *, middle: bool = False) -> Ids:
        """Ids of a template's text: one piece, cut only where content spelled a control string."""
        last = area + len(self._word_of)  # this one only cuts
        ids: list[int] = []
        for piece in re.split(f"([{chr(area)}-{chr(last)}])", text):
            if not piece:
                continue
            if len(piece) == 1 and area <= ord(piece) <= last:
                if ord(piece) < last:
                    ids.extend(self._encode_as_text(self._word_of[ord(piece) - area]))
            else:
                ids.extend(self._encode(piece, middle=middle or bool(ids)))
        return tuple(ids)

    def _encode_as_text(self, word: str) -> list[int]:
        """A control string as ordinary text: cut after its first character, so that nothing matches."""
        ids: list[int] = []
        for part in (word[:1], word[1:]):
            at = 0
            for found in self._all_words.finditer(part):
                ids.extend(self._encode(part[at : found.start()], middle=True))
                if len(found.group()) < 2:
                    raise ConfigError(f"the tokenizer can not write '{word}' as ordinary text.")
                ids.extend(self._encode_as_text(found.group()))
                at = found.end()
            if part[at:]:
                ids.extend(self._encode(part[at:], middle=True))
        return ids

    # -------------------------------------------------------------------------------------------- the probes

    def _find_tail(self) -> str:
        """What the template puts after a reply: the end-of-turn marker and what follows it."""
        try:
            text = self._text([_user("a"), _assistant(_PROBE)], (), generate=False, area=_PRIVATE_AREAS[0])
            whole = self.prompt([_user("a")])
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"the chat template does not render a plain exchange: {error}", fix="Use another template."
            ) from error
        bos = self.tokenizer.bos_token_id
        if bos is not None and whole[:2] == (bos, bos):  # more of them may be its turn markers
            raise ConfigError("the chat template writes BOS twice.", fix="Remove one from the template.")
        before, found, tail = text.rpartition(_PROBE)
        if not found or not before:
            raise ConfigError(
                "the chat template does not show a reply's content.", fix="Use another template."
            )
        return tail

    def _shows(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> bool:
        structured = self._structured
        try:
            text = self._render(lambda: self._text(messages, tools, generate=True, area=_PRIVATE_AREAS[0]))
        except jinja2.TemplateError:
            return False
        finally:
            self._structured = structured
        return _PROBE in text


# -------------------------------------------------------------------------------------------------------
# pieces


def _any_of(words: Mapping[str, int] | frozenset[str]) -> re.Pattern[str]:
    longest_first = sorted(words, key=lambda word: (-len(word), word))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _reads_other_spellings(tokenizer: Any) -> bool:
    """Whether an added token is looked for in normalised text (case folded, say), so that other strings than
    its own become it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    normalised = any(token.normalized for token in tokenizer.added_tokens_decoder.values())
    return normalised and getattr(backend, "normalizer", None) is not None


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for item in pair for text in _strings(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _strings(item)]
    if isinstance(value, Action):
        return _strings(value.arguments)
    return []


def _decoded(call: Mapping[str, Any]) -> dict[str, Any]:
    """An OpenAI tool call with its arguments as a mapping: on the wire they are a JSON string."""
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}


def _drops(before: str, after: str) -> bool:
    return before.count(_REASONING_END) > after.count(_REASONING_END)


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str, *actions: Action) -> Message:
    return {"role": "assistant", "content": content, "outside": content, "actions": actions}


def _tool_message(content: str) -> Message:
    return {"role": "tool", "name": "probe", "tool_call_id": _PROBE_ACTION.id, "content": content}


_PROBE_ACTION = Action(id="t0000a000", tool="probe", arguments={})
_PROBE_CALL: Mapping[str, Any] = {
    "id": _PROBE_ACTION.id,
    "type": "function",
    "function": {"name": _PROBE, "arguments": "{}"},
}
_PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": _PROBE,
        "description": "probe",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
