"""SWE-smith rows to packages and back (arXiv 2504.21798).

The patch of a row *introduces* the bug and the solution is its reverse. One image per repository and commit
holds the code before the bug; the package builds on it: applies the patch and replaces the git history,
which would hold the code without the bug, by a single commit. Tests are run with pytest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.types import Split
from envs.tasks.formats import repository, rows
from envs.tasks.formats.files import Entry, Package, read_tree, text
from envs.tasks.formats.rows import Row

FORMAT = "swesmith"
ELSEWHERE = ("patch", "problem_statement", "FAIL_TO_PASS", "PASS_TO_PASS")

DOCKERFILE = """\
FROM {image}
COPY bug.patch /tmp/bug.patch
RUN cd {workdir} && git apply --whitespace=nowarn /tmp/bug.patch && rm -rf /tmp/bug.patch .git \\
 && git init -q && git add -A \\
 && git -c user.name=task -c user.email=task@localhost commit -q -m "The code as it is."
WORKDIR {workdir}
"""


def read(src: Path, split: Split | None) -> Iterator[Package]:
    """A package per row."""
    for row in rows.read(src):
        yield package(row, split or Split.TRAIN)


def package(row: Row, split: Split) -> Package:
    """One row as a package. `TaskError` names row, key and fix."""
    name = row.instance()
    row.text("repo")
    patch, image = row.text("patch"), row.text("image_name")
    fails, passes = row.names("FAIL_TO_PASS"), row.names("PASS_TO_PASS")
    if not patch.strip():
        raise row.wrong("patch", "is empty", "Give the diff that introduces the bug.")
    if not fails:
        raise row.wrong("FAIL_TO_PASS", "is empty", "Name the tests that the bug breaks.")
    statement = row.values.get("problem_statement")
    if not isinstance(statement, str) or not statement.strip():
        raise row.wrong(
            "problem_statement", "is missing or empty", "Generate the issue texts of the data set first."
        )
    tested = tuple(dict.fromkeys(test.partition("::")[0] for test in (*fails, *passes)))
    expected = {
        "parser": "pytest",
        "markers": True,
        "fail_to_pass": list(fails),
        "pass_to_pass": list(passes),
    }
    source = rows.held(FORMAT, row, ELSEWHERE)
    texts = [key for key in ("FAIL_TO_PASS", "PASS_TO_PASS") if isinstance(row.values[key], str)]
    source["spelled"] = {key: row.values[key] for key in texts}
    command = repository.tests_command(row.text("repo"), tested)
    return Package(
        name=name,
        files={
            "task.toml": repository.document(
                f"{FORMAT}/{name}",
                image=None,
                split=split,
                fail_to_pass=fails,
                pass_to_pass=passes,
                protected=tested,
                source=source,
            ),
            "instruction.md": text(statement),
            "environment/Dockerfile": text(DOCKERFILE.format(image=image, workdir=repository.WORKDIR)),
            "environment/bug.patch": Entry(patch.encode()),
            **repository.applied(patch, "bug.patch", reverse=True),
            **repository.verifier(repository.eval_script(command, patch=False), expected),
        },
    )


def write(packages: Sequence[Path], out: Path) -> None:
    """Rows again, equal to those that were read where nothing was changed."""
    rows.write(out, (_row(folder) for folder in packages))


def _row(folder: Path) -> Mapping[str, Any]:
    files = read_tree(folder)
    document, source = repository.source_of(files, folder, FORMAT)
    elsewhere: dict[str, Any] = {
        "patch": files["environment/bug.patch"].raw.decode(),
        "problem_statement": files["instruction.md"].raw.decode(),
    }
    for key, names in repository.lists(document).items():
        elsewhere[key] = repository.like(source["spelled"].get(key), names)
    return rows.restored(source, elsewhere)
