"""What is decided from measurements: stable tests, which are graded, names, words, estimates. No sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from envs.tasks.synth import lab, packages
from envs.tasks.synth.lab import Baseline, Failure
from envs.tasks.synth.mutations import Edit, Mutation
from envs.tasks.synth.packages import Candidate
from envs.tasks.synth.project import Project, Rejected

SOURCE = b"def f(a):\n    return a + 1234567\n\n\ndef g(a):\n    return f(a)\n"


def run(outcomes: dict[str, str], cpu: float = 0.1, clock: float = 0.1) -> dict[str, object]:
    return {
        "outcomes": {name: [outcome, "", None] for name, outcome in outcomes.items()},
        "seconds": {name: [5.0 if "slow" in name else cpu, clock] for name in outcomes},
        "broken": {},
    }


def test_only_a_fast_test_that_passes_in_every_run_is_relied_on() -> None:
    first = {"t::a": "passed", "t::b": "passed", "t::c": "failed", "t::slow": "passed", "t::d": "skipped"}
    second = {"t::a": "passed", "t::b": "failed", "t::c": "failed", "t::slow": "passed"}
    found = lab.judge([run(first), run(second, cpu=0.3)], {"t::a": {"x.py": [2]}, "t::b": {"x.py": [3]}})
    assert found.stable == ("t::a",)
    assert found.flaky == ("t::b",)
    assert found.failing == ("t::c", "t::d")
    assert found.slow == ("t::slow",)
    assert found.seconds == {"t::a": 0.3}
    assert found.lines == {"t::a": {"x.py": (2,)}}
    assert lab.from_json(lab.to_json(found)) == found


def test_a_test_is_slow_by_its_cpu_time_and_by_the_clock_only_where_it_always_waits() -> None:
    names = {"t::a": "passed"}
    busy_once = lab.judge([run(names, cpu=0.2, clock=40.0), run(names, cpu=0.1, clock=0.5)], {})
    waits = lab.judge([run(names, clock=4.0), run(names, clock=3.0)], {})
    assert (busy_once.stable, busy_once.seconds) == (("t::a",), {"t::a": 0.5})
    assert (waits.stable, waits.slow) == ((), ("t::a",))


@pytest.fixture
def project(tmp_path: Path) -> Project:
    (tmp_path / "x.py").write_bytes(SOURCE)
    return Project(
        name="x", version="1", origin="x==1", digest="d", licence="MIT", summary="Adds.", homepage="",
        tree=str(tmp_path), sources=("",), tests=("t.py",), suite=("t.py",), requirements=(),
    )  # fmt: skip


def baseline(
    lines: dict[str, dict[str, tuple[int, ...]]], seconds: dict[str, float] | None = None
) -> Baseline:
    return Baseline(
        stable=tuple(lines), flaky=(), failing=(), slow=(), broken=(), lines=lines, repeats=2,
        seconds=seconds or dict.fromkeys(lines, 0.1),
    )  # fmt: skip


BUG = Mutation(
    kind="operator", edit=Edit(path="x.py", start=23, old="+", new="-"), where="f", line=2, watch=(2, 2)
)


def candidate(
    project: Project, *failing: str, message: str = "1 != 2", unsure: tuple[str, ...] = ()
) -> Candidate:
    failures = tuple(Failure(test=name, message=message, where=None) for name in failing)
    return Candidate(project=project, mutations=(BUG,), kind="operator", failures=failures, unsure=unsure)


def test_the_nearest_tests_must_still_pass_and_a_doubtful_one_is_not_graded(project: Project) -> None:
    lines = {
        "t::far": {"y.py": (1,)},
        "t::same_file": {"x.py": (6,)},
        "t::near": {"x.py": (2,)},
        "t::fails": {"x.py": (2,)},
        "t::unsure": {"x.py": (2,)},
    }
    found = packages.graded(candidate(project, "t::fails", unsure=("t::unsure",)), baseline(lines))
    assert found == (("t::fails",), ("t::near", "t::same_file", "t::far"))


def test_no_more_tests_are_graded_than_are_worth_their_time(project: Project) -> None:
    names = [f"t::n{n:03}" for n in range(200)]
    lines = {name: {"x.py": (2,)} for name in names}
    seconds = {name: 0.01 - n / 100_000 for n, name in enumerate(names)}
    failing, passing = packages.graded(candidate(project, *names[:100]), baseline(lines, seconds))
    assert failing == tuple(names[70:100]), "the fastest, in the order of the suite"
    assert len(failing) + len(passing) == packages.MOST_TESTS
    assert set(passing) <= set(names[100:]), "one that the bug breaks is never among those that must pass"


def test_tests_are_graded_as_long_as_they_are_paid_for_and_never_none(project: Project) -> None:
    names = [f"t::n{n:02}" for n in range(20)]
    lines = {name: {"x.py": (2,)} for name in names}
    dear = packages.graded(candidate(project, *names[:10]), baseline(lines, dict.fromkeys(names, 1.5)))
    assert dear == (("t::n00",), tuple(names[10 : 10 + packages.LEAST_PASSING]))
    cheap = packages.graded(candidate(project, *names[:10]), baseline(lines, dict.fromkeys(names, 0.125)))
    assert cheap == (tuple(names[:8]), tuple(names[10:18])), "eight of an eighth of a second are one second"


def test_short_names_are_identifiers_and_never_collide() -> None:
    tests = [
        "a/test_x.py::T::test_y[1-é]",
        "a/test_x.py::T::test_y[1-ü]",
        "b_test.py::test_z",
        "a/test_x.py::T_test_y[1]",
    ]
    names = packages.short_names(tests)
    assert list(names.values()) == tests
    assert list(names)[:3] == ["test_x__T__test_y_1", "test_x__T__test_y_1_2", "test_b_test__test_z"]
    assert all(name.isidentifier() and name.startswith("test_") for name in names)


def test_a_message_that_quotes_the_original_line_is_not_shown(project: Project) -> None:
    one = candidate(project, "t::a", message="in: return a + 1234567")
    text = packages.instruction(one, ("t::a",), baseline({"t::a": {"x.py": (2,)}}))
    assert "- `t::a`\n" in text
    assert "1234567" not in text


def test_an_instruction_that_gives_the_fix_away_is_refused(project: Project) -> None:
    told = "t::test[return a + 1234567]"
    with pytest.raises(Rejected, match="holds the fix"):
        packages.instruction(candidate(project, told), (told,), baseline({told: {"x.py": (2,)}}))


def test_harder_is_what_fewer_tests_see_after_more_code(project: Project) -> None:
    few = {"t::a": {"x.py": (2,)}, "t::b": {"x.py": (2,)}}
    much = {f"t::{n}": {"x.py": (2,)} for n in range(9)}
    much["t::a"] = {"x.py": (2,), "y.py": tuple(range(4000))}
    easy = packages.difficulty(candidate(project, "t::a", "t::b"), baseline(few))
    hard = packages.difficulty(candidate(project, "t::a"), baseline(much))
    assert 0 <= easy < hard <= 1
    assert easy == round(0.4 / 12 + 0.2, 3)  # two lines at least, all tests notice, none fails in the file


def test_an_unbroken_copy_in_the_tree_is_found(project: Project) -> None:
    assert packages.copies(candidate(project, "t::a")) == []
    (Path(project.tree) / "docs").mkdir()
    (Path(project.tree) / "docs" / "copy.txt").write_bytes(SOURCE)
    assert packages.copies(candidate(project, "t::a")) == ["docs/copy.txt"]
