"""A project in a sandbox: which tests pass every time, what each executes and costs, and what a mutant
breaks.

All of the project's code runs in sandboxes of the given backend, as the policy's user, without network, with
memory, process and time limits. One sandbox serves many mutants: `pytestrun.py` loads pytest once and forks a
child per mutant, which sees the changed bytes without a file being written, and runs only the tests that
execute the changed lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from agentrl.types import ExecStatus, SandboxSpec
from envs import report
from envs.sandbox.contract import Backend, ExecRequest, Mount, Sandbox
from envs.tasks.synth.mutations import Edit
from envs.tasks.synth.project import SITE, Project, Rejected, pinned

PROGRAM = Path(__file__).with_name("pytestrun.py").read_text(encoding="utf-8")
MARK = hashlib.sha256((PROGRAM + report.PROGRAM).encode()).hexdigest()[:12]
"""What was measured by another program is measured again."""
TESTS_TARGET = "/tests"
WORKDIR = "/app"
MEMORY_MIB = 1024
DISK_MIB = 256
PIDS = 64
SUITE_S = 45.0
"""CPU seconds after which no further test of a suite begins: what was not begun is not relied on."""
BASELINE_DEADLINE_S = 90.0
"""CPU seconds of a run of the suite, its collection and the last test included."""
SLOWEST_TEST_S = 2.0
"""A test that takes longer, of a CPU or by the clock, is left out: it would be paid at every attempt."""
TRACED_TEST_S = 4.0
"""The same while its lines are traced."""
START_S = 1.5
"""What loading pytest and a project may take before the first test."""
CREATE_DEADLINE_S = 120.0

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What was measured of an unchanged suite. Test names are pytest node ids."""

    stable: tuple[str, ...]
    """Passed in every run, fast enough; in the order of the suite."""
    flaky: tuple[str, ...]
    """Passed in some runs only."""
    failing: tuple[str, ...]
    """Never passed, or were skipped."""
    slow: tuple[str, ...]
    broken: tuple[str, ...]
    """Why files could not be collected."""
    seconds: Mapping[str, float]
    """What each stable test takes: its longest CPU time, or its shortest by the clock where it waits."""
    lines: Mapping[str, Mapping[str, tuple[int, ...]]]
    """Executed lines by stable test and file."""
    repeats: int

    def watching(self, path: str, lines: tuple[int, int]) -> tuple[str, ...]:
        """Stable tests that execute one of these lines (both ends included; `(0, 0)`: any line), fastest
        first."""
        low, high = lines
        found = [
            name
            for name in self.stable
            if any(high == 0 or low <= line <= high for line in self.lines[name].get(path, ()))
        ]
        return tuple(sorted(found, key=lambda name: (self.seconds[name], name)))

    def files(self) -> tuple[str, ...]:
        """Files that stable tests execute."""
        return tuple(sorted({path for lines in self.lines.values() for path in lines}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A test that a mutant breaks."""

    test: str
    message: str
    where: tuple[str, int] | None
    """File and line of the project in which it failed, if not in the test itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What a mutant does. `ended`: ok, timeout, or how the process died."""

    ended: str
    failures: tuple[Failure, ...]
    broken: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A mutant to be run: edits over all files, and the tests that could see them."""

    key: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    timeout_s: float
    """Of a CPU; ten times that by the clock."""


class Lab:
    """A project's image on a backend. `opened` gives a sandbox that runs orders."""

    def __init__(self, project: Project, backend: Backend, image: str, suite: Path) -> None:
        self._project = project
        self._backend = backend
        self._image = image
        self._suite = suite
        self._numbers = itertools.count(1)

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Bench]:
        """A sandbox for as long as the block lasts."""
        number = next(self._numbers)
        spec = SandboxSpec(
            image=self._image, memory_mib=MEMORY_MIB, disk_mib=DISK_MIB, pids=PIDS, workdir=WORKDIR
        )
        sandbox = await self._backend.create(
            spec,
            image=self._image,
            session=f"synth-{self._project.slug}-{number}",
            mounts=(Mount(source=str(self._suite), target=TESTS_TARGET),),
            deadline_s=CREATE_DEADLINE_S,
        )
        try:
            yield Bench(self._project, sandbox)
        finally:
            await sandbox.close()

    async def baseline(self, repeats: int, *, at_once: int, told: Callable[[], None]) -> Baseline:
        """Run the suite `repeats` times, every second time backwards, and once more traced; `told` after
        each. The first run finds the tests that are worth the others."""

        async def one(*, trace: bool = False, backwards: bool = False, wanted: Sequence[str] | None) -> Any:
            async with self.opened() as bench:
                found = await bench.suite(trace=trace, backwards=backwards, wanted=wanted)
            told()
            return found

        first = await one(wanted=None)
        good = [name for name, seen in first["outcomes"].items() if seen[0] == "passed"]
        wanted = [name for name in good if min(first["seconds"][name]) <= SLOWEST_TEST_S]

        async def numbered(number: int) -> Any:
            return await one(trace=number == 0, backwards=number % 2 == 1, wanted=wanted)

        traced, *others = await in_order(numbered, range(repeats), at_once=at_once)
        return judge([first, *others], traced["lines"])


async def in_order(
    work: Callable[[Item], Awaitable[Result]], items: Iterable[Item], *, at_once: int
) -> list[Result]:
    """The results of `work` in the order of the items, `at_once` at a time. The first failure ends the
    others."""
    limit = asyncio.Semaphore(at_once)

    async def one(item: Item) -> Result:
        async with limit:
            return await work(item)

    running = [asyncio.ensure_future(one(item)) for item in items]
    try:
        return list(await asyncio.gather(*running))
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class Bench:
    """A live sandbox with the project in it."""

    def __init__(self, project: Project, sandbox: Sandbox) -> None:
        self._project = project
        self._sandbox = sandbox
        self._orders = itertools.count(1)

    async def suite(self, *, trace: bool, backwards: bool, wanted: Sequence[str] | None) -> dict[str, Any]:
        """Outcomes, times and lines of the tests that are wanted, or all. Raises `Rejected` when they do not
        come to their end."""
        answer = await self._order(
            {
                "mode": "baseline",
                "files": self._project.tests,
                "trace": trace,
                "backwards": backwards,
                "wanted": wanted,
                "test_s": TRACED_TEST_S if trace else SLOWEST_TEST_S,
                "suite_s": SUITE_S,
                "timeout_s": BASELINE_DEADLINE_S,
            },
            timeout_s=10 * BASELINE_DEADLINE_S + 30.0,
        )
        if answer["ended"] != "ok":
            cause = "suite_too_slow" if answer["ended"] == "timeout" else "suite_dies"
            raise Rejected(cause, f"The test suite ended with: {answer['ended']}.")
        found: dict[str, Any] = answer["value"]
        return found

    async def mutants(self, jobs: Sequence[Job]) -> dict[str, Effect]:
        """What each mutant breaks, by key."""
        answer = await self._order(
            {
                "mode": "mutants",
                "mutants": [
                    {
                        "id": job.key,
                        "edits": [(e.path, e.start, e.end, e.new) for e in job.edits],
                        "nodes": job.tests,
                        "timeout_s": job.timeout_s,
                    }
                    for job in jobs
                ],
            },
            timeout_s=10 * sum(job.timeout_s for job in jobs) + 120.0,
        )
        return {one["id"]: _effect(one) for one in answer["mutants"]}

    async def _order(self, order: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        common = {
            "suite": self._project.suite,
            "sources": self._project.sources,
            "site": SITE,
            "pinned": pinned(self._project),
            "testrun": report.PROGRAM,
        }
        result = await self._sandbox.exec(
            ExecRequest(
                exec_id=f"order-{next(self._orders)}",
                argv=("python3", "-I", "-S", "-c", PROGRAM, f"{TESTS_TARGET}/suite"),
                stdin=json.dumps({**order, **common}).encode(),
                timeout_s=timeout_s,
                report_fd=True,
            )
        )
        if result.status is not ExecStatus.EXITED or result.exit_code != 0 or not result.report:
            said = result.stderr.text().strip().splitlines()[-1:] or ["it said nothing"]
            raise Rejected(
                "suite_dies", f"The test process {result.status} with {result.exit_code}: {said[0]}"
            )
        answer: dict[str, Any] = json.loads(zlib.decompress(result.report))
        return answer


def _effect(one: Mapping[str, Any]) -> Effect:
    value = one["value"] or {"bad": {}, "broken": {}, "missing": 0}
    failures = tuple(
        Failure(test=name, message=message, where=None if where is None else (where[0], where[1]))
        for name, (outcome, message, where) in sorted(value["bad"].items())
        if outcome in ("failed", "error")
    )
    lost = [f"{value['missing']} tests were not reported"] if value["missing"] else []
    return Effect(
        ended=one["ended"],
        failures=failures,
        broken=(*value["broken"].values(), *lost),
        seconds=one["seconds"],
    )


def judge(runs: Sequence[Mapping[str, Any]], lines: Mapping[str, Mapping[str, Sequence[int]]]) -> Baseline:
    """Several runs of one suite to what can be relied on. `lines`: what a traced run saw, by test and file.

    Only the first run is of all tests: the others are of those that passed in it, fast enough.
    """
    names = list(runs[0]["outcomes"])
    passes = {
        name: sum(run["outcomes"].get(name, ("missing",))[0] == "passed" for run in runs) for name in names
    }
    seconds = {}
    for name in names:
        seen = [run["seconds"][name] for run in runs if name in run["seconds"]]
        used, waited = zip(*seen, strict=True) if seen else ((0.0,), (0.0,))
        seconds[name] = max(max(used), min(waited))
    slow = [name for name in names if seconds[name] > SLOWEST_TEST_S]
    stable = tuple(name for name in names if passes[name] == len(runs) and name not in slow)
    return Baseline(
        stable=stable,
        flaky=tuple(name for name in names if 0 < passes[name] < len(runs) and name not in slow),
        failing=tuple(name for name in names if passes[name] == 0 and name not in slow),
        slow=tuple(slow),
        broken=tuple(dict.fromkeys(text for run in runs for text in run["broken"].values())),
        seconds={name: seconds[name] for name in stable},
        lines={name: {p: tuple(found) for p, found in lines.get(name, {}).items()} for name in stable},
        repeats=len(runs),
    )


def to_json(baseline: Baseline) -> bytes:
    """For the work folder."""
    return zlib.compress(json.dumps(asdict(baseline)).encode())


def from_json(raw: bytes) -> Baseline:
    """What `to_json` wrote."""
    facts = json.loads(zlib.decompress(raw))
    lists: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in facts.items()
    }
    lines = {name: {p: tuple(found) for p, found in files.items()} for name, files in facts["lines"].items()}
    return Baseline(**{**lists, "lines": lines})
