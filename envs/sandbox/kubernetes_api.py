"""The Kubernetes API as the backend needs it: raw JSON, one deadline and one named phase per request.

Finding and refreshing credentials (kubeconfig files, exec plugins, a pod's own service account) and the
requests are those of the `kubernetes_asyncio` client. Its typed models are not used: they cost more than the
requests (kubernetes-client/python#2284). The connections are of our own making, to know when they are closed:
one that is given up (a watch, a request or an exec connection that was cut) waits for the server's goodbye,
and a busy server lets it wait for half a minute.

Invariants: a request ends by an answer, by `ApiRefused` (the server answered that it will not) or by
`ApiUnknown` (no usable answer: what was asked may have happened, and the caller must look). After `close` no
connection is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import ssl
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes_asyncio.client import ApiClient, Configuration
from kubernetes_asyncio.config import (
    ConfigException,
    load_incluster_config,
    load_kube_config,
    refresh_token,
)

from agentrl.errors import SandboxError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
EXEC_PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
CONNECT_DEADLINE_S = 20.0
HEARTBEAT_S = 20.0
"""Between pings of an exec connection; one that does not answer is dropped."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0
GOODBYE_TURNS = 1000
"""How many times the event loop is let on while connections end; each takes a few turns of it."""
READ_BYTES = 2 << 20
"""More than any object that the server stores, so that an event of a watch is one line."""

Json = dict[str, Any]


class ApiRefused(SandboxError):
    """The server answered with an error. `status` is its HTTP status, `reason` its own word for it."""

    def __init__(self, message: str, *, status: int, reason: str, phase: str, pause_s: float | None) -> None:
        super().__init__(
            f"Kubernetes: {message}",
            fix=_FIXES.get(
                status, "See the server's message; `agentrl doctor` says what the cluster allows."
            ),
            code=f"api_{status}",
            phase=phase,
            retryable=status not in (400, 401, 403, 404, 405, 422),
            evidence={"status": status, "reason": reason},
        )
        self.status = status
        self.reason = reason
        self.pause_s = pause_s
        """What the server asked to wait (Retry-After), in seconds."""

    @property
    def passing(self) -> bool:
        """Too many requests, or trouble of the server's own: the same may work later."""
        return self.status == 429 or self.status >= 500


_FIXES = {
    401: "Renew the credentials of the kubeconfig.",
    403: "Give this account the rights of deploy/kubernetes/rbac.yaml.",
}


class ApiUnknown(SandboxError):
    """No usable answer: not reachable, cut off, or not in time. What was asked may have happened."""


class Gone(Exception):
    """The version to watch from is no longer kept (HTTP 410): list again."""


