"""Work that can not be judged, by whose fault ever: cases of the field beside those of `test_grading`."""

from __future__ import annotations

import asyncio
import errno
import subprocess
from pathlib import Path
from typing import Any

import pytest
from faulty_backend import FIX, KEY, Faults, FaultyBackend, admission_of, attempt, config, small_task

from agentrl.errors import SandboxError, TaskError
from agentrl.types import Action, EvidenceKey, Task, Termination, Verdict
from envs import grading
from envs.admission import _history_leak, _passes, _solution, admit, attacks
from envs.evidence import Admission
from envs.sandbox.diff import DiffTooLarge
from envs.sandbox.local import LocalBackend
from envs.session import Session, prepare
from envs.tasks import package

SUBMIT: tuple[str, dict[str, Any]] = ("submit", {})


def shell(command: str) -> tuple[str, dict[str, Any]]:
    return "bash", {"command": command}


def scored_as_nothing(verdict: Verdict, code: str) -> None:
    """Zero, with every piece of evidence, the policy's fault and the flag that says what was judged."""
    assert verdict.reward == 0.0
    assert {link.key for link in verdict.evidence if link.holds is True} == set(EvidenceKey)
    assert verdict.fault is not None
    assert (verdict.fault.owner, verdict.fault.code, verdict.fault.retryable) == ("policy", code, False)
    assert grading.WORK_UNJUDGED in verdict.flags


# ------------------------------------------------------- the policy's, and scored: no way out of the loss


def test_a_forged_report_earns_zero_and_is_no_way_out_of_the_loss(task: Task) -> None:
    """SWE-bench PR#620: a spoofed report is a zero with a flag, not an attempt that nobody learns from."""
    forged = next(a for a in attacks(task) if a.name == "forged_results")
    text = next(c.content for c in forged.changes if c.path == "cart.py")
    assert text is not None
    write = "cat > cart.py <<'END_OF_IT'\n" + text.decode() + "END_OF_IT\n"
    verdict = attempt(task, shell(write), SUBMIT)
    scored_as_nothing(verdict, "report_forged")
    assert "verifier_untrusted" in verdict.flags


def _raises(error: Exception, where: str, operation: str) -> Faults:
    async def before(name: str) -> None:
        if name == operation:
            raise error

    return Faults(where=where, before=before)


def test_work_that_is_too_large_to_be_looked_at_earns_zero(task: Task) -> None:
    """100,000 files in the workdir: a policy must not learn to end a bad attempt by them."""
    large = DiffTooLarge("The workdir has more than 20000 changes.", phase="diff")
    verdict = attempt(task, FIX, SUBMIT, faults=(_raises(large, "agent", "diff"),))
    scored_as_nothing(verdict, "diff_too_large")


def test_work_that_can_not_be_judged_where_the_image_can_not_either_is_not_scored(task: Task) -> None:
    large = DiffTooLarge("It does not fit.", phase="verify")
    verdict = attempt(task, FIX, SUBMIT, faults=(_raises(large, "verify", "probe"),))
    assert verdict.reward is None
    assert verdict.fault is not None
    assert (verdict.fault.owner, verdict.fault.code) == ("policy", "diff_too_large")


def test_what_is_not_admitted_is_not_judged_twice(task: Task) -> None:
    created: list[str] = []

    async def note(backend: Any, _: Any) -> None:
        created.append("")
        backend.created.clear()
        created.clear()
        created.append(backend.created)

    large = DiffTooLarge("It does not fit.", phase="verify")
    verdict = attempt(
        task, FIX, SUBMIT, faults=(_raises(large, "verify", "probe"),), admitted=False, then=note
    )
    assert verdict.reward is None
    assert len(created[0]) == 1


# ---------------------------------------------------------------- errors of this machine are of this machine


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO])
def test_a_diff_that_this_machine_can_not_take_is_the_environments(task: Task, code: int) -> None:
    """Without descriptors left, or with a failing disk: no error that ends a whole run, and no zero."""
    failing = _raises(OSError(code, "of the machine"), "agent", "diff")
    verdict = attempt(task, FIX, SUBMIT, faults=(failing,))
    assert verdict.reward is None
    assert verdict.fault is not None
    assert (verdict.fault.owner, verdict.fault.phase, verdict.fault.retryable) == (
        "environment",
        "diff",
        True,
    )
    assert verdict.fault.evidence["errno"] == code


