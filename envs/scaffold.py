"""A new environment as an installable package: one class, its entry point, and a test that runs the
conformance kit."""

from __future__ import annotations

import re
from pathlib import Path

from agentrl.errors import ConfigError

NAME = re.compile(r"[a-z][a-z0-9-]*")

PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "NAME"
version = "0.1.0"
dependencies = ["agentrl"]

[project.entry-points."agentrl.environments"]
NAME = "MODULE:CLASS"

[tool.setuptools]
py-modules = ["MODULE"]
"""

ENVIRONMENT = '''\
"""The environment `NAME`: find a hidden number by asking whether it is larger."""

import random

from envs.environment import Grade, Problem, Step, environment, tool


@environment("NAME")
class CLASS:
    """Find a hidden number between 1 and 1000."""

    def __init__(self) -> None:
        self.done = False
        self._number = 0
        self._answer: int | None = None

    @staticmethod
    def problem(seed: int) -> Problem:
        """The same seed, the same problem."""
        rng = random.Random(f"NAME/{seed}")
        number, low = rng.randint(11, 999), rng.randint(1, 10)
        return Problem(
            instruction=f"Find the hidden number between {low} and 1000.",
            data={"number": number},
            gold=(Step(tool="submit", arguments={"answer": number}),),
            secrets=(str(number),),
        )

    def reset(self, problem: Problem) -> None:
        """Begin: state lives in attributes."""
        self._number = problem.data["number"]

    @tool
    def is_larger(self, number: int) -> str:
        """Ask whether the hidden number is larger.

        number: the number to compare with
        """
        return "yes" if self._number > number else "no"

    @tool
    def submit(self, answer: int) -> str:
        """Hand in the answer.

        answer: the hidden number
        """
        self._answer = answer
        self.done = True
        return "Submitted."

    def grade(self) -> Grade:
        """1 or more is success; components say what the reward is made of."""
        right = float(self._answer == self._number)
        return Grade(reward=right, components={"right": right}, facts={"answer": self._answer})
'''

TEST = '''\
"""The environment is fit for training."""

import asyncio

from MODULE import CLASS

from envs.conformance import check
from envs.environment import of_class


def test_it_passes_the_conformance_kit() -> None:
    failed = [row for row in asyncio.run(check(of_class(CLASS))) if not row.passed]
    assert not failed, failed
'''


def write(folder: Path, name: str) -> tuple[Path, ...]:
    """Write the package `name` into a new folder; the files written.

    Raises:
        ConfigError: the name is not lower-case letters, digits and dashes, or the folder is not empty.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(f"'{name}' is no name.", fix="Use lower-case letters, digits and dashes: my-game.")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty.", fix="Give a new folder with --dir.")
    module = name.replace("-", "_")
    class_name = "".join(part.capitalize() for part in name.split("-"))
    texts = {
        "pyproject.toml": PYPROJECT,
        f"{module}.py": ENVIRONMENT,
        f"test_{module}.py": TEST,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        filled = text.replace("NAME", name).replace("MODULE", module).replace("CLASS", class_name)
        (folder / file).write_text(filled, encoding="utf-8")
    return tuple(folder / file for file in texts)
