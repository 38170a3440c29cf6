"""A small project becomes tasks: measured, broken, written, admitted; and again without doing anything
twice."""

from __future__ import annotations

import asyncio
import difflib
import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_project import CORE, MONEY, lay_checkout, lay_runner

from agentrl.errors import SandboxLost
from agentrl.training.events import Silent
from agentrl.types import SandboxSpec, Split, Task
from envs.admission import admit, attacks
from envs.evidence import Admission
from envs.sandbox.contract import Isolation, Sandbox
from envs.sandbox.local import LocalBackend
from envs.tasks.package import load_suite
from envs.tasks.synth import factory, packages, project
from envs.tasks.synth.factory import Outcome, Plan

pytestmark = pytest.mark.sandbox
HOOKS = {"pytest_shadow", "pytest_plugin", "pth", "patched_framework", "always_equal"}
SLOW_S = 3600.0
"""A budget that no machine is too busy for."""
ORIGINAL = {"shop/core.py": CORE, "shop/money.py": MONEY}


class Faulty:
    """A local backend that loses sandboxes where a test says so."""

    def __init__(self, inner: LocalBackend, lost: Callable[[str], bool]) -> None:
        self._inner = inner
        self._lost = lost
        self.lost: list[str] = []

    name = "local"
    isolation: Isolation = "namespaces"

    async def prepare(self, environment_dir: str) -> str:
        return await self._inner.prepare(environment_dir)

    async def create(self, spec: SandboxSpec, *, session: str, **rest: Any) -> Sandbox:
        if self._lost(session):
            self.lost.append(session)
            raise SandboxLost(f"{session} is gone.")
        return await self._inner.create(spec, session=session, **rest)

    async def close(self) -> None:
        await self._inner.close()


def made(
    specs: Sequence[str], plan: Plan, lost: Callable[[str], bool] = lambda session: False
) -> tuple[tuple[Outcome, ...], list[tuple[Task, Admission]], Silent]:
    listener, told = Silent(), []

    async def run() -> tuple[Outcome, ...]:
        backend = Faulty(LocalBackend(plan.work / "state"), lost)
        try:
            return await factory.make(
                specs, plan, backend, listener=listener, kept=lambda task, how: told.append((task, how))
            )
        finally:
            await backend.close()

    return asyncio.run(run()), told, listener


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return lay_checkout(tmp_path / "checkout")


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The factory's work on the small project, once."""
    folder = tmp_path_factory.mktemp("synth")
    checkout = lay_checkout(folder / "shop-checkout")
    lay_runner(folder / "work" / "runner")
    plan = Plan(
        out=folder / "out",
        work=folder / "work",
        per_project=3,
        seed=3,
        repeats=2,
        light=True,
        budget_s=SLOW_S,
    )
    outcomes, told, listener = made([str(checkout)], plan)
    return {"plan": plan, "outcome": outcomes[0], "told": told, "listener": listener, "spec": str(checkout)}


def test_the_tests_that_pass_every_time_are_found(suite: dict[str, Any]) -> None:
    outcome = suite["outcome"]
    assert (outcome.name, outcome.licence, outcome.rejected) == ("Shop.Demo", "MIT", "")
    assert (outcome.tests, outcome.flaky) == (6, 0)


def test_every_task_is_a_package_that_was_admitted_on_the_backend(suite: dict[str, Any]) -> None:
    tasks = {task.id: task for task in load_suite(suite["plan"].out)}
    assert len(tasks) == 3
    assert {task.id: task.revision for task, _ in suite["told"]} == {t.id: t.revision for t in tasks.values()}
    assert all(how.valid and how.revision == task.revision for task, how in suite["told"])
    assert len({task.split for task in tasks.values()}) == 1


def test_a_task_holds_exactly_its_bugs_and_no_history(suite: dict[str, Any]) -> None:
    for task, _ in suite["told"]:
        files = Path(task.path) / "environment" / "files"
        bugs = task.metadata["bugs"]
        changed = {n for n, text in ORIGINAL.items() if (files / n).read_text() != text}
        assert changed == {bug["path"] for bug in bugs}
        assert not [p for p in files.rglob("*") if p.name == ".git" or p.suffix == ".orig"]
        assert not list((files / "shop").rglob("*.pyc"))
        for name in changed:
            before, after = ORIGINAL[name].splitlines(), (files / name).read_text().splitlines()
            hunks = [t for t in difflib.SequenceMatcher(a=before, b=after).get_opcodes() if t[0] != "equal"]
            assert 1 <= len(hunks) <= sum(bug["path"] == name for bug in bugs)


def test_the_solution_puts_every_byte_back(suite: dict[str, Any], tmp_path: Path) -> None:
    for task, _ in suite["told"]:
        files = Path(task.path) / "environment" / "files"
        for name in ORIGINAL:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes((files / name).read_bytes())
        script = Path(task.path) / "solution" / "solve.sh"
        subprocess.run(["bash", script], cwd=tmp_path, check=True, timeout=30)
        assert {name: (tmp_path / name).read_text() for name in ORIGINAL} == ORIGINAL


