"""Sampled text to actions: which tools the policy asked for, or what about its output was unusable.

A wire format is a row of the table `FORMATS`. Parsing never raises on what a model wrote: malformed output
becomes an `Action` whose `error` tells the model what was wrong (its tokens stay trained, the tool never
runs). Text is only read here; what is trained are the recorded ids.

It does not run anything and does not know which tools exist (the session answers for an unknown name).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from agentrl.errors import ConfigError, nearest
from agentrl.types import Action

MAX_NESTING = 64
"""Lists and objects within each other. What is deeper can be read here, and then not be written by somebody
further down, who has less stack left."""
FORMAT_ERROR_TOOL = "format_error"
"""`Action.tool` of output in which no tool name could be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """`content` is the text outside the calls; `actions` are in the order in which they were written."""

    content: str
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stretch of text that asks for tools: `body` is JSON, unless `problem` says what is wrong already."""

    start: int
    end: int
    body: str
    name: str | None = None
    """Given outside the JSON; `body` is then the arguments alone."""
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One way of writing tool calls. `example` is shown to a model that got it wrong."""

    name: str
    pieces: Callable[[str], Iterator[Piece]]
    example: str
    written: Callable[[str, Mapping[str, Any]], str]
    """A call (name, arguments) as a model would write it."""
    ends: tuple[str, ...] = ()
    """Control strings that end a reply with a call in it, where that is not the end of any other reply."""


def parse(text: str, *, turn: int, tool_format: str = "hermes") -> Parsed:
    """Read the tool calls out of one generation.

    Args:
        text: decoded generation without its end-of-turn marker.
        turn: number of the turn, part of the action ids (nine letters and digits, as some templates demand).
        tool_format: a row of `FORMATS`.
    """
    row = get(tool_format)
    actions: list[Action] = []
    content: list[str] = []
    at = 0
    for piece in row.pieces(text):
        content.append(text[at : piece.start])
        at = piece.end
        for tool, arguments, error in _calls(piece, row):
            actions.append(
                Action(
                    id=f"t{turn % 10_000:04d}a{len(actions) % 1000:03d}",
                    tool=tool,
                    arguments=arguments,
                    error=error,
                )
            )
    content.append(text[at:])
    return Parsed(content="".join(content).strip(), actions=tuple(actions))


def cut_off(tokens: int, *, turn: int, tool_format: str) -> Action:
    """The format error of a reply that ran into a limit before it called anything."""
    problem = f"your reply was cut off after {tokens} tokens"
    return Action(
        id=f"t{turn % 10_000:04d}a000",
        tool=FORMAT_ERROR_TOOL,
        error=_advice(problem, get(tool_format)),
    )


def get(name: str) -> ToolFormat:
    """A row of the table; `ConfigError` names the nearest."""
    if name not in FORMATS:
        raise ConfigError(f"Unknown tool format '{name}'.", fix=nearest(name, FORMATS))
    return FORMATS[name]


