"""`serve`: the environment gateway as a process, and who may use it."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from agentrl.cli import output
from agentrl.errors import ConfigError

NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def gateway(
    backend: str,
    store: str,
    host: str,
    port: int,
    tasks: Path,
    *,
    name: str,
    state_dir: Path | None,
    slots: int,
    memory_mib: int | None,
    permits: int | None,
    verify: int | None,
    admission: str,
    as_json: bool,
) -> None:
    """Serve until a signal."""
    missing = [package for package in NEEDED if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"The gateway needs {', '.join(missing)}.", fix="Install it: pip install 'agentrl[serve]'."
        )
    from services.gateway import process
    from services.gateway.core import Settings

    cores = os.cpu_count() or 1
    settings = Settings(
        name=name,
        slots=slots,
        memory_mib=float(memory_mib if memory_mib is not None else 0.8 * _machine_mib()),
        permits=permits or 2 * cores,
        verify=verify or max(1, cores),
        creates=2 * cores,
        admission=admission,
    )

    def announce(serving: process.Serving) -> None:
        if as_json:
            output.emit(output.jsonable(serving))
            sys.stdout.flush()
            return
        output.say(f"[bold green]Serving[/] {serving.url}  (epoch {serving.epoch})")
        output.say(
            f"{serving.tasks} tasks on {serving.backend} ({serving.isolation}), {serving.tenants} tenants"
        )
        output.fact("Docs", f"{serving.url}/docs", width=7)
        output.fact("Run", f"agentrl train run.toml --set sandbox.gateway={serving.url}", width=7)

    process.serve(
        backend_name=backend,
        state_dir=state_dir,
        store_url=store,
        host=host,
        port=port,
        tasks=tasks,
        settings=settings,
        announce=announce,
    )


def _machine_mib() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20


def tenant(name: str, store: str, *, weight: float, max_sessions: int, max_queue: int, as_json: bool) -> None:
    """Print the token of a new tenant, once."""
    from services.gateway import process

    token = process.add_tenant(store, name, weight=weight, max_sessions=max_sessions, max_queue=max_queue)
    if as_json:
        output.emit({"tenant": name, "token": token})
        return
    output.fact("Token", token, width=7)
    output.say("It is shown only now. Use it as [bold]AGENTRL_GATEWAY_TOKEN[/].")
