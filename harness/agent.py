"""How a model acts. An agent drives an `Attempt` until the task ends and says why it ended.

`ToolAgent` is the built-in loop: ask, act, show the observations, again. Another agent is another object with
the same two members; what it samples is recorded by the attempt, whatever it does.
"""

from __future__ import annotations

from typing import Protocol

from agentrl.types import Termination
from harness.attempt import Attempt, Conversation
from harness.prompt import initial_messages


class Agent(Protocol):
    """`name` is recorded with every trajectory and changes when behaviour does: `tool-agent/1`."""

    @property
    def name(self) -> str: ...

    async def run(self, attempt: Attempt) -> Termination:
        """Act until done. Budgets end it by themselves (`OutOfBudget`); boundary errors pass through."""
        ...


class ContextPolicy(Protocol):
    """What is done before a call whose history outgrew the context: see `harness.context`."""

    @property
    def name(self) -> str: ...

    async def fit(self, attempt: Attempt, conversation: Conversation) -> None: ...


NUDGE = "You called no tool. Call one, or call submit if you are done."


class ToolAgent:
    """One conversation. A reply without a tool call, or `submit`, finishes it.

    Args:
        max_format_errors: replies in a row in which every call was malformed, before the attempt ends as
            `Termination.FORMAT`.
        context: rewrites the conversation when it grows too long (`harness.context.get`); None: never.
        nudges: how often in one attempt a reply without a tool call is answered with `NUDGE` instead of
            ending it.
    """

    def __init__(
        self, *, max_format_errors: int = 3, context: ContextPolicy | None = None, nudges: int = 0
    ) -> None:
        self._max_format_errors = max_format_errors
        self._context = context if context is not None and context.name != "none" else None
        self._nudges = nudges

    @property
    def name(self) -> str:
        extra = [self._context.name] if self._context is not None else []
        return "+".join(["tool-agent/1", *extra, *(["nudged"] if self._nudges else [])])

    async def run(self, attempt: Attempt) -> Termination:
        chat = attempt.chat
        conversation = attempt.conversation(
            initial_messages(
                attempt.task,
                attempt.session.tools,
                template_renders_tools=chat.renders_tools,
                template_renders_system=chat.renders_system,
                system_prompt=attempt.system_prompt,
                example=None if chat.tool_format.name == "hermes" else chat.tool_format.example,
            )
        )
        unusable, nudges = 0, self._nudges
        while True:
            if self._context is not None:
                await self._context.fit(attempt, conversation)
            reply = await attempt.ask(conversation)
            observations = await attempt.act(reply)
            if not reply.actions and nudges:
                nudges -= 1
                conversation.add({"role": "user", "content": NUDGE})
                continue
            if not reply.actions or attempt.session.submitted:
                return Termination.FINISHED
            unusable = unusable + 1 if all(a.error is not None for a in reply.actions) else 0
            if unusable >= self._max_format_errors:
                return Termination.FORMAT
            conversation.add(*chat.observations(reply.actions, observations))
