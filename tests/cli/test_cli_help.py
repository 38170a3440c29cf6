"""Help teaches, and is there at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from agentrl.cli.docs import leaves

HEAVY = ("torch", "transformers", "sqlalchemy", "alembic", "jinja2", "pydantic", "numpy")
VERBS = [words for words, _ in leaves()]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself_with_an_example_of_itself(verb: str, typed) -> None:
    result = typed(*verb.split(), "--help")
    assert result.exit_code == 0
    assert "Examples" in result.stdout
    assert f"$ agentrl {verb}" in result.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_answers_machines(verb: str, typed) -> None:
    assert "--json" in typed(*verb.split(), "--help").stdout


def test_help_loads_nothing_heavy() -> None:
    """What keeps `agentrl --help` fast, whatever the machine is doing."""
    code = f"import sys, agentrl.cli.main; print([m for m in {HEAVY!r} if m in sys.modules])"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert loaded.stdout.strip() == "[]"


def test_completion_can_be_installed(typed) -> None:
    assert "--install-completion" in typed("--help").stdout


def test_version_is_said_alone(typed) -> None:
    assert typed("--version").stdout.split()[0] == "agentrl"
