"""A task to the first messages of a conversation.

The system prompt is short on purpose: it is repeated in every context. Where a chat template does not render
tools, they are written into the system prompt with an example of a call; where it has no system role,
the system prompt opens the first user message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.types import Task

Message = Mapping[str, Any]
"""One chat message in OpenAI form: role, content, and for tools `tool_calls` or `tool_call_id` and `name`."""

SYSTEM_PROMPT = "You solve the task by calling tools. Call submit when you are done."


def initial_messages(
    task: Task,
    tools: Sequence[Mapping[str, Any]],
    *,
    template_renders_tools: bool,
    template_renders_system: bool,
    system_prompt: str = SYSTEM_PROMPT,
    example: str | None = None,
) -> tuple[Message, ...]:
    """System prompt and instruction.

    Args:
        tools: OpenAI function schemas.
        example: a call in the format that is parsed; None: that of Hermes.
    """
    system = system_prompt
    if tools and not template_renders_tools:
        system = f"{system_prompt}\n{in_words(tools, example)}"
    if not template_renders_system:
        return ({"role": "user", "content": f"{system}\n\n{task.instruction}"},)
    return ({"role": "system", "content": system}, {"role": "user", "content": task.instruction})


def in_words(tools: Sequence[Mapping[str, Any]], example: str | None = None) -> str:
    """Tools for a system prompt, where a template does not render them, and an `example` of a call."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    shown = example or '<tool_call>{"name": "...", "arguments": {...}}</tool_call>'
    return f"Tools:\n{lines}\nCall one like this: {shown}"
