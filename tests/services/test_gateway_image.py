"""The image of the gateway, built by its own instructions on a base of this machine's programs and packages:
nothing is downloaded, and what the instructions say is done."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from agentrl.errors import AgentRLError
from agentrl.types import Task, Termination
from envs.sandbox import rootfs
from envs.sandbox.docker import DockerBackend
from envs.sandbox.docker_stock import BASE
from envs.tasks import swe_mini
from envs.tasks.package import load_task
from harness.gateway import client as calls
from harness.gateway import wire
from harness.gateway.client import AsyncClient

pytestmark = pytest.mark.docker
ROOT = Path(__file__).parents[2]
USER = "10001:10001"
_IMPORTED = """
import sys, sysconfig, os
import agentrl.cli.app, agentrl.cli.main, agentrl.cli.serve, services.gateway.process
site = sysconfig.get_path("purelib")
files = (getattr(module, "__file__", None) or "" for module in list(sys.modules.values()))
print(*{os.path.relpath(file, site).split("/")[0] for file in files if file.startswith(site)})
"""
_ALSO = (
    "pip",
    "setuptools",
    "pkg_resources",
    "uvloop",
    "greenlet",
    "h11",
    "httpcore",
    "certifi",
    "jinja2",
    "markdown_it",
    "mdurl",
)
_STAND_IN = """\
FROM {base}
COPY root /
ENV PATH=/opt/venv/bin:/usr/bin:/bin LD_LIBRARY_PATH=/opt/lib PIP_DISABLE_PIP_VERSION_CHECK=1 \\
  PIP_NO_INDEX=1 PIP_NO_BUILD_ISOLATION=0 PIP_NO_COMPILE=1
"""
"""What python:3.12-slim and an index would give: a Python with pip, and the packages that are required."""
_IDLE = re.compile(r"/tests(/|$)|\.(c|h|a|pyx|pxd|pyi)$")
"""Of packages: what no program reads while it runs."""
_PIP = b'#!/bin/sh\nexec python3 -m pip "$@"\n'


def docker(*words: str, stdin: bytes | None = None, timeout_s: float = 120.0) -> str:
    done = subprocess.run(
        ["docker", *words],
        input=stdin,
        capture_output=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "DOCKER_BUILDKIT": "0"},
    )
    assert done.returncode == 0, (done.stdout + done.stderr).decode()[-3000:]
    return done.stdout.decode().strip()


def context(dockerfile: str) -> bytes:
    """The stand-in's build context: of this environment's packages those that a gateway imports, and what all
    of them say of themselves, which is what pip asks; and the libraries that they are linked to."""
    said = subprocess.run([sys.executable, "-c", _IMPORTED], capture_output=True, text=True, check=True)
    site = Path(sysconfig.get_path("purelib"))
    wanted = {name for name in (*said.stdout.split(), *_ALSO) if "__editable__" not in name}
    wanted |= {f"{name}.libs" for name in wanted}
    wanted |= {path.name for path in site.glob("*.dist-info") if not path.name.startswith("agentrl-")}
    parts = [site / name for name in sorted(wanted) if (site / name).exists()]
    linked = [str(path) for part in parts for path in part.rglob("*.so*")]
    listed = subprocess.run(["ldd", *linked], capture_output=True, text=True, check=False).stdout
    libraries = set(re.findall(r"=> (/(?:usr/)?lib\S+)", listed))
    inside = f"root/opt/venv/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:

        def add(name: str, content: bytes, mode: int = 0o644) -> None:
            facts = tarfile.TarInfo(name)
            facts.size, facts.mode = len(content), mode
            tar.addfile(facts, io.BytesIO(content))

        add("Dockerfile", dockerfile.encode())
        add("root/opt/venv/pyvenv.cfg", b"home = /usr/local/bin\n")
        add("root/opt/venv/bin/pip", _PIP, 0o755)
        link = tarfile.TarInfo("root/opt/venv/bin/python3")
        link.type, link.linkname = tarfile.SYMTYPE, "/usr/local/bin/python3"
        tar.addfile(link)
        for part in parts:
            tar.add(part, f"{inside}/{part.name}", filter=lambda m: None if _IDLE.search(m.name) else m)
        for library in libraries:
            if not os.path.basename(library).startswith(("ld-", "libc.")):
                tar.add(os.path.realpath(library), f"root/opt/lib/{os.path.basename(library)}")
    return raw.getvalue()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The gateway's image, or why there can be none."""
    state = tmp_path_factory.mktemp("state")
    (state / "environment").mkdir()
    (state / "environment" / "a.txt").write_text("a\n")

    async def based() -> None:
        backend = DockerBackend(state)
        backend.check()
        await backend.prepare(str(state / "environment"))
        await backend.close()

    try:
        asyncio.run(based())
    except AgentRLError as error:
        pytest.skip(str(error))
    if sys.prefix == sys.base_prefix or importlib.util.find_spec("pip") is None:
        pytest.skip("the packages are not in a virtual environment of their own, with pip in it")
    stamp = os.urandom(4).hex()
    stand_in, made = f"agentrl-test/python:{stamp}", f"agentrl-test/gateway:{stamp}"
    text = _STAND_IN.format(base=BASE + rootfs.identity())
    try:
        docker("build", "-q", "--network", "none", "-t", stand_in, "-", stdin=context(text))
        file = str(ROOT / "deploy" / "kubernetes" / "gateway.Dockerfile")
        build = ("build", "-q", "--network", "none", "--build-arg", f"BASE={stand_in}", "-t", made)
        docker(*build, "-f", file, str(ROOT))
        yield made
    finally:
        for name in (made, stand_in):
            subprocess.run(["docker", "rmi", "-f", name], capture_output=True, timeout=60, check=False)


