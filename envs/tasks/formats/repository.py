"""What all formats of repository tasks share: an image with a git checkout, tests judged by their log.

The package grades with a script: it runs `tests/eval.sh` in the verifier's fresh sandbox and judges the log
with `tests/judge.py` (see there for what such a verdict is worth). `.git`, `.gitattributes` and every file of
the test patch are as the image has them, whatever the policy did to them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomlkit

from agentrl.types import Split
from envs.tasks.formats import judge
from envs.tasks.formats.files import Entry, Files, error, text

WORKDIR = "/testbed"
TOOLS = ("bash", "read_file", "replace_in_file", "submit")
TIMEOUT_S = 1800
ACTIVATE = "source /opt/miniconda3/bin/activate testbed 2>/dev/null || true"
"""The environment of SWE-bench and SWE-smith images; other images have none and need none."""

APPLY = "git -c safe.directory='*' apply --whitespace=nowarn"
"""The checkout may belong to another user than the one who applies."""
JUDGE = Path(judge.__file__).read_bytes()

TEST_SH = """\
#!/bin/bash
# Runs eval.sh, then judges its log by the names of tests. Exits other than 0 where it could not judge.
set -u
log=$(mktemp)
cd WORKDIR || exit 2
bash /tests/eval.sh >"$log" 2>&1 </dev/null
cd / || exit 2
python=$(command -v python3 || echo /opt/miniconda3/bin/python3)
exec "$python" -I /tests/judge.py "$log" /tests/expected.json /logs/verifier/reward.json
"""

_PARSERS = {"django": "unittest", "unittest": "unittest", "sympy": "sympy"}
_LIKE_PYTEST = (
    *("pytest", "pytest_options", "pytest_v2", "seaborn", "matplotlib", "astroid", "flask", "marshmallow"),
    *(
        "pvlib",
        "pyvista",
        "sqlfluff",
        "xarray",
        "pydicom",
        "requests",
        "pylint",
        "astropy",
        "scikit",
        "sphinx",
    ),
)
"""SWE-bench's parsers of Python projects; all read pytest's summary."""


def patched(patch: str) -> tuple[str, ...]:
    """Files that a git diff touches, old and new names, sorted."""
    lines = re.findall(r"^(?:---|\+\+\+) (?:[ab]/)?(.+?)(?:\t.*)?$", patch, re.MULTILINE)
    heads = [p for pair in re.findall(r"^diff --git a/(\S+) b/(\S+)$", patch, re.MULTILINE) for p in pair]
    return tuple(sorted({name for name in (*lines, *heads) if name != "/dev/null"}))


def parser_of(name: str) -> str:
    """The parser of `judge.py` for a log parser's name in SWE-bench.

    An unknown one is kept: its package can be read and written, and grading it says that it can not judge.
    """
    plain = name.lower().removeprefix("parse_log_")
    return "pytest" if plain in _LIKE_PYTEST else _PARSERS.get(plain, plain)


def document(
    name: str,
    *,
    image: str | None,
    split: Split,
    fail_to_pass: Sequence[str],
    pass_to_pass: Sequence[str],
    protected: Iterable[str],
    source: Mapping[str, Any],
    timeout_s: float = TIMEOUT_S,
) -> Entry:
    """The `task.toml` of an imported repository task. Without `image` it is built from `environment/`."""
    environment: dict[str, Any] = {"network_mode": "no-network", "workdir": WORKDIR}
    environment |= {"cpus": 1, "memory_mb": 4096, "storage_mb": 4096}
    if image is not None:
        environment["docker_image"] = image
    config = {
        "schema_version": "1.4",
        "task": {"name": name},
        "environment": environment,
        "agent": {"timeout_sec": TIMEOUT_S},
        "verifier": {"timeout_sec": timeout_s, "environment_mode": "separate"},
        "metadata": {
            "agentrl": {
                "split": str(split),
                "tools": list(TOOLS),
                "grader": "script",
                "fail_to_pass": list(fail_to_pass),
                "pass_to_pass": list(pass_to_pass),
                "protected_paths": [".git", ".gitattributes", *protected],
            },
            "source": dict(source),
        },
    }
    return text(tomlkit.dumps(config))


def verifier(eval_script: Entry, expected: Mapping[str, Any]) -> dict[str, Entry]:
    """The files of `tests/` that run and judge."""
    return {
        "tests/test.sh": text(TEST_SH.replace("WORKDIR", WORKDIR)),
        "tests/eval.sh": eval_script,
        "tests/expected.json": text(json.dumps(expected, ensure_ascii=False, indent=1) + "\n"),
        "tests/judge.py": Entry(JUDGE),
    }


def applied(patch: str, file: str, *, reverse: bool = False) -> dict[str, Entry]:
    """A solution that applies a patch, kept as `solution/<file>`."""
    flag = " -R" if reverse else ""
    apply = f"{APPLY}{flag} /solution/{file}" if patch.strip() else "true"
    script = f"#!/bin/bash\nset -eu\ncd {WORKDIR}\n{apply}\n"
    return {"solution/solve.sh": text(script), f"solution/{file}": Entry(patch.encode())}


def tests_command(repo: str, files: Sequence[str]) -> str:
    """How a repository's test files are run, where a row does not say it."""
    python = [file for file in files if file.endswith(".py")]
    words = " ".join(python)
    if repo == "django/django":
        labels = [f.removeprefix("tests/").removesuffix(".py").replace("/", ".") for f in python]
        return f"./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 {' '.join(labels)}"
    if repo == "sympy/sympy":
        return f"PYTHONWARNINGS=ignore bin/test -C --verbose {words}"
    return f"python -m pytest -rA --color=no -p no:cacheprovider {words}"


def eval_script(command: str, *, patch: bool) -> Entry:
    """Apply the test patch to the original test files, run the tests between the markers."""
    apply = f"{APPLY} /tests/test.patch || exit 1\n" if patch else ""
    return text(
        f"#!/bin/bash\n{ACTIVATE}\ncd {WORKDIR}\n{apply}"
        f"echo '{judge.START}'\n{command}\ncode=$?\necho '{judge.END}'\n"
        'echo ">>>>> Test Exit Code: $code"\n'
    )


def source_of(files: Files, where: Path, wanted: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """`(task.toml, its [metadata.source])` of a package that can be written as `wanted`; else an error."""
    document_: dict[str, Any] = tomlkit.parse(files["task.toml"].raw.decode()).unwrap()
    source = document_.get("metadata", {}).get("source", {})
    if source.get("format") != wanted:
        raise error(
            where / "task.toml",
            "metadata.source.format",
            f"is {source.get('format', 'not there')!r}, not '{wanted}'",
            f"Only what was imported from {wanted} has all that it needs; write it as harbor.",
        )
    return document_, source


def lists(document_: Mapping[str, Any]) -> dict[str, list[str]]:
    """The two lists of tests."""
    ours = document_["metadata"]["agentrl"]
    return {"FAIL_TO_PASS": list(ours["fail_to_pass"]), "PASS_TO_PASS": list(ours["pass_to_pass"])}


def like(value: Any, names: list[str]) -> Any:
    """Test names in the form that `value` had: JSON text, spelled alike where it says the same, or a list."""
    if not isinstance(value, str):
        return names
    return value if json.loads(value) == names else json.dumps(names)
