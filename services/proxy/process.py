"""The proxy as a process: a model, a tokenizer and a store to a server that stops cleanly.

Ctrl-C and SIGTERM: no new requests, every open session is closed and kept.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import uvicorn
from uvicorn.loops.auto import auto_loop_factory

from agentrl.errors import ConfigError
from agentrl.inference.sampler import Sampler
from agentrl.store import Store
from agentrl.types import Trajectory
from harness.chat import ChatFormat
from services import signals
from services.proxy.app import create_app, facts
from services.proxy.sessions import Sessions, Settings

GRACE_S = 5
BACKLOG = 2048
PHASE = "proxy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What is told when the proxy answers."""

    url: str
    admin_key: str
    model: str
    run: str
    store: str
    session: dict[str, str]
    """A first session, to try it: base URLs and key."""


def serve(
    *,
    connect: Callable[[], Awaitable[tuple[Sampler, int]]],
    chat: ChatFormat,
    folder: Path,
    store_url: str,
    name: str,
    host: str,
    port: int,
    settings: Settings,
    announce: Callable[[Serving], None],
) -> None:
    """Serve until a signal. Call it from the main thread.

    Args:
        connect: makes the policy in the server's event loop; with it, how many tokens it holds.
        folder: where the tokenizer is kept, so that what is recorded can be read again.

    Raises:
        ConfigError: the port is taken.
        KeyboardInterrupt: Ctrl-C, after everything was kept.
    """
    chat.tokenizer.save_pretrained(folder / "tokenizer")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"Port {port} of {host} can not be used: {error}.", fix="Give another --port; 0 takes a free one."
        ) from error
    with listening, Store.open(store_url) as store:
        run = store.begin_run(
            name, config={"run": {"name": name, "dir": str(folder.absolute())}}, algo=PHASE, seed=0
        )

        def kept(trajectory: Trajectory) -> None:
            if trajectory.calls:
                store.add_trajectory(run.id, trajectory, phase=PHASE)

        admin_key = secrets.token_urlsafe(24)
        shown_host = f"[{host}]" if ":" in host else host
        url = f"http://{shown_host}:{listening.getsockname()[1]}"

        async def run_server() -> None:
            sampler, context = await connect()
            sessions = Sessions(
                sampler,
                chat,
                replace(
                    settings,
                    max_context=min(settings.max_context, context),
                    signing_key=settings.signing_key or secrets.token_bytes(32),
                ),
                prefix=f"{run.id}-p",
                kept=kept,
            )
            server = uvicorn.Server(
                uvicorn.Config(
                    create_app(sessions, admin_key=admin_key),
                    log_level="warning",
                    access_log=False,
                    timeout_graceful_shutdown=GRACE_S,
                    ws="none",
                )
            )
            try:
                announce(
                    Serving(
                        url=url,
                        admin_key=admin_key,
                        model=sampler.model,
                        run=run.id,
                        store=store.url,
                        session=facts(sessions.open("first"), url),
                    )
                )
                await server.serve(sockets=[listening])
            finally:
                sessions.close_all()
                await sampler.close()

        stopped: list[int] = []
        try:
            with signals.noted(stopped), asyncio.Runner(loop_factory=auto_loop_factory()) as loop:
                loop.run(run_server())
        finally:
            store.finish_run(run.id)
    if signal.SIGINT in stopped:
        raise KeyboardInterrupt
