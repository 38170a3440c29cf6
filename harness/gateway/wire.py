"""The records on the wire of an environment gateway: one definition for the service and its clients.

Requests refuse unknown keys. Times are Unix seconds, durations carry their unit in the name. What the caller
sends twice under the same key (`client_key`, `call_id`, `exec_id`) is done once. `Observation`, `Verdict` and
`Admission` travel as the records that they are.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from agentrl.errors import FaultOwner
from agentrl.types import ExecStatus, Fault, JsonScalar, Limits, Termination
from envs.preparation import ImageStatus
from envs.sandbox.contract import ExecRequest, ExecResult, FileChange, StreamCapture

MAX_EXEC_S = 3600.0
MAX_WAIT_S = 60.0
"""Longest a request is held open; what takes longer answers 202 and is asked again under the same key."""
MAX_SNAPSHOT_S = 30 * 86_400.0
MAX_EPOCH = (1 << 53) - 1
"""Highest epoch of a lease: what every JSON reader and every store takes as a whole number."""
PART_BYTES = 1 << 20
"""Of a file that is read in parts: what one answer holds at most."""
FAULT_CHARS = 200
"""Longest code and phase of a fault."""
COMMAND_CHARS = 1 << 17
"""Longest command: what Linux takes as one argument."""


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("a lone surrogate; send text as UTF-8") from error
    return text


def _no_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("a NUL byte; no path, command or name holds one")
    return _text(text)


def _one_segment(text: str) -> str:
    if "/" in text or text in (".", ".."):
        raise ValueError("it is a part of URLs: not . or .., and without /")
    return text


Key = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9._:/@+-]+$")]
"""What a caller names its own things by."""
Plain = Annotated[str, AfterValidator(_no_nul)]
Text = Annotated[str, AfterValidator(_text)]
ExecId = Annotated[Key, AfterValidator(_one_segment)]
"""A key by which a command is asked for again: `…/exec/{exec_id}`."""


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _example(**example: Any) -> ConfigDict:
    return ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, json_schema_extra={"examples": [example]}
    )


class ErrorBody(_Wire):
    """Every answer that is not a success. `message` says what happened, `fix` what to do next."""

    code: str
    owner: FaultOwner | Literal["caller"]
    """`caller`: the request itself is wrong. Any other owner is that of a fault."""
    message: str
    fix: str | None = None
    phase: str = "request"
    retryable: bool = False
    evidence: dict[str, JsonScalar] = Field(default_factory=dict)


class TaskRef(_Wire):
    """A task of the gateway; with a revision only that one will do."""

    id: Key
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None


class OpenRequest(_Wire):
    """Ask for a session. The same `client_key` and body is the same session."""

    model_config = _example(client_key="run1/g7.0", task={"id": "small/cart"}, lease_ttl_s=120.0)

    client_key: Key
    task: TaskRef
    tenant: Text | None = None
    """Only to be sure: must be the tenant of the token."""
    group_id: Key | None = None
    group_size: Annotated[int, Field(ge=1, le=1024)] = 1
    """Members that are admitted together or not at all; a later member of an admitted group goes alone."""
    from_snapshot: Key | None = None
    """Begin with the workdir of a snapshot of the same task, in place of the image's."""
    limits: Limits | None = None
    """In place of the task's own."""
    deadline_at: Annotated[float, Field(gt=0)] | None = None
    """When everything must be over: the attempt, its verification and the clean-up."""
    queue_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    lease_ttl_s: Annotated[float, Field(gt=0, le=3600)] = 120.0

    @model_validator(mode="after")
    def _grouped(self) -> OpenRequest:
        if self.group_size > 1 and self.group_id is None:
            raise ValueError("group_size without group_id: say which group")
        return self


class SnapshotBody(_Wire):
    """Keep a session's workdir. The same `client_key` and body is the same snapshot."""

    model_config = _example(client_key="run1/g7.0/after-setup", ttl_s=3600.0)

    client_key: Key
    ttl_s: Annotated[float, Field(gt=0, le=MAX_SNAPSHOT_S)] = 86_400.0
    """How long it is kept, from when it is taken."""


class SnapshotView(_Wire):
    """A workdir that is kept: its changes against the image. Processes are no part of it."""

    id: str
    session_id: str
    task: TaskRef
    image_digest: str
    digest: str
    """sha256 of the changes: what the evidence of a session names that began from it."""
    changes: int
    bytes: int
    """What it takes of the tenant's share."""
    processes: int
    """Alive in the sandbox when it was taken; a file that one of them was writing is as it was found."""
    created_at: float
    expires_at: float


class DeletedView(_Wire):
    """`deleted`: it was there."""

    deleted: bool


class LeaseRequest(_Wire):
    """Hold a session. A higher epoch takes it over; a lower one is refused from then on."""

    model_config = _example(epoch=1, ttl_s=120.0)

    epoch: Annotated[int, Field(ge=1, le=MAX_EPOCH)]
    ttl_s: Annotated[float, Field(gt=0, le=3600)]


class LeaseView(_Wire):
    epoch: int
    ttl_s: float
    until: float
    gateway_epoch: int
    """Rises by one with every start of the gateway."""


