"""Graders as plug-ins: each by numbers worked out by hand; what can not be judged is never a number."""

from __future__ import annotations

import asyncio
import importlib.metadata
import itertools
import json
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from faulty_backend import FIX, KEY, SOLVE, attempt, small_task

from agentrl.errors import BoundaryError, ModelError, TaskError
from agentrl.types import Action, EvidenceKey, ExecStatus, GraderUse, Observation, Task
from envs.admission import admit
from envs.graders import registry, rubric
from envs.graders.agreement import cohen_kappa, krippendorff_alpha
from envs.graders.contract import Attempt, Graded, TestsSeen
from envs.graders.similarity import normalized, similarity
from envs.grading import verify_signature
from envs.sandbox.contract import ExecRequest, ExecResult, FileChange, StreamCapture
from envs.sandbox.plain import PlainBackend
from envs.tasks.package import load_task

SUBMIT = ("submit", {})
PATCH = """\
diff --git a/cart.py b/cart.py
index 1111111..2222222 100644
--- a/cart.py
+++ b/cart.py
@@ -1,3 +1,3 @@
 def total(a, b):
     \"\"\"Combine a and b.\"\"\"
-    return a - b
+    return a + b
"""


NOTHING = StreamCapture(bytes_total=0, head=b"", tail=b"", truncated=False, sha256="")


def use(kind: str, *, name: str = "it", weight: float = 1.0, **options: Any) -> dict[str, Any]:
    return {"name": name, "use": kind, "weight": weight, "options": options}


TESTS = use("tests", name="fixed", weight=0.75)


def graded_task(folder: Path, *uses: dict[str, Any], **more: Any) -> Task:
    return small_task(folder, grader="graders", graders=list(uses), **more)


def fixed(task: Task) -> FileChange:
    text = (Path(task.path) / "environment" / "cart.py").read_text().replace("a - b", "a + b")
    return FileChange(path="cart.py", kind="file", content=text.encode())


def looking(
    task: Task,
    *changes: FileChange,
    steps: Any = (),
    ends: Callable[[ExecRequest], ExecResult] | None = None,
) -> Attempt:
    """An attempt without a sandbox."""

    async def run(request: ExecRequest) -> ExecResult:
        assert ends is not None
        return ends(request)

    async def run_tests(fails: tuple[str, ...], passes: tuple[str, ...]) -> TestsSeen:
        raise AssertionError("no tests here")

    return Attempt(task=task, session="s", changes=changes, steps=steps, run=run, run_tests=run_tests)


def said(kind: str, looked: Attempt, **options: Any) -> Graded:
    grader = registry.make(GraderUse(name="it", use=kind, options=options))
    return asyncio.run(grader.grade(looked))


# -------------------------------------------------------------------------------------- in the signed verdict


def test_the_reward_is_the_weighted_sum_and_rests_on_all_ten_pieces_of_evidence(tmp_path: Path) -> None:
    task = graded_task(
        tmp_path / "t",
        TESTS,
        use("patch-similarity", name="close", weight=0.25),
        use(
            "process",
            name="care",
            weight=0.5,
            rules=[{"tool": "run_tests", "contains": "PASSED", "value": 0.2, "once": True}],
        ),
        use("exit-code", name="compiles", weight=0.0, argv=["python3", "-m", "py_compile", "cart.py"]),
    )
    (Path(task.path) / "solution" / "gold.patch").write_text(PATCH)
    task = load_task(task.path)
    verdict = attempt(task, ("run_tests", {}), FIX, ("run_tests", {}), ("run_tests", {}), SUBMIT)
    assert verdict.fault is None, verdict.fault
    assert verdict.components == {
        "fixed": 1.0,
        "fixed/passed": 1.0,
        "close": 1.0,
        "care": 0.2,
        "care/step/0002": 0.5 * 0.2,
        "compiles": 1.0,
    }
    assert verdict.reward == pytest.approx(0.75 * 1 + 0.25 * 1 + 0.5 * 0.2)
    assert {link.key for link in verdict.evidence if link.holds} == set(EvidenceKey)
    facts = {link.key: link.facts for link in verdict.evidence}[EvidenceKey.E8_REPORT_COMPLETE]
    assert (facts["fixed.canaries"], facts["care.steps"], facts["compiles.exit_code"]) == ("behaved", 5, 0)
    assert len(verdict.tests) == 3
    assert verify_signature(verdict, KEY)
    assert not verify_signature(replace(verdict, components={**verdict.components, "close": 0.5}), KEY)


