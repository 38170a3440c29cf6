"""Graders that run something in the verifier: named tests, or a command by its exit code."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from agentrl.errors import SandboxError
from agentrl.types import ExecStatus
from envs.graders.contract import Attempt, Graded
from envs.sandbox.contract import ExecRequest

_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Tests:
    """Outcomes of tests by name, from the runner with canaries. The task's own lists unless others are named.

    With `share` the value is the share that passed, else 1 for all of them and 0 otherwise.
    """

    decides: ClassVar[bool] = True
    __test__ = False

    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    share: bool = False

    async def grade(self, attempt: Attempt) -> Graded:
        own = attempt.task.grader
        fails = self.fail_to_pass or own.fail_to_pass
        passes = self.pass_to_pass if self.fail_to_pass else own.pass_to_pass
        seen = await attempt.run_tests(fails, passes)
        value = float(seen.passed) if seen.passed or not self.share else min(seen.share, 0.999)
        return Graded(
            value=value,
            components={"passed": seen.share},
            facts=seen.facts,
            tests=seen.tests,
            fault=seen.fault,
        )


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ExitCode:
    """1 when a command ends with the exit code that is expected, 0 when it ends otherwise or is too slow.

    The command runs in the workdir of the verifier, as the policy's user. The policy wrote what it runs, so
    an exit code alone is weak evidence: name tests where there are some.
    """

    decides: ClassVar[bool] = True

    argv: tuple[str, ...] = field()
    expected: int = 0
    timeout_s: float = Field(default=60.0, gt=0)

    async def grade(self, attempt: Attempt) -> Graded:
        if not self.argv:
            raise SandboxError("exit-code: argv is empty.", owner="task", code="grader", phase="verify")
        result = await attempt.run(
            ExecRequest(
                exec_id=f"{attempt.session}-exit-code",
                argv=self.argv,
                timeout_s=self.timeout_s,
                user="policy",
            )
        )
        right = result.status is ExecStatus.EXITED and result.exit_code == self.expected
        return Graded(value=float(right), facts={"status": str(result.status), "exit_code": result.exit_code})
