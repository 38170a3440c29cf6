"""Every environment by name: built in, from installed packages, decorated in this process, or by path.

An installed package registers a class under the entry-point group `agentrl.environments`; a run file may also
name `path/to/file.py:Class`. `open_session` and `admit` are what a run calls: they send a task of an
environment to this process and every other task to its sandbox backend.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qsl

from agentrl.errors import AgentRLError, ConfigError, nearest
from agentrl.types import Task
from envs import admission as sandboxed
from envs import inprocess
from envs.authored import module_in
from envs.builtin.packages import PackagedEnvironment
from envs.environment import ToolEnvironment, decorated, of_class
from envs.evidence import Admission
from envs.inprocess import EnvironmentSession
from envs.sandbox.contract import Backend
from envs.session import Session

GROUP = "agentrl.environments"
PREFIX = "env:"
"""How a run file says that `tasks.suite` is an environment."""

Environment = ToolEnvironment | PackagedEnvironment

BUILTIN: Mapping[str, str] = MappingProxyType(
    {
        "attempt-verify-revise": "envs.builtin.revise:AttemptVerifyRevise",
        "calculator": "envs.builtin.calculator:Calculator",
        "mcp": "envs.adapters.mcp_client:Mcp",
        "openenv": "envs.adapters.openenv_client:OpenEnv",
        "python": "envs.builtin.python:ENVIRONMENT",
        "search": "envs.builtin.search:Search",
        "simulated-search": "envs.builtin.simulated:SimulatedSearch",
        "sql": "envs.builtin.sql:Sql",
        "swe": "envs.builtin.swe:ENVIRONMENT",
        "terminal": "envs.builtin.terminal:ENVIRONMENT",
        "user": "envs.builtin.simulated:User",
    }
)
"""Name to `module:attribute`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One line of the list: where an environment comes from, and what it is, or why it can not be loaded."""

    name: str
    source: str
    environment: Environment | None
    problem: str = ""


def listed() -> tuple[Listed, ...]:
    """Everything that is known by name, sorted. A broken package is a line that says so."""
    rows = {name: _line(name, "built in") for name in BUILTIN}
    for name, point in _points().items():
        source = point.dist.name if point.dist is not None else point.value
        if name in rows:
            why = f"the name is taken by {rows[name].source}"
            rows[f"{name} ({source})"] = Listed(name=name, source=source, environment=None, problem=why)
        else:
            rows[name] = _line(name, source)
    for name, found in decorated().items():
        rows.setdefault(name, Listed(name=name, source="this process", environment=found))
    return tuple(rows[key] for key in sorted(rows))


def _line(name: str, source: str) -> Listed:
    try:
        return Listed(name=name, source=source, environment=get(name))
    except AgentRLError as error:
        return Listed(name=name, source=source, environment=None, problem=str(error))


def _points() -> dict[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}


def names() -> list[str]:
    """Every name that `get` takes, without loading anything."""
    return sorted({*BUILTIN, *_points(), *decorated()})


def get(reference: str) -> Environment:
    """An environment by name, `name?option=value&…`, or `path/to/file.py:Class`.

    Raises:
        ConfigError: nothing has that name, or what has it can not be loaded; says what to do.
    """
    plain, _, options = reference.partition("?")
    found = _by_path(plain) if ".py:" in plain else _by_name(plain)
    if not options:
        return found
    given = dict(parse_qsl(options, keep_blank_values=True))
    if isinstance(found, PackagedEnvironment):
        return found.with_options(**given)
    return replace(found.with_options(**given), reference=f"{found.reference}?{options}")


def _by_name(name: str) -> Environment:
    if name in BUILTIN:
        module, _, attribute = BUILTIN[name].partition(":")
        try:
            return _environment(getattr(importlib.import_module(module), attribute), name)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"Environment {name} needs {error.name}.", fix=f"pip install 'agentrl[{name}]'"
            ) from error
    point = _points().get(name)
    if point is not None:
        try:
            loaded = point.load()
        except Exception as error:  # the boundary to somebody else's package: classified
            raise ConfigError(
                f"Environment {name} ({point.value}) can not be loaded: {type(error).__name__}: {error}.",
                fix="Mend or uninstall the package.",
            ) from error
        return _environment(loaded, name)
    if name in decorated():
        return decorated()[name]
    raise ConfigError(
        f"There is no environment '{name}'.",
        fix=f"{nearest(name, names())} Or give path/to/file.py:Class.",
    )


def _environment(value: Any, reference: str) -> Environment:
    return value if isinstance(value, PackagedEnvironment) else of_class(value, reference=reference)


def _by_path(reference: str) -> Environment:
    where, _, attribute = reference.rpartition(":")
    file = Path(where).absolute()
    if not file.is_file():
        raise ConfigError(f"There is no file {where}.", fix="Give path/to/file.py:Class.")
    try:
        module = module_in(file)
    except Exception as error:  # the boundary to an author's file: classified
        raise ConfigError(f"{where} can not be loaded: {type(error).__name__}: {error}.") from error
    if not hasattr(module, attribute):
        classes = [
            n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__
        ]
        raise ConfigError(f"{where} has no '{attribute}'.", fix=nearest(attribute, classes))
    return _environment(getattr(module, attribute), f"{file}:{attribute}")


# ------------------------------------------------------------------------------------------- what a run calls


def tasks(reference: str, folder: Path, *, train: int, heldout: int, seed: int) -> tuple[Task, ...]:
    """Tasks of an environment, training tasks first; packages are written into `folder`, once."""
    found = get(reference)
    if isinstance(found, PackagedEnvironment):
        return found.tasks(folder, train=train, heldout=heldout, seed=seed)
    return found.tasks(train=train, heldout=heldout, seed=seed)


def of_task(task: Task) -> ToolEnvironment | None:
    """The environment that a task lives in; None for a task with a sandbox."""
    if task.grader.kind != "environment":
        return None
    found = get(str(task.metadata["environment"]))
    assert isinstance(found, ToolEnvironment), "only tool environments make such tasks"
    return found


async def open_session(
    task: Task, backend: Backend, *, session_id: str, signing_key: bytes, admission: Admission | None
) -> Session | EnvironmentSession:
    """A session for any task: in this process for a tool environment, else in a sandbox of `backend`."""
    environment = of_task(task)
    if environment is None:
        return await Session.open(
            task, backend, session_id=session_id, signing_key=signing_key, admission=admission
        )
    return await EnvironmentSession.open(
        task, environment, session_id=session_id, signing_key=signing_key, admission=admission
    )


async def admit(task: Task, backend: Backend, *, repeats: int = 3, light: bool = False) -> Admission:
    """Validate any task, where its sessions will live."""
    environment = of_task(task)
    if environment is None:
        return await sandboxed.admit(task, backend, repeats=repeats, light=light)
    return await inprocess.admit(task, environment, backend=backend.name, repeats=repeats, light=light)
