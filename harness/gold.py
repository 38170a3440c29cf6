"""A scripted demonstrator for tool environments: the problem's own solution, spoiled half of the time.

What imitation learns from it is how calls are written and which come in which order; whether the last one is
right is left to reinforcement.
"""

from __future__ import annotations

import json
import random
from typing import Any

from agentrl.inference.sampler import SampleRequest
from envs.environment import Problem, Step

SPOILED_SHARE = 0.5
"""How often the last call of a solution is made with other arguments."""


def written(step: Step) -> str:
    """A step as a call in Hermes form."""
    body = json.dumps({"name": step.tool, "arguments": dict(step.arguments)}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


class GoldDemonstrator:
    """The script of one attempt, for `ScriptedSampler`. After its last step it says so without a call."""

    def __init__(self, problem: Problem, *, seed: str, spoiled_share: float = SPOILED_SHARE) -> None:
        rng = random.Random(seed)
        steps = list(problem.gold)
        if steps and rng.random() < spoiled_share:
            last = steps[-1]
            spoiled = {name: _spoil(value, rng) for name, value in last.arguments.items()}
            steps[-1] = Step(tool=last.tool, arguments=spoiled)
        self._lines = [written(step) for step in steps]

    def __call__(self, request: SampleRequest, number: int) -> str:
        return self._lines[number] if number < len(self._lines) else "Done."


def _spoil(value: Any, rng: random.Random) -> Any:
    """Something of the same type that is (nearly always) something else."""
    match value:
        case bool():
            return not value
        case int():
            digits = list(str(abs(value)))
            at = rng.randrange(len(digits))
            digits[at] = rng.choice([d for d in "123456789" if d != digits[at]])
            return int("".join(digits))
        case float():
            return value + rng.choice((-1.0, 1.0))
        case str() if value:
            words = value.split()
            return " ".join(words[: max(1, len(words) // 2)])[::-1]
        case _:
            return value
