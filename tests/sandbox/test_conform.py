"""The conformance suite for anybody's backend: it finds a broken promise, names it, and says what it saw."""

from __future__ import annotations

import asyncio
import json
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


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--backend", "dokcer"], "docker"),
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
