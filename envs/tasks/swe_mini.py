"""The generated suite `swe_mini`: small Python repositories with one wrong line that only the tests can put
right.

Each task is a readable Harbor package: one module with two or three short functions, its visible tests, and
one bug in one assignment; the instruction names the variable and the file, never the fix. The bug comes from
a family with a closed set of alternatives. The right line and the wrong one are drawn uniformly from that
set, and names, docstrings and the other functions are drawn without looking at them: so given all but the
tests, each other alternative is equally likely to be the fix. The generator runs every alternative: the right
one passes all visible tests, every wrong one fails at least one. Held-out tasks differ from all training
tasks of all seeds, because the split is decided by the hash of the module. Deterministic by seed.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.types import Split
from envs.tasks import package

SUITE = "swe_mini"
HELDOUT_SHARE = 5
"""One module in this many belongs to the held-out split, whatever the seed."""
MAX_ASSERTS = 3

MODULES = (
    *(
        "barn",
        "boat",
        "cafe",
        "cart",
        "dock",
        "farm",
        "fork",
        "gate",
        "hall",
        "hive",
        "kite",
        "lake",
        "lamp",
        "loft",
    ),
    *(
        "mill",
        "moss",
        "nest",
        "park",
        "pier",
        "pond",
        "port",
        "road",
        "shed",
        "shop",
        "tank",
        "tent",
        "tree",
        "yard",
    ),
)
FUNCTIONS = (
    *(
        "amber",
        "aspen",
        "basil",
        "birch",
        "cedar",
        "clove",
        "coral",
        "daisy",
        "delta",
        "ember",
        "fable",
        "fern",
    ),
    *(
        "flint",
        "grove",
        "hazel",
        "heron",
        "iris",
        "ivory",
        "jade",
        "juniper",
        "lemon",
        "lilac",
        "lotus",
        "maple",
    ),
    *(
        "mint",
        "ocean",
        "olive",
        "onyx",
        "opal",
        "otter",
        "pearl",
        "quartz",
        "raven",
        "robin",
        "sage",
        "willow",
    ),
)
"""Words that say nothing about what a function computes."""
VARIABLES = tuple("abcdefghkmnpqrstuvwxyz")
LISTS = ("cells", "items", "marks", "parts", "rows", "sizes")

Inputs = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of bug: `shapes` with `ALT` where the alternatives go, `{p}`, `{q}` for parameters."""

    name: str
    shapes: tuple[str, ...]
    alternatives: tuple[str, ...]
    parameters: str
    """`ints 1`, `ints 2` or `list`."""


FAMILIES = (
    Family("arithmetic", ("{p} ALT {q}",), ("+", "-", "*", "//"), "ints 2"),
    Family("comparison", ("{p} ALT {q}",), ("<", "<=", ">", ">="), "ints 2"),
    Family("constant", ("{p} + ALT", "{p} - ALT", "{p} * ALT"), ("0", "1", "2", "3"), "ints 1"),
    Family("builtin", ("ALT({p})",), ("sum", "len", "max", "min"), "list"),
)


@dataclass(frozen=True, slots=True)
class _Function:
    """One function; `asserts` and `hidden` are inputs that each separate the right expression from all
    others."""

    name: str
    variable: str
    parameters: tuple[str, ...]
    expressions: tuple[str, ...]
    right: int
    asserts: tuple[Inputs, ...]
    hidden: tuple[Inputs, ...]

    def line(self, index: int) -> str:
        return f"{self.variable} = {self.expressions[index]}"

    def text(self, index: int) -> str:
        head = f"def {self.name}({', '.join(self.parameters)}):"
        return f"{head}\n    {self.line(index)}\n    return {self.variable}\n"

    def call(self, inputs: Inputs) -> str:
        return f"{self.name}({', '.join(map(repr, inputs))})"


def _inputs(kind: str, rng: random.Random) -> Inputs:
    what, _, count = kind.partition(" ")
    if what == "list":
        return (rng.sample(range(2, 10), rng.randint(2, 4)),)
    if rng.random() < 0.25:
        return (rng.randint(1, 9),) * int(count)
    return tuple(rng.randint(1, 9) for _ in range(int(count)))


