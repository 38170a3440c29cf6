"""`envs`: environments listed, shown, scaffolded, and proved fit for training."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from agentrl.cli import output
from agentrl.cli.boundary import FAILED
from agentrl.errors import AgentRLError, ConfigError
from agentrl.types import Verdict, to_json
from envs import conformance, registry, scaffold
from envs.adapters.attempts import Attempts
from envs.builtin.packages import PackagedEnvironment
from envs.sandbox.backends import checked
from envs.sandbox.local import LocalBackend
from envs.sandbox.plain import PlainBackend


def list_environments(*, as_json: bool) -> None:
    """A line per environment."""
    rows = [_facts(row) for row in registry.listed()]
    if as_json:
        output.emit({"environments": rows})
        return
    output.table(
        ("name", "from", "tools", "about"),
        [(r["name"], r["source"], ", ".join(r["tools"]), r["problem"] or r["summary"]) for r in rows],
    )


def _facts(row: registry.Listed) -> dict[str, Any]:
    found = row.environment
    tools: list[str] = []
    problem = row.problem
    if found is not None and not isinstance(found, PackagedEnvironment):
        try:
            tools = [schema["function"]["name"] for schema in found.schemas()]
        except AgentRLError as error:  # it needs options, or a server
            problem = str(error)
    return {
        "name": row.name,
        "source": row.source,
        "kind": "none"
        if found is None
        else "packages"
        if isinstance(found, PackagedEnvironment)
        else "tools",
        "tools": tools,
        "summary": "" if found is None else found.summary,
        "problem": problem,
    }


def show(reference: str, seed: int, *, as_json: bool) -> None:
    """One environment: its tools as the model sees them, and the problem of a seed."""
    found = registry.get(reference)
    if isinstance(found, PackagedEnvironment):
        if as_json:
            output.emit({"name": found.name, "kind": "packages", "summary": found.summary})
        else:
            output.say(f"[bold]{escape(found.name)}[/] {escape(found.summary)}")
            output.say("Its tasks are packages with a sandbox each; see agentrl tasks.")
        return
    task = found.task(seed)
    schemas = found.schemas()
    if as_json:
        output.emit(
            {
                "name": found.name,
                "kind": "tools",
                "summary": found.summary,
                "tools": schemas,
                "instruction": task.instruction,
                "limits": task.limits,
            }
        )
        return
    limits = task.limits
    output.say(f"[bold]{escape(found.name)}[/] {escape(found.summary)}")
    output.say()
    for schema in schemas:
        function = schema["function"]
        given = function["parameters"].get("properties", {})
        signature = ", ".join(f"{name}: {kind.get('type', 'any')}" for name, kind in given.items())
        output.say(
            f"  [bold]{escape(function['name'])}[/]({escape(signature)})  {escape(function['description'])}"
        )
        for name, kind in given.items():
            output.say(f"      {escape(name)}: {escape(str(kind.get('description', '')))}")
    output.say()
    output.fact(f"seed {seed}", task.instruction, width=8)
    told = f"{limits.max_turns} turns, {limits.max_tokens} tokens, context {limits.max_context}, "
    output.fact(
        "limits", told + f"{output.duration(limits.wall_s)}, {limits.exec_timeout_s:g} s per call", width=8
    )


def new(name: str, folder: Path | None, *, as_json: bool) -> None:
    """Write a package with one environment."""
    where = folder or Path(name)
    files = scaffold.write(where, name)
    if as_json:
        output.emit({"name": name, "files": files})
        return
    for file in files:
        output.say(f"wrote {escape(str(file))}")
    output.say(f"Next: pip install -e {escape(str(where))} && agentrl envs check {escape(name)}")


def check(reference: str, *, seeds: int, backend: str, as_json: bool) -> None:
    """Run the conformance kit; exit code 1 if any check fails."""
    found = registry.get(reference)
    if isinstance(found, PackagedEnvironment):
        rows = _packages(found, seeds=seeds, backend=backend)
    else:
        rows = asyncio.run(conformance.check(found, seeds=seeds))
    bad = [row for row in rows if not row.passed]
    if as_json:
        facts = [{"check": row.name, "passed": row.passed, "seen": row.seen} for row in rows]
        output.emit({"environment": reference, "passed": not bad, "checks": facts})
    else:
        output.table(
            ("check", "outcome", "seen"),
            [(r.name, output.good("passed") if r.passed else output.bad("failed"), r.seen) for r in rows],
        )
    if bad:
        raise typer.Exit(FAILED)


def serve(
    reference: str,
    seed: int,
    *,
    protocol: str,
    backend: str,
    host: str,
    port: int,
    sessions: int,
    as_json: bool,
) -> None:
    """Serve attempts: one as MCP tools on stdin and stdout, or any number on OpenEnv's protocol."""
    found = registry.get(reference)
    place = checked(backend) if isinstance(found, PackagedEnvironment) else None
    try:
        if protocol == "openenv":
            _serve_openenv(Attempts(found, place), host=host, port=port, sessions=sessions, as_json=as_json)
        else:
            _serve_mcp(Attempts(found, place), seed, as_json=as_json)
    except ModuleNotFoundError as error:
        extra = "serve" if protocol == "openenv" else "mcp"
        raise ConfigError(f"Serving needs {error.name}.", fix=f"pip install 'agentrl[{extra}]'") from error


def _serve_mcp(attempts: Attempts, seed: int, *, as_json: bool) -> None:
    from envs.adapters.mcp_server import serve_stdio

    async def run() -> Verdict:
        async with attempts:
            return await serve_stdio(attempts, seed)

    verdict = asyncio.run(run())
    told = to_json(verdict).decode() if as_json else f"reward {verdict.reward}"
    typer.echo(told, err=True)


def _serve_openenv(attempts: Attempts, *, host: str, port: int, sessions: int, as_json: bool) -> None:
    from services import openenv

    def announce(url: str) -> None:
        if as_json:
            output.emit({"url": url, "environment": attempts.environment.name, "sessions": sessions})
            sys.stdout.flush()
            return
        output.say(f"[bold green]Serving[/] {escape(attempts.environment.name)} at {url}, {sessions} at once")

    openenv.serve(attempts, host=host, port=port, sessions=sessions, announce=announce)


def _packages(found: PackagedEnvironment, *, seeds: int, backend: str) -> tuple[conformance.Check, ...]:
    async def run(folder: Path) -> tuple[conformance.Check, ...]:
        place = LocalBackend() if backend == "local" else PlainBackend()
        if isinstance(place, LocalBackend):
            place.check()
        try:
            return await conformance.check_packages(found, place, folder, seeds=seeds)
        finally:
            await place.close()

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(run(Path(folder)))
