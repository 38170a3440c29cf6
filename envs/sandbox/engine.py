"""The Docker Engine API over its unix socket: one connection per request, never a blocking call, every
request with a deadline and a named phase.

Invariants: a request ends by a response, by `EngineRefused` (the engine answered that it will not) or by
`EngineUnknown` (no usable answer: the engine may or may not have done it, and the caller must look). What the
engine says is never mixed with what a container printed.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal

import httpx

from agentrl.errors import SandboxError
from agentrl.types import JsonScalar

API = "/v1.40"
"""Of Docker 19.03: every engine since then, and Podman, understands it."""
DEFAULT_HOST = "unix:///var/run/docker.sock"
PING_DEADLINE_S = 2.0
Removal = Literal["removed", "absent", "busy"]
_PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Never used on a unix socket; given so that no certificate store is loaded per connection."""


class EngineRefused(SandboxError):
    """The engine answered with an error. `status` is its HTTP status."""

    def __init__(self, message: str, *, status: int, phase: str) -> None:
        super().__init__(
            message,
            fix="See the engine's message; `agentrl doctor` says what this machine can do.",
            code=f"engine_{status}",
            phase=phase,
            evidence={"status": status},
        )
        self.status = status


class EngineUnknown(SandboxError):
    """No usable answer: not reachable, cut off, or not in time. What was asked may have happened."""


def socket_path(host: str | None = None) -> str:
    """The engine's unix socket, from `host` or the engine's own `DOCKER_HOST`. Raises `SandboxError` for
    engines on other machines: a sandbox's agent is reached over a socket in a shared folder."""
    host = host or os.environ.get("DOCKER_HOST") or DEFAULT_HOST
    if not host.startswith("unix://"):
        raise SandboxError(
            f"The Docker engine {host} is not a unix socket of this machine.",
            fix="Run agentrl beside the engine, or use the kubernetes backend.",
            code="engine_remote",
            phase="prepare",
            retryable=False,
        )
    return host.removeprefix("unix://")


class Engine:
    """Requests to one engine."""

    def __init__(self, path: str) -> None:
        self.path = path

    async def call(
        self,
        method: str,
        route: str,
        *,
        phase: str,
        deadline_s: float,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content: bytes | AsyncIterator[bytes] | None = None,
    ) -> Any:
        """The decoded JSON answer, or None for an empty one.

        Raises:
            EngineRefused: status 400 and above.
            EngineUnknown: unreachable, cut off, unreadable, or nothing within `deadline_s`.
        """
        async with self.stream(
            method, route, phase=phase, deadline_s=deadline_s, params=params, body=body, content=content
        ) as response:
            data = await response.aread()
        if not data.strip():
            return None
        if response.headers.get("content-type", "").startswith("application/json"):
            try:
                return json.loads(data)
            except ValueError as error:
                raise _unknown(phase, "engine_garbled", f"answered {data[:80]!r}") from error
        return data.decode("utf-8", "backslashreplace")

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        route: str,
        *,
        phase: str,
        deadline_s: float,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content: bytes | AsyncIterator[bytes] | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """An answer to be read piece by piece; the deadline covers all of it."""
        if body is not None:
            content = json.dumps(body).encode()
        headers = {"content-type": "application/json" if body is not None else "application/x-tar"}
        transport = httpx.AsyncHTTPTransport(uds=self.path, verify=_PLAIN)
        try:
            async with (
                asyncio.timeout(deadline_s),
                httpx.AsyncClient(transport=transport, base_url="http://docker", timeout=None) as client,
                client.stream(
                    method,
                    API + route,
                    params=params,
                    content=content,
                    headers=headers if content is not None else None,
                ) as response,
            ):
                if response.status_code >= 400:
                    message = _message(await response.aread())
                    raise EngineRefused(f"Docker: {message}", status=response.status_code, phase=phase)
                yield response
        except TimeoutError as error:
            raise _unknown(
                phase, "engine_timeout", f"did not answer '{phase}' within {deadline_s:g} s"
            ) from error
        except httpx.ConnectError as error:
            raise _unknown(
                phase, "engine_unreachable", f"can not be reached at {self.path}: {error}"
            ) from error
        except httpx.HTTPError as error:
            raise _unknown(phase, "engine_cut", f"hung up during '{phase}': {error!r}") from error

    async def ping(self) -> None:
        """Raises `EngineUnknown` when the engine does not answer within two seconds."""
        await self.call("GET", "/_ping", phase="ping", deadline_s=PING_DEADLINE_S)

    async def info(self) -> dict[str, Any]:
        found: dict[str, Any] = await self.call("GET", "/info", phase="info", deadline_s=30.0)
        return found

    async def container(self, name: str, *, phase: str, deadline_s: float = 10.0) -> dict[str, Any] | None:
        """What the engine knows of a container; None when there is none of that name."""
        return await self._found(f"/containers/{name}/json", phase, deadline_s)

    async def image(self, name: str, *, phase: str, deadline_s: float = 30.0) -> dict[str, Any] | None:
        return await self._found(f"/images/{name}/json", phase, deadline_s)

    async def _found(self, route: str, phase: str, deadline_s: float) -> dict[str, Any] | None:
        try:
            facts: dict[str, Any] = await self.call("GET", route, phase=phase, deadline_s=deadline_s)
        except EngineRefused as refused:
            if refused.status == 404:
                return None
            raise
        return facts

    async def remove(self, name: str, *, deadline_s: float) -> Removal:
        """Kill and remove a container with its anonymous volumes. Busy: another removal is under way."""
        try:
            await self.call(
                "DELETE",
                f"/containers/{name}",
                phase="delete",
                deadline_s=deadline_s,
                params={"force": "1", "v": "1"},
            )
        except EngineRefused as refused:
            if refused.status == 404:
                return "absent"
            if refused.status == 409:
                return "busy"
            raise
        return "removed"

    async def containers(
        self, labels: Mapping[str, str], *, deadline_s: float = 30.0
    ) -> list[dict[str, Any]]:
        """Containers in any state that carry these labels. For sweeping only: the engine may be slow here."""
        wanted = json.dumps({"label": [f"{key}={value}" for key, value in labels.items()]})
        found: list[dict[str, Any]] = await self.call(
            "GET",
            "/containers/json",
            phase="list",
            deadline_s=deadline_s,
            params={"all": "1", "filters": wanted},
        )
        return found


def _message(data: bytes) -> str:
    try:
        return str(json.loads(data)["message"])
    except (ValueError, KeyError, TypeError):
        return data.decode("utf-8", "backslashreplace")[:500]


def _unknown(phase: str, code: str, what: str) -> EngineUnknown:
    evidence: dict[str, JsonScalar] = {"engine": what}
    return EngineUnknown(
        f"The Docker engine {what}.",
        fix="Look at the engine (`docker info`) and this machine's load.",
        code=code,
        phase=phase,
        evidence=evidence,
    )
