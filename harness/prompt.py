"""A task to the first messages of a conversation.

The system prompt is short on purpose: it is repeated in every context. Where a chat template does not render
tools, they are written into the system prompt in the words of the Hermes format; where it has no system role,
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
) -> tuple[Message, ...]:
    """System prompt and instruction. `tools` are OpenAI function schemas."""
    system = system_prompt
    if tools and not template_renders_tools:
        system = f"{system_prompt}\n{in_words(tools)}"
    if not template_renders_system:
        return ({"role": "user", "content": f"{system}\n\n{task.instruction}"},)
    return ({"role": "system", "content": system}, {"role": "user", "content": task.instruction})


def in_words(tools: Sequence[Mapping[str, Any]]) -> str:
    """Tools for a system prompt, where a template does not render them."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        f'Tools:\n{lines}\nCall one like this: <tool_call>{{"name": "...", "arguments": {{...}}}}</tool_call>'
    )
