"""The in-sandbox test program and the report that it sends."""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envs.report import PROGRAM, Canaries, TestReport, TestRun, parse

NONCE = "n0nce"


def run(folder: Path, *files: str, deadline_s: float = 10.0, canaries: bool = True) -> TestReport:
    """Run test files of a folder as a sandbox would, with the interpreter of these tests."""
    made = TestRun.of(files, exec_id="x", timeout_s=deadline_s, processes=64, grading=canaries)
    read_end, write_end = os.pipe()
    argv = (sys.executable, *(made.request.argv or ())[1:])
    shell = ["bash", "-c", f'exec 3>&{write_end} "$@"', "_", *argv]
    try:
        process = subprocess.Popen(shell, cwd=folder, stdin=subprocess.PIPE, pass_fds=(write_end,))
        os.close(write_end)
        process.communicate(made.request.stdin, timeout=deadline_s + 20)
        with os.fdopen(read_end, "rb", closefd=False) as pipe:
            return made.parse(pipe.read())
    finally:
        os.close(read_end)


def outcomes(report: TestReport) -> dict[str, str]:
    return {test.name.partition("::")[2]: test.outcome for test in report.tests}


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


GOOD = "def value():\n    return 5\n"
TESTS = (
    "from code_under_test import value\n\n\n"
    "def test_one():\n    assert value() == 5\n\n\ndef test_two():\n    assert value() > 4\n"
)


def attack(folder: Path, text: str) -> TestReport:
    """Run the honest tests against hostile code."""
    return run(write(folder, code_under_test=text, test_it=TESTS), "test_it.py")


def test_plain_functions_are_run_in_order_and_failures_explained(tmp_path: Path) -> None:
    write(
        tmp_path,
        test_it="""
def test_equal(): assert 2 + 3 == 6
def test_other(): assert [] , "my words"
def test_true():
    x = 3
    assert x > 5
def test_raises(): {}["k"]
def test_exits(): raise SystemExit(0)
def test_fine(): assert 1 == 1
def helper(): raise ValueError
""",
    )
    report = run(tmp_path, "test_it.py")
    assert [(t.name, t.outcome, t.message) for t in report.tests] == [
        ("test_it.py::test_equal", "failed", "5 != 6"),
        ("test_it.py::test_other", "failed", "my words"),
        ("test_it.py::test_true", "failed", "not true: x > 5"),
        ("test_it.py::test_raises", "error", "KeyError: 'k'"),
        ("test_it.py::test_exits", "error", "SystemExit: 0"),
        ("test_it.py::test_fine", "passed", ""),
    ]
    assert report.complete
    assert report.hidden
    assert report.canaries == "behaved"


def test_unittest_classes_run_too(tmp_path: Path) -> None:
    write(
        tmp_path,
        test_it="""
import unittest
class Cart(unittest.TestCase):
    def setUp(self): self.x = 1
    def test_good(self): self.assertEqual(self.x, 1)
    def test_bad(self): self.assertEqual(self.x, 2)
    def test_error(self): raise OSError("x")
    @unittest.skip("later")
    def test_skipped(self): pass
    @unittest.expectedFailure
    def test_xfail(self): self.fail()
""",
    )
    assert outcomes(run(tmp_path, "test_it.py")) == {
        "Cart.test_good": "passed",
        "Cart.test_bad": "failed",
        "Cart.test_error": "error",
        "Cart.test_skipped": "skipped",
        "Cart.test_xfail": "skipped",
    }


def test_two_files_do_not_share_a_process(tmp_path: Path) -> None:
    write(
        tmp_path,
        test_a="import os\ndef test_dies(): os._exit(0)\ndef test_never(): pass\n",
        test_b="def test_lives(): pass\n",
    )
    report = run(tmp_path, "test_a.py", "test_b.py")
    assert outcomes(report) == {"test_dies": "error", "test_never": "error", "test_lives": "passed"}
    assert [f.ended for f in report.files] == ["exit 0", "ok"]
    assert report.canaries == "unreached"


def test_a_syntax_error_of_a_test_file_is_said(tmp_path: Path) -> None:
    report = run(write(tmp_path, test_it="def test_a(:\n"), "test_it.py", "gone.py")
    assert report.complete
    assert [f.problem.partition(":")[0] for f in report.files] == ["SyntaxError", "FileNotFoundError"]


