"""The README's section "Register an environment", followed word for word in a package of its own."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from envs import registry, scaffold
from envs.environment import ToolEnvironment

README = Path(__file__).parents[2] / "README.md"


def section() -> str:
    found = re.search(
        r"## Register an environment\n(.*?)\n## ", README.read_text(encoding="utf-8"), re.DOTALL
    )
    assert found is not None
    return found[1].partition("**Others' environments")[0]


def commands() -> list[str]:
    return [
        line for block in re.findall(r"```sh\n(.*?)```", section(), re.DOTALL) for line in block.splitlines()
    ]


def run(words: list[str], folder: Path, site: Path | None = None) -> str:
    place = {**os.environ, "OMP_NUM_THREADS": "1"} | ({} if site is None else {"PYTHONPATH": str(site)})
    done = subprocess.run(
        words, cwd=folder, env=place, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


MINE = '''\
"""The environment `my-game`: open a safe whose dial says which way to turn."""

import random

from envs.environment import Grade, Problem, Refused, Step, environment, tool


@environment("my-game")
class MyGame:
    """Open a safe with a dial from 0 to 99."""

    def __init__(self) -> None:
        self.done = False
        self._combination: list[int] = []
        self._turned: list[int] = []

    @staticmethod
    def problem(seed: int) -> Problem:
        """The same seed, the same safe."""
        rng = random.Random(f"my-game/{seed}")
        combination = [rng.randint(10, 99) for _ in range(2)]
        return Problem(
            instruction=f"Open safe {rng.randint(100, 999)}: it has {len(combination)} numbers.",
            data={"combination": combination},
            gold=(
                *(Step(tool="turn", arguments={"number": number}) for number in combination),
                Step(tool="open"),
            ),
            secrets=(" ".join(str(number) for number in combination),),
        )

    def reset(self, problem: Problem) -> None:
        """Begin."""
        self._combination = problem.data["combination"]

    @tool
    def turn(self, number: int) -> str:
        """Turn the dial to a number.

        number: from 0 to 99
        """
        if not 0 <= number <= 99:
            raise Refused("The dial has the numbers 0 to 99.")
        at = len(self._turned)
        if at == len(self._combination):
            raise Refused("All numbers are set: open it.")
        if number != self._combination[at]:
            return "further right" if number < self._combination[at] else "further left"
        self._turned.append(number)
        return "click"

    @tool
    def open(self) -> str:
        """Try to open the safe. This ends the attempt."""
        self.done = True
        return "It opens." if self._turned == self._combination else "It stays shut."

    def grade(self) -> Grade:
        """Open or not; the share of numbers found is noted and not rewarded."""
        opened = float(self.done and self._turned == self._combination)
        return Grade(
            reward=opened,
            components={"open": opened, "found": len(self._turned) / len(self._combination)},
        )
'''
"""What somebody might write who read the section and the file that `agentrl envs new` left them."""


def environment_of_their_own(folder: Path) -> Path:
    """A fresh virtual environment where agentrl and what it needs can be imported; its `bin`."""
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)], folder.parent)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "agentrl-of-the-tests.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n"
    )
    return folder / "bin"


@pytest.mark.timeout(900)  # several processes that import torch, on whatever machine
def test_a_newcomer_who_follows_the_readme_trains_on_their_own_environment(tmp_path: Path) -> None:
    told = commands()
    assert told == [
        "agentrl envs new my-game",
        "pip install -e my-game",
        "agentrl envs list",
        "agentrl envs check my-game",
        "agentrl train my-game.toml",
    ]
    bin = environment_of_their_own(tmp_path / "venv")
    agentrl = [str(bin / "python"), "-m", "agentrl.cli.main"]
    run([*agentrl, *shlex.split(told[0])[1:]], tmp_path)
    # The package index is left alone: everything that the package needs is there already.
    pip = [sys.executable, "-m", "pip", "--python", str(bin / "python"), "--disable-pip-version-check"]
    run([*pip, *shlex.split(told[1])[1:], "--no-deps", "--no-build-isolation", "--quiet"], tmp_path)
    listed = run([*agentrl, *shlex.split(told[2])[1:]], tmp_path)
    assert re.search(r"^my-game\tmy-game\tis_larger, submit", listed, re.MULTILINE), listed
    (tmp_path / "my-game" / "my_game.py").write_text(MINE)
    checked = json.loads(run([*agentrl, *shlex.split(told[3])[1:], "--json"], tmp_path))
    assert checked["passed"] is True, checked
    (run_file,) = re.findall(r"```toml\n(.*?)```", section(), re.DOTALL)
    (tmp_path / "my-game.toml").write_text(run_file)
    smaller = ["tasks.train=4", "tasks.heldout=1", "coldstart.demonstrations=2", "coldstart.epochs=1"]
    smaller += ["train.updates=2", "rollout.groups=1", "rollout.group_size=2", "rollout.max_tokens=24"]
    smaller += ["policy.small.layers=2", "policy.small.hidden_size=128", "eval.tasks=1"]
    sets = [word for each in smaller for word in ("--set", each)]
    summary = json.loads(run([*agentrl, *shlex.split(told[4])[1:], *sets, "--json"], tmp_path))
    assert summary["faults"] == 0
    assert summary["trajectories"] == 2 + 2 * 2 + 2, "shown, two updates of a group of two, eval twice"


def test_the_scaffold_holds_its_own_test_and_passes_it(tmp_path: Path) -> None:
    files = scaffold.write(tmp_path / "x", "two-words")
    assert [f.name for f in files] == ["pyproject.toml", "two_words.py", "test_two_words.py"]
    assert 'two-words = "two_words:TwoWords"' in files[0].read_text()
    run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], tmp_path / "x", tmp_path / "x")


def test_a_scaffold_overwrites_nothing_and_needs_a_plain_name(tmp_path: Path) -> None:
    scaffold.write(tmp_path / "x", "game")
    with pytest.raises(ConfigError, match="is not empty"):
        scaffold.write(tmp_path / "x", "game")
    with pytest.raises(ConfigError, match="is no name"):
        scaffold.write(tmp_path / "y", "My Game")


def test_a_file_and_a_class_is_a_name_too(tmp_path: Path) -> None:
    scaffold.write(tmp_path, "game")
    found = registry.get(f"{tmp_path}/game.py:Game")
    assert isinstance(found, ToolEnvironment)
    task = found.tasks(train=1, heldout=0, seed=1)[0]
    assert registry.of_task(task) == found
    with pytest.raises(ConfigError, match="Did you mean 'Game'"):
        registry.get(f"{tmp_path}/game.py:Gme")
    with pytest.raises(ConfigError, match="There is no file"):
        registry.get(f"{tmp_path}/gone.py:Game")


def test_a_broken_file_is_the_users_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(ConfigError, match="ModuleNotFoundError"):
        registry.get(f"{tmp_path}/bad.py:Bad")
    (tmp_path / "half.py").write_text("class Half:\n    def reset(self, problem): ...\n")
    with pytest.raises(ConfigError, match="has no problem and no grade"):
        registry.get(f"{tmp_path}/half.py:Half")


def test_an_environment_that_changed_after_its_tasks_were_made_is_another_one(tmp_path: Path) -> None:
    scaffold.write(tmp_path, "game")
    before = registry.get(f"{tmp_path}/game.py:Game")
    (tmp_path / "game.py").write_text((tmp_path / "game.py").read_text() + "\nCHANGED = True\n")
    after = registry.get(f"{tmp_path}/game.py:Game")
    assert isinstance(before, ToolEnvironment)
    assert isinstance(after, ToolEnvironment)
    assert before.task(1).revision != after.task(1).revision
