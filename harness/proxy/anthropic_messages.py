"""Anthropic's `messages` and `messages/count_tokens`: blocks to an `Ask`, an `Answer` to blocks and events.

https://docs.claude.com/en/api/messages
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from harness.prompt import Message
from harness.proxy.exchange import (
    Answer,
    Ask,
    Choice,
    Refusal,
    Wishes,
    arguments_text,
    checked,
    field,
    function_tool,
    neutral,
    number,
    pieces,
    plain_text,
    refuse,
    role_of,
    sse,
    texts,
    whole,
)

FINISH = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "stop_string": "stop_sequence",
}
ROLES = {role: role for role in ("user", "assistant", "system")}
KINDS = {503: "overloaded_error", 500: "api_error", 404: "not_found_error", 403: "permission_error"}


def parse(body: Mapping[str, Any], *, counting: bool = False) -> Ask:
    """A request. Raises `Refusal`. `counting`: a body of `count_tokens`, which has no `max_tokens`."""
    neutral(body, "what a reply looks like is left to the model", output_format=())
    neutral(body, "a session has no tools and no state beside what is sent", mcp_servers=([],), container=())
    limit = whole(body, "max_tokens", 1, 1 << 30)
    if limit is None and not counting:
        raise refuse("max_tokens: Field required", param="max_tokens")
    messages: list[Message] = []
    system = plain_text(body.get("system"), where="system", kinds=("text",))
    if system:
        messages.append({"role": "system", "content": system})
    for at, message in enumerate(field(body, "messages", list, [])):
        messages += _messages(message, f"messages.{at}")
    if messages and messages[-1]["role"] == "assistant" and not counting:
        raise refuse(
            "messages: the last is the assistant's. Prefilling a reply is not supported: a reply is sampled "
            "whole. End with a message of the user.",
            param="messages",
        )
    tools, unenforced = _tools(body)
    return Ask(
        model=field(body, "model", str, ""),
        messages=checked(tuple(messages)),
        tools=tools,
        max_tokens=limit,
        stops=texts(body, "stop_sequences"),
        wishes=Wishes(
            temperature=number(body, "temperature", 0, 1),
            top_p=number(body, "top_p", 0, 1),
            top_k=whole(body, "top_k", 0, 1 << 30),
        ),
        stream=field(body, "stream", bool, False),
        unenforced=unenforced,
    )


def _tools(body: Mapping[str, Any]) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]:
    tools = []
    for tool in field(body, "tools", list, []):
        if not isinstance(tool, Mapping) or tool.get("type") not in (None, "custom"):
            raise refuse("Only custom tools are supported.", param="tools")
        tools.append(function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema")))
    choice = field(body, "tool_choice", dict, {})
    unenforced = []
    if choice.get("type") == "none":
        tools = []
    elif choice.get("type") not in (None, "auto"):
        unenforced.append("tool_choice")
    if tools and choice.get("disable_parallel_tool_use"):
        unenforced.append("parallel_tool_calls")
    if field(body, "thinking", dict, {}).get("type") not in (None, "disabled"):
        unenforced.append("thinking")
    unenforced += [name for name in ("output_config", "context_management") if body.get(name)]
    return tuple(tools), tuple(unenforced)


def _messages(message: Any, where: str) -> list[Message]:
    """One of theirs is one of ours, except that tool results are messages of their own."""
    role = role_of(message, ROLES, where)
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(b, Mapping) for b in blocks):
        raise refuse(f"{where}.content must be text or a list of blocks.", param=where)
    if role == "assistant":
        return [_assistant(blocks, where)]
    out: list[Message] = []
    said: list[Mapping[str, Any]] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            text = plain_text(block.get("content"), where=f"{where}.tool_result", kinds=("text",))
            out.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": text})
        else:
            said.append(block)
    if said or not out:
        text = plain_text(said, where=f"{where}.content", kinds=("text",))
        out.append({"role": role, "content": text})
    return out


def _assistant(blocks: list[Mapping[str, Any]], where: str) -> Message:
    texts, reasoning, calls = [], [], []
    for block in blocks:
        match block.get("type"):
            case "text":
                texts.append(str(block.get("text", "")))
            case "thinking":
                reasoning.append(str(block.get("thinking", "")))
            case "tool_use":
                given = arguments_text(block.get("input") or {}, where=f"{where}.input")
                function = {"name": str(block.get("name", "")), "arguments": given}
                calls.append({"id": str(block.get("id", "")), "type": "function", "function": function})
            case kind:
                raise refuse(
                    f"{where} has a block of type '{kind}'.", param=where, code="unsupported_content"
                )
    out: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if reasoning:
        out["reasoning"] = "".join(reasoning)
    if calls:
        out["tool_calls"] = calls
    return out


# -------------------------------------------------------------------------------- to the wire


def answer(answer: Answer) -> dict[str, Any]:
    """The `message` object."""
    choice = answer.choices[0]
    return {
        **_head(answer),
        "content": _blocks(choice),
        "stop_reason": FINISH[choice.finished_by],
        "stop_sequence": choice.stop,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens},
    }


def _head(answer: Answer) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.serial}",
        "type": "message",
        "role": "assistant",
        "model": answer.ask.model,
    }


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if choice.reasoning:
        blocks.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
    if choice.text:
        blocks.append({"type": "text", "text": choice.text})
    for call in choice.tool_calls:
        given = json.loads(call.arguments)
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
    return blocks


def stream(answer: Answer) -> Iterator[bytes]:
    """The same object as events."""
    choice = answer.choices[0]
    started = {
        **_head(answer),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": 0},
    }
    yield _event("message_start", message=started)
    empty: dict[str, Any]
    for index, block in enumerate(_blocks(choice)):
        match block["type"]:
            case "text":
                empty = {"type": "text", "text": ""}
                kind, name, text = "text_delta", "text", block["text"]
            case "thinking":
                empty = {"type": "thinking", "thinking": "", "signature": ""}
                kind, name, text = "thinking_delta", "thinking", block["thinking"]
            case _:
                empty = {**block, "input": {}}
                kind, name = "input_json_delta", "partial_json"
                text = json.dumps(block["input"], ensure_ascii=False)
        yield _event("content_block_start", index=index, content_block=empty)
        for piece in pieces(text):
            yield _event("content_block_delta", index=index, delta={"type": kind, name: piece})
        yield _event("content_block_stop", index=index)
    ended = {"stop_reason": FINISH[choice.finished_by], "stop_sequence": choice.stop}
    yield _event("message_delta", delta=ended, usage={"output_tokens": answer.completion_tokens})
    yield _event("message_stop")


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, event=kind)


def error(refusal: Refusal) -> dict[str, Any]:
    """Anthropic's error object."""
    kind = KINDS.get(refusal.status, refusal.kind)
    return {"type": "error", "error": {"type": kind, "message": refusal.message}}


def stream_error(refusal: Refusal) -> Iterator[bytes]:
    yield sse(error(refusal), event="error")
