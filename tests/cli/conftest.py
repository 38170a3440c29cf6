"""A run by hand, filled once for all tests, and a way to type commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from made import fill
from typer.testing import CliRunner, Result

from agentrl.cli.app import app
from agentrl.store import Store

Type = Callable[..., Result]


@dataclass(frozen=True)
class Made:
    """A folder with `runs/made/` in it, as a run leaves it."""

    root: Path
    folder: Path
    store: str
    run_id: str

    def ids(self, phase: str) -> list[str]:
        with Store.open(self.store) as store:
            return [row.id for row in store.trajectories(self.run_id, phase=phase)]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("made")
    folder = root / "runs" / "made"
    folder.mkdir(parents=True)
    store = f"sqlite:///{folder / 'store.db'}"
    return Made(root=root, folder=folder, store=store, run_id=fill(store, folder))


@pytest.fixture
def here(made: Made, monkeypatch: pytest.MonkeyPatch) -> Made:
    """The same, with its root as the current folder and no store named."""
    monkeypatch.chdir(made.root)
    monkeypatch.delenv("AGENTRL_STORE", raising=False)
    return made


@pytest.fixture
def typed() -> Type:
    """Type a command: `typed("runs", "list").stdout`."""
    runner = CliRunner()
    return lambda *words: runner.invoke(app, [str(word) for word in words])