def test_a_package_that_can_not_be_read_any_more_is_the_environments(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(_: Path) -> str:
        raise OSError(errno.EIO, "of the machine")

    async def break_it(_: Any, __: Any) -> None:
        monkeypatch.setattr(package, "revision_of", unreadable)

    verdict = attempt(task, FIX, SUBMIT, then=break_it)
    assert verdict.reward is None
    assert verdict.fault is not None
    assert verdict.fault.owner == "environment"


# ---------------------------------------------------------------- reward files


class OneFile:
    """A verifier's sandbox in which the reward file says this."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        assert len(self._raw) <= max_bytes
        if not path.endswith("reward.json"):
            raise FileNotFoundError(path)
        return self._raw


@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 60_000,
        b'{"reward": ' + b"9" * 400 + b"}",
        b'{"reward": ' + b"9" * 5000 + b"}",
        b'{"reward": 1e999}',
        b'{"reward": "1"}',
        b'{"reward": null}',
        b'{"reward": [1]}',
        b"\xff\xfe1",
        b"",
        b"{}",
    ],
)
def test_whatever_a_reward_file_holds_it_is_a_number_or_the_tasks_fault(raw: bytes) -> None:
    with pytest.raises(TaskError) as refused:
        asyncio.run(grading._reward(OneFile(raw)))  # type: ignore[arg-type]
    assert refused.value.owner == "task"


def test_a_key_that_comes_twice_counts_once_and_other_components_are_kept() -> None:
    values = asyncio.run(grading._reward(OneFile(b'{"reward": 1, "style": 2, "reward": 0}')))  # type: ignore[arg-type]
    assert values == {"reward": 0.0, "style": 2.0}


# ---------------------------------------------------------------- scripts that run what is tested

RUNS_IT = 'bash ./run.sh >/dev/null 2>&1\nif [ "$(cat answer)" = 42 ]; then r=1; else r=0; fi\n'
RUNS_IT += "echo $r > /logs/verifier/reward.txt\n"


def script_verdict(folder: Path, command: str, script: str = RUNS_IT) -> Verdict:
    """A script grader that runs code of the attempt, as those of imported repositories do."""
    backend = LocalBackend(folder / "state")
    try:
        backend.check()
    except SandboxError as error:
        pytest.skip(str(error))
    package.write_task(
        folder / "task",
        config=config(grader="script", fail_to_pass=[], pass_to_pass=[], tools=["bash", "submit"]),
        instruction="Write 42 into the file answer.\n",
        environment={"run.sh": "true\n", "answer": "0\n"},
        tests={"test.sh": "#!/bin/bash\n" + script},
        solution="#!/bin/bash\necho 42 > answer\n",
    )
    task = package.load_task(folder / "task")

    async def run() -> Verdict:
        try:
            record = await admission_of(task, backend)
            async with await Session.open(
                task, backend, session_id="agent", signing_key=KEY, admission=record
            ) as session:
                await session.call(Action(id="0", tool="bash", arguments={"command": command}))
                return await session.finalize(termination=Termination.FINISHED, fault=None)
        finally:
            await backend.close()

    return asyncio.run(run())


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("setsid sleep 60 &", "script_leftovers"),
        ("kill -9 $PPID", "verifier_killed"),
        ("rm -rf /logs/verifier; exec >&-; printf x > /logs/verifier", "no_reward"),
    ],
)
def test_tested_code_that_keeps_a_script_from_judging_is_the_policys_and_earns_zero(
    tmp_path: Path, what: str, code: str
) -> None:
    """Not the task's, which would be quarantined, nor the environment's, which would be tried again."""
    verdict = script_verdict(tmp_path, f"echo 42 > answer; echo '{what}' > run.sh")
    assert verdict.fault is not None
    assert verdict.fault.owner == "policy", verdict.fault
    scored_as_nothing(verdict, verdict.fault.code)
    assert code in (verdict.fault.code, "no_reward")


@pytest.mark.sandbox
def test_a_script_that_can_not_judge_the_image_either_is_the_tasks(tmp_path: Path) -> None:
    verdict = script_verdict(tmp_path, "echo 42 > answer", script="kill -9 $$\n")
    assert verdict.reward is None
    assert verdict.fault is not None
    assert (verdict.fault.owner, verdict.fault.code) == ("task", "verifier_killed")


def test_a_test_file_that_is_too_large_to_check_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grading, "TEST_FILE_BYTES", 4)

    class Isolated:
        class sandbox:
            class info:
                isolation = "namespaces"

        async def read_file(self, path: str, *, max_bytes: int) -> bytes:
            raise ValueError(f"{path} has more than {max_bytes} bytes")

    task = small_task(tmp_path / "t")
    files = package.test_files(Path(task.path))
    with pytest.raises(TaskError, match=r"test_cart\.py can not be read"):
        asyncio.run(grading._by_script(task, Isolated(), files, "s"))  # type: ignore[arg-type]


# ------------------------------------------------------------- solutions that a repository holds

SOLVED = "sed -i 's/a - b/a + b/' cart.py"
BACK = "git reset -q --hard HEAD~; git reflog expire --expire=now --all"
HIDES = {
    "staged once and forgotten": f"{SOLVED}; git add -A; git reset -q --hard",
    "a stash that was dropped": f"{SOLVED}; git stash -q; git stash drop -q",
    "a tag": f"{SOLVED}; git commit -qam fix; git tag v2; {BACK}",
    "a branch of a remote": f"{SOLVED}; git commit -qam fix; git update-ref refs/remotes/o/m HEAD; {BACK}",
    "a pack that nothing refers to": f"{SOLVED}; git commit -qam fix; git repack -qadk; {BACK}",
    "objects that it borrows": f"{SOLVED}; git commit -qam fix; {BACK}; mkdir other;"
    " cp -r .git/objects other/lent; echo ../../other/lent > .git/objects/info/alternates;"
    " git gc -q --prune=now",
}


def leak(folder: Path, then: str) -> str | None:
    """What validation says of a task whose workdir is a repository to which this was done."""
    small_task(folder)
    script = (
        "cd $1/environment; git init -q .; git config user.email a@b; git config user.name a;"
        f" git config gc.auto 0; git add -A; git commit -qm broken; {then}"
    )
    subprocess.run(["bash", "-ec", script, "_", str(folder)], check=True, capture_output=True)
    task = package.load_task(folder)

    async def run() -> str | None:
        backend = FaultyBackend()
        try:
            image = await prepare(task, backend)
            gold, history = await _solution(task, backend, image)
            assert history
            return await _history_leak(task, backend, image, gold, thorough=False)
        finally:
            await backend.close()

    return asyncio.run(run())


@pytest.mark.parametrize("how", HIDES)
def test_a_solution_that_is_an_object_of_the_repository_is_a_leak_however_it_came_there(
    tmp_path: Path, how: str
) -> None:
    """SWE-bench #465, PR#590, multi-swe-bench #70: a log that shows nothing proves nothing."""
    found = leak(tmp_path / "t", HIDES[how])
    assert found == "exploit git_objects: the repository holds the solution's cart.py"


def test_a_history_of_what_is_there_is_no_leak(tmp_path: Path) -> None:
    assert leak(tmp_path / "t", "git commit -q --allow-empty -m more") is None


def test_an_exploit_that_ends_the_verifier_earns_nothing_and_puts_no_task_aside(tmp_path: Path) -> None:
    task = small_task(tmp_path / "t")
    killed = TaskError("It was ended by signal 9.", code="verifier_killed", phase="verify")

    async def run() -> bool:
        backend = FaultyBackend(_raises(killed, "verify", "probe"))
        try:
            image = await prepare(task, backend)
            passed, why, cost = await _passes(task, backend, image, (), "admit-attack-verify")
            assert "signal 9" in why
            assert cost is None
            return passed
        finally:
            await backend.close()

    assert asyncio.run(run()) is False


def test_a_solution_that_no_diff_can_carry_is_a_reason_and_no_policys_fault(tmp_path: Path) -> None:
    task = small_task(tmp_path / "t", solution="#!/bin/bash\nfor i in $(seq 70); do mkdir d; cd d; done\n")

    async def run() -> Admission:
        backend = FaultyBackend()
        try:
            return await admit(task, backend, light=True)
        finally:
            await backend.close()

    found = asyncio.run(run())
    assert not found.valid
    assert "more than a diff may carry" in found.reasons[0]
