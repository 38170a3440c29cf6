"""Task repositories of SWE-bench 5 (`sweb.yaml`, `tasks/<id>/…`) to packages and back, byte for byte.

Files have the places that packages give them; what has none is kept below `source/`. Keys that are required
are those of `swebench.task.checks` (github.com/SWE-bench/SWE-bench).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from agentrl.types import Split
from envs.tasks.formats import judge, repository
from envs.tasks.formats.files import SOURCE, Entry, Package, below, error, read_tree, text, write_tree

FORMAT = "swebench-repo"
TASKS = "tasks"
REQUIRED = ("instance_id", "repo", "version", "base_commit", "split", "image", "log_parser", "eval_type")
PLACES: Mapping[str, str] = {
    "problem_statement.md": "instruction.md",
    "gold.patch": "solution/gold.patch",
    "test.patch": "tests/test.patch",
    "eval.sh": "tests/eval.sh",
    "Dockerfile": "environment/Dockerfile",
}
"""Where a file of a task lies in a package; every other one lies in `source/`, assets in `tests/` too."""
ASSETS = "test_assets"
TRAINED = ("train", "dev")
"""Splits of data sets that may be trained on; any other is held out."""


def read(src: Path, split: Split | None) -> Iterator[Package]:
    """A package per task."""
    folders = sorted(path.parent for path in (src / TASKS).glob("*/task.yaml"))
    if not folders:
        raise error(src / TASKS, "folder", "holds no task", "Give a folder with tasks/<id>/task.yaml.")
    for folder in folders:
        yield package(folder, split)


def package(folder: Path, split: Split | None) -> Package:
    """One task folder as a package. `TaskError` names file, key and fix."""
    original = read_tree(folder)
    for name in ("task.yaml", "tests.json", *PLACES):
        if name not in original:
            raise error(folder / name, "file", "is missing", "A task has it; see swebench.task.repo.")
    facts = yaml_table(folder / "task.yaml", original["task.yaml"])
    for key in REQUIRED:
        if not isinstance(facts.get(key), str | int | float):
            raise error(folder / "task.yaml", key, "is missing", f"Required: {', '.join(REQUIRED)}.")
    if facts["instance_id"] != folder.name:
        raise error(
            folder / "task.yaml", "instance_id", f"is '{facts['instance_id']}'", f"Call it '{folder.name}'."
        )
    script = original["eval.sh"].raw
    for mark in (judge.START, judge.END):
        if mark.encode() not in script:
            raise error(folder / "eval.sh", "marker", f"has no '{mark}'", "Print it around the tests.")
    tests = _tests(folder / "tests.json", original["tests.json"])
    own = Split.TRAIN if facts["split"] in TRAINED else Split.HELDOUT
    expected = {
        "parser": repository.parser_of(str(facts["log_parser"])),
        "markers": True,
        "fail_to_pass": tests["FAIL_TO_PASS"],
        "pass_to_pass": tests["PASS_TO_PASS"],
    }
    patch = original["gold.patch"].raw.decode()
    touched = repository.patched(original["test.patch"].raw.decode())
    assets = {f"tests/{ASSETS}/{path}": entry for path, entry in below(original, ASSETS)}
    modes = {name: original[name].mode for name in PLACES}
    files = {
        "task.toml": repository.document(
            f"{FORMAT}/{folder.name}",
            image=str(facts["image"]),
            split=split or own,
            fail_to_pass=tests["FAIL_TO_PASS"],
            pass_to_pass=tests["PASS_TO_PASS"],
            protected=(*touched, *(path for path, _ in below(original, ASSETS))),
            source={"format": FORMAT, "repo": str(facts["repo"]), "modes": modes},
        ),
        **repository.applied(patch, "gold.patch"),
        **repository.verifier(original["eval.sh"], expected),
        **{place: original[name] for name, place in PLACES.items()},
        **assets,
        **{
            f"{SOURCE}/{path}": entry
            for path, entry in original.items()
            if path not in PLACES and not path.startswith(ASSETS + "/")
        },
    }
    if assets:
        stage = f"cp -a /tests/{ASSETS}/. {repository.WORKDIR}/ || exit 2\n"
        run = files["tests/test.sh"].raw.decode()
        files["tests/test.sh"] = text(run.replace("bash /tests/eval.sh", stage + "bash /tests/eval.sh"))
    return Package(name=folder.name, files=files)


def yaml_table(file: Path, entry: Entry) -> dict[str, Any]:
    """A YAML file that must hold a table."""
    try:
        value = yaml.safe_load(entry.raw)
    except yaml.YAMLError as wrong:
        raise error(file, "syntax", str(wrong), "Correct the YAML there.") from wrong
    if not isinstance(value, dict):
        raise error(file, "document", f"is {type(value).__name__}, no table", "Write keys and values.")
    return value


def _tests(file: Path, entry: Entry) -> dict[str, list[str]]:
    try:
        value = json.loads(entry.raw)
    except ValueError as wrong:
        raise error(file, "syntax", str(wrong), "Correct the JSON there.") from wrong
    for key in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        names = value.get(key) if isinstance(value, dict) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise error(file, key, "is no list of texts", "Write a JSON list of test names.")
    if not value["FAIL_TO_PASS"]:
        raise error(file, "FAIL_TO_PASS", "is empty", "Name the tests that the solution makes pass.")
    return {key: value[key] for key in ("FAIL_TO_PASS", "PASS_TO_PASS")}


def write(packages: Sequence[Path], out: Path) -> None:
    """The repository again; files that nothing was changed in are the same bytes."""
    for folder in packages:
        write_tree(out / TASKS / folder.name, _task(folder))


def _task(folder: Path) -> dict[str, Entry]:
    files = read_tree(folder)
    document, source = repository.source_of(files, folder, FORMAT)
    task = {name: Entry(files[place].raw, source["modes"][name]) for name, place in PLACES.items()}
    task |= dict(below(files, SOURCE))
    task |= {f"{ASSETS}/{path}": entry for path, entry in below(files, f"tests/{ASSETS}")}
    kept = json.loads(task["tests.json"].raw)
    if {key: kept[key] for key in ("FAIL_TO_PASS", "PASS_TO_PASS")} != repository.lists(document):
        tests = {**kept, **repository.lists(document)}
        task["tests.json"] = Entry((json.dumps(tests, indent=2, ensure_ascii=False) + "\n").encode())
    return task
