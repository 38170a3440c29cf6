"""The conformance kit: whether an environment is fit for training, found out before any GPU is spent.

`check` turns a tool environment into rows of named checks, each with what was seen. It drives real sessions
with a random, an idle, a clumsy (wrong arguments) and a gold agent. A packaged environment is checked by
generating it twice and by the admission of its packages on a backend.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import string
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl.errors import AgentRLError, BoundaryError
from agentrl.types import Action, Observation, Task, Termination, Verdict
from envs import admission as sandboxed
from envs.builtin.packages import PackagedEnvironment
from envs.environment import Step, ToolEnvironment, tools_of
from envs.evidence import Admission
from envs.inprocess import STOP_GRACE_S, EnvironmentSession, admit
from envs.sandbox.contract import Backend
from envs.tools import Tool

KEY = b"conformance"
RANDOM_CALLS = 12
LUCK = 0.5
"""A random agent that succeeds more often than this is not being tested."""
TINY_LIMIT_S = 0.001
LOOP_STALL_S = 1.0
"""An async tool that holds the event loop longer stops every other attempt, and no time limit can end it."""
HEARTBEAT_S = 0.005
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One row: `seen` says what was found, and where it failed what to do."""

    name: str
    passed: bool
    seen: str


class _Failed(Exception):
    """What a check saw that it must not see."""


