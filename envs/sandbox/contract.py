"""What every sandbox backend promises, and the records on its wire. One conformance suite holds all backends
to it.

A sandbox is a place where a policy's commands run and from which nothing but records come out. The exec
contract: one-shot `bash -lc`, stdin `/dev/null` unless given, no TTY; the clock starts when the process
starts inside; a timeout sends TERM to the group, waits 2 s, kills the whole tree (a `setsid` child too),
verifies that it is empty, then answers; output is bytes (head and tail kept, counted beyond); the same
`exec_id` never runs twice.

A named shell is one that commands share, one after the other: its folder, variables (exported or not, with
their attributes), functions, aliases, umask, `set` and `shopt` options, traps, positional parameters, `$?`
and `OLDPWD` are after a command as they were at its end, as in one bash. Between commands it is no process,
so nothing can hang in it, and every other promise holds for each of its commands as for one alone. Not
carried: descriptors that `exec` opened, `ulimit`, the job table (background processes live on; signal them by
a pid kept in a variable), `$!` and `$$`, what is hashed. A command that ended the shell itself (`exit`,
`exec`, a signal, `set -e`), ran out of time, or left no whole account of it, leaves it as it was before; the
next one gets a shell started again, without options of `set` and traps, and its result says so.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Annotated, Literal, Protocol, runtime_checkable

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from agentrl.errors import ConfigError
from agentrl.types import ExecStatus, SandboxSpec

_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)

HEAD_BYTES = 64 * 1024
"""Bytes of the beginning of a stream that a result carries."""
TAIL_BYTES = 192 * 1024
"""Bytes of the end of a stream that a result carries."""
SPOOL_BYTES = 16 * 1024 * 1024
"""Bytes of a stream kept inside the sandbox; beyond it they are only counted."""
OUTPUT_LIMIT_BYTES = 256 * 1024 * 1024
"""A command that writes more than this is ended, visibly."""
TERM_GRACE_S = 2.0
"""Between TERM and KILL on a timeout."""


class NotRegular(ValueError):
    """What was to be read is a pipe, a socket or a device: it has no content of its own."""


class Expired(ValueError):
    """A command has run, and its result is no longer kept. It will not run again."""


class NotRun(ValueError):
    """The named shell can not be had now: it still runs a command, or there are too many. Nothing was run,
    and the `exec_id` is not used up."""


Isolation = Literal["namespaces", "docker", "kubernetes", "none"]


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class ExecRequest:
    """One command. `argv` runs as given; `command` runs under `bash -lc`. Exactly one of the two."""

    exec_id: str
    command: str | None = None
    argv: tuple[str, ...] | None = None
    cwd: str | None = None
    """Absolute, or relative to the task's workdir, which is the default."""
    env: dict[str, str] = Field(default_factory=dict)
    stdin: bytes | None = None
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    user: Literal["policy", "root"] = "policy"
    """`root` is the sandbox's own root, for set-up and grading; never the host's."""
    follow: bool = False
    """Keep its output from the first byte, so that it can be read while it runs (`Following`)."""
    shell: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")] | None = None
    """Run `command` in the shell of this name; None: in one of its own. Its first command begins in `cwd`
    with `env`; with a later one they are as if it began with `cd` and `export`. Users share none."""
    report_fd: bool = False
    """Give the command an extra pipe as fd 3, returned as `ExecResult.report`: a channel apart from its
    output."""

    def __post_init__(self) -> None:
        if (self.command is None) == (self.argv is None):
            raise ValueError("exactly one of command and argv")
        if self.argv is not None and not self.argv:
            raise ValueError("argv is empty: it must at least name a program")
        if self.shell is not None and self.command is None:
            raise ValueError("a shell takes a command, not argv")

    def digest(self) -> str:
        """sha256 of all that is asked: two requests under one `exec_id` are the same one when it is equal."""
        stdin = None if self.stdin is None else hashlib.sha256(self.stdin).hexdigest()
        asked = (self.command, self.argv, self.cwd, sorted(self.env.items()), stdin, self.timeout_s)
        how = (self.user, self.follow, self.report_fd, *(() if self.shell is None else (self.shell,)))
        return hashlib.sha256(json.dumps([asked, how]).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class StreamCapture:
    """What is known of one output stream. `bytes_total` counts everything written."""

    bytes_total: int
    head: bytes
    tail: bytes
    """Empty when everything fits in `head`."""
    truncated: bool
    sha256: str
    """Of all bytes, also of those not kept."""

    def text(self) -> str:
        """Head and tail as text, undecodable bytes escaped, the omission said."""
        gap = self.bytes_total - len(self.head) - len(self.tail)
        parts = [self.head.decode("utf-8", "backslashreplace")]
        if gap > 0:
            parts.append(f"\n… {gap} bytes omitted …\n")
        parts.append(self.tail.decode("utf-8", "backslashreplace"))
        return "".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class ExecResult:
    """A framed result. `exit_code` is None unless the process exited by itself; None is never 0."""

    exec_id: str
    status: ExecStatus
    exit_code: int | None
    signal: int | None
    stdout: StreamCapture
    stderr: StreamCapture
    report: bytes | None = None
    cpu_ms: float
    memory_peak_kib: int | None
    io_bytes: int | None = None
    """Bytes that it had fetched from storage or gave it to write, by the kernel's count over its whole tree,
    as `cpu_ms` is; what the page cache answers and what stays in memory (tmpfs) is none. None where the
    kernel does not count."""
    wall_ms: float
    queue_ms: float = 0.0
    leftovers_killed: int = 0
    leftovers_alive: int = 0
    """Processes that the command left running when it exited by itself."""
    shell_restarted: bool = False
    """The shell had ended with the command before, and was started again for this one."""
    reason: Literal["output_limit", "cancelled", "kill_all", "orphaned", "supervisor_died"] | None = None
    """Why it was killed or is unknown; None for everything else."""
    kill_verified: bool | None = None
    """After a timeout or kill: whether the tree was seen empty. False condemns the sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class FileChange:
    """One path of a workspace diff, relative to the workdir. `content` None with kind `deleted` or `dir`."""

    path: str
    kind: Literal["file", "symlink", "dir", "deleted"]
    mode: int = 0o644
    content: bytes | None = None
    """File bytes, or the target of a symlink."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class SandboxInfo:
    """Facts fixed at start: the evidence E1 compares them with what the task asked for."""

    id: str
    backend: str
    isolation: Isolation
    image_digest: str
    instance: str
    """Changes if the sandbox is ever restarted or replaced (E3)."""
    spec: SandboxSpec
    limits_enforced: tuple[str, ...]
    """Which limits the kernel holds: memory, pids, disk, cpu, network."""
    ready_ms: float
    warm: bool = False
    """It was started before it was asked for, and waited."""
    time_multiplier: Annotated[float, Field(ge=1)] = 1.0
    """How many times longer than elsewhere everything may take in it: see `Slower`."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class Mount:
    """A read-only folder given to a sandbox beside its image (tests for the verifier, the test runner)."""

    source: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class Health:
    """Answer of a probe: the instance, and counters of losses that were nobody's command (E2, E3, E5, E6)."""

    instance: str
    alive: bool
    oom_kills: int | None
    """Kills by the kernel for memory since start; None when the kernel does not tell."""
    disk_free_bytes: int | None
    processes: int
    cpu_stalled_us: int | None = None
    """Microseconds so far in which something that could run waited for a CPU: in the sandbox, or on the whole
    machine where its own share is not seen. None when the kernel does not tell."""


@runtime_checkable
class Sandbox(Protocol):
    """One live sandbox. Every method raises `SandboxLost` when it is gone; every wait has a deadline."""

    @property
    def info(self) -> SandboxInfo: ...

    async def exec(self, request: ExecRequest) -> ExecResult:
        """Run one command. The same `exec_id` again returns the first result without running it. Raises
        `Expired` when that is no longer kept, `NotRun` when its shell can not be had, ValueError for what no
        system takes (a NUL byte)."""
        ...

    async def read_file(self, path: str, *, max_bytes: int = 16 * 1024 * 1024) -> bytes:
        """Bytes of a file as the policy user sees it. Raises FileNotFoundError, IsADirectoryError,
        PermissionError, `NotRegular`, or ValueError when it is larger than `max_bytes`."""
        ...

    async def write_file(self, path: str, data: bytes, *, mode: int | None = 0o644) -> None:
        """Write atomically as the policy user (size and hash checked on the far side, then renamed). Without
        `mode` a file that is there keeps its own."""
        ...

    async def probe(self) -> Health: ...

    async def kill_all(self) -> int:
        """Kill every process but the agent and verify; returns how many there were."""
        ...

    async def diff(self) -> tuple[FileChange, ...]:
        """Changes of the workdir against the image, taken from outside the sandbox, sorted by path."""
        ...

    async def close(self) -> None:
        """End it and give everything back. Idempotent, never raises, under a second."""
        ...


@runtime_checkable
class Following(Protocol):
    """A sandbox whose commands can be watched and signalled while they run. Optional beside `Sandbox`."""

    async def follow(
        self, exec_id: str, *, stream: Literal["stdout", "stderr"], offset: int, max_bytes: int
    ) -> tuple[bytes, bool]:
        """Output of a command that was sent with `follow`, from a byte on, as far as it has come, and whether
        the command has ended (then an empty answer is the end). At most `SPOOL_BYTES` are kept. Raises
        FileNotFoundError for a command that was never sent, ValueError when its output is no longer kept."""
        ...

    async def signal(self, exec_id: str, number: int, *, key: str | None = None) -> bool:
        """Send a signal to a command's process group; False when it had ended already. Under the same `key`
        it is sent once, and answered as then. Raises FileNotFoundError for a command that was never sent,
        ValueError for a key that was another signal's."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class FilePart:
    """Part of a file. Parts with the same `state` are of the same content."""

    data: bytes
    """Empty at and beyond the end."""
    file_bytes: int
    """Of the whole file."""
    state: str


@runtime_checkable
class InParts(Protocol):
    """A sandbox whose files can be read in parts, however large they are. Optional beside `Sandbox`."""

    async def read_part(self, path: str, *, offset: int, max_bytes: int) -> FilePart:
        """At most `max_bytes` of a file from a byte on. Raises as `Sandbox.read_file` does."""
        ...


@runtime_checkable
class Short(Protocol):
    """A backend that can say beforehand that it has no room. Optional beside `Backend`."""

    def short_of(self) -> str | None:
        """Why no sandbox should be asked for now, such as a disk that is nearly full; None: it has room. At
        once, without waiting for anything."""
        ...


@runtime_checkable
class Foreseeing(Protocol):
    """A backend that knows beforehand what preparing an image would cost. Optional beside `Backend`."""

    async def has(self, environment_dir: str) -> bool | None:
        """Whether what `Backend.prepare` is asked for is there already; None: it can not tell. Makes and
        fetches nothing; raises as `prepare` does for what names no image."""
        ...


@runtime_checkable
class Pulling(Protocol):
    """A backend whose machines fetch an image when a sandbox starts, not when it is prepared. Optional beside
    `Backend`."""

    async def pulled_for(self, digest: str) -> str:
        """The image that sandboxes of a prepared digest are started from; several may share one."""
        ...


StockKind = Literal["workspace", "mount", "system", "workdir", "base", "built", "loaded", "pulled"]
"""What is kept. workspace: files of an `environment/` folder. mount: another folder given to sandboxes.
system: an unpacked image. workdir: what an image has there. base, built, loaded, pulled: images that this
program brought to an engine."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class StockItem:
    """One thing that is kept so that sandboxes can be made of it, and that can be made or fetched again."""

    id: str
    """By which it is discarded; means nothing elsewhere."""
    kind: StockKind
    bytes: int | None
    """On the disk; of an engine's image, layers that it shares with others included. None: not asked for."""
    used_at: float
    """When a sandbox or a task last asked for it, in Unix seconds."""
    users: int
    """Sandboxes that need it now."""
    place: str
    """Folder whose disk it takes room on."""


@runtime_checkable
class Stocking(Protocol):
    """A backend that keeps images between sandboxes, and can let go of them. Optional beside `Backend`."""

    async def stock(self, *, sizes: bool) -> tuple[StockItem, ...]:
        """All that it keeps, whoever made it, the longest unused first. With `sizes` every file is looked
        at."""
        ...

    async def discard(self, item: StockItem, *, unused_s: float) -> bool:
        """Remove it, unless a sandbox needs it or it was used within so many seconds: looked at again, at
        once with the removal. False: it stays."""
        ...


@runtime_checkable
class Slower(Protocol):
    """A backend whose runtime is slower than others (gVisor, a virtual machine), as its operator says, so
    that slowness of the place is no policy's. Optional beside `Backend`.

    Time limits of tasks, of commands by them, of verifiers, of starts and of queues are so many times longer
    there; what a caller asks for by itself is not. Each of its sandboxes says the number (`SandboxInfo`), and
    so does every verdict (E1, E7).
    """

    @property
    def time_multiplier(self) -> float:
        """At least 1."""
        ...


def time_multiplier(backend: object) -> float:
    """Of a backend: 1 where it says nothing of it."""
    return backend.time_multiplier if isinstance(backend, Slower) else 1.0


def checked_multiplier(value: float | str | None, name: str) -> float:
    """A time multiplier as an operator gives it; None: 1. Raises `ConfigError`, naming the option."""
    try:
        number = 1.0 if value is None else float(value)
    except ValueError:
        number = math.nan
    if not 1 <= number <= 1000:
        raise ConfigError(
            f"{name} = {value!r:.100} is no time multiplier.",
            fix="Write a number from 1 to 1000, such as 2.5.",
        )
    return number


@runtime_checkable
class Backend(Protocol):
    """Where sandboxes come from."""

    @property
    def name(self) -> str: ...

    @property
    def isolation(self) -> Isolation: ...

    async def prepare(self, environment_dir: str) -> str:
        """Make the image of a task's `environment/` folder (an absolute path), or the image of that name,
        available; returns its digest. Idempotent, single-flight. A backend that runs no images refuses
        names."""
        ...

    async def create(
        self,
        spec: SandboxSpec,
        *,
        image: str,
        session: str,
        mounts: tuple[Mount, ...] = (),
        apply: tuple[FileChange, ...] = (),
        deadline_s: float = 120.0,
    ) -> Sandbox:
        """A ready sandbox from the prepared image digest, with `apply` laid over its workdir. Raises
        `SandboxError` with phase (prepare, create, start, agent, health) and code."""
        ...

    async def close(self) -> None:
        """End every sandbox of this backend and stop. Idempotent."""
        ...
