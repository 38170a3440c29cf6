"""OpenAI's `chat/completions`: its bodies to an `Ask`, an `Answer` to its objects and its stream.

https://platform.openai.com/docs/api-reference/chat, as vLLM and others serve it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness.prompt import Message
from harness.proxy.exchange import (
    OTHER_PROMPT,
    Answer,
    Ask,
    Choice,
    Refusal,
    ToolCall,
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

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
FINISH = {"stop": "stop", "length": "length", "tool_calls": "tool_calls", "stop_string": "stop"}


def parse(body: Mapping[str, Any]) -> Ask:
    """A request. Raises `Refusal` for what is malformed or would change the distribution."""
    neutral_settings(body)
    neutral(body, response_format=({"type": "text"},), modalities=(["text"],), logit_bias=({},))
    neutral(body, "it is the old form of 'tools'", functions=([],), function_call=("none", "auto"))
    neutral(
        body,
        OTHER_PROMPT,
        chat_template=(),
        add_generation_prompt=(True,),
        continue_final_message=(False,),
        documents=([],),
        mm_processor_kwargs=({},),
    )
    if field(body, "top_logprobs", int, 0) > 0:
        raise refuse(
            "'top_logprobs' is not supported: only the sampled token's log-prob is recorded.",
            param="top_logprobs",
            code="unsupported_parameter",
        )
    tools, unenforced = tools_of(body)
    options = field(body, "stream_options", dict, {})
    return Ask(
        model=field(body, "model", str, ""),
        messages=checked(tuple(_message(m, at) for at, m in enumerate(field(body, "messages", list, [])))),
        tools=tools,
        max_tokens=whole(body, "max_completion_tokens", 1, 1 << 30) or whole(body, "max_tokens", 1, 1 << 30),
        n=whole(body, "n", 1, 1 << 10) or 1,
        stops=texts(body, "stop"),
        wishes=wishes_of(body),
        log_probs=field(body, "logprobs", bool, False),
        stream=field(body, "stream", bool, False),
        stream_usage=bool(options.get("include_usage")),
        unenforced=unenforced,
    )


FORCED = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "structural_tag",
)
"""vLLM's ways of forcing a form."""
UNHEARD = ("reasoning_effort", "chat_template_kwargs", "verbosity")
"""Wishes about how the model talks that its own template does not take: counted."""


def neutral_settings(body: Mapping[str, Any]) -> None:
    neutral(
        body,
        frequency_penalty=(0,),
        presence_penalty=(0,),
        repetition_penalty=(1,),
        min_p=(0,),
        min_tokens=(0,),
        ignore_eos=(False,),
        use_beam_search=(False,),
        length_penalty=(1,),
        bad_words=([],),
        allowed_token_ids=([],),
        logits_processors=([],),
        **dict.fromkeys(FORCED, ()),
    )
    neutral(body, "what ends a reply is the session's", stop_token_ids=([],))


def wishes_of(body: Mapping[str, Any]) -> Wishes:
    return Wishes(
        temperature=number(body, "temperature", 0, 2),
        top_p=number(body, "top_p", 0, 1),
        top_k=whole(body, "top_k", -1, 1 << 30),
        seed=whole(body, "seed", -(1 << 63), (1 << 63) - 1),
    )


def tools_of(body: Mapping[str, Any]) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]:
    """The tools that are shown to the model, and what was asked for and is not enforced."""
    tools = []
    for tool in field(body, "tools", list, []):
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise refuse("Only tools of type 'function' are supported.", param="tools")
        function = field(tool, "function", dict, {})
        tools.append(
            function_tool(function.get("name"), function.get("description"), function.get("parameters"))
        )
    choice = body.get("tool_choice")
    unenforced = []
    if choice == "none":
        tools = []
    elif choice not in (None, "auto"):
        unenforced.append("tool_choice")
    if tools and body.get("parallel_tool_calls") is False:
        unenforced.append("parallel_tool_calls")
    unenforced += [name for name in UNHEARD if body.get(name)]
    return tuple(tools), tuple(unenforced)