def test_the_instruction_names_failing_tests_and_not_the_fix(suite: dict[str, Any]) -> None:
    for task, _ in suite["told"]:
        assert "test_shop.py::" in task.instruction
        for bug in task.metadata["bugs"]:
            line = ORIGINAL[bug["path"]].splitlines()[bug["line"] - 1].strip()
            assert line not in task.instruction
            assert bug["path"] not in task.instruction


def test_what_matters_later_is_written_down(suite: dict[str, Any]) -> None:
    for task, _ in suite["told"]:
        source = task.metadata["provenance"]
        assert (source["project"], source["version"], source["licence"]) == ("Shop.Demo", "1.5", "MIT")
        assert source["origin"] == "checkout:shop-checkout"
        assert len(source["sha256"]) == 64
        assert 0 <= task.difficulty <= 1
        assert set(task.grader.fail_to_pass).isdisjoint(task.grader.pass_to_pass)
        assert {"tests", ".site", "conftest.py"} <= set(task.grader.protected_paths)


def test_the_same_call_again_measures_and_admits_nothing_twice(suite: dict[str, Any]) -> None:
    plan = suite["plan"]
    notes = next(plan.work.rglob("mutants-*.jsonl"))
    before = notes.read_text()
    with notes.open("a") as file:
        file.write('{"key": "half a li')  # as a crash leaves it
    outcomes, told, listener = made([suite["spec"]], plan)
    assert notes.read_text().startswith(before)
    assert [line for line in notes.read_text()[len(before) :].splitlines() if "half" not in line] == []
    earlier, later = (
        {t.id: (t.revision, a.admitted_at) for t, a in pairs} for pairs in (suite["told"], told)
    )
    assert later == earlier
    assert not any("run tests" in phase for phase in listener.phases)
    assert sorted(outcomes[0].tried) == sorted(suite["outcome"].tried)


def test_a_fault_of_the_backend_sets_one_candidate_aside_and_the_next_call_tries_it_again(
    suite: dict[str, Any], tmp_path: Path
) -> None:
    work = tmp_path / "work"
    shutil.copytree(suite["plan"].work, work, ignore=shutil.ignore_patterns("admissions-*", "state"))
    plan = replace(suite["plan"], out=tmp_path / "out", work=work, at_once=1)
    seen: list[str] = []

    def first_two_of_admission(session: str) -> bool:
        seen.append(session)
        return session == "admit-solution" and seen.count("admit-solution") <= 2

    outcomes, told, listener = made([suite["spec"]], plan, first_two_of_admission)
    causes = [cause for _, cause in outcomes[0].tried]
    assert (causes.count("faulted"), causes.count("admitted"), len(told)) == (1, 2, 2)
    assert any("is faulted: environment/sandbox_lost: admit-solution is gone" in n for n in listener.notes)
    reasons = [path.read_text() for path in work.rglob("*.reason.txt")]
    assert [reason for reason in reasons if "sandbox_lost" in reason] != []

    outcomes, told, _ = made([suite["spec"]], plan)
    assert [cause for _, cause in outcomes[0].tried].count("admitted") == len(told) == 3


def test_a_mutant_that_ends_its_sandbox_does_not_take_its_neighbours_along(
    suite: dict[str, Any], tmp_path: Path
) -> None:
    work = tmp_path / "work"
    dropped = shutil.ignore_patterns("mutants-*", "admissions-*", "state")
    shutil.copytree(suite["plan"].work, work, ignore=dropped)
    plan = replace(suite["plan"], out=tmp_path / "out", work=work, at_once=1, per_project=2)
    orders: list[str] = []

    def the_first_order_and_its_first_mutant(session: str) -> bool:
        orders.append(session)
        return session.startswith("synth-") and len(orders) <= 2

    outcomes, told, _ = made([suite["spec"]], plan, the_first_order_and_its_first_mutant)
    causes = [cause for _, cause in outcomes[0].tried]
    assert causes.count("faulted") == 1
    assert causes.count("admitted") == len(told) == 2
    written = "".join(path.read_text() for path in work.rglob("mutants-*.jsonl"))
    assert '"cause": "faulted"' not in written, "it is measured again by the next call"


def test_a_backend_that_fails_altogether_ends_no_call(
    suite: dict[str, Any], checkout: Path, tmp_path: Path
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "runner").symlink_to(suite["plan"].work / "runner")
    plan = Plan(out=tmp_path / "out", work=tmp_path / "work", repeats=1, budget_s=SLOW_S)
    outcomes, told, listener = made([str(checkout), "./nowhere"], plan, lambda session: True)
    assert [outcome.rejected for outcome in outcomes] == ["fault_sandbox_lost", "not_found"]
    assert told == []
    assert "is gone" in listener.notes[0]