def _compiled(parameters: tuple[str, ...], expression: str) -> Callable[..., Any]:
    value: Callable[..., Any] = eval(f"lambda {', '.join(parameters)}: {expression}", {})
    return value


def _separating(
    functions: list[Callable[..., Any]], right: int, kind: str, rng: random.Random
) -> tuple[Inputs, ...]:
    """At most `MAX_ASSERTS` inputs; every wrong alternative differs from the right one on at least one of
    them."""
    for _ in range(1000):
        chosen: list[Inputs] = []
        left = set(range(len(functions))) - {right}
        for _ in range(40):
            inputs = _inputs(kind, rng)
            value = functions[right](*inputs)
            caught = {i for i in left if functions[i](*inputs) != value}
            if not caught or (len(chosen) == MAX_ASSERTS - 1 and caught != left):
                continue
            chosen.append(inputs)
            left -= caught
            if not left:
                return tuple(chosen)
    raise AssertionError("two alternatives of a family can not be told apart")


def _draw(family: Family, name: str, variable: str, letters: list[str], rng: random.Random) -> _Function:
    """A function of a family, with parameters from `letters` or, for a list, a word. The right alternative
    is uniform: nothing drawn later can lead to a new draw."""
    shape = rng.choice(family.shapes)
    kind = family.parameters
    count = int(kind.partition(" ")[2] or 1)
    names = (rng.choice(LISTS),) if kind == "list" else tuple(letters[:count])
    slots = dict(zip("pq", names, strict=False))
    expressions = tuple(
        shape.replace("ALT", alternative).format(**slots) for alternative in family.alternatives
    )
    compiled = [_compiled(names, expression) for expression in expressions]
    right = rng.randrange(len(expressions))
    return _Function(
        name=name,
        variable=variable,
        parameters=names,
        expressions=expressions,
        right=right,
        asserts=_separating(compiled, right, kind, rng),
        hidden=_separating(compiled, right, kind, rng),
    )


def _value(function: _Function, inputs: Inputs) -> Any:
    return _compiled(function.parameters, function.expressions[function.right])(*inputs)


def _tests(function: _Function, inputs: tuple[Inputs, ...], suffix: str = "") -> str:
    lines = [f"    assert {function.call(i)} == {_value(function, i)!r}" for i in inputs]
    return f"def test_{function.name}{suffix}():\n" + "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class _Repository:
    """The files of one task before they are written."""

    module: str
    functions: tuple[_Function, ...]
    at: int
    family: Family
    buggy: int

    @property
    def wrong(self) -> _Function:
        return self.functions[self.at]

    def source(self, index: int) -> str:
        parts = [f.text(index if i == self.at else f.right) for i, f in enumerate(self.functions)]
        return "\n\n".join(parts)

    def split(self) -> Split:
        digest = hashlib.sha256(self.source(self.buggy).encode()).digest()
        return Split.HELDOUT if digest[0] % HELDOUT_SHARE == 0 else Split.TRAIN

    def visible(self) -> str:
        head = f"from {self.module} import {', '.join(sorted(f.name for f in self.functions))}\n"
        return "\n\n".join(
            [
                head,
                *(
                    _tests(f, f.asserts if i == self.at else f.asserts[:1])
                    for i, f in enumerate(self.functions)
                ),
            ]
        )

    def hidden(self) -> str:
        f = self.wrong
        kind = type(_value(f, f.hidden[0])).__name__
        typed = f"    assert type({f.call(f.hidden[0])}) is {kind}\n"
        return f"{self.visible()}\n\n{_tests(f, f.hidden, '_hidden')}{typed}"

    def check(self) -> None:
        """Execute every alternative against the visible tests; an `AssertionError` here is the generator's
        bug."""
        tests = self.visible().partition("\n")[2]
        for index in range(len(self.wrong.expressions)):
            space: dict[str, Any] = {}
            exec(self.source(index) + tests, space)
            try:
                for f in self.functions:
                    space[f"test_{f.name}"]()
                passed = True
            except AssertionError:
                passed = False
            assert passed == (index == self.wrong.right), f"{self.source(index)}\n{tests}"