def test_the_gateways_image_builds_and_serves_as_the_cluster_runs_it(image: str, tmp_path: Path) -> None:
    """Without root, without rights, on a read-only system, as gateway.yaml has it."""
    facts = json.loads(docker("image", "inspect", image))[0]["Config"]
    assert (facts["User"], facts["WorkingDir"], facts["Entrypoint"]) == (USER, "/state", ["agentrl"])
    (made,) = swe_mini.generate(tmp_path / "tasks", train=1, heldout=0, seed=1)
    task = load_task(made)
    state = tmp_path / "state"
    state.mkdir()
    os.chown(state, 10001, 10001)
    tmp_path.chmod(0o755)
    name = f"agentrl-gateway-{os.urandom(4).hex()}"
    strict = ("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
    mounts = ("-v", f"{state}:/state", "-v", f"{tmp_path / 'tasks'}:/tasks:ro", "--tmpfs", "/tmp:exec")
    run = ("run", "--name", name, "--network", "host", *strict, *mounts)
    store = ("--store", "sqlite:////state/store.db")
    token = json.loads(docker(*run, "--rm", image, "serve", "tenant", "ada", *store, "--json"))["token"]
    where = ("--tasks", "/tasks", "--state-dir", "/state", "--port", "0", "--backend", "plain")
    docker(*run, "-d", image, "serve", "gateway", *where, *store, "--json")
    try:
        url = json.loads(announced(name))["url"]
        assert httpx.get(f"{url}/healthz", timeout=10).status_code == 200
        assert httpx.get(f"{url}/readyz", timeout=10).status_code == 200

        asyncio.run(attempted(url, token, task))
        docker("stop", "-t", "20", name)
        assert docker("inspect", "-f", "{{.State.ExitCode}}", name) == "0"
    finally:
        with contextlib.suppress(AssertionError):
            docker("rm", "-f", name)


async def attempted(url: str, token: str, task: Task) -> None:
    """One attempt at a task through a gateway, from its admission to its verdict."""
    client = AsyncClient(url, token=token)
    try:
        view = await client.send(
            calls.open_session(client_key="one", task_id=task.id, revision=task.revision)
        )
        view = await client.send(calls.session(view.id, wait_s=60.0))
        assert view.state == "ready", view
        body = wire.ExecBody(exec_id="1", command="id -u; python3 -c 'print(6 * 7)'")
        seen = await client.send(calls.run(view.id, body))
        assert seen.stdout.head.split() == ["10001", "42"]
        verdict = await client.send(
            calls.finalize(view.id, termination=Termination.FINISHED, fault=None, deadline_s=120.0)
        )
        assert (verdict.reward, verdict.isolation, verdict.fault) == (0.0, "none", None)
        await client.send(calls.delete(view.id))
    finally:
        await client.close()


def announced(name: str) -> str:
    """The line in which a gateway says where it listens."""
    until = time.monotonic() + 60
    while not (said := docker("logs", name)):
        running = docker("inspect", "-f", "{{.State.Running}}", name)
        assert running == "true", docker("logs", name)
        assert time.monotonic() < until, "it says nothing"
        time.sleep(0.2)
    return said.splitlines()[0]
