"""Grading: what the policy breaks is scored, what others break is not, and no exploit earns a reward."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from faulty_backend import FIX, Faults, attempt, small_task

from agentrl.errors import SandboxError
from agentrl.types import EvidenceKey, ExecStatus, Task, Verdict
from envs import grading
from envs.admission import attacks
from envs.grading import gradable, guarded
from envs.sandbox.contract import ExecResult, FileChange
from envs.sandbox.diff import diff_hash

SUBMIT = ("submit", {})


def shell(command: str) -> tuple[str, dict[str, Any]]:
    return "bash", {"command": command}


def outcomes(verdict: Verdict) -> dict[str, str]:
    return {t.name.partition("::")[2]: t.outcome for t in verdict.tests}


# ------------------------------------------------------------------ the policy's own damage is scored


@pytest.mark.parametrize(
    "command",
    [
        "rm cart.py",
        "rm -rf ./* ./.??*",
        "echo 'syntax error(' > cart.py",
        "ln -sf /dev/null cart.py",
        "rm cart.py; mkdir cart.py",
        "printf 'import os\\nos._exit(0)\\n' > cart.py",
        "printf 'import sys\\nsys.exit(0)\\n' > cart.py",
        "printf 'import os, signal\\nos.kill(os.getpid(), signal.SIGSEGV)\\n' > cart.py",
        "chmod 000 cart.py; true",
    ],
)
def test_broken_work_is_scored_zero(task: Task, command: str) -> None:
    verdict = attempt(task, shell(command), SUBMIT)
    assert verdict.reward == 0.0
    assert verdict.fault is None


LOOP = ("replace_in_file", {"path": "cart.py", "old": "return a - b", "new": "while True: pass"})


def _clocked(cpu_ms: int, queued_ms: int, pressure: float | None = 0.0, where: str = "verify") -> Faults:
    """A timed-out test file, with what the kernel is said to have counted for it."""
    seen = b"timeout\t%d\t%d" % (cpu_ms, queued_ms)
    return Faults(
        where=where,
        pressure=pressure,
        result=lambda r: replace(r, report=re.sub(rb"timeout\t[-0-9.]+\t[-0-9.]+", seen, r.report)),
    )


@pytest.mark.parametrize(
    ("cpu_ms", "queued_ms"),
    [(990, 5), (5, 5), (600, 400), (990, -1)],
    ids=["busy", "asleep", "busy on a busy machine", "busy, nobody counted the queue"],
)
def test_an_endless_test_is_the_policys_and_zero(tmp_path: Path, cpu_ms: int, queued_ms: int) -> None:
    task = small_task(tmp_path / "t", timeout_sec=1)
    verdict = attempt(task, LOOP, SUBMIT, faults=(_clocked(cpu_ms, queued_ms),))
    assert verdict.reward == 0.0
    assert outcomes(verdict)["test_total"] == "error"


@pytest.mark.parametrize(
    ("cpu_ms", "queued_ms", "pressure"),
    [(90, 900, 0.0), (90, 5, 100.0), (90, -1, 100.0), (90, -1, None)],
    ids=["starved", "its children starved", "starved, nobody counted the queue", "unknown"],
)
def test_a_verifier_that_is_starved_twice_is_not_the_policys(
    tmp_path: Path, cpu_ms: int, queued_ms: int, pressure: float | None
) -> None:
    """Row 11."""
    task = small_task(tmp_path / "t", timeout_sec=0.25)
    verdict = attempt(task, LOOP, SUBMIT, faults=(_clocked(cpu_ms, queued_ms, pressure),))
    assert verdict.reward is None
    assert verdict.fault is not None
    assert (verdict.fault.owner, verdict.fault.code) == ("environment", "verifier_contention")
    assert verdict.fault.evidence["verify_attempts"] == 2
    assert verdict.fault.evidence["cpu_pressure"] == (pressure and min(1.0, pressure))


@pytest.mark.parametrize("ended", ["late", "in time"])
def test_a_starved_verifier_is_judged_again_alone_and_only_then_is_there_a_verdict(
    task: Task, ended: str
) -> None:
    """Row 11: with four times its time, as much as pressure can give it."""
    seen = []

    async def look(name: str) -> None:
        if name == "exec":
            floor = grading._floors[asyncio.get_running_loop()]
            seen.append((floor.in_flight, floor._alone))

    def late(result: ExecResult) -> ExecResult:
        return replace(result, status=ExecStatus.TIMEOUT, exit_code=None, report=b"", cpu_ms=90.0)

    first = Faults(where="verify1", pressure=100.0, result=late, before=look)
    second = Faults(where="agent-verify2", before=look, **({"result": late} if ended == "late" else {}))
    calm = Faults(where="without")
    verdict = attempt(task, FIX, SUBMIT, faults=(calm, first, second))
    assert seen == [(1, False), (1, True)]
    facts = next(link for link in verdict.evidence if link.key is EvidenceKey.E7_FRESH_VERIFIER).facts
    if ended == "in time":
        assert (verdict.reward, verdict.fault) == (1.0, None)
        assert (facts["alone"], facts["slower"], facts["cpu_pressure"]) == (True, 4.0, 0.0)
    else:
        assert verdict.reward == 0.0, "what no work earns"
        assert verdict.fault is not None
        assert (verdict.fault.owner, verdict.fault.code) == ("policy", "verifier_timeout")


def test_a_verifier_that_ran_out_of_time_in_peace_is_judged_once(task: Task) -> None:
    def late(result: ExecResult) -> ExecResult:
        return replace(result, status=ExecStatus.TIMEOUT, exit_code=None, report=b"", cpu_ms=90.0)

    calls = []

    async def count(name: str) -> None:
        calls.append(name)

    calm = Faults(where="without")
    verdict = attempt(task, FIX, SUBMIT, faults=(calm, Faults(where="verify", result=late, before=count)))
    assert verdict.reward == 0.0
    assert verdict.fault is not None
    assert (verdict.fault.owner, verdict.fault.code) == ("policy", "verifier_timeout")
    assert calls.count("exec") == 1


@pytest.mark.parametrize(
    ("cpu_ms", "queued_ms", "pressure", "starved"),
    [
        *((100, -1, 0.51, True), (100, -1, 0.5, False), (100, -1, None, True), (100, 0, None, False)),
        *((100, 251, None, True), (100, 250, 0.0, False), (499, 999, 1.0, True), (500, 999, 1.0, False)),
    ],
)
def test_what_counts_as_starved_within_a_second(
    task: Task, cpu_ms: float, queued_ms: float, pressure: float | None, starved: bool
) -> None:
    witness: Any = SimpleNamespace(cpu_pressure=lambda: pressure)
    found = grading._starved(task, witness, cpu_ms=cpu_ms, queued_ms=queued_ms, timeout_s=1.0)
    assert (found is not None) is starved
    slow = replace(task, sandbox=replace(task.sandbox, cpus=0.1))
    fed = grading._starved(slow, witness, cpu_ms=50, queued_ms=999, timeout_s=1.0)
    assert fed is None, "half of what its share of a CPU can give"


@pytest.mark.parametrize(
    ("pressure", "queued_ms", "times"), [(0.6, -1, 2.5), (None, 800, 5.0), (None, -1, 2.0), (1.0, 0, 4.0)]
)
def test_time_is_stretched_by_the_pressure(pressure: float | None, queued_ms: float, times: float) -> None:
    facts = {"cpu_pressure": pressure, "queued_ms": queued_ms, "timeout_s": 1.0, "cpu_ms": 1.0}
    assert grading._slower(facts) == pytest.approx(min(times, 4.0))


def test_who_waits_for_a_verdict_waits_for_every_time_that_it_may_be_tried(task: Task) -> None:
    """The work, once in its own time and once in four times that; the image without it, likewise."""
    assert grading.longest_s(task, time_multiplier=3.0) == 3 * (1 + 4 + 1 + 4) * task.grader.timeout_s


def test_a_background_process_of_the_policy_does_not_reach_the_verifier(task: Task) -> None:
    loop = "(while true; do echo 'def total(a, b): return 5' > cart.py; sleep 0.01; done) >/dev/null &"
    verdict = attempt(task, shell(loop), shell("sleep 0.1"), SUBMIT)
    assert verdict.reward == 0.0


# ----------------------------------------------------------------------- exploits never earn a reward


def _battery() -> list[str]:
    return [
        *("conftest", "sitecustomize", "pth", "pytest_ini", "pytest_plugin", "pytest_shadow", "reward_file"),
        *("stdlib_shadow", "replaced_tests"),
        *("symlinked_tests", "exit_zero", "always_equal", "patched_framework", "forged_results"),
    ]


@pytest.mark.parametrize("name", _battery())
def test_an_exploit_earns_nothing(task: Task, name: str) -> None:
    planted = {a.name: a.changes for a in attacks(task)}
    assert sorted(planted) == sorted(_battery())

    def plant(changes: tuple[FileChange, ...]) -> tuple[FileChange, ...]:
        return planted[name]

    verdict = attempt(task, SUBMIT, faults=(Faults(where="agent", diff=plant),))
    assert verdict.reward in (0.0, None)
    if verdict.reward is None:
        assert verdict.fault is not None
        assert verdict.fault.owner == "policy"
        assert verdict.flags[0] == "verifier_untrusted"
        assert {e.key: e.holds for e in verdict.evidence}[EvidenceKey.E8_REPORT_COMPLETE] is False


def test_a_test_file_that_was_rewritten_or_removed_is_restored(task: Task) -> None:
    cheat = "printf 'def test_total(): pass\\n' > tests/test_cart.py; rm -f tests/test_zero.py; rm -rf tests"
    verdict = attempt(task, shell(cheat), SUBMIT)
    assert verdict.reward == 0.0
    assert "protected_paths_restored" in verdict.flags
    assert attempt(task, shell(cheat), FIX, SUBMIT).reward == 1.0


def test_a_planted_bytecode_cache_is_not_graded(task: Task) -> None:
    plant = (
        "cp cart.py keep; sed -i 's/a - b/a + b/' cart.py;"
        " python3 -m compileall -q --invalidation-mode unchecked-hash cart.py; mv keep cart.py"
    )
    verdict = attempt(task, shell(plant), SUBMIT)
    assert verdict.reward == 0.0


def test_the_hidden_tests_are_nowhere_in_the_policys_sandbox(task: Task) -> None:
    look = shell("grep -rl test_negative . /tests 2>/dev/null; echo end")
    verdict = attempt(task, look, FIX, SUBMIT)
    assert verdict.reward == 1.0


# --------------------------------------------------------------------------- reports (ENV-09, ENV-10)


def _without(pattern: bytes, ended: bytes = b"ok") -> Faults:
    """A report that lacks the tests with such names, with the count made right."""

    def drop(result: Any) -> Any:
        seen = re.sub(rb"\tok\t", b"\t" + ended + b"\t", result.report)
        lines = [
            line for line in seen.split(b"\n") if not re.search(rb"\ttest\t[^\t]*\t" + pattern + rb"\t", line)
        ]
        nonce = lines[0].split(b"\t")[0]
        lines[-2] = nonce + b"\tend\t%d" % (len(lines) - 2)
        return replace(result, report=b"\n".join(lines))

    return Faults(where="verify", result=drop)


def test_a_missing_test_is_not_passed(task: Task) -> None:
    verdict = attempt(task, FIX, SUBMIT, faults=(_without(b"test_negative"),))
    assert verdict.reward == 0.0
    assert outcomes(verdict)["test_negative"] == "missing"


def test_a_test_process_that_ended_before_its_last_canary_passed_nothing(task: Task) -> None:
    """All named tests are reported as passed, but the process did not live to fail where it had to."""
    verdict = attempt(task, FIX, SUBMIT, faults=(_without(rb"test_[0-9a-f]{12}", b"exit 0"),))
    assert set(outcomes(verdict).values()) == {"passed"}
    assert verdict.reward == 0.0


def test_canaries_that_are_gone_although_the_process_lived_are_a_forgery(task: Task) -> None:
    verdict = attempt(task, FIX, SUBMIT, faults=(_without(rb"test_[0-9a-f]{12}"),))
    assert (verdict.reward, verdict.fault and verdict.fault.code) == (None, "report_forged")


def test_a_skipped_test_is_not_passed(tmp_path: Path) -> None:
    hidden = (
        "import unittest\nfrom cart import total\n\n\n"
        "def test_negative():\n    raise unittest.SkipTest('later')\n"
    )
    task = small_task(tmp_path / "t", tests={"test_hidden.py": hidden})
    verdict = attempt(task, FIX, SUBMIT)
    assert verdict.reward == 0.0
    assert outcomes(verdict)["test_negative"] == "skipped"


def test_no_collected_test_is_the_tasks_fault_not_a_zero(tmp_path: Path) -> None:
    task = small_task(
        tmp_path / "t",
        fail_to_pass=["test_hidden.py::test_renamed"],
        pass_to_pass=["test_hidden.py::test_gone"],
    )
    verdict = attempt(task, FIX, SUBMIT)
    assert (verdict.reward, verdict.fault and verdict.fault.code) == (None, "nothing_collected")


def test_a_broken_test_file_is_the_tasks_fault(tmp_path: Path) -> None:
    task = small_task(tmp_path / "t", tests={"test_hidden.py": "def test_negative(:\n"})
    verdict = attempt(task, FIX, SUBMIT)
    assert verdict.reward is None
    assert verdict.fault is not None
    assert (verdict.fault.owner, verdict.fault.code) == ("task", "test_file")
    assert not verdict.fault.retryable


def test_other_bytes_than_the_packages_tests_are_refused(task: Task) -> None:
    other = Faults(
        where="verify",
        result=lambda r: replace(
            r, report=re.sub(rb"(\tfile\t[^\t]+\t)[0-9a-f]{8}", rb"\g<1>00000000", r.report)
        ),
    )
    verdict = attempt(task, FIX, SUBMIT, faults=(other,))
    assert (verdict.reward, verdict.fault and verdict.fault.code) == (None, "tests_differ")


def test_a_verifier_whose_command_failed_is_not_a_zero(task: Task) -> None:
    failed = Faults(where="verify", result=lambda r: replace(r, exit_code=1, report=None))
    verdict = attempt(task, FIX, SUBMIT, faults=(failed,))
    assert (verdict.reward, verdict.fault and verdict.fault.owner) == (None, "environment")


# ---------------------------------------------------------------------------------------------- diffs


def change(path: str, kind: str = "file") -> FileChange:
    return FileChange(path=path, kind=kind, content=None if kind in ("deleted", "dir") else b"x")  # type: ignore[arg-type]


def test_protected_paths_their_contents_and_their_parents_are_undone() -> None:
    changes = (
        change("a.py"),
        change("deep", "symlink"),
        change("deep2", "dir"),
        change("lib", "deleted"),
        change("tests", "dir"),
        change("tests/test_a.py"),
        change("tests_other.py"),
        change("x/__pycache__/a.cpython-311.pyc"),
    )
    kept, undone = gradable(changes, ("tests", "deep/inside.py", "lib/a/b.py"))
    assert [c.path for c in kept] == ["a.py", "deep2", "tests_other.py"]
    assert undone == 4


def test_a_module_that_would_be_found_before_a_protected_one_is_undone_too(tmp_path: Path) -> None:
    task = small_task(
        tmp_path / "t",
        environment={
            ".site/pytest/__init__.py": "",
            ".site/six.py": "",
            ".site/six-1.dist-info/METADATA": "",
            ".site/mine.py": "",
            "src/mine.py": "",
        },
        protected_paths=["tests", ".site"],
    )
    path = "/app/src:/app:/app/.site:/elsewhere"
    task = replace(task, sandbox=replace(task.sandbox, env={"PYTHONPATH": path}))
    own = ("src/mine.py", "cart.py", "__init__.py", "other.py", "six-notes.py", "pytest.ini", "lib/pytest.py")
    undone = (
        "pytest.py",
        "pytest/__init__.py",
        "src/pytest.py",
        "six.py",
        "src/six/a.py",
        "mine.py",
        "six.so",
    )
    assert {"tests", ".site"} <= set(guarded(task))
    kept, count = gradable(tuple(change(name) for name in (*own, *undone)), guarded(task))
    assert ({change.path for change in kept}, count) == (set(own), len(undone))
    bare = replace(task, sandbox=replace(task.sandbox, env={}))
    assert guarded(bare) == ("tests", ".site")


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../b", ".."])
def test_a_diff_that_leaves_the_workdir_is_refused(path: str) -> None:
    with pytest.raises(SandboxError, match="outside the workdir"):
        gradable((change(path),), ())


def test_a_diff_hash_tells_every_part_apart() -> None:
    base = FileChange(path="a", kind="file", mode=0o644, content=b"x")
    variants = [
        base,
        replace(base, path="b"),
        replace(base, mode=0o755),
        replace(base, content=b"y"),
        replace(base, kind="symlink"),
    ]
    assert len({diff_hash((v,)) for v in variants} | {diff_hash(())}) == 6