def test_doing_nothing_earns_what_doing_nothing_is_worth(tmp_path: Path) -> None:
    task = graded_task(
        tmp_path / "t", TESTS, use("patch-similarity", name="close", weight=0.25, oracle="solve.sh")
    )
    verdict = attempt(task, SUBMIT)
    assert (verdict.reward, verdict.components["fixed"], verdict.components["close"]) == (0.0, 0.0, 0.0)


class Broken:
    """A plug-in of somebody else that fails in the way it is told to."""

    decides = True

    def __init__(self, how: str = "raise") -> None:
        self._how = how

    async def grade(self, looked: Attempt) -> Any:
        match self._how:
            case "raise":
                raise KeyError("inside")
            case "boundary":
                raise ModelError("no answer", code="judge_failed")
            case "nothing":
                return None
            case "right":
                return Graded(value=1.0, facts={"seen": len(looked.changes)})
            case how:
                return Graded(value=float(how))


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """`test-broken` as the entry point of an installed package."""
    point = importlib.metadata.EntryPoint("test-broken", "test_graders:Broken", registry.GROUP)
    monkeypatch.setattr(registry, "_points", lambda: {"test-broken": point})


@pytest.mark.parametrize(
    ("how", "owner", "code"),
    [
        ("raise", "task", "grader_raised"),
        ("nothing", "task", "reward_not_finite"),
        ("nan", "task", "reward_not_finite"),
        ("inf", "task", "reward_not_finite"),
        ("boundary", "model", "judge_failed"),
    ],
)
def test_no_fault_of_a_grader_becomes_a_reward(
    plugin: None, tmp_path: Path, how: str, owner: str, code: str
) -> None:
    task = graded_task(tmp_path / "t", TESTS, use("test-broken", name="odd", weight=0.0, how=how))
    verdict = attempt(task, FIX, SUBMIT)
    assert verdict.reward is None
    assert verdict.components == {}
    assert verdict.fault is not None
    assert (verdict.fault.owner, verdict.fault.code) == (owner, code)


def test_a_grader_of_an_installed_package_is_a_component_like_any(plugin: None, tmp_path: Path) -> None:
    task = graded_task(tmp_path / "t", use("test-broken", name="odd", weight=2.0, how="right"))
    verdict = attempt(task, FIX, SUBMIT)
    assert (verdict.reward, verdict.components) == (2.0, {"odd": 1.0})
    assert "test-broken" in registry.names()


def test_forged_tests_leave_no_reward_whatever_the_other_graders_say(tmp_path: Path) -> None:
    task = graded_task(tmp_path / "t", TESTS, use("patch-similarity", name="close", oracle="solve.sh"))
    forged = (
        "import os, sys\nframe = sys._getframe()\nwhile frame:\n    out = frame.f_locals.get('out')\n"
        "    if isinstance(out, int):\n        names = [n for n in frame.f_locals['code'].co_names"
        " if n.startswith('test_')]\n        os.write(out, ''.join(f'passed\\t{n}\\t\\n' for n in names)"
        ".encode())\n        os._exit(0)\n    frame = frame.f_back\n"
    )
    write = ("bash", {"command": f"cat > cart.py <<'PY'\n{forged}PY"})
    verdict = attempt(task, write, SUBMIT)
    assert verdict.reward in (None, 0.0) or verdict.components["fixed"] < 1.0
    if verdict.reward is None:
        assert verdict.flags == ("verifier_untrusted",)


def test_admission_asks_only_graders_that_decide(tmp_path: Path) -> None:
    care = use("process", name="care", rules=[{"tool": "run_tests", "value": 1.0}])
    task = graded_task(tmp_path / "t", TESTS, care)

    async def run() -> None:
        backend = PlainBackend()
        try:
            admission = await admit(task, backend, light=True)
            assert admission.valid, admission.reasons
        finally:
            await backend.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("uses", "told", "fix"),
    [
        ([], "graders: is missing", "metadata.agentrl.graders"),
        ([use("test")], "no grader 'test'", "Did you mean 'tests'"),
        ([use("tests", shar=True)], "no option shar", "Did you mean 'share'"),
        ([use("tests", share=[])], "option share", "Correct"),
        ([use("exit-code")], "argv", "Correct"),
        ([{**use("tests"), "wieght": 1}], "wieght", "Correct"),
        ([use("tests"), use("tests")], "a name twice", "of its own"),
        ([use("process", rules=[{"value": 1.0}])], "none that decides", "such as tests"),
    ],
)
def test_a_wrong_grader_is_named_with_its_file_and_fix(
    tmp_path: Path, uses: list[dict[str, Any]], told: str, fix: str
) -> None:
    with pytest.raises(TaskError) as caught:
        graded_task(tmp_path / "t", *uses)
    assert f"{tmp_path}/t/task.toml: metadata.agentrl.graders" in str(caught.value)
    assert told in str(caught.value)
    assert fix in str(caught.value)