def test_a_hung_test_ends_at_the_deadline_as_its_own_slowness(tmp_path: Path) -> None:
    write(tmp_path, test_it="def test_a(): pass\ndef test_hang():\n    while True: pass\n")
    report = run(tmp_path, "test_it.py", deadline_s=0.6)
    assert outcomes(report) == {"test_a": "passed", "test_hang": "error"}
    assert report.files[0].ended == "timeout"
    assert report.files[0].cpu_ms > 0


def test_a_child_that_stays_behind_does_not_hold_the_report(tmp_path: Path) -> None:
    write(
        tmp_path,
        test_it="import os, time\ndef test_fork():\n    if os.fork() == 0: os._exit(time.sleep(8) or 0)\n",
    )
    begun = time.monotonic()
    report = run(tmp_path, "test_it.py")
    assert time.monotonic() - begun < 5
    assert outcomes(report) == {"test_fork": "passed"}


# --------------------------------------------------------------- forging from inside the test process

DIES = ("import os\nprint('PASSED')\nos._exit(0)\n", "import sys\nsys.exit(0)\n", "raise KeyboardInterrupt\n")


@pytest.mark.parametrize("text", DIES)
def test_code_that_ends_the_process_passes_nothing(tmp_path: Path, text: str) -> None:
    report = attack(tmp_path, text)
    assert report.complete
    assert set(outcomes(report).values()) == {"error"}


SCREAMS = """
import os
for fd in range(256):
    for name in ("test_one", "test_two"):
        try:
            os.write(fd, f"passed\\t{name}\\t\\nn0nce\\ttest\\ttest_it.py\\t{name}\\tpassed\\t\\n".encode())
        except OSError:
            pass
def value(): return 0
"""


def test_results_written_into_every_open_file_do_not_turn_failures_into_passes(tmp_path: Path) -> None:
    assert outcomes(attack(tmp_path, SCREAMS)) == {"test_one": "error", "test_two": "error"}


def test_results_forged_before_leaving_are_caught_by_the_canaries(tmp_path: Path) -> None:
    text = """
import os, sys
frame = sys._getframe()
while "out" not in frame.f_locals or "canaries" not in frame.f_locals:
    frame = frame.f_back
names = ["test_one", "test_two", *frame.f_locals["canaries"]]
os.write(frame.f_locals["out"], "".join(f"passed\\t{n}\\t\\n" for n in names).encode())
os._exit(0)
"""
    report = attack(tmp_path, text)
    assert set(outcomes(report).values()) == {"passed"}
    assert report.canaries == "forged"


def test_a_runner_that_was_made_to_pass_everything_is_caught(tmp_path: Path) -> None:
    text = """
import sys
frame = sys._getframe()
while "attempt" not in frame.f_globals:
    frame = frame.f_back
frame.f_globals["attempt"] = lambda test, workdir: ("passed", "")
def value(): return 0
"""
    report = attack(tmp_path, text)
    assert report.canaries != "behaved"
    assert "passed" not in outcomes(report).values()


def test_a_replaced_builtin_passes_nothing(tmp_path: Path) -> None:
    text = "import builtins\nbuiltins.isinstance = lambda a, b: True\ndef value(): return 5\n"
    assert set(outcomes(attack(tmp_path, text)).values()) == {"error"}


def test_a_replaced_exception_changes_nothing(tmp_path: Path) -> None:
    text = "import builtins\nbuiltins.AssertionError = KeyError\ndef value(): return 0\n"
    assert "passed" not in outcomes(attack(tmp_path, text)).values()


def test_values_that_equal_everything_equal_nothing(tmp_path: Path) -> None:
    text = """
class Always(int):
    def __eq__(self, other): return True
    def __gt__(self, other): return False
def value(): return Always(0)
"""
    report = attack(tmp_path, text)
    assert outcomes(report) == {"test_one": "failed", "test_two": "failed"}
    nested = "from code_under_test import value\ndef test_list(): assert [value()] == [5]\n"
    write(tmp_path, test_nested=nested + "def test_dict(): assert {1: value()} == {1: 5}\n")
    assert outcomes(run(tmp_path, "test_nested.py")) == {"test_list": "failed", "test_dict": "failed"}


