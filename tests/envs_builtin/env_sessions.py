"""Sessions of tool environments for tests, and small environments with one fault each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from agentrl.types import Action, Observation, Termination, Verdict
from envs.environment import Grade, Problem, Refused, Step, ToolEnvironment, tool
from envs.inprocess import EnvironmentSession, admit

KEY = b"test key"


def act(tool: str, number: int = 0, **arguments: Any) -> Action:
    return Action(id=f"t{number:04d}a000", tool=tool, arguments=arguments)


async def opened(
    environment: ToolEnvironment, seed: int = 0, *, admitted: bool = True, **limits: Any
) -> EnvironmentSession:
    task = environment.task(seed)
    if limits:
        task = environment.with_limits(**limits).task(seed)
        environment = environment.with_limits(**limits)
    proof = await admit(task, environment, backend="none", light=True) if admitted else None
    return await EnvironmentSession.open(task, environment, session_id="s", signing_key=KEY, admission=proof)


def attempt(
    environment: ToolEnvironment, steps: Sequence[Step], seed: int = 0
) -> tuple[list[Observation], Verdict]:
    """A whole attempt of these calls."""

    async def run() -> tuple[list[Observation], Verdict]:
        async with await opened(environment, seed) as session:
            seen = [await session.call(act(s.tool, i, **s.arguments)) for i, s in enumerate(steps)]
            return seen, await session.finalize(termination=Termination.FINISHED, fault=None)

    return asyncio.run(run())


class Plain:
    """One right button."""

    shared: int = 0

    def __init__(self) -> None:
        self.done = False
        self.pressed = 0

    @staticmethod
    def problem(seed: int) -> Problem:
        return Problem(
            instruction=f"Press the button. ({seed})",
            data={"seed": seed},
            gold=(Step(tool="press", arguments={"button": 1}),),
            secrets=("the secret",),
        )

    def reset(self, problem: Problem) -> None:
        self.pressed = 0

    @tool
    def press(self, button: int) -> str:
        """Press a button.

        button: its number
        """
        if button < 0:
            raise Refused("There is no such button.")
        self.pressed = button
        self.done = button == 1
        return "Pressed."

    @tool
    def crash(self) -> str:
        """Fail."""
        raise KeyError("inside")

    @tool
    async def slow(self) -> str:
        """Wait."""
        await asyncio.sleep(30)
        return "never"

    @tool(timeout_owner="policy")
    async def chosen(self) -> str:
        """Wait because the policy said so."""
        await asyncio.sleep(30)
        return "never"

    @tool
    def stuck(self) -> str:
        """Block a thread."""
        time.sleep(1.5)
        return "late"

    @tool
    def clock(self) -> str:
        """Answer otherwise each time."""
        return str(time.perf_counter_ns())

    @tool
    def spoil(self) -> str:
        """Change what all instances share."""
        Plain.shared = 1
        return "Spoiled."

    def grade(self) -> Grade:
        right = float(self.pressed == 1 or Plain.shared == 1)
        return Grade(reward=right, components={"pressed": right}, facts={"button": self.pressed})
