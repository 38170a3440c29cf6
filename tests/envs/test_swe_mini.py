"""The generated suite: valid, unique, deterministic, and no clue to the fix but the tests."""

import asyncio
import random
import re
import sys
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.types import Split
from envs.admission import admit_suite
from envs.sandbox.plain import PlainBackend
from envs.tasks import package, swe_mini

WORDS = re.compile(r"[A-Za-z_]+|\d+|[^\sA-Za-z_\d]")


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    return swe_mini.generate(tmp_path_factory.mktemp("suite"), train=40, heldout=20, seed=3)


def module_of(folder: Path) -> str:
    (file,) = (folder / "environment").glob("*.py")
    return file.read_text()


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_tasks(
    suite: tuple[Path, ...], tmp_path: Path
) -> None:
    again = swe_mini.generate(tmp_path / "a", train=40, heldout=20, seed=3)
    assert [package.revision_of(p) for p in again] == [package.revision_of(p) for p in suite]
    other = swe_mini.generate(tmp_path / "b", train=40, heldout=20, seed=4)
    assert not {module_of(p) for p in other} & {module_of(p) for p in suite}


def test_every_package_loads_and_names_its_bug(suite: tuple[Path, ...]) -> None:
    tasks = [package.load_task(path) for path in suite]
    assert [t.split for t in tasks] == [Split.TRAIN] * 40 + [Split.HELDOUT] * 20
    assert len({t.id for t in tasks}) == 60
    for task in tasks:
        facts = task.metadata
        source = (Path(task.path) / "environment" / facts["file"]).read_text()
        assert source.count(facts["buggy"] + "\n") == 1
        assert facts["fix"] in facts["alternatives"]
        assert facts["buggy"] in facts["alternatives"]
        assert facts["buggy"] != facts["fix"]
        assert facts["file"] in task.instruction
        assert facts["variable"] in task.instruction
        assert facts["fix"] not in task.instruction
        assert facts["file"].removesuffix(".py") not in sys.stdlib_module_names


def test_files_are_short(suite: tuple[Path, ...]) -> None:
    for path in suite:
        for file in (path / "environment").rglob("*.py"):
            assert len(file.read_text().splitlines()) < 25
            assert len(WORDS.findall(file.read_text())) < 160


def test_no_module_is_in_both_splits_of_any_seeds(tmp_path: Path) -> None:
    made = {
        seed: swe_mini.generate(tmp_path / str(seed), train=60, heldout=30, seed=seed) for seed in range(3)
    }
    train = {module_of(p) for paths in made.values() for p in paths[:60]}
    heldout = {module_of(p) for paths in made.values() for p in paths[60:]}
    assert len(train) >= 178
    assert not train & heldout


def test_every_wrong_alternative_fails_a_visible_test_and_the_right_one_none() -> None:
    for repository in islice(swe_mini._repositories(random.Random(11)), 150):
        repository.check()


def test_given_the_wrong_line_every_other_alternative_is_equally_likely() -> None:
    """Chi-squared of the right alternative given family and wrong one, over all families at once."""
    seen: Counter[tuple[str, int, int]] = Counter()
    for repository in islice(swe_mini._repositories(random.Random(12)), 3000):
        seen[repository.family.name, repository.buggy, repository.wrong.right] += 1
    statistic, freedom = 0.0, 0
    for family in swe_mini.FAMILIES:
        size = len(family.alternatives)
        for wrong in range(size):
            row = [seen[family.name, wrong, right] for right in range(size) if right != wrong]
            expected = sum(row) / len(row)
            statistic += sum((count - expected) ** 2 / expected for count in row)
            freedom += len(row) - 1
    assert seen.total() == 3000
    # mean `freedom`, standard deviation sqrt(2 * freedom): five of them is one in a million
    assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5


def test_what_is_visible_but_the_tests_does_not_depend_on_the_fix() -> None:
    """Same seed, other right answer: the module is the same, as long as the wrong line is."""
    repository = next(swe_mini._repositories(random.Random(13)))
    texts = {repository.source(repository.buggy)}
    for right in range(len(repository.wrong.expressions)):
        functions = tuple(
            replace(f, right=right) if i == repository.at else f for i, f in enumerate(repository.functions)
        )
        texts.add(replace(repository, functions=functions).source(repository.buggy))
    assert len(texts) == 1


def test_solutions_pass_and_untouched_tasks_fail(suite: tuple[Path, ...]) -> None:
    async def run() -> None:
        backend = PlainBackend()
        try:
            tasks = [package.load_task(path) for path in suite[::6]]
            for admission in await admit_suite(tasks, backend, light=True):
                assert admission.valid, admission.reasons
                assert admission.mode == "light"
        finally:
            await backend.close()

    asyncio.run(run())


def test_a_negative_count_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="negative"):
        swe_mini.generate(tmp_path, train=-1, heldout=0, seed=0)
    assert swe_mini.generate(tmp_path, train=0, heldout=0, seed=0) == ()