def test_hooks_and_shadows_in_the_workdir_are_never_read(tmp_path: Path) -> None:
    hook = "import os\nos._exit(0)\n"
    names = (
        "conftest",
        "sitecustomize",
        "usercustomize",
        "unittest",
        "os",
        "time",
        "select",
        "types",
        "_ast",
    )
    write(tmp_path, code_under_test=GOOD, test_it=TESTS, **dict.fromkeys(names, hook))
    (tmp_path / "evil.pth").write_text("import os; os._exit(0)\n")
    report = run(tmp_path, "test_it.py")
    assert outcomes(report) == {"test_one": "passed", "test_two": "passed"}
    assert report.canaries == "behaved"


def test_tested_code_sees_neither_nonce_nor_report_nor_the_parents_files(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may look into every process; sandboxes run tests as another user")
    text = """
import os
seen = [os.environ.get(k) for k in os.environ]
try:
    os.open(f"/proc/{os.getppid()}/fd/0", os.O_RDONLY)
    raise SystemExit("the parent's stdin is open to us")
except OSError:
    pass
def value(): return 5
"""
    assert outcomes(attack(tmp_path, text)) == {"test_one": "passed", "test_two": "passed"}


def test_stdin_and_fd_3_of_tested_code_are_not_the_runners(tmp_path: Path) -> None:
    text = """
import os
assert os.read(0, 10) == b""
try:
    os.fstat(3)
    raise SystemExit("fd 3 is open")
except OSError:
    pass
def value(): return 5
"""
    assert outcomes(attack(tmp_path, text)) == {"test_one": "passed", "test_two": "passed"}


# ---------------------------------------------------------------------- the parser (ENV-09 and worse)

CANARIES = Canaries(failing=("test_f1", "test_f2"), passing=("test_p1", "test_p2"))


def framed(*lines: str, end: bool = True, files: int = 1, nonce: str = NONCE) -> bytes:
    body = [f"start\t{files}\t1", "file\tt.py\tab\t", *lines, "child\tt.py\tok\t1.0\t0.0"]
    body += [f"end\t{len(body)}"] if end else []
    return "".join(f"{nonce}\t{line}\n" for line in body).encode()


def test_line(name: str, outcome: str) -> str:
    return f"test\tt.py\t{name}\t{outcome}\t"


test_line.__test__ = False  # type: ignore[attr-defined]


def test_only_lines_with_the_nonce_between_the_markers_count() -> None:
    """ENV-09: what the tested code prints is no outcome."""
    report = framed(test_line("t1", "passed"))
    assert outcomes(parse(report, NONCE, None)) == {"t1": "passed"}
    noisy = (
        b"PASSED t2\nPASSED\nother\ttest\tt.py\tt2\tpassed\t\n" + report + b"test\tt.py\tt2\tpassed\t\n\xff\n"
    )
    assert outcomes(parse(noisy, NONCE, None)) == {"t1": "passed"}
    assert parse(noisy, NONCE, None).complete


def test_without_both_markers_nothing_is_complete() -> None:
    assert not parse(None, NONCE, None).started
    assert not parse(b"", NONCE, None).started
    assert not parse(framed(nonce="wrong"), NONCE, None).started
    assert not parse(framed(test_line("t1", "passed"), end=False), NONCE, None).complete
    assert not parse(framed(files=2), NONCE, None).complete
    cut = framed(test_line("t1", "passed"), test_line("t2", "passed")).split(b"\n")
    assert not parse(b"\n".join(cut[:2] + cut[3:]), NONCE, None).complete


@pytest.mark.parametrize("order", [("passed", "failed"), ("failed", "passed")])
def test_the_worst_outcome_of_a_repeated_test_counts(order: tuple[str, str]) -> None:
    assert outcomes(parse(framed(*(test_line("t1", o) for o in order)), NONCE, None)) == {"t1": "failed"}


def test_an_unknown_line_or_outcome_makes_the_report_incomplete() -> None:
    assert not parse(framed("tset\tx"), NONCE, None).complete
    odd = parse(framed(test_line("t1", "PASSED")), NONCE, None)
    assert not odd.complete
    assert odd.tests == ()


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        (("failed", "failed", "passed", "passed"), "behaved"),
        (("passed", "passed", "passed", "passed"), "forged"),
        (("failed", "passed", "passed", "passed"), "forged"),
        (("failed", "failed", "failed", "passed"), "forged"),
    ],
)
def test_canaries_must_all_behave(seen: tuple[str, ...], state: str) -> None:
    names = (*CANARIES.failing, *CANARIES.passing)
    lines = [test_line(n, o) for n, o in zip(names, seen, strict=True)]
    report = parse(framed(*lines, test_line("t1", "passed")), NONCE, CANARIES)
    assert report.canaries == state
    assert outcomes(report) == {"t1": "passed"}


