"""Other formats become packages and come out again as they were; what is broken is named with its fix."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from format_samples import FAILS, PASSES, SAMPLES, harbor, lines, swebench, swebench_repo, terminal_bench
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ConfigError, TaskError
from agentrl.types import Split
from envs.tasks import package
from envs.tasks.formats import rows, table
from envs.tasks.formats.files import read_tree
from envs.tasks.formats.rows import Row

FOLDERS = {"swebench-repo": swebench_repo, "terminal-bench": terminal_bench}


@pytest.mark.parametrize("name", sorted(SAMPLES))
@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_rows_come_out_equal_after_import_export_and_import_again(
    tmp_path: Path, name: str, suffix: str
) -> None:
    first = SAMPLES[name]()
    src = lines(tmp_path / "rows.jsonl", first)
    (task,) = table.import_tasks(name, src, tmp_path / "suite")
    assert task.id.startswith(f"{name}/")
    assert task.grader.kind == "script"
    assert task.sandbox.network == "none"
    out = tmp_path / f"out.{suffix}"
    table.export_tasks(name, tmp_path / "suite", out)
    (row,) = rows.read(out)
    assert row.values == first
    assert list(row.values) == list(first)
    table.import_tasks(name, out, tmp_path / "again")
    assert package.revision_of(tmp_path / "again") == package.revision_of(tmp_path / "suite")


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_folders_come_out_byte_for_byte(tmp_path: Path, name: str) -> None:
    src = FOLDERS[name](tmp_path / "src")
    (task,) = table.import_tasks(name, src, tmp_path / "suite")
    assert task.id.startswith(f"{name}/")
    table.export_tasks(name, tmp_path / "suite", tmp_path / "out")
    assert read_tree(tmp_path / "out") == read_tree(src)
    table.import_tasks(name, tmp_path / "out", tmp_path / "again")
    assert package.revision_of(tmp_path / "again") == package.revision_of(tmp_path / "suite")


@pytest.mark.parametrize("version", ["1.0", "1.1", "1.2", "1.3", "1.4"])
def test_harbor_packages_keep_every_byte_and_unknown_key(tmp_path: Path, version: str) -> None:
    src = harbor(tmp_path / "src", version)
    (task,) = table.import_tasks("harbor", src, tmp_path / "suite")
    assert task.sandbox.image == "debian:12"
    table.export_tasks("harbor", tmp_path / "suite", tmp_path / "out")
    assert read_tree(tmp_path / "out") == read_tree(src)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
UNICODE = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)


@settings(max_examples=25, deadline=None)
@given(
    extra=st.dictionaries(UNICODE.filter(lambda key: key not in swebench()), JSON, max_size=4),
    statement=UNICODE,
    patch=UNICODE,
)
def test_whatever_else_a_row_holds_survives(
    tmp_path_factory: pytest.TempPathFactory, extra: dict[str, Any], statement: str, patch: str
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    first = swebench(problem_statement=statement, patch=patch, **extra)
    text = json.dumps(first)
    (folder / "a.jsonl").write_text(text + "\n")
    if "\\ud" in text and not _valid(first):
        return  # half a character can not be kept in a text file
    table.import_tasks("swebench", folder / "a.jsonl", folder / "suite")
    table.export_tasks("swebench", folder / "suite", folder / "b.jsonl")
    assert json.loads((folder / "b.jsonl").read_text()) == first


def _valid(row: dict[str, Any]) -> bool:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def test_what_was_changed_in_a_package_is_changed_in_the_row(tmp_path: Path) -> None:
    table.import_tasks("swebench", lines(tmp_path / "a.jsonl", swebench()), tmp_path / "suite")
    folder = tmp_path / "suite" / "acme__calc-1"
    (folder / "instruction.md").write_text("Mend add.\n")
    toml = folder / "task.toml"
    toml.write_text(toml.read_text().replace(f'pass_to_pass = ["{PASSES}"]', "pass_to_pass = []"))
    table.export_tasks("swebench", tmp_path / "suite", tmp_path / "b.jsonl")
    (row,) = rows.read(tmp_path / "b.jsonl")
    assert row.values == swebench(problem_statement="Mend add.\n", PASS_TO_PASS="[]")


def test_a_changed_instruction_of_a_terminal_bench_task_is_written_into_its_yaml(tmp_path: Path) -> None:
    table.import_tasks("terminal-bench", terminal_bench(tmp_path / "src"), tmp_path / "suite")
    (tmp_path / "suite" / "hello-world" / "instruction.md").write_text("Say hello.\n")
    table.export_tasks("terminal-bench", tmp_path / "suite", tmp_path / "out")
    facts = yaml.safe_load((tmp_path / "out" / "hello-world" / "task.yaml").read_text())
    assert (facts["instruction"], facts["difficulty"]) == ("Say hello.\n", "easy")


# ------------------------------------------------------------------------------------ what a task is made of


def test_a_swebench_task_has_its_published_image_and_guards_its_tests(tmp_path: Path) -> None:
    (task,) = table.import_tasks("swebench", lines(tmp_path / "a.jsonl", swebench()), tmp_path / "suite")
    assert task.sandbox.image == "swebench/sweb.eval.x86_64.acme_1776_calc-1:latest"
    assert (task.grader.fail_to_pass, task.grader.pass_to_pass) == ((FAILS,), (PASSES,))
    assert {".git", "tests/test_calc.py"} <= set(task.grader.protected_paths)
    assert task.split is Split.TRAIN
    script = (tmp_path / "suite" / "acme__calc-1" / "tests" / "eval.sh").read_text()
    assert "pytest -rA" in script
    assert "tests/test_calc.py" in script


def test_a_list_and_its_json_text_are_the_same_task(tmp_path: Path) -> None:
    listed = swebench(FAIL_TO_PASS=[FAILS], PASS_TO_PASS=[PASSES])
    (one,) = table.import_tasks("swebench", lines(tmp_path / "a.jsonl", swebench()), tmp_path / "a")
    (two,) = table.import_tasks("swebench", lines(tmp_path / "b.jsonl", listed), tmp_path / "b")
    assert one.grader == two.grader
    table.export_tasks("swebench", tmp_path / "b", tmp_path / "out.jsonl")
    assert rows.read(tmp_path / "out.jsonl")[0].values == listed


def test_the_patch_of_a_swesmith_row_is_the_bug_and_its_reverse_the_solution(tmp_path: Path) -> None:
    src = lines(tmp_path / "a.jsonl", SAMPLES["swesmith"]())
    (task,) = table.import_tasks("swesmith", src, tmp_path / "suite")
    folder = Path(task.path)
    docker = (folder / "environment" / "Dockerfile").read_text()
    assert docker.startswith("FROM swebench/swesmith.x86_64.acme_1776_calc.abc123\n")
    assert "rm -rf /tmp/bug.patch .git" in docker
    assert " -R /solution/bug.patch" in (folder / "solution" / "solve.sh").read_text()


def test_an_r2e_task_shows_only_the_issue_and_copies_no_test_as_its_solution(tmp_path: Path) -> None:
    src = lines(tmp_path / "a.jsonl", SAMPLES["r2egym"]())
    (task,) = table.import_tasks("r2egym", src, tmp_path / "suite")
    assert task.instruction == "\nadd subtracts.\n"
    kept = [path for path in read_tree(Path(task.path)) if path.startswith("solution/files/")]
    assert kept == ["solution/files/calc.py"]


def test_a_published_test_split_is_held_out(tmp_path: Path) -> None:
    src = swebench_repo(tmp_path / "src")
    assert table.import_tasks("swebench-repo", src, tmp_path / "a")[0].split is Split.HELDOUT
    (given_,) = table.import_tasks("swebench-repo", src, tmp_path / "b", split=Split.TRAIN)
    assert given_.split is Split.TRAIN


# -------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("name", "changes", "key", "fix"),
    [
        ("swebench", {"repo": None}, "repo", "Write text"),
        ("swebench", {"instance_id": "../../x"}, "instance_id", "Use letters"),
        ("swebench", {"FAIL_TO_PASS": "[1]"}, "FAIL_TO_PASS", "list of test names"),
        ("swebench", {"FAIL_TO_PASS": "not json"}, "FAIL_TO_PASS", "JSON list"),
        ("swebench", {"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS", "Name the tests"),
        ("swesmith", {"patch": " "}, "patch", "introduces the bug"),
        ("swesmith", {"problem_statement": None}, "problem_statement", "Generate"),
        ("r2egym", {"expected_output_json": "[]"}, "expected_output_json", "JSON object"),
        ("r2egym", {"parsed_commit_content": "{}"}, "parsed_commit_content", "file_diffs"),
    ],
)
def test_a_broken_row_is_named_with_its_line_key_and_fix(
    tmp_path: Path, name: str, changes: dict[str, Any], key: str, fix: str
) -> None:
    src = lines(tmp_path / "rows.jsonl", SAMPLES[name](), SAMPLES[name](**changes))
    with pytest.raises(TaskError) as caught:
        table.import_tasks(name, src, tmp_path / "suite")
    assert f"{src}:2: {key}: " in str(caught.value)
    assert fix in str(caught.value)
    assert not (tmp_path / "suite").exists()


@pytest.mark.parametrize("key", ["instance_id", "patch", "problem_statement", "base_commit"])
def test_a_missing_column_is_named(tmp_path: Path, key: str) -> None:
    row = {k: v for k, v in swebench().items() if k != key}
    with pytest.raises(TaskError, match=rf"rows.jsonl:1: {key}: is missing"):
        table.import_tasks("swebench", lines(tmp_path / "rows.jsonl", row), tmp_path / "suite")


@pytest.mark.parametrize(
    ("name", "file", "find", "put", "said"),
    [
        (
            "swebench-repo",
            "tasks/acme__calc-1/task.yaml",
            "eval_type: pass_and_fail\n",
            "",
            "eval_type: is missing",
        ),
        ("swebench-repo", "tasks/acme__calc-1/task.yaml", "repo: acme/calc", "repo: [", "syntax"),
        ("swebench-repo", "tasks/acme__calc-1/tests.json", '"FAIL_TO_PASS"', '"F2P"', "FAIL_TO_PASS"),
        ("swebench-repo", "tasks/acme__calc-1/eval.sh", ">>>>> Start", "Start", "marker"),
        (
            "terminal-bench",
            "hello-world/task.yaml",
            "instruction: |-",
            "instructions: |-",
            "instruction: is missing",
        ),
        ("terminal-bench", "hello-world/task.yaml", "360.0", "soon", "max_agent_timeout_sec"),
        (
            "terminal-bench",
            "hello-world/task.yaml",
            "parser_name: pytest",
            "parser_name: swe",
            "Known: pytest",
        ),
        ("harbor", "thing/task.toml", '"1.4"', '"9.9"', "schema_version"),
        ("harbor", "thing/task.toml", "allow_internet = false", "allow_internet = 'no'", "allow_internet"),
    ],
)
def test_a_broken_folder_is_named_with_file_key_and_fix(
    tmp_path: Path, name: str, file: str, find: str, put: str, said: str
) -> None:
    src = harbor(tmp_path / "src", "1.4") if name == "harbor" else FOLDERS[name](tmp_path / "src")
    broken = src / file
    assert find in broken.read_text()
    broken.write_text(broken.read_text().replace(find, put))
    with pytest.raises(TaskError) as caught:
        table.import_tasks(name, src, tmp_path / "suite")
    assert str(broken) in str(caught.value)
    assert said in str(caught.value)
    assert caught.value.fix


def test_twice_the_same_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="there twice"):
        table.import_tasks(
            "swebench", lines(tmp_path / "a.jsonl", swebench(), swebench()), tmp_path / "suite"
        )


def test_a_package_from_elsewhere_is_not_made_up_into_a_row(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"task.toml: metadata.source.format: .*write it as harbor"):
        table.export_tasks("swebench", harbor(tmp_path / "src", "1.4"), tmp_path / "rows.jsonl")


def test_an_unknown_format_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'swebench'"):
        table.import_tasks("swe-bench", tmp_path, tmp_path / "out")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    src = lines(tmp_path / "a.jsonl", swebench())
    table.import_tasks("swebench", src, tmp_path / "suite")
    with pytest.raises(TaskError, match="not empty"):
        table.import_tasks("swebench", src, tmp_path / "suite")
    with pytest.raises(TaskError, match="exists"):
        table.export_tasks("swebench", tmp_path / "suite", src)


def test_a_patch_can_not_write_outside_its_package(tmp_path: Path) -> None:
    diffs = [{"header": {"file": {"path": "../../x"}}, "new_file_content": "y"}]
    row = SAMPLES["r2egym"](parsed_commit_content=json.dumps({"file_diffs": diffs}))
    with pytest.raises(TaskError, match="leaves the repository"):
        table.import_tasks("r2egym", lines(tmp_path / "a.jsonl", row), tmp_path / "suite")


def test_parquet_without_its_package_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.parquet"
    file.write_bytes(b"PAR1")

    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(rows, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install 'agentrl\[parquet\]'"):
        rows.read(file)


def test_parquet_rows_come_out_equal(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    rows.write(tmp_path / "a.parquet", [swebench(image_assets=None)])
    table.import_tasks("swebench", tmp_path / "a.parquet", tmp_path / "suite")
    table.export_tasks("swebench", tmp_path / "suite", tmp_path / "b.parquet")
    assert rows.read(tmp_path / "b.parquet")[0].values == swebench(image_assets=None)


def test_the_order_of_columns_is_kept_and_an_unheld_one_is_not_invented() -> None:
    row = Row("here", {"b": 1, "patch": "p", "a": None, "c": float("inf")})
    source = rows.held("x", row, ("patch",))
    assert list(rows.restored(source, {"patch": "p"}).items()) == list(row.values.items())
    assert "patch" not in rows.restored(source, {})


# ------------------------------------------------------------------------------------------- the command line


def test_the_verbs_import_and_export(tmp_path: Path, typed) -> None:
    src = lines(tmp_path / "rows.jsonl", swebench())
    done = typed("tasks", "import", "swebench", src, tmp_path / "suite", "--split", "heldout", "--json")
    assert json.loads(done.stdout)["tasks"] == ["swebench/acme__calc-1"]
    assert package.load_suite(tmp_path / "suite")[0].split is Split.HELDOUT
    done = typed("tasks", "export", "swebench", tmp_path / "suite", tmp_path / "out.jsonl")
    assert done.exit_code == 0
    assert rows.read(tmp_path / "out.jsonl")[0].values == swebench()
    shutil.rmtree(tmp_path / "suite")
    wrong = typed("tasks", "import", "swebench", lines(src, swebench(repo=3)), tmp_path / "suite")
    assert wrong.exit_code == 2
    assert "repo: is int, not text" in wrong.output.replace("\n", " ")
