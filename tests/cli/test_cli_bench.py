"""`bench sandboxes` ends with how much is left behind, and it counts what is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentrl.cli import machine
from agentrl.cli.app import app
from agentrl.errors import SandboxError
from envs.sandbox import docker_disk
from envs.sandbox import namespaces as ns
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


@pytest.mark.skipif(not docker_disk.can_mount(), reason="mounting needs root")
def test_a_folder_with_a_mount_stays_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that lets go late: a folder removed under it would hide what is left, or fail with nothing
    told."""
    monkeypatch.setattr(machine, "LEFT_DEADLINE_S", 0.1)
    mounted: list[Path] = []
    inner = machine._left

    def left(folder: Path, before: dict[str, int]) -> dict[str, int]:
        mounted.append(folder / "disk")
        mounted[0].mkdir()
        ns.mount("tmpfs", str(mounted[0]), "tmpfs", 0, "size=1m")
        return inner(folder, before)

    monkeypatch.setattr(machine, "_left", left)
    try:
        words = ["bench", "sandboxes", "--backend", "plain", "--count", "1", "--commands", "1"]
        ended = CliRunner().invoke(app, words)
        assert mounted[0].is_dir()
    finally:
        ns.unmount(str(mounted[0]))
        shutil.rmtree(mounted[0].parent)
    assert ended.exit_code == 1
    assert "left behind: 1 mounts" in ended.output
    assert str(mounted[0].parent) in ended.output.replace("\n", "")
