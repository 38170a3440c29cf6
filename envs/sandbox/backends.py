"""A backend by its name, checked: the one table of those that are built in."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from agentrl.errors import ConfigError, SandboxError
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
    """The backend of this name. Raises `SandboxError` saying what this machine lacks for it and the fix, and
    `KeyError` for a name that is not in `BUILT_IN`."""
    return BUILT_IN[name](state_dir)


def keep_warm(backend: Backend, size: int) -> None:
    """Have a backend keep so many sandboxes ready; 0: none. Raises `ConfigError` where it can not."""
    if size and not isinstance(backend, Warming):
        raise ConfigError(
            f"The {backend.name} backend keeps no sandboxes ready here.",
            fix="Set warm to 0, or use the docker backend; a gateway has a pool of its own (--warm).",
        )
    if isinstance(backend, Warming):
        backend.keep_warm(size)
