"""`bench sandboxes` ends with how much is left behind, and it counts what is."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentrl.cli import machine
from agentrl.cli.app import app
from agentrl.errors import SandboxError
from envs.sandbox.backends import checked

HELD = ("processes", "mounts", "descriptors", "folders")


def bench(backend: str) -> tuple[int, dict[str, Any]]:
    words = ["bench", "sandboxes", "--backend", backend, "--count", "3", "--commands", "2", "--json"]
    ended = CliRunner().invoke(app, words)
    return ended.exit_code, json.loads(ended.stdout)


@pytest.mark.parametrize(
    "backend",
    [
        "plain",
        pytest.param("local", marks=pytest.mark.sandbox),
        pytest.param("docker", marks=pytest.mark.docker),
    ],
)
def test_nothing_is_left_behind(backend: str, tmp_path: Path) -> None:
    try:
        checked(backend, tmp_path)
    except SandboxError as error:
        pytest.skip(str(error))
    code, told = bench(backend)
    assert (code, told["ends"]) == (0, {"ok": 3})
    assert told["left"] == dict.fromkeys(HELD, 0)


def test_what_is_left_behind_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "LEFT_DEADLINE_S", 0.1)
    before = machine._held(tmp_path)
    assert machine._left(tmp_path, before) == dict.fromkeys(HELD, 0)
    (tmp_path / "docker" / "run" / "1-abc").mkdir(parents=True)
    held = os.open("/dev/null", os.O_RDONLY)
    child = subprocess.Popen(["sleep", "60"])
    try:
        found = machine._left(tmp_path, before)
    finally:
        os.close(held)
        child.kill()
        child.wait()
    assert found == {"processes": 1, "mounts": 0, "descriptors": 1, "folders": 1}
