"""The conformance suite for anybody's backend: it finds a broken promise, names it, and says what it saw."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentrl.cli.app import app
from envs.sandbox.conformance import KINDS, conform
from envs.sandbox.contract import ExecRequest, ExecResult, Sandbox
from envs.sandbox.plain import PlainBackend


class Optimist:
    """A sandbox for which a command that did not exit by itself has succeeded."""

    def __init__(self, inner: Sandbox) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def exec(self, request: ExecRequest) -> ExecResult:
        result = await self._inner.exec(request)
        return replace(result, exit_code=result.exit_code or 0)


class Optimistic:
    """A backend of such sandboxes; also what `agentrl conform --backend test_conform:Optimistic` calls."""

    def __init__(self, folder: Path) -> None:
        self._inner = PlainBackend(folder)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def create(self, *args: Any, **kwargs: Any) -> Any:
        return Optimist(await self._inner.create(*args, **kwargs))


def test_a_backend_that_reads_no_exit_code_as_success_is_found_and_the_broken_promise_is_named(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        backend = Optimistic(tmp_path / "state")
        rows = await conform(backend, tmp_path, only="signal_is_told_apart")
        found = {row.name: row.outcome for row in rows}
        assert found == {"a_signal_is_told_apart_from_an_exit_code": "failed"}
        assert "ExecStatus.SIGNALED, None" in rows[0].seen
        await backend.close()

    asyncio.run(run())


def test_what_says_nothing_about_a_backend_is_said_to_say_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        backend = PlainBackend(tmp_path / "state")
        (row,) = await conform(backend, tmp_path, only="nothing_outside_can_be_reached")
        assert (row.outcome, row.seen) == ("inapplicable", "holds only under isolation")
        await backend.close()

    asyncio.run(run())


def test_the_verb_runs_a_backend_from_its_factory_and_ends_with_one_if_a_promise_is_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    words = ["conform", "--only", "signal_is_told_apart", "--json", "--backend"]
    broken = CliRunner().invoke(app, [*words, "test_conform:Optimistic"])
    told = json.loads(broken.stdout)
    assert (broken.exit_code, told["conforms"], told["failed"]) == (1, False, 1)
    kept = CliRunner().invoke(app, [*words, "plain"])
    assert (kept.exit_code, json.loads(kept.stdout)["passed"]) == (0, 1)


OWN = """
from envs.sandbox.plain import PlainBackend


def works(folder):
    return PlainBackend(folder)


def breaks(folder):
    raise ValueError("no licence")


def odd(folder):
    return object()


class Empty:
    name, isolation = "empty", "none"

    def __init__(self, folder):
        pass

    async def prepare(self, environment_dir):
        return "nothing"

    async def create(self, spec, *, image, session, mounts=(), apply=(), deadline_s=120.0):
        raise AttributeError("not yet")

    async def close(self):
        pass


class Untidy:
    def __init__(self, folder):
        self.inner = PlainBackend(folder)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    async def close(self):
        await self.inner.close()
        raise RuntimeError("still busy")
"""


def test_a_backend_of_ones_own_is_named_by_its_module_or_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_sandboxes.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [p for p in sys.path if p not in ("", str(tmp_path))])
    words = ["conform", "--only", "signal_is_told_apart", "--json", "--backend"]
    for name in ("own_sandboxes:works", "own_sandboxes.py:works", f"{tmp_path}/own_sandboxes.py:works"):
        kept = CliRunner().invoke(app, [*words, name])
        assert (kept.exit_code, json.loads(kept.stdout)["conforms"]) == (0, True), kept.stderr
    untidy = CliRunner().invoke(app, [*words, "own_sandboxes:Untidy"])
    told = json.loads(untidy.stdout)
    assert (untidy.exit_code, told["passed"], told["failed"]) == (1, 1, 1)
    assert told["rows"][-1]["seen"] == "RuntimeError: still busy"
    for name, code, said in (
        ("own_sandboxes:breaks", 2, "can not be made: ValueError: no licence"),
        ("own_sandboxes:odd", 2, "object, which is no backend"),
        ("own_sandboxes:Empty", 1, "makes no sandbox: AttributeError: not yet"),
        ("other.py:works", 2, "can not be loaded"),
    ):
        ended = CliRunner().invoke(app, [*words, name])
        assert (ended.exit_code, ended.stdout) == (code, ""), name
        assert said in " ".join(ended.stderr.split())
        assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--backend", "dokcer"], "docker"),
        (["--backend", ":make"], "There is no backend"),
        (["--backend", "json:"], "There is no backend"),
        (["--backend", "no_such_module:make"], "can not be loaded"),
        (["--backend", "json:loads_"], "can not be loaded"),
        (["--backend", "os:sep"], "can not be called"),
        (["--backend", "plain", "--only", "signol"], "No kind's name contains"),
    ],
)
def test_what_is_no_backend_is_the_users_mistake_and_says_what_to_do(given: list[str], said: str) -> None:
    ended = CliRunner().invoke(app, ["conform", *given])
    assert ended.exit_code == 2
    assert said in ended.stderr.replace("\n", " ")


def test_every_kind_has_a_name_of_its_own() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS) >= 47
