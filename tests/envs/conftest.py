"""A small task for every test of sessions and grading."""

from pathlib import Path

import pytest
from faulty_backend import small_task

from agentrl.types import Task


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return small_task(tmp_path / "cart")
