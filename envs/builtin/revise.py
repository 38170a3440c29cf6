"""`attempt-verify-revise`: another environment's answer, given, judged by the policy itself, and given again.

    attempt(answer) → verify(correct) → revise(answer) or finish()

wraps any environment that ends with a `submit` tool; its other tools stay usable. Whether an answer is right
is what the wrapped environment says of a fresh instance that was given it. With r1, r2 in {0, 1} for the
first and the last answer and v for a right self-judgement, the reward is

- `s2r`: r2 + 0.5·(v of the first judgement as ±1), outcome and process (arXiv 2502.12853);
- `score`: r2 + ALPHA·(r2 − r1), the bonus for improving and the price of spoiling (arXiv 2409.12917);
- `pag`: r2, revision allowed only after the policy judged its answer wrong, and 0.5·v beside it
  (arXiv 2506.10406; the policy is its own verifier).

The numbers 0.5 are ours: the papers weight per-turn rewards in the learner, here they are components too.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.errors import ConfigError, nearest
from envs import tools
from envs.builtin import calculator, search, sql
from envs.environment import Grade, Problem, Refused, Step, ToolLike, environment, method_tool, tools_of
from envs.tools import ToolResult

ALPHA = 0.5
JUDGED = 0.5
SCHEMES = ("s2r", "score", "pag")
BASES: Mapping[str, type] = {
    "calculator": calculator.Calculator,
    "search": search.Search,
    "sql": sql.Sql,
}


@environment("attempt-verify-revise")
class AttemptVerifyRevise:
    """Give an answer, judge it yourself, and revise it if you think that it is wrong."""

    def __init__(self, base: str = "calculator", scheme: str = "score") -> None:
        if scheme not in SCHEMES:
            raise ConfigError(f"There is no scheme '{scheme}'.", fix=nearest(scheme, SCHEMES))
        if base not in BASES:
            raise ConfigError(f"'{base}' can not be wrapped.", fix=nearest(base, BASES))
        self.done = False
        self._scheme = scheme
        self._inner: Any = BASES[base]()
        self._inner_tools = tools_of(self._inner)
        self._problem: Problem | None = None
        self._answers: list[dict[str, Any]] = []
        self._judgement: bool | None = None

    def problem(self, seed: int) -> Problem:
        """The wrapped environment's, whose solution first answers and then judges itself right."""
        made: Problem = self._inner.problem(seed)
        *before, last = made.gold
        gold = (
            *before,
            Step(tool="attempt", arguments=last.arguments),
            Step(tool="verify", arguments={"correct": True}),
            Step(tool="finish"),
        )
        return replace(
            made,
            instruction=f"{made.instruction} Attempt an answer, verify it, then revise it or finish.",
            gold=gold,
        )

    def reset(self, problem: Problem) -> None:
        """Reset the wrapped environment."""
        self._problem = problem
        self._inner.reset(problem)

    def tools(self) -> Sequence[ToolLike]:
        """The wrapped environment's tools; `submit` becomes `attempt` and `revise`."""
        own: list[ToolLike] = [_Inner(t) for name, t in self._inner_tools.items() if name != "submit"]
        submit = self._inner_tools["submit"]
        assert isinstance(submit, tools.Tool)
        for name, about in (
            ("attempt", "Give your first answer."),
            ("revise", "Give another answer; this ends it."),
        ):
            own.append(replace(submit, name=name, description=about, function=_answering(name)))
        own += [method_tool(AttemptVerifyRevise.verify), method_tool(AttemptVerifyRevise.finish)]
        return own

    def answer(self, name: str, arguments: dict[str, Any]) -> str:
        """Note an answer. `Refused` out of turn."""
        if (name == "attempt") is bool(self._answers):
            raise Refused("You have answered; use revise." if self._answers else "Attempt an answer first.")
        if name == "revise":
            if self._judgement is None:
                raise Refused("Verify your answer first.")
            if self._scheme == "pag" and self._judgement:
                raise Refused("You judged your answer correct; finish.")
        self._answers.append(copy.deepcopy(arguments))
        self.done = name == "revise"
        return "Noted."

    def verify(self, correct: bool) -> str:
        """Say whether your answer is correct.

        correct: true if you are sure of it
        """
        if not self._answers:
            raise Refused("Attempt an answer first.")
        if self._judgement is not None:
            raise Refused("You have verified it.")
        self._judgement = correct
        return "Noted. Finish." if correct and self._scheme == "pag" else "Noted. Revise or finish."

    def finish(self) -> str:
        """Keep your answer."""
        if not self._answers:
            raise Refused("Attempt an answer first.")
        self.done = True
        return "Finished."

    async def grade(self) -> Grade:
        """The scheme's reward, and what it is made of."""
        assert self._problem is not None
        right = [await self._right(answer) for answer in self._answers]
        first, last = (right[0], right[-1]) if right else (0.0, 0.0)
        judged = None if self._judgement is None or not right else float(self._judgement is (first == 1.0))
        gained = {
            "s2r": last + (0.0 if judged is None else JUDGED * (2 * judged - 1)),
            "score": last + (ALPHA * (last - first) if right else 0.0),
            "pag": last + JUDGED * (judged or 0.0),
        }
        components = {"first": first, "last": last, "improvement": last - first}
        if judged is not None:
            components["judged_right"] = judged
        return Grade(
            reward=gained[self._scheme],
            components=components,
            facts={"scheme": self._scheme, "answers": len(right)},
        )

    async def _right(self, arguments: Mapping[str, Any]) -> float:
        """1 when a fresh wrapped instance that is given this answer says so."""
        fresh = self._inner.__class__()
        fresh.reset(self._problem)
        await self._inner_tools["submit"].call(fresh, arguments)
        graded: Grade = fresh.grade()
        return float(graded.reward >= 1.0)


class _Inner:
    """A tool of the wrapped environment, called on it."""

    def __init__(self, inner: ToolLike) -> None:
        self.name = inner.name
        self._inner = inner

    def schema(self) -> dict[str, Any]:
        """The wrapped tool's."""
        return self._inner.schema()

    async def call(self, workspace: AttemptVerifyRevise, arguments: Mapping[str, Any]) -> ToolResult:
        """Call it on the wrapped instance."""
        return await self._inner.call(workspace._inner, arguments)


def _answering(name: str) -> Any:
    async def call(instance: AttemptVerifyRevise, **arguments: Any) -> ToolResult:
        return ToolResult(text=instance.answer(name, arguments))

    return call