class Cluster:
    """Requests to one API server. Belongs to the event loop of its first request.

    `kubeconfig` None: a pod's service account when there is one, else the file of KUBECONFIG or the default
    one. `server` replaces the address found there.
    """

    def __init__(
        self, *, context: str | None = None, kubeconfig: str | None = None, server: str | None = None
    ) -> None:
        self._context = context
        self._kubeconfig = kubeconfig
        self._server = server
        self._client: ApiClient | None = None
        self._connecting = asyncio.Lock()
        self._refreshing: asyncio.Task[None] | None = None
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self.inside = kubeconfig is None and (SERVICE_ACCOUNT / "token").is_file()
        """Whether this process is a pod of the cluster."""
        self.default_namespace = "default"

    async def connect(self) -> ApiClient:
        """Raises `SandboxError` when there is no configuration, saying where it was looked for."""
        async with self._connecting:
            if self._client is None:
                configuration = Configuration()
                try:
                    await self._load(configuration)
                except (ConfigException, OSError, ValueError, KeyError) as error:
                    raise SandboxError(
                        f"There is no usable Kubernetes configuration: {error}",
                        fix="Set KUBECONFIG to a cluster's file, or use another backend: `--backend local`.",
                        code="no_cluster",
                        phase="prepare",
                        retryable=False,
                    ) from error
                if self._server is not None:
                    configuration.host = self._server
                client = ApiClient(configuration)
                await client.rest_client.pool_manager.close()
                client.rest_client.pool_manager = aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(
                        limit=0,  # Bounded by who asks, not by connections.
                        ssl=_credentials(configuration),
                        socket_factory=self._socket,
                    ),
                    trust_env=True,
                    read_bufsize=READ_BYTES,
                )
                self._client = client
        return self._client

    def _socket(self, address: Any) -> socket.socket:
        family, kind, protocol, _, _ = address
        made = socket.socket(family, kind, protocol)
        self._sockets.add(made)
        return made

    async def _load(self, configuration: Configuration) -> None:
        if self.inside:
            load_incluster_config(  # type: ignore[no-untyped-call]
                client_configuration=configuration,
                token_filename=str(SERVICE_ACCOUNT / "token"),
                cert_filename=str(SERVICE_ACCOUNT / "ca.crt"),
            )
            with contextlib.suppress(OSError):
                self.default_namespace = (SERVICE_ACCOUNT / "namespace").read_text().strip()
            return
        loader = await load_kube_config(
            config_file=self._kubeconfig or os.environ.get("KUBECONFIG"),
            context=self._context,
            client_configuration=configuration,
            persist_config=False,
        )
        with contextlib.suppress(ConfigException, KeyError, TypeError):
            self.default_namespace = (loader.current_context or {})["context"]["namespace"]
        self._refreshing = asyncio.create_task(refresh_token(loader, configuration))

    async def close(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)
            self._refreshing = None
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()
            for given_up in self._sockets:
                with contextlib.suppress(OSError):  # Closed, or about to be.
                    given_up.shutdown(socket.SHUT_RDWR)
            for _ in range(GOODBYE_TURNS):
                if all(given_up.fileno() < 0 for given_up in self._sockets):
                    break
                await asyncio.sleep(0.001)

    # -- requests

    async def call(
        self,
        method: str,
        path: str,
        *,
        phase: str,
        deadline_s: float,
        params: Mapping[str, str] | None = None,
        body: Json | None = None,
        read: Callable[[bytes], Json] = json.loads,
    ) -> Json:
        """The decoded answer of one try; `read` decodes it, and raises ValueError for what is none. Raises
        `ApiRefused`, `ApiUnknown`."""
        try:
            async with asyncio.timeout(deadline_s):
                response = await self._send(method, path, params, body, phase)
                async with response:
                    data = await response.read()
        except TimeoutError as error:
            what = f"did not answer '{phase}' within {deadline_s:g} s"
            raise _unknown(phase, "api_timeout", what) from error
        except aiohttp.ClientConnectorError as error:
            raise _unknown(phase, "api_unreachable", f"can not be reached: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _unknown(phase, "api_cut", f"hung up during '{phase}': {error!r}") from error
        if response.status >= 400:
            raise _refused(response, data, phase)
        try:
            return read(data)
        except ValueError as error:
            raise _unknown(phase, "api_garbled", f"answered {data[:80]!r}") from error

    async def insist(
        self,
        method: str,
        path: str,
        *,
        phase: str,
        deadline_s: float,
        params: Mapping[str, str] | None = None,
        body: Json | None = None,
        try_s: float = 15.0,
    ) -> Json:
        """Like `call`, for requests that may be repeated: trouble that passes is waited out within the
        deadline."""
        until = time.monotonic() + deadline_s
        pause = FIRST_PAUSE_S
        while True:
            left = until - time.monotonic()
            try:
                return await self.call(
                    method,
                    path,
                    phase=phase,
                    deadline_s=max(0.01, min(left, try_s)),
                    params=params,
                    body=body,
                )
            except (ApiRefused, ApiUnknown) as error:
                if isinstance(error, ApiRefused) and not error.passing:
                    raise
                wait_s = getattr(error, "pause_s", None) or pause * (1 + random.random())
                if time.monotonic() + wait_s >= until:
                    raise
            await asyncio.sleep(wait_s)
            pause = min(2 * pause, MAX_PAUSE_S)

    async def watch(
        self, path: str, *, version: str, selector: str, lasting_s: int, silence_s: float
    ) -> AsyncGenerator[Json]:
        """Events as they come, bookmarks among them, until the server ends the watch in good order.

        Raises `Gone`, `ApiRefused`, and `ApiUnknown` for a cut or for `silence_s` without any event."""
        params = {
            "watch": "1",
            "resourceVersion": version,
            "labelSelector": selector,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(lasting_s),
        }
        try:
            async with asyncio.timeout(CONNECT_DEADLINE_S):
                response = await self._send("GET", path, params, None, "watch")
            async with response:
                if response.status == 410:
                    raise Gone
                if response.status >= 400:
                    raise _refused(response, await response.read(), "watch")
                while True:
                    async with asyncio.timeout(silence_s):
                        line = await response.content.readline()
                    if not line:
                        return
                    event: Json = json.loads(line)
                    if event["type"] == "ERROR":
                        if event["object"].get("code") == 410:
                            raise Gone
                        raise _unknown("watch", "watch_error", f"said {event['object'].get('message')!r}")
                    yield event
        except TimeoutError as error:
            raise _unknown("watch", "watch_silent", f"was silent for {silence_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError, KeyError) as error:
            raise _unknown("watch", "watch_cut", f"cut the watch: {error!r}") from error

    async def exec(
        self, namespace: str, pod: str, container: str, command: list[str]
    ) -> aiohttp.ClientWebSocketResponse:
        """A websocket to a program's standard streams: binary messages, the first byte names the stream.

        Raises `ApiRefused`, `ApiUnknown`."""
        client = await self.connect()
        query = [("container", container), ("stdin", "1"), ("stdout", "1"), ("stderr", "1")]
        query += [("command", word) for word in command]
        headers: dict[str, str] = {"User-Agent": "agentrl"}
        await client.update_params_for_auth(headers, [], ["BearerToken"])
        host = str(client.configuration.host).removeprefix("http")
        url = f"ws{host}/api/v1/namespaces/{namespace}/pods/{pod}/exec?{urlencode(query)}"
        try:
            async with asyncio.timeout(CONNECT_DEADLINE_S):
                return await client.rest_client.pool_manager.ws_connect(
                    url, headers=headers, protocols=EXEC_PROTOCOLS, heartbeat=HEARTBEAT_S
                )
        except TimeoutError as error:
            raise _unknown("exec", "api_timeout", "did not open an exec connection in time") from error
        except aiohttp.WSServerHandshakeError as error:
            raise ApiRefused(
                f"the exec connection was refused: {error.message}",
                status=error.status,
                reason="exec",
                phase="exec",
                pause_s=None,
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _unknown("exec", "api_unreachable", f"can not be reached: {error!r}") from error

    async def _send(
        self, method: str, path: str, params: Mapping[str, str] | None, body: Json | None, phase: str
    ) -> aiohttp.ClientResponse:
        client = await self.connect()
        headers = {"Accept": "application/json", "User-Agent": "agentrl"}
        if method == "PATCH":
            headers["Content-Type"] = "application/merge-patch+json"
        await client.update_params_for_auth(headers, [], ["BearerToken"])
        response: aiohttp.ClientResponse = await client.rest_client.request(
            method,
            f"{client.configuration.host}{path}",
            query_params=dict(params or {}),
            headers=headers,
            body=body,
            _preload_content=False,
        )
        return response


def _credentials(configuration: Configuration) -> ssl.SSLContext:
    """What the configuration says of certificates, as the client itself understands it."""
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, keyfile=configuration.key_file)
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if getattr(configuration, "disable_strict_ssl_verification", False):
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _refused(response: aiohttp.ClientResponse, data: bytes, phase: str) -> ApiRefused:
    try:
        said = json.loads(data)
        message, reason = str(said["message"]), str(said.get("reason") or "")
    except (ValueError, KeyError, TypeError):
        message, reason = data.decode("utf-8", "backslashreplace")[:500], ""
    try:
        pause_s: float | None = float(response.headers["Retry-After"])
    except (KeyError, ValueError):
        pause_s = None
    return ApiRefused(message, status=response.status, reason=reason, phase=phase, pause_s=pause_s)


def _unknown(phase: str, code: str, what: str) -> ApiUnknown:
    return ApiUnknown(
        f"The Kubernetes API server {what}.",
        fix="Look at the API server (`kubectl get --raw /readyz`) and the way to it.",
        code=code,
        phase=phase,
        evidence={"api": what},
    )