def test_the_program_starts_fast() -> None:
    """In CPU time. The floor is a bare interpreter; the program itself may add little (imports are what
    costs)."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    def best(*argv: str) -> float:
        times = []
        for _ in range(7):
            begun = spent()
            subprocess.run([sys.executable, "-I", "-S", *argv], check=False, stdin=subprocess.DEVNULL)
            times.append(spent() - begun)
        return min(times)

    floor = best("-c", "pass")
    assert best("-c", PROGRAM, "1", "8", "4") - floor < 0.025


# ----------------------------------------------------------- tests of unittest, and code that tampers with it

CASES = """\
import unittest

from code_under_test import value


class Cart(unittest.TestCase):
    def test_one(self):
        self.assertEqual(value(), 5)

    def test_two(self):
        self.assertTrue(value() > 4)

    def test_three(self):
        with self.assertRaises(ValueError):
            value(1)
"""
RIGHT = "def value(n=0):\n    if n:\n        raise ValueError\n    return 5\n"
REPLACED = {
    "run": "TestCase.run = lambda self, result=None: result",
    "call": "TestCase.__call__ = TestCase.run = lambda self, result=None: None",
    "assertEqual": "TestCase.assertEqual = lambda *a: None",
    "assertTrue": "TestCase.assertTrue = lambda *a: None",
    "assertRaises": "TestCase.assertRaises = lambda *a: contextlib.suppress(ValueError)",
    "fail": "TestCase.fail = lambda *a: None",
    "one_code": "TestCase.assertEqual.__code__ = (lambda self, a, b, msg=None: None).__code__",
    "executor": "case._Outcome.testPartExecutor = lambda *a, **k: contextlib.suppress(Exception)",
    "result": "TestResult.addFailure = TestResult.addError = lambda *a: None",
    "module": "unittest.TestCase = case.TestCase = object",
    "method": "TestCase._callTestMethod = lambda self, method: None",
    "new_cases": "TestCase.__init_subclass__ = classmethod(lambda c, **k: setattr(c, 'assertEqual', print))",
    "getattribute": "TestCase.__getattribute__ = lambda self, name: (lambda *a: None)",
    "exception": "TestCase.failureException = KeyboardInterrupt",
}


@pytest.mark.parametrize("name", REPLACED)
@pytest.mark.parametrize("when", ["import", "call"])
def test_a_replaced_part_of_unittest_passes_nothing(tmp_path: Path, name: str, when: str) -> None:
    inside = "    " if when == "call" else ""
    text = "import contextlib, unittest\nfrom unittest import TestCase, TestResult, case\n"
    text += f"{'def value(n=0):' if when == 'call' else ''}\n{inside}{REPLACED[name]}\n"
    text += "    return 0\n" if when == "call" else "def value(n=0):\n    return 0\n"
    report = run(write(tmp_path, code_under_test=text, test_it=CASES), "test_it.py")
    assert "passed" not in outcomes(report).values() or report.canaries == "forged"
    assert report.complete


def test_a_replacement_that_puts_itself_back_has_no_effect(tmp_path: Path) -> None:
    text = """
import unittest
right = unittest.TestCase.assertEqual, unittest.TestCase.assertTrue

def back(self, *rest):
    unittest.TestCase.assertEqual, unittest.TestCase.assertTrue = right

def value(n=0):
    unittest.TestCase.assertEqual = unittest.TestCase.assertTrue = back
    return 0
"""
    report = run(write(tmp_path, code_under_test=text, test_it=CASES), "test_it.py")
    assert "passed" not in outcomes(report).values()


def test_cases_of_honest_code_pass_with_what_they_define_themselves(tmp_path: Path) -> None:
    tests = (
        CASES
        + """

