"""Images come before the policy: what can not be had ends a run before a weight is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.config import RunConfig
from agentrl.errors import SandboxError
from agentrl.training import given, loop
from agentrl.training.events import Silent
from envs.sandbox.contract import Isolation


class Limited:
    """A backend whose registry asks for fewer, of every image but the first."""

    name = "limited"
    isolation: Isolation = "docker"

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.closed = False

    async def prepare(self, environment_dir: str) -> str:
        self.asked.append(environment_dir)
        if len(self.asked) > 1:
            raise SandboxError("It asks for fewer.", fix="Log in.", code="pull_limited", phase="pull")
        return "image:1"

    async def create(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    async def close(self) -> None:
        self.closed = True


def configured(folder: Path, **sandbox: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "images", "dir": str(folder), "threads": 1},
            "tasks": {"train": 2, "heldout": 1},
            "eval": {"tasks": 1},
            "coldstart": {"demonstrations": 0},
            "sandbox": sandbox,
        }
    )


def test_a_registry_that_refuses_ends_the_run_with_all_that_is_missing_and_no_weights_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, loaded = Limited(), []
    monkeypatch.setattr(given, "backend", lambda *_: backend)
    monkeypatch.setattr(given, "policy", lambda *_: loaded.append(1) or pytest.fail("weights are loaded"))
    heard = Silent()
    with pytest.raises(SandboxError) as caught:
        loop.run(configured(tmp_path / "run"), listener=heard)
    assert caught.value.code == "images_missing"
    assert "2 of 3 images" in caught.value.message
    assert caught.value.message.count("pull_limited") == 2
    assert "Log in." in (caught.value.fix or "")
    assert heard.phases == ["images"]
    assert (loaded, len(backend.asked), backend.closed) == ([], 3, True)


def test_where_images_do_not_fit_together_each_is_prepared_when_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Limited()
    monkeypatch.setattr(given, "backend", lambda *_: backend)

    def weights(*_: object) -> None:
        raise RuntimeError("weights are loaded")

    monkeypatch.setattr(given, "policy", weights)
    with pytest.raises(RuntimeError, match="weights are loaded"):
        loop.run(configured(tmp_path / "run", prepare=False), listener=Silent())
    assert backend.asked == []
