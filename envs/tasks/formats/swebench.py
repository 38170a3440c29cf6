"""SWE-bench rows (also Lite, Verified, Multimodal and the columns of version 5) to packages and back.

Fields as in `swebench.types.SWEbenchInstance` (github.com/SWE-bench/SWE-bench). `FAIL_TO_PASS` and
`PASS_TO_PASS` are lists or the JSON text of lists. Rows of version 5 bring `eval_script`, `log_parser` and
`image`; for others the image has the name that SWE-bench gives it and the command follows the repository.
Binary files that a patch can not carry (`image_assets`) are kept in the row and not staged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.types import Split
from envs.tasks.formats import repository, rows
from envs.tasks.formats.files import Entry, Package, read_tree, text
from envs.tasks.formats.rows import Row

FORMAT = "swebench"
ELSEWHERE = ("patch", "test_patch", "problem_statement", "FAIL_TO_PASS", "PASS_TO_PASS", "eval_script")


def image_of(instance: str) -> str:
    """The image that SWE-bench publishes for an instance."""
    return f"swebench/sweb.eval.x86_64.{instance.replace('__', '_1776_')}:latest".lower()


def read(src: Path, split: Split | None) -> Iterator[Package]:
    """A package per row."""
    for row in rows.read(src):
        yield package(row, split or Split.TRAIN)


def package(row: Row, split: Split) -> Package:
    """One row as a package. `TaskError` names row, key and fix."""
    name = row.instance()
    repo = row.text("repo")
    row.text("base_commit")
    patch, test_patch = row.text("patch"), row.text("test_patch")
    fails, passes = row.names("FAIL_TO_PASS"), row.names("PASS_TO_PASS")
    if not fails:
        raise row.wrong("FAIL_TO_PASS", "is empty", "Name the tests that the solution makes pass.")
    touched = repository.patched(test_patch)
    by_row = bool(row.values.get("eval_script"))
    script = (
        text(row.text("eval_script"))
        if by_row
        else repository.eval_script(repository.tests_command(repo, touched), patch=bool(test_patch.strip()))
    )
    parser = row.values.get("log_parser") or {"django/django": "django", "sympy/sympy": "sympy"}.get(
        repo, "pytest"
    )
    expected = {
        "parser": repository.parser_of(str(parser)),
        "markers": True,
        "fail_to_pass": list(fails),
        "pass_to_pass": list(passes),
    }
    source = rows.held(FORMAT, row, ELSEWHERE)
    texts = [key for key in ("FAIL_TO_PASS", "PASS_TO_PASS") if isinstance(row.values[key], str)]
    source["spelled"] = {key: row.values[key] for key in texts}
    source["inferred"] = [] if by_row else ["eval_script"]
    image = row.values.get("image")
    return Package(
        name=name,
        files={
            "task.toml": repository.document(
                f"{FORMAT}/{name}",
                image=image if isinstance(image, str) and image else image_of(name),
                split=split,
                fail_to_pass=fails,
                pass_to_pass=passes,
                protected=touched,
                source=source,
            ),
            "instruction.md": text(row.text("problem_statement")),
            **repository.applied(patch, "gold.patch"),
            **repository.verifier(script, expected),
            "tests/test.patch": Entry(test_patch.encode()),
        },
    )


def write(packages: Sequence[Path], out: Path) -> None:
    """Rows again, equal to those that were read where nothing was changed."""
    rows.write(out, (_row(folder) for folder in packages))


def _row(folder: Path) -> Mapping[str, Any]:
    files = read_tree(folder)
    document, source = repository.source_of(files, folder, FORMAT)
    elsewhere: dict[str, Any] = {
        "patch": files["solution/gold.patch"].raw.decode(),
        "test_patch": files["tests/test.patch"].raw.decode(),
        "problem_statement": files["instruction.md"].raw.decode(),
    }
    for key, names in repository.lists(document).items():
        elsewhere[key] = repository.like(source["spelled"].get(key), names)
    if "eval_script" not in source["inferred"]:
        elsewhere["eval_script"] = files["tests/eval.sh"].raw.decode()
    return rows.restored(source, elsewhere)
