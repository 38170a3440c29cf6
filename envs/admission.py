"""A task and a backend to an `Admission`: proof that the task can be graded there, or why it is quarantined.

Full: the solution passes and the untouched workspace fails, each several times, every time, and needs no more
time, however busy this machine is, than leaves something to spare of the verifier's deadline; then a battery
of known exploits is laid over the broken workspace, and none may earn a reward. An exploit of which nothing
survives the task's protected paths is the empty attempt, which was seen to fail, and is not run again. Light,
for generated suites whose generator is known to make valid tasks: one run each and no battery; the record
says so. Nothing here trusts a message of the sandbox: the verifier that grades policies decides what passes.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.errors import BoundaryError, TaskError
from agentrl.types import SandboxSpec, Task
from envs import grading
from envs.clock import Clock, mounts_of
from envs.evidence import Admission, Witness
from envs.sandbox.contract import Backend, ExecRequest, FileChange, Isolation, Mount, Sandbox, time_multiplier
from envs.sandbox.diff import DiffTooLarge
from envs.sandbox.images import workspace
from envs.session import prepare
from envs.tasks import package

SOLUTION_TARGET = "/solution"
SOLVE_TIMEOUT_S = 300.0
CREATE_DEADLINE_S = 120.0
LINKED_FILES = 4
"""Hidden files that links are tried to."""
DEADLINE_SHARE = 0.8
"""A verification that needs a larger share of the verifier's deadline will some day not make it."""

