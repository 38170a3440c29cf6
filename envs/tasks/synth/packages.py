"""A mutant that tests notice to a Harbor task package that a person can read.

    environment/Dockerfile            for engines that build; the local backend needs none
    environment/files/                the project with the bug, without history; `.site` holds pytest
    tests/project_tests.py            a function per graded test; `pytestrun.py` runs them with pytest
    tests/suite/                      the project's own tests as they were
    solution/solve.sh                 puts the original bytes back

The instruction is written from the failing tests alone: their names and messages, never a place in the
source.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.types import Split, Task
from envs.tasks import package
from envs.tasks.synth import lab
from envs.tasks.synth.lab import Baseline, Failure
from envs.tasks.synth.mutations import Edit, Mutation, apply, inverse
from envs.tasks.synth.project import SITE, Project, Rejected, pinned

SUITE = "synth"
DRIVER = "project_tests.py"
HELDOUT_SHARE = 5
"""One project in this many is held out, whatever else is made: never a task of both from one repository."""
MOST_TESTS = 60
"""Graded tests per task; more cost time at every attempt."""
MOST_FAILING = 30
"""Of those, tests that the bug breaks; further ones are neither shown nor graded."""
GRADED_S = 1.0
"""CPU seconds of the tests that are graded, those that must pass and those that must still pass each: every
attempt pays for them."""
LEAST_PASSING = 5
"""Tests that must still pass are that many, whatever they take."""
SHOWN_TESTS = 8
LEAST_LEAK = 12
"""Characters of the original code that a message must hold to count as a leak of the fix."""
LEAST_DEADLINE_S = 60.0
SLACK = 20.0
"""The verifier's deadline is this many times what its tests took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A mutant that is worth a package."""

    project: Project
    mutations: tuple[Mutation, ...]
    kind: str
    failures: tuple[Failure, ...]
    """Tests that fail every time, none that failed only sometimes."""
    unsure: tuple[str, ...] = ()
    """Tests that failed in one run only: not graded at all."""

    @property
    def edits(self) -> tuple[Edit, ...]:
        return tuple(m.edit for m in self.mutations)

    @property
    def key(self) -> str:
        return key_of(self.edits)

    @property
    def name(self) -> str:
        return f"{self.project.slug}-{self.kind.replace('_', '-')}-{self.key[:8]}"


def key_of(edits: Sequence[Edit]) -> str:
    """The identity of a set of edits."""
    parts = sorted((e.path, e.start, e.old, e.new) for e in edits)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def split_of(project: Project) -> Split:
    """By the hash of the project's name alone."""
    draw = int.from_bytes(hashlib.sha256(project.slug.encode()).digest()[:4], "big")
    return Split.HELDOUT if draw % HELDOUT_SHARE == 0 else Split.TRAIN


def lay_environment(project: Project, folder: Path, image: str, changed: Mapping[str, bytes]) -> None:
    """Write `environment/` into a folder: the project's tree with changed files, and a recipe."""
    shutil.copytree(project.tree, folder / "files")
    for path, content in changed.items():
        (folder / "files" / path).write_bytes(content)
    recipe = f"FROM {image}\n" + ("" if image == "scratch" else f"WORKDIR {lab.WORKDIR}\nCOPY files/ ./\n")
    (folder / "Dockerfile").write_text(recipe, encoding="utf-8")


def lay_suite(project: Project, folder: Path) -> None:
    """Write the project's own tests as they are."""
    for name in project.suite:
        source, target = Path(project.tree) / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copyfile(source, target)