# --------------------------------------------------------------------------------------------- each by itself


def ended(status: ExecStatus, code: int | None = None) -> ExecResult:
    return ExecResult(
        exec_id="x",
        status=status,
        exit_code=code,
        signal=None,
        stdout=NOTHING,
        stderr=NOTHING,
        cpu_ms=1.0,
        memory_peak_kib=None,
        wall_ms=1.0,
    )


@pytest.mark.parametrize(
    ("status", "code", "value"),
    [
        (ExecStatus.EXITED, 3, 1.0),
        (ExecStatus.EXITED, 0, 0.0),
        (ExecStatus.TIMEOUT, None, 0.0),
        (ExecStatus.SIGNALED, None, 0.0),
    ],
)
def test_only_the_expected_exit_code_is_right(
    task: Task, status: ExecStatus, code: int | None, value: float
) -> None:
    looked = looking(task, ends=lambda request: ended(status, code))
    assert said("exit-code", looked, argv=["x"], expected=3).value == value


def file(path: str, content: str, kind: Any = "file") -> FileChange:
    return FileChange(path=path, kind=kind, content=content.encode())


@pytest.mark.parametrize(
    ("change", "mode", "value"),
    [
        (file("out.json", '{"b": 1,\n "a": [true]}'), "json", 1.0),
        (file("out.json", '{"b": 1, "a": [1]}'), "json", 0.0),
        (file("out.json", "not json"), "json", 0.0),
        (file("out.json", '{"a": [true], "b": 1}  \n\n'), "text", 1.0),
        (file("out.json", '{"a": [true], "b": 1}\n\n'), "bytes", 0.0),
        (file("out.json", "/tests/out.json", "symlink"), "text", 0.0),
        (FileChange(path="out.json", kind="deleted"), "text", 0.0),
        (file("other", ""), "text", 0.0),
    ],
)
def test_a_file_is_compared_as_it_was_left_and_no_link_is_followed(
    tmp_path: Path, change: FileChange, mode: str, value: float
) -> None:
    task = small_task(tmp_path / "t", tests={"out.json": '{"a": [true], "b": 1}\n'})
    assert (
        said("file-equal", looking(task, change), path="out.json", expected="out.json", mode=mode).value
        == value
    )


def test_a_file_below_a_folder_that_became_a_link_is_not_there(tmp_path: Path) -> None:
    task = small_task(tmp_path / "t", environment={"out/a.txt": "1\n"}, tests={"a.txt": "1\n"})
    options = {"path": "out/a.txt", "expected": "a.txt"}
    assert said("file-equal", looking(task), **options).value == 1.0
    assert said("file-equal", looking(task, file("out", "/tests", "symlink")), **options).value == 0.0


def test_a_file_that_the_task_forgot_is_the_tasks_fault(task: Task) -> None:
    with pytest.raises(TaskError, match=r"tests/gone: is missing"):
        said("file-equal", looking(task), path="cart.py", expected="gone")


def database(folder: Path, *rows: tuple[int, str]) -> bytes:
    folder.mkdir(exist_ok=True)
    path = folder / "made.db"
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t (n INTEGER, s TEXT)")
    connection.executemany("INSERT INTO t VALUES (?, ?)", rows)
    connection.commit()
    connection.close()
    return path.read_bytes()


def test_sql_compares_what_queries_return(tmp_path: Path) -> None:
    right = database(tmp_path / "db", (1, "a"), (2, "b"))
    task = small_task(tmp_path / "t")
    (Path(task.path) / "tests" / "r.db").write_bytes(right)
    query = "SELECT s, n FROM t"

    def answered(text: str) -> float:
        options = {"answer": "a.sql", "database": "r.db", "query": query}
        return said("sql-equal", looking(task, file("a.sql", text)), **options).value

    assert answered("SELECT s, n FROM t ORDER BY n DESC;") == 1.0
    assert [answered(text) for text in ("SELECT n, s FROM t", "nonsense", "DROP TABLE t", "")] == [0.0] * 4
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*), '' FROM c"
    assert answered(endless) == 0.0

    def changed(raw: bytes) -> float:
        change = FileChange(path="w.db", kind="file", content=raw)
        options = {"database": "w.db", "reference": "r.db", "query": query}
        return said("sql-equal", looking(task, change), **options).value

    assert changed(database(tmp_path / "db", (2, "b"), (1, "a"))) == 1.0
    assert changed(database(tmp_path / "db", (1, "a"))) == 0.0
    assert changed(b"not a database, at all" * 100) == 0.0
    with pytest.raises(TaskError, match="own query fails"):
        said(
            "sql-equal", looking(task, file("a.sql", "x")), answer="a.sql", database="r.db", query="SELECT z"
        )
    with pytest.raises(TaskError, match="either answer or reference"):
        said("sql-equal", looking(task), database="r.db", query=query)


