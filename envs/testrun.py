"""The program that runs tests inside a sandbox: test files in, one framed report on file descriptor 3 out.

It is not imported by agentrl; its source is handed to `python3 -I -S -c` (see `envs.report`), so nothing is
mounted and no `sitecustomize`, `usercustomize`, `.pth`, `conftest.py`, `pytest.ini` or `PYTHON*` variable is
ever read. Standard library only, Python 3.9 or newer, and nothing that costs milliseconds to import (no json,
re, traceback).

    argv   deadline_s, limit of processes, length of the control block, test files
    stdin  the control block (canary names, `-` must fail, `+` must pass), then the nonce
    fd 3   lines `nonce TAB kind TAB fields…`, written at the end in one piece, backslash-escaped

Each file runs in its own forked process, which has no stdin, no fd 3, when graded no output either (a flood
of it would end the verifier, not the test), and a private result pipe; started as root, it becomes the owner
of the workdir first, so tested code can not signal the parent. The parent reads
the nonce only after the last child is dead, so the nonce is never in the memory of tested code; the parent is
also undumpable, so that a process of the same user can not open its `/proc` files. A child that ends early
(`os._exit(0)`) leaves every unreported test an error. What was run is proven by the sha256 of the bytes.

Tests are plain `test_*` functions without parameters, and methods of `unittest.TestCase`. `assert a == b`
without a message is rewritten to report both values and to refuse an `__eq__` of the tested code that answers
for a plain value. Where a file has classes, `unittest` is loaded and remembered before any of its code runs:
test cases are bound to the remembered methods, each canary is also a method of a test case, and after a test
that left anything of `unittest` replaced, nothing passes (`Framework`).

What this cannot prevent: code under test shares a process with the tests. What it leaves replaced of
`builtins`, of the functions of this file or of how a test compares is seen after every test, by a frame that
already runs, and nothing passes any more. Canaries that must fail and must pass run in the same process, in
the same module, before and after the tests, and catch a forgery that answers alike for all. One that reads
the canaries, computes their honest results and leaves nothing replaced would pass;
only a process boundary between test and tested code stops that. Where all
have one user id, tested code may also kill the parent: then there is no report, hence no reward, never a
pass.
"""

import builtins
import os
import resource
import select
import sys
import time
import types

try:
    from _ctypes import call_function, dlopen, dlsym
except ImportError:  # a Python without ctypes: the report says that the parent was readable
    call_function = None  # type: ignore[assignment]
try:
    from _sha2 import sha256  # type: ignore[import-not-found,unused-ignore]
except ImportError:
    try:
        from _sha256 import sha256  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        from hashlib import sha256

import _ast as A

TYPE_CHECKING = False  # a type checker reads it as true; importing typing would cost milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

REPORT_FD = 3
RESULT_LIMIT = 4 * 1024 * 1024
MESSAGE_CHARS = 200
REPR_CHARS = 80
PR_SET_DUMPABLE = 4
SIGKILL = 9
ONLY_AST = 0x400
PLAIN = (int, str, float, bool, bytes, list, tuple, dict, set, frozenset, complex, type(None))
C_METHOD = type(int.__eq__)
MRO, SPACE = type.__dict__["__mro__"].__get__, type.__dict__["__dict__"].__get__
OUTCOMES = ("passed", "failed", "error", "skipped")
DONE = b"done\t\t\n"
"""Last line of a child that came to its own end: `os._exit(0)` in tested code looks the same from outside."""


def set_dumpable(flag: int) -> bool:
    """Whether other processes of this user may look into this one. False when the kernel could not be
    asked."""
    return bool(
        call_function is not None
        and call_function(dlsym(dlopen(None, 0), "prctl"), (PR_SET_DUMPABLE, flag, 0, 0, 0)) == 0  # type: ignore[arg-type]
    )


def become_owner(workdir: str, processes: int) -> None:
    """From root to the user that owns the workdir: the policy's. Others stay who they are."""
    facts = os.stat(workdir)
    if os.geteuid() == 0 and facts.st_uid != 0:
        os.setgroups([])
        os.setresgid(facts.st_gid, facts.st_gid, facts.st_gid)
        resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
        os.setresuid(facts.st_uid, facts.st_uid, facts.st_uid)


def escape(text: str) -> str:
    """One printable field: no tab, newline or control character survives."""
    return text.encode("unicode_escape").decode("ascii")


def short(value: object) -> str:
    try:
        text = repr(value)
    except Exception as error:
        return f"<{type(value).__name__}, its repr raised {type(error).__name__}>"
    return text if len(text) <= REPR_CHARS else text[: REPR_CHARS - 1] + "…"