class SessionView(_Wire):
    """What a session is now."""

    id: str
    state: str
    task: TaskRef
    group_id: str | None
    position: int | None
    """Place in the tenant's queue, from 1; None when not waiting."""
    eta_s: float | None
    """Until it is admitted, from how long sessions lasted so far; None: unknown."""
    queue_ms: float
    """Time spent waiting so far: for a slot, for the image's turn to be pulled or built, for a turn to be
    made. Charged to nobody's time limit."""
    lease: LeaseView
    deadline_at: float | None
    isolation: str
    time_multiplier: float = 1.0
    """The task's time limits are so many times longer in its sandbox, whose runtime is slow."""
    tools: list[dict[str, Any]]
    """OpenAI function schemas; empty until ready."""
    submitted: bool
    from_snapshot: str | None = None
    """Id of the snapshot that it began from; None: the image."""
    fault: Fault | None
    """Why it ended without a reward."""

    @property
    def waiting(self) -> bool:
        """On its way to `ready`."""
        return self.state in ("queued", "admitted", "provisioning")

    @property
    def ended(self) -> bool:
        return self.state in ("done", "failed", "expired", "cancelled")


class ToolRequest(_Wire):
    """A typed tool call. What is wrong with the arguments is the policy's: an observation, not an error."""

    model_config = _example(call_id="0", arguments={})

    call_id: Key
    action_id: Text | None = None
    """Id of the observation; default: `call_id`."""
    arguments: dict[str, Any] = Field(default_factory=dict)


class ExecBody(_Wire):
    """One command: `command` under `bash -lc`, or `argv`. The same `exec_id` never runs twice."""

    model_config = _example(exec_id="list", command="ls -l", timeout_s=10.0, shell="main")

    exec_id: ExecId
    command: Annotated[Plain, Field(min_length=1, max_length=COMMAND_CHARS)] | None = None
    argv: Annotated[tuple[Plain, ...], Field(min_length=1, max_length=4096)] | None = None
    cwd: Plain | None = None
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], Plain] = Field(default_factory=dict)
    stdin_base64: str | None = None
    timeout_s: Annotated[float, Field(gt=0, le=MAX_EXEC_S)] = 60.0
    shell: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    """Commands under one name share a shell: its folder, variables, functions and options. Null: this command
    has a shell of its own. A shell that a command ended (`exit`, a time limit) is started again for the next
    one as it was before that command; `shell_restarted` says so."""
    follow: bool = False
    """Its output is to be read while it runs: `GET …/exec/{exec_id}/output`."""

    @model_validator(mode="after")
    def _one_of_two(self) -> ExecBody:
        if (self.command is None) == (self.argv is None):
            raise ValueError("exactly one of command and argv")
        if self.shell is not None and self.command is None:
            raise ValueError("a shell takes a command, not argv")
        if self.stdin_base64 is not None:
            base64.b64decode(self.stdin_base64, validate=True)
        return self

    def request(self, session_id: str) -> ExecRequest:
        """As the sandbox takes it; ids of callers never meet those of tools."""
        return ExecRequest(
            exec_id=f"{session_id}.x.{self.exec_id}",
            command=self.command,
            argv=self.argv,
            cwd=self.cwd,
            env=dict(self.env),
            stdin=None if self.stdin_base64 is None else base64.b64decode(self.stdin_base64),
            timeout_s=self.timeout_s,
            follow=self.follow,
            shell=None if self.shell is None else f"x.{self.shell}",
        )


class SignalBody(_Wire):
    """A signal for the process group of a running command."""

    model_config = _example(signal="INT", signal_id="stop-1")

    signal_id: Key | None = None
    """The same id is the same signal: sent once, answered as then."""
    signal: Literal["HUP", "INT", "QUIT", "KILL", "USR1", "USR2", "TERM", "CONT", "STOP"]


class SignalView(_Wire):
    """`running`: the command had not ended when the signal came."""

    running: bool


class StreamView(_Wire):
    """One output stream as text; bytes that are not UTF-8 are escaped, and `utf8_lossy` says so."""

    bytes_total: int
    head: str
    tail: str
    truncated: bool
    sha256: str
    utf8_lossy: bool

    @staticmethod
    def of(stream: StreamCapture) -> StreamView:
        head, tail = stream.head, stream.tail
        if not tail:
            lossy = not _is_utf8(head)
        else:  # the cut may go through a character
            lossy = "\\x" in head[:-4].decode("utf-8", "backslashreplace").replace("\\\\", "")
        return StreamView(
            bytes_total=stream.bytes_total,
            head=head.decode("utf-8", "backslashreplace"),
            tail=tail.decode("utf-8", "backslashreplace"),
            truncated=stream.truncated,
            sha256=stream.sha256,
            utf8_lossy=lossy or (bool(tail) and not _is_utf8(tail)),
        )


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