def test_a_patch_is_as_similar_as_its_normalized_text(tmp_path: Path) -> None:
    task = small_task(tmp_path / "t")
    (Path(task.path) / "solution" / "gold.patch").write_text(PATCH)
    assert said("patch-similarity", looking(task, fixed(task))).value == 1.0
    assert said("patch-similarity", looking(task)).value == 0.0
    other = file("cart.py", 'def total(a, b):\n    """Combine a and b."""\n    return b\n')
    assert 0.8 < said("patch-similarity", looking(task, other)).value < 1.0
    assert normalized(PATCH).splitlines()[:3] == ["--- cart.py", "+++ cart.py", "@@"]
    # 2·|"ab"| / (|"abc"| + |"abd"|), by hand
    assert similarity("abc", "abd") == pytest.approx(4 / 6)


def step(tool: str, text: str = "", is_error: bool = False) -> tuple[Action, Observation]:
    return Action(id="a", tool=tool), Observation(action_id="a", text=text, is_error=is_error)


def test_every_step_earns_what_its_rules_say_within_bounds(task: Task) -> None:
    rules = [
        {"tool": "run_tests", "value": 0.25, "once": True},
        {"is_error": True, "value": -0.5},
        {"contains": "PASSED", "value": 0.125},
    ]
    steps = (step("run_tests", "FAILED"), step("bash", "x", True), step("run_tests", "PASSED"))
    graded = said("process", looking(task, steps=steps), rules=rules)
    assert graded.value == 0.25 - 0.5 + 0.125
    assert graded.components == {"step/0000": 0.25, "step/0001": -0.5, "step/0002": 0.125}
    cut = said("process", looking(task, steps=steps * 9), rules=rules)
    assert cut.value == -1.0
    assert sum(cut.components.values()) == pytest.approx(-1.0), "the parts are cut with the sum"
    whole = 0.25 + 9 * (0.125 - 0.5)
    assert cut.components["step/0001"] == pytest.approx(-0.5 / -whole)
    with pytest.raises(BoundaryError, match="not all known"):
        said("process", looking(task, steps=None), rules=rules)


# ------------------------------------------------------------------------------------------------ the rubric

CRITERIA = [{"name": "right", "text": "It adds.", "weight": 3.0}, {"name": "small", "text": "One line."}]


def judge(*answers: str) -> Callable[[str], Awaitable[str]]:
    left = itertools.cycle(answers)
    prompts: list[str] = []

    async def ask(prompt: str) -> str:
        prompts.append(prompt)
        return next(left)

    ask.prompts = prompts  # type: ignore[attr-defined]
    return ask


def rated(right: float, small: float) -> str:
    return f"Here you are: {json.dumps({'right': right, 'small': small})}"


