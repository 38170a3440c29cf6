"""How a model acts. An agent drives an `Attempt` until the task ends and says why it ended.

`ToolAgent` is the built-in loop: ask, act, show the observations, again. Another agent is another object with
the same two members; what it samples is recorded by the attempt, whatever it does.
"""

from __future__ import annotations

from typing import Protocol

from agentrl.types import Termination
from harness.attempt import Attempt
from harness.prompt import initial_messages


class Agent(Protocol):
    """`name` is recorded with every trajectory and changes when behaviour does: `tool-agent/1`."""

    @property
    def name(self) -> str: ...

    async def run(self, attempt: Attempt) -> Termination:
        """Act until done. Budgets end it by themselves (`OutOfBudget`); boundary errors pass through."""
        ...


class ToolAgent:
    """One conversation. A reply without a tool call, or `submit`, finishes it.

    Args:
        max_format_errors: replies in a row in which every call was malformed, before the attempt ends as
            `Termination.FORMAT`.
    """

    name = "tool-agent/1"

    def __init__(self, *, max_format_errors: int = 3) -> None:
        self._max_format_errors = max_format_errors

    async def run(self, attempt: Attempt) -> Termination:
        chat = attempt.chat
        conversation = attempt.conversation(
            initial_messages(
                attempt.task,
                attempt.session.tools,
                template_renders_tools=chat.renders_tools,
                template_renders_system=chat.renders_system,
                system_prompt=attempt.system_prompt,
            )
        )
        unusable = 0
        while True:
            reply = await attempt.ask(conversation)
            observations = await attempt.act(reply)
            if not reply.actions or attempt.session.submitted:
                return Termination.FINISHED
            unusable = unusable + 1 if all(a.error is not None for a in reply.actions) else 0
            if unusable >= self._max_format_errors:
                return Termination.FORMAT
            conversation.add(*chat.observations(reply.actions, observations))
