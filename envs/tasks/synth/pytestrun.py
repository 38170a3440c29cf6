"""The program that runs a project's own pytest suite inside a sandbox. Standard library and pytest.

It is not imported by agentrl. Its text goes two ways: into every package made by the factory, where a file of
one function per test (`packages.driver`) uses `Suite`, so that `envs.testrun` can run and judge real pytest
tests by name; and to `python3 -c` in the factory's own sandboxes (`main`), which measures a suite: outcomes,
times, the lines that each test executes, and what each mutant breaks. Both go through `run`, so a test means
the same when a task is made and when it is graded. Python 3.9 or newer.

pytest and the requirements are those of `.site`, whatever the project's folder holds by their names, and
pytest reads no configuration but the `conftest.py` files beside the tests. `assert a == b` in test files and
`assertEqual` refuse an `__eq__` of the tested code that answers for a plain value, as in `envs.testrun`. For
grading, canary tests with random names (functions and `TestCase` methods, some that must pass and some that
must fail) run before and after the tests of the project: tested code that patches pytest or unittest answers
them wrongly, and then no test counts as passed.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import json
import os
import resource
import select
import signal
import sys
import tempfile
import threading
import time
import types
import unittest
import zlib
from importlib.machinery import PathFinder, SourceFileLoader

TYPE_CHECKING = False  # a type checker reads it as true
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

REPORT_FD = 3
MESSAGE_CHARS = 300
RESULT_LIMIT = 64 * 1024 * 1024
TRACED_CALLS = 50
TRACED_EVENTS = 200_000
ADDRESS_BYTES = 640 * 1024 * 1024
"""Of a child: a mutant that takes all memory gets a `MemoryError` instead of ending its neighbours."""
WAITS = 10
"""A child may take this many times its CPU seconds by the clock."""
QUIET = (
    "-qq",
    "--no-header",
    "--no-summary",
    "--tb=no",
    "--assert=plain",
    "--continue-on-collection-errors",
    "--config-file=/dev/null",
    *(f"-pno:{name}" for name in ("cacheprovider", "junitxml", "pastebin", "faulthandler", "setupplan")),
    *(f"-pno:{name}" for name in ("unraisableexception", "threadexception", "stepwise", "setuponly")),
)


def spent() -> float:
    """CPU seconds of this process and of the children that it waited for."""
    mine = os.times()
    return mine.user + mine.system + mine.children_user + mine.children_system


def too_slow(signum: int, frame: object) -> None:
    raise TooSlow("the test takes too long")


class Override:
    """Test files are compiled with explained, unfoolable assertions; chosen files have another content."""

    def __init__(self, tests: list[str], rewriter: Any, contents: dict[str, bytes]) -> None:
        loader: Any = SourceFileLoader
        compile_, read = loader.source_to_code, loader.get_data

        def source_to_code(self: Any, data: Any, path: Any, **kwargs: Any) -> Any:
            name = os.fspath(path)
            if rewriter is None or not any(name == t or name.startswith(t + "/") for t in tests):
                return compile_(self, data, path, **kwargs)
            text = data.decode("utf-8", "replace")
            tree = compile(data, name, "exec", rewriter.ONLY_AST, True)
            rewriter.rewrite(tree.body, text.split("\n"))
            return compile(tree, name, "exec", 0, True)

        def get_data(self: Any, path: str) -> bytes:
            found: bytes = contents[path] if path in contents else read(self, path)
            return found

        loader.source_to_code, loader.get_data = source_to_code, get_data
        if rewriter is not None:
            builtins.__dict__["@same"], builtins.__dict__["@differ"] = rewriter.same, rewriter.differ
            case: Any = unittest.TestCase
            plain = case._baseAssertEqual

            def base_assert_equal(self: Any, first: object, second: object, msg: Any = None) -> None:
                if rewriter.sly(first, second) or rewriter.sly(second, first):
                    raise self.failureException(rewriter.differ(first, second))
                plain(self, first, second, msg)

            case._baseAssertEqual = base_assert_equal


def visible(path: str, prefix: str) -> str | None:
    """A path relative to the app's folder; None outside of it and in hidden folders (what is installed)."""
    rest = path[len(prefix) :]
    return rest if path.startswith(prefix) and not rest.startswith(".") and "/." not in rest else None


