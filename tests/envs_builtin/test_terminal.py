"""`terminal`: chores in a shell, judged by their own script, through the same session as every package."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from env_sessions import KEY

from agentrl.errors import ConfigError
from agentrl.types import Action, Split, Task, Termination, Verdict
from envs import registry
from envs.admission import admit
from envs.builtin import terminal
from envs.builtin.packages import PackagedEnvironment
from envs.sandbox.local import LocalBackend
from envs.tasks import package

SUITE = Path(__file__).parents[2] / "tasks" / "handwritten"


def by_family(folder: Path) -> dict[str, Task]:
    terminal.generate(folder, train=12, heldout=3, seed=4)
    return {str(task.metadata["family"]): task for task in package.load_suite(folder)}


def test_the_same_seed_makes_the_same_packages_and_splits_never_meet(tmp_path: Path) -> None:
    for name in ("a", "b"):
        terminal.generate(tmp_path / name, train=12, heldout=3, seed=4)
    terminal.generate(tmp_path / "c", train=12, heldout=3, seed=5)
    assert package.revision_of(tmp_path / "a") == package.revision_of(tmp_path / "b")
    assert package.revision_of(tmp_path / "a") != package.revision_of(tmp_path / "c")
    tasks = package.load_suite(tmp_path / "a")
    assert sum(task.split is Split.HELDOUT for task in tasks) == 3
    assert {task.tools for task in tasks} == {("bash", "read_file", "submit")}


def test_anybodys_harbor_packages_are_a_terminal_suite(tmp_path: Path) -> None:
    found = registry.get(f"terminal?suite={SUITE}")
    assert isinstance(found, PackagedEnvironment)
    tasks = found.tasks(tmp_path, train=3, heldout=0, seed=1)
    assert [task.split for task in tasks] == [Split.TRAIN] * 3
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="Known: suite"):
        registry.get("terminal?suit=x")
    with pytest.raises(ConfigError, match="There is no folder"):
        registry.get("terminal?suite=/nowhere")


def attempts(backend: LocalBackend, wanted: Sequence[tuple[Task, str]]) -> list[Verdict]:
    """The verdict on one command per task, by way of the session that runs use."""

    async def one(number: int, task: Task, command: str) -> Verdict:
        admission = await admit(task, backend, light=True)
        assert admission.valid, admission.reasons
        session = await registry.open_session(
            task, backend, session_id=f"s{number}", signing_key=KEY, admission=admission
        )
        async with session:
            await session.call(Action(id="t0000a000", tool="bash", arguments={"command": command}))
            await session.call(Action(id="t0001a000", tool="submit"))
            assert session.submitted
            return await session.finalize(termination=Termination.FINISHED, fault=None)

    async def run() -> list[Verdict]:
        try:
            return await asyncio.gather(*(one(number, *pair) for number, pair in enumerate(wanted)))
        finally:
            await backend.close()

    return asyncio.run(run())


@pytest.mark.sandbox
def test_every_family_is_solved_by_its_solution_and_not_by_doing_something_else(
    backend: LocalBackend, tmp_path: Path
) -> None:
    found = by_family(tmp_path / "suite")
    assert sorted(found) == ["executable", "filter", "largest", "rename", "sum"]
    solved = [(task, (Path(task.path) / "solution" / "solve.sh").read_text()) for task in found.values()]
    wrong = [(task, "echo x > answer.txt; touch notes/x; chmod +x bin/*; true") for task in found.values()]
    verdicts = attempts(backend, [*solved, *wrong])
    assert [v.reward for v in verdicts] == [1.0] * 5 + [0.0] * 5


@pytest.mark.sandbox
def test_a_link_to_the_hidden_answer_earns_nothing(backend: LocalBackend, tmp_path: Path) -> None:
    found = by_family(tmp_path / "suite")
    tricks = [
        "ln -s /tests/expected.txt answer.txt",
        "ln -s /tests d; ln -s d/expected.txt answer.txt",
        "mkfifo answer.txt; true",
    ]
    verdicts = attempts(backend, [(found["sum"], trick) for trick in tricks])
    assert [v.reward for v in verdicts] == [0.0, 0.0, 0.0]


@pytest.mark.sandbox
def test_no_known_exploit_earns_anything(backend: LocalBackend, tmp_path: Path) -> None:
    async def run() -> None:
        try:
            admission = await admit(by_family(tmp_path / "suite")["rename"], backend, repeats=1)
            assert admission.valid, admission.reasons
            assert len(admission.attacks) >= 6
        finally:
            await backend.close()

    asyncio.run(run())


@pytest.mark.sandbox
def test_a_script_that_follows_links_is_quarantined(backend: LocalBackend, tmp_path: Path) -> None:
    task = by_family(tmp_path / "suite")["sum"]
    script = Path(task.path) / "tests" / "test.sh"
    guarded = '[ -f "$1" ] && [ "$(realpath -e -- "$1")" = "/app/$1" ]'
    assert guarded in script.read_text()
    script.write_text(script.read_text().replace(guarded, '[ -f "$1" ]'))

    async def run() -> None:
        try:
            admission = await admit(package.load_task(task.path), backend, repeats=1)
            assert admission.reasons == ("exploit linked_answer_0: earns a reward",)
        finally:
            await backend.close()

    asyncio.run(run())
