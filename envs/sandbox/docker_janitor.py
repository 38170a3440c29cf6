"""A small process that waits for the end of a Docker backend whose sandboxes may outlive it, and removes what
sandboxes leave that ended without it: the container, its mounts, its folder.

It starts with the backend and learns of its end from a pipe. From then on it asks the engine once a second
which of the backend's containers still run, and touches only those that do not; while a successor holds the
backend's lock it touches nothing. It ends with the last of them. An engine that does not answer is asked
again: the sandboxes end themselves without it. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import select
import socket
import sys
import time
from pathlib import Path

from envs.sandbox import docker_disk

ROUND_S = 1.0
PATIENCE_S = 6 * 3600.0
"""Then the next backend on this machine sweeps what is left."""
ANSWER_S = 20.0
API = "/v1.41"


class _Unix(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("docker", timeout=ANSWER_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(ANSWER_S)
        self.sock.connect(self._path)


def ask(engine: str, method: str, route: str) -> tuple[int, bytes]:
    """One request to the engine. Raises OSError or `http.client.HTTPException`."""
    connection = _Unix(engine)
    try:
        connection.request(method, API + route)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def owned(folder: Path) -> bool:
    """Whether a successor holds the lock of this backend."""
    try:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def clear(folder: Path, engine: str) -> bool:
    """Remove the sandboxes of a backend that run no more; True when none is left."""
    left = False
    for sandbox in folder.glob("agentrl-*"):
        status, body = ask(engine, "GET", f"/containers/{sandbox.name}/json")
        if status == 200 and json.loads(body)["State"]["Running"]:
            left = True
            continue
        if status == 200:
            ask(engine, "DELETE", f"/containers/{sandbox.name}?force=1&v=1")
        docker_disk.remove(sandbox)
        left = left or sandbox.exists()
    return not left


def main(folder: str, engine: str, host: int) -> None:
    """Entry: the backend's folder, the engine's socket, an inherited pipe that ends with the backend."""
    here = Path(folder)
    select.select([host], [], [])
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until and here.exists():
        with contextlib.suppress(OSError, ValueError, KeyError, http.client.HTTPException):
            if not owned(here) and clear(here, engine):
                (here / "lock").unlink(missing_ok=True)
                here.rmdir()
                return
        time.sleep(ROUND_S)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
