"""R2E-Gym rows to packages and back (arXiv 2504.07164).

The image holds the code before a commit in `/testbed`, the tests in `/r2e_tests` and `run_tests.sh`; an
attempt is right when the outcomes of the tests are exactly `expected_output_json`. The instruction is the
text between `[ISSUE]` and `[/ISSUE]`. The solution is the commit's own version of every file that is not a
test, where the row brings the parsed commit; without it the package has none, and admission says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from agentrl.types import Split
from envs.tasks.formats import judge, repository, rows
from envs.tasks.formats.files import Entry, Package, read_tree, text
from envs.tasks.formats.rows import Row

FORMAT = "r2egym"
COMMITS = ("parsed_commit_content", "parsed_commit")
"""Columns that may hold the commit as JSON text."""

EVAL_SH = f"""\
#!/bin/bash
cd {repository.WORKDIR} || exit 1
for tests in /root/r2e_tests /r2e_tests; do
  if [ -d "$tests" ]; then rm -rf r2e_tests && ln -s "$tests" r2e_tests && break; fi
done
script=run_tests.sh
[ -f "$script" ] || script=/root/run_tests.sh
[ -f "$script" ] || exit 1
echo '{judge.START}'
bash "$script"
echo '{judge.END}'
"""


def read(src: Path, split: Split | None) -> Iterator[Package]:
    """A package per row."""
    for row in rows.read(src):
        yield package(row, split or Split.TRAIN)


def package(row: Row, split: Split) -> Package:
    """One row as a package. `TaskError` names row, key and fix."""
    repo = row.text("repo_name" if "repo_name" in row.values else "repo")
    image, statement, commit = (
        row.text("docker_image"),
        row.text("problem_statement"),
        row.text("commit_hash"),
    )
    name = Row(row.where, {"commit_hash": f"{repo.replace('/', '__')}-{commit[:12]}"}).instance("commit_hash")
    outcomes = _outcomes(row)
    found = re.search(r"\[ISSUE\](.*)\[/ISSUE\]", statement, re.DOTALL)
    expected = {"parser": "r2e", "markers": True, "outcomes": outcomes}
    wanted = [test for test, outcome in outcomes.items() if outcome in judge.GOOD]
    return Package(
        name=name,
        files={
            "task.toml": repository.document(
                f"{FORMAT}/{name}",
                image=image,
                split=split,
                fail_to_pass=(),
                pass_to_pass=wanted,
                protected=("run_tests.sh", "r2e_tests"),
                source={
                    **rows.held(FORMAT, row, ("problem_statement", "expected_output_json", *COMMITS)),
                    "around": [statement[: found.start(1)], statement[found.end(1) :]] if found else ["", ""],
                },
            ),
            "instruction.md": text(found[1] if found else statement),
            **_solution(row),
            **{f"source/{key}": _held(row, key) for key in COMMITS if key in row.values},
            "source/expected_output_json": Entry(row.text("expected_output_json").encode()),
            **repository.verifier(text(EVAL_SH), expected),
        },
    )


def _held(row: Row, key: str) -> Entry:
    return Entry(row.text(key).encode())


def _outcomes(row: Row) -> dict[str, str]:
    key = "expected_output_json"
    try:
        value = json.loads(row.text(key))
    except ValueError as wrong:
        raise row.wrong(
            key, f"is not JSON: {wrong}", "Write a JSON object of test names and outcomes."
        ) from wrong
    if not isinstance(value, dict) or not all(isinstance(word, str) for word in value.values()) or not value:
        raise row.wrong(key, "is no table of outcomes", "Write a JSON object of test names and outcomes.")
    return value


def _solution(row: Row) -> dict[str, Entry]:
    """The commit's files, and a script that copies them."""
    key = next((key for key in COMMITS if isinstance(row.values.get(key), str)), None)
    if key is None:
        return {}
    try:
        diffs = json.loads(row.text(key))["file_diffs"]
        changed = {each["header"]["file"]["path"]: each.get("new_file_content") for each in diffs}
    except (ValueError, KeyError, TypeError) as wrong:
        raise row.wrong(
            key,
            f"is no parsed commit: {wrong!r}",
            "It needs file_diffs[].header.file.path and new_file_content.",
        ) from wrong
    lines = ["#!/bin/bash", "set -eu", f"cd {repository.WORKDIR}"]
    files: dict[str, Entry] = {}
    for path, content in changed.items():
        parts = PurePosixPath(path).parts
        if any(part in ("test", "tests", "r2e_tests") or part.startswith("test_") for part in parts):
            continue
        if path.startswith("/") or ".." in parts or "'" in path:
            raise row.wrong(key, f"the path {path!r} leaves the repository", "Mend the row.")
        if content:
            files[f"solution/files/{path}"] = Entry(content.encode())
            lines.append(
                f"mkdir -p '{PurePosixPath(path).parent}' && cat '/solution/files/{path}' > '{path}'"
            )
        else:
            lines.append(f"rm -f '{path}'")
    return {"solution/solve.sh": text("\n".join(lines) + "\n"), **files}


def write(packages: Sequence[Path], out: Path) -> None:
    """Rows again, equal to those that were read where nothing was changed."""
    rows.write(out, (_row(folder) for folder in packages))


def _row(folder: Path) -> Mapping[str, Any]:
    files = read_tree(folder)
    _, source = repository.source_of(files, folder, FORMAT)
    before, after = source["around"]
    elsewhere = {key: files[f"source/{key}"].raw.decode() for key in COMMITS if f"source/{key}" in files}
    elsewhere["expected_output_json"] = files["source/expected_output_json"].raw.decode()
    elsewhere["problem_statement"] = before + files["instruction.md"].raw.decode() + after
    return rows.restored(source, elsewhere)
