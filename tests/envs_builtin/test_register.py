"""The README's section "Register an environment", followed word for word in a package of its own."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
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


def run(words: list[str], folder: Path, site: Path) -> str:
    place = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, cwd=folder, env=place, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def install(package: Path, site: Path) -> None:
    """What `pip install` leaves of a pure package, without a package index: its module and its metadata."""
    site.mkdir()
    (site / "my_game.py").write_text((package / "my_game.py").read_text())
    facts = site / "my_game-0.1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: my-game\nVersion: 0.1.0\n")
    wanted = re.search(r'environments"\]\nmy-game = "(.*)"', (package / "pyproject.toml").read_text())
    assert wanted is not None
    (facts / "entry_points.txt").write_text(f"[agentrl.environments]\nmy-game = {wanted[1]}\n")


def test_a_newcomer_who_follows_the_readme_trains_on_their_own_environment(tmp_path: Path) -> None:
    told = commands()
    assert told == [
        "agentrl envs new my-game",
        "pip install -e my-game",
        "agentrl envs list",
        "agentrl envs check my-game",
        "agentrl train my-game.toml",
    ]
    agentrl = [sys.executable, "-m", "agentrl.cli.main"]
    site = tmp_path / "site"
    run([*agentrl, *shlex.split(told[0])[1:]], tmp_path, site)
    install(tmp_path / "my-game", site)
    listed = run([*agentrl, *shlex.split(told[2])[1:]], tmp_path, site)
    assert re.search(r"^my-game\tmy-game\tis_larger, submit", listed, re.MULTILINE), listed
    checked = run([*agentrl, *shlex.split(told[3])[1:], "--json"], tmp_path, site)
    assert json.loads(checked)["passed"] is True
    (run_file,) = re.findall(r"```toml\n(.*?)```", section(), re.DOTALL)
    (tmp_path / "my-game.toml").write_text(run_file)
    smaller = ["tasks.train=4", "tasks.heldout=1", "coldstart.demonstrations=2", "coldstart.epochs=1"]
    smaller += ["train.updates=1", "rollout.groups=1", "rollout.group_size=2", "rollout.max_tokens=24"]
    smaller += ["policy.small.layers=2", "policy.small.hidden_size=128", "eval.tasks=1"]
    sets = [word for each in smaller for word in ("--set", each)]
    trained = run([*agentrl, *shlex.split(told[4])[1:], *sets, "--json"], tmp_path, site)
    summary = json.loads(trained)
    assert summary["faults"] == 0
    assert summary["trajectories"] == 2 + 2 + 2


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
