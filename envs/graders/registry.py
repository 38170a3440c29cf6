"""Graders by name: built in, or of installed packages (entry-point group `agentrl.graders`)."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pydantic

from agentrl.errors import AgentRLError, TaskError, nearest
from agentrl.types import GraderUse
from envs.graders.contract import Grader

GROUP = "agentrl.graders"

BUILTIN: Mapping[str, str] = MappingProxyType(
    {
        "exit-code": "envs.graders.commands:ExitCode",
        "file-equal": "envs.graders.files:FileEqual",
        "patch-similarity": "envs.graders.similarity:PatchSimilarity",
        "process": "envs.graders.process:Process",
        "rubric": "envs.graders.rubric:Rubric",
        "sql-equal": "envs.graders.files:SqlEqual",
        "tests": "envs.graders.commands:Tests",
    }
)
"""Name to `module:class`."""


def _points() -> dict[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}


def names() -> list[str]:
    """Every name that a task may use."""
    return sorted({*BUILTIN, *_points()})


def _error(use: GraderUse, what: str, fix: str) -> TaskError:
    return TaskError(f"Grader {use.name} ({use.use}): {what}", fix=fix, code="grader", phase="load")


def make(use: GraderUse) -> Grader:
    """The grader that a task asks for, with its options.

    Raises:
        TaskError: nothing has that name, it can not be loaded, or it takes no such options.
    """
    try:
        if use.use in BUILTIN:
            module, _, attribute = BUILTIN[use.use].partition(":")
            kind: Any = getattr(importlib.import_module(module), attribute)
        elif use.use in _points():
            kind = _points()[use.use].load()
        else:
            raise _error(use, f"there is no grader '{use.use}'.", nearest(use.use, names()))
        known = [name for name in inspect.signature(kind).parameters if name != "self"]
        if unknown := sorted(set(use.options) - set(known)):
            raise _error(use, f"it has no option {', '.join(unknown)}.", nearest(unknown[0], known))
        made: Grader = kind(**use.options)
    except AgentRLError:
        raise
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise _error(use, f"option {where}: {first['msg']}.", "Correct that value.") from error
    except Exception as error:  # the boundary to somebody else's class: classified
        raise _error(use, f"{type(error).__name__}: {error}.", "Mend the grader or its options.") from error
    if not isinstance(getattr(made, "decides", None), bool) or not callable(getattr(made, "grade", None)):
        raise _error(use, "it has no `decides` and `grade`.", "See envs/graders/contract.py.")
    return made
