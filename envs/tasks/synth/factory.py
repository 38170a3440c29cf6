"""Names of real projects to suites of admitted tasks: fetch, measure, break, keep, write, admit.

Everything that was found out is written below the work folder at once (one JSON line per mutant and per
admission), so that the same call after a crash goes on where it stopped and repeats nothing. The same seed
and the same project give the same mutants in the same order. A mutant is kept when it still parses, some
stable tests fail with it every time, and the rest pass; a package is admitted when `envs.admission` says so
on the backend, and otherwise goes to the work folder's `quarantine/` with its reason.

No project and no candidate ends the call: what the backend could not judge is set aside with its reason and
tried again by the next call. A project has a budget of time, after which the next one begins; what it did not
get to is where the next call goes on.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from agentrl.errors import BoundaryError
from agentrl.types import Task, to_dict
from envs.admission import admit
from envs.evidence import Admission
from envs.sandbox.contract import Backend
from envs.tasks import package
from envs.tasks.synth import lab, mutations, packages, project
from envs.tasks.synth.lab import Baseline, Effect, Failure, Job, Lab
from envs.tasks.synth.mutations import Edit, Mutation
from envs.tasks.synth.packages import Candidate
from envs.tasks.synth.project import Project, Rejected

CAUSES = {
    "admitted": "is a task",
    "quarantined": "was written and not admitted",
    "faulted": "the backend could not judge it; the next call tries again",
    "not_reached": "its project's time was over; the next call goes on",
    "not_a_change": "does not parse, or is the same program",
    "survives": "no test fails",
    "hangs": "the tests do not come to an end",
    "dies": "the test process dies, or takes all memory",
    "leaks_fix": "a failing test's name or message holds the fix",
    "no_import": "tests can not be collected",
    "too_broad": "nearly everything fails",
    "flaky": "no test fails every time",
    "duplicate": "the same tests fail for the same function",
    "copy_in_tree": "an unbroken copy lies beside it",
}
"""What becomes of a mutant that was tried."""
BATCH = 4
"""Mutants per order to a sandbox."""
TRIES = 4
"""Mutants tried per task wanted, at most."""
BROADEST = 0.6
"""A mutant that breaks a larger share of the suite (and more than `BROAD_TESTS`) is no puzzle."""
BROAD_TESTS = 25
COMPOSED_SHARE = 0.15
"""Of the tasks wanted, how many hold several bugs."""
MUTANT_FLOOR_S = 3.0
MUTANT_SLACK = 4.0
"""CPU seconds that a mutant's tests may take: the floor and so many times what they took unbroken."""
WATCHED_S = 2.0
"""CPU seconds of the tests that a mutant is tried with, of those that execute the changed lines, fast ones
first; the others are not graded."""
BREAK_SHARE = 0.35
"""Of the time that a project has left after its tests are measured, what making mutants may take; the rest is
for admission."""
BUDGET_S = 240.0