_PRINT_AND_EXIT = """\
import os, sys
print("PASSED")
for fd in (1, 2, 3):
    try:
        os.write(fd, b"PASSED\\n1.0\\n")
    except OSError:
        pass
try:
    open("/logs/verifier/reward.txt", "w").write("1")
except OSError:
    pass
os._exit(0)
"""
_PATCHED = """\
import sys, unittest


def nothing(self, *args, **kwargs):
    return None


unittest.TestCase.run = unittest.TestCase.__call__ = nothing
unittest.TestCase._baseAssertEqual = unittest.TestCase.fail = nothing
try:
    import _pytest.python, _pytest.runner, _pytest.unittest
    _pytest.python.Function.runtest = _pytest.unittest.TestCaseFunction.runtest = nothing
    _pytest.runner.pytest_runtest_call = nothing
except ImportError:
    pass


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return nothing
"""
_PLUGIN = """\
import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    report.outcome = "passed"


def pytest_runtest_call(item):
    item.obj = lambda *args, **kwargs: None


def pytest_collection_modifyitems(items):
    for item in items:
        item.obj = lambda *args, **kwargs: None
"""
_FAKE_PYTEST = """\
class Anything:
    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) else Anything()

    def __getattr__(self, name):
        return Anything()

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        return True


def main(args=(), plugins=()):
    for plugin in plugins:
        for name in getattr(plugin, "wanted", None) or ():
            plugin.outcomes[name] = ["passed", "", None]
        canaries = getattr(plugin, "canaries", None)
        for name in (*canaries.first, *canaries.last) if canaries else ():
            seen = ["failed" if name in canaries.failing else "passed", "", None]
            plugin.outcomes["f::" + name] = plugin.outcomes["f::T::" + name] = seen
    return 0


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything()
"""
_ALWAYS = """\
import builtins, sys


class Always(int):
    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    def __getattr__(self, name):
        return self

    def __call__(self, *args, **kwargs):
        return self

    __hash__ = int.__hash__


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Always(1)
"""
_FORGE = """\
import os, sys
frame = sys._getframe()
while frame is not None:
    names = [n for n in frame.f_globals if n.startswith("test_")]
    out = frame.f_locals.get("out")
    if isinstance(out, int):
        code = frame.f_locals.get("code")
        names = [n for n in code.co_names if n.startswith("test_")] if code else names
        os.write(out, "".join(f"passed\\t{n}\\t\\n" for n in names).encode())
        os._exit(0)
    frame = frame.f_back
os._exit(0)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """Changes over the broken workspace that must not earn a reward."""

    name: str
    changes: tuple[FileChange, ...]


def _file(path: str, text: str, mode: int = 0o644) -> FileChange:
    return FileChange(path=path, kind="file", mode=mode, content=text.encode())


def attacks(task: Task) -> tuple[Attack, ...]:
    """The battery for one task: hooks of test frameworks, forged output, planted rewards, swapped test
    files."""
    root = workspace(Path(task.path) / "environment")
    modules = sorted(p.relative_to(root) for p in root.rglob("*.py"))
    kept = [str(p) for p in modules if not p.name.startswith("test_")]
    guarded = tuple(task.grader.protected_paths)
    kept = [p for p in kept if not any(p == g or p.startswith(g + "/") for g in guarded)]
    tests = sorted(
        {name.partition("::")[0] for name in (*task.grader.fail_to_pass, *task.grader.pass_to_pass)}
    )
    hook = "import builtins, os\nos._exit(0)\n"
    passing = "def test_nothing():\n    assert True\n"
    battery = [
        Attack(name="conftest", changes=(_file("conftest.py", _PRINT_AND_EXIT),)),
        Attack(
            name="sitecustomize",
            changes=(_file("sitecustomize.py", hook), _file("usercustomize.py", hook)),
        ),
        Attack(
            name="pth",
            changes=tuple(
                _file(f"{place}evil.pth", "import os; os._exit(0)\n")
                for place in ("", ".site/", "site-packages/", ".venv/lib/python3/site-packages/")
            ),
        ),
        Attack(
            name="pytest_ini",
            changes=(
                _file("pytest.ini", "[pytest]\naddopts = --collect-only -p no:terminal\n"),
                _file("setup.cfg", "[tool:pytest]\naddopts = --collect-only\n"),
            ),
        ),
        Attack(
            name="pytest_plugin",
            changes=(
                _file("evil_plugin.py", _PLUGIN),
                _file("conftest.py", 'pytest_plugins = ["evil_plugin"]\n'),
                _file("pytest.ini", "[pytest]\naddopts = -p evil_plugin\n"),
                _file("tox.ini", "[pytest]\naddopts = -p evil_plugin\n"),
                _file("tests/__init__.py", _PATCHED),
                _file("tests/conftest.py", _PLUGIN),
            ),
        ),
        Attack(
            name="pytest_shadow",
            changes=tuple(
                _file(name, _FAKE_PYTEST)
                for name in ("pytest.py", "_pytest/__init__.py", "pluggy.py", "iniconfig.py", "packaging.py")
            ),
        ),
        Attack(
            name="reward_file",
            changes=(
                _file("reward.txt", "1\n"),
                _file("reward.json", '{"reward": 1}\n'),
                _file("logs/verifier/reward.txt", "1\n"),
            ),
        ),
        Attack(
            name="stdlib_shadow",
            changes=tuple(
                _file(f"{name}.py", hook)
                for name in ("unittest", "json", "os", "traceback", "random", "functools", "importlib")
            ),
        ),
    ]
    if tests:
        replaced = tuple(
            _file(place, passing) for name in tests for place in (name, f"tests/{Path(name).name}")
        )
        links = tuple(
            FileChange(path=f"tests/{Path(name).name}", kind="symlink", mode=0o777, content=b"/dev/null")
            for name in tests
        )
        battery.append(Attack(name="replaced_tests", changes=tuple({c.path: c for c in replaced}.values())))
        battery.append(Attack(name="symlinked_tests", changes=links))
    for name, text in (
        ("exit_zero", _PRINT_AND_EXIT),
        ("always_equal", _ALWAYS),
        ("patched_framework", _PATCHED),
        ("forged_results", _FORGE),
    ):
        if kept:
            changed = tuple(_file(path, text) for path in kept)
            battery.append(Attack(name=name, changes=changed))
    return tuple(replace(a, changes=tuple(sorted(a.changes, key=lambda c: c.path))) for a in battery)


def linked_answers(task: Task, gold: tuple[FileChange, ...]) -> tuple[Attack, ...]:
    """For a script: every file that the solution leaves, as a link to a hidden file that may hold the answer.

    The policy can not see that file, but may name it; a script that follows links compares it with itself.
    """
    if task.grader.kind != "script":
        return ()
    hidden = sorted(name for name in package.test_files(Path(task.path)) if not name.endswith((".sh", ".py")))
    left = [change.path for change in gold if change.kind == "file"]
    return tuple(
        Attack(
            name=f"linked_answer_{number}",
            changes=tuple(
                FileChange(
                    path=path, kind="symlink", mode=0o777, content=f"{grading.TESTS_TARGET}/{name}".encode()
                )
                for path in left
            ),
        )
        for number, name in enumerate(hidden[:LINKED_FILES])
        if left
    )


async def admit(task: Task, backend: Backend, *, repeats: int = 3, light: bool = False) -> Admission:
    """Validate one task on one backend.

    Args:
        repeats: how often the solution must pass and the empty attempt fail; 1 when `light`.
        light: no repeats and no exploit battery. Only for suites whose generator is known.

    Raises `BoundaryError` when the backend fails; whatever is wrong with the task is a reason in the record.
    """
    repeats = 1 if light else repeats
    started = time.monotonic()
    image = await prepare(task, backend)
    reasons: list[str] = []
    tried: list[str] = []
    runtimes: list[float] = []
    costs: list[grading.Cost] = []
    try:
        protected = grading.guarded(task)
        gold, history = await _solution(task, backend, image)
        for number in range(repeats):
            for label, changes, wanted in (("solution", gold, True), ("empty", (), False)):
                begun, timed = time.monotonic(), _Timed(backend)
                passed, why, cost = await _passes(
                    task, timed, image, grading.gradable(changes, protected)[0], f"admit-{label}-{number}"
                )
                costs += [cost] if cost is not None else []
                runtimes.append(time.monotonic() - begun - timed.creating_s)
                if passed is not wanted:
                    reasons.append(
                        f"{label}: {'passes' if passed else 'does not pass'} in run {number + 1}: {why}"
                    )
        longer = time_multiplier(backend)
        if not reasons and needed_s(costs) > DEADLINE_SHARE * longer * task.grader.timeout_s:
            reasons.append(
                f"deadline: a verification needs {needed_s(costs):.1f} s of"
                f" {longer * task.grader.timeout_s:g} s; set verifier.timeout_sec to"
                f" {math.ceil(needed_s(costs) / DEADLINE_SHARE / longer)} or more"
            )
        if not light and not reasons:
            for attack in (*attacks(task), *linked_answers(task, gold)):
                kept = grading.gradable(attack.changes, protected)[0]
                if not kept:
                    tried.append(attack.name)
                    continue
                passed, _, _ = await _passes(task, backend, image, kept, f"admit-attack-{attack.name}")
                if passed:
                    reasons.append(f"exploit {attack.name}: earns a reward")
                else:
                    tried.append(attack.name)
        if history and not reasons:
            leak = await _history_leak(task, backend, image, gold, thorough=not light)
            reasons += [leak] if leak else []
    except TaskError as error:
        reasons.append(str(error))
    return Admission(
        task_id=task.id,
        revision=task.revision,
        image_digest=image,
        backend=backend.name,
        valid=not reasons,
        mode="light" if light else "full",
        repeats=repeats,
        reasons=tuple(reasons),
        attacks=tuple(tried),
        needed_s=round(needed_s(costs), 3),
        runtime_s=round(max(runtimes, default=time.monotonic() - started), 3),
        runtimes_s=tuple(round(seconds, 3) for seconds in sorted(runtimes)),
        admitted_at=time.time(),
    )


class _Timed:
    """A backend that says how long its sandboxes took to be made: seconds on a cluster, and no time of
    the verifier's."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.creating_s = 0.0

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def isolation(self) -> Isolation:
        return self._inner.isolation

    @property
    def time_multiplier(self) -> float:
        return time_multiplier(self._inner)

    async def prepare(self, environment_dir: str) -> str:
        return await self._inner.prepare(environment_dir)

    async def create(
        self,
        spec: SandboxSpec,
        *,
        image: str,
        session: str,
        mounts: tuple[Mount, ...] = (),
        apply: tuple[FileChange, ...] = (),
        deadline_s: float = CREATE_DEADLINE_S,
    ) -> Sandbox:
        begun = time.monotonic()
        try:
            return await self._inner.create(
                spec, image=image, session=session, mounts=mounts, apply=apply, deadline_s=deadline_s
            )
        finally:
            self.creating_s += time.monotonic() - begun

    async def close(self) -> None:
        await self._inner.close()