# ------------------------------------------------------------------------------------------------ reading
# JSON


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _loads(body: str) -> Any:
    """Strict JSON. ValueError says what is wrong in words for the model."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    level = [value]
    for _ in range(MAX_NESTING + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    if level:
        raise ValueError("it is nested too deeply")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("it holds a lone surrogate, which is not text") from error
    return value


def _calls(piece: Piece, row: ToolFormat) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    """(tool, arguments, error) of each call of a piece; at least one."""
    problem = piece.problem
    value: Any = None
    if problem is None:
        try:
            value = _loads(piece.body)
        except ValueError as error:
            problem = f"the tool call is not valid JSON: {error}"
    if problem is not None:
        yield piece.name or FORMAT_ERROR_TOOL, {}, _advice(problem, row)
        return
    if piece.name is not None:
        value = {"name": piece.name, "arguments": value}
    entries = value if isinstance(value, list) and value else [value]
    for entry in entries:
        yield _call(entry, row)


def _call(entry: Any, row: ToolFormat) -> tuple[str, dict[str, Any], str | None]:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"]:
        return FORMAT_ERROR_TOOL, {}, _advice("the tool call has no name", row)
    name: str = entry["name"]
    arguments = entry.get("arguments", entry.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = _loads(arguments)
        except ValueError as error:
            return name, {}, _advice(f"the arguments of {name} are not valid JSON: {error}", row)
    if not isinstance(arguments, dict):
        return name, {}, _advice(f"the arguments of {name} are not an object", row)
    return name, arguments, None


def _advice(problem: str, row: ToolFormat) -> str:
    return f"Nothing was run: {problem}. Write a tool call like this: {row.example}"


# ----------------------------------------------------------------------------------------------- the formats


def _hermes(text: str) -> Iterator[Piece]:
    opening, closing = "<tool_call>", "</tool_call>"
    at = 0
    while (start := text.find(opening, at)) >= 0:
        inner = start + len(opening)
        end = text.find(closing, inner)
        following = text.find(opening, inner)
        if end < 0 or 0 <= following < end:  # not closed; its JSON may be complete all the same
            stop = after = following if following >= 0 else len(text)
        else:
            stop, after = end, end + len(closing)
        yield Piece(start=start, end=after, body=text[inner:stop])
        at = after
    stray = text.find(closing, at)
    if stray >= 0:
        problem = "</tool_call> without <tool_call> before it"
        yield Piece(start=stray, end=stray + len(closing), body="", problem=problem)


def _llama(text: str) -> Iterator[Piece]:
    tag = "<|python_tag|>"
    stripped = text.strip()
    tagged = stripped.startswith(tag)
    body = stripped.removeprefix(tag).strip()
    if not tagged and not (body.startswith("{") and '"name"' in body):
        return
    decoder = json.JSONDecoder()
    at, pieces = 0, []
    while at < len(body):
        try:
            _, stop = decoder.raw_decode(body, at)
        except (ValueError, RecursionError):
            stop = len(body)
        pieces.append(body[at:stop])
        while stop < len(body) and body[stop] in "; \n\t":
            stop += 1
        at = stop
    for number, piece in enumerate(pieces or [""]):
        yield Piece(start=0 if number == 0 else len(text), end=len(text), body=piece)


def _mistral(text: str) -> Iterator[Piece]:
    marker = "[TOOL_CALLS]"
    at = text.find(marker)
    while at >= 0:
        inner = at + len(marker)
        end = text.find(marker, inner)
        stop = end if end >= 0 else len(text)
        body = text[inner:stop].strip()
        named = re.match(r"([A-Za-z0-9_.-]+)\s*(?:\[ARGS\])?\s*(\{.*)", body, re.DOTALL)
        if named:
            yield Piece(start=at, end=stop, name=named.group(1), body=named.group(2))
        else:
            yield Piece(start=at, end=stop, body=body)
        at = end


def _fenced(text: str) -> Iterator[Piece]:
    for match in re.finditer(r"```(?:json|tool_call)\s*\n(.*?)(?:```|\Z)", text, re.DOTALL):
        yield Piece(start=match.start(), end=match.end(), body=match.group(1))


_HARMONY_MESSAGE = re.compile(
    r"((?:<\|(?:start|channel|constrain)\|>|[^<])*)<\|message\|>(.*?)(?:<\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)


def _harmony(text: str) -> Iterator[Piece]:
    """Messages of channels; a call is one that is addressed to a function."""
    for match in _HARMONY_MESSAGE.finditer(text):
        to = re.search(r"\bto=functions\.([A-Za-z0-9_.-]+)", match.group(1))
        if to:
            yield Piece(start=match.start(), end=match.end(), name=to.group(1), body=match.group(2))


def _json(name: str, **given: Mapping[str, Any]) -> str:
    return json.dumps({"name": name, **given}, ensure_ascii=False)


_HARMONY_TO = "<|channel|>commentary to=functions."
_JSON_EXAMPLE = '{"name": "bash", "arguments": {"command": "ls"}}'

FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        row.name: row
        for row in (
            ToolFormat(
                name="hermes",
                pieces=_hermes,
                example=f"<tool_call>{_JSON_EXAMPLE}</tool_call>",
                written=lambda name, given: f"<tool_call>\n{_json(name, arguments=given)}\n</tool_call>",
            ),
            ToolFormat(
                name="llama3",
                pieces=_llama,
                example='{"name": "bash", "parameters": {"command": "ls"}}',
                written=lambda name, given: _json(name, parameters=given),
            ),
            ToolFormat(
                name="mistral",
                pieces=_mistral,
                example=f"[TOOL_CALLS] [{_JSON_EXAMPLE}]",
                written=lambda name, given: f"[TOOL_CALLS] [{_json(name, arguments=given)}]",
            ),
            ToolFormat(
                name="fenced",
                pieces=_fenced,
                example=f"```json\n{_JSON_EXAMPLE}\n```",
                written=lambda name, given: f"```json\n{_json(name, arguments=given)}\n```",
            ),
            ToolFormat(
                name="harmony",
                pieces=_harmony,
                example=f'{_HARMONY_TO}bash <|constrain|>json<|message|>{{"command": "ls"}}<|call|>',
                written=lambda name, given: (
                    f"{_HARMONY_TO}{name} <|constrain|>json<|message|>{json.dumps(given, ensure_ascii=False)}"
                ),
                ends=("<|call|>",),
            ),
        )
    }
)
"""Every way of writing tool calls that the harness reads, by name."""