def own_eq(kind: type) -> object:
    """The `__eq__` that the interpreter would use, whatever a metaclass says: one of C, or somebody's."""
    for base in MRO(kind):
        space = SPACE(base)
        if "__eq__" in space:
            return space["__eq__"]
    return None


def sly(left: object, right: object) -> bool:
    """Whether `left` would answer `== right` by its own Python `__eq__` although `right` is a plain value."""
    if type(right) not in PLAIN:
        return False
    if not isinstance(own_eq(type(left)), C_METHOD):
        return True
    if type(left) is type(right) and isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return any(sly(a, b) for a, b in zip(left, right))  # noqa: B905 (Python 3.9)
    if isinstance(left, dict) and isinstance(right, dict):
        return any(key in left and sly(left[key], right[key]) for key in right)
    return False


def same(left: object, right: object) -> bool:
    return not sly(left, right) and bool(left == right)


def differ(left: object, right: object) -> str:
    if sly(left, right):
        return f"{type(left).__name__} compares equal by its own __eq__, wanted {short(right)}"
    return f"{short(left)} != {short(right)}"


# ---------------------------------------------------------------------------------------- reading test files


def segment(lines: list[str], node: A.expr) -> str:
    raw = lines[node.lineno - 1].encode()
    end = node.end_col_offset if node.end_lineno == node.lineno else len(raw)
    return raw[node.col_offset : end].decode("utf-8", "replace")


def rewrite(body: list[A.stmt], lines: list[str]) -> None:
    """Give each bare `assert` a message, in place, at every depth."""
    at = 0
    while at < len(body):
        node = body[at]
        for field in ("body", "orelse", "finalbody"):
            inner = getattr(node, field, None)
            if isinstance(inner, list):
                rewrite(inner, lines)
        for handler in getattr(node, "handlers", ()):
            rewrite(handler.body, lines)
        if isinstance(node, A.Assert) and node.msg is None:
            new = explained(node, lines)
            body[at : at + 1] = new
            at += len(new)
        else:
            at += 1


def explained(node: A.Assert, lines: list[str]) -> list[A.stmt]:
    test = node.test
    place = {
        "lineno": node.lineno,
        "col_offset": node.col_offset,
        "end_lineno": node.end_lineno,
        "end_col_offset": node.end_col_offset,
    }
    if isinstance(test, A.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], A.Eq):

        def name(word: str, store: bool = False) -> A.Name:
            return A.Name(id=word, ctx=A.Store() if store else A.Load(), **place)  # type: ignore[arg-type]

        def call(word: str) -> A.Call:
            return A.Call(func=name(word), args=[name("@l"), name("@r")], keywords=[], **place)  # type: ignore[arg-type]

        return [
            A.Assign(targets=[name("@l", True)], value=test.left, **place),  # type: ignore[arg-type]
            A.Assign(targets=[name("@r", True)], value=test.comparators[0], **place),  # type: ignore[arg-type]
            A.Assert(test=call("@same"), msg=call("@differ"), **place),  # type: ignore[arg-type]
        ]
    message = A.Constant(value="not true: " + segment(lines, test), **place)  # type: ignore[arg-type]
    return [A.Assert(test=test, msg=message, **place)]  # type: ignore[arg-type]


def static_names(tree: A.Module) -> list[str]:
    """Names of the tests that the file promises, read without running it."""
    names = []
    for node in tree.body:
        if isinstance(node, A.FunctionDef) and node.name.startswith("test_"):
            names.append(node.name)
        if isinstance(node, A.ClassDef):
            bases = [getattr(b, "attr", getattr(b, "id", "")) for b in node.bases]
            if any(b.endswith("TestCase") for b in bases):
                names += [
                    f"{node.name}.{f.name}"
                    for f in node.body
                    if isinstance(f, A.FunctionDef) and f.name.startswith("test")
                ]
    return names


# ------------------------------------------------------------------------------------------ inside the child


def describe(error: BaseException, workdir: str) -> str:
    text = str(error)
    if isinstance(error, AssertionError) and text:
        return text
    where = ""
    tb = error.__traceback__
    while tb is not None:
        path = tb.tb_frame.f_code.co_filename
        if path.startswith(workdir):
            where = f" ({path[len(workdir) :].lstrip('/')}:{tb.tb_lineno})"
        tb = tb.tb_next
    kind = type(error).__name__
    return (f"{kind}: {text}" if text else kind) + where