class Tracer:
    """Lines of the project's files that a test executes, by file relative to the app. Of a function that a
    test calls more than `TRACED_CALLS` times, the later calls are not looked at, and of a test nothing after
    `TRACED_EVENTS`: tracing costs tenfold."""

    def __init__(self, app: str) -> None:
        self.prefix = app + "/"
        self.names: dict[str, str | None] = {}
        self.lines: dict[str, set[int]] = {}
        self.calls: dict[types.CodeType, int] = {}
        self.left = 0

    def wanted(self, path: str) -> str | None:
        if path not in self.names:
            self.names[path] = visible(path, self.prefix)
        return self.names[path]

    def enter(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        self.spend()
        name = self.wanted(code.co_filename)
        calls = self.calls[code] = self.calls.get(code, 0) + 1
        if name is None or calls > TRACED_CALLS:
            return None
        add = self.lines.setdefault(name, set()).add
        add(frame.f_lineno)

        def line(frame: types.FrameType, event: str, arg: Any) -> Any:
            if event == "line":
                self.spend()
                add(frame.f_lineno)
            return line

        return line

    def spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            sys.settrace(None)

    def start(self) -> None:
        self.lines, self.calls, self.left = {}, {}, TRACED_EVENTS
        threading.settrace(self.enter)
        sys.settrace(self.enter)

    def stop(self) -> dict[str, list[int]]:
        sys.settrace(None)
        threading.settrace(None)
        return {name: sorted(lines) for name, lines in self.lines.items()}


class Pinned:
    """Finds some modules, pytest first of all, in `.site` alone: the project's folder comes before it on the
    path, and a module of that name there would be the attempt's."""

    def __init__(self, site: str, names: Iterable[str]) -> None:
        self.site = site
        self.names = frozenset(names)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in self.names:
            return None
        return PathFinder.find_spec(name, [self.site] if path is None else path, target)


class TooSlow(BaseException):
    """A test took more CPU time than a test may; no `except Exception` of the project catches it."""


class Plugin:
    """Which tests run, in which order, and how each one ended and what it cost: `[CPU, clock]` seconds.

    A test that takes more than `test_s` of a CPU is ended, and after `suite_s` no further one begins; zero is
    no limit. What was not begun has no outcome.
    """

    def __init__(
        self,
        root: str,
        app: str,
        wanted: Iterable[str] | None,
        tracer: Tracer | None,
        canaries: Canaries | None,
        backwards: bool,
        test_s: float,
        suite_s: float,
    ) -> None:
        self.root = root
        self.app = app
        self.wanted = None if wanted is None else set(wanted)
        self.tracer = tracer
        self.canaries = canaries
        self.backwards = backwards
        self.test_s = test_s
        self.suite_s = suite_s
        self.began = (0.0, 0.0)
        self.outcomes: dict[str, list[Any]] = {}
        self.seconds: dict[str, tuple[float, float]] = {}
        self.lines: dict[str, dict[str, list[int]]] = {}
        self.broken: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        own = [i for i in items if self.canaries is None or not self.canaries.owns(i)]
        kept = [i for i in own if self.wanted is None or i.nodeid in self.wanted]
        if self.backwards:
            kept.reverse()
        if self.canaries is not None:
            kept = self.canaries.around(kept, [i for i in items if self.canaries.owns(i)])
        items[:] = kept

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            text = crash.message if crash is not None else str(report.longrepr).strip().split("\n")[-1]
            self.broken[report.nodeid] = text.removeprefix("E").strip()[:MESSAGE_CHARS]

    def pytest_sessionstart(self, session: Any) -> None:
        self.session = session

    def pytest_runtest_logstart(self) -> None:
        self.began = (spent(), time.monotonic())
        if self.tracer is not None:
            self.tracer.start()

    def pytest_runtest_call(self) -> Any:
        if self.test_s:
            signal.signal(signal.SIGPROF, too_slow)
            signal.setitimer(signal.ITIMER_PROF, self.test_s, self.test_s)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self.tracer is not None:
            self.lines[nodeid] = self.tracer.stop()
        used = spent()
        self.seconds[nodeid] = (used - self.began[0], time.monotonic() - self.began[1])
        if self.suite_s and used > self.suite_s:
            self.session.shouldstop = "the suite's time is up"

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        name = item.nodeid
        if call.excinfo is None:
            return
        error = call.excinfo.value
        kind = type(error).__name__
        text = str(error)
        where = None
        for entry in call.excinfo.traceback:
            path = str(entry.path)
            inside = visible(path, self.app + "/")
            if inside is not None and not path.startswith(self.root + "/"):
                where = [inside, entry.lineno + 1]
        message = text if kind == "AssertionError" and text else f"{kind}: {text}" if text else kind
        self.outcomes.setdefault(name, ["", "", None])[1:] = [message[:MESSAGE_CHARS], where]

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid
        seen = self.outcomes.setdefault(name, ["", "", None])
        if hasattr(report, "wasxfail") or report.skipped:
            outcome = "skipped"
        elif report.failed:
            outcome = "failed" if report.when == "call" else "error"
        else:
            outcome = "passed"
        if seen[0] in ("", "passed") and (outcome != "passed" or report.when == "call"):
            seen[0] = outcome


class Canaries:
    """Tests whose outcome is known, in a file of their own with random names: functions and methods, of each
    kind one that must pass and one that must fail before the project's tests, and the same after them."""

    def __init__(self) -> None:
        self.path = os.path.join(tempfile.mkdtemp(), f"test_{os.urandom(6).hex()}.py")
        self.first, self.last = (tuple(f"test_{os.urandom(6).hex()}" for _ in "pf") for _ in "ab")
        self.failing = (self.first[1], self.last[1])
        number = int.from_bytes(os.urandom(3), "big")
        functions, methods = [], []
        for name in (*self.first, *self.last):
            other = number + (name in self.failing)
            functions.append(f"def {name}():\n    assert {number} == {other}\n")
            methods.append(f"    def {name}(self):\n        self.assertEqual({number}, {other})\n")
        case = f"class Test{os.urandom(6).hex()}(unittest.TestCase):\n"
        with open(self.path, "w") as file:
            file.write("import unittest\n\n" + "".join(functions) + case + "".join(methods))

    def owns(self, item: Any) -> bool:
        return str(item.path) == self.path

    def around(self, kept: list[Any], own: list[Any]) -> list[Any]:
        before = [item for item in own if item.nodeid.endswith(self.first)]
        return [*before, *kept, *(item for item in own if item not in before)]

    def behaved(self, outcomes: dict[str, list[Any]]) -> bool:
        ends = (*self.first, *self.last)
        seen = {name: outcome[0] for name, outcome in outcomes.items() if name.endswith(ends)}
        good = {name: "failed" if name.endswith(self.failing) else "passed" for name in seen}
        return len(seen) == 8 and seen == good


def run(
    root: str,
    app: str,
    files: Iterable[str],
    *,
    suite: Iterable[str],
    wanted: Iterable[str] | None = None,
    sources: Iterable[str] = (),
    site: str = "",
    pinned: Iterable[str] = (),
    rewriter: Any = None,
    contents: dict[str, bytes] | None = None,
    tracer: Tracer | None = None,
    canaries: bool = False,
    backwards: bool = False,
    test_s: float = 0.0,
    suite_s: float = 0.0,
) -> Plugin:
    """Run tests of `files`, those `wanted` or all; `files` and `suite` (what else belongs to the tests) are
    relative to `root`. Modules by a name in `pinned` are those of `site`, whatever the project's folder
    holds. Returns a `Plugin` with the outcomes."""
    sys.meta_path.insert(0, Pinned(os.path.join(app, site), pinned))
    sys.path += [os.path.join(app, name) if name else app for name in (*sources, site)]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        os.environ.pop(name, None)
    sys.dont_write_bytecode = True
    pytest = importlib.import_module("pytest")
    Override([os.path.join(root, name) for name in suite], rewriter, contents or {})
    drawn = Canaries() if canaries else None
    pytest.hookimpl(wrapper=True)(Plugin.pytest_runtest_call)
    plugin = Plugin(root, app, wanted, tracer, drawn, backwards, test_s, suite_s)
    arguments = [*QUIET, f"--rootdir={root}", f"--confcutdir={root}"]
    places = [os.path.join(root, name) for name in files] + ([drawn.path] if drawn else [])
    pytest.main([*arguments, *places], plugins=[plugin])
    if drawn is not None and not drawn.behaved(plugin.outcomes):
        plugin.outcomes = {}
        plugin.broken = {"": "the tests of the test framework itself were answered wrongly"}
    return plugin


class Suite:
    """Tests of a package by short names, run once, when the test file that made this is loaded."""

    def __init__(
        self,
        file: str,
        root: str,
        *,
        tests: dict[str, str],
        suite: Sequence[str],
        sources: Sequence[str],
        site: str,
        pinned: Sequence[str],
    ) -> None:
        here = os.path.dirname(os.path.abspath(file))
        self.tests = tests
        files = sorted({name.partition("::")[0] for name in tests.values()})
        self.plugin = run(
            os.path.normpath(os.path.join(here, root)),
            os.getcwd(),
            files,
            suite=suite,
            wanted=tests.values(),
            sources=sources,
            site=site,
            pinned=pinned,
            rewriter=sys.modules.get("__main__") if hasattr(sys.modules["__main__"], "rewrite") else None,
            canaries=True,
        )

    def check(self, name: str) -> None:
        """Raise as the test did."""
        outcome, message, _ = self.plugin.outcomes.get(self.tests[name], ("", "", None))
        if outcome == "passed":
            return
        if outcome == "failed":
            raise AssertionError(message or "failed")
        if outcome == "skipped":
            raise unittest.SkipTest("skipped or expected to fail")
        broken = self.plugin.broken
        raise RuntimeError(message or next(iter(broken.values()), "the test did not run"))


# ---------------------------------------------------------------------------------- measuring, in the factory


def answer(plugin: Plugin) -> dict[str, Any]:
    return {
        "outcomes": plugin.outcomes,
        "seconds": plugin.seconds,
        "lines": plugin.lines,
        "broken": plugin.broken,
    }


def limited(status: int) -> bool:
    """Whether the kernel ended a process for its CPU time."""
    return os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)


