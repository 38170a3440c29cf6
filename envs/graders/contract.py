"""What a grader is: one attempt's work to a number, with the facts that the number rests on.

A task names its graders in `task.toml`; the reward is the weighted sum of their values, each a component:

    [metadata.agentrl]
    grader = "graders"

    [[metadata.agentrl.graders]]
    name = "fixed"                 # the component
    use = "tests"                  # built in, or an entry point of the group `agentrl.graders`
    weight = 0.8

    [[metadata.agentrl.graders]]
    name = "close"
    use = "patch-similarity"
    weight = 0.2
    options = { oracle = "gold.patch" }

A grader is a class whose keyword arguments are its options, with `decides` (whether admission asks it: the
solution must get 1 from every grader that decides, doing nothing must not) and an async `grade(attempt)`.

The line that no grader may cross: what can not be judged is an exception, never a number. A `BoundaryError`
keeps its owner; anything else a grader raises is a fault of the task. What the policy did wrong is a number.
Graders run in this process: they read the policy's work and run none of it, except in the verifier.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from agentrl.errors import TaskError
from agentrl.types import Action, Fault, JsonScalar, Observation, Task, TestOutcome
from envs.sandbox.contract import ExecRequest, ExecResult, FileChange
from envs.sandbox.images import workspace

Steps = tuple[tuple[Action, Observation], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TestsSeen:
    """What the runner with canaries proved about named tests."""

    passed: bool
    """All of them, and the canaries behaved."""
    share: float
    tests: tuple[TestOutcome, ...]
    facts: Mapping[str, JsonScalar]
    fault: Fault | None = None
    """The report was forged: there is no reward."""

    __test__ = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What a grader may look at. The verifier is a fresh sandbox that holds the image and the diff."""

    task: Task
    session: str
    changes: tuple[FileChange, ...]
    """The workspace diff, taken from outside; protected paths are not in it."""
    steps: Steps | None
    """Every call and what it caused; None when a part of them is unknown (a restart)."""
    run: Callable[[ExecRequest], Awaitable[ExecResult]]
    """A command in the verifier. Raises `BoundaryError` unless it ended by itself or by its time limit."""
    run_tests: Callable[[tuple[str, ...], tuple[str, ...]], Awaitable[TestsSeen]]
    """Named tests of the package (`file::test`: fail-to-pass and pass-to-pass), in the verifier."""

    def file(self, path: str) -> bytes | None:
        """The content of a file of the workdir as the attempt left it: None when there is no regular file.

        Read from the diff and the package, not from a sandbox: links are not followed, so that none can
        stand for a file that the policy could not see. Of an image only what was changed is known.
        """
        plain = posixpath.normpath(path)
        for change in self.changes:
            if change.path == plain:
                return change.content if change.kind == "file" else None
            if change.kind != "dir" and plain.startswith(change.path + "/"):
                return None
        original = workspace(Path(self.task.path) / "environment") / plain
        return original.read_bytes() if original.is_file() and not original.is_symlink() else None

    def expected(self, name: str) -> bytes:
        """A file of the package's `tests/`, which the policy never sees. `TaskError` when it is missing."""
        return self._of_package("tests", name)

    def solution(self, name: str) -> bytes:
        """A file of the package's `solution/`. `TaskError` when it is missing."""
        return self._of_package("solution", name)

    def _of_package(self, folder: str, name: str) -> bytes:
        file = Path(self.task.path) / folder / name
        if not file.is_file():
            raise TaskError(
                f"{file}: is missing.", fix="A grader names it.", code="grader_file", phase="verify"
            )
        return file.read_bytes()

    def original(self, path: str) -> bytes | None:
        """A file of the workdir as it was; None when the package holds none (it may be in an image)."""
        file = workspace(Path(self.task.path) / "environment") / posixpath.normpath(path)
        return file.read_bytes() if file.is_file() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """What one grader says. `value` is 1 for entirely right; less, or a number below 0, for anything else."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    """Parts of the value, for reports and recipes; not added to the reward. `step/NNNN` is the part that the
    call of that number earned: a verdict holds it times the grader's weight, a part of the reward."""
    facts: Mapping[str, JsonScalar] = field(default_factory=dict)
    """What the value rests on: kept in the verdict's evidence (E8)."""
    tests: tuple[TestOutcome, ...] = ()
    fault: Fault | None = None
    """The policy tampered with the judging: there is no reward at all."""


class Grader(Protocol):
    """A grader with its options."""

    @property
    def decides(self) -> bool: ...

    async def grade(self, attempt: Attempt) -> Graded: ...


def parsed_json(raw: bytes, what: str) -> Any:
    """JSON that a task brings. `TaskError` when it is none."""
    try:
        return json.loads(raw)
    except ValueError as error:
        raise TaskError(f"{what} is not JSON: {error}.", code="grader_file", phase="verify") from error
