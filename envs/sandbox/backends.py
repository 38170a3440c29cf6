"""A backend by its name, checked: the one table of those that are built in, and how one's own is named."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.errors import AgentRLError, ConfigError, SandboxError, nearest
from envs.authored import module_in
from envs.sandbox.contract import Backend
from envs.sandbox.docker import DockerBackend
from envs.sandbox.local import LocalBackend
from envs.sandbox.plain import PlainBackend
from envs.sandbox.warm import Warming


def _local(state_dir: Path | None) -> Backend:
    backend = LocalBackend(state_dir)
    backend.check()
    return backend


def _docker(state_dir: Path | None) -> Backend:
    backend = DockerBackend(state_dir)
    backend.check()
    return backend


def _kubernetes(state_dir: Path | None) -> Backend:
    """Its client is an optional package, and slow to import: it is loaded when it is asked for."""
    try:
        module = importlib.import_module("envs.sandbox.kubernetes")
    except ModuleNotFoundError as error:
        raise SandboxError(
            f"The kubernetes backend needs a package that is not installed: {error.name}.",
            fix="Install it: `pip install 'agentrl[kubernetes]'`.",
            code="no_client",
            phase="prepare",
            retryable=False,
        ) from error
    backend: Backend = module.checked(state_dir)
    return backend


BUILT_IN: dict[str, Callable[[Path | None], Backend]] = {
    "local": _local,
    "plain": PlainBackend,
    "docker": _docker,
    "kubernetes": _kubernetes,
}


def checked(name: str, state_dir: Path | None = None) -> Backend:
    """The backend of this name, built in or anybody's (see `factory`). Raises `SandboxError` saying what this
    machine lacks for it and the fix, and `ConfigError` for a name that is no backend's."""
    if name in BUILT_IN:
        return BUILT_IN[name](state_dir)
    make = factory(name)
    try:
        made = make(state_dir)
    except AgentRLError:
        raise
    except Exception as error:  # the boundary to somebody else's code: classified
        raise ConfigError(
            f"The backend {name} can not be made: {type(error).__name__}: {error}.",
            fix="Its factory is called with one argument, a folder for its state (or None).",
        ) from error
    if not isinstance(made, Backend):
        raise ConfigError(
            f"{name} made a {type(made).__name__}, which is no backend.",
            fix="It must return an object with the methods of envs.sandbox.contract.Backend.",
        )
    return made


def factory(name: str) -> Callable[[Path | None], Any]:
    """What makes a backend: of a built-in name, `package.module:factory`, or `path/to/file.py:factory`. It is
    called with a folder for its state. Modules beside the working folder are found too. Raises
    `ConfigError`."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise ConfigError(
            f"There is no backend '{name}'.",
            fix=f"{nearest(name, BUILT_IN)} Or name a factory: package.module:factory, file.py:factory.",
        )
    try:
        found = getattr(_module(where), attribute)
    except Exception as error:  # the boundary to somebody else's code: classified
        raise ConfigError(
            f"The backend {name} can not be loaded: {type(error).__name__}: {error}.",
            fix="Is its package installed here, and the path right?",
        ) from error
    if not callable(found):
        raise ConfigError(f"{name} can not be called.", fix="Name a function or class that makes a backend.")
    made: Callable[[Path | None], Any] = found
    return made


def _module(where: str) -> ModuleType:
    """A module by its name, or by the path of its file."""
    if not where.endswith(".py"):
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))  # last: it hides nothing that is installed
        return importlib.import_module(where)
    return module_in(Path(where))


def keep_warm(backend: Backend, size: int) -> None:
    """Have a backend keep so many sandboxes ready; 0: none. Raises `ConfigError` where it can not."""
    if size and not isinstance(backend, Warming):
        raise ConfigError(
            f"The {backend.name} backend keeps no sandboxes ready here.",
            fix="Set warm to 0, or use the docker or kubernetes backend; a gateway has its own (--warm).",
        )
    if isinstance(backend, Warming):
        backend.keep_warm(size)