def graded(candidate: Candidate, baseline: Baseline) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tests that must begin to pass and those that must still pass, `MOST_TESTS` in all.

    The latter are the nearest: first those that execute the changed lines, then those of the changed files,
    then the rest, fast ones first. Both are as many as `GRADED_S` pays for.
    """
    failing = tuple(f.test for f in candidate.failures)
    fast = sorted(failing, key=lambda name: (baseline.seconds[name], name))
    wanted = set(_paid(fast, baseline, most=MOST_FAILING, least=1))
    rest = [name for name in baseline.stable if name not in set(failing) | set(candidate.unsure)]
    near = {n for m in candidate.mutations for n in baseline.watching(m.edit.path, m.watch)}
    same = {n for m in candidate.mutations for n in baseline.watching(m.edit.path, (0, 0))}
    rest.sort(key=lambda name: (name not in near, name not in same, baseline.seconds[name], name))
    passing = _paid(rest, baseline, most=MOST_TESTS - len(wanted), least=LEAST_PASSING)
    return tuple(name for name in failing if name in wanted), passing


def _paid(tests: Sequence[str], baseline: Baseline, *, most: int, least: int) -> tuple[str, ...]:
    """The first tests, as many as fit into `GRADED_S`; `least` of them at any cost."""
    took = itertools.accumulate(baseline.seconds[test] for test in tests)
    fitting = sum(seconds <= GRADED_S for seconds in took)
    return tuple(tests[: min(most, max(least, fitting))])


def short_names(tests: Sequence[str]) -> dict[str, str]:
    """A Python function name for each test: `tests/test_a.py::TestB::test_c[1]` is
    `test_a__TestB__test_c_1`."""
    found: dict[str, str] = {}
    for test in tests:
        path, _, rest = test.partition("::")
        word = re.sub(r"\W+", "_", f"{Path(path).stem}__{rest.replace('::', '__')}", flags=re.ASCII).strip(
            "_"
        )
        word = word if word.startswith("test_") else f"test_{word}"
        name, number = word[:90], 1
        while name in found:
            number += 1
            name = f"{word[:90]}_{number}"
        found[name] = test
    return found


def driver(project: Project, names: Mapping[str, str], *, root: str) -> str:
    """The test file that `envs.testrun` runs: `root` is where the project's tests are, seen from it."""
    lines = [
        '"""Tests of the project itself, a function for each; pytestrun.py runs them with pytest."""',
        "",
        "import pytestrun",
        "",
        "TESTS = {",
        *(f"    {name!r}: {test!r}," for name, test in names.items()),
        "}",
        f"SUITE = pytestrun.Suite(__file__, {root!r}, tests=TESTS, suite={project.suite!r},"
        f" sources={project.sources!r}, site={SITE!r}, pinned={pinned(project)!r})",
        "",
        *(f"\ndef {name}():\n    SUITE.check({name!r})\n" for name in names),
    ]
    return "\n".join(lines)


def protected(project: Project) -> tuple[str, ...]:
    """What an attempt may not change: the tests, what they run with, and what pytest or Python would load."""
    hooks = ("conftest.py", "pytest.ini", "tox.ini", "setup.cfg", "sitecustomize.py", "usercustomize.py")
    return tuple(dict.fromkeys((SITE, *project.suite, *hooks)))


# -------------------------------------------------------------------------------------------------- the words


def instruction(candidate: Candidate, shown: Sequence[str], baseline: Baseline) -> str:
    """What the policy is told. Raises `Rejected` if it gave the fix away."""
    project = candidate.project
    messages = {f.test: f.message for f in candidate.failures}
    about = f" ({project.summary.rstrip('.')})" if project.summary else ""
    several = len(candidate.mutations) > 1
    lines = [
        f"# Tests of {project.name} fail",
        "",
        f"This folder holds {project.name} {project.version}{about}. "
        f"{'Several changes' if several else 'A change'} broke it: tests that passed before fail now.",
        "",
        *(_line(test, messages[test], candidate) for test in shown[:SHOWN_TESTS]),
    ]
    if len(candidate.failures) > SHOWN_TESTS:
        lines.append(f"- and {len(candidate.failures) - SHOWN_TESTS} more")
    places = " or ".join(f"`{name}/`" for name in project.sources if name) or "this folder"
    lines += [
        "",
        f"Find the cause{'s' if several else ''} in the source code ({places}) and put it right, then submit."
        " The tests are right; changes to them do not count, and all other tests must still pass.",
        "",
        f"One test: `python3 -m pytest '{shown[0]}'`. The tool run_tests runs all that are graded.",
        "",
    ]
    text = "\n".join(lines)
    for leak in leaks(candidate):
        if leak in text:
            raise Rejected("leaks_fix", f"The instruction of {candidate.name} holds the fix: {leak!r}.")
    return text


