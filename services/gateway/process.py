"""The gateway as a process: a backend, tasks and a store to a server that stops cleanly.

SIGTERM and Ctrl-C: no new requests, sessions end with a terminal record, sandboxes go, the log is written.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import uvicorn
from uvicorn.loops.auto import auto_loop_factory
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from agentrl.errors import ConfigError
from agentrl.store import Store, TenantRow
from envs.sandbox.backends import checked, keep_warm
from envs.tasks.package import load_suite
from services import signals
from services.gateway.app import create_app
from services.gateway.core import Gateway, Settings

GRACE_S = 5
"""For requests under way when the process is told to stop."""
BACKLOG = 2048
HEAD_S = 20.0
"""For the head of a request to come; a connection on which none comes is closed."""
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
HEAD_BYTES = 64 * 1024
"""Most that may come before the head of a request is whole."""
NAME_CHARS = 100
"""Longest name of a tenant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What is told when the gateway answers."""

    url: str
    epoch: int
    backend: str
    isolation: str
    tasks: int
    tenants: int
    store: str


def serve(
    *,
    backend_name: str,
    state_dir: Path | None,
    store_url: str,
    host: str,
    port: int,
    tasks: Path,
    settings: Settings,
    announce: Callable[[Serving], None],
    warm: int = 0,
    uploads: Path | None = None,
) -> None:
    """Serve until a signal. Call it from the main thread.

    Raises:
        ConfigError: no tasks, no tenants, an unknown backend, or one that can keep nothing `warm`.
        SandboxError: the machine refuses the backend.
        KeyboardInterrupt: Ctrl-C, after everything was stopped.
    """
    suite = load_suite(tasks)
    if not suite:
        raise ConfigError(f"{tasks} holds no task packages.", fix="Write some: agentrl tasks synth.")
    stopped: list[int] = []
    with Store.open(store_url) as store, signals.noted(stopped):
        tenants = len(store.tenants())
        if not tenants:
            raise ConfigError(
                "The store has no tenant, so nobody could use the gateway.",
                fix=f"Make one: agentrl serve tenant NAME --store {store_url}",
            )
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"The gateway can not listen on {host}:{port}: {error.strerror}.",
                fix="Choose another --host or --port; --port 0 takes a free one.",
            ) from error
        place = checked(backend_name, state_dir)
        keep_warm(place, warm)
        gateway = Gateway(store=store, backend=place, tasks=suite, settings=settings, uploads=uploads)

        async def run() -> None:
            server = uvicorn.Server(
                uvicorn.Config(
                    create_app(gateway, own=False),
                    log_level="warning",
                    access_log=False,
                    timeout_graceful_shutdown=GRACE_S,
                    ws="none",
                    http=heads_in_time(HEAD_S),
                )
            )
            await gateway.start()
            try:
                announce(
                    Serving(
                        url=f"http://{_authority(host, listening)}",
                        epoch=gateway.epoch,
                        backend=place.name,
                        isolation=place.isolation,
                        tasks=len(suite),
                        tenants=tenants,
                        store=store.url,
                    )
                )
                await server.serve(sockets=[listening])
            finally:
                await gateway.stop()

        with listening, asyncio.Runner(loop_factory=auto_loop_factory()) as loop:
            loop.run(run())
    if signal.SIGINT in stopped:
        raise KeyboardInterrupt


def heads_in_time(head_s: float) -> Any:
    """A maker of uvicorn's HTTP protocol whose connections are closed when no request begins on them for that
    long, or not within `HEAD_BYTES`. Without it, whoever sends nothing, or a head byte by byte, keeps a
    descriptor for ever, and whoever sends a head without end the memory."""

    def protocol(*args: Any, **more: Any) -> asyncio.Protocol:
        made: Any = AutoHTTPProtocol(*args, **more)
        loop = asyncio.get_running_loop()
        head = 0
        receive = made.data_received

        def received(data: bytes) -> None:
            nonlocal head
            before = made.cycle
            receive(data)
            idle = before is None or before.response_complete
            head = head + len(data) if made.cycle is before and idle else 0
            if head > HEAD_BYTES and not made.transport.is_closing():
                made.transport.write(_TOO_LARGE)
                made.transport.close()

        made.data_received = received

        def look(before: object) -> None:
            if made.transport is None or made.transport.is_closing():
                return
            cycle = made.cycle  # the request under way, or the last one
            idle = cycle is None or cycle.response_complete
            if idle and cycle is before:
                made.transport.close()
                return
            loop.call_later(head_s, look, cycle if idle else look)

        loop.call_later(head_s, look, None)
        return cast(asyncio.Protocol, made)

    return protocol


def _authority(host: str, listening: socket.socket) -> str:
    port = listening.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def add_tenant(store_url: str, name: str, *, weight: float, max_sessions: int, max_queue: int) -> str:
    """Make a tenant, or give it a new token and limits. Returns the token: it is stored nowhere. Raises
    `ConfigError` for a name or a weight that nobody could be served by."""
    if not 0 < len(name) <= NAME_CHARS or not name.isprintable() or name != name.strip():
        raise ConfigError(
            f"{name!r:.300} is no name of a tenant.",
            fix=f"Use 1 to {NAME_CHARS} printable characters, none of them a space at an end.",
        )
    if not (math.isfinite(weight) and weight > 0 and max_sessions > 0 and max_queue > 0):
        raise ConfigError(
            f"Tenant {name}: weight {weight:g}, {max_sessions} sessions and {max_queue} waiting can not be.",
            fix="Give finite numbers above 0.",
        )
    token = secrets.token_urlsafe(32)
    with Store.open(store_url) as store:
        store.add_tenant(
            TenantRow(
                name=name,
                token_hash=sha256(token.encode()).hexdigest(),
                weight=weight,
                max_sessions=max_sessions,
                max_queue=max_queue,
                added_at=time.time(),
            )
        )
    return token
