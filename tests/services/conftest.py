from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway_given import prepared_store, task_at

from agentrl.store import Store
from agentrl.types import Task


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return task_at(tmp_path_factory.mktemp("tasks") / "one")


@pytest.fixture(scope="session")
def blank(tmp_path_factory: pytest.TempPathFactory, task: Task) -> Path:
    """A store that knows the tenants and the task; the others are copies of it, because migrating is slow."""
    path = tmp_path_factory.mktemp("stores") / "blank.db"
    prepared_store(path, [task]).close()
    return path


@pytest.fixture
def store(tmp_path: Path, blank: Path) -> Iterator[Store]:
    path = tmp_path / "store.db"
    shutil.copy(blank, path)
    with Store.open(path) as opened:
        yield opened
