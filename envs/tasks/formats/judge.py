"""Test logs to a reward, by the names of tests: a program that imported packages carry in `tests/`.

    python3 -I judge.py LOG EXPECTED.json REWARD.json

`EXPECTED.json` holds `parser` and either `fail_to_pass` and `pass_to_pass` (all must pass; a missing test has
not passed), `outcomes` (R2E-Gym: exactly these), or neither (terminal-bench 1: every test seen must pass).
Exits other than 0, and writes nothing, where the log does not show that tests were begun: whose fault that is
can not be told from a log, so there is no reward. Only the standard library, Python 3.9 and newer.

What is read was printed by the process that ran the tested code, which could print the same: the limit of
every benchmark that is graded by logs. Packages of our own use the runner with canaries instead.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from typing import Any

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
GOOD = ("PASSED", "XFAIL")
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
WORDS = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS")
VERBOSE = re.compile(rf"(\S+::.+?) ({'|'.join(WORDS)})(\s+\[\s*\d+%\])?\s*$")
UNITTEST = {"ok": "PASSED", "FAIL": "FAILED", "ERROR": "ERROR", "expected failure": "XFAIL"}


def pytest(log: str) -> dict[str, str]:
    """Outcomes by node id, from `-rA` summary lines and from verbose lines.

    Data sets cut names off at their first blank, and paths in parameters to their last part: a test is known
    by those names too, and a name that several tests share has the worst of their outcomes.
    """
    seen: dict[str, str] = {}

    def note(name: str, word: str) -> None:
        path = re.match(r"(.*?)\[/(?!/)([^*]*)\]$", name)
        short = f"{path.group(1)}[/{path.group(2).rpartition('/')[2]}]" if path else name
        for known in {name, name.split(" ")[0], short}:
            if known and (seen.get(known, word) in GOOD or known not in seen):
                seen[known] = word

    for line in log.splitlines():
        first, _, rest = line.partition(" ")
        if first in WORDS and rest.strip():
            if first == "SKIPPED" and re.match(r"\[\d+\]", rest):
                continue
            note((rest if first in GOOD else rest.split(" - ")[0]).strip(), first)
            continue
        found = VERBOSE.match(line)
        if found:
            note(found.group(1), found.group(2))
    return seen


def unittest(log: str) -> dict[str, str]:
    """Outcomes by `test_x (module.Class)`, from verbose lines and from the headings of failures."""
    seen: dict[str, str] = {}
    for line in log.splitlines():
        name, mark, said = line.rpartition(" ... ")
        if mark:
            word = said.strip().split(" '")[0]
            seen[name.strip()] = UNITTEST.get(word, "SKIPPED" if word.startswith("skipped") else "ERROR")
        elif line.startswith(("FAIL: ", "ERROR: ")):
            word, _, name = line.partition(": ")
            seen[name.strip()] = UNITTEST[word]
    return seen


def sympy(log: str) -> dict[str, str]:
    """Outcomes by function, from `bin/test --verbose`."""
    seen: dict[str, str] = {}
    for line in log.splitlines():
        found = re.match(r"(test_\w+) (ok|F|E|f|X|s|w)\b", line.strip())
        if found:
            word = found.group(2)
            seen[found.group(1)] = {"ok": "PASSED", "f": "XFAIL", "X": "XPASS", "s": "SKIPPED"}.get(
                word, "FAILED"
            )
    return seen


def r2e(log: str) -> dict[str, str]:
    """Outcomes by `Class.test`, from the short summary only, as R2E-Gym reads it."""
    _, mark, summary = log.partition("short test summary info")
    seen: dict[str, str] = {}
    for line in summary.splitlines() if mark else ():
        word = line.split(" ")[0]
        if word in ("PASSED", "FAILED", "ERROR") and "::" in line:
            seen[".".join(line.split("::")[1:]).split(" - ")[0]] = word
    return seen


PARSERS: dict[str, Callable[[str], dict[str, str]]] = {
    "pytest": pytest,
    "unittest": unittest,
    "sympy": sympy,
    "r2e": r2e,
}


def passed(name: str, seen: dict[str, str], good: tuple[str, ...] = GOOD) -> bool:
    """Whether a test passed. Parametrized names that a data set cut off in the middle match by prefix."""
    if name in seen or name.count("[") <= name.count("]"):
        return seen.get(name) in good
    whole = [word for other, word in seen.items() if other.startswith(name)]
    return bool(whole) and all(word in good for word in whole)


def share(names: list[str], seen: dict[str, str], good: tuple[str, ...]) -> float:
    """The share of tests that passed; 1 for no tests."""
    return sum(passed(name, seen, good) for name in names) / len(names) if names else 1.0


def judged(log: str, expected: dict[str, Any]) -> dict[str, float] | None:
    """The components of the reward, or None where the log can not be judged."""
    log = ANSI.sub("", log).replace("\r\n", "\n")
    parser = PARSERS.get(expected["parser"])
    if parser is None:
        return None
    if expected.get("markers"):
        if START not in log:
            return None
        log = log.partition(START)[2].partition(END)[0]
    seen = parser(log)
    if "outcomes" in expected:
        wanted = {ANSI.sub("", name).split(" - ")[0]: word for name, word in expected["outcomes"].items()}
        wanted = {name: word for name, word in wanted.items() if name}
        if not seen and any(wanted.values()):
            return {"reward": 0.0, "share": 0.0}
        same = sum(seen.get(name) == word for name, word in wanted.items())
        return {"reward": float(seen == wanted), "share": same / max(1, len(wanted))}
    if "fail_to_pass" not in expected:
        if not seen:
            return None
        right = sum(word in GOOD for word in seen.values())
        return {"reward": float(right == len(seen)), "share": right / len(seen)}
    parts = {
        "fail_to_pass": share(expected["fail_to_pass"], seen, GOOD),
        "pass_to_pass": share(expected["pass_to_pass"], seen, (*GOOD, "SKIPPED")),
    }
    parts["reward"] = float(all(value == 1.0 for value in parts.values()))
    return parts


def main() -> None:
    with open(sys.argv[1], errors="replace") as file:
        log = file.read()
    with open(sys.argv[2]) as file:
        expected = json.load(file)
    parts = judged(log, expected)
    if parts is None:
        sys.stderr.write("The log does not show tests that can be judged. Its end:\n" + log[-2000:])
        sys.exit(2)
    os.makedirs(os.path.dirname(sys.argv[3]), exist_ok=True)
    with open(sys.argv[3], "w") as file:
        json.dump(parts, file)


if __name__ == "__main__":
    main()
