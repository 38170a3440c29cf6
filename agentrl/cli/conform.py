"""`conform`: whether a sandbox backend, built in or anybody's, keeps the contract that all backends share."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import typer
from rich.markup import escape

from agentrl.cli import output
from agentrl.cli.boundary import FAILED
from agentrl.errors import ConfigError, nearest
from envs.sandbox.backends import checked
from envs.sandbox.conformance import KIND_DEADLINE_S, KINDS, Row, conform
from envs.sandbox.contract import Backend

MARKS = {"passed": "[green]✓[/]", "failed": "[red]✗[/]", "inapplicable": "[dim]–[/]"}


def run(backend: str, only: str, state_dir: Path | None, *, as_json: bool) -> None:
    """Every promise of the contract, one after the other; exit code 1 if one is broken."""
    if not any(only in kind.name for kind in KINDS):
        raise ConfigError(f"No kind's name contains '{only}'.", fix=nearest(only, [k.name for k in KINDS]))
    with tempfile.TemporaryDirectory(prefix="agentrl-conform-") as folder:
        place = checked(backend, state_dir or Path(folder) / "state")
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
        rows = await conform(place, folder, only=only, tell=tell)
    finally:
        ending = await _ended(place)
    if ending is not None:
        tell(ending)
        rows = (*rows, ending)
    return rows


async def _ended(place: Backend) -> Row | None:
    """Close it; what that breaks is a finding too."""
    try:
        async with asyncio.timeout(KIND_DEADLINE_S):
            await place.close()
    except Exception as error:  # the boundary to somebody else's code: a finding
        seen = f"{type(error).__name__}: {error}"
        return Row(name="closing_the_backend_ends_it", outcome="failed", seen=seen, seconds=0.0)
    return None