def test_a_project_whose_time_is_over_goes_on_in_the_next_call(suite: dict[str, Any], tmp_path: Path) -> None:
    work = tmp_path / "work"
    dropped = shutil.ignore_patterns("admissions-*", "state")
    shutil.copytree(suite["plan"].work, work, ignore=dropped)
    plan = replace(suite["plan"], out=tmp_path / "out", work=work)
    outcomes, told, _ = made([suite["spec"]], replace(plan, budget_s=0.0))
    causes = [cause for _, cause in outcomes[0].tried]
    assert (causes.count("not_reached"), told) == (3, [])
    outcomes, told, _ = made([suite["spec"]], plan)
    assert len(told) == outcomes[0].admitted == 3
    outcomes, told, _ = made([suite["spec"]], replace(plan, budget_s=0.0))
    assert len(told) == outcomes[0].admitted == 3, "what was admitted stays a task, whatever the time"


def test_the_table_accounts_for_every_mutant_that_was_tried(suite: dict[str, Any]) -> None:
    found = factory.summary([suite["outcome"]])
    counts = found["kinds"].values()
    assert sum(c.get("tried", 0) for c in counts) == len(suite["outcome"].tried)
    assert sum(c.get("admitted", 0) for c in counts) == found["admitted"] == 3
    for count in counts:
        causes = {k: n for k, n in count.items() if k in factory.CAUSES}
        assert sum(causes.values()) == count.get("tried", 0)
    json.dumps(found)


def test_a_task_withstands_the_whole_battery(suite: dict[str, Any]) -> None:
    async def run() -> Admission:
        backend = LocalBackend(suite["plan"].work / "state")
        try:
            return await admit(suite["told"][0][0], backend, repeats=1)
        finally:
            await backend.close()

    task = suite["told"][0][0]
    admission = asyncio.run(run())
    assert admission.valid, admission.reasons
    assert set(admission.attacks) == {a.name for a in attacks(task)} >= HOOKS
    laid = {change.path for attack in attacks(task) for change in attack.changes}
    assert {"pytest.py", "shop/__init__.py", "shop/core.py", "evil_plugin.py"} <= laid
    assert len(admission.runtimes_s) == 2
    assert admission.runtime_s == max(admission.runtimes_s)


def test_only_what_is_installed_and_not_the_projects_own_is_pinned(
    suite: dict[str, Any], tmp_path: Path
) -> None:
    found = project.Project(
        name="x", version="1", origin="o", digest="d", licence="MIT", summary="", homepage="",
        tree=str(tmp_path), sources=("src", ""), tests=(), suite=(), requirements=(),
    )  # fmt: skip
    for name in ("src/mine/__init__.py", "alone.py", ".site/mine/__init__.py", ".site/alone.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in ("pytest/__init__.py", "six.py", "six-1.dist-info/METADATA"):
        (tmp_path / ".site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / ".site" / name).touch()
    assert project.pinned(found) == ("pytest", "six")
    driver = (Path(suite["told"][0][0].path) / "tests" / packages.DRIVER).read_text()
    assert "'_pytest'" in driver
    assert "'pytest'" in driver


REJECTED = [
    ({"tests/test_shop.py": None, "tests/test_extra.py": None}, "no_tests"),
    ({"tests/test_shop.py": "def test_it():\n    assert False\n"}, "no_passing_tests"),
    ({"pyproject.toml": '[project]\nname = "pluggy"\n'}, "part_of_pytest"),
]


@pytest.mark.parametrize(("change", "cause"), REJECTED, ids=[cause for _, cause in REJECTED])
def test_a_project_that_gives_no_tasks_is_rejected_by_name(
    change: dict[str, str | None], cause: str, suite: dict[str, Any], checkout: Path, tmp_path: Path
) -> None:
    for name, text in change.items():
        if text is None:
            (checkout / name).unlink()
        else:
            (checkout / name).write_text(text)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "runner").symlink_to(suite["plan"].work / "runner")
    plan = Plan(out=tmp_path / "out", work=tmp_path / "work", repeats=1, budget_s=SLOW_S)
    outcomes, told, listener = made([str(checkout)], plan)
    assert (outcomes[0].rejected, told) == (cause, [])
    assert cause in listener.notes[0]


@pytest.mark.parametrize(
    ("spec", "cause"), [("./nowhere", "not_found"), ("shop", "bad_name"), ("shop>=2", "bad_name")]
)
def test_a_source_that_is_neither_a_folder_nor_a_version_is_rejected(
    spec: str, cause: str, tmp_path: Path
) -> None:
    with pytest.raises(project.Rejected) as caught:
        project.fetch(spec, tmp_path / "work", runner=tmp_path)
    assert caught.value.cause == cause


def test_the_split_depends_on_the_name_of_the_project_alone() -> None:
    shop = project.Project(
        name="Shop.Demo", version="1", origin="o", digest="d", licence="MIT", summary="", homepage="",
        tree="t", sources=("",), tests=(), suite=(), requirements=(),
    )  # fmt: skip
    other = replace(shop, name="shop-demo", version="2", digest="e")
    assert packages.split_of(shop) == packages.split_of(other)
    splits = [packages.split_of(replace(shop, name=f"project{n}")) for n in range(200)]
    assert 20 < splits.count(Split.HELDOUT) < 60
