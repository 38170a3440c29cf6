"""OpenAI's `responses`: items to an `Ask`, an `Answer` to items and events.

https://platform.openai.com/docs/api-reference/responses. `previous_response_id` is understood: earlier
conversations of the session are kept by the door, which gives them to `parse`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from harness.prompt import Message
from harness.proxy.exchange import (
    Answer,
    Ask,
    Choice,
    Refusal,
    arguments_text,
    checked,
    field,
    function_tool,
    neutral,
    pieces,
    plain_text,
    refuse,
    role_of,
    sse,
    whole,
)
from harness.proxy.openai_chat import ROLES, error, neutral_settings, wishes_of

__all__ = ["answer", "conversation", "error", "parse", "response_id", "stream", "stream_error"]

Earlier = Callable[[str], tuple[Message, ...]]
"""The conversation behind a response id. Raises `Refusal` for an unknown one."""
TEXTS = ("input_text", "output_text", "text", "refusal")
SAYERS = {name: role for name, role in ROLES.items() if role != "tool"}
"""Results of tools are items of their own here."""


def parse(body: Mapping[str, Any], *, earlier: Earlier) -> Ask:
    """A request. Raises `Refusal`."""
    neutral_settings(body)
    neutral(body, background=(False,), truncation=("disabled",), top_logprobs=(0,))
    text = field(body, "text", dict, {})
    neutral(text, format=({"type": "text"},))
    neutral(body, "a conversation is sent, or named by 'previous_response_id'", conversation=(), prompt=())
    messages: list[Message] = []
    instructions = field(body, "instructions", str, "")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    previous = field(body, "previous_response_id", str)
    if previous is not None:
        messages += earlier(previous)
    given = field(body, "input", (str, list), [])
    messages += [{"role": "user", "content": given}] if isinstance(given, str) else _items(given)
    tools, unenforced = _tools(body)
    return Ask(
        model=field(body, "model", str, ""),
        messages=checked(tuple(messages)),
        tools=tools,
        max_tokens=whole(body, "max_output_tokens", 1, 1 << 30),
        wishes=wishes_of(body),
        stream=field(body, "stream", bool, False),
        unenforced=unenforced,
        extra={
            "instructions": instructions or None,
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": field(body, "metadata", dict, {}),
            "parallel_tool_calls": field(body, "parallel_tool_calls", bool, True),
            "previous_response_id": previous,
            "temperature": body.get("temperature"),
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": field(body, "tools", list, []),
            "top_p": body.get("top_p"),
        },
    )


def _tools(body: Mapping[str, Any]) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]:
    tools = []
    for tool in field(body, "tools", list, []):
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise refuse("Only tools of type 'function' are supported.", param="tools")
        tools.append(function_tool(tool.get("name"), tool.get("description"), tool.get("parameters")))
    choice = body.get("tool_choice")
    unenforced = []
    if choice == "none":
        tools = []
    elif choice not in (None, "auto"):
        unenforced.append("tool_choice")
    if tools and body.get("parallel_tool_calls") is False:
        unenforced.append("parallel_tool_calls")
    if body.get("reasoning"):
        unenforced.append("reasoning")
    return tuple(tools), tuple(unenforced)


def _items(items: list[Any]) -> list[Message]:
    """Items to messages: what a reply consists of (reasoning, text, calls) is one message again."""
    out: list[dict[str, Any]] = []
    reply: dict[str, Any] | None = None
    for at, item in enumerate(items):
        where = f"input[{at}]"
        if not isinstance(item, Mapping):
            raise refuse(f"{where} is no item.", param=where)
        kind = item.get("type") or "message"
        if kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant"):
            if reply is None or (kind == "message" and (reply["content"] or "tool_calls" in reply)):
                reply = {"role": "assistant", "content": ""}
                out.append(reply)
            _add_to(reply, kind, item, where)
            continue
        reply = None
        if kind == "function_call_output":
            text = plain_text(item.get("output"), where=f"{where}.output", kinds=TEXTS)
            out.append({"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": text})
        elif kind == "message":
            text = plain_text(item.get("content"), where=f"{where}.content", kinds=TEXTS)
            out.append({"role": role_of(item, SAYERS, where), "content": text})
        else:
            raise refuse(f"{where} is of type '{kind}'.", param=where, code="unsupported_content")
    return list(out)


def _add_to(reply: dict[str, Any], kind: str, item: Mapping[str, Any], where: str) -> None:
    if kind == "reasoning":
        parts = [*field(item, "content", list, []), *field(item, "summary", list, [])]
        reply["reasoning"] = "".join(str(p.get("text", "")) for p in parts if isinstance(p, Mapping))
    elif kind == "message":
        reply["content"] = plain_text(item.get("content"), where=f"{where}.content", kinds=TEXTS)
    else:
        arguments = arguments_text(item.get("arguments"), where=f"{where}.arguments")
        function = {"name": str(item.get("name", "")), "arguments": arguments}
        call = {"id": str(item.get("call_id", "")), "type": "function", "function": function}
        reply.setdefault("tool_calls", []).append(call)


def response_id(answer: Answer) -> str:
    return f"resp_{answer.serial}"


def conversation(answer: Answer, reply: Message) -> tuple[Message, ...]:
    """What a later request continues that names this response: without its instructions, as OpenAI has it."""
    given = answer.ask.messages
    if (answer.ask.extra or {}).get("instructions"):
        given = given[1:]
    return (*given, reply)


# -------------------------------------------------------------------------------- to the wire


def answer(answer: Answer) -> dict[str, Any]:
    """The `response` object."""
    choice = answer.choices[0]
    cut = choice.finished_by == "length"
    return _response(answer, _output(answer, choice), "incomplete" if cut else "completed")


def _response(answer: Answer, output: list[dict[str, Any]], status: str) -> dict[str, Any]:
    over = status in ("completed", "incomplete")
    usage = {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
    return {
        "id": response_id(answer),
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": answer.ask.model,
        "output": output,
        "store": True,
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "usage": usage if over else None,
        **(answer.ask.extra or {}),
    }


def _output(answer: Answer, choice: Choice) -> list[dict[str, Any]]:
    status = "incomplete" if choice.finished_by == "length" else "completed"
    items: list[dict[str, Any]] = []
    if choice.reasoning:
        text = {"type": "reasoning_text", "text": choice.reasoning}
        items.append({"type": "reasoning", "id": f"rs_{answer.serial}", "summary": [], "content": [text]})
    if choice.text or not choice.tool_calls:
        items.append(
            {
                "type": "message",
                "id": f"msg_{answer.serial}",
                "status": status,
                "role": "assistant",
                "content": [_part(choice.text)],
            }
        )
    for call in choice.tool_calls:
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{call.id}",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": "completed",
            }
        )
    return items


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def stream(answer: Answer) -> Iterator[bytes]:
    """The same object as events."""
    number = 0

    def event(kind: str, **fields: Any) -> bytes:
        nonlocal number
        number += 1
        return sse({"type": kind, "sequence_number": number - 1, **fields}, event=kind)

    choice = answer.choices[0]
    output = _output(answer, choice)
    yield event("response.created", response=_response(answer, [], "in_progress"))
    yield event("response.in_progress", response=_response(answer, [], "in_progress"))
    for index, item in enumerate(output):
        where = {"item_id": item["id"], "output_index": index}
        match item["type"]:
            case "message":
                yield event(
                    "response.output_item.added",
                    output_index=index,
                    item={**item, "content": [], "status": "in_progress"},
                )
                part = {**where, "content_index": 0}
                yield event("response.content_part.added", **part, part=_part(""))
                for piece in pieces(choice.text):
                    yield event("response.output_text.delta", **part, delta=piece, logprobs=[])
                yield event("response.output_text.done", **part, text=choice.text, logprobs=[])
                yield event("response.content_part.done", **part, part=_part(choice.text))
            case "function_call":
                yield event(
                    "response.output_item.added",
                    output_index=index,
                    item={**item, "arguments": "", "status": "in_progress"},
                )
                for piece in pieces(item["arguments"]):
                    yield event("response.function_call_arguments.delta", **where, delta=piece)
                yield event(
                    "response.function_call_arguments.done",
                    **where,
                    name=item["name"],
                    arguments=item["arguments"],
                )
            case _:
                yield event("response.output_item.added", output_index=index, item=item)
        yield event("response.output_item.done", output_index=index, item=item)
    whole_answer = _response(answer, output, "incomplete" if choice.finished_by == "length" else "completed")
    yield event(f"response.{whole_answer['status']}", response=whole_answer)


def stream_error(refusal: Refusal) -> Iterator[bytes]:
    told = {"code": refusal.code, "message": refusal.message, "param": refusal.param}
    yield sse({"type": "error", "sequence_number": 0, **told}, event="error")
