"""One live sandbox on top of an agent's channel: the part of `Sandbox` that all backends share.

A backend hands in what differs: how the workdir is compared with the image from outside (`differ`), how
the sandbox is ended (`end`), and, without isolation, how paths are translated. Invariant: after an answer
that can not be trusted (no answer in time, an unverified kill, a supervisor that died) the sandbox is
*condemned* and refuses work.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, Literal, Protocol, Self

from agentrl.errors import ExecUnknown, SandboxError
from agentrl.types import ExecStatus
from envs.sandbox.adoption import Memory
from envs.sandbox.agent import KILL_DEADLINE_S
from envs.sandbox.contract import (
    TERM_GRACE_S,
    ExecRequest,
    ExecResult,
    Expired,
    FileChange,
    FilePart,
    Health,
    NotRegular,
    NotRun,
    SandboxInfo,
    StreamCapture,
)

TRANSPORT_ALLOWANCE_S = 30.0
"""Added to every wait for an answer: what an overloaded machine may need beside the command itself."""
CLOSE_DEADLINE_S = 10.0
COMMAND_CHARS = 8 * 1024 * 1024
"""Of a command, its arguments and its environment together: far more than any system takes, and less than a
message may hold."""

Differ = Callable[[], Awaitable[tuple[FileChange, ...]]]
Ending = Callable[[], Awaitable[None]]


class Paths(Protocol):
    """Translation between the paths that a task knows and those of a sandbox that has no root of its own."""

    def inside(self, text: str) -> str: ...

    def outside(self, raw: bytes) -> bytes: ...


class Calls(Protocol):
    """A way to ask the agent: a `Channel`, or what is like one."""

    async def call(
        self, header: dict[str, Any], body: bytes = b"", *, deadline_s: float
    ) -> tuple[dict[str, Any], bytes]: ...

    def post(self, header: dict[str, Any], body: bytes = b"") -> None: ...

    def close(self) -> None: ...


class SamePaths:
    """A sandbox with its own root: nothing to translate."""

    def inside(self, text: str) -> str:
        return text

    def outside(self, raw: bytes) -> bytes:
        return raw


class LiveSandbox:
    """See `contract.Sandbox`."""

    def __init__(
        self,
        info: SandboxInfo,
        channel: Calls,
        *,
        differ: Differ,
        end: Ending,
        paths: Paths | None = None,
        agent_pid: int | None = None,
        allowance_s: float = TRANSPORT_ALLOWANCE_S,
    ) -> None:
        self._info = info
        self._channel = channel
        self._differ = differ
        self._end = end
        self._paths = paths or SamePaths()
        self._allowance_s = allowance_s
        self._condemned: str | None = None
        self._closing: asyncio.Task[None] | None = None
        self.agent_pid = agent_pid
        """The agent's process as this machine sees it; None where it is on another one."""

    @property
    def info(self) -> SandboxInfo:
        return self._info

    async def exec(self, request: ExecRequest) -> ExecResult:
        header: dict[str, Any] = {
            "op": "exec",
            "exec_id": request.exec_id,
            "said": request.digest(),
            "env": {name: self._paths.inside(value) for name, value in request.env.items()},
            "timeout_s": request.timeout_s,
            "user": request.user,
            "report_fd": request.report_fd,
            "follow": request.follow,
            "has_stdin": request.stdin is not None,
            "shell": request.shell,
            "cwd": None if request.cwd is None else self._paths.inside(request.cwd),
        }
        if request.command is not None:
            header["command"] = self._paths.inside(request.command)
        else:
            header["argv"] = [self._paths.inside(word) for word in request.argv or ()]
        words = (header.get("command", ""), *header.get("argv", ()), *request.env, *request.env.values())
        if sum(map(len, words)) > COMMAND_CHARS:
            raise ValueError(f"a command of more than {COMMAND_CHARS} characters: no system takes it")
        deadline = request.timeout_s + TERM_GRACE_S + KILL_DEADLINE_S + self._allowance_s
        try:
            answer, body = await self._call(header, request.stdin or b"", deadline_s=deadline)
        except asyncio.CancelledError:
            self._channel.post({"op": "cancel", "exec_id": request.exec_id})
            raise
        result = self._result(request.exec_id, answer, body)
        if result.status is ExecStatus.UNKNOWN:
            self._condemned = f"the supervisor of command {request.exec_id} died"
        elif result.kill_verified is False:
            self._condemned = f"the kill of command {request.exec_id} could not be verified"
        return result

    def _result(self, exec_id: str, answer: dict[str, Any], body: bytes) -> ExecResult:
        at = 0

        def take(length: int) -> bytes:
            nonlocal at
            at += length
            if at > len(body):
                self._condemned = f"the answer of command {exec_id} is cut short"
                raise ExecUnknown(
                    f"Sandbox {self._info.id}: {self._condemned}.", code="answer_cut", phase="exec"
                )
            return body[at - length : at]

        def stream(facts: dict[str, Any]) -> StreamCapture:
            return StreamCapture(
                bytes_total=facts["total"],
                head=take(facts["head"]),
                tail=take(facts["tail"]),
                truncated=facts["truncated"],
                sha256=facts["sha256"],
            )

        stdout, stderr = stream(answer["stdout"]), stream(answer["stderr"])
        report = None if answer["report"] is None else self._paths.outside(take(answer["report"]))
        return ExecResult(
            exec_id=exec_id,
            status=ExecStatus(answer["status"]),
            exit_code=answer["exit_code"],
            signal=answer["signal"],
            stdout=stdout,
            stderr=stderr,
            report=report,
            cpu_ms=answer["cpu_ms"],
            memory_peak_kib=answer["memory_peak_kib"],
            io_bytes=answer.get("io_bytes"),  # not said by an agent of an earlier version
            wall_ms=answer["wall_ms"],
            leftovers_killed=answer["leftovers_killed"],
            leftovers_alive=answer["leftovers_alive"],
            shell_restarted=answer.get("shell_restarted", False),  # said of a named shell only
            kill_verified=answer["kill_verified"],
            reason=answer["reason"],
        )

    async def read_output(
        self, exec_id: str, *, stream: str = "stdout", offset: int = 0, max_bytes: int = 1024 * 1024
    ) -> bytes:
        """Part of the output of a command whose result is truncated (at most 16 MiB of each stream are kept).
        Raises `FileNotFoundError` for an unknown command, `ValueError` when its output is no longer kept."""
        header = {
            "op": "output",
            "exec_id": exec_id,
            "stream": stream,
            "offset": offset,
            "max_bytes": max_bytes,
        }
        _, body = await self._call(header, deadline_s=self._allowance_s)
        return body

    async def follow(
        self, exec_id: str, *, stream: Literal["stdout", "stderr"], offset: int, max_bytes: int
    ) -> tuple[bytes, bool]:
        header = {
            "op": "output",
            "exec_id": exec_id,
            "stream": stream,
            "offset": offset,
            "max_bytes": max_bytes,
        }
        facts, body = await self._call(header, deadline_s=self._allowance_s)
        return body, bool(facts["finished"])

    async def signal(self, exec_id: str, number: int, *, key: str | None = None) -> bool:
        once = key or secrets.token_hex(8)  # a connection that comes back asks again for what had no answer
        header = {"op": "signal", "exec_id": exec_id, "number": number, "key": once}
        facts, _ = await self._call(header, deadline_s=self._allowance_s)
        return bool(facts["running"])

    async def read_file(self, path: str, *, max_bytes: int = 16 * 1024 * 1024) -> bytes:
        header = {"op": "read", "path": self._paths.inside(path), "max_bytes": max_bytes}
        facts, body = await self._call(header, deadline_s=self._allowance_s)
        if len(body) != facts["size"] or hashlib.sha256(body).hexdigest() != facts["sha256"]:
            raise ExecUnknown(
                f"Sandbox {self._info.id}: {path} arrived damaged.", code="answer_cut", phase="read_file"
            )
        return body

    async def read_part(self, path: str, *, offset: int, max_bytes: int) -> FilePart:
        header = {
            "op": "read_part",
            "path": self._paths.inside(path),
            "offset": offset,
            "max_bytes": max_bytes,
        }
        facts, body = await self._call(header, deadline_s=self._allowance_s)
        if len(body) != facts["size"] or hashlib.sha256(body).hexdigest() != facts["sha256"]:
            raise ExecUnknown(
                f"Sandbox {self._info.id}: {path} arrived damaged.", code="answer_cut", phase="read_file"
            )
        return FilePart(data=body, file_bytes=facts["file_bytes"], state=facts["state"])

    async def write_file(self, path: str, data: bytes, *, mode: int | None = 0o644) -> None:
        digest = hashlib.sha256(data).hexdigest()
        header = {"op": "write", "path": self._paths.inside(path), "mode": mode, "sha256": digest}
        await self._call(header, data, deadline_s=self._allowance_s)

    async def apply(self, changes: tuple[FileChange, ...], *, deadline_s: float) -> None:
        """Lay `changes` over the workdir. For backends, before the sandbox is handed out."""
        rows = [
            {"path": c.path, "kind": c.kind, "mode": c.mode, "size": len(c.content or b"")} for c in changes
        ]
        body = b"".join(c.content or b"" for c in changes)
        await self._call({"op": "apply", "changes": rows}, body, deadline_s=deadline_s)

    async def beginning_with(self, changes: tuple[FileChange, ...], *, deadline_s: float) -> Self:
        """Itself, with `changes` laid over the workdir; ended when they can not be."""
        if changes:
            try:
                await self.apply(changes, deadline_s=deadline_s)
            except BaseException:
                await self.close()
                raise
        return self

    async def probe(self) -> Health:
        facts, _ = await self._call({"op": "probe"}, deadline_s=self._allowance_s)
        return Health(
            instance=facts["instance"],
            alive=self._condemned is None,
            oom_kills=facts["oom_kills"],
            disk_free_bytes=facts["disk_free_bytes"],
            processes=facts["processes"],
            cpu_stalled_us=facts.get("cpu_stalled_us"),  # not said by an agent of an earlier version
        )

    async def kill_all(self) -> int:
        facts, _ = await self._call({"op": "kill_all"}, deadline_s=2 * KILL_DEADLINE_S + self._allowance_s)
        if not facts["verified"]:
            self._condemned = "kill_all could not be verified"
            raise SandboxError(
                f"Sandbox {self._info.id}: processes survived kill_all.",
                fix="Close it and start another.",
                code="kill_unverified",
                phase="kill_all",
            )
        killed: int = facts["killed"]
        return killed

    async def diff(self) -> tuple[FileChange, ...]:
        return await self._differ()

    # -- outliving the host: see `adoption`

    def lease(self, ttl_s: float) -> None:
        self._channel.post({"op": "lease", "ttl_s": ttl_s})

    def note(self, key: str, value: str) -> None:
        self._channel.post({"op": "note", "key": key}, value.encode("utf-8", "backslashreplace"))

    async def recall(self) -> Memory:
        facts, body = await self._call({"op": "recall"}, deadline_s=self._allowance_s)
        return Memory(**json.loads(body), lease_left_s=facts["lease_left_s"])

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._channel.close()
        # What could not be given back in time is the backend's to report (`leaks`); closing never raises.
        with contextlib.suppress(TimeoutError, OSError, SandboxError):
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                await self._end()

    async def _call(
        self, header: dict[str, Any], body: bytes = b"", *, deadline_s: float
    ) -> tuple[dict[str, Any], bytes]:
        if self._condemned is not None and header["op"] in ("exec", "read", "read_part", "write", "apply"):
            raise SandboxError(
                f"Sandbox {self._info.id} is condemned: {self._condemned}.",
                fix="Close it and start another.",
                code="condemned",
                phase=header["op"],
            )
        try:
            answer, data = await self._channel.call(header, body, deadline_s=deadline_s)
        except ExecUnknown:
            self._condemned = f"'{header['op']}' was not answered in time"
            raise
        problem = answer.get("error")
        if problem is not None:
            raise _local_error(problem, self._info.id, header["op"])
        return answer, data


def _local_error(problem: dict[str, Any], sandbox: str, phase: str) -> Exception:
    """The exception of our own side for a refusal of the agent."""
    kind, message = problem["kind"], problem["message"]
    if kind == "not_found":
        return FileNotFoundError(message)
    if kind == "is_dir":
        return IsADirectoryError(message)
    if kind == "permission":
        return PermissionError(message)
    if kind == "not_regular":
        return NotRegular(message)
    if kind == "expired":
        return Expired(message)
    if kind == "not_run":
        return NotRun(message)
    if kind in ("too_large", "bad_request"):
        return ValueError(message)
    if kind == "os" and phase != "exec":
        return OSError(problem.get("errno"), message)
    return SandboxError(f"Sandbox {sandbox}: {message}.", code=kind, phase=phase)
