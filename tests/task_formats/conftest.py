"""A way to type commands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from typer.testing import CliRunner, Result

from agentrl.cli.app import app


@pytest.fixture
def typed() -> Callable[..., Result]:
    """Type a command: `typed("tasks", "list").stdout`."""
    runner = CliRunner()
    return lambda *words: runner.invoke(app, [str(word) for word in words])
