"""terminal-bench 1 to packages and back: `task.yaml`, `Dockerfile`, `solution.sh`, `run-tests.sh`, `tests/`.

The task's folder is its build context, so all of it but the solution and the tests becomes `environment/`.
Tests of this format may install what they need while they judge; the network is public, as there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomlkit
import yaml

from agentrl.types import Split
from envs.tasks.formats import repository
from envs.tasks.formats.files import SOURCE, Entry, Package, below, error, read_tree, text, write_tree
from envs.tasks.formats.swebench_repo import yaml_table

FORMAT = "terminal-bench"
WORKDIR = "/app"
RUN, SOLUTION, CONFIG = "run-tests.sh", "solution.sh", "task.yaml"
PARSERS = ("pytest",)
AGENT_S, TEST_S = 360.0, 60.0
"""terminal-bench's own defaults."""

EVAL_SH = f"""\
#!/bin/bash
export TEST_DIR=/tests T_BENCH_TEST_DIR=/tests
cd {WORKDIR} || exit 1
bash /tests/{RUN}
"""


def read(src: Path, split: Split | None) -> Iterator[Package]:
    """A package per folder with a `task.yaml`: `src` itself, or those below it."""
    folders = sorted(path.parent for path in src.rglob(CONFIG)) if src.is_dir() else []
    if not folders:
        raise error(src, "folder", f"holds no {CONFIG}", "Give a task folder, or a folder of them.")
    for folder in folders:
        yield package(folder, split or Split.TRAIN)


def package(folder: Path, split: Split) -> Package:
    """One task folder as a package. `TaskError` names file, key and fix."""
    original = read_tree(folder)
    file = folder / CONFIG
    facts = yaml_table(file, original[CONFIG])
    instruction = facts.get("instruction")
    if not isinstance(instruction, str) or not instruction.strip():
        raise error(file, "instruction", "is missing or no text", "Say there what is to be done.")
    parser = facts.get("parser_name", "pytest")
    if parser not in PARSERS:
        raise error(file, "parser_name", f"'{parser}' is not known", f"Known: {', '.join(PARSERS)}.")
    for name in ("Dockerfile", RUN):
        if name not in original:
            raise error(folder / name, "file", "is missing", "A task has it beside its task.yaml.")
    if "solution.yaml" in original and SOLUTION not in original:
        raise error(
            folder / "solution.yaml", "file", "is a recording of keys", f"Write its commands into {SOLUTION}."
        )
    inside = {
        path: entry
        for path, entry in original.items()
        if path not in (CONFIG, RUN, SOLUTION) and not path.startswith("tests/")
    }
    taken = [
        name
        for name in ("test.sh", "eval.sh", "expected.json", "judge.py", RUN)
        if f"tests/{name}" in original
    ]
    if taken:
        raise error(folder / "tests" / taken[0], "file", "has a name that packages need", "Rename it.")
    solution = {}
    if SOLUTION in original:
        raw = original[SOLUTION].raw
        solution["solution/solve.sh"] = Entry(raw, original[SOLUTION].mode)
    files = {
        "task.toml": _document(folder.name, file, facts, split),
        "instruction.md": text(instruction),
        **{f"environment/{path}": entry for path, entry in inside.items()},
        **solution,
        **repository.verifier(text(EVAL_SH), {"parser": "pytest"}),
        **{f"tests/{path}": entry for path, entry in below(original, "tests")},
        f"tests/{RUN}": original[RUN],
        f"{SOURCE}/{CONFIG}": original[CONFIG],
    }
    script = files["tests/test.sh"].raw.decode().replace(repository.WORKDIR, WORKDIR)
    files["tests/test.sh"] = text(script)
    return Package(name=folder.name, files=files)


def _document(name: str, file: Path, facts: Mapping[str, Any], split: Split) -> Entry:
    def seconds(key: str, default: float) -> float:
        value = facts.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise error(file, key, f"is {value!r}, no number of seconds", "Write a positive number.")
        return float(value)

    config: dict[str, Any] = {
        "schema_version": "1.4",
        "task": {"name": f"{FORMAT}/{name}"},
        "environment": {
            "network_mode": "public",
            "workdir": WORKDIR,
            "cpus": 1,
            "memory_mb": 2048,
            "storage_mb": 4096,
        },
        "agent": {"timeout_sec": seconds("max_agent_timeout_sec", AGENT_S)},
        "verifier": {"timeout_sec": seconds("max_test_timeout_sec", TEST_S), "environment_mode": "separate"},
        "metadata": {
            **{key: str(facts[key]) for key in ("author_name", "author_email", "category") if facts.get(key)},
            "agentrl": {"split": str(split), "tools": list(repository.TOOLS), "grader": "script"},
            "source": {"format": FORMAT, "difficulty": str(facts.get("difficulty", "unknown"))},
        },
    }
    return text(tomlkit.dumps(config))


def write(packages: Sequence[Path], out: Path) -> None:
    """The task folders again; files that nothing was changed in are the same bytes."""
    for folder in packages:
        write_tree(out / folder.name, _task(folder))


def _task(folder: Path) -> dict[str, Entry]:
    files = read_tree(folder)
    repository.source_of(files, folder, FORMAT)
    ours = ("test.sh", "eval.sh", "expected.json", "judge.py", RUN)
    task = dict(below(files, "environment"))
    task |= {f"tests/{path}": entry for path, entry in below(files, "tests") if path not in ours}
    task[RUN] = files[f"tests/{RUN}"]
    if "solution/solve.sh" in files:
        task[SOLUTION] = files["solution/solve.sh"]
    task |= dict(below(files, SOURCE))
    facts = yaml.safe_load(task[CONFIG].raw)
    instruction = files["instruction.md"].raw.decode()
    if facts["instruction"] != instruction:
        changed = yaml.safe_dump({**facts, "instruction": instruction}, sort_keys=False, allow_unicode=True)
        task[CONFIG] = Entry(changed.encode())
    return task