def _line(test: str, message: str, candidate: Candidate) -> str:
    first = " ".join(message.split())[:160]
    if not first or any(leak in first for leak in leaks(candidate)):
        return f"- `{test}`"
    return f"- `{test}`: {first}"


def leaks(candidate: Candidate) -> tuple[str, ...]:
    """Texts that would tell the fix: the original code, where it is long enough to be told apart from
    talk."""
    found = []
    for edit in candidate.edits:
        source = (Path(candidate.project.tree) / edit.path).read_bytes()
        begin = source.rfind(b"\n", 0, edit.start) + 1
        end = source.find(b"\n", edit.end)
        line = source[begin : end if end >= 0 else len(source)].decode().strip()
        found += [text for text in (edit.old.strip(), line) if len(text) >= LEAST_LEAK]
    return tuple(dict.fromkeys(found))


def difficulty(candidate: Candidate, baseline: Baseline) -> float:
    """An estimate from 0 (easy) to 1, of measured signs, not of attempts.

    0.4 for how much code the most focused failing test executes (log scale, 4,096 lines are 1), 0.2 for how
    few of the tests that run the changed lines notice, 0.2 when no failure happens in a changed function's
    file, and 0.1 for each further bug up to two.
    """
    reach = min(sum(map(len, baseline.lines[f.test].values())) for f in candidate.failures)
    near = {n for m in candidate.mutations for n in baseline.watching(m.edit.path, m.watch)}
    noticed = min(1.0, len(candidate.failures) / max(1, len(near)))
    paths = {e.path for e in candidate.edits}
    pointed = any(f.where is not None and f.where[0] in paths for f in candidate.failures)
    extra = min(2, len(candidate.mutations) - 1)
    return round(
        min(
            1.0,
            0.4 * min(1.0, math.log2(max(2, reach)) / 12)
            + 0.2 * (1 - noticed)
            + 0.2 * (not pointed)
            + 0.1 * extra,
        ),
        3,
    )


def solve_script(edits: Sequence[Edit]) -> str:
    """A script that turns the edits back, or stops where the file does not hold what they put there."""
    back = []
    for path, own in itertools.groupby(sorted(edits, key=lambda e: (e.path, e.start)), key=lambda e: e.path):
        back.append((path, [(e.start, e.old, e.new) for e in inverse(tuple(own))]))
    return (
        "#!/bin/bash\nset -eu\npython3 - <<'SOLUTION'\nfrom pathlib import Path\n\n"
        f"for path, edits in {back!r}:\n"
        "    raw = Path(path).read_bytes()\n"
        "    for start, old, new in reversed(edits):\n"
        "        assert raw[start : start + len(old.encode())] == old.encode(), path\n"
        "        raw = raw[:start] + new.encode() + raw[start + len(old.encode()) :]\n"
        "    Path(path).write_bytes(raw)\n"
        "SOLUTION\n"
    )


# ------------------------------------------------------------------------------------------------ the package


def mutated(candidate: Candidate) -> dict[str, bytes]:
    """Changed files by path."""
    changed = {}
    for path in {e.path for e in candidate.edits}:
        source = (Path(candidate.project.tree) / path).read_bytes()
        changed[path] = apply(source, [e for e in candidate.edits if e.path == path])
    return changed