def attempt(test: "Callable[[], object]", workdir: str) -> tuple[str, str]:
    """Run one callable; `(outcome, message)`."""
    try:
        test()
    except AssertionError as error:
        return "failed", describe(error, workdir)
    except BaseException as error:  # also SystemExit and KeyboardInterrupt of the tested code
        if type(error).__name__ == "SkipTest":
            return "skipped", str(error)
        return "error", describe(error, workdir)
    return "passed", ""


def code_of(value: object) -> object:
    """The code of a function, or of the one inside a classmethod, staticmethod or property."""
    inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
    return getattr(inner, "__code__", None)


class Framework:
    """`unittest` as it is when this is made: before any tested code.

    Whoever replaces a method of `TestCase` or `TestResult`, for good or for a moment, replaces none of those
    that tests run with: they are bound to each instance. `intact` tells whether a replacement is still there.
    """

    def __init__(self) -> None:
        unittest: Any = __import__("unittest")
        self.case, self.result, self.skip = unittest.TestCase, unittest.TestResult, unittest.SkipTest
        self.run = unittest.TestCase.run
        self.parts: list[tuple[Mapping[str, object], str, object, object]] = []
        self.known: list[tuple[type, frozenset[str]]] = []
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "unittest":
                self.remember(module.__dict__)
                for value in list(module.__dict__.values()):
                    if isinstance(value, type) and value.__module__.partition(".")[0] == "unittest":
                        self.remember(value.__dict__)
        self.methods = {base: self.functions(base) for base in (self.case, self.result)}
        self.watch(self.case)

    def functions(self, base: type) -> "dict[str, types.FunctionType]":
        found = {n: f for n, f in base.__dict__.items() if isinstance(f, types.FunctionType)}
        return {n: f for n, f in found.items() if not n.startswith("__")}

    def remember(self, space: "Mapping[str, object]") -> None:
        for key, value in list(space.items()):
            if callable(value) or code_of(value) is not None:
                self.parts.append((space, key, value, code_of(value)))

    def watch(self, case: type) -> None:
        """Notice from now on what is replaced in a class of tests, or put before what it inherits."""
        self.remember(case.__dict__)
        self.known.append((case, frozenset(case.__dict__)))

    def intact(self) -> bool:
        if any(s.get(key) is not value or code_of(value) is not code for s, key, value, code in self.parts):
            return False
        added = [n for case, names in self.known for n in case.__dict__ if n not in names]
        return not any(n in self.methods[self.case] or n.startswith("__") for n in added)

    def bind(self, instance: "Any", base: type) -> "Any":
        """Give an instance the remembered methods of `base` that its own classes do not define."""
        above = type(instance).__mro__[: type(instance).__mro__.index(base)]
        own = {name for kind in above for name in kind.__dict__}
        for name, function in self.methods[base].items():
            if name not in own:
                instance.__dict__[name] = function.__get__(instance)
        return instance

    def test(self, case: "Any", name: str) -> "Callable[[], object]":
        """A method of a `unittest.TestCase` as a plain callable."""

        def test() -> None:
            result = self.bind(self.result(), self.result)
            one = self.bind(case(name), self.case)
            one.run(result)
            if result.skipped or result.expectedFailures:
                raise self.skip("skipped or expected to fail")
            if result.failures or result.unexpectedSuccesses:
                text = result.failures[0][1] if result.failures else "unexpected success"
                raise AssertionError(text.strip().splitlines()[-1].replace("AssertionError: ", "", 1))
            if result.errors:
                raise RuntimeError(result.errors[0][1].strip().splitlines()[-1])

        return test

    def canary(self, name: str, function: "Callable[[], object]", workdir: str) -> "Callable[[], object]":
        """A canary that is also a method of a test case: an error unless both end alike, and then as both."""
        fails = attempt(function, workdir)[0] == "failed"
        size = len(name)

        def method(case: "Any") -> None:
            case.assertEqual(size, size + fails)  # noqa: PT009 (it is what the canary tries)

        as_case = self.test(type("Test" + name[5:], (self.case,), {name: method}), name)

        def test() -> None:
            if attempt(as_case, workdir)[0] != attempt(function, workdir)[0]:
                raise RuntimeError("the same canary ended in two ways")
            function()

        return test