class Shared(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.made = value()
        cls.log = []

    def assertFive(self, found):
        self.assertEqual(found, 5)

    def assertTrue(self, found, msg=None):
        self.log.append(found)
        super().assertTrue(found, msg)

    def test_shared(self):
        self.addCleanup(self.log.clear)
        self.assertFive(self.made)
        self.assertTrue(self.made)
        with self.subTest(n=1):
            self.assertIn(5, [5])


class Later(unittest.IsolatedAsyncioTestCase):
    async def test_await(self):
        self.assertEqual(value(), 5)
"""
    )
    report = run(write(tmp_path, code_under_test=RIGHT, test_it=tests), "test_it.py")
    assert set(outcomes(report).values()) == {"passed"}, report.tests
    assert len(report.tests) == 6, "setUpClass counts as one"
    assert report.canaries == "behaved"


def test_a_case_that_fails_in_code_that_left_unittest_alone_is_a_failure(tmp_path: Path) -> None:
    wrong = RIGHT.replace("return 5", "return 4")
    report = run(write(tmp_path, code_under_test=wrong, test_it=CASES), "test_it.py")
    assert outcomes(report) == {
        "Cart.test_one": "failed",
        "Cart.test_two": "failed",
        "Cart.test_three": "passed",
    }
    assert report.canaries == "behaved"


TAMPERING = {
    "a function of the runner": """
import __main__, re
real = __main__.attempt
def fake(test, workdir):
    seen = real(test, workdir)
    return seen if re.fullmatch("test_[0-9a-f]{12}", getattr(test, "__name__", "")) else ("passed", "")
__main__.attempt = fake
""",
    "the code of a function of the runner": """
import __main__, re, types
old = __main__.attempt
__main__.honest = types.FunctionType(old.__code__, old.__globals__)
def fake(test, workdir):
    import re
    seen = honest(test, workdir)
    return seen if re.fullmatch("test_[0-9a-f]{12}", getattr(test, "__name__", "")) else ("passed", "")
old.__code__ = fake.__code__
""",
    "how results are written": """
import os, re
real = os.write
def fake(fd, data):
    canary = re.match(rb"failed\ttest_[0-9a-f]{12}\t", data)
    return real(fd, b"passed" + data[6:] if data.startswith(b"failed") and not canary else data)
os.write = fake
""",
}
SAME = """
import re, sys
def value():
    space = sys._getframe(1).f_globals
    honest = space["@same"]
    if honest.__name__ == "same":
        def always(left, right):
            canary = re.fullmatch("test_[0-9a-f]{12}", sys._getframe(1).f_code.co_name)
            return honest(left, right) if canary else True
        space["@same"] = always
    return 4
"""


@pytest.mark.parametrize("name", TAMPERING)
def test_whoever_replaces_parts_of_the_runner_passes_nothing(tmp_path: Path, name: str) -> None:
    """Also one that knows the canaries by their names and leaves them honest."""
    report = attack(tmp_path, TAMPERING[name] + "def value():\n    return 4\n")
    assert "passed" not in outcomes(report).values()


def test_whoever_replaces_how_tests_compare_passes_nothing(tmp_path: Path) -> None:
    assert outcomes(attack(tmp_path, SAME))["test_one"] == "error"


@pytest.mark.parametrize(
    "body",
    [
        "__eq__ = functools.partial(lambda *a: True)",
        "__eq__ = type('C', (), {'__call__': lambda *a: True})()",
        "__eq__ = operator.methodcaller('__class__')",
    ],
)
def test_no_kind_of_eq_answers_for_a_plain_value(tmp_path: Path, body: str) -> None:
    text = (
        "import functools, operator\n"
        "class Says(type):\n"
        "    def __getattribute__(self, name):\n"
        "        return int.__eq__ if name == '__eq__' else type.__getattribute__(self, name)\n"
        f"class E(int, metaclass=Says):\n    {body}\n    __hash__ = int.__hash__\n"
        "def value(): return E(4)\n"
    )
    assert outcomes(attack(tmp_path, text))["test_one"] == "failed"


def test_a_graded_file_that_floods_its_output_fails_by_itself(tmp_path: Path) -> None:
    flood = "import os\nfor _ in range(64):\n    os.write(1, bytes(1 << 20))\nprint('x' * 1000)\n"
    report = attack(tmp_path, flood + "def value():\n    return 4\n")
    assert report.complete
    assert outcomes(report)["test_one"] == "failed"