def _message(message: Any, at: int) -> Message:
    where = f"messages[{at}]"
    role = role_of(message, ROLES, where)
    text = plain_text(message.get("content"), where=f"{where}.content", kinds=("text", "refusal"))
    if role == "tool":
        return {"role": role, "tool_call_id": field(message, "tool_call_id", str, ""), "content": text}
    if role != "assistant":
        return {"role": role, "content": text}
    if message.get("function_call"):
        raise refuse(f"{where} has a function_call, the old form of 'tool_calls'.", param=where)
    out: dict[str, Any] = {"role": role, "content": text}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        out["reasoning"] = reasoning
    calls = field(message, "tool_calls", list, [])
    if calls:
        out["tool_calls"] = [_call(call, f"{where}.tool_calls") for call in calls]
    return out


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise refuse(f"{where} holds something that is no function call.", param=where)
    arguments = arguments_text(function.get("arguments"), where=f"{where}.function.arguments")
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


# -------------------------------------------------------------------------------- to the wire


def answer(answer: Answer) -> dict[str, Any]:
    """The `chat.completion` object."""
    return {
        "id": f"chatcmpl-{answer.serial}",
        "object": "chat.completion",
        "created": answer.created,
        "model": answer.ask.model,
        "choices": [_choice(choice, index) for index, choice in enumerate(answer.choices)],
        "usage": usage(answer),
    }


def usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _choice(choice: Choice, index: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _content(choice)}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["tool_calls"] = [_wire_call(call) for call in choice.tool_calls]
    return {
        "index": index,
        "message": message,
        "logprobs": _log_probs(choice),
        "finish_reason": FINISH[choice.finished_by],
    }


def _content(choice: Choice) -> str | None:
    return choice.text or (None if choice.tool_calls else "")


def _wire_call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _log_probs(choice: Choice) -> dict[str, Any] | None:
    if not choice.tokens:
        return None
    return {
        "content": [
            {"token": t.text, "logprob": t.log_prob, "bytes": list(t.bytes), "top_logprobs": []}
            for t in choice.tokens
        ]
    }


def stream(answer: Answer) -> Iterator[bytes]:
    """The same object as chunks: what they add up to is `answer`. Every token's log-prob comes once, before
    the last chunk of its choice, whatever the channel of its text."""
    head = {
        "id": f"chatcmpl-{answer.serial}",
        "object": "chat.completion.chunk",
        "created": answer.created,
        "model": answer.ask.model,
    }

    def chunk(index: int, delta: Mapping[str, Any], finish: str | None = None, logs: Any = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logs, "finish_reason": finish}
        return sse({**head, "choices": [choice]})

    for index, choice in enumerate(answer.choices):
        first: dict[str, Any] = {"role": "assistant"}
        if _content(choice) is not None:
            first["content"] = ""
        yield chunk(index, first)
        for piece in pieces(choice.reasoning):
            yield chunk(index, {"reasoning_content": piece})
        for piece in pieces(choice.text):
            yield chunk(index, {"content": piece})
        for at, call in enumerate(choice.tool_calls):
            opening = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
            yield chunk(index, {"tool_calls": [{"index": at, **opening}]})
            for piece in pieces(call.arguments):
                yield chunk(index, {"tool_calls": [{"index": at, "function": {"arguments": piece}}]})
        yield chunk(index, {}, FINISH[choice.finished_by], _log_probs(choice))
    if answer.ask.stream_usage:
        yield sse({**head, "choices": [], "usage": usage(answer)})
    yield sse("[DONE]")


def error(refusal: Refusal) -> dict[str, Any]:
    """OpenAI's error object, of all of its endpoints."""
    return {
        "error": {
            "message": refusal.message,
            "type": refusal.kind,
            "param": refusal.param,
            "code": refusal.code,
        }
    }


def stream_error(refusal: Refusal) -> Iterator[bytes]:
    yield sse(error(refusal))
    yield sse("[DONE]")
