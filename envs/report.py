"""Test files to a trustworthy report: builds the command that runs `testrun.py` in a sandbox, parses what it
sends.

Only lines that carry the nonce of this run count, between a start and an end marker that says how many there
are. A report that lacks either is incomplete: it proves nothing, neither a pass nor a failure.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from agentrl.types import TestOutcome
from envs.sandbox.contract import ExecRequest

PROGRAM = Path(__file__).with_name("testrun.py").read_text(encoding="utf-8")
PROGRAM_HASH = hashlib.sha256(PROGRAM.encode()).hexdigest()
ANSWER_MARGIN_S = 5.0
"""Between the deadline of the tests (a hung test is reported as an error) and that of the whole command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canaries:
    """Tests with random names whose outcome is known: two that must fail and two that must pass."""

    failing: tuple[str, str]
    passing: tuple[str, str]

    @classmethod
    def draw(cls) -> Canaries:
        a, b, c, d = (f"test_{secrets.token_hex(6)}" for _ in range(4))
        return cls(failing=(a, b), passing=(c, d))

    @property
    def names(self) -> frozenset[str]:
        return frozenset((*self.failing, *self.passing))

    @property
    def control(self) -> bytes:
        """One of each kind before the tests, one of each after."""
        (a, b), (c, d) = self.failing, self.passing
        return f"-{a} +{c} +{d} -{b} ".encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class TestRun:
    """One command that runs test files, and what is needed to believe its answer."""

    nonce: str
    canaries: Canaries | None
    root: str
    """Prefix of the files' paths that test names leave out."""
    request: ExecRequest

    __test__ = False

    @classmethod
    def of(
        cls,
        files: tuple[str, ...],
        *,
        exec_id: str,
        timeout_s: float,
        processes: int,
        grading: bool,
        root: str = "",
    ) -> TestRun:
        """`files` are paths inside the sandbox. Tests get `timeout_s`, the command `ANSWER_MARGIN_S` more.

        For grading there are canaries, and the runner is the sandbox's root, out of reach of the tests that
        it runs as the workdir's owner with at most `processes` processes.
        """
        nonce = secrets.token_hex(16)
        drawn = Canaries.draw() if grading else None
        control = drawn.control if drawn else b""
        request = ExecRequest(
            exec_id=exec_id,
            argv=(
                "python3",
                "-I",
                "-S",
                "-c",
                PROGRAM,
                f"{timeout_s}",
                f"{processes}",
                f"{len(control)}",
                *files,
            ),
            stdin=control + nonce.encode() + b"\n",
            timeout_s=timeout_s + ANSWER_MARGIN_S,
            user="root" if grading else "policy",
            report_fd=True,
        )
        return cls(nonce=nonce, canaries=drawn, root=root, request=request)

    def parse(self, report: bytes | None) -> TestReport:
        """What the bytes from fd 3 prove. Never raises on what a sandbox sent."""
        return parse(report, self.nonce, self.canaries, root=self.root)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRun:
    """One test file as the runner saw it. `ended`: `ok`, `timeout`, `exit N`, `signal N`, or empty (never
    ran)."""

    path: str
    sha256: str
    problem: str
    ended: str = ""
    cpu_ms: float = -1.0
    queued_ms: float = -1.0
    """Time spent waiting for a CPU; -1 when the kernel does not tell."""


CanaryState = Literal["none", "behaved", "unreached", "forged"]
"""`unreached`: the test process ended before they ran, or could not import the tests: nothing there passed
for certain. `forged`: one that must fail was reported as passed, or one that must pass was not although
others did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestReport:
    """What a run proved. `tests` are named `file::test`, without canaries; `complete` needs both markers."""

    started: bool
    complete: bool
    canaries: CanaryState
    hidden: bool
    """Whether the runner was unreadable for tested code."""
    files: tuple[FileRun, ...]
    tests: tuple[TestOutcome, ...]

    __test__ = False


_NOTHING = TestReport(started=False, complete=False, canaries="none", hidden=False, files=(), tests=())


def parse(report: bytes | None, nonce: str, canaries: Canaries | None, *, root: str = "") -> TestReport:
    """Never raises on what a sandbox sent. A test reported twice keeps its worst outcome."""
    prefix = nonce + "\t"
    text = (report or b"").decode("ascii", "backslashreplace")
    lines = [line[len(prefix) :].split("\t") for line in text.split("\n") if line.startswith(prefix)]
    if not lines or lines[0][0] != "start" or len(lines[0]) != 3:
        return _NOTHING
    complete = lines[-1] == ["end", str(len(lines) - 1)]
    files: dict[str, FileRun] = {}
    found: dict[tuple[str, str], TestOutcome] = {}
    for fields in lines[1:]:
        match fields:
            case ["file", path, digest, problem]:
                files[path] = FileRun(path=_unescape(path), sha256=digest, problem=_unescape(problem))
            case ["child", path, ended, cpu_ms, queued_ms] if path in files:
                files[path] = replace(
                    files[path], ended=ended, cpu_ms=float(cpu_ms), queued_ms=float(queued_ms)
                )
            case ["test", path, name, ("passed" | "failed" | "error" | "skipped") as outcome, message]:
                if (path, name) not in found or found[path, name].outcome == "passed":
                    label = f"{_unescape(path).removeprefix(root)}::{_unescape(name)}"
                    found[path, name] = TestOutcome(name=label, outcome=outcome, message=_unescape(message))
            case ["end", _]:
                pass
            case _:
                complete = False
    drawn = canaries.names if canaries else frozenset()
    return TestReport(
        started=True,
        complete=complete and lines[0][1] == str(len(files)),
        canaries=_canary_state(files, found, canaries),
        hidden=lines[0][2] == "1",
        files=tuple(files.values()),
        tests=tuple(test for (_, name), test in found.items() if name not in drawn),
    )


def _unescape(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode("unicode_escape", "replace")


def _canary_state(
    files: dict[str, FileRun], found: dict[tuple[str, str], TestOutcome], canaries: Canaries | None
) -> CanaryState:
    if canaries is None:
        return "none"
    worst: CanaryState = "behaved"
    for path, seen in files.items():
        here = {name: test.outcome for (p, name), test in found.items() if p == path}
        exact = all(here.get(n) == "failed" for n in canaries.failing) and all(
            here.get(n) == "passed" for n in canaries.passing
        )
        if exact:
            continue
        others = any(outcome == "passed" for name, outcome in here.items() if name not in canaries.names)
        if any(here.get(n) == "passed" for n in canaries.failing) or (others and seen.ended == "ok"):
            return "forged"
        worst = "unreached"
    return worst
