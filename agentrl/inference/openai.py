"""Any OpenAI-compatible chat endpoint as a frozen model: messages in, text and tool calls out.

For evaluation, teachers and judges. What comes back are words without ids or log-probs, so nothing of it can
enter a policy loss; `harness.frozen` puts it in the place of a policy for evaluation. Lost tries are
repeated until the deadline; what is wrong with a request is said at once.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from agentrl.errors import ModelError
from agentrl.inference.states import refused
from agentrl.inference.vllm_wire import RETRIED_STATUS

CONNECT_S = 10.0
MAX_WAIT_S = 20.0
"""Longest pause between two tries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """`arguments` is the text that the model wrote, which need not be JSON."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """One answer. `cut`: it ran into a limit."""

    text: str
    calls: tuple[ToolCall, ...]
    cut: bool
    prompt_tokens: int | None
    completion_tokens: int | None


class ChatEndpoint:
    """A model behind a URL. Safe to use from many tasks of one event loop.

    Args:
        url: base URL, with `/v1` if the endpoint has it.
        model: its name there.
        key: bearer token.
        options: further fields of every request (a provider's own).
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        key: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self._url = url.rstrip("/") + "/chat/completions"
        self._options = dict(options or {})
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=2.0),
        )

    async def complete(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        temperature: float = 1.0,
        max_tokens: int | None = None,
        deadline_s: float = 600.0,
    ) -> ChatReply:
        """One answer to messages in OpenAI form.

        Raises:
            ModelError: `deadline` naming the last failure, `refused` (the endpoint found fault with the
                request), `answer` (it does not answer as a chat endpoint does).
        """
        fields: dict[str, Any] = {
            **self._options,
            "model": self.model,
            "messages": [dict(message) for message in messages],
            "temperature": temperature,
        }
        if max_tokens is not None:
            fields["max_tokens"] = max_tokens
        if tools:
            fields["tools"] = [dict(tool) for tool in tools]
        last = "no answer yet"
        try:
            async with asyncio.timeout(deadline_s):
                for number in range(1_000_000):
                    try:
                        response = await self._http.post(self._url, json=fields)
                    except httpx.TransportError as error:
                        last = f"{type(error).__name__} {error}".strip()
                    else:
                        if response.status_code == 200:
                            return _read(response)
                        last = f"{response.status_code} {response.text[:200]}"
                        if response.status_code not in RETRIED_STATUS:
                            raise refused(
                                "refused",
                                f"{self._url} refused it with {last}",
                                "Check model, key and limits.",
                            )
                    await asyncio.sleep(
                        random.uniform(0.5, 1.0) * min(MAX_WAIT_S, 0.2 * 2 ** min(number, 10))
                    )
        except TimeoutError as error:
            raise ModelError(
                f"waiting for {self.model} since {deadline_s:.1f} s: {last}.",
                fix="Raise the deadline, or look at the endpoint.",
                code="deadline",
                phase="sample",
            ) from error
        raise AssertionError("a million tries take longer than any deadline")

    async def close(self) -> None:
        await self._http.aclose()


def _read(response: httpx.Response) -> ChatReply:
    try:
        found = response.json()
        (choice,) = found["choices"]
        message = choice["message"]
        usage = found.get("usage") or {}
        calls = tuple(
            ToolCall(name=str(call["function"]["name"]), arguments=_text(call["function"].get("arguments")))
            for call in message.get("tool_calls") or ()
        )
        return ChatReply(
            text=str(message.get("content") or ""),
            calls=calls,
            cut=choice.get("finish_reason") == "length",
            prompt_tokens=usage.get("prompt_tokens"),
            completion_tokens=usage.get("completion_tokens"),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{response.url} does not answer as a chat endpoint does: {type(error).__name__} {error}.",
            fix="Give the base URL of an OpenAI-compatible endpoint, usually ending in /v1.",
            code="answer",
            phase="sample",
            retryable=False,
        ) from error


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