class Progress(Protocol):
    """What the factory tells while it works; `agentrl.training.events.Listener` is one."""

    def begin(self, phase: str, *, total: int | None, unit: str) -> None: ...
    def advance(self, n: int = 1, **facts: float | int | str) -> None: ...
    def end(self, **facts: float | int | str) -> None: ...
    def note(self, message: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is wanted.

    per_project: tasks per project, at most.
    repeats: runs of the suite, of the solution and of the empty attempt.
    image: base image of the written Dockerfile; `scratch` brings files only.
    light: admit with one run each and without the exploit battery.
    budget_s: seconds by the clock that a project may take, on average: what one leaves over is divided among
        those behind it. What is under way at the end is finished.
    """

    out: Path
    work: Path
    per_project: int = 30
    seed: int = 1
    repeats: int = 3
    at_once: int = 2
    image: str = "scratch"
    light: bool = False
    budget_s: float = BUDGET_S
    extra: tuple[str, ...] = ()


@dataclass(slots=True)
class Tried:
    """One line of the work folder's `mutants-….jsonl`."""

    key: str
    kind: str
    cause: str
    """One of `CAUSES`, or empty while nothing stands against it."""
    mutations: tuple[Mutation, ...]
    failures: tuple[Failure, ...] = ()
    unsure: tuple[str, ...] = ()


@dataclass(slots=True)
class Outcome:
    """One project at the end."""

    spec: str
    name: str = ""
    licence: str = ""
    split: str = ""
    rejected: str = ""
    why: str = ""
    tests: int = 0
    flaky: int = 0
    proposed: Counter[str] = field(default_factory=Counter)
    covered: Counter[str] = field(default_factory=Counter)
    tried: list[tuple[str, str]] = field(default_factory=list)
    """Kind and cause of every mutant tried."""
    tasks: list[Admission] = field(default_factory=list)

    @property
    def admitted(self) -> int:
        return sum(one.valid for one in self.tasks)


Kept = Callable[[Task, Admission], None]
"""What is told of every admission, valid or not: where it is stored."""


async def make(
    specs: Sequence[str], plan: Plan, backend: Backend, *, listener: Progress, kept: Kept
) -> tuple[Outcome, ...]:
    """All projects, one after another, each with `plan.at_once` sandboxes. Never raises `Rejected` or
    `BoundaryError`."""
    found: list[Outcome] = []
    started = time.monotonic()
    end = started + plan.budget_s * len(specs)
    for number, spec in enumerate(specs, start=1):
        outcome = Outcome(spec=spec)
        deadline = time.monotonic() + max(0.0, end - time.monotonic()) / (len(specs) - number + 1)
        try:
            label = f"{Path(spec).name} ({number} of {len(specs)})"
            await _one(spec, label, deadline, plan, backend, listener, kept, outcome)
        except (Rejected, BoundaryError) as error:
            cause = error.cause if isinstance(error, Rejected) else f"fault_{error.code}"
            outcome.rejected, outcome.why = cause, error.message
            listener.end()
            listener.note(f"{spec} is rejected ({cause}): {error.message}")
        found.append(outcome)
        minutes = (time.monotonic() - started) / 60
        listener.note(
            f"{spec}: {outcome.admitted} tasks. Of {number} projects {sum(o.admitted for o in found)} tasks"
            f" in {minutes:.1f} min; at this pace {minutes / number * (len(specs) - number):.0f} min are left"
        )
    return tuple(found)


async def _one(
    spec: str,
    label: str,
    deadline: float,
    plan: Plan,
    backend: Backend,
    listener: Progress,
    kept: Kept,
    outcome: Outcome,
) -> None:
    folder = plan.work / Path(spec).name
    listener.begin(f"{label}: fetch", total=1, unit="projects")
    runner = await asyncio.to_thread(project.install_runner, plan.work / "runner")
    found = await asyncio.to_thread(project.fetch, spec, folder, runner=runner, extra=plan.extra)
    outcome.name, outcome.licence, outcome.split = found.name, found.licence, str(packages.split_of(found))
    listener.advance()
    listener.end()
    place = await _lab(found, folder, backend, plan)
    baseline = await _baseline(place, folder, plan, listener, label)
    outcome.tests, outcome.flaky = len(baseline.stable), len(baseline.flaky)
    if not baseline.stable:
        why = next(iter(baseline.broken), "see its tests")
        raise Rejected("no_passing_tests", f"No test of {found.name} passes every time: {why}")
    queue = _queue(found, baseline, plan.seed, outcome)
    until = time.monotonic() + BREAK_SHARE * (deadline - time.monotonic())
    tried = await _try(found, baseline, queue, place, folder, plan, listener, label, until)
    await _admit(found, baseline, tried, folder, plan, backend, listener, kept, outcome, label, deadline)
    outcome.tried = [(one.kind, one.cause) for one in tried]


async def _lab(found: Project, folder: Path, backend: Backend, plan: Plan) -> Lab:
    clean, suite = folder / "environment", folder / "suite"
    for stale in (clean, suite):
        shutil.rmtree(stale, ignore_errors=True)
    await asyncio.to_thread(packages.lay_environment, found, clean, plan.image, {})
    await asyncio.to_thread(packages.lay_suite, found, suite / "suite")
    image = await backend.prepare(str(clean))
    return Lab(found, backend, image, suite)


async def _baseline(place: Lab, folder: Path, plan: Plan, listener: Progress, label: str) -> Baseline:
    note = folder / f"baseline-{lab.MARK}.z"
    if note.is_file():
        return lab.from_json(note.read_bytes())
    listener.begin(f"{label}: run tests", total=1 + plan.repeats, unit="runs")
    baseline = await place.baseline(plan.repeats, at_once=plan.at_once, told=listener.advance)
    listener.end(stable=len(baseline.stable), flaky=len(baseline.flaky), failing=len(baseline.failing))
    written = note.with_suffix(".part")
    written.write_bytes(lab.to_json(baseline))
    written.replace(note)
    return baseline


# ---------------------------------------------------------------------------------------------------- mutants


def _queue(found: Project, baseline: Baseline, seed: int, outcome: Outcome) -> list[Mutation]:
    """Mutations that stable tests execute, kinds in turn, functions in turn within a kind."""
    rng = random.Random(f"{found.slug}/{seed}")
    suite = tuple(name + "/" for name in found.suite) + found.suite
    by_kind: dict[str, list[Mutation]] = {}
    for path in baseline.files():
        if path.startswith(suite) or path.endswith(("setup.py", "conftest.py")):
            continue
        for mutation in mutations.propose(path, (Path(found.tree) / path).read_bytes(), rng):
            outcome.proposed[mutation.kind] += 1
            by_kind.setdefault(mutation.kind, []).append(mutation)
    executed: dict[str, set[int]] = {}
    for files in baseline.lines.values():
        for path, lines in files.items():
            executed.setdefault(path, set()).update(lines)
    queues = []
    for kind in mutations.KINDS:
        usable = [m for m in by_kind.get(kind, ()) if _executed(m, executed)]
        outcome.covered[kind] = len(usable)
        rng.shuffle(usable)
        seen: Counter[tuple[str, str]] = Counter()
        turns = []
        for mutation in usable:
            place = (mutation.edit.path, mutation.where)
            turns.append((seen[place], mutation))
            seen[place] += 1
        queues.append([mutation for _, mutation in sorted(turns, key=lambda t: t[0])])
    longest = max(map(len, queues), default=0)
    return [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]


def _executed(mutation: Mutation, executed: Mapping[str, set[int]]) -> bool:
    lines, (low, high) = executed.get(mutation.edit.path, set()), mutation.watch
    return bool(lines) if high == 0 else any(low <= line <= high for line in lines)


async def _try(
    found: Project,
    baseline: Baseline,
    queue: Sequence[Mutation],
    place: Lab,
    folder: Path,
    plan: Plan,
    listener: Progress,
    label: str,
    until: float,
) -> list[Tried]:
    """Mutants until enough are kept or the time is over, single ones first, then several together."""
    notes = _Notes(folder / f"mutants-{lab.MARK}.jsonl")
    composed = round(COMPOSED_SHARE * plan.per_project)
    wanted = plan.per_project - composed
    limit = TRIES * plan.per_project
    listener.begin(f"{label}: break", total=plan.per_project, unit="mutants")
    tried: list[Tried] = []
    judged = _Judge(found, baseline)
    singles = [(m,) for m in queue[:limit]]
    complete = await _batches(singles, wanted, judged, notes, place, plan, listener, tried, until)
    if complete:  # of fewer, others would be composed than the next call composes
        singles_kept = [one for one in tried if not one.cause]
        rng = random.Random(f"{found.slug}/{plan.seed}/composed")
        groups = _compose(singles_kept, 3 * composed, rng)
        enough = len(singles_kept) + composed
        await _batches(groups, enough, judged, notes, place, plan, listener, tried, until)
    listener.end(kept=sum(not one.cause for one in tried), tried=len(tried))
    return tried


async def _batches(
    groups: Sequence[tuple[Mutation, ...]],
    wanted: int,
    judged: _Judge,
    notes: _Notes,
    place: Lab,
    plan: Plan,
    listener: Progress,
    tried: list[Tried],
    until: float,
) -> bool:
    """Go on until `wanted` of all that were tried are kept: False when the time was over before. Results are
    taken in the order of `groups`, so that what is kept does not depend on which sandbox was faster."""
    step = BATCH * plan.at_once
    for start in range(0, len(groups), step):
        if sum(not one.cause for one in tried) >= wanted:
            return True
        part = groups[start : start + step]
        fresh = [g for g in part if packages.key_of([m.edit for m in g]) not in notes.known]
        if fresh and time.monotonic() > until:
            return False
        pieces = [fresh[i : i + BATCH] for i in range(0, len(fresh), BATCH)]
        for results in await asyncio.gather(*(judged.measure(piece, place) for piece in pieces)):
            for one in results:
                notes.add(one)
        for group in part:
            if sum(not one.cause for one in tried) >= wanted:
                return True
            one = judged.settle(notes.known[packages.key_of([m.edit for m in group])])
            tried.append(one)
            listener.advance(int(not one.cause), tried=len(tried))
    return True


def _compose(singles: Sequence[Tried], count: int, rng: random.Random) -> list[tuple[Mutation, ...]]:
    """Two or three kept mutants of different functions, in one file and in several in turn."""
    found: list[tuple[Mutation, ...]] = []
    seen: set[str] = set()
    for number in range(20 * count):
        if len(found) == count or len(singles) < 2:
            break
        size = min(len(singles), 2 + (number % 4 == 3))
        picked = [one.mutations[0] for one in rng.sample(list(singles), size)]
        files = {m.edit.path for m in picked}
        places = {(m.edit.path, m.where) for m in picked}
        several = number % 2 == 0
        key = packages.key_of([m.edit for m in picked])
        if len(places) < size or key in seen or (several and len(files) < 2 and number < 10 * count):
            continue
        seen.add(key)
        found.append(tuple(sorted(picked, key=lambda m: (m.edit.path, m.edit.start))))
    return found


class _Judge:
    """Decides what a mutant is worth. `measure` is the costly part and is remembered; `settle` compares with
    what was kept before."""

    def __init__(self, found: Project, baseline: Baseline) -> None:
        self._project = found
        self._baseline = baseline
        self._kept: set[tuple[frozenset[tuple[str, str]], frozenset[str]]] = set()

    async def measure(self, groups: Sequence[tuple[Mutation, ...]], place: Lab) -> list[Tried]:
        """What each does. Where one ends the sandbox, each is tried alone: only that one is to blame."""
        try:
            return await self._together(groups, place)
        except (Rejected, BoundaryError) as error:
            if len(groups) == 1:
                one = self._start(groups[0])
                one.cause = "dies" if isinstance(error, Rejected) else "faulted"
                return [one]
        return [one for group in groups for one in await self.measure([group], place)]

    async def _together(self, groups: Sequence[tuple[Mutation, ...]], place: Lab) -> list[Tried]:
        """Run the tests that execute the changed lines; once more those that failed, with those that would be
        graded beside them."""
        found = [self._start(group) for group in groups]
        jobs = {one.key: self._job(one, self._watching(one)) for one in found if not one.cause}
        if not jobs:
            return found
        async with place.opened() as bench:
            first = await bench.mutants(list(jobs.values()))
            for one in found:
                if not one.cause:
                    self._first(one, first[one.key], jobs[one.key].tests)
            again = [self._job(one, self._graded(one)) for one in found if not one.cause]
            second = await bench.mutants(again) if again else {}
        for one in found:
            if not one.cause:
                self._second(one, second[one.key])
        return found

    def _start(self, group: tuple[Mutation, ...]) -> Tried:
        edits = [m.edit for m in group]
        kind = group[0].kind
        if len(group) > 1:
            kind = "multi_file" if len({e.path for e in edits}) > 1 else "multi_bug"
        one = Tried(key=packages.key_of(edits), kind=kind, cause="", mutations=group)
        for path in {e.path for e in edits}:
            source = (Path(self._project.tree) / path).read_bytes()
            if not mutations.holds(source, [e for e in edits if e.path == path]):
                one.cause = "not_a_change"
        return one

    def _all_watching(self, one: Tried) -> set[str]:
        return {n for m in one.mutations for n in self._baseline.watching(m.edit.path, m.watch)}

    def _watching(self, one: Tried) -> tuple[str, ...]:
        """Tests that execute a changed line, as many as `WATCHED_S` pays for, in the order of the suite."""
        seconds = self._baseline.seconds
        fast = sorted(self._all_watching(one), key=lambda name: (seconds[name], name))
        took = itertools.accumulate(seconds[name] for name in fast)
        names = set(fast[: max(1, sum(spent <= WATCHED_S for spent in took))])
        return tuple(name for name in self._baseline.stable if name in names)

    def _graded(self, one: Tried) -> tuple[str, ...]:
        """All tests that fail, and those that would have to go on passing."""
        _, passing = packages.graded(_candidate(self._project, one), self._baseline)
        names = {*passing, *(f.test for f in one.failures)}
        return tuple(name for name in self._baseline.stable if name in names)

    def _job(self, one: Tried, tests: tuple[str, ...]) -> Job:
        took = sum(self._baseline.seconds[t] for t in tests)
        edits: tuple[Edit, ...] = tuple(m.edit for m in one.mutations)
        return Job(key=one.key, edits=edits, tests=tests, timeout_s=MUTANT_FLOOR_S + MUTANT_SLACK * took)

    def _first(self, one: Tried, effect: Effect, ran: Sequence[str]) -> None:
        if effect.ended != "ok":
            one.cause = "hangs" if effect.ended == "timeout" else "dies"
        elif any(f.message.startswith("MemoryError") for f in effect.failures):
            one.cause = "dies"
        elif effect.broken:
            one.cause = "no_import"
        elif not effect.failures:
            one.cause = "survives"
        elif len(effect.failures) > max(BROAD_TESTS, BROADEST * len(self._baseline.stable)):
            one.cause = "too_broad"
        else:
            one.failures = effect.failures
            one.unsure = tuple(sorted(self._all_watching(one) - set(ran)))

    def _second(self, one: Tried, effect: Effect) -> None:
        if effect.ended != "ok":
            one.cause = "flaky"
            return
        first, again = {f.test for f in one.failures}, {f.test for f in effect.failures}
        one.unsure = (*one.unsure, *sorted(first ^ again))
        one.failures = tuple(f for f in one.failures if f.test in again)
        if not one.failures:
            one.cause = "flaky"

    def settle(self, measured: Tried) -> Tried:
        """The same with the causes that depend on others."""
        one = replace(measured)
        if one.cause:
            return one
        places = frozenset((m.edit.path, m.where) for m in one.mutations)
        mark = (places, frozenset(f.test for f in one.failures))
        if mark in self._kept:
            one.cause = "duplicate"
        elif packages.copies(_candidate(self._project, one)):
            one.cause = "copy_in_tree"
        else:
            self._kept.add(mark)
        return one


def _candidate(found: Project, one: Tried) -> Candidate:
    return Candidate(
        project=found, mutations=one.mutations, kind=one.kind, failures=one.failures, unsure=one.unsure
    )


class _Notes:
    """The mutants measured so far, a JSON line each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.known: dict[str, Tried] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            try:
                one = _tried(json.loads(line))
            except ValueError:
                continue  # the line that was being written when the power went
            self.known[one.key] = one

    def add(self, one: Tried) -> None:
        """Remember it; what the backend could not judge only until the call ends."""
        self.known[one.key] = one
        if one.cause == "faulted":
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(one)) + "\n")


def _tried(facts: Mapping[str, Any]) -> Tried:
    return Tried(
        key=facts["key"],
        kind=facts["kind"],
        cause=facts["cause"],
        mutations=tuple(
            Mutation(**{**m, "edit": Edit(**m["edit"]), "watch": tuple(m["watch"])})
            for m in facts["mutations"]
        ),
        failures=tuple(
            Failure(
                test=f["test"], message=f["message"], where=None if f["where"] is None else tuple(f["where"])
            )
            for f in facts["failures"]
        ),
        unsure=tuple(facts["unsure"]),
    )


# -------------------------------------------------------------------------------------------------- admission


async def _admit(
    found: Project,
    baseline: Baseline,
    tried: Sequence[Tried],
    folder: Path,
    plan: Plan,
    backend: Backend,
    listener: Progress,
    kept: Kept,
    outcome: Outcome,
    label: str,
    deadline: float,
) -> None:
    """Write and admit what was kept, until the time is over; what was admitted in an earlier call stays as it
    is, whatever the time."""
    worth = [one for one in tried if not one.cause]
    listener.begin(f"{label}: admit", total=len(worth), unit="tasks")
    counts = Counter[str]()

    async def one_task(one: Tried) -> Admission | None:
        candidate = _candidate(found, one)
        judged, one.cause, why = await _judged(candidate, baseline, folder, plan, backend, deadline)
        if judged is not None:
            kept(*judged)
        if why:
            listener.note(f"{candidate.name} is {one.cause}: {why}")
        counts[one.cause] += 1
        listener.advance(1, **counts)
        return None if judged is None else judged[1]

    admissions = await lab.in_order(one_task, worth, at_once=plan.at_once)
    outcome.tasks = [admission for admission in admissions if admission is not None]
    listener.end(**counts)


async def _judged(
    candidate: Candidate, baseline: Baseline, folder: Path, plan: Plan, backend: Backend, deadline: float
) -> tuple[tuple[Task, Admission] | None, str, str]:
    """An admission with its cause and its reasons; no admission when the candidate gives no package, the
    time is over or the backend failed, for this one and once more."""
    judged = _admitted_before(candidate, folder, plan, backend)
    for final in (False, True):
        if judged is None and time.monotonic() > deadline:
            return None, "not_reached", ""
        try:
            judged = judged or await _admission(candidate, baseline, folder, plan, backend)
        except Rejected as error:
            return None, error.cause, error.message
        except BoundaryError as error:
            if final or not error.retryable:
                place = folder / "quarantine" / f"{candidate.name}.reason.txt"
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(f"{error.owner}/{error.code}: {error}\n", encoding="utf-8")
                return None, "faulted", f"{error.owner}/{error.code}: {error}"
            continue
        valid = judged[1].valid
        return judged, "admitted" if valid else "quarantined", "" if valid else "; ".join(judged[1].reasons)
    raise AssertionError("unreachable: the second round returns")


def _places(candidate: Candidate, folder: Path, plan: Plan) -> tuple[Path, Path, Path]:
    """The note of an admission, and where its package lies when it is valid and when it is not."""
    return (
        folder / f"admissions-{lab.MARK}" / f"{candidate.name}.json",
        plan.out / candidate.project.slug / candidate.name,
        folder / "quarantine" / candidate.name,
    )


def _admitted_before(
    candidate: Candidate, folder: Path, plan: Plan, backend: Backend
) -> tuple[Task, Admission] | None:
    """What an earlier call found out, if its package is still there, unchanged, for this backend."""
    note, good, bad = _places(candidate, folder, plan)
    if not note.is_file():
        return None
    facts = json.loads(note.read_text(encoding="utf-8"))
    place = good if facts["valid"] else bad
    if not (place / "task.toml").is_file():
        return None
    task = package.load_task(place)
    lists: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in facts.items()}
    admission = Admission(**lists)
    enough = admission.mode == "full" or plan.light
    same = admission.revision == task.revision and admission.backend == backend.name
    return (task, admission) if enough and same else None


async def _admission(
    candidate: Candidate, baseline: Baseline, folder: Path, plan: Plan, backend: Backend
) -> tuple[Task, Admission]:
    """Write and admit. The package ends in `out`, or in the work folder's `quarantine/` with a `reason.txt`
    beside it."""
    note, good, bad = _places(candidate, folder, plan)
    building = folder / "candidates" / candidate.name
    for stale in (building, good, bad):
        shutil.rmtree(stale, ignore_errors=True)
    task = await asyncio.to_thread(
        packages.write, candidate, baseline, building, image=plan.image, seed=plan.seed
    )
    admission = await admit(task, backend, repeats=plan.repeats, light=plan.light)
    place = good if admission.valid else bad
    place.parent.mkdir(parents=True, exist_ok=True)
    building.rename(place)
    if not admission.valid:
        (place.parent / f"{candidate.name}.reason.txt").write_text(
            "\n".join(admission.reasons) + "\n", encoding="utf-8"
        )
    note.parent.mkdir(parents=True, exist_ok=True)
    written = note.with_suffix(".part")
    written.write_text(json.dumps(to_dict(admission)), encoding="utf-8")
    written.replace(note)
    return package.load_task(place), admission


# ----------------------------------------------------------------------------------------------------- tables


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts by project, and by kind and cause: what is printed and written as JSON."""
    kinds: dict[str, Counter[str]] = {kind: Counter() for kind in mutations.KINDS}
    for outcome in outcomes:
        for kind, count in outcome.proposed.items():
            kinds[kind]["proposed"] += count
        for kind, count in outcome.covered.items():
            kinds[kind]["executed"] += count
        for kind, cause in outcome.tried:
            kinds[kind]["tried"] += 1
            kinds[kind][cause] += 1
    return {
        "projects": [
            {
                "spec": o.spec,
                "name": o.name,
                "licence": o.licence,
                "split": o.split,
                "rejected": o.rejected,
                "why": o.why,
                "stable_tests": o.tests,
                "flaky_tests": o.flaky,
                "tried": len(o.tried),
                "admitted": o.admitted,
                "quarantined": sum(not a.valid for a in o.tasks),
                "causes": dict(Counter(cause for _, cause in o.tried)),
            }
            for o in outcomes
        ],
        "kinds": {kind: dict(counts) for kind, counts in kinds.items()},
        "causes": dict(CAUSES),
        "admitted": sum(o.admitted for o in outcomes),
        "quarantined": sum(not a.valid for o in outcomes for a in o.tasks),
        "tasks": [
            {"id": a.task_id, "revision": a.revision, "valid": a.valid, "reasons": list(a.reasons)}
            for o in outcomes
            for a in o.tasks
        ],
    }
