"""`calculator`: arithmetic too large for the head, with a tool that computes.

Expressions are read as Python syntax and walked; nothing is ever evaluated as code. Numbers, the operators
`+ - * // % **` and parentheses; sizes are bounded before anything is computed.
"""

from __future__ import annotations

import ast
import operator
import random
from collections.abc import Callable, Mapping

from envs.environment import Grade, Problem, Refused, Step, environment, tool

MAX_CHARS = 400
MAX_BITS = 4096
"""Largest integer that is computed, in bits."""

OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def evaluate(expression: str) -> int:
    """The value of an integer expression. `Refused` for anything else, or when it would be too large."""
    if len(expression) > MAX_CHARS:
        raise Refused(f"The expression is longer than {MAX_CHARS} characters.")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise Refused("That is not an arithmetic expression. Example: (12 + 7) * 3") from None
    try:
        return _value(tree)
    except ZeroDivisionError:
        raise Refused("Division by zero.") from None
    except RecursionError:
        raise Refused("The expression is nested too deeply.") from None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            a, b = _value(left), _value(right)
            if isinstance(op, ast.Pow) and (b < 0 or abs(a).bit_length() * b > MAX_BITS):
                raise Refused("The result would be too large, or a fraction.")
            return _bounded(OPERATORS[type(op)](a, b))
        case _:
            raise Refused("Only integers, + - * // % ** and parentheses are known.")


def _bounded(number: int) -> int:
    if number.bit_length() > MAX_BITS:
        raise Refused("The result would be too large.")
    return number


@environment("calculator")
class Calculator:
    """Compute an expression with a calculator and hand in its value."""

    def __init__(self) -> None:
        self.done = False
        self._answer = 0
        self._given: int | None = None
        self._computed = 0

    @staticmethod
    def problem(seed: int) -> Problem:
        """An expression of two or three operations whose value is none of its numbers."""
        rng = random.Random(f"calculator/{seed}")
        while True:
            a, b, c = (rng.randint(12, 99) for _ in range(3))
            expression = rng.choice(
                (f"{a} * {b} + {c}", f"{a} * {b} - {c}", f"({a} + {b}) * {c}", f"{a} * {b} % {c + 900}")
            )
            value = evaluate(expression)
            if value > 99:
                break
        return Problem(
            instruction=f"Compute {expression}.",
            data={"expression": expression, "answer": value},
            gold=(
                Step(tool="calculate", arguments={"expression": expression}),
                Step(tool="submit", arguments={"answer": value}),
            ),
            secrets=(str(value),),
        )

    def reset(self, problem: Problem) -> None:
        """Note the right answer."""
        self._answer = problem.data["answer"]

    @tool
    def calculate(self, expression: str) -> str:
        """Compute an integer expression.

        expression: for example (12 + 7) * 3
        """
        value = evaluate(expression)
        self._computed += 1
        return str(value)

    @tool
    def submit(self, answer: int) -> str:
        """Hand in the answer.

        answer: the value of the expression
        """
        self._given = answer
        self.done = True
        return "Submitted."

    def grade(self) -> Grade:
        """Right or not; whether the calculator was used is noted and not rewarded."""
        right = self._given == self._answer
        return Grade(
            reward=float(right),
            components={"right": float(right)},
            facts={"given": str(self._given), "computed": self._computed},
        )