def isolated(work: Callable[[], object], timeout_s: float) -> tuple[str, Any]:
    """The JSON value of `work()` in a forked child: `(how it ended, value or None)`. It gets `timeout_s` of a
    CPU, and `WAITS` times that by the clock, so that a busy machine is not taken for an endless loop."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.setsid()
            limit = int(timeout_s) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
            os.close(read_end)
            null = os.open("/dev/null", os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            try:
                data = json.dumps({"value": work()}).encode()
            except BaseException as error:  # also SystemExit: whatever it is, it is said
                data = json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()
            while data:
                data = data[os.write(write_end, data) :]
            code = 0
        finally:
            os._exit(code)
    os.close(write_end)
    deadline, data, ended = time.monotonic() + WAITS * timeout_s, b"", "ok"
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or len(data) > RESULT_LIMIT:
            ended = "timeout"
            break
        if select.select([read_end], [], [], left)[0]:
            piece = os.read(read_end, 1 << 20)
            if not piece:
                break
            data += piece
    os.close(read_end)
    for target in (os.killpg, os.kill):
        if ended == "timeout":
            try:  # noqa: SIM105 (as in envs.testrun)
                target(pid, signal.SIGKILL)
            except OSError:
                pass
    status = os.waitpid(pid, 0)[1]
    if ended == "ok" and status != 0:
        ended = "timeout" if os.WIFSIGNALED(status) and limited(status) else f"exit {status}"
    if ended != "ok":
        return ended, None
    try:
        found = json.loads(data)
    except ValueError:
        return "garbled", None
    return (found["error"], None) if "error" in found else ("ok", found["value"])


def mutated(app: str, edits: list[tuple[str, int, int, str]]) -> dict[str, bytes]:
    """File contents by absolute path after edits `[path, start, end, new]`."""
    contents: dict[str, bytes] = {}
    for path, start, end, new in sorted(edits, key=lambda e: e[1], reverse=True):
        place = os.path.join(app, path)
        if place not in contents:
            with open(place, "rb") as file:
                contents[place] = file.read()
        contents[place] = contents[place][:start] + new.encode() + contents[place][end:]
    return contents


def main() -> None:
    """The folder of the tests as argument, orders as JSON on stdin, one answer as compressed JSON on fd 3."""
    root = sys.argv[1]
    order = json.loads(sys.stdin.buffer.read())
    rewriter = types.ModuleType("testrun")
    exec(compile(order["testrun"], "testrun", "exec"), rewriter.__dict__)
    app = os.getcwd()
    common = {
        "sources": order["sources"],
        "site": order["site"],
        "pinned": order["pinned"],
        "suite": order["suite"],
        "rewriter": rewriter,
    }
    sys.path.append(os.path.join(app, order["site"]))
    importlib.import_module("pytest")  # warm: children fork from here

    def baseline() -> dict[str, Any]:
        tracer = Tracer(app) if order["trace"] else None
        limits = {"test_s": order["test_s"], "suite_s": order["suite_s"]}
        which = {"wanted": order["wanted"], "backwards": order["backwards"]}
        plugin = run(root, app, order["files"], tracer=tracer, **limits, **which, **common)
        return answer(plugin)

    def mutant(job: dict[str, Any]) -> dict[str, Any]:
        files = sorted({name.partition("::")[0] for name in job["nodes"]})
        contents = mutated(app, job["edits"])
        plugin = run(root, app, files, wanted=job["nodes"], contents=contents, **common)
        bad = {name: seen for name, seen in plugin.outcomes.items() if seen[0] != "passed"}
        missing = [name for name in job["nodes"] if name not in plugin.outcomes]
        return {"bad": bad, "missing": len(missing), "broken": plugin.broken}

    if order["mode"] == "baseline":
        ended, value = isolated(baseline, order["timeout_s"])
        result: dict[str, Any] = {"ended": ended, "value": value}
    else:
        result = {"mutants": []}
        for job in order["mutants"]:
            started = time.monotonic()
            ended, value = isolated(functools.partial(mutant, job), job["timeout_s"])
            took = time.monotonic() - started
            result["mutants"].append({"id": job["id"], "ended": ended, "value": value, "seconds": took})
    data = zlib.compress(json.dumps(result).encode())
    while data:
        data = data[os.write(REPORT_FD, data) :]


if __name__ == "__main__":
    main()
