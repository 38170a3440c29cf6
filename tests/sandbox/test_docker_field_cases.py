"""Images and engines of the field: whose fault a probe is that does not start, workdirs that are links, and
what an image says of its own start."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from engines import docker, engine_or_skip

from agentrl.errors import SandboxError
from agentrl.types import SandboxSpec
from envs.sandbox.contract import ExecRequest
from envs.sandbox.docker import DockerBackend, examine
from envs.sandbox.docker_images import DockerImages
from envs.sandbox.engine import EngineRefused
from envs.sandbox.pressure import Pressure

# ------------------------------------------------------------------- a probe that does not start: whose fault


class Probing:
    """An engine on which the start of a container is refused with some words, or ends with a code."""

    def __init__(self, words: str = "", code: int = 0) -> None:
        self.words = words
        self.code = code
        self.removed = 0

    async def call(self, method: str, route: str, **_: Any) -> Any:
        if route.endswith("/create"):
            return {"Id": "c"}
        if route.endswith("/start") and self.words:
            raise EngineRefused(self.words, status=500, phase="probe")
        return {"StatusCode": self.code}

    async def remove(self, name: str, **_: Any) -> None:
        self.removed += 1


def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Probing) -> Any:
    images = DockerImages(engine, tmp_path, owner=None, base_image=None, pressure=Pressure(1))  # type: ignore[arg-type]
    monkeypatch.setattr(images, "tools", lambda: tmp_path)
    monkeypatch.setattr(images, "python", lambda: (tmp_path, "/opt/python3"))
    return asyncio.run(images._interpreter("sha256:image"))


ENGINES_OWN = [
    "OCI runtime create failed: unable to apply cgroup configuration: no space left on device",
    "failed to create shim task: context deadline exceeded",
    "error creating overlay mount to /var/lib/docker/overlay2/x/merged: too many levels of symbolic links",
    "Timeout waiting for systemd to create docker.slice",
    "driver failed programming external connectivity",
]


@pytest.mark.parametrize("words", ENGINES_OWN)
def test_an_engine_that_can_not_start_a_probe_says_nothing_about_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    """A task of such an image would be put aside for good, for what passes in a minute."""
    engine = Probing(words)
    with pytest.raises(SandboxError) as caught:
        interpreter(tmp_path, monkeypatch, engine)
    assert (caught.value.owner, caught.value.retryable) == ("environment", True)
    assert engine.removed == 1


@pytest.mark.parametrize(
    "words",
    [
        'OCI runtime create failed: exec: "python3": executable file not found in $PATH: unknown',
        "crun: executable file `python3` not found in $PATH: No such file or directory",
        "runc create failed: exec /usr/bin/python3: exec format error",
        'exec: "/opt/python3": permission denied',
        "container init: exec /opt/python3: no such file or directory",
    ],
)
def test_an_image_in_which_no_python_starts_is_the_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    with pytest.raises(SandboxError) as caught:
        interpreter(tmp_path, monkeypatch, Probing(words))
    code = "other_platform" if "format error" in words else "no_python"
    assert (caught.value.owner, caught.value.code, caught.value.retryable) == ("task", code, False)


def test_a_probe_that_somebody_killed_says_nothing_about_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SandboxError) as caught:
        interpreter(tmp_path, monkeypatch, Probing(code=137))
    assert (caught.value.owner, caught.value.code) == ("environment", "probe_killed")


# -------------------------------------------------------------------------- engines that say no


def test_an_engine_that_refuses_says_why_and_one_that_may_not_be_asked_says_who_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "engine.sock")
    words = b'{"message":"client version 1.40 is too new. Maximum supported API version is 1.24"}'

    def serve(listener: socket.socket) -> None:
        for _ in range(2):  # one that only connects, and one that asks
            connection, _ = listener.accept()
            with connection:
                if connection.recv(65536):
                    head = f"HTTP/1.1 400 Bad Request\r\nContent-Length: {len(words)}\r\n\r\n".encode()
                    connection.sendall(head + words)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(2)
        server = threading.Thread(target=serve, args=(listener,), daemon=True)
        server.start()
        with pytest.raises(SandboxError, match="too new") as old:
            examine(path)
        server.join(10)
    assert (old.value.code, old.value.retryable) == ("engine_refused", False)

    def refused(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "connect", refused)
    with pytest.raises(SandboxError, match="may not ask") as caught:
        examine(path)
    assert "group" in (caught.value.fix or "")


# ------------------------------------------------------------- what an image says of its own start

HOSTILE = """\
FROM {base}
RUN mkdir -p /real/sub && echo one > /real/a.txt && ln -s /real /linked && ln -s linked /twice
ENV PYTHONPATH=/nowhere PYTHONHOME=/wrong BASH_ENV=/missing PROMPT_COMMAND="exit 3"
HEALTHCHECK --interval=1s CMD touch /linked/health
USER 12345
ENTRYPOINT ["/bin/false"]
STOPSIGNAL SIGSTOP
VOLUME /volume
WORKDIR /linked
"""


@pytest.mark.docker
def test_a_workdir_that_is_a_link_is_what_it_leads_to_and_an_image_starts_nothing_of_its_own(
    tmp_path: Path,
) -> None:
    engine_or_skip()
    name = f"agentrl/field:{os.urandom(4).hex()}"

    async def run() -> None:
        backend = DockerBackend(tmp_path / "state")
        folder = tmp_path / "environment"
        folder.mkdir()
        try:
            await backend.prepare(str(folder))  # makes the base image where there is none
            base = docker("images", "-q", "agentrl/base").split()[0]
            (tmp_path / "Dockerfile").write_text(HOSTILE.format(base=base))
            docker("build", "--network", "none", "-t", name, str(tmp_path))
            image = await backend.prepare(name)
            for workdir in ("/linked", "/twice"):
                spec = SandboxSpec(image=name, workdir=workdir, memory_mib=128, disk_mib=16)
                box = await backend.create(spec, image=image, session="field")
                seen = await box.exec(
                    ExecRequest(exec_id="0", command="cat a.txt; ls; id -un; echo two > a.txt", timeout_s=20)
                )
                assert (seen.exit_code, seen.stdout.text()) == (0, "one\na.txt\nsub\npolicy\n")
                assert [(c.path, c.content) for c in await box.diff()] == [("a.txt", b"two\n")]
                assert (await box.probe()).processes == 0
                await box.close()
        finally:
            await backend.close()
            docker("rmi", "-f", name)

    asyncio.run(run())
