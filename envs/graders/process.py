"""Process rewards: every step of an attempt earns what the task's rules say, within bounds.

The value is their sum, and each step's own part of it is a component (`step/0003`), so that recipes with turn
rewards find it on its turn (`Trajectory.turn_rewards`). Where the sum is cut to its bounds, so is every part,
in proportion: what the steps earn is always what the grader says. It never decides: a solution script takes
no steps. Unknown steps are a fault, not a sum of none.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from agentrl.errors import SandboxError
from agentrl.types import Action, Observation
from envs.graders.contract import Attempt, Graded, Steps

_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Rule:
    """What a step earns that fits all conditions that are given."""

    value: float
    tool: str | None = None
    is_error: bool | None = None
    contains: str | None = None
    """A text in what the tool answered."""
    once: bool = False
    """Only the first such step earns it: what may be repeated without end is worth repeating."""

    def fits(self, action: Action, seen: Observation) -> bool:
        """Whether a step meets the conditions."""
        return (
            (self.tool is None or action.tool == self.tool)
            and (self.is_error is None or seen.is_error is self.is_error)
            and (self.contains is None or self.contains in seen.text)
        )


def rewarded(rules: tuple[Rule, ...], steps: Steps) -> tuple[float, ...]:
    """The reward of each step."""
    spent: set[int] = set()
    earned = []
    for action, seen in steps:
        fitting = [n for n, rule in enumerate(rules) if n not in spent and rule.fits(action, seen)]
        spent |= {n for n in fitting if rules[n].once}
        earned.append(sum(rules[n].value for n in fitting))
    return tuple(earned)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Process:
    """The sum of what the steps earned, at least `low` and at most `high`."""

    decides: ClassVar[bool] = False

    rules: tuple[Rule, ...] = Field(min_length=1)
    low: float = Field(default=-1.0, le=0)
    high: float = Field(default=1.0, ge=0)

    async def grade(self, attempt: Attempt) -> Graded:
        if attempt.steps is None:
            raise SandboxError(
                "The steps of this attempt are not all known, so they can not be rewarded.",
                fix="Run the attempt again.",
                owner="gateway",
                code="steps_unknown",
                phase="verify",
                retryable=False,
            )
        earned = rewarded(self.rules, attempt.steps)
        total = sum(earned)
        value = max(self.low, min(self.high, total))
        share = value / total if value != total else 1.0
        return Graded(
            value=value,
            components={f"step/{number:04d}": share * one for number, one in enumerate(earned) if one},
            facts={"steps": len(earned), "sum": total},
        )