def collect(
    module: types.ModuleType, first: list[str], last: list[str], framework: "Framework | None", workdir: str
) -> "list[tuple[str, Callable[[], object]]]":
    """Tests of a module in order, canaries around them: `[(name, callable)]`."""
    space = module.__dict__
    functions: dict[str, Callable[[], object]] = {
        n: f for n, f in space.items() if n.startswith("test_") and isinstance(f, types.FunctionType)
    }
    cases: list[tuple[str, Any]] = []
    if framework is not None:
        for name, case in list(space.items()):
            if isinstance(case, type) and issubclass(case, framework.case) and case is not framework.case:
                cases.append((name, case))
        for name in (*first, *last):
            if name in functions:
                functions[name] = framework.canary(name, functions[name], workdir)
    tests = [(n, functions[n]) for n in first if n in functions]
    tests += [(n, f) for n, f in functions.items() if n not in first and n not in last]
    for name, case in cases:
        assert framework is not None
        framework.watch(case)
        set_up = getattr(case, "setUpClass")  # noqa: B009 (mypy sees a plain type)
        if set_up.__func__ is not framework.case.setUpClass.__func__:
            tests.append((f"{name}.setUpClass", set_up))
        tests += [(f"{name}.{m}", framework.test(case, m)) for m in dir(case) if m.startswith("test")]
    return tests + [(n, functions[n]) for n in last if n in functions]


def child(path: str, code: types.CodeType, canaries: list[str], out: int, workdir: str, cases: bool) -> None:
    """Import one test file and run its tests, writing `outcome TAB name TAB message` lines to `out`. `cases`:
    the file has classes."""

    framework = Framework() if cases else None
    # What a result depends on, in tuples that only this frame holds; it looks for itself below.
    spaces: list[Mapping[str, object]] = [builtins.__dict__, globals(), Framework.__dict__]
    shared = tuple(
        (space, key, value, getattr(value, "__code__", None))
        for space in spaces
        for key, value in list(space.items())
    )
    write, try_, escaped = os.write, attempt, escape
    module = types.ModuleType(os.path.basename(path).rpartition(".")[0] or "tests")
    module.__file__ = path
    module.__dict__.update({"@same": same, "@differ": differ})
    sys.modules[module.__name__] = module
    half = len(canaries) // 2
    tests: list[tuple[str, Any]] = []
    outcome, message = try_(lambda: exec(code, module.__dict__), workdir)
    if outcome == "passed":
        if framework is None and "unittest" in sys.modules:
            framework = Framework()
        tests = collect(module, canaries[:half], canaries[half:], framework, workdir)
        names = [name for name, _ in tests]
    else:
        names = [""]
    for at, name in enumerate(names):
        if tests:
            outcome, message = try_(tests[at][1], workdir)
        if framework is not None and not framework.intact():
            outcome, message = "error", "the tested code replaced a part of unittest"
        for space, key, value, own in shared:
            if space.get(key) is not value or getattr(value, "__code__", None) is not own:
                outcome, message = "error", f"the tested code replaced {key}"
        if module.__dict__.get("@same") is not same or module.__dict__.get("@differ") is not differ:
            outcome, message = "error", "the tested code replaced how its results are compared"
        write(out, f"{outcome}\t{escaped(name)}\t{escaped(message[:MESSAGE_CHARS])}\n".encode("ascii"))
    write(out, DONE)
    for stream in (sys.stdout, sys.stderr):
        try:  # noqa: SIM105 (contextlib costs a millisecond)
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass


# ------------------------------------------------------------------------------------------------ the parent


def queued_ms(pid: int) -> float:
    """Milliseconds that a process was ready but had no CPU: contention, not its own slowness. -1 when
    unknown."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e6
    except (OSError, ValueError, IndexError):
        return -1.0


def run_file(
    path: str, code: types.CodeType, canaries: list[str], deadline: float, workdir: str, cases: bool
) -> tuple[bytes, str, float, float]:
    """Fork, run, reap. Returns `(result lines, ended, cpu_ms, queued_ms)`; `ended` is `ok`, `timeout` or a
    status."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            os.close(read_end)
            null = os.open("/dev/null", os.O_RDWR)
            for stream in (0, 1, 2) if canaries else (0,):  # a graded file's output is nobody's to read
                os.dup2(null, stream)
            if null != REPORT_FD:
                os.close(REPORT_FD)
            become_owner(workdir, int(sys.argv[2]))
            set_dumpable(1)
            child(path, code, canaries, write_end, workdir, cases)
        except BaseException:
            os._exit(70)
        os._exit(0)
    os.close(write_end)
    os.set_blocking(read_end, False)
    poll = select.poll()
    poll.register(read_end, select.POLLIN)
    data, open_, status, usage, waited = b"", True, None, None, -1.0
    while status is None:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        if open_ and poll.poll(min(left * 1000, 20)):
            chunk = os.read(read_end, 65536)
            data += chunk
            open_ = bool(chunk) and len(data) < RESULT_LIMIT
            continue
        if not open_:
            time.sleep(0.0003)
        waited = max(waited, queued_ms(pid))
        done, code_, usage_ = os.wait4(pid, os.WNOHANG)
        if done:
            status, usage = code_, usage_
    ended = "ok"
    if status is None:
        ended, waited = "timeout", queued_ms(pid)
    for target in (os.killpg, os.kill):
        try:  # noqa: SIM105
            target(pid, SIGKILL)
        except OSError:
            pass
    if status is None:
        _, status, usage = os.wait4(pid, 0)
    while open_:  # what was written before the end but not read yet
        try:
            chunk = os.read(read_end, 65536)
        except BlockingIOError:
            break
        data += chunk
        open_ = bool(chunk) and len(data) < RESULT_LIMIT
    os.close(read_end)
    if ended == "ok" and (status != 0 or not data.endswith(DONE)):
        ended = f"signal {status & 127}" if status & 127 else f"exit {status >> 8}"
    cpu_ms = (usage.ru_utime + usage.ru_stime) * 1000 if usage is not None else -1.0
    return data, ended, cpu_ms, waited


