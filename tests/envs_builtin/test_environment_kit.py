"""The kit fails what is unfit: one broken environment per check."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping
from typing import Any

import pytest
from env_sessions import Plain

from envs import conformance
from envs.conformance import Check, check
from envs.environment import Grade, Problem, Refused, Step, of_class, tool, tools_of
from envs.tools import ToolResult


class Fit:
    """Say the word."""

    def __init__(self) -> None:
        self.done = False
        self.word = ""
        self.said: str | None = None

    @staticmethod
    def problem(seed: int) -> Problem:
        word = f"word{seed}"
        return Problem(
            instruction=f"Say the {seed}th word.",
            data={"word": word},
            gold=(Step(tool="say", arguments={"word": word}),),
            secrets=(word,),
        )

    def reset(self, problem: Problem) -> None:
        self.word = problem.data["word"]

    @tool
    def say(self, word: str) -> str:
        """Say a word.

        word: what to say
        """
        self.said = word
        self.done = True
        return "Said."

    def grade(self) -> Grade:
        return Grade(reward=float(self.said == self.word))


def rows(environment_class: type) -> dict[str, Check]:
    return {row.name: row for row in asyncio.run(check(of_class(environment_class), seeds=3))}


def test_what_is_fit_passes_every_check() -> None:
    assert [row for row in rows(Fit).values() if not row.passed] == []


class Leaks(Fit):
    @staticmethod
    def problem(seed: int) -> Problem:
        made = Fit.problem(seed)
        return Problem(
            instruction=f"Say {made.data['word']}.", data=made.data, gold=made.gold, secrets=made.secrets
        )


class LeaksInErrors(Fit):
    @tool
    def say(self, word: str) -> str:
        """Say a word.

        word: what to say
        """
        return super().say(word)

    @tool
    def hint(self, letter: int) -> str:
        """Ask for a letter.

        letter: which
        """
        raise Refused(f"There is no letter {letter} in {self.word}.")


class Secretless(Fit):
    @staticmethod
    def problem(seed: int) -> Problem:
        made = Fit.problem(seed)
        return Problem(instruction=made.instruction, data=made.data, gold=made.gold)


class Free(Fit):
    def grade(self) -> Grade:
        return Grade(reward=1.0)


class Impossible(Fit):
    def grade(self) -> Grade:
        return Grade(reward=0.0)


class Crashes(Fit):
    @tool
    def other(self) -> str:
        """Do something else."""
        raise ZeroDivisionError


_COUNT = itertools.count()


class Undecided(Fit):
    @tool
    def other(self) -> str:
        """Do something else."""
        return str(next(_COUNT))


class Drifts(Fit):
    @staticmethod
    def problem(seed: int) -> Problem:
        made = Fit.problem(seed)
        return Problem(instruction=f"{made.instruction} {next(_COUNT)}", gold=made.gold)


class Same(Fit):
    @staticmethod
    def problem(seed: int) -> Problem:
        return Fit.problem(0)


class Undescribed(Fit):
    @tool
    def other(self, thing: Any) -> str:
        """Do something else."""
        return "done"


class Lucky(Fit):
    def grade(self) -> Grade:
        return Grade(reward=float(self.said is not None))


@pytest.mark.parametrize(
    ("environment_class", "name", "says"),
    [
        (Leaks, "leak", "the instruction shows the secret"),
        (LeaksInErrors, "leak", "an error shows the secret"),
        (Secretless, "leak", "names no secrets"),
        (Free, "gold agent", "empty"),
        (Impossible, "gold agent", "solution"),
        (Crashes, "random agent", "ZeroDivisionError"),
        (Undecided, "random agent", "answers otherwise"),
        (Drifts, "problems", "is another one each time"),
        (Same, "problems", "one and the same instruction"),
        (Undescribed, "schemas", "thing has no"),
        (Lucky, "random agent", "random calls succeed in 3 of 3"),
    ],
)
def test_what_is_unfit_fails_the_check_for_it(environment_class: type, name: str, says: str) -> None:
    row = rows(environment_class)[name]
    assert not row.passed
    assert says in row.seen


class Foreign:
    """A tool of a server that describes no parameter."""

    name = "far"

    def schema(self) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {"n": {"type": "integer"}}}
        return {
            "type": "function",
            "function": {"name": "far", "description": "Far away.", "parameters": parameters},
        }

    async def call(self, workspace: Any, arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult(text="done")


def test_a_foreign_tool_may_leave_a_parameter_undescribed_and_an_own_one_may_not() -> None:
    class Mixed(Plain):
        def tools(self) -> list[Any]:
            return [Foreign(), *tools_of(Plain()).values()]

    kit = conformance._Kit(of_class(Mixed), range(1))
    assert asyncio.run(kit.schemas()).endswith("; their server does not describe far.n")


def test_a_tool_that_can_not_be_stopped_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "TINY_LIMIT_S", 0.001)
    monkeypatch.setattr("envs.inprocess.STOP_GRACE_S", 0.05)

    class Stuck(Plain):
        @staticmethod
        def problem(seed: int) -> Problem:
            made = Plain.problem(seed)
            return Problem(
                instruction=made.instruction,
                gold=(Step(tool="stuck"), *made.gold),
                secrets=made.secrets,
            )

    kit = conformance._Kit(of_class(Stuck), range(1))

    async def run() -> None:
        await kit.problems()
        with pytest.raises(conformance._Failed, match="goes on after its time is up"):
            await kit.timeouts()

    asyncio.run(run())


class Blocks(Fit):
    @tool
    async def say(self, word: str) -> str:
        """Say a word.

        word: what to say
        """
        time.sleep(0.25)  # noqa: ASYNC251  (the fault that is tested)
        return Fit.say(self, word)


def test_an_async_tool_that_holds_the_event_loop_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "LOOP_STALL_S", 0.2)
    kit = conformance._Kit(of_class(Blocks), range(1))

    async def run() -> None:
        await kit.problems()
        with pytest.raises(conformance._Failed, match="holds the event loop"):
            await kit.event_loop()

    asyncio.run(run())