def _repositories(rng: random.Random) -> Iterator[_Repository]:
    while True:
        count = rng.randint(2, 3)
        words = rng.sample(FUNCTIONS, 2 * count)
        families = rng.sample(FAMILIES, count)
        letters = rng.sample(VARIABLES, 2 * count)  # no letter in two functions
        functions = [
            _draw(f, words[i], words[count + i], letters[2 * i : 2 * i + 2], rng)
            for i, f in enumerate(families)
        ]
        at = rng.randrange(count)
        wrong = functions[at]
        buggy = rng.choice([i for i in range(len(wrong.expressions)) if i != wrong.right])
        others = {f.line(f.right) for i, f in enumerate(functions) if i != at}
        module = rng.choice(MODULES)
        if others & {wrong.line(i) for i in range(len(wrong.expressions))}:
            continue  # the wrong line must occur once; judged over all alternatives, so nothing is given away
        yield _Repository(module, tuple(functions), at, families[at], buggy)


def _write(folder: Path, name: str, repository: _Repository) -> Path:
    wrong, module = repository.wrong, repository.module
    source = repository.source(repository.buggy)
    place = source.split("\n").index(f"    {wrong.line(repository.buggy)}") + 1
    file = f"test_{module}.py"
    others = [f"{file}::test_{f.name}" for i, f in enumerate(repository.functions) if i != repository.at]
    config = {
        "schema_version": "1.4",
        "task": {"name": f"{SUITE}/{name}", "description": "One wrong line, found by its tests."},
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
                "split": str(repository.split()),
                "difficulty": round(1 - 1 / (len(wrong.expressions) - 1), 3),
                "tools": ["read_file", "replace_in_file", "run_tests", "submit"],
                "max_turns": 18,
                "exec_timeout_s": 10,
                "observation_bytes": 4096,
                "pids_limit": 32,
                "grader": "tests",
                "fail_to_pass": [f"{file}::test_{wrong.name}", f"{file}::test_{wrong.name}_hidden"],
                "pass_to_pass": others,
                "protected_paths": ["tests"],
                "family": repository.family.name,
                "file": f"{module}.py",
                "function": wrong.name,
                "variable": wrong.variable,
                "buggy": wrong.line(repository.buggy),
                "fix": wrong.line(wrong.right),
                "alternatives": [wrong.line(i) for i in range(len(wrong.expressions))],
            }
        },
    }
    return package.write_task(
        folder,
        config=config,
        instruction=f"The value of `{wrong.variable}` is wrong ({module}.py): tests fail."
        " Fix it, then submit.\n",
        environment={
            "README.md": f"# {module}\n\nSmall functions in {module}.py, tests in tests/{file}.\n",
            f"{module}.py": source,
            f"tests/{file}": repository.visible(),
        },
        tests={file: repository.hidden()},
        solution=f"#!/bin/bash\nset -eu\nsed -i '{place}s|.*|    {wrong.line(wrong.right)}|' {module}.py\n",
    )


def generate(out: Path, *, train: int, heldout: int, seed: int) -> tuple[Path, ...]:
    """Write `train` + `heldout` packages into new folders of `out`; their paths, training tasks first.

    The same arguments give the same bytes. No two tasks have the same module; no held-out module is a
    training module of any seed. `ConfigError` on negative counts.
    """
    if train < 0 or heldout < 0:
        raise ConfigError("The number of tasks is negative.", fix="Give train and heldout of at least 0.")
    rng = random.Random(f"{SUITE}/{seed}")
    wanted = {Split.TRAIN: train, Split.HELDOUT: heldout}
    kept: dict[Split, list[_Repository]] = {split: [] for split in wanted}
    seen: set[str] = set()
    for repository in itertools.islice(_repositories(rng), 100 * HELDOUT_SHARE * (train + heldout)):
        if all(len(kept[split]) == count for split, count in wanted.items()):
            break
        source, split = repository.source(repository.buggy), repository.split()
        if source in seen or len(kept[split]) == wanted[split]:
            continue
        repository.check()
        seen.add(source)
        kept[split].append(repository)
    return tuple(
        _write(out / f"{split}-{index:05d}", f"s{seed}-{split}-{index:05d}", repository)
        for split in wanted
        for index, repository in enumerate(kept[split])
    )