@pytest.fixture
def judges(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    known: dict[str, Any] = {}
    monkeypatch.setattr(rubric, "_JUDGES", known)
    return known


def test_criteria_are_weighted_means_of_their_ratings_with_the_agreement_beside(
    judges: dict[str, Any], task: Task
) -> None:
    rubric.register("kind", judge(rated(1, 1)))
    rubric.register("strict", judge(rated(1, 0.5)))
    looked = looking(task, fixed(task))
    graded = said("rubric", looked, criteria=CRITERIA, judges=["kind", "strict"])
    assert graded.components == {"right": 1.0, "small": 0.75}
    assert graded.value == pytest.approx((3 * 1.0 + 0.75) / 4)
    # Units (1, 1) and (1, 0.5): D_o = 0.5, D_e = 2·3·1·0.25 / 3 = 0.5, so alpha = 0.
    assert graded.facts == {"raters": 2, "krippendorff_alpha": 0.0, "cohen_kappa": 1.0}
    (prompt,) = judges["kind"].prompts
    assert "+    return a + b" in prompt
    assert "Fix total." in prompt
    assert SOLVE not in prompt


def test_one_judge_asked_again_is_several_raters(judges: dict[str, Any], task: Task) -> None:
    rubric.register("one", judge(rated(1, 0), rated(1, 0), rated(1, 0)))
    graded = said("rubric", looking(task), criteria=CRITERIA, judges=["one"], repeats=3)
    assert (graded.facts["raters"], graded.facts["krippendorff_alpha"]) == (3, 1.0)


@pytest.mark.parametrize(
    ("answers", "options", "code"),
    [
        (["I like it"], {}, "judge_unreadable"),
        ([rated(2, 0)], {}, "judge_unreadable"),
        (['{"right": 1}'], {}, "judge_unreadable"),
        (['{"right": true, "small": 1}'], {}, "judge_unreadable"),
        ([rated(1, 0), rated(0, 1)], {"repeats": 2, "min_alpha": 0.5}, "judges_disagree"),
    ],
)
def test_a_judge_that_can_not_be_believed_is_a_fault_of_the_model(
    judges: dict[str, Any], task: Task, answers: list[str], options: dict[str, Any], code: str
) -> None:
    rubric.register("odd", judge(*answers))
    with pytest.raises(ModelError) as caught:
        said("rubric", looking(task), criteria=CRITERIA, judges=["odd"], **options)
    assert (caught.value.owner, caught.value.code) == ("model", code)


def test_an_unreadable_answer_is_asked_for_once_more(judges: dict[str, Any], task: Task) -> None:
    rubric.register("slip", judge("Well…", rated(1, 1)))
    assert said("rubric", looking(task), criteria=CRITERIA, judges=["slip"]).value == 1.0


def test_a_judge_that_is_not_there_says_so(judges: dict[str, Any], task: Task) -> None:
    with pytest.raises(TaskError, match="Register one"):
        said("rubric", looking(task), criteria=CRITERIA, judges=["nobody"])
    with pytest.raises(ModelError, match="did not answer"):
        said("rubric", looking(task), criteria=CRITERIA, judges=["http://127.0.0.1:1/v1#m"])


def test_agreement_by_numbers_from_the_literature() -> None:
    # Cohen: 20 both yes, 15 both no, 5 and 10 split, of 50: p_o = 0.7, p_e = 0.5.
    one = [1.0] * 20 + [1.0] * 5 + [0.0] * 10 + [0.0] * 15
    two = [1.0] * 20 + [0.0] * 5 + [1.0] * 10 + [0.0] * 15
    assert cohen_kappa(one, two) == pytest.approx(0.4)
    assert cohen_kappa([1.0, 1.0], [1.0, 1.0]) == 1.0
    # Krippendorff (2011), example C: four observers, twelve units, gaps; nominal 0.743, interval 0.849.
    n = None
    rows = [
        [1, 2, 3, 3, 2, 1, 4, 1, 2, n, n, n],
        [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, n, 3],
        [n, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, n],
        [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, n],
    ]
    assert krippendorff_alpha(rows) == pytest.approx(0.743, abs=5e-4)
    assert krippendorff_alpha(rows, "interval") == pytest.approx(0.849, abs=5e-4)
    with pytest.raises(ValueError, match="rated twice"):
        krippendorff_alpha([[1.0, None], [None, 1.0]])


@pytest.fixture
def judging_server() -> Iterator[tuple[str, list[str | None]]]:
    """A server that rates everything in full, and the authorization of each request."""
    seen: list[str | None] = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            seen.append(self.headers["authorization"])
            body = json.dumps({"choices": [{"message": {"content": rated(1, 1)}}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1#m", seen
        server.shutdown()
        thread.join(timeout=10)


def test_the_key_of_a_judge_comes_from_the_variable_that_the_grader_names(
    task: Task, judging_server: tuple[str, list[str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, seen = judging_server
    options: dict[str, Any] = {"criteria": CRITERIA, "judges": [url]}
    assert said("rubric", looking(task), **options).value == 1.0
    monkeypatch.setenv("AGENTRL_MY_JUDGE", "a secret key")
    assert said("rubric", looking(task), key_from="AGENTRL_MY_JUDGE", **options).value == 1.0
    assert seen == [None, "Bearer a secret key"]
    monkeypatch.delenv("AGENTRL_MY_JUDGE")
    with pytest.raises(ModelError, match="AGENTRL_MY_JUDGE, which is not set") as caught:
        said("rubric", looking(task), key_from="AGENTRL_MY_JUDGE", **options)
    assert (caught.value.code, len(seen)) == ("judge_key", 2)


def test_a_task_can_not_name_a_secret_that_is_not_a_judges(task: Task) -> None:
    with pytest.raises(TaskError, match="key_from"):
        said("rubric", looking(task), criteria=CRITERIA, judges=["x"], key_from="HOME")