class ExecView(_Wire):
    """How a command ended. `exit_code` is null unless the process exited by itself."""

    exec_id: str
    status: ExecStatus
    exit_code: int | None
    signal: int | None
    stdout: StreamView
    stderr: StreamView
    cpu_ms: float
    memory_peak_kib: int | None
    io_bytes: int | None = None
    """Read from and written to storage; not what stays in memory. Null where the kernel does not count."""
    wall_ms: float
    queue_ms: float
    """Waiting for a run permit; not part of `wall_ms`, never charged to `timeout_s`."""
    leftovers_killed: int
    shell_restarted: bool = False
    """The shell that was named had ended, and was started again for this command."""
    reason: str | None

    @staticmethod
    def of(result: ExecResult, *, exec_id: str, queue_ms: float) -> ExecView:
        return ExecView(
            exec_id=exec_id,
            status=result.status,
            exit_code=result.exit_code,
            signal=result.signal,
            stdout=StreamView.of(result.stdout),
            stderr=StreamView.of(result.stderr),
            cpu_ms=result.cpu_ms,
            memory_peak_kib=result.memory_peak_kib,
            io_bytes=result.io_bytes,
            wall_ms=result.wall_ms,
            queue_ms=result.queue_ms + queue_ms,
            leftovers_killed=result.leftovers_killed,
            shell_restarted=result.shell_restarted,
            reason=result.reason,
        )


class FileView(_Wire):
    """A file that was written."""

    path: str
    bytes: int
    sha256: str


class ChangeView(_Wire):
    """One path of a diff."""

    path: str
    kind: Literal["file", "symlink", "dir", "deleted"]
    mode: int
    content_base64: str | None

    @staticmethod
    def of(change: FileChange) -> ChangeView:
        content = None if change.content is None else base64.b64encode(change.content).decode("ascii")
        return ChangeView(path=change.path, kind=change.kind, mode=change.mode, content_base64=content)


class DiffView(_Wire):
    changes: list[ChangeView]


class FinalizeBody(_Wire):
    """How the attempt ended, and the fault that ended it, if any."""

    model_config = _example(termination="finished", fault=None)

    termination: Termination
    fault: Fault | None = None

    @model_validator(mode="after")
    def _plain_fault(self) -> FinalizeBody:
        if self.fault is not None:
            for name in ("code", "phase"):
                text: str = getattr(self.fault, name)
                if len(text) > FAULT_CHARS or not text.isprintable():
                    raise ValueError(f"fault.{name}: at most {FAULT_CHARS} printable characters")
        return self


class AdmissionRequest(_Wire):
    """Have a task validated, once; the gateway says how thoroughly."""

    model_config = _example(task={"id": "small/cart"})

    task: TaskRef


class PrepareRequest(_Wire):
    """Have the images of tasks made ready. The same `client_key` and body is the same preparation."""

    model_config = _example(client_key="run1/images", tasks=[{"id": "small/cart"}])

    client_key: Key
    tasks: Annotated[tuple[TaskRef, ...], Field(min_length=1, max_length=10_000)]


class PreparationView(_Wire):
    """How far it has come. What failed is asked for again under a new `client_key`."""

    total: int
    """Distinct images of the tasks."""
    done: bool
    images: list[ImageStatus]
    """Those that are over, as they came: ready, or failed with whose fault it is and what to do."""


class TaskView(_Wire):
    id: str
    revision: str
    split: str
    tools: list[str]
    instruction: str
    admitted: bool | None
    """None: not validated here yet."""


class EnvironmentView(_Wire):
    """A suite of tasks and where it runs."""

    name: str
    tasks: int
    tools: list[str]
    backend: str
    isolation: str


class RationView(_Wire):
    """A resource: how much there is, how much is held, who waits."""

    capacity: dict[str, float]
    in_use: dict[str, float]
    waiting: dict[str, int]
    """By tenant; only the caller's own."""
    waiting_total: int
    paused: str | None


Limited = Literal["create", "exec", "delete", "pull", "build"]
"""What a gateway asks of its backend, each kind limited by itself."""


class LimiterView(_Wire):
    """How much of one kind of work is asked of the backend at once."""

    limit: float
    """Now: falls by half when the work gets slow or fails, and rises slowly."""
    maximum: int
    busy: int
    waiting: int
    decreased: int
    """How often it fell."""


class WarmView(_Wire):
    """Sandboxes that are started before they are asked for."""

    size: int
    ready: int
    making: int
    hits: int
    misses: int
    """Asked for when none was ready; made then."""
    discarded: int
    """Ended without having been of use: dead, too old, or of a kind that is no longer asked for."""
    failed: int


class CapacityView(_Wire):
    """Back-pressure as numbers."""

    slots: RationView
    permits: RationView
    verification: RationView
    limiters: dict[Limited, LimiterView]
    """By operation; `exec` says how many run permits there are."""
    warm: WarmView | None
    """None: the backend keeps none ready."""
    breaker: Literal["closed", "open"]
    leaked: int
    """Sandboxes that did not close in time."""
    sessions: dict[str, int]
    """The caller's, by state."""


def signing_key(token: str) -> bytes:
    """What a gateway signs a tenant's verdicts with: both sides can make it, and it is stored nowhere."""
    return hmac.new(token.encode(), b"agentrl verdict signing key", hashlib.sha256).digest()
