"""Imported tasks can be graded: the log judge by hand-made logs, and whole packages in real sandboxes."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from format_samples import (
    EVAL,
    FAILS,
    PASSES,
    REPOSITORY,
    SAMPLES,
    TEST_FILE,
    TEST_PATCH,
    lines,
    swebench,
    swebench_repo,
    terminal_bench,
)

from envs.admission import admit
from envs.evidence import Admission
from envs.sandbox.local import LocalBackend
from envs.tasks import package
from envs.tasks.formats import judge, repository, table

MARKED = "+ : '>>>>> Start Test Output'\n{}\n+ : '>>>>> End Test Output'\n"


def expected(fails: list[str], passes: list[str], parser: str = "pytest") -> dict[str, Any]:
    return {"parser": parser, "markers": True, "fail_to_pass": fails, "pass_to_pass": passes}


@pytest.mark.parametrize(
    ("log", "reward"),
    [
        (f"PASSED {FAILS}\nPASSED {PASSES}", 1.0),
        (f"{FAILS} PASSED   [ 50%]\n{PASSES} PASSED [100%]", 1.0),
        (f"\x1b[32mPASSED\x1b[0m {FAILS}\nXFAIL {PASSES}", 1.0),
        (f"PASSED {FAILS}\nSKIPPED {PASSES}", 1.0),
        (f"SKIPPED {FAILS}\nPASSED {PASSES}", 0.0),
        (f"PASSED {FAILS}\nFAILED {PASSES} - assert 1 == 2", 0.0),
        (f"PASSED {FAILS}", 0.0),
        (f"PASSED {FAILS}\nPASSED {FAILS}\nERROR {FAILS}\nPASSED {PASSES}", 0.0),
        ("", 0.0),
    ],
)
def test_tests_are_judged_by_name_and_a_missing_one_has_not_passed(log: str, reward: float) -> None:
    parts = judge.judged(MARKED.format(log), expected([FAILS], [PASSES]))
    assert parts is not None
    assert parts["reward"] == reward


def test_what_was_printed_outside_the_markers_does_not_count() -> None:
    forged = f"PASSED {FAILS}\n" + MARKED.format("") + f"PASSED {FAILS}\n"
    parts = judge.judged(forged, expected([FAILS], []))
    assert parts == {"fail_to_pass": 0.0, "pass_to_pass": 1.0, "reward": 0.0}


@pytest.mark.parametrize(
    ("log", "wanted"),
    [
        ("error: patch failed: calc.py:1\n", expected([FAILS], [])),
        (MARKED.format("whatever"), expected([FAILS], [], "karma")),
        ("pip: no network", {"parser": "pytest"}),
        ("bash: run_tests.sh: not found", {"parser": "r2e", "markers": True, "outcomes": {"a": "PASSED"}}),
    ],
)
def test_a_log_that_can_not_be_judged_leaves_no_reward(log: str, wanted: dict[str, Any]) -> None:
    assert judge.judged(log, wanted) is None


def test_names_that_a_data_set_cut_off_match_by_prefix_and_all_must_pass() -> None:
    wanted = expected(["t.py::test_a[log(photon"], ["t.py::test_b[/file.txt]", "t.py::test_c[a"])
    right = "PASSED t.py::test_a[log(photon / s)]\nPASSED t.py::test_b[/deep/in/file.txt]"
    right += "\nPASSED t.py::test_c[a b]"
    assert judge.judged(MARKED.format(right), wanted)["reward"] == 1.0  # type: ignore[index]
    wrong = right + "\nFAILED t.py::test_a[log(photon * s)]"
    assert judge.judged(MARKED.format(wrong), wanted)["reward"] == 0.0  # type: ignore[index]


def test_django_and_sympy_logs_are_read() -> None:
    django = "test_a (admin.tests.T) ... ok\ntest_b (admin.tests.T) ... FAIL\ntest_c (x.T) ... skipped 'no'\n"
    assert judge.unittest(django) == {
        "test_a (admin.tests.T)": "PASSED",
        "test_b (admin.tests.T)": "FAILED",
        "test_c (x.T)": "SKIPPED",
    }
    assert judge.sympy("test_x ok\ntest_y F\ntest_z f\n") == {
        "test_x": "PASSED",
        "test_y": "FAILED",
        "test_z": "XFAIL",
    }


def test_r2e_outcomes_must_be_exactly_those_expected() -> None:
    wanted = {"parser": "r2e", "markers": True, "outcomes": {"T.test_a": "PASSED", "test_b - x": "FAILED"}}
    head = "noise\n==== short test summary info ====\n"
    same = head + "PASSED r2e_tests/t.py::T::test_a\nFAILED r2e_tests/t.py::test_b - assert 0"
    assert judge.judged(MARKED.format(same), wanted) == {"reward": 1.0, "share": 1.0}
    better = head + "PASSED r2e_tests/t.py::T::test_a\nPASSED r2e_tests/t.py::test_b"
    assert judge.judged(MARKED.format(better), wanted) == {"reward": 0.0, "share": 0.5}
    more = same + "\nPASSED r2e_tests/t.py::test_new"
    assert judge.judged(MARKED.format(more), wanted) == {"reward": 0.0, "share": 1.0}
    assert judge.judged(MARKED.format("crashed"), wanted) == {"reward": 0.0, "share": 0.0}


def test_names_of_parsers() -> None:
    assert [repository.parser_of(f"parse_log_{n}") for n in ("pytest_v2", "django", "karma")] == [
        *("pytest", "unittest", "karma")
    ]


def test_files_of_a_patch() -> None:
    renamed = "diff --git a/x.py b/y.py\nrename from x.py\nrename to y.py\n"
    added = "diff --git a/n.py b/n.py\n--- /dev/null\n+++ b/n.py\n"
    assert repository.patched(TEST_PATCH + renamed + added) == ("n.py", TEST_FILE, "x.py", "y.py")


# ---------------------------------------------------------------------------------------- in real sandboxes


def laid(folder: Path, files: dict[str, str], **evaluated: str) -> None:
    """Puts the code of the image there is no registry for into `environment/`."""
    toml = tomlkit.parse((folder / "task.toml").read_text())
    toml["environment"].pop("docker_image", None)  # type: ignore[union-attr]
    toml["environment"]["network_mode"] = "no-network"  # type: ignore[index]
    toml["environment"]["memory_mb"] = 512  # type: ignore[index]
    toml["environment"]["storage_mb"] = 64  # type: ignore[index]
    (folder / "task.toml").write_text(tomlkit.dumps(toml))
    shutil.rmtree(folder / "environment", ignore_errors=True)
    for name, content in files.items():
        target = folder / "environment" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)
    script = folder / "tests" / "eval.sh"
    for find, put in evaluated.items():
        assert find in script.read_text()
        script.write_text(script.read_text().replace(find, put))


def admitted(backend: LocalBackend, folder: Path, *, light: bool = True) -> Admission:
    async def run() -> Admission:
        try:
            return await admit(package.load_task(folder), backend, repeats=1, light=light)
        finally:
            await backend.close()

    return asyncio.run(run())


PYTEST = "python -m pytest -rA --color=no -p no:cacheprovider"
FIXED = {**REPOSITORY, TEST_FILE: REPOSITORY[TEST_FILE] + "\n\ndef test_add():\n    assert add(1, 2) == 3\n"}


def _swebench(tmp_path: Path) -> Path:
    row = swebench(eval_script=EVAL.format(patch=TEST_PATCH, file=TEST_FILE), log_parser="parse_log_pytest")
    table.import_tasks("swebench", lines(tmp_path / "a.jsonl", row), tmp_path / "suite")
    laid(tmp_path / "suite" / "acme__calc-1", REPOSITORY)
    return tmp_path / "suite" / "acme__calc-1"


def _old_swebench(tmp_path: Path) -> Path:
    table.import_tasks("swebench", lines(tmp_path / "a.jsonl", swebench()), tmp_path / "suite")
    laid(tmp_path / "suite" / "acme__calc-1", REPOSITORY, **{PYTEST: "python3 run_tests.py"})
    return tmp_path / "suite" / "acme__calc-1"


def _swebench_repo(tmp_path: Path) -> Path:
    table.import_tasks("swebench-repo", swebench_repo(tmp_path / "src"), tmp_path / "suite")
    laid(tmp_path / "suite" / "acme__calc-1", REPOSITORY)
    return tmp_path / "suite" / "acme__calc-1"


def _swesmith(tmp_path: Path) -> Path:
    row = SAMPLES["swesmith"]()
    table.import_tasks("swesmith", lines(tmp_path / "a.jsonl", row), tmp_path / "suite")
    laid(tmp_path / "suite" / row["instance_id"], FIXED, **{PYTEST: "python3 run_tests.py"})
    return tmp_path / "suite" / row["instance_id"]


def _r2egym(tmp_path: Path) -> Path:
    wanted = json.dumps({"test_add": "PASSED", "test_sub": "PASSED"})
    row = SAMPLES["r2egym"](expected_output_json=wanted)
    table.import_tasks("r2egym", lines(tmp_path / "a.jsonl", row), tmp_path / "suite")
    run = f"echo == short test summary info ==\npython3 run_tests.py {TEST_FILE}\n"
    folder = tmp_path / "suite" / "calc-abcdef012345"
    laid(folder, {**FIXED, "run_tests.sh": run})
    return folder


def _terminal_bench(tmp_path: Path) -> Path:
    table.import_tasks("terminal-bench", terminal_bench(tmp_path / "src"), tmp_path / "suite")
    laid(tmp_path / "suite" / "hello-world", {"data.txt": "x\n"})
    return tmp_path / "suite" / "hello-world"


@pytest.mark.sandbox
@pytest.mark.parametrize("made", [_old_swebench, _swebench_repo, _swesmith, _r2egym, _terminal_bench])
def test_the_solution_passes_and_doing_nothing_does_not(
    backend: LocalBackend, tmp_path: Path, made: Any
) -> None:
    admission = admitted(backend, made(tmp_path))
    assert admission.valid, admission.reasons


@pytest.mark.sandbox
def test_no_known_exploit_earns_anything_from_an_imported_task(backend: LocalBackend, tmp_path: Path) -> None:
    admission = admitted(backend, _swebench(tmp_path), light=False)
    assert admission.valid, admission.reasons
    assert len(admission.attacks) >= 9


@pytest.mark.sandbox
def test_an_unknown_log_parser_is_quarantined_not_scored(backend: LocalBackend, tmp_path: Path) -> None:
    row = swebench(eval_script=EVAL.format(patch=TEST_PATCH, file=TEST_FILE), log_parser="parse_log_karma")
    table.import_tasks("swebench", lines(tmp_path / "a.jsonl", row), tmp_path / "suite")
    folder = tmp_path / "suite" / "acme__calc-1"
    laid(folder, REPOSITORY)
    admission = admitted(backend, folder)
    assert not admission.valid
    assert "exited 2" in admission.reasons[0]