def copies(candidate: Candidate) -> list[str]:
    """Other files of the tree with the very content of a changed file: an unbroken copy to take the fix
    from."""
    tree = Path(candidate.project.tree)
    originals = {
        (tree / path).stat().st_size: (tree / path).read_bytes() for path in {e.path for e in candidate.edits}
    }
    changed = {e.path for e in candidate.edits}
    return [
        name
        for file in sorted(tree.rglob("*"))
        if file.is_file() and file.stat().st_size in originals
        for name in (str(file.relative_to(tree)),)
        if name not in changed and file.read_bytes() == originals[file.stat().st_size]
    ]


def write(candidate: Candidate, baseline: Baseline, folder: Path, *, image: str, seed: int) -> Task:
    """Write the package into a new folder and load it."""
    project = candidate.project
    failing, passing = graded(candidate, baseline)
    names = short_names((*failing, *passing))
    labels = {test: f"{DRIVER}::{name}" for name, test in names.items()}
    took = sum(baseline.seconds[test] for test in names.values())
    config: dict[str, Any] = {
        "schema_version": "1.4",
        "task": {
            "name": f"{SUITE}/{candidate.name}",
            "description": f"{project.name} {project.version} with a bug, found by the project's own tests.",
            "keywords": ["synth", candidate.kind, project.slug],
        },
        "environment": {
            "network_mode": "no-network",
            "cpus": 1,
            "memory_mb": 512,
            "storage_mb": 128,
            "workdir": lab.WORKDIR,
            "env": {
                "PYTHONPATH": ":".join(f"{lab.WORKDIR}/{n}".rstrip("/") for n in (*project.sources, SITE))
            },
        },
        "agent": {"timeout_sec": 1800},
        "verifier": {
            "timeout_sec": max(LEAST_DEADLINE_S, round(SLACK * (took + lab.START_S))),
            "environment_mode": "separate",
        },
        "metadata": {
            "agentrl": {
                "split": str(split_of(project)),
                "difficulty": difficulty(candidate, baseline),
                "grader": "tests",
                "fail_to_pass": [labels[test] for test in failing],
                "pass_to_pass": [labels[test] for test in passing],
                "protected_paths": list(protected(project)),
                "visible_tests": [f"{SITE}/{DRIVER}"],
                "pids_limit": lab.PIDS,
                "max_turns": 40,
                "exec_timeout_s": 120,
                "kind": candidate.kind,
                "bugs": [
                    {
                        "kind": m.kind,
                        "path": m.edit.path,
                        "line": m.line,
                        "where": m.where,
                        "original": m.edit.old,
                        "broken": m.edit.new,
                    }
                    for m in candidate.mutations
                ],
                "provenance": {
                    "factory": "agentrl tasks synth repo",
                    "seed": seed,
                    "project": project.name,
                    "version": project.version,
                    "origin": project.origin,
                    "sha256": project.digest,
                    "licence": project.licence,
                    "homepage": project.homepage,
                    "requirements": list(project.requirements),
                    "python": f"{sys.version_info.major}.{sys.version_info.minor}",
                },
                "measured": {
                    "tests_s": round(took, 3),
                    "runs": baseline.repeats,
                    "flaky_tests": len(baseline.flaky),
                    "stable_tests": len(baseline.stable),
                    "broken_tests": len(candidate.failures),
                },
            }
        },
    }
    shown = tuple(test for test in failing)
    package.write_task(
        folder,
        config=config,
        instruction=instruction(candidate, shown, baseline),
        environment={},
        tests={DRIVER: driver(project, names, root="suite"), "pytestrun.py": lab.PROGRAM},
        solution=solve_script(candidate.edits),
    )
    lay_environment(project, folder / "environment", image, mutated(candidate))
    for name, content in ((DRIVER, driver(project, names, root="..")), ("pytestrun.py", lab.PROGRAM)):
        (folder / "environment" / "files" / SITE / name).write_text(content, encoding="utf-8")
    lay_suite(project, folder / "tests" / "suite")
    return package.load_task(folder)
