"""HTTP to model servers and gateways: one pool of kept connections, whole bodies in and out.

Every sampled reply and every call of a tool takes this path, so it is the client that costs least: on one
machine 0.3 ms of processor time per request where httpx takes 1.0 ms. What can go wrong has three names:
`NotConnected` (nothing was asked yet), `ConnectionLost` (something was, and no usable answer came), and of
the latter `IdleClosed`: a connection that was kept from an earlier request ended before a byte of an answer.

Cancelling a request closes its connection, which is how a server learns that nobody waits any more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL


class TransportError(Exception):
    """No answer came over the wire."""


class NotConnected(TransportError):
    """No connection was made, so the server was asked nothing."""


class ConnectionLost(TransportError):
    """The connection ended, or stayed silent too long, after the request was on its way."""


class IdleClosed(ConnectionLost):
    """A kept connection ended before any of an answer came. Usually the server had closed it as idle and read
    nothing (a busy one closes even what was sent in time), so it says nothing about the server; but it may
    also have ended because of the request. What may be asked twice is asked again with `fresh`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer, whatever its status."""

    url: str
    status: int
    content: bytes
    """Decompressed."""
    headers: Mapping[str, str]
    """Whatever the case of a name."""

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")


@dataclass(slots=True)
class _Way:
    """How far a request came."""

    kept: bool = False
    """It went over a connection that was used before."""
    answered: bool = False
    """The head of an answer came."""


async def _note_kept(_session: aiohttp.ClientSession, context: Any, _params: object) -> None:
    context.trace_request_ctx.kept = True


class Connections:
    """Made and used in one event loop.

    Args:
        headers: sent with every request.
        connect_s: for one connection to be made.
        keep_s: how long an idle connection is kept. Less than the servers do, so that requests are seldom
            sent into one that closes.
    """

    def __init__(self, *, headers: Mapping[str, str], connect_s: float, keep_s: float) -> None:
        self._connect_s = connect_s
        self._proxies = getproxies()
        self._proxy_of: dict[str, str | None] = {}
        noting = aiohttp.TraceConfig()
        noting.on_connection_reuseconn.append(_note_kept)
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=keep_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            trace_configs=[noting],
        )
        self._unkept = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def post(self, url: str, fields: Mapping[str, Any], *, fresh: bool = False) -> Reply:
        """Send an object, `fresh`: over a connection of its own. There is no deadline: whoever waits has
        one. Raises `TransportError`."""
        body = json.dumps(fields, separators=(",", ":")).encode()
        head = {"content-type": "application/json"}
        return await self.send("POST", url, body, headers=head, fresh=fresh)

    async def get(self, url: str, *, deadline_s: float) -> Reply:
        """Ask for a page. Raises `TransportError`, also after the deadline."""
        return await self.send("GET", url, deadline_s=deadline_s)

    async def close(self) -> None:
        await self._session.close()
        await self._unkept.close()

    async def send(
        self,
        method: str,
        url: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
        fresh: bool = False,
    ) -> Reply:
        """One request; its URL goes out as it is written. Raises `TransportError`, also at the deadline."""
        timeout = aiohttp.ClientTimeout(total=deadline_s, sock_connect=self._connect_s)
        way = _Way()
        try:
            async with (self._unkept if fresh else self._session).request(
                method,
                URL(url, encoded=True),
                data=body,
                headers=headers,
                timeout=timeout,
                proxy=self._proxy(url),
                allow_redirects=False,
                trace_request_ctx=way,
            ) as response:
                way.answered = True
                content = await response.read()
                return Reply(url=url, status=response.status, content=content, headers=response.headers)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise NotConnected(str(error)) from error
        except (aiohttp.ClientError, ConnectionError, aiohttp.ServerTimeoutError) as error:
            unread = way.kept and not way.answered and _closed_silently(error)
            raise (IdleClosed if unread else ConnectionLost)(str(error)) from error
        except TimeoutError as error:
            if deadline_s is None:
                raise  # of whoever waits
            raise ConnectionLost(f"no answer in {deadline_s:.0f} s") from error

    def _proxy(self, url: str) -> str | None:
        """The environment's proxy for a server, looked up once: aiohttp would take a thread per request."""
        origin = url[: url.find("/", url.find("://") + 3)]
        if origin not in self._proxy_of:
            parts = urlsplit(url)
            wanted = parts.hostname is not None and not proxy_bypass(parts.hostname)
            self._proxy_of[origin] = self._proxies.get(parts.scheme) if wanted else None
        return self._proxy_of[origin]


def _closed_silently(error: Exception) -> bool:
    """Whether the connection just ended; the beginning of an answer would be in the error."""
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return isinstance(error.message, str)
    return isinstance(error, aiohttp.ClientOSError | ConnectionResetError | BrokenPipeError)
