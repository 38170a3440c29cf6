"""Admission: tasks that cannot be graded are quarantined with a reason."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faulty_backend import HIDDEN, Faults, FaultyBackend, small_task

from agentrl.errors import SandboxLost
from agentrl.types import Task
from envs.admission import admit, attacks, needed_s
from envs.evidence import Admission
from envs.grading import Cost
from envs.tasks.package import load_task


def admitted(task: Task, *faults: Faults, repeats: int = 2, light: bool = False) -> Admission:
    async def run() -> Admission:
        backend = FaultyBackend(*faults)
        try:
            return await admit(task, backend, repeats=repeats, light=light)
        finally:
            assert not backend.inner._live, "admission closes what it opens"
            await backend.close()

    return asyncio.run(run())


def test_a_good_task_is_admitted_with_all_exploits_tried(task: Task) -> None:
    admission = admitted(task)
    assert admission.valid
    assert (admission.mode, admission.repeats) == ("full", 2)
    assert set(admission.attacks) == {a.name for a in attacks(task)}
    assert (admission.task_id, admission.revision) == (task.id, task.revision)
    assert admission.runtime_s > 0


def test_a_light_admission_says_that_it_is_light(task: Task) -> None:
    admission = admitted(task, repeats=5, light=True)
    assert admission.valid
    assert (admission.mode, admission.repeats, admission.attacks) == ("light", 1, ())


FLAKY = """\
import time
from cart import total


def test_negative():
    assert total(-2, -3) == -5
    assert time.time_ns() // 1000 % 2 == 0
"""


@pytest.mark.parametrize(
    ("package", "reason"),
    [
        ({"solution": "#!/bin/bash\ntrue\n"}, "solution: does not pass in run 1"),
        ({"solution": "#!/bin/bash\necho broken >&2; exit 4\n"}, "broken"),
        (
            {"environment": {"cart.py": "def total(a, b):\n    return a + b\n"}},
            "empty: passes in run 1",
        ),
        ({"fail_to_pass": ["test_cart.py::test_gone"]}, "test_cart.py::test_gone missing"),
        ({"tests": {"test_hidden.py": "import nothing_like_this\n" + HIDDEN}}, "No module named"),
        ({"tests": {"test_hidden.py": "def test_negative(:\n"}}, "SyntaxError"),
        (
            {"fail_to_pass": ["test_cart.py::test_zero"], "pass_to_pass": []},
            "empty: passes in run 1",
        ),
    ],
    ids=[
        "no effect",
        "solve.sh fails",
        "already solved",
        "no such test",
        "no module",
        "broken tests",
        "too easy",
    ],
)
def test_a_task_that_cannot_be_graded_is_quarantined(
    tmp_path: Path, package: dict[str, Any], reason: str
) -> None:
    admission = admitted(small_task(tmp_path / "t", **package), repeats=1)
    assert not admission.valid
    assert any(reason in text for text in admission.reasons), admission.reasons


def test_a_flaky_task_is_quarantined(tmp_path: Path) -> None:
    """A test that passes every second microsecond: 12 runs in a row have one chance in 4,096."""
    task = small_task(tmp_path / "t", tests={"test_hidden.py": FLAKY})
    admission = admitted(task, repeats=12)
    assert not admission.valid
    assert "solution: does not pass" in admission.reasons[0]


def test_a_task_that_an_exploit_solves_is_quarantined(tmp_path: Path) -> None:
    """Its test only looks at whether something is there."""
    weak = "import cart\n\n\ndef test_negative():\n    assert cart.total(-2, -3) < 0 or cart.done\n"
    task = small_task(
        tmp_path / "t",
        tests={"test_hidden.py": weak},
        fail_to_pass=["test_hidden.py::test_negative"],
        pass_to_pass=[],
    )
    admission = admitted(task, repeats=1)
    assert not admission.valid
    assert "exploit always_equal: earns a reward" in admission.reasons


def test_a_history_that_holds_the_solution_is_a_leak(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    small_task(folder)
    git = (
        "cd $1/environment && git init -q . && git config user.email a@b && git config user.name a"
        " && git add -A && git commit -qm broken && git checkout -qb fix && sed -i 's/a - b/a + b/' cart.py"
        " && git commit -qam fix && git checkout -q -"
    )

    async def make() -> None:
        process = await asyncio.create_subprocess_exec("bash", "-ec", git, "_", str(folder))
        assert await process.wait() == 0

    asyncio.run(make())
    admission = admitted(load_task(folder), repeats=1)
    assert admission.reasons == ("exploit git_log: the history holds commits that are not checked out",)


def test_a_failing_backend_is_not_the_tasks_fault(task: Task) -> None:
    async def lose(name: str) -> None:
        raise SandboxLost("gone")

    with pytest.raises(SandboxLost):
        admitted(task, Faults(before=lose))


@pytest.mark.parametrize(
    ("costs", "needed"),
    [
        ([(50.0, 1.0, 49.0), (45.0, 2.0, 41.0)], 2.0),  # busy: nearly all of it was waiting for a CPU
        ([(50.0, 1.0, 0.0), (3.0, 2.0, 0.5)], 2.5),  # one run was held up by something that is not known
        ([(31.0, 0.5, 1.0), (40.0, 0.6, 10.0)], 30.0),  # it sleeps for half a minute every time
        ([], 0.0),
    ],
)
def test_what_a_verification_needs_does_not_depend_on_how_busy_the_machine_is(
    costs: list[tuple[float, float, float]], needed: float
) -> None:
    seen = [Cost(clock_s=clock, cpu_s=cpu, queued_s=queued) for clock, cpu, queued in costs]
    assert needed_s(seen) == needed


@pytest.mark.parametrize(("cpu_ms", "reasons"), [(7900.0, 0), (8100.0, 1)])
def test_a_deadline_must_leave_something_to_spare_of_the_time_that_is_needed(
    task: Task, cpu_ms: float, reasons: int
) -> None:
    assert task.grader.timeout_s == 10
    costly = Faults(where="admit", result=lambda result: replace(result, cpu_ms=cpu_ms))
    admission = admitted(task, costly, light=True)
    assert admission.needed_s == cpu_ms / 1000
    assert len(admission.reasons) == reasons
    assert all("set verifier.timeout_sec to 11 or more" in reason for reason in admission.reasons)


def test_the_time_in_which_a_sandbox_is_made_is_no_time_of_the_verifiers(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, making_s = FaultyBackend.create, 1.0

    async def slow(self: FaultyBackend, *given: Any, **named: Any) -> Any:
        await asyncio.sleep(making_s)
        return await prompt(self, *given, **named)

    monkeypatch.setattr(FaultyBackend, "create", slow)
    begun = time.monotonic()
    admission = admitted(task, light=True)
    assert admission.valid
    assert sum(admission.runtimes_s) <= time.monotonic() - begun - 2 * making_s