def outcomes(data: bytes, promised: list[str], ended: str) -> dict[str, tuple[str, str]]:
    """Worst outcome per test name; a promised test that never reported is an error."""
    found: dict[str, tuple[str, str]] = {}
    broken = ""
    for line in data.decode("ascii", "replace").split("\n")[:-1]:
        fields = line.split("\t")
        if fields == ["done", "", ""]:
            continue
        if len(fields) != 3 or fields[0] not in OUTCOMES:
            broken = "the result pipe carried something that is not a result"
            continue
        outcome, name, message = fields
        if name == "":
            broken = message
        elif name not in found or found[name][0] == "passed":
            found[name] = (outcome, message)
    for name in promised:
        if name not in found:
            reason = {"ok": "did not report", "timeout": "did not finish in time"}.get(
                ended, f"the test process ended early ({ended})"
            )
            found[name] = ("error", broken or reason)
        elif broken:
            found[name] = ("error", broken)
    return found


def canary_source(names: list[str]) -> str:
    return "".join(f"\ndef {n[1:]}():\n    assert {len(n)} == {len(n) + (n[0] == '-')}\n" for n in names)


def main() -> None:
    deadline = time.monotonic() + float(sys.argv[1])
    control = b""
    while len(control) < int(sys.argv[3]):  # exactly this many: the nonce behind it stays in the pipe
        piece = os.read(0, int(sys.argv[3]) - len(control))
        if not piece:
            os._exit(71)
        control += piece
    hidden = set_dumpable(0)
    workdir = os.getcwd()
    canaries = control.decode("ascii").split()
    names = [n[1:] for n in canaries]
    sys.dont_write_bytecode = True
    sys.path += [workdir]
    lines = [f"start\t{len(sys.argv) - 4}\t{int(hidden)}"]
    for path in sys.argv[4:]:
        digest, promised, code, problem = "", [], None, ""
        try:
            with open(path, "rb") as file:
                raw = file.read()
            digest = sha256(raw).hexdigest()
            text = raw.decode("utf-8") + "\n" + canary_source(canaries)
            tree = compile(text, path, "exec", ONLY_AST, True)
            promised = static_names(tree)
            rewrite(tree.body, text.split("\n"))
            code = compile(tree, path, "exec", 0, True)
        except (OSError, SyntaxError, ValueError, RecursionError) as error:
            problem = f"{type(error).__name__}: {error}"
        lines.append(f"file\t{escape(path)}\t{digest}\t{escape(problem)}")
        if code is None:
            continue
        folder = os.path.dirname(os.path.abspath(path))
        if folder not in sys.path:
            sys.path.insert(len(sys.path) - 1, folder)
        cases = any(isinstance(node, A.ClassDef) for node in tree.body)
        data, ended, cpu_ms, waited = run_file(path, code, names, deadline, workdir, cases)
        for name, (outcome, message) in outcomes(data, promised, ended).items():
            lines.append(f"test\t{escape(path)}\t{name}\t{outcome}\t{message}")
        lines.append(f"child\t{escape(path)}\t{ended}\t{cpu_ms:.1f}\t{waited:.1f}")
    lines.append(f"end\t{len(lines)}")
    nonce = b""
    while True:
        piece = os.read(0, 4096)
        if not piece:
            break
        nonce += piece
    mark = nonce.decode("ascii").strip()
    left = "".join(f"{mark}\t{line}\n" for line in lines).encode("ascii", "backslashreplace")
    while left:
        left = left[os.write(REPORT_FD, left) :]
    os._exit(0)


if __name__ == "__main__":
    main()
