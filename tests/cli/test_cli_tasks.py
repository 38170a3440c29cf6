"""Tasks from the command line: read, generated, proved gradable."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentrl.cli import tasks
from agentrl.cli.app import app
from agentrl.errors import SandboxLost
from agentrl.store import Store
from agentrl.types import Task
from envs.admission import admit
from envs.evidence import Admission
from envs.tasks.package import load_task


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suite")
    words = [
        "tasks",
        "synth",
        "swe-mini",
        "--out",
        str(folder),
        "--train",
        "2",
        "--heldout",
        "1",
        "--seed",
        "3",
        "--json",
    ]
    shown = CliRunner().invoke(app, words)
    assert json.loads(shown.stdout)["train"] == 2
    return folder


def test_a_generated_suite_is_listed(suite: Path, typed) -> None:
    shown = json.loads(typed("tasks", "list", suite, "--json").stdout)["tasks"]
    assert [task["split"] for task in shown] == ["heldout", "train", "train"]


def test_a_task_is_shown_with_everything_that_decides_its_reward(suite: Path, typed) -> None:
    package = sorted(suite.iterdir())[0]
    text = typed("tasks", "show", package).stdout
    task = load_task(package)
    for piece in (
        task.id,
        *task.grader.fail_to_pass,
        *task.tools,
        "task.toml",
        f"{task.limits.max_turns} turns",
    ):
        assert piece in text


def test_validation_admits_good_tasks_and_keeps_the_outcome(suite: Path, tmp_path: Path, typed) -> None:
    store = tmp_path / "store.db"
    result = typed("tasks", "validate", suite, "--light", "--backend", "plain", "--store", store, "--json")
    assert result.exit_code == 0
    shown = json.loads(result.stdout)
    assert (shown["valid"], shown["quarantined"]) == (3, 0)
    task = load_task(sorted(suite.iterdir())[0])
    with Store.open(store) as kept:
        admission = kept.admission(task.id, task.revision)
    assert admission is not None
    assert admission.valid


def test_validation_quarantines_a_task_whose_solution_does_nothing(
    suite: Path, tmp_path: Path, typed
) -> None:
    broken = tmp_path / "suite" / "broken"
    shutil.copytree(sorted(suite.iterdir())[0], broken)
    (broken / "solution" / "solve.sh").write_text("#!/bin/bash\ntrue\n")
    unreadable = tmp_path / "suite" / "unreadable"
    shutil.copytree(broken, unreadable)
    (unreadable / "task.toml").write_text("not toml")
    result = typed("tasks", "validate", tmp_path / "suite", "--light", "--backend", "plain", "--json")
    assert result.exit_code == 1
    first, second = json.loads(result.stdout)["tasks"]
    assert "solution: does not pass" in first["reasons"][0]
    assert "syntax" in second["reasons"][0]
    assert json.loads(result.stderr.partition("\n")[0])["event"] == "begin"


def test_validation_goes_on_when_the_backend_fails_one_task(
    suite: Path, typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = load_task(sorted(suite.iterdir())[1]).id

    async def lost(task: Task, backend: Any, **how: Any) -> Admission:
        if task.id == failing:
            raise SandboxLost("its machine went away.")
        return await admit(task, backend, **how)

    monkeypatch.setattr(tasks, "admit", lost)
    result = typed("tasks", "validate", suite, "--light", "--backend", "plain", "--json")
    assert result.exit_code == 1
    shown = json.loads(result.stdout)
    assert (shown["valid"], shown["quarantined"]) == (2, 1)
    assert shown["tasks"][1]["reasons"] == ["environment/sandbox_lost: its machine went away."]


def test_preparing_tells_each_image_and_ends_with_one_if_any_can_not_be_had(
    suite: Path, tmp_path: Path, typed
) -> None:
    state = tmp_path / "state"
    words = ("tasks", "prepare", suite, "--backend", "plain", "--state-dir", state)
    result = typed(*words, "--json")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert (shown["ready"], shown["failed"], len(shown["images"])) == (3, 0, 3)
    assert {image["state"] for image in shown["images"]} == {"ready"}
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    assert (lines[0]["event"], lines[0]["phase"], lines[0]["total"]) == ("begin", "images", 3)
    broken = tmp_path / "suite" / "broken"
    shutil.copytree(sorted(suite.iterdir())[0], broken)
    toml = (broken / "task.toml").read_text()
    (broken / "task.toml").write_text(toml.replace("[environment]", '[environment]\ndocker_image = "x:1"', 1))
    shutil.copytree(sorted(suite.iterdir())[1], tmp_path / "suite" / "good")
    result = typed("tasks", "prepare", tmp_path / "suite", "--backend", "plain", "--state-dir", state)
    assert result.exit_code == 1
    assert "failed: image_unsupported" in result.stdout
    assert "nothing here asks a registry" in result.stdout
    assert "docker-archive:PATH" in result.stdout
    assert "1 ready, 1 failed, on plain" in result.stdout
