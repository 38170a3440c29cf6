"""OpenAI's older `completions`: raw text or token ids to continue.

A client that renders its own prompts gets exact ids too: a prompt that begins with a recorded prompt and its
reply extends their ids. Control strings in a raw prompt are control tokens, since it is a template's output;
so what is in the client's data is the client's to keep harmless here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness.proxy.exchange import Answer, Ask, Choice, field, neutral, pieces, refuse, sse, texts, whole
from harness.proxy.openai_chat import (
    FINISH,
    error,
    neutral_settings,
    stream_error,
    usage,
    wishes_of,
)

__all__ = ["answer", "error", "parse", "stream", "stream_error"]

DEFAULT_MAX_TOKENS = 16
"""OpenAI's own."""


def parse(body: Mapping[str, Any]) -> Ask:
    """A request. Raises `Refusal`."""
    neutral_settings(body)
    neutral(body, echo=(False,), best_of=(1,), suffix=("",), logit_bias=({},))
    if field(body, "logprobs", int, 0) > 0:
        raise refuse(
            "'logprobs' is at most 0: only the sampled token's log-prob is recorded.",
            param="logprobs",
            code="unsupported_parameter",
        )
    options = field(body, "stream_options", dict, {})
    return Ask(
        model=field(body, "model", str, ""),
        prompt=_prompt(body.get("prompt")),
        max_tokens=whole(body, "max_tokens", 1, 1 << 30) or DEFAULT_MAX_TOKENS,
        n=whole(body, "n", 1, 1 << 10) or 1,
        stops=texts(body, "stop"),
        wishes=wishes_of(body),
        log_probs=body.get("logprobs") is not None,
        stream=field(body, "stream", bool, False),
        stream_usage=bool(options.get("include_usage")),
    )


def _prompt(prompt: Any) -> str | tuple[int, ...]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(i) is int and i >= 0 for i in prompt):
        return tuple(prompt)
    raise refuse("'prompt' must be one text or one list of token ids, not empty.", param="prompt")


def answer(answer: Answer) -> dict[str, Any]:
    """The `text_completion` object."""
    return {
        **_head(answer),
        "choices": [
            {
                "index": index,
                "text": choice.text,
                "logprobs": _log_probs(choice),
                "finish_reason": FINISH[choice.finished_by],
            }
            for index, choice in enumerate(answer.choices)
        ],
        "usage": usage(answer),
    }


def _head(answer: Answer) -> dict[str, Any]:
    return {
        "id": f"cmpl-{answer.serial}",
        "object": "text_completion",
        "created": answer.created,
        "model": answer.ask.model,
    }


def _log_probs(choice: Choice) -> dict[str, Any] | None:
    if not choice.tokens:
        return None
    offsets, at = [], 0
    for token in choice.tokens:
        offsets.append(at)
        at += len(token.text)
    return {
        "tokens": [t.text for t in choice.tokens],
        "token_logprobs": [t.log_prob for t in choice.tokens],
        "top_logprobs": None,
        "text_offset": offsets,
    }


def stream(answer: Answer) -> Iterator[bytes]:
    """The same object in pieces."""

    def chunk(index: int, text: str, finish: str | None = None, logs: Any = None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logs, "finish_reason": finish}
        return sse({**_head(answer), "choices": [choice]})

    for index, choice in enumerate(answer.choices):
        for piece in pieces(choice.text):
            yield chunk(index, piece)
        yield chunk(index, "", FINISH[choice.finished_by], _log_probs(choice))
    if answer.ask.stream_usage:
        yield sse({**_head(answer), "choices": [], "usage": usage(answer)})
    yield sse("[DONE]")
