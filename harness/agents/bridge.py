"""From the loopback of a sandbox without network to the door of its session.

The sandbox's own data path is the only way out of it, so requests take that one: `inside` lays them into a
folder, a command that waits on a named pipe says which are new, they are read as files, answered by the
`Door`, and written back as files. Every backend can do this, nothing listens outside, and a sandbox reaches
its own session only.

A client that gives up takes its request with it; a stream arrives in one piece.
"""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress
from typing import Protocol

from agentrl.types import ExecStatus
from envs.sandbox.contract import ExecRequest, ExecResult
from harness.proxy.door import MAX_BODY_BYTES, Door, Request

TAKE_S = 60.0
"""Longer than `inside` ever leaves a reader of its pipe waiting."""
HEAD_BYTES = 64 * 1024
"""For a request's method, path and headers, beside its body."""
PAUSE_S = 0.1
"""After a look that found no bridge yet, or none any more."""


class Workspace(Protocol):
    """What the bridge needs of a session: commands and files in its sandbox."""

    def next_exec_id(self) -> str: ...

    async def exec(self, request: ExecRequest) -> ExecResult: ...

    async def read_file(self, path: str, *, max_bytes: int) -> bytes: ...

    async def write_file(self, path: str, data: bytes, *, mode: int | None) -> None: ...


class Bridge:
    """Carries requests of one sandbox. `folder` is the folder that `inside` was given."""

    def __init__(self, workspace: Workspace, folder: str, door: Door) -> None:
        self._workspace = workspace
        self._folder = folder
        self._door = door
        self._carrying: dict[int, asyncio.Task[None]] = {}
        self._over = False
        self.carried = 0

    async def finish(self, running: asyncio.Task[None]) -> None:
        """End `run` without breaking off a command: the reader of the pipe is woken and answers as any other
        command does, so that nothing in the sandbox has an unknown outcome."""
        self._over = True
        if running.done():
            return
        await self._workspace.exec(
            ExecRequest(
                exec_id=self._workspace.next_exec_id(),
                argv=("sh", "-c", 'exec 3<>"$0"; echo >&3; sleep 0.1', f"{self._folder}/next"),
                cwd="/",
                timeout_s=TAKE_S,
            )
        )
        await asyncio.wait({running}, timeout=TAKE_S + PAUSE_S)

    async def run(self) -> None:
        """Carry until finished. Raises `BoundaryError` when the sandbox can not be reached any more."""
        try:
            while not self._over:
                for come, number in _told(await self._news()):
                    if come and number not in self._carrying:
                        self._carrying[number] = asyncio.create_task(self._carry(number))
                    elif not come and number in self._carrying:
                        self._carrying[number].cancel()
                failed = [t for t in self._carrying.values() if t.done() and not t.cancelled()]
                for task in failed:
                    task.result()
        finally:
            for task in self._carrying.values():
                task.cancel()
            await asyncio.gather(*self._carrying.values(), return_exceptions=True)

    async def _news(self) -> str:
        result = await self._workspace.exec(
            ExecRequest(
                exec_id=self._workspace.next_exec_id(),
                argv=("cat", f"{self._folder}/next"),
                cwd="/",
                timeout_s=TAKE_S,
            )
        )
        if result.status is not ExecStatus.EXITED or result.exit_code != 0:
            await asyncio.sleep(PAUSE_S)  # Not there yet, or the policy broke it: its requests go unanswered.
            return ""
        return result.stdout.text()

    async def _carry(self, number: int) -> None:
        with suppress(OSError, ValueError):  # The policy can spoil files in its sandbox: its own loss.
            raw = await self._workspace.read_file(
                f"{self._folder}/out/{number}", max_bytes=MAX_BODY_BYTES + HEAD_BYTES
            )
            response = await self._door.handle(_request(raw))
            content = response.body
            if not isinstance(content, bytes):
                content = b"".join([piece async for piece in content])
            answer = {
                "status": response.status,
                "headers": {"content-type": response.content_type, **response.headers},
            }
            await self._workspace.write_file(
                f"{self._folder}/in/{number}", json.dumps(answer).encode() + b"\n" + content, mode=0o644
            )
            self.carried += 1


_NEWS = re.compile(r"([+-])([0-9]{1,9})")


def _told(text: str) -> list[tuple[bool, int]]:
    """Requests that came (True) or whose client left, by number. What is no such line was not written by
    `inside`."""
    lines = (_NEWS.fullmatch(line) for line in text.split())
    return [(line[1] == "+", int(line[2])) for line in lines if line is not None]


def _request(raw: bytes) -> Request:
    """A request as `inside` writes it. Raises `ValueError` for anything else: it lies where the policy can
    write."""
    head, _, body = raw.partition(b"\n")
    try:
        told = json.loads(head)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(told, dict) or not isinstance(told.get("headers"), dict):
        raise ValueError("no head of a request")
    return Request(
        method=str(told.get("method", "")),
        path=str(told.get("path", "")),
        headers={str(name): str(value) for name, value in told["headers"].items()},
        body=body,
    )
