"""What is asked of the proxied model and what it answers, whatever the wire format.

Messages have one form here, close to OpenAI's: role (`system`, `user`, `assistant`, `tool`), content as text,
`tool_calls` with their arguments as JSON text, `reasoning`, `tool_call_id`. The wire formats turn their
bodies into an `Ask` and an `Answer` into theirs; everything between is the same for all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from agentrl.types import ModelCall
from harness.prompt import Message

FinishedBy = Literal["stop", "length", "tool_calls", "stop_string"]


class Refusal(Exception):
    """A request that is not answered. Each wire format writes it as its own kind of error.

    Args:
        status: HTTP status.
        kind: OpenAI's and Anthropic's error type, which mostly agree (`invalid_request_error`, …).
        code: one word for machines; the cause in the fidelity report.
        retry: whether the same request may succeed later; told to clients that listen.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str = "invalid_request",
        param: str | None = None,
        retry: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param
        self.retry = retry


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """How the client would like to sample; None where it did not say. What is obeyed is the session's to
    decide."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. Either `messages` (a conversation) or `prompt` (raw text or ids to continue)."""

    model: str
    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    prompt: str | tuple[int, ...] | None = None
    max_tokens: int | None = None
    n: int = 1
    stops: tuple[str, ...] = ()
    wishes: Wishes = Wishes()
    log_probs: bool = False
    stream: bool = False
    stream_usage: bool = False
    unenforced: tuple[str, ...] = ()
    """Asked for, and left to the model: forcing it (a grammar) would sample another distribution."""
    extra: Mapping[str, Any] | None = None
    """What a wire format must repeat in its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """`arguments` is JSON text, as sampled where it could be read."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFact:
    """One sampled token as text, its bytes and its log-prob."""

    text: str
    bytes: tuple[int, ...]
    log_prob: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One reply as the client sees it."""

    call: ModelCall
    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finished_by: FinishedBy
    stop: str | None = None
    """The stop string that ended it."""
    tokens: tuple[TokenFact, ...] = ()
    """Only when asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All replies to one request."""

    ask: Ask
    serial: str
    """Unique in all sessions: what ids on the wire are made of."""
    created: int
    prompt_tokens: int
    choices: tuple[Choice, ...]

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.call.generation_token_ids) for choice in self.choices)


# -------------------------------------------------------------------------------- reading bodies


def refuse(message: str, *, param: str | None = None, code: str = "invalid_request") -> Refusal:
    return Refusal(message, param=param, code=code)


def field(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
    """A field of a body, null read as absent. Raises `Refusal` when it has another type."""
    value = body.get(name)
    if value is None:
        return default
    wrong_bool = isinstance(value, bool) and kind is not bool and bool not in _several(kind)
    if not isinstance(value, kind) or wrong_bool:
        names = " or ".join(k.__name__ for k in _several(kind))
        raise refuse(f"'{name}' must be {names}, not {type(value).__name__}.", param=name)
    return value


def _several(kind: type | tuple[type, ...]) -> tuple[type, ...]:
    return kind if isinstance(kind, tuple) else (kind,)


def number(body: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    value = field(body, name, (int, float))
    if value is not None and not low <= value <= high:
        raise refuse(f"'{name}' must be between {low:g} and {high:g}, not {value}.", param=name)
    return None if value is None else float(value)


def whole(body: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = field(body, name, int)
    if value is not None and not low <= value <= high:
        raise refuse(f"'{name}' must be between {low} and {high}, not {value}.", param=name)
    return None if value is None else int(value)


OTHER_TOKENS = "the tokens would not be samples of the recorded policy"
OTHER_PROMPT = "the prompt would not be what the model's own template makes of the messages"


def neutral(body: Mapping[str, Any], why: str = OTHER_TOKENS, /, **values: tuple[Any, ...]) -> None:
    """Refuse settings that have a value other than those that change nothing. By default these are settings
    that would sample another distribution than the recorded log-probs speak of."""
    for name, allowed in values.items():
        value = body.get(name)
        if value is not None and value not in allowed:
            raise Refusal(
                f"'{name}' is not supported: {why}. Leave it out.",
                param=name,
                code="unsupported_parameter",
            )


def role_of(message: Any, roles: Mapping[str, str], where: str) -> str:
    """Our role of a message in a wire format. Raises `Refusal`."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str) or role not in roles:
        raise refuse(f"{where} has no role of {', '.join(roles)}.", param=where)
    return roles[role]


def texts(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A text, or a list of texts that are not empty. Raises `Refusal`."""
    given = field(body, name, (str, list), [])
    found = (given,) if isinstance(given, str) else tuple(given)
    if not all(isinstance(one, str) and one for one in found):
        raise refuse(f"'{name}' must be text, or a list of texts that are not empty.", param=name)
    return found


def plain_text(content: Any, *, where: str, kinds: tuple[str, ...]) -> str:
    """Content as text: a string, or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refuse(f"{where} must be text or a list of parts.", param=where)
    parts = []
    for part in content:
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, Mapping) and part.get("type") in kinds and isinstance(part.get("text"), str):
            parts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise refuse(
                f"{where} has a part of type '{kind}'; this model reads text only.",
                param=where,
                code="unsupported_content",
            )
    return "".join(parts)


def arguments_text(text: Any, *, where: str) -> str:
    """Arguments of a call as JSON text of an object. Raises `Refusal` for anything else."""
    if isinstance(text, Mapping):
        return json.dumps(text, ensure_ascii=False)
    try:
        value = json.loads(text or "{}")
    except (TypeError, ValueError, RecursionError) as error:
        raise refuse(f"{where} is not JSON: {error}.", param=where) from error
    if not isinstance(value, dict):
        raise refuse(f"{where} is not a JSON object.", param=where)
    return str(text or "{}")


def function_tool(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """A tool in the form that chat templates render."""
    if not isinstance(name, str) or not name:
        raise refuse("A tool has no name.", param="tools")
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None and not isinstance(parameters, Mapping):
        raise refuse(f"The parameters of tool '{name}' are no JSON schema.", param="tools")
    function["parameters"] = parameters if parameters is not None else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def checked(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Messages whose tool results all answer a call before them. Raises `Refusal`."""
    if not messages:
        raise refuse("'messages' is empty: there is nothing to answer.", param="messages")
    open_calls: set[str] = set()
    for message in messages:
        for call in message.get("tool_calls", ()):
            open_calls.add(call["id"])
        if message["role"] == "tool" and message["tool_call_id"] not in open_calls:
            raise refuse(
                f"A tool result answers '{message['tool_call_id']}', which no message before it called.",
                param="messages",
            )
    return messages


def sse(data: Mapping[str, Any] | str, event: str | None = None) -> bytes:
    """One server-sent event."""
    body = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {body}\n\n".encode()


def pieces(text: str) -> Iterator[str]:
    """A text in the pieces in which a stream carries it; none for an empty one."""
    for at in range(0, len(text), STREAM_CHARS):
        yield text[at : at + STREAM_CHARS]


STREAM_CHARS = 64
"""Characters of one streamed piece. The reply is complete before the first is sent: it is evidence by
then."""
