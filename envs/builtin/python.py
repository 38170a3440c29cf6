"""`python`: a function to be written from its description, judged by unit tests in a fresh sandbox.

Each task is a package like any other: code of the policy runs in a sandbox of the run's backend and is
graded there with all ten pieces of evidence; nothing of it runs in this process. Two examples are visible
as tests; the hidden tests hold others too, computed here by the reference. Held-out functions are those
whose description hashes into the held-out share, whatever the seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.builtin.packages import PackagedEnvironment, write_drawn
from envs.environment import split_of
from envs.tasks import package

_NAMES = (
    "amber",
    "birch",
    "coral",
    "delta",
    "ember",
    "flint",
    "grove",
    "hazel",
    "ivory",
    "lotus",
    "maple",
    "onyx",
)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of an expression and the words for it."""

    code: str
    words: str


def _filters(k: int) -> tuple[_Piece, ...]:
    return (
        _Piece("x % 2 == 0", "the even numbers"),
        _Piece("x % 2 == 1", "the odd numbers"),
        _Piece(f"x > {k}", f"the numbers greater than {k}"),
        _Piece(f"x < {k}", f"the numbers less than {k}"),
        _Piece(f"x % {k} == 0", f"the multiples of {k}"),
        _Piece(f"x != {k}", f"the numbers other than {k}"),
    )


def _changes(k: int) -> tuple[_Piece, ...]:
    return (
        _Piece("x", ""),
        _Piece("x * x", "squared"),
        _Piece(f"x + {k}", f"plus {k}"),
        _Piece(f"x * {k}", f"times {k}"),
        _Piece("-x", "negated"),
        _Piece(f"x // {k}", f"divided by {k} and rounded down"),
    )


_ENDS = (
    _Piece("sum({})", "the sum of"),
    _Piece("sorted({})", "the sorted list of"),
    _Piece("max({}, default=0)", "the largest (0 if there is none) of"),
    _Piece("len(set({}))", "how many different values there are among"),
    _Piece("list({})[::-1]", "the list, last first, of"),
)


@dataclass(frozen=True, slots=True)
class _Function:
    name: str
    expression: str
    about: str
    examples: tuple[list[int], ...]

    def value(self, items: list[int]) -> Any:
        reference: Callable[[list[int]], Any] = eval(f"lambda items: {self.expression}")
        return reference(items)

    def tests(self, title: str, examples: tuple[list[int], ...]) -> str:
        lines = "\n".join(f"    assert {self.name}({x!r}) == {self.value(list(x))!r}" for x in examples)
        return f"from solution import {self.name}\n\n\ndef test_{title}():\n{lines}\n"

    def content(self) -> bytes:
        """What makes it this function."""
        return self.about.encode()


def _functions(rng: random.Random) -> Iterator[_Function]:
    while True:
        kept, changed = rng.choice(_filters(rng.randint(2, 9))), rng.choice(_changes(rng.randint(2, 9)))
        end = rng.choice(_ENDS)
        expression = end.code.format(f"{changed.code} for x in items if {kept.code}")
        if "default" in expression:
            expression = end.code.format(f"({changed.code} for x in items if {kept.code})")
        if expression.startswith(("list", "len")):
            expression = end.code.format(f"[{changed.code} for x in items if {kept.code}]")
        about = f"{end.words} {kept.words}{f', each {changed.words}' if changed.words else ''}"
        examples = tuple([rng.randint(0, 20) for _ in range(rng.randint(4, 7))] for _ in range(7))
        made = _Function(rng.choice(_NAMES), expression, about, examples)
        if len({repr(made.value(x)) for x in examples[2:]}) > 2:
            yield made


def _write(folder: Path, name: str, function: _Function) -> Path:
    stub = f'def {function.name}(items):\n    """Return {function.about}."""\n    raise NotImplementedError\n'
    solved = stub.replace("raise NotImplementedError", f"return {function.expression}")
    config = {
        "schema_version": "1.4",
        "task": {"name": f"python/{name}", "description": "One function, judged by its tests."},
        "environment": {
            "network_mode": "no-network",
            "cpus": 1,
            "memory_mb": 256,
            "storage_mb": 16,
            "workdir": "/app",
        },
        "agent": {"timeout_sec": 300},
        "verifier": {"timeout_sec": 10, "environment_mode": "separate"},
        "metadata": {
            "agentrl": {
                "split": str(split_of(function.content())),
                "tools": ["bash", "read_file", "replace_in_file", "run_tests", "submit"],
                "max_turns": 12,
                "exec_timeout_s": 10,
                "observation_bytes": 4096,
                "pids_limit": 32,
                "grader": "tests",
                "fail_to_pass": ["test_hidden.py::test_hidden"],
                "protected_paths": ["tests"],
            }
        },
    }
    return package.write_task(
        folder,
        config=config,
        instruction=f"Write the function `{function.name}` in solution.py: it takes a list of integers and"
        f" returns {function.about}. Then submit.\n",
        environment={
            "solution.py": stub,
            "tests/test_examples.py": function.tests("examples", function.examples[:2]),
        },
        tests={"test_hidden.py": function.tests("hidden", function.examples)},
        solution=f"#!/bin/bash\nset -eu\ncat > solution.py <<'END'\n{solved}END\n",
    )


def generate(out: Path, *, train: int, heldout: int, seed: int) -> tuple[Path, ...]:
    """Write packages, training tasks first; the same arguments give the same bytes. No description twice."""
    return write_drawn(
        _functions(random.Random(f"python/{seed}")),
        name="python",
        content=_Function.content,
        write=_write,
        out=out,
        train=train,
        heldout=heldout,
        seed=seed,
    )


ENVIRONMENT = PackagedEnvironment(
    name="python",
    summary="Write a Python function; its hidden unit tests run in a fresh sandbox.",
    generate=generate,
)
