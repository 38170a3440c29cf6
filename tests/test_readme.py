"""The README is true: its tables are fresh, its commands exist, its files are there."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

from agentrl.algo.recipes import compose
from agentrl.cli.docs import fresh, leaves
from agentrl.config import parse

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def typed() -> list[list[str]]:
    """Every `agentrl …` command in a code block."""
    blocks = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    lines = [part.strip() for block in blocks for line in block.splitlines() for part in line.split("&&")]
    return [shlex.split(line)[1:] for line in lines if line.startswith("agentrl")]


def test_generated_tables_are_fresh() -> None:
    assert fresh(TEXT) == TEXT, "run: python -m agentrl.cli.docs --write"


def test_every_command_exists_and_takes_its_options() -> None:
    verbs = dict(leaves())
    commands = typed()
    assert len(commands) > 12
    for words in commands:
        verb = next(v for v in sorted(verbs, key=len, reverse=True) if words[: len(v.split())] == v.split())
        rest = words[len(verb.split()) :]
        verbs[verb].make_context(verb, list(rest)).close()


def test_the_two_commands_stand_there_word_for_word() -> None:
    assert "\npip install -e . && agentrl quickstart\n" in TEXT
    assert "\npip install -e '.[test]' && pytest\n" in TEXT


def test_files_that_are_named_exist() -> None:
    named = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert len(named) > 8
    assert [name for name in named if not (ROOT / name).exists()] == []
    words = {word for command in typed() for word in command if word.startswith(("tasks/", "deploy/"))}
    assert [word for word in words if not (ROOT / word).exists()] == []


def test_the_run_file_in_the_readme_is_valid() -> None:
    for block in re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL):
        config = parse(tomllib.loads(block))
        compose(config.train.overrides, base=config.train.recipe)
