"""`conform`: whether a sandbox backend, built in or anybody's, keeps the contract that all backends share."""

from __future__ import annotations

import asyncio
import importlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from agentrl.cli import output
from agentrl.cli.boundary import FAILED
from agentrl.errors import ConfigError, nearest
from envs.sandbox import backends
from envs.sandbox.conformance import KINDS, Row, conform
from envs.sandbox.contract import Backend

MARKS = {"passed": "[green]✓[/]", "failed": "[red]✗[/]", "inapplicable": "[dim]–[/]"}


def run(backend: str, only: str, state_dir: Path | None, *, as_json: bool) -> None:
    """Every promise of the contract, one after the other; exit code 1 if one is broken."""
    if not any(only in kind.name for kind in KINDS):
        raise ConfigError(f"No kind's name contains '{only}'.", fix=nearest(only, [k.name for k in KINDS]))
    make = _factory(backend)
    with tempfile.TemporaryDirectory(prefix="agentrl-conform-") as folder:
        place = make(state_dir or Path(folder) / "state")
        if not isinstance(place, Backend):
            raise ConfigError(
                f"{backend} made a {type(place).__name__}, which is no backend.",
                fix="It must return an object with the methods of envs.sandbox.contract.Backend.",
            )
        rows = asyncio.run(_conform(place, Path(folder), only, as_json=as_json))
    counts = {outcome: sum(row.outcome == outcome for row in rows) for outcome in MARKS}
    if as_json:
        output.emit(
            {
                "backend": place.name,
                "isolation": place.isolation,
                "conforms": not counts["failed"],
                **counts,
                "rows": [output.jsonable(row) for row in rows],
            }
        )
    else:
        output.say(
            f"{place.name} ({place.isolation}): {counts['passed']} kept, {counts['failed']} broken,"
            f" {counts['inapplicable']} say nothing here"
        )
    if counts["failed"]:
        raise typer.Exit(FAILED)


async def _conform(place: Backend, folder: Path, only: str, *, as_json: bool) -> tuple[Row, ...]:
    def tell(row: Row) -> None:
        if not as_json:
            output.say(
                f"{MARKS[row.outcome]} {escape(row.name.replace('_', ' '))} [dim]{row.seconds:.1f} s[/]"
            )
            if row.seen:
                output.say(f"  [dim]{escape(row.seen)}[/]")

    try:
        return await conform(place, folder, only=only, tell=tell)
    finally:
        await place.close()


def _factory(name: str) -> Callable[[Path], Any]:
    """A built-in backend's, or `package.module:factory`, called with a folder for its state."""
    if name in backends.BUILT_IN:
        return backends.BUILT_IN[name]
    module_name, _, attribute = name.partition(":")
    if not attribute:
        raise ConfigError(
            f"There is no backend '{name}'.",
            fix=f"{nearest(name, backends.BUILT_IN)} Or name a factory: package.module:factory.",
        )
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"The backend {name} can not be loaded: {error}.", fix="Is its package installed here?"
        ) from error
    if not callable(factory):
        raise ConfigError(f"{name} can not be called.", fix="Name a function or class that makes a backend.")
    made: Callable[[Path], Any] = factory
    return made
