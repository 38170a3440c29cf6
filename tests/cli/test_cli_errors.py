"""A wrong key, value or path: one sentence on stderr, exit code 2, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from agentrl.cli.boundary import guarded
from agentrl.errors import ConfigError, SandboxError

WRONG = [
    (("train", "nowhere.toml"), "There is no run file nowhere.toml"),
    (("train", "run.toml", "--set", "train.updats=3"), "unknown key 'train.updats'. Did you mean 'updates'?"),
    (("train", "run.toml", "--set", "train.updates=-3"), "train.updates = -3"),
    (("train", "run.toml", "--set", "updates"), "is not of the form section.key=value"),
    (("quickstart", "--set", "run.sed=3"), "Did you mean 'seed'?"),
    (("config", "run.toml", "--set", "sandbox.backend=dokcer"), "sandbox.backend"),
    (("eval", "nowhere.toml"), "There is no run file"),
    (("recipes", "grop"), "Did you mean 'grpo'?"),
    (("runs", "show", "zzz"), "There is no run 'zzz'"),
    (("verify", "zzz"), "There is no run 'zzz'"),
    (("report", "maed"), "Did you mean 'made'?"),
    (("trajectories", "show", "zzz"), "no trajectory begins with 'zzz'"),
    (("trajectories", "list", "--termination", "max_turn"), "'max_turns'"),
    (("trajectories", "list", "--store", "nowhere.db"), "There is no store at nowhere.db"),
    (("tasks", "list", "nowhere"), "There is no folder nowhere"),
    (("tasks", "show", "runs"), "is not a task package"),
    (("tasks", "validate", "runs"), "holds no task package"),
    (("tasks", "synth", "repo", "x==1", "y/x==1", "--out", "x"), "x==1 is named twice"),
    (("tasks", "synth", "repo", "x==1", "--out", "x", "--work", "x/work"), "lies in x"),
    (("tasks", "synth", "swe-mini", "--out", "x", "--train", "0", "--heldout", "0"), "are both 0"),
    (("quickstart", "--resume", "--seed", "77"), "to resume"),
]


@pytest.mark.parametrize(("words", "sentence"), WRONG, ids=[" ".join(w) for w, _ in WRONG])
def test_what_a_person_gets_wrong_is_one_sentence_and_exit_code_2(
    words: tuple[str, ...], sentence: str, here, typed
) -> None:
    Path("run.toml").write_text('[run]\nname = "x"\n')
    result = typed(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("agentrl: ")
    assert result.stderr.count("\n") == 1
    assert sentence in result.stderr


@pytest.mark.parametrize(
    "words", [("nonsense",), ("quickstart", "--seeed", "1"), ("quickstart", "--algo", "gpro"), ("train",)]
)
def test_usage_errors_end_with_2(words: tuple[str, ...], typed) -> None:
    result = typed(*words)
    assert result.exit_code == 2
    assert "Usage:" in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ConfigError("The value is wrong.", fix="Use 3."), 2, "The value is wrong. Use 3."),
        (SandboxError("The kernel refuses."), 1, "The kernel refuses."),
        (PermissionError(13, "Permission denied", "/there"), 2, "/there: Permission denied."),
        (OSError(28, "No space left on device"), 1, "No space left on device."),
        (BrokenPipeError(32, "Broken pipe"), 1, "The system refused: Broken pipe."),
        (KeyError("x"), 1, "Internal error, KeyError: 'x'."),
        (KeyboardInterrupt(), 130, "Stopped."),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_each_error_has_its_exit_code(error: BaseException, code: int, says: str, capsys) -> None:
    @guarded
    def command() -> None:
        raise error

    with pytest.raises(typer.Exit) as stopped:
        command()
    assert stopped.value.exit_code == code
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1


def test_debugging_shows_the_traceback_too(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("AGENTRL_DEBUG", "1")

    @guarded
    def command() -> None:
        raise ConfigError("This is wrong.")

    with pytest.raises(typer.Exit) as stopped:
        command()
    assert stopped.value.exit_code == 2
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert told.endswith("agentrl: This is wrong.\n")


def test_a_reader_that_goes_away_is_no_error(here) -> None:
    """`agentrl … | head -1`: no message, whatever is left to write."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    words = [sys.executable, "-m", "agentrl.cli.main", "trajectories", "list", "--limit", "100"]
    command = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert command.stdout is not None
    assert command.stderr is not None
    command.stdout.close()
    with command.stderr as stream:
        told = stream.read()
    assert command.wait(timeout=60) == 0
    assert told == b""