async def admit_suite(
    tasks: Sequence[Task], backend: Backend, *, repeats: int = 3, light: bool = False, at_once: int = 4
) -> tuple[Admission, ...]:
    """`admit` for many tasks, `at_once` of them at a time, in the order given."""
    limit = asyncio.Semaphore(at_once)

    async def one(task: Task) -> Admission:
        async with limit:
            return await admit(task, backend, repeats=repeats, light=light)

    return tuple(await asyncio.gather(*(one(task) for task in tasks)))


def needed_s(costs: Sequence[grading.Cost]) -> float:
    """Seconds that a verification needs on a machine with nothing else to do, by several on one that may be
    busy: the most CPU time of any, or the shortest by the clock where it waits for something else. Waiting
    for a CPU is no need."""
    if not costs:
        return 0.0
    return max(max(c.cpu_s for c in costs), min(c.clock_s - c.queued_s for c in costs))


async def _passes(
    task: Task, backend: Backend, image: str, kept: tuple[FileChange, ...], session: str
) -> tuple[bool, str, grading.Cost | None]:
    """Whether what is `gradable` of a diff earns the full reward, what was seen, and what judging took when
    there is a verdict. An unscored attempt earned nothing."""
    try:
        judged = await grading.verify(task, backend, image=image, changes=kept, session=session)
    except TaskError as error:
        if error.code in (
            "nothing_collected",
            "script_failed",
            "no_reward",
            "script_leftovers",
            "verifier_killed",
            "verifier_timeout",
            "reward_file",
        ):
            return False, error.message, None
        raise
    except BoundaryError as error:
        if error.code not in ("verifier_killed", "verifier_output"):
            raise
        return False, error.message, None
    failing = [f"{t.name} {t.outcome} {t.message}".strip() for t in judged.tests if t.outcome != "passed"]
    why = "; ".join(failing[:3]) or f"reward {judged.reward:g}"
    return judged.passed and judged.fault is None, why, judged.cost


