"""What tests of the Kubernetes backend need: a cluster, or why there is none; a namespace of their own; and a
proxy in front of the API server that breaks things on purpose."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from agentrl.errors import SandboxError
from envs.sandbox.contract import Sandbox
from envs.sandbox.kubernetes import KubernetesBackend
from envs.sandbox.kubernetes_pod import Placement


def kubectl(*words: str, namespace: str | None = None, stdin: str | None = None, check: bool = True) -> str:
    """The cluster's own command line, as an outsider would use it."""
    where = () if namespace is None else ("-n", namespace)
    done = subprocess.run(
        ["kubectl", *where, *words], capture_output=True, text=True, timeout=60, check=check, input=stdin
    )
    return done.stdout.strip()


def cluster_or_skip() -> None:
    """Skips the test when sandboxes can not be made on a cluster here."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("KUBECONFIG names no cluster")
    if importlib.util.find_spec("kubernetes_asyncio") is None:
        pytest.skip("the package kubernetes_asyncio is not installed")
    try:
        KubernetesBackend(Path("unused"), placement=Placement(namespace="default")).check()
    except SandboxError as error:
        pytest.skip(str(error))


@contextmanager
def namespace() -> Iterator[str]:
    """A namespace of this test's own."""
    cluster_or_skip()
    name = f"agentrl-test-{os.urandom(4).hex()}"
    kubectl("create", "namespace", name)
    try:
        yield name
    finally:
        kubectl("delete", "namespace", name, "--wait=false")


def pods_in(space: str) -> list[str]:
    return kubectl("get", "pods", "-o", "name", namespace=space).split()


def backends_in(space: str) -> list[str]:
    """What pods belong to, one for each backend."""
    return kubectl("get", "configmaps", "-l", "agentrl=backend", "-o", "name", namespace=space).split()


def container_of(box: Sandbox, name: str = "sandbox") -> str:
    """The container's id on the node's engine."""
    found = subprocess.run(
        ["docker", "ps", "-q", "--no-trunc", "--filter", f"name=k8s_{name}_{box.info.id}_"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout.split()
    assert len(found) == 1, found
    return found[0]


def kill_agent(box: Sandbox) -> None:
    subprocess.run(["docker", "kill", container_of(box)], capture_output=True, timeout=30, check=True)


def pod_json(space: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(kubectl("get", "pod", name, "-o", "json", namespace=space))
    return found


# ------------------------------------------------------------------------------------------------- the proxy

Act = Literal["delay", "never", "drop_answer", "refuse", "cut"]


@dataclass
class Rule:
    """What happens to requests whose first line contains `route`, `times` times."""

    route: str
    act: Act
    times: int = 10**9
    seconds: float = 0.0
    """Of delay; for `cut`: after how long the connection is cut."""
    status: str = "500 Internal Server Error"
    headers: str = ""
    body: str = '{"kind":"Status","message":"rule","reason":"InternalError","code":500}'
    hits: int = 0


@dataclass
class ApiProxy:
    """HTTP in front of the API server, one request per connection. Rules act on it; `silent` swallows what
    the server says on its watches."""

    host: str
    port: int
    credentials: ssl.SSLContext
    rules: list[Rule] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    silent: bool = False
    lag_s: float = 0.0
    """How late a watch tells what it heard."""
    url: str = ""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _open: set[asyncio.StreamWriter] = field(default_factory=set)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def count(self, words: str) -> int:
        return sum(words in line for line in self.seen)

    def cut(self, words: str = "") -> None:
        """Cut every connection that is open now, as a restart of the server does."""
        for task in list(self._tasks):
            if words in task.get_name():
                task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._answer(reader, writer)
        finally:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        self.seen.append(lines[0])
        task = asyncio.current_task()
        assert task is not None
        task.set_name(lines[0])
        rule = next((r for r in self.rules if r.route in lines[0] and r.hits < r.times), None)
        if rule is not None:
            rule.hits += 1
            if rule.act == "never":
                await asyncio.sleep(3600)
            if rule.act == "refuse":
                body = rule.body.encode()
                answer = f"HTTP/1.1 {rule.status}\r\nContent-Type: application/json\r\n{rule.headers}"
                writer.write(
                    f"{answer}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
                )
                await writer.drain()
                return
            if rule.act == "delay":
                await asyncio.sleep(rule.seconds)
        there, back = await asyncio.open_connection(self.host, self.port, ssl=self.credentials)
        upgrade = any(line.lower().startswith("upgrade:") for line in lines)
        if not upgrade:  # One request per connection, so that each is seen.
            lines = [line for line in lines if not line.lower().startswith("connection:")]
            lines[1:1] = ["Connection: close"]
        back.write("\r\n".join(lines).encode("latin-1"))
        forward = asyncio.create_task(_pump(reader, back))
        watch = "watch=1" in lines[0]
        try:
            if rule is not None and rule.act == "drop_answer":
                await there.read(1)  # The server has done it, and nobody hears.
                return
            backward = asyncio.create_task(self._pump_back(there, writer, watch))
            try:
                limit = rule.seconds if rule is not None and rule.act == "cut" else None
                await asyncio.wait({backward}, timeout=limit)
            finally:
                backward.cancel()
                await asyncio.gather(backward, return_exceptions=True)
        finally:
            forward.cancel()
            back.transport.abort()
            await asyncio.gather(forward, return_exceptions=True)

    async def _pump_back(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, watch: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                if watch and self.silent:
                    continue
                if watch and self.lag_s:
                    await asyncio.sleep(self.lag_s)
                target.write(data)
                await target.drain()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()


@asynccontextmanager
async def proxied() -> AsyncIterator[ApiProxy]:
    """A proxy to the API server of the kubeconfig."""
    config = json.loads(kubectl("config", "view", "--raw", "--minify", "-o", "json"))
    facts = config["clusters"][0]["cluster"]
    host, _, port = facts["server"].removeprefix("https://").partition(":")
    context = ssl.create_default_context(cafile=facts.get("certificate-authority"))
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    proxy = ApiProxy(host, int(port or 443), context)
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()


def wait_until(what: Any, within_s: float = 30.0) -> None:
    """Poll what an outsider sees."""
    until = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < until, "it did not come about in time"
        time.sleep(0.2)
