"""What an author of a tool environment writes: one class in one file.

    @environment("guess")
    class Guess:
        \"\"\"Find a number by asking whether it is larger.\"\"\"

        @staticmethod
        def problem(seed: int) -> Problem: ...      # pure: the same seed, the same problem
        def reset(self, problem: Problem) -> None: ...   # state lives in attributes; sync or async
        @tool
        def ask(self, number: int) -> str: ...      # docstring and annotations are what the model is shown
        def grade(self) -> Grade: ...               # named components, and the facts that they rest on

An instance is one attempt. It sets `self.done = True` when nothing is left to do. What the policy got wrong
is `raise Refused("…")` (or an error `ToolResult`); any other exception of a tool is the environment's fault
and leaves no reward. An environment that can not be replayed call by call (it talks to the world) defines
`state() -> dict` and `restore(state)`; see `envs.inprocess` for what a reward then rests on.

This module turns such a class into a `ToolEnvironment` and its problems into `Task` records. It runs nothing.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import itertools
import json
import math
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, overload

from agentrl.errors import ConfigError, FaultOwner, TaskError
from agentrl.types import GraderSpec, JsonScalar, Limits, SandboxSpec, Split, Task, content_hash
from envs import tools
from envs.tools import ToolResult

HELDOUT_SHARE = 5
"""One problem in this many belongs to the held-out split, by its content and whatever the seed."""
HELDOUT_SEEDS = 1 << 40
"""Seeds from here on make held-out tasks only; those below make training tasks only."""
SEEDS_PER_RUN = 1_000_003
TRIES_PER_TASK = 50
"""Seeds drawn for one task that is neither of the other split nor made before, before giving up."""

DEFAULT_LIMITS = Limits(
    max_turns=16, max_tokens=4096, max_context=8192, wall_s=300.0, exec_timeout_s=20.0, observation_bytes=8192
)

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call of a tool, as a solution does it."""

    tool: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What one attempt is about. Only `instruction` is shown to the policy."""

    instruction: str
    data: Mapping[str, Any] = field(default_factory=dict)
    """For `reset` and `grade`: plain JSON values, so that a problem has one hash."""
    gold: tuple[Step, ...] = ()
    """Calls that earn the whole reward."""
    secrets: tuple[str, ...] = ()
    """Texts that the policy must not be shown before it has worked for them (`agentrl envs check` looks)."""

    def content(self) -> bytes:
        """Canonical JSON of all of it. `TaskError` when something is not JSON."""
        gold = [[step.tool, dict(step.arguments)] for step in self.gold]
        try:
            return json.dumps(
                [self.instruction, dict(self.data), gold, list(self.secrets)],
                sort_keys=True,
                ensure_ascii=False,
                allow_nan=False,
            ).encode()
        except (TypeError, ValueError) as error:
            raise TaskError(
                f"Problem: {error}.", fix="data and gold hold plain JSON values only.", code="problem"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """What an attempt earned: 1 or more is success. `facts` say what the components rest on."""

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)
    """Its parts, for reports and recipes. `step/NNNN` is the part of `reward` that the call of that number
    earned (the first is 0): recipes with turn rewards put it on its turn."""
    facts: Mapping[str, JsonScalar] = field(default_factory=dict)

    def finite(self) -> bool:
        """Whether the reward and all components are finite numbers."""
        values = (self.reward, *self.components.values())
        return all(isinstance(v, int | float) and math.isfinite(v) for v in values)


class Refused(Exception):
    """Raised by a tool: the policy asked for something that can not be done; it is shown the message."""


class ToolLike(Protocol):
    """What a session needs of a tool; `envs.tools.Tool` is one."""

    @property
    def name(self) -> str: ...

    def schema(self) -> dict[str, Any]: ...

    async def call(self, workspace: Any, arguments: Mapping[str, Any]) -> ToolResult: ...


# ----------------------------------------------------------------------------------------- tools from methods


@dataclass(frozen=True, slots=True)
class _Mark:
    timeout_owner: FaultOwner


_MARK = "__agentrl_tool__"


@overload
def tool(function: F) -> F: ...
@overload
def tool(*, timeout_owner: FaultOwner) -> Callable[[F], F]: ...
def tool(function: F | None = None, *, timeout_owner: FaultOwner = "environment") -> F | Callable[[F], F]:
    """Mark a method as a tool of its environment.

    Args:
        timeout_owner: whose it is when the tool takes longer than `limits.exec_timeout_s`. `environment` (no
            reward), or `policy` where the policy chose the work: it is then told, and the attempt goes on.
            Such a tool must leave nothing behind when it is cancelled.
    """

    def mark(marked: F) -> F:
        setattr(marked, _MARK, _Mark(timeout_owner))
        return marked

    return mark if function is None else mark(function)


def timeout_owner(environment_class: type, name: str) -> FaultOwner:
    """Whose a timeout of this tool is."""
    mark = getattr(getattr(environment_class, name, None), _MARK, None)
    return mark.timeout_owner if isinstance(mark, _Mark) else "environment"


def result_of(value: object) -> ToolResult:
    """What a tool returned, as a result: text as it is, anything else as JSON."""
    if isinstance(value, ToolResult):
        return value
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return ToolResult(text=shown)


async def settled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The value of a sync (in a thread) or async function. Cancelled, it ends when the function has ended."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    value = await _in_thread(lambda: function(*args, **kwargs))
    return await value if inspect.isawaitable(value) else value


async def _in_thread(work: Callable[[], T]) -> T:
    """`work` in a daemon thread of its own, so that one that never ends keeps nothing else from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def end(value: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result(value) if error is None else future.set_exception(error)

    def run() -> None:
        value: Any = None
        raised: BaseException | None = None
        try:
            value = work()
        except BaseException as error:  # handed to whoever awaits
            raised = RuntimeError("StopIteration") if isinstance(error, StopIteration) else error
        with suppress(RuntimeError):  # the loop is gone: nobody waits any more
            loop.call_soon_threadsafe(end, value, raised)

    threading.Thread(target=run, daemon=True, name="environment-tool").start()
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        # A thread can not be stopped: whoever cancels waits here to learn whether it ended.
        await asyncio.wait({future})
        future.cancelled() or future.exception()
        raise


def method_tool(function: Callable[..., Any]) -> tools.Tool:
    """A tool from a marked method: its instance is to it what a workspace is to a built-in tool."""

    @functools.wraps(function)
    async def call(instance: Any, **arguments: Any) -> ToolResult:
        return result_of(await settled(function, instance, **arguments))

    return tools.tool_of(call)


_TOOLS: dict[type, tuple[tools.Tool, ...]] = {}
"""Made once per class: making one is slow."""


def _class_tools(environment_class: type) -> tuple[tools.Tool, ...]:
    if environment_class in _TOOLS:
        return _TOOLS[environment_class]
    names: dict[str, None] = {}
    for base in reversed(environment_class.__mro__):
        names |= {name: None for name, value in vars(base).items() if hasattr(value, _MARK)}
    made = tuple(method_tool(getattr(environment_class, name)) for name in names)
    _TOOLS[environment_class] = made
    return made


def tools_of(instance: Any) -> Mapping[str, ToolLike]:
    """The tools of an environment by name: its marked methods, or what its `tools()` says (for wrappers)."""
    own = getattr(instance, "tools", None)
    found: Sequence[ToolLike] = own() if callable(own) else _class_tools(instance.__class__)
    if not found:
        raise ConfigError(f"{type(instance).__name__} has no tools.", fix="Mark a method with @tool.")
    return MappingProxyType({each.name: each for each in found})


# ----------------------------------------------------------------------------------------------- environments

_DECORATED: dict[str, ToolEnvironment] = {}
"""Classes registered by the decorator in this process, by name."""


def environment(name: str, *, limits: Limits = DEFAULT_LIMITS) -> Callable[[C], C]:
    """Register a class as the environment `name` of this process, with the limits of its tasks."""

    def register(environment_class: C) -> C:
        environment_class.__agentrl_environment__ = (name, limits)  # type: ignore[attr-defined]
        _DECORATED[name] = of_class(environment_class)
        return environment_class

    return register


def decorated() -> Mapping[str, ToolEnvironment]:
    """What the decorator registered so far."""
    return MappingProxyType(dict(_DECORATED))


def of_class(environment_class: type, *, reference: str | None = None) -> ToolEnvironment:
    """The environment that a class is. `ConfigError` names what it lacks."""
    if not isinstance(environment_class, type):
        raise ConfigError(f"{environment_class!r} is not a class.", fix="An environment is a class.")
    default = environment_class.__name__.lower()
    name, limits = getattr(environment_class, "__agentrl_environment__", (default, DEFAULT_LIMITS))
    missing = [m for m in ("problem", "reset", "grade") if not callable(getattr(environment_class, m, None))]
    if missing:
        raise ConfigError(
            f"Environment {name}: the class {environment_class.__name__} has no {' and no '.join(missing)}.",
            fix="See `agentrl envs new` for a whole one.",
        )
    doc = inspect.getdoc(environment_class) or ""
    return ToolEnvironment(
        name=name,
        summary=doc.partition("\n")[0],
        reference=reference or name,
        factory=environment_class,
        limits=limits,
        code=code_digest(environment_class),
    )


def code_digest(environment_class: type) -> str:
    """sha256 of the file that defines the class, as it is now."""
    try:
        file = inspect.getsourcefile(environment_class)
    except TypeError:
        file = None
    if file is None or not Path(file).is_file():
        raise ConfigError(
            f"The source of {environment_class.__name__} is not in a file.",
            fix="Define it in a module: its hash is part of every task.",
        )
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolEnvironment:
    """A class as an environment: makes instances and tasks. A record; `envs.inprocess` brings it to life."""

    name: str
    summary: str
    reference: str
    """What a run file calls it: a name, or `file.py:Class`."""
    factory: type
    limits: Limits
    code: str
    """sha256 of the file that defines the class."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""

    def with_options(self, **options: Any) -> ToolEnvironment:
        """The same environment, made with keyword arguments. `ConfigError` when the class takes none such."""
        known = set(inspect.signature(self.factory).parameters)
        if not set(options) <= known:
            wrong = ", ".join(sorted(set(options) - known))
            raise ConfigError(
                f"Environment {self.name} has no option {wrong}.",
                fix=f"Known: {', '.join(sorted(known)) or 'none'}.",
            )
        return replace(self, options={**self.options, **options})

    def with_limits(self, **limits: Any) -> ToolEnvironment:
        """The same environment with other limits for its tasks."""
        return replace(self, limits=replace(self.limits, **limits))

    def make(self) -> Any:
        """A new instance, not yet reset."""
        return self.factory(**self.options)

    def problem(self, seed: int) -> Problem:
        """The problem of a seed. `TaskError` when the class fails to make one."""
        try:
            made = self.make().problem(seed)
        except Exception as error:  # the boundary to an author's code: classified
            raise TaskError(
                f"Environment {self.name}: problem({seed}) raised {type(error).__name__}: {error}",
                fix="problem(seed) must return a Problem for every seed.",
                code="problem",
                phase="problem",
            ) from error
        if not isinstance(made, Problem):
            raise TaskError(
                f"Environment {self.name}: problem({seed}) returned {type(made).__name__}, not a Problem.",
                code="problem",
                phase="problem",
            )
        return made

    def schemas(self) -> list[dict[str, Any]]:
        """OpenAI function schemas of the tools."""
        return [each.schema() for each in tools_of(self.make()).values()]

    def task(self, seed: int, split: Split | None = None) -> Task:
        """The task of a seed; its split is decided by its content unless given."""
        return self.made(seed, split)[1]

    def made(self, seed: int, split: Split | None = None) -> tuple[Problem, Task]:
        """The problem of a seed and its task."""
        problem = self.problem(seed)
        return problem, self._task(seed, problem, split)

    def _task(self, seed: int, problem: Problem, split: Split | None = None) -> Task:
        schemas = self.schemas()
        content = problem.content()
        revision = content_hash(
            b"environment", self.name.encode(), self.code.encode(), content, json.dumps(schemas).encode()
        )
        return Task(
            id=f"{self.name}/s{seed}",
            revision=revision,
            path="",
            instruction=problem.instruction,
            sandbox=SandboxSpec(image=f"environment:{self.name}@{self.code}", workdir="/"),
            tools=tuple(schema["function"]["name"] for schema in schemas),
            grader=GraderSpec(kind="environment", timeout_s=60.0),
            limits=self.limits,
            split=split or split_of(content),
            metadata={"environment": self.reference, "seed": seed},
        )

    def tasks(self, *, train: int, heldout: int, seed: int) -> tuple[Task, ...]:
        """Distinct tasks, training tasks first. No held-out task is a training task of any seed.

        The split is decided by a hash of the problem; and training seeds end where held-out seeds begin.
        `ConfigError` when the environment does not make so many different problems.
        """
        found: list[Task] = []
        for split, count, first in (
            (Split.TRAIN, train, 0),
            (Split.HELDOUT, heldout, HELDOUT_SEEDS),
        ):
            seeds = itertools.count(first + seed * SEEDS_PER_RUN)
            kept = list(itertools.islice(self._distinct(split, seeds, tries=count * TRIES_PER_TASK), count))
            if len(kept) < count:
                raise ConfigError(
                    f"Environment {self.name} makes only {len(kept)} of {count} {split} problems.",
                    fix=f"Lower tasks.{split}, or let problem(seed) vary more.",
                )
            found += kept
        return tuple(found)

    def _distinct(self, split: Split, seeds: Iterator[int], *, tries: int) -> Iterator[Task]:
        seen: set[bytes] = set()
        for seed in itertools.islice(seeds, tries):
            problem = self.problem(seed)
            content = problem.content()
            if content not in seen and split_of(content) is split:
                seen.add(content)
                yield self._task(seed, problem)


def split_of(content: bytes) -> Split:
    """The split that a problem belongs to, whoever makes it."""
    return Split.HELDOUT if hashlib.sha256(content).digest()[0] % HELDOUT_SHARE == 0 else Split.TRAIN


async def within(work: Awaitable[T], limit_s: float, *, grace_s: float) -> tuple[T | None, bool, bool]:
    """`(value, in time, ended)`: waits `limit_s`, cancels, and waits `grace_s` more to see it end.

    What `work` raises passes through. `ended` is False when it goes on in spite of the cancellation.
    """
    running = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({running}, timeout=limit_s)
    except asyncio.CancelledError:
        running.cancel()
        await asyncio.wait({running}, timeout=grace_s)
        running.cancel()
        raise
    if done:
        if running.cancelled():
            raise RuntimeError("it cancelled itself")
        return running.result(), True, True
    running.cancel()
    done, _ = await asyncio.wait({running}, timeout=grace_s)
    if done:
        running.cancelled() or running.exception()
        return None, False, True
    running.cancel()  # lets go of a thread that nobody can stop
    return None, False, False