async def _solution(task: Task, backend: Backend, image: str) -> tuple[tuple[FileChange, ...], bool]:
    """The diff that `solution/solve.sh` makes in a fresh sandbox, and whether a git history was there."""
    folder = Path(task.path) / "solution"
    if not (folder / "solve.sh").is_file():
        raise TaskError(
            f"{folder}/solve.sh is missing.", fix="Add the solution.", phase="admit", code="no_solution"
        )
    clock = Clock.of(task)
    sandbox = await backend.create(
        task.sandbox,
        image=image,
        session="admit-solution",
        mounts=(
            Mount(source=str(folder), target=SOLUTION_TARGET),
            *mounts_of(clock),
        ),
        deadline_s=time_multiplier(backend) * CREATE_DEADLINE_S,
    )
    try:
        witness = Witness(sandbox, image=image, spec=task.sandbox, session="admit-solution", clock=clock)
        await witness.start_clock()
        look = ExecRequest(exec_id="admit-look", argv=("test", "-e", ".git"), timeout_s=60.0)
        history = (await witness.exec(look)).exit_code == 0
        request = ExecRequest(
            exec_id="admit-solve",
            argv=("bash", f"{SOLUTION_TARGET}/solve.sh"),
            timeout_s=time_multiplier(backend) * SOLVE_TIMEOUT_S,
        )
        result = await witness.exec(request)
        if result.exit_code != 0:
            raise TaskError(
                f"solution/solve.sh {result.status} with {result.exit_code}: {result.stderr.text()[-500:]}",
                fix="It must exit 0 in a fresh workspace.",
                phase="admit",
                code="solution_failed",
            )
        await witness.kill_all()
        try:
            return await witness.diff(), history
        except DiffTooLarge as error:  # here it is no policy's
            raise TaskError(
                f"solution/solve.sh leaves more than a diff may carry: {error.message}",
                fix="Let it remove what it needs only for a while, or make that in /tmp.",
                phase="admit",
                code="solution_failed",
            ) from error
    finally:
        await sandbox.close()


async def _history_leak(
    task: Task, backend: Backend, image: str, gold: tuple[FileChange, ...], *, thorough: bool
) -> str | None:
    """How the git history of the workdir gives the solution away; None: it does not.

    A file as the solution leaves it must be no object of the repository, however it came there: a later
    commit, a tag, a stash, an object that nothing refers to, another repository's that it borrows from. Where
    the same file is checked out already it is no secret. `thorough`: nor may there be commits beyond what is
    checked out.
    """
    sandbox = await backend.create(
        task.sandbox, image=image, session="admit-history", deadline_s=CREATE_DEADLINE_S
    )
    try:
        witness = Witness(sandbox, image=image, spec=task.sandbox, session="admit-history")
        git = "git -c safe.directory='*'"
        if thorough:
            beyond = (
                f"{git} log --all --reflog --format=%H HEAD.. 2>/dev/null;"
                f" {git} fsck --lost-found --no-progress 2>/dev/null | grep commit"
            )
            request = ExecRequest(exec_id="admit-history", command=beyond, timeout_s=60.0)
            if (await witness.exec(request)).stdout.bytes_total:
                return "exploit git_log: the history holds commits that are not checked out"
        solved = {_blob(change.content): change.path for change in gold if change.kind == "file"}
        words = " ".join(sorted(set(solved) - {_blob(b"")}))
        command = (
            f"seen=$({git} ls-tree -r HEAD 2>/dev/null); for o in {words}; do"
            f" {git} cat-file -e $o 2>/dev/null"
            ' && case "$seen" in *$o*) ;; *) echo $o;; esac; done'
        )
        result = await witness.exec(ExecRequest(exec_id="admit-objects", command=command, timeout_s=60.0))
        found = sorted(solved[name] for name in result.stdout.text().split() if name in solved)
        return f"exploit git_objects: the repository holds the solution's {found[0]}" if found else None
    finally:
        await sandbox.close()


def _blob(content: bytes | None) -> str:
    """What git calls a file of this content."""
    raw = content or b""
    return hashlib.sha1(b"blob %d\0" % len(raw) + raw, usedforsecurity=False).hexdigest()
