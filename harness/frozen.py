"""A chat endpoint in the place of the policy, to be evaluated on the same tasks by the same agent.

The endpoint sees messages and tool schemas, never ids. Its words are written down as the ids that the chat
format's tokenizer has for them, with its tool calls in the format that the harness parses, without
log-probs and without a policy version: the record is complete enough to read, grade and imitate, and can
not enter a policy loss. A reply that takes more than `max_tokens` of those ids counts as cut off.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.inference.openai import ChatEndpoint, ChatReply
from agentrl.inference.sampler import SampleRequest
from agentrl.inference.scripted import ScriptedSampler
from harness.agent import ToolAgent
from harness.attempt import Attempt, Conversation
from harness.chat import ChatFormat
from harness.prompt import Message


class FrozenPolicy:
    """`sampler` and `agent` go together: the agent shows each conversation to the endpoint before the call.

    Args:
        endpoint: who speaks.
        chat: whose tokenizer writes it down.
        max_format_errors, nudges: see `ToolAgent`.
    """

    def __init__(
        self, endpoint: ChatEndpoint, chat: ChatFormat, *, max_format_errors: int = 3, nudges: int = 0
    ) -> None:
        self.name = "frozen"
        self.sampler = ScriptedSampler(self._say, encode=chat.encode_reply, name=endpoint.model)
        self.agent = ToolAgent(context=self, max_format_errors=max_format_errors, nudges=nudges)
        self._endpoint = endpoint
        self._chat = chat
        self._seen: dict[str, tuple[list[Message], list[Mapping[str, Any]]]] = {}

    async def fit(self, attempt: Attempt, conversation: Conversation) -> None:
        """Note what the next call is about (the place of a context policy: before each call)."""
        self._seen[attempt.id] = (list(conversation.messages), list(conversation.tools))

    async def _say(self, request: SampleRequest, number: int) -> str:
        messages, tools = self._seen.pop(request.session)
        reply = await self._endpoint.complete(
            wire_messages(messages, structured=self._chat.renders_tool_role),
            tools=tools,
            temperature=request.params.temperature,
            max_tokens=request.params.max_tokens,
            deadline_s=request.deadline_s,
        )
        return self._written(reply)

    def _written(self, reply: ChatReply) -> str:
        """The reply as one text; arguments that are no JSON stay as they were said, to be found unusable."""
        calls = [
            self._chat.tool_format.written(call.name, given)
            if isinstance(given := _parsed(call.arguments), dict)
            else self._chat.tool_format.written(call.name, {}).replace("{}", call.arguments, 1)
            for call in reply.calls
        ]
        return "\n".join([*([reply.text] if reply.text else []), *calls]) or "\n"


def wire_messages(messages: Sequence[Message], *, structured: bool) -> list[dict[str, Any]]:
    """Messages of the harness in OpenAI form. `structured`: observations are tool messages, so calls must be
    structure too; otherwise everything stays text."""
    found: list[dict[str, Any]] = []
    for message in messages:
        calls = message.get("actions", ()) if structured else ()
        wire = {k: v for k, v in message.items() if k in ("role", "content", "name", "tool_call_id")}
        if calls:
            wire["content"] = message["outside"]
            wire["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.tool, "arguments": json.dumps(call.arguments)},
                }
                for call in calls
            ]
        found.append(wire)
    return found


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return None