def arguments_for(schema: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """Random arguments that a function schema allows."""
    parameters = schema["function"]["parameters"]
    required = set(parameters.get("required", ()))
    properties: Mapping[str, Any] = parameters.get("properties", {})
    return {
        name: _value(kind, parameters, rng)
        for name, kind in properties.items()
        if name in required or rng.random() < 0.5
    }


def _value(kind: Mapping[str, Any], root: Mapping[str, Any], rng: random.Random) -> Any:
    if "$ref" in kind:
        return _value(root["$defs"][kind["$ref"].rpartition("/")[2]], root, rng)
    if "anyOf" in kind:
        return _value(rng.choice(kind["anyOf"]), root, rng)
    if "enum" in kind:
        return rng.choice(kind["enum"])
    if "const" in kind:
        return kind["const"]
    match kind.get("type"):
        case "integer":
            return rng.randint(int(kind.get("minimum", -100)), int(kind.get("maximum", 10_000)))
        case "number":
            return rng.uniform(-100.0, 10_000.0)
        case "boolean":
            return rng.random() < 0.5
        case "array":
            return [_value(kind.get("items", {}), root, rng) for _ in range(rng.randint(0, 3))]
        case "object":
            inner: Mapping[str, Any] = kind.get("properties", {})
            return {name: _value(each, root, rng) for name, each in inner.items()}
        case "null":
            return None
        case _:
            return "".join(rng.choices(string.printable, k=rng.randint(0, 20)))


def _shows(secret: str, text: str) -> bool:
    """Whether a text holds a secret as whole words."""
    return re.search(rf"(?<!\w){re.escape(secret)}(?!\w)", text, re.IGNORECASE) is not None


class _Kit:
    """The checks of one tool environment over some seeds."""

    def __init__(self, environment: ToolEnvironment, seeds: Sequence[int]) -> None:
        self.environment = environment
        self.seeds = seeds
        self.tasks: list[Task] = []
        self.admissions: dict[str, Admission] = {}
        self.shown: list[tuple[int, str, str]] = []
        """(seed, where, text) of everything shown to an agent that has not worked for it."""

    async def session(self, task: Task, *, limit_s: float | None = None) -> EnvironmentSession:
        if limit_s is not None:
            task = replace(task, limits=replace(task.limits, exec_timeout_s=limit_s))
        return await EnvironmentSession.open(
            task,
            self.environment,
            session_id=f"check-{task.id}",
            signing_key=KEY,
            admission=self.admissions.get(task.id),
        )

    async def play(self, task: Task, steps: Sequence[Step]) -> tuple[list[Observation], Verdict]:
        """A whole attempt of given calls, until it is done."""
        session = await self.session(task)
        async with session:
            seen: list[Observation] = []
            for number, step in enumerate(steps):
                if session.submitted:
                    break
                seen.append(await session.call(_action(number, step)))
            return seen, await session.finalize(termination=Termination.FINISHED, fault=None)

    def random_steps(self, task: Task) -> list[Step]:
        rng = random.Random(f"random agent/{task.metadata['seed']}")
        schemas = self.environment.schemas()
        chosen = [rng.choice(schemas) for _ in range(RANDOM_CALLS)]
        return [Step(tool=s["function"]["name"], arguments=arguments_for(s, rng)) for s in chosen]

    # ------------------------------------------------------------------------------------------------ checks

    async def schemas(self) -> str:
        """A tool of somebody else's server may leave parameters undescribed: its user can not mend that."""
        schemas = self.environment.schemas()
        offered = tools_of(self.environment.make())
        foreign = []
        for schema in schemas:
            function = schema["function"]
            name = function["name"]
            if not NAME.fullmatch(name):
                raise _Failed(f"the tool name '{name}' has other characters than letters, digits, _ and -")
            if not function["description"]:
                raise _Failed(f"{name} has no description: write a docstring")
            for parameter, kind in function["parameters"].get("properties", {}).items():
                if not set(kind) & {"type", "anyOf", "enum", "const", "$ref", "allOf"}:
                    raise _Failed(f"{name}: {parameter} has no type: annotate it")
                if not kind.get("description") and not isinstance(offered[name], Tool):
                    foreign.append(f"{name}.{parameter}")
                elif not kind.get("description"):
                    raise _Failed(
                        f"{name}: {parameter} has no description: add '{parameter}: …' to the docstring"
                    )
            self.shown += [(seed, f"the schema of {name}", json.dumps(schema)) for seed in self.seeds]
        undescribed = f"; their server does not describe {', '.join(foreign)}" if foreign else ""
        return f"{len(schemas)} tools: {', '.join(s['function']['name'] for s in schemas)}{undescribed}"

    async def problems(self) -> str:
        """Also makes the tasks that everything else uses."""
        self.tasks = [self.environment.task(seed) for seed in self.seeds]
        again = [self.environment.task(seed) for seed in self.seeds]
        for one, two in zip(self.tasks, again, strict=True):
            if one.revision != two.revision:
                raise _Failed(
                    f"problem({one.metadata['seed']}) is another one each time: draw from its seed only"
                )
            self.shown.append((int(one.metadata["seed"]), "the instruction", one.instruction))
        different = len({task.instruction for task in self.tasks})
        if len(self.tasks) > 1 and different == 1:
            raise _Failed(f"{len(self.tasks)} seeds make one and the same instruction")
        return f"{len(self.tasks)} seeds, {different} different instructions, equal when made again"

    async def gold(self) -> str:
        for task in self.tasks:
            found = await admit(task, self.environment, backend="none", light=True)
            if not found.valid:
                raise _Failed(f"{task.id}: {'; '.join(found.reasons)}")
            self.admissions[task.id] = found
            problem = self.environment.problem(int(task.metadata["seed"]))
            _, verdict = await self.play(task, problem.gold)
            if verdict.reward is None or verdict.reward < 1.0:
                why = verdict.fault.message if verdict.fault else f"reward {verdict.reward:g}"
                raise _Failed(f"{task.id}: {why}")
            if verdict.fault is not None:
                raise _Failed(f"{task.id}: {verdict.fault.message}")
        return (
            f"{len(self.tasks)} of {len(self.tasks)} solutions earn the reward, every piece of evidence holds"
        )

    async def idle(self) -> str:
        for task in self.tasks:
            _, verdict = await self.play(task, ())
            if verdict.reward is None or verdict.reward >= 1.0:
                raise _Failed(f"{task.id}: doing nothing ends with reward {verdict.reward}")
        return "doing nothing never succeeds"

    async def luck(self) -> str:
        lucky = 0
        for task in self.tasks:
            seen, verdict = await self.play(task, self.random_steps(task))
            seed = int(task.metadata["seed"])
            self.shown += [(seed, "an error", o.text) for o in seen if o.is_error]
            if verdict.reward is None:
                assert verdict.fault is not None
                raise _Failed(f"{task.id}: fault of the {verdict.fault.owner}: {verdict.fault.message}")
            lucky += verdict.reward >= 1.0
        if lucky > LUCK * len(self.tasks):
            raise _Failed(f"random calls succeed in {lucky} of {len(self.tasks)} attempts")
        return f"{RANDOM_CALLS} random calls each: no fault, {lucky} of {len(self.tasks)} succeed"

    async def clumsy(self) -> str:
        wrong = 0
        for task in self.tasks:
            seed = int(task.metadata["seed"])
            session = await self.session(task)
            async with session:
                for number, step in enumerate(self.clumsy_steps()):
                    seen = await session.call(_action(number, step))
                    if not seen.is_error:
                        raise _Failed(
                            f"{step.tool} takes {json.dumps(dict(step.arguments))} without an error"
                        )
                    self.shown.append((seed, f"an error of {step.tool}", seen.text))
                    wrong += 1
        return f"{wrong} wrong calls answered with an error, none ends the attempt"

    def clumsy_steps(self) -> list[Step]:
        rng = random.Random("clumsy")
        steps = [Step(tool="no_such_tool")]
        for schema in self.environment.schemas():
            function = schema["function"]
            right = arguments_for(schema, rng)
            steps.append(Step(tool=function["name"], arguments={**right, "no_such_argument": 1}))
            required = function["parameters"].get("required", ())
            if required:
                steps.append(Step(tool=function["name"]))
                steps.append(Step(tool=function["name"], arguments={**right, required[0]: {"wrong": [None]}}))
        return steps

    async def determinism(self) -> str:
        for task in self.tasks:
            steps = self.random_steps(task)
            one, two = await self.play(task, steps), await self.play(task, steps)
            if [(o.text, o.is_error) for o in one[0]] != [(o.text, o.is_error) for o in two[0]]:
                raise _Failed(f"{task.id}: the same calls are answered otherwise the second time")
            if (one[1].reward, one[1].components) != (two[1].reward, two[1].components):
                raise _Failed(f"{task.id}: the same calls are graded otherwise the second time")
        return "the same calls have the same answers and the same grade"

    async def leak(self) -> str:
        looked = 0
        for seed in self.seeds:
            secrets = self.environment.problem(seed).secrets
            if not secrets:
                raise _Failed(f"problem({seed}) names no secrets: give Problem.secrets, such as the answer")
            for secret in secrets:
                for where in (w for s, w, text in self.shown if s == seed and _shows(secret, text)):
                    raise _Failed(f"seed {seed}: {where} shows the secret '{secret}'")
                looked += 1
        return f"{looked} secrets in none of {len(self.shown)} texts shown before any work"

    async def timeouts(self) -> str:
        slowest = 0.0
        for step in self.environment.problem(self.seeds[0]).gold:
            session = await self.session(self.tasks[0], limit_s=TINY_LIMIT_S)
            began = time.monotonic()
            async with session:
                try:
                    await session.call(_action(0, step))
                except BoundaryError as error:
                    if error.code == "tool_stuck":
                        raise _Failed(f"{step.tool} goes on after its time is up: make it stop") from error
            slowest = max(slowest, time.monotonic() - began)
        if slowest > STOP_GRACE_S + 1:
            raise _Failed(f"a call with a limit of {TINY_LIMIT_S} s took {slowest:.1f} s")
        return f"a limit of {TINY_LIMIT_S * 1000:g} ms ends every call within {slowest * 1000:.0f} ms"

    async def event_loop(self) -> str:
        longest, at = 0.0, time.monotonic()

        async def beat() -> None:
            nonlocal longest, at
            while True:
                await asyncio.sleep(HEARTBEAT_S)
                longest, at = max(longest, time.monotonic() - at), time.monotonic()

        beating = asyncio.create_task(beat())
        try:
            await self.play(self.tasks[0], self.environment.problem(self.seeds[0]).gold)
            await asyncio.sleep(2 * HEARTBEAT_S)
        finally:
            beating.cancel()
        if longest > LOOP_STALL_S:
            raise _Failed(
                f"a tool, reset or grade holds the event loop for {longest:.1f} s: await,"
                " or make it a plain def, which runs in a thread"
            )
        return f"held for at most {longest * 1000:.0f} ms at a time"

    async def cancellation(self) -> str:
        before = set(threading.enumerate())
        for step in self.environment.problem(self.seeds[0]).gold:
            session = await self.session(self.tasks[0])
            calling = asyncio.create_task(session.call(_action(0, step)))
            await asyncio.sleep(0)
            calling.cancel()
            done, _ = await asyncio.wait({calling}, timeout=STOP_GRACE_S + 1)
            if not done:
                raise _Failed(f"a cancelled {step.tool} does not end")
            verdict = await session.finalize(termination=Termination.CANCELLED, fault=None)
            await session.close()
            await session.close()
            if verdict.reward is not None:
                raise _Failed(f"a cancelled attempt has the reward {verdict.reward}")
        began = time.monotonic()
        while left := [t for t in set(threading.enumerate()) - before if t.name == "environment-tool"]:
            if time.monotonic() - began > STOP_GRACE_S:
                break
            await asyncio.sleep(0.01)
        if left:
            raise _Failed(f"{len(left)} threads are still running")
        return "a cancelled call ends, leaves no thread and no reward; close twice is close once"


def _action(number: int, step: Step) -> Action:
    return Action(id=f"t{number:04d}a000", tool=step.tool, arguments=dict(step.arguments))


async def check(environment: ToolEnvironment, *, seeds: int = 5) -> tuple[Check, ...]:
    """Every check of a tool environment. Nothing raises: what goes wrong is a row that failed."""
    kit = _Kit(environment, range(seeds))
    rows: list[tuple[str, Callable[[], Awaitable[str]]]] = [
        ("schemas", kit.schemas),
        ("problems", kit.problems),
        ("gold agent", kit.gold),
        ("no-op agent", kit.idle),
        ("random agent", kit.luck),
        ("wrong arguments", kit.clumsy),
        ("determinism", kit.determinism),
        ("leak", kit.leak),
        ("event loop", kit.event_loop),
        ("timeout", kit.timeouts),
        ("cancellation", kit.cancellation),
    ]
    found: list[Check] = []
    for name, run in rows:
        failed = {row.name for row in found if not row.passed}
        if failed & {"schemas", "problems", "gold agent"}:
            found.append(Check(name=name, passed=False, seen="not run: mend what failed before"))
            continue
        try:
            found.append(Check(name=name, passed=True, seen=await run()))
        except _Failed as seen:
            found.append(Check(name=name, passed=False, seen=str(seen)))
        except AgentRLError as error:
            found.append(Check(name=name, passed=False, seen=str(error)))
    return tuple(found)


async def check_packages(
    environment: PackagedEnvironment, backend: Backend, folder: Path, *, seeds: int = 3
) -> tuple[Check, ...]:
    """The checks of a packaged environment; its packages are written below `folder`."""
    one, two = (
        environment.tasks(folder / name, train=seeds, heldout=1, seed=1) for name in ("first", "second")
    )
    same = [t.revision for t in one] == [t.revision for t in two]
    found = [
        Check(
            name="problems",
            passed=same and len({t.instruction for t in one}) > 1,
            seen=f"{len(one)} packages, {'the same' if same else 'other'} bytes when made again",
        )
    ]
    admitted = await sandboxed.admit_suite(one, backend, repeats=1)
    reasons = [f"{a.task_id}: {'; '.join(a.reasons)}" for a in admitted if not a.valid]
    attacks = sum(len(a.attacks) for a in admitted)
    seen = f"{len(one)} solutions pass, {len(one)} idle attempts fail, {attacks} exploits earn nothing"
    found.append(Check(name="admission", passed=not reasons, seen="; ".join(reasons) or seen))
    return tuple(found)
