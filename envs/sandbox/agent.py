"""The process that lives inside a sandbox and runs commands there, as its PID 1 or beside it.

One self-contained file on the standard library (Python >= 3.8), so that it can be bind-mounted into any
container that has a Python. It speaks length-prefixed frames over one stream socket: an inherited file
descriptor (then the end of the connection ends the sandbox) or a listener (then a new connection may take
over within a grace).

A frame is `>II` (header length, body length), a JSON header, raw body bytes. A message is one or more
frames with the same `id`; all but the last carry `"more": true` and their bodies are joined. Requests are
answered in any order.

Each command has a *supervisor*: a fork of the agent that is a child subreaper, so that every descendant of
the command stays in its tree whatever it does (`setsid`, double fork). "The tree is empty" is then one
fact: the supervisor has no children. The agent never waits for anything but its own sockets.

Invariants: the same exec id never runs twice; an answer is sent once per asker; bytes are never decoded;
what the policy prints can not be mistaken for what the agent says. Not done here: limits of memory and
processes (cgroups, set by whoever starts the sandbox), namespaces, deciding whose fault anything is.

Command line: `python3 agent.py --config JSON (--fd N | --listen PATH)`; the token, if any, in
`AGENTRL_TOKEN`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import fcntl
import gc
import hashlib
import hmac
import json
import os
import re
import resource
import select
import selectors
import signal
import socket
import stat
import struct
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any, BinaryIO, Dict, NoReturn  # noqa: UP035

PROTOCOL = 1
HEAD_BYTES = 64 * 1024
TAIL_BYTES = 192 * 1024
SPOOL_BYTES = 16 * 1024 * 1024
OUTPUT_LIMIT_BYTES = 256 * 1024 * 1024
TERM_GRACE_S = 2.0
EXIT_DRAIN_S = 0.05
"""How long helpers of a finished command (`>(tee log)`) may still fill its pipes before it is answered."""
KILL_DEADLINE_S = 5.0
FRAME_BODY_BYTES = 256 * 1024
MESSAGE_BYTES = 512 * 1024 * 1024
KEPT_RESULT_BYTES = 16 * 1024 * 1024
"""Results kept for an asker that comes again; older commands answer `expired`, and never run again."""
KEPT_SPOOL_BYTES = 32 * 1024 * 1024
KEPT_SPOOLS = 64
"""Commands whose spools are kept: each costs two of the few descriptors that a process may have."""
LONGEST_POLL_S = 3600.0
"""No time limit is too long for the system call that waits for it."""
SHELLS = 8
"""Named shells of one sandbox; a name beyond them is refused."""
SHELL_BYTES = 4 * 1024 * 1024
"""What a shell may carry from one command to the next; more is not carried, and the next command says so."""
KEPT_SIGNALS = 64
"""Keys of signals that a command remembers: one that comes again is not sent again."""
KEPT_NOTES = 64
"""Notes of the host kept for a host that comes after it; the oldest goes first."""
NOTE_BYTES = 1024 * 1024
LEASE_SLACK_S = 60.0
"""How long after its lease a sandbox outlives a host that is connected but no longer renews: a living host
ends it before, and says so."""
ROOT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 8})
"""chown, dac_override, fowner, fsetid, kill, setgid, setuid, setpcap: what the sandbox's own root needs."""
BASE_ENV = {
    "TERM": "dumb",
    "NO_COLOR": "1",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "TQDM_DISABLE": "1",
    "PIP_PROGRESS_BAR": "off",
    "LANG": "C.UTF-8",
}
IO_BLOCK = 512
"""What `getrusage` counts input and output in, whatever the disk's blocks are."""
COUNTS_IO = os.path.exists("/proc/self/io")
"""Whether this kernel accounts for input and output; where it does not, its counters are always 0."""
MAX_DESCRIPTORS = 4096
"""More than an agent ever has open."""
PRESSURE_PATHS = ("/sys/fs/cgroup/cpu.pressure", "/proc/pressure/cpu")
"""How long something waited for a CPU: in this container, or, where its own group is not seen, anywhere."""
OOM_PATHS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")

GIVEN_FD, TOLD_FD = 100, 101
"""Where a command of a named shell finds what its shell carries, and reports it; closed while it runs."""
_IN_SHELL = (
    "{ builtin unset -v BASH_EXECUTION_STRING;"
    + "".join(f' IFS= builtin read -r -d "" -u {GIVEN_FD} __agentrl_{name};' for name in "amfec")
    + ' { builtin eval "$__agentrl_a"; builtin unset -v __agentrl_a __agentrl_r; } >/dev/null 2>&1;'
    ' builtin eval "$__agentrl_e"; builtin unset -v __agentrl_e;'
    f' builtin printf "R\\0" >&{TOLD_FD};'
    ' { builtin eval "$__agentrl_m"; builtin eval "$__agentrl_f"; } >/dev/null 2>&1;'
    f' builtin eval "$__agentrl_c" {GIVEN_FD}<&- {TOLD_FD}>&-;'
    f" {{ __agentrl_r=$?; builtin trap -p >&{TOLD_FD}; builtin trap - DEBUG ERR RETURN EXIT;"
    f' builtin printf "\\0" >&{TOLD_FD}; builtin set +o >&{TOLD_FD}; builtin set +euvx;'
    f' builtin printf "\\0" >&{TOLD_FD}; builtin unset -v __agentrl_c __agentrl_m __agentrl_f;'
    f" builtin declare -p >&{TOLD_FD}; builtin alias -p >&{TOLD_FD}; builtin umask -p >&{TOLD_FD};"
    f" builtin shopt -p >&{TOLD_FD};"
    f' [[ -v PATH ]] || builtin printf "builtin unset -v PATH\\n" >&{TOLD_FD};'
    f' [[ -v IFS ]] || builtin printf "builtin unset -v IFS\\n" >&{TOLD_FD};'
    f' builtin printf "builtin set --" >&{TOLD_FD}; (($#)) && builtin printf " %q" "$@" >&{TOLD_FD};'
    f' builtin printf "\\0" >&{TOLD_FD}; builtin declare -f >&{TOLD_FD}; builtin declare -Fx >&{TOLD_FD};'
    f' builtin printf "\\0" >&{TOLD_FD}; builtin pwd >&{TOLD_FD}; builtin printf "\\0E\\0" >&{TOLD_FD};'
    ' } 2>/dev/null || builtin :; __agentrl_q() { builtin return "$1"; }; __agentrl_q "$__agentrl_r"; }'
)
"""The program of each command of a named shell, of one line, so that messages name the command's own lines:
take up what the shell carried, say `R`, run the command, report, end as the command did. What is carried is
bash's own account of itself, and only a bash of the same user ever reads it. An option that a command sets
must not end the report (`|| :`), and no alias can change it (it is parsed before the first one is there)."""

_DEAF_TO = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM),
)
"""Signals that do not end a supervisor: where it is the policy's user too, `pkill python` means others."""

_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 4, 24, 36, 38
_FIONREAD = 0x541B
_libc = ctypes.CDLL(None, use_errno=True)

Header = Dict[str, Any]  # noqa: UP006  (evaluated at run time, also by 3.8)


class Refused(Exception):
    """A request that can not be done; `kind` is what the host turns into its own exception."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Settings:
    """How commands run here. Everything comes from the starter; unknown keys are refused."""

    def __init__(
        self,
        *,
        workdir: str,
        home: str = "/home/policy",
        path: str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        env: dict[str, str] | None = None,
        shell: tuple[str, ...] = ("bash", "-lc"),
        policy_uid: int | None = None,
        policy_gid: int | None = None,
        oom_path: str | None = None,
        oom_fd: int | None = None,
        rlimits: dict[str, int] | None = None,
        orphan_grace_s: float = 30.0,
    ) -> None:
        self.workdir = workdir
        self.home = home
        self.path = path
        self.env = dict(env or {})
        self.shell = tuple(shell)
        """Put before a command's text."""
        self.policy_uid = policy_uid
        """None: commands run as the user that the agent is. Otherwise the agent is root and they are not."""
        self.policy_gid = policy_uid if policy_gid is None else policy_gid
        self.oom_path = oom_path
        """A file with an `oom_kill N` line, or `auto`: this container's own cgroup."""
        self.oom_fd = oom_fd
        self.rlimits = {str(k): int(v) for k, v in (rlimits or {}).items()}
        """By name without `RLIMIT_`, for policy commands."""
        self.orphan_grace_s = orphan_grace_s

    def command_env(self, extra: dict[str, str]) -> dict[str, str]:
        env = dict(BASE_ENV)
        user = "policy" if os.getuid() else "root"  # Nobody may have told the image of this user.
        env.update(PATH=self.path, HOME=self.home, USER=user, LOGNAME=user)
        env.update(self.env)
        env.update(extra)
        return env


def _prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), f"prctl {option}")


def _drop_capabilities(keep: frozenset[int]) -> None:
    """Keep only `keep` in this thread's permitted and effective sets, and nothing in the inheritable one."""

    mask = sum(1 << c for c in keep)
    header = struct.pack("=Ii", 0x20080522, 0)
    now = ctypes.create_string_buffer(24)
    if _libc.capget(header, now) == 0:
        words = struct.unpack("=6I", now.raw)
        mask &= words[1] | (words[4] << 32)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    data = struct.pack("=6I", low, low, 0, high, high, 0)
    if _libc.capset(header, data) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "capset")


def harden(settings: Settings) -> None:
    """No new privileges, no core or ptrace access, orphans come to us, only the few capabilities we use."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    if settings.policy_uid is not None:
        os.setgroups([])
        for capability in range(64):
            if (
                capability not in ROOT_CAPABILITIES
                and _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0
            ):
                break
        _drop_capabilities(ROOT_CAPABILITIES)
    _prctl(_PR_SET_DUMPABLE, 0)


def frames(header: Header, body: bytes = b"") -> list[bytes]:
    """One message as frames, none with a body above `FRAME_BODY_BYTES`."""
    out = []
    view = memoryview(body)
    more = json.dumps({"id": header["id"], "more": True}).encode()
    while len(view) > FRAME_BODY_BYTES:
        out.append(struct.pack(">II", len(more), FRAME_BODY_BYTES) + more + bytes(view[:FRAME_BODY_BYTES]))
        view = view[FRAME_BODY_BYTES:]
    head = json.dumps(header).encode()
    out.append(struct.pack(">II", len(head), len(view)) + head + bytes(view))
    return out


class Inbox:
    """Bytes in, whole messages out."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._partial: dict[Any, bytearray] = {}

    def feed(self, data: bytes) -> list[tuple[Header, bytes]]:
        self._buffer += data
        messages = []
        while len(self._buffer) >= 8:
            head_length, body_length = struct.unpack_from(">II", self._buffer)
            if head_length > 64 * 1024 * 1024 or body_length > FRAME_BODY_BYTES:
                raise ValueError(f"a frame of {head_length} + {body_length} bytes")
            end = 8 + head_length + body_length
            if len(self._buffer) < end:
                break
            header = json.loads(bytes(self._buffer[8 : 8 + head_length]))
            body = bytes(self._buffer[8 + head_length : end])
            del self._buffer[:end]
            key = header["id"]
            if header.get("more"):
                joined = self._partial.setdefault(key, bytearray())
                joined += body
                if len(joined) > MESSAGE_BYTES:
                    raise ValueError(f"a message above {MESSAGE_BYTES} bytes")
                continue
            before = self._partial.pop(key, None)
            if before is not None:
                before += body
            messages.append((header, body if before is None else bytes(before)))
        return messages


# ---------------------------------------------------------------------------------------------- process trees


def _table() -> dict[int, tuple[int, str]]:
    """pid -> (parent pid, state) of every process that /proc shows."""
    table = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if len(fields) > 1:
            table[int(name)] = (int(fields[1]), fields[0].decode())
    return table


def _descendants(root: int, skip: frozenset[int] | set[int] = frozenset()) -> set[int]:
    """Living (not zombie) descendants of `root`, not looking below pids in `skip`."""
    table = _table()
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    todo = list(children.get(root, ()))
    while todo:
        pid = todo.pop()
        if pid in skip or pid in found:
            continue
        found.add(pid)
        todo.extend(children.get(pid, ()))
    return {pid for pid in found if table[pid][1] not in "ZX"}


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


class _Tree:
    """The descendants of this process, which must be a subreaper (or PID 1)."""

    def __init__(self, main: int | None = None) -> None:
        self.main = main
        self.main_status: int | None = None

    def reap(self) -> bool:
        """Collect the dead; True when no child is left at all."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == self.main:
                self.main_status = status

    def kill(self, deadline_s: float = KILL_DEADLINE_S) -> tuple[int, bool]:
        """End all descendants. Stopped first, so that a fork bomb can not outrun the list, then killed.

        Returns (how many were killed, whether the tree was seen empty)."""
        until = time.monotonic() + deadline_s
        killed: set[int] = set()
        me = os.getpid()
        while not self.reap():
            stopped: set[int] = set()
            for _ in range(64):
                fresh = _descendants(me) - stopped
                if not fresh:
                    break
                for pid in fresh:
                    _signal(pid, signal.SIGSTOP)
                stopped |= fresh
            for pid in stopped:
                _signal(pid, signal.SIGKILL)
            killed |= stopped
            if time.monotonic() > until:
                return len(killed), self.reap()
            time.sleep(0.001)
        return len(killed), True


def oom_kills(settings: Settings) -> int | None:
    """Kills for memory in this sandbox's cgroup so far; None when nothing tells."""
    try:
        if settings.oom_fd is not None:
            text = os.pread(settings.oom_fd, 4096, 0)
        elif settings.oom_path is not None:
            with open(settings.oom_path, "rb") as file:
                text = file.read(4096)
        else:
            return None
    except OSError:
        return None
    for line in text.splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == b"oom_kill":
            return int(words[1])
    return None


def machine_kills() -> int | None:
    """What the kernel has killed for memory on the whole machine so far; None when it does not tell."""
    with contextlib.suppress(OSError, ValueError), open("/proc/vmstat", "rb") as file:
        for line in file:
            if line.startswith(b"oom_kill "):
                return int(line.split()[1])
    return None


def cpu_stalled_us() -> int | None:
    """Microseconds so far in which something that could run had no CPU; None when nothing tells."""
    for path in PRESSURE_PATHS:
        try:
            with open(path, "rb") as file:
                words = file.readline(4096).split()
            if words[0] == b"some":
                return int(words[-1].partition(b"total=")[2])
        except (OSError, ValueError, IndexError):
            continue
    return None


# ---------------------------------------------------------------------------------------------- named shells


class _Carried:
    """What a shell was when its last command ended: texts that bash made and bash takes."""

    def __init__(self, state: bytes, modes: bytes, functions: bytes, folder: bytes) -> None:
        self.state = state
        """Variables, aliases, umask, shell options (`shopt`), positional parameters."""
        self.modes = modes
        """Traps and `set` options: not taken up by a shell that is started again, which they may have
        ended."""
        self.functions = functions
        self.folder = folder

    @staticmethod
    def of(report: bytes, status: int) -> _Carried | None:
        """From the report of a command that exited with `status`; None when it is none. Anything may be in
        it, which is then taken up by a shell of the user that wrote it, and nowhere else."""
        fields = report.split(b"\0", 8)
        if len(fields) != 8 or (fields[0], *fields[6:]) != (b"R", b"E", b""):
            return None
        traps, options, state, functions, folder = fields[1:6]
        after = b"\nbuiltin unset -v __agentrl_m __agentrl_f\n"
        if status and not re.search(rb"^set -o errexit$", options, re.M) and not _WATCHES.search(traps):
            # The next command sees `$?` as this one left it.
            after += b"__agentrl_q() { builtin unset -f __agentrl_q; builtin return %d; }\n__agentrl_q\n"
            after %= status
        return _Carried(state, traps + b"\n" + options, functions + after, folder[:-1])


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WATCHES = re.compile(rb"(ERR|DEBUG)$", re.M)
"""A trap that would see a status being set."""


class _Shell:
    """A named shell: between commands it is no process, only what it carries."""

    def __init__(self) -> None:
        self.carried: _Carried | None = None
        self.lost = False
        """Its last command ended it, or reported nothing that can be carried."""
        self.run: _Exec | None = None


def _shell_argv(settings: Settings, new: bool) -> list[str]:
    """A login shell, like that of a command alone; it reads its profile once in its life."""
    shell, *options = settings.shell
    return [shell, *([] if new else ["--noprofile"]), *options, _IN_SHELL]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _give_shell(settings: Settings, request: Header, given: list[bytes]) -> dict[str, str]:
    """In the forked child: go where the shell is and leave for it what it takes up. Its environment."""
    state, modes, functions, folder = given
    extra = {str(k): str(v) for k, v in request.get("env", {}).items()}
    first = [f"builtin export {k}={_quoted(v)}\n" for k, v in extra.items() if _VARIABLE.fullmatch(k)]
    asked = request.get("cwd")
    if request["new_shell"]:  # its variables are those of its process
        _enter(settings, asked)
        first = []
    else:
        try:
            os.chdir(folder)
        except OSError as error:
            if asked is None:
                gone = f"agentrl: the shell's folder can not be entered any more: {error.strerror}; "
                os.write(2, os.fsencode(f"{gone}this is {settings.workdir}\n"))
                asked = ""
        if asked is not None:
            first.insert(0, "builtin cd -- " + _quoted(_enter(settings, asked)) + "\n")
    fields = (state, modes, functions, os.fsencode("".join(first)), os.fsencode(request["command"]))
    held = os.memfd_create("shell")
    with os.fdopen(os.dup(held), "wb") as file:
        file.write(b"".join(field + b"\0" for field in fields))
    os.lseek(held, 0, os.SEEK_SET)
    os.dup2(held, GIVEN_FD, inheritable=True)
    return settings.command_env(extra) if request["new_shell"] else extra


def _enter(settings: Settings, cwd: str | None) -> str:
    """Go to the folder that a command asks for: its path."""
    path = os.path.join(settings.workdir, cwd or "")
    try:
        os.chdir(path)
    except OSError as error:
        raise OSError(error.errno, f"working directory: {error.strerror}", cwd) from None
    return path


# ------------------------------------------------------------------------------------------------- supervisor


class _Capture:
    """Head, tail, count and hash of one stream; a spool (memfd) as soon as head and tail lose something."""

    def __init__(self, spool: int) -> None:
        self.total = 0
        self._head = bytearray()
        self._tail = bytearray()
        self._hash = hashlib.sha256()
        self._spool = spool
        self._spooled = 0
        self.followed = False
        """Spool everything from the first byte: somebody reads it while the command runs."""

    def feed(self, data: bytes) -> None:
        before = self.total
        self.total += len(data)
        self._hash.update(data)
        if self.followed:
            self._keep(data)
        elif self.total > HEAD_BYTES + TAIL_BYTES:
            if before <= HEAD_BYTES + TAIL_BYTES:
                self._keep(bytes(self._head))
                self._keep(bytes(self._tail))
            self._keep(data)
        room = HEAD_BYTES - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * TAIL_BYTES:
            del self._tail[:-TAIL_BYTES]

    def _keep(self, data: bytes) -> None:
        view = memoryview(data)[: SPOOL_BYTES - self._spooled]
        with contextlib.suppress(OSError):  # No memory for the spool: head, tail, count and hash still hold.
            while view:
                n = os.write(self._spool, view)
                self._spooled += n
                view = view[n:]

    def result(self) -> tuple[Header, bytes]:
        tail = bytes(self._tail[-TAIL_BYTES:])
        head = bytes(self._head)
        facts = {
            "total": self.total,
            "head": len(head),
            "tail": len(tail),
            "truncated": self.total > len(head) + len(tail),
            "sha256": self._hash.hexdigest(),
            "spooled": self._spooled,
        }
        return facts, head + tail


class _Supervisor:
    """A fork of the agent: takes one command from `link`, runs it, answers, stays while its tree lives."""

    def __init__(self, settings: Settings, link: socket.socket, spools: tuple[int, int]) -> None:
        self.settings = settings
        self.request: Header = {}
        self.link = link
        self.tree = _Tree()
        self.out = _Capture(spools[0])
        self.err = _Capture(spools[1])
        self.report: bytearray | None = None
        self.told: bytearray | None = None
        """What a command of a named shell reports of it."""
        self.given: list[bytes] = []
        """What its shell carries."""
        self.stdin = memoryview(b"")
        self.pipes: dict[int, str] = {}
        self.poller = select.poll()
        self.answered = False
        self.killed = 0

    def _await_request(self) -> bool:
        inbox = Inbox()
        while True:
            data = self.link.recv(1 << 20)
            if not data:
                return False
            for header, body in inbox.feed(data):
                self.request, self.stdin = header, memoryview(body)
                for length in reversed(header.get("given") or ()):
                    end = len(self.stdin) - length
                    self.given.insert(0, bytes(self.stdin[end:]))
                    self.stdin = self.stdin[:end]
                self.told = bytearray() if header.get("shell") is not None else None
                self.out.followed = self.err.followed = bool(header.get("follow"))
                self.report = bytearray() if header.get("report_fd") else None
                return True

    def run(self) -> None:
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        for number in _DEAF_TO:
            signal.signal(number, signal.SIG_IGN)
        wake, wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        self.poller.register(wake, select.POLLIN)
        self.poller.register(self.link, select.POLLIN)
        if not self._await_request():
            return
        self.link.setblocking(False)
        oom_before = oom_kills(self.settings)
        started = time.monotonic()
        stdin_end, problem = self._start()
        if problem is not None:
            self.err.feed(problem)
            self._answer(started, oom_before, exit_code=127, began=False)
            return
        deadline = started + float(self.request["timeout_s"])
        kill_at: float | None = None
        drain_until: float | None = None
        reason: str | None = None
        while True:
            now = time.monotonic()
            if self.tree.main_status is not None and drain_until is None:
                drain_until = now + EXIT_DRAIN_S
            waits = [
                w for w in (kill_at, drain_until, deadline if kill_at is None else None) if w is not None
            ]
            ready = self.poller.poll(min(max(0.0, min(waits) - now), LONGEST_POLL_S) * 1000 + 0.5)
            for fd, _ in ready:
                if fd == wake:
                    drain(wake)
                elif fd == self.link.fileno():
                    reason = self._told() or reason
                elif fd == stdin_end:
                    stdin_end = self._give(fd)
                elif fd in self.pipes:
                    self._take(fd, 1 << 18)
            empty = self.tree.reap()
            now = time.monotonic()
            if max(self.out.total, self.err.total) > OUTPUT_LIMIT_BYTES:
                reason = reason or "output_limit"
            if reason in ("cancelled", "kill_all", "output_limit", "orphaned"):
                self._end(started, oom_before, reason)
                return
            if kill_at is None and self.tree.main_status is None and now >= deadline:
                reason, kill_at = "timeout", now + TERM_GRACE_S
                _signal(-(self.tree.main or 0), signal.SIGTERM)
                _signal(-(self.tree.main or 0), signal.SIGCONT)
            if kill_at is not None:
                if empty or now >= kill_at:
                    self._end(started, oom_before, "timeout")
                    return
            elif self.tree.main_status is not None and (
                # Helpers that still hold the pipes get a moment more.
                empty or not self.pipes or (drain_until is not None and now >= drain_until)
            ):
                break
        for fd in list(self.pipes):
            self._take_rest(fd)
        alive = 0 if self.tree.reap() else len(_descendants(os.getpid()))
        self._answer(started, oom_before, alive=alive)
        self._linger(wake)

    def _start(self) -> tuple[int | None, bytes | None]:
        """Fork and exec. Returns the write end of stdin, or why the command could not start."""
        out, out_end = os.pipe2(os.O_CLOEXEC)
        err, err_end = os.pipe2(os.O_CLOEXEC)
        failed, failed_end = os.pipe2(os.O_CLOEXEC)
        passed = {1: out_end, 2: err_end}
        self.pipes = {out: "out", err: "err"}
        if self.report is not None:
            report, passed[3] = os.pipe2(os.O_CLOEXEC)
            self.pipes[report] = "report"
        if self.told is not None:
            told, passed[TOLD_FD] = os.pipe2(os.O_CLOEXEC)
            self.pipes[told] = "told"
        stdin_end = None
        if self.request.get("has_stdin"):
            stdin, stdin_end = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(stdin_end, False)
        else:
            stdin = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        try:
            pid = os.fork()
        except OSError as error:
            for fd in (
                failed,
                failed_end,
                stdin,
                *passed.values(),
                *self.pipes,
                *([] if stdin_end is None else [stdin_end]),
            ):
                os.close(fd)
            self.pipes = {}
            return None, b"agentrl: cannot start the command: " + str(error).encode() + b"\n"
        if pid == 0:
            try:
                _become_command(self.settings, self.request, self.given, {0: stdin, **passed})
            except BaseException as error:  # The child must never return into the agent's code.
                try:
                    text = f"{type(error).__name__}: {error}"
                    os.write(failed_end, text.encode("utf-8", "backslashreplace")[:4000])
                finally:
                    os._exit(127)
        self.tree.main = pid
        for fd in (failed_end, stdin, *passed.values()):
            os.close(fd)
        for fd in self.pipes:
            os.set_blocking(fd, False)
            self.poller.register(fd, select.POLLIN)
        ready, _, _ = select.select([failed], [], [], KILL_DEADLINE_S)
        problem = os.read(failed, 4096) if ready else b"the process did not start"
        os.close(failed)
        if problem:
            self.killed, _ = self.tree.kill()
            return None, b"agentrl: cannot start the command: " + problem + b"\n"
        if stdin_end is not None:
            self.poller.register(stdin_end, select.POLLOUT)
        return stdin_end, None

    def _told(self) -> str | None:
        try:
            words = self.link.recv(64)
        except BlockingIOError:
            return None
        except OSError:
            words = b""
        if not words:
            return "orphaned"
        reason = None
        while words:
            if words[:1] == b"s":  # a signal for the command, with its number
                if self.tree.main is not None and self.tree.main_status is None:
                    _signal(-self.tree.main, words[1])
                words = words[2:]
            else:
                reason = {b"c": "cancelled", b"a": "kill_all"}[words[:1]]
                words = words[1:]
        return reason

    def _give(self, fd: int) -> int | None:
        try:
            self.stdin = self.stdin[os.write(fd, self.stdin[:65536]) :] if self.stdin else self.stdin
        except BlockingIOError:
            return fd
        except OSError:
            self.stdin = memoryview(b"")
        if self.stdin:
            return fd
        self.poller.unregister(fd)
        os.close(fd)
        return None

    def _take(self, fd: int, most: int) -> int:
        try:
            data = os.read(fd, most)
        except BlockingIOError:
            return 0
        if not data:
            self.poller.unregister(fd)
            os.close(fd)
            del self.pipes[fd]
            return 0
        stream = self.pipes[fd]
        if self.answered:
            pass
        elif stream == "out":
            self.out.feed(data)
        elif stream == "err":
            self.err.feed(data)
        elif stream == "told" and self.told is not None:
            self.told += data[: SHELL_BYTES - len(self.told)]
        elif self.report is not None:
            self.report += data[: SPOOL_BYTES - len(self.report)]
        return len(data)

    def _take_rest(self, fd: int) -> None:
        """What lies in the pipe now and no more: a writer that goes on can not hold the answer."""
        amount = bytearray(4)
        fcntl.ioctl(fd, _FIONREAD, amount)
        left = struct.unpack("=i", amount)[0]
        while left > 0:
            taken = self._take(fd, left)
            if taken == 0:
                break
            left -= taken

    def _end(self, started: float, oom_before: int | None, reason: str) -> None:
        killed, verified = self.tree.kill()
        self.killed += killed
        for fd in list(self.pipes):
            self._take_rest(fd)
        self._answer(started, oom_before, reason=reason, verified=verified)

    def _answer(
        self,
        started: float,
        oom_before: int | None,
        *,
        exit_code: int | None = None,
        reason: str | None = None,
        verified: bool | None = None,
        alive: int = 0,
        began: bool = True,
    ) -> None:
        wall = time.monotonic() - started
        status = self.tree.main_status
        signaled = None
        if exit_code is None and status is not None:
            if os.WIFEXITED(status):
                exit_code = os.WEXITSTATUS(status)
            else:
                signaled = os.WTERMSIG(status)
        oom_after = oom_kills(self.settings)
        if reason == "timeout":
            word = "timeout"
        elif reason is not None:
            word = "killed"
        elif oom_before is not None and oom_after is not None and oom_after > oom_before:
            word = "oom"
        else:
            word = "signaled" if signaled is not None else "exited"
        if reason is not None:
            exit_code = None
        out, out_bytes = self.out.result()
        err, err_bytes = self.err.result()
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        header = {
            "id": 0,
            "status": word,
            "reason": None if reason == "timeout" else reason,
            "exit_code": exit_code,
            "signal": signaled,
            "stdout": out,
            "stderr": err,
            "report": None if self.report is None else len(self.report),
            "cpu_ms": (usage.ru_utime + usage.ru_stime) * 1000,
            "memory_peak_kib": usage.ru_maxrss or None,
            "io_bytes": IO_BLOCK * (usage.ru_inblock + usage.ru_oublock) if COUNTS_IO else None,
            "wall_ms": wall * 1000,
            "leftovers_killed": self.killed,
            "leftovers_alive": alive,
            "kill_verified": verified,
        }
        told = bytes(self.told or b"")
        if self.told is not None:
            header["told"] = {"bytes": len(told), "began": began}
        self.answered = True
        self._send(frames(header, out_bytes + err_bytes + bytes(self.report or b"") + told))

    def _send(self, data: list[bytes]) -> None:
        self.link.settimeout(KILL_DEADLINE_S)
        with contextlib.suppress(OSError):  # The agent is gone; so will be this sandbox.
            for piece in data:
                self.link.sendall(piece)
        self.link.setblocking(False)

    def _linger(self, wake: int) -> None:
        """Stay while background processes live: they keep a parent and a reader of their pipes."""
        while not self.tree.reap():
            for fd, _ in self.poller.poll(1000):
                if fd == wake:
                    drain(wake)
                elif fd == self.link.fileno():
                    if self._told() is not None:
                        killed, verified = self.tree.kill()
                        self._send(frames({"id": 1, "killed": killed, "verified": verified}))
                        return
                elif fd in self.pipes:
                    self._take(fd, 1 << 16)


def drain(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(fd, 4096):
            pass


def _limit(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        number = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))


def _become_command(
    settings: Settings, request: Header, given: list[bytes], ends: dict[int, int]
) -> NoReturn:
    """In the forked child: take the descriptors, drop everything that a command must not have, exec."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, *_DEAF_TO):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    high = {target: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for target, fd in ends.items()}
    for target, fd in high.items():
        os.dup2(fd, target, inheritable=True)
    os.umask(0o022)
    policy = request.get("user", "policy") == "policy"
    _prctl(_PR_SET_DUMPABLE, 1)  # Not root's any more: else this process could not open its own /proc files.
    # Some container runtimes refuse the score; memory limits hold anyway.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    limits = {k: v for k, v in settings.rlimits.items() if policy or k != "NPROC"}
    largest = limits.pop("FSIZE", None)
    _limit(limits)
    if settings.policy_uid is not None and policy:
        os.setgroups([])
        os.setresgid(settings.policy_gid or 0, settings.policy_gid or 0, settings.policy_gid or 0)
        os.setresuid(settings.policy_uid, settings.policy_uid, settings.policy_uid)
    argv = request.get("argv")
    if request.get("shell") is not None:
        env = _give_shell(settings, request, given)
        argv = _shell_argv(settings, request["new_shell"])
    else:
        env = settings.command_env({str(k): str(v) for k, v in request.get("env", {}).items()})
        _enter(settings, request.get("cwd"))
        if argv is None:
            argv = [*settings.shell, request["command"]]
    if largest is not None:
        _limit({"FSIZE": largest})  # Only now: what a shell takes up counts as a file too.
    if "/" in argv[0]:
        os.execve(argv[0], argv, env)
    os.execvpe(argv[0], argv, env)


# ------------------------------------------------------------------------------------------------------ files


def _as_policy(settings: Settings, on: bool) -> None:
    """File access as the policy user. Only the file-system ids change: the process stays out of its reach."""
    if settings.policy_uid is not None:
        _libc.setfsgid((settings.policy_gid or 0) if on else 0)
        _libc.setfsuid(settings.policy_uid if on else 0)


@contextlib.contextmanager
def _regular(path: str) -> Iterator[tuple[BinaryIO, os.stat_result]]:
    """A regular file to be read, and what it is."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    with os.fdopen(fd, "rb") as file:
        facts = os.fstat(fd)
        if stat.S_ISDIR(facts.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(facts.st_mode):
            raise Refused("not_regular", f"{path} is not a regular file")
        yield file, facts


def read_file(path: str, max_bytes: int) -> tuple[Header, bytes]:
    with _regular(path) as (file, facts):
        if facts.st_size > max_bytes:
            raise Refused("too_large", f"{path} has {facts.st_size} bytes, more than {max_bytes}")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise Refused("too_large", f"{path} has more than {max_bytes} bytes")
    return {
        "size": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "mode": stat.S_IMODE(facts.st_mode),
    }, data


def read_part(path: str, offset: int, max_bytes: int) -> tuple[Header, bytes]:
    """Part of a file, and what tells whether a later part is of the same content."""
    with _regular(path) as (file, facts):
        file.seek(offset)
        data = file.read(max_bytes)
    state = f"{facts.st_dev:x}-{facts.st_ino:x}-{facts.st_size:x}-{facts.st_mtime_ns:x}"
    sha256 = hashlib.sha256(data).hexdigest()
    return {"size": len(data), "sha256": sha256, "file_bytes": facts.st_size, "state": state}, data


def write_file(path: str, data: bytes, mode: int | None, sha256: str, owner: int) -> Header:
    """Write beside the target, read back, rename. Created parents belong to `owner`, who the caller is now.

    What is there already is not written again: a write whose answer was lost is asked for once more, and must
    not need twice the room."""
    if hashlib.sha256(data).hexdigest() != sha256:
        raise Refused("corrupt", f"{len(data)} bytes arrived with another hash than they were sent with")
    if mode is None:
        try:
            mode = stat.S_IMODE(os.stat(path).st_mode)
        except FileNotFoundError:
            mode = 0o644
    if _is_there(path, len(data), mode, sha256, owner):
        return {"size": len(data)}
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    beside = os.path.join(folder, f".agentrl-{os.urandom(8).hex()}")
    fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "wb+") as file:
            file.write(data)
            file.flush()
            os.fchmod(fd, mode)
            file.seek(0)
            written = hashlib.sha256()
            for chunk in iter(lambda: file.read(1 << 20), b""):
                written.update(chunk)
        if written.hexdigest() != sha256:
            raise Refused("corrupt", f"{path} reads back differently")
        os.rename(beside, path)
    except BaseException:
        os.unlink(beside)
        raise
    return {"size": len(data)}


def _is_there(path: str, size: int, mode: int, sha256: str, owner: int) -> bool:
    """Whether it is the very file that a write would leave; then it has been written now."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | os.O_NOFOLLOW)
    except OSError:
        return False
    with os.fdopen(fd, "rb") as file:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_nlink != 1:
            return False
        if (facts.st_size, stat.S_IMODE(facts.st_mode), facts.st_uid) != (size, mode, owner):
            return False
        seen = hashlib.sha256()
        for chunk in iter(lambda: file.read(1 << 20), b""):
            seen.update(chunk)
        if seen.hexdigest() != sha256:
            return False
        os.utime(fd)
    return True


def apply_changes(workdir: str, changes: list[Header], body: bytes, uid: int, gid: int) -> Header:
    """Lay changes (path, kind, mode, size) over the workdir, never through a symlink; contents in order."""
    at = 0
    closed: list[tuple[list[str], int]] = []
    for change in changes:
        parts = change["path"].split("/")
        if not all(parts) or "." in parts or ".." in parts or "\0" in change["path"]:
            raise Refused("unsafe_path", "{!r} is not a plain relative path".format(change["path"]))
        size = change.get("size") or 0
        content = body[at : at + size]
        at += size
        if len(content) != size:
            raise Refused("corrupt", "the content of {} is cut short".format(change["path"]))
        kind = change["kind"]
        folder = os.open(workdir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for depth, part in enumerate(parts[:-1]):
                try:
                    below = _open_folder(part, folder)
                except FileNotFoundError:
                    if kind == "deleted":
                        break
                    os.mkdir(part, 0o755, dir_fd=folder)
                    os.chown(part, uid, gid, dir_fd=folder, follow_symlinks=False)
                    below = _open_folder(part, folder)
                except OSError as error:
                    where = "/".join(parts[: depth + 1])
                    raise Refused(
                        "unsafe_path", "{}: {} is not a directory".format(change["path"], where)
                    ) from error
                os.close(folder)
                folder = below
            else:
                mode = int(change.get("mode", 0o644))
                if (
                    kind == "dir" and mode & 0o700 != 0o700
                ):  # Not before all is in it, where we are its owner.
                    closed.append((parts, mode))
                    mode |= 0o700
                _apply_one(folder, parts[-1], kind, mode, content, uid, gid)
        finally:
            os.close(folder)
    for parts, mode in reversed(closed):
        folder = os.open(workdir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in parts:
                below = _open_folder(part, folder)
                os.close(folder)
                folder = below
            os.fchmod(folder, mode)
        finally:
            os.close(folder)
    return {"applied": len(changes)}


def _open_folder(name: str, folder: int) -> int:
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)


def _apply_one(folder: int, name: str, kind: str, mode: int, content: bytes, uid: int, gid: int) -> None:
    try:
        old: int | None = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        old = None
    keep = kind == "dir" and old is not None and stat.S_ISDIR(old)
    if old is not None and not keep:
        if stat.S_ISDIR(old):
            _remove_tree(name, folder)
        else:
            os.unlink(name, dir_fd=folder)
    if kind == "deleted":
        return
    if kind == "dir":
        if not keep:
            os.mkdir(name, 0o755, dir_fd=folder)
        fd = _open_folder(name, folder)
    elif kind == "symlink":
        os.symlink(content, os.fsencode(name), dir_fd=folder)
        os.chown(name, uid, gid, dir_fd=folder, follow_symlinks=False)
        return
    elif kind == "file":
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=folder)
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
    else:
        raise Refused("bad_request", f"unknown kind {kind!r} of change")
    os.fchown(fd, uid, gid)
    os.fchmod(fd, mode)
    os.close(fd)


def _remove_tree(name: str, folder: int) -> None:
    """Like `shutil.rmtree` below a directory descriptor (that argument came with Python 3.11)."""
    fd = _open_folder(name, folder)
    try:
        for entry in os.listdir(fd):
            if stat.S_ISDIR(os.stat(entry, dir_fd=fd, follow_symlinks=False).st_mode):
                _remove_tree(entry, fd)
            else:
                os.unlink(entry, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=folder)


# ------------------------------------------------------------------------------------------------------ agent


class _Exec:
    def __init__(self, pid: int, link: socket.socket, spools: tuple[int, int]) -> None:
        self.pid = pid
        self.link: socket.socket | None = link
        self.inbox = Inbox()
        self.spools: tuple[int, int] | None = spools
        self.askers: list[tuple[int, Any]] = []
        self.header: Header | None = None
        self.body: bytes | None = None
        self.late_kills = 0
        self.exited = False
        self.status: int | None = None
        """How its supervisor ended."""
        self.kills_before: int | None = None
        self.said: str | None = None
        """Hash of what was asked, for a host that comes after the one that asked."""
        self.signals: OrderedDict[str, tuple[int, bool]] = OrderedDict()
        """Signals that were sent under a key: number, and whether the command was running."""
        self.shell: _Shell | None = None

    def discard(self) -> None:
        """Close what belongs to a supervisor that never got a command."""
        for fd in self.spools or ():
            os.close(fd)
        if self.link is not None:
            self.link.close()


class Agent:
    """The loop: one connection, many commands. `run` returns when the sandbox should end."""

    def __init__(
        self,
        settings: Settings,
        *,
        connection: socket.socket | None = None,
        listener: socket.socket | None = None,
        token: str | None = None,
    ) -> None:
        self.settings = settings
        self.instance = os.urandom(8).hex()
        self._token = token
        self._listener = listener
        self._connection: socket.socket | None = None
        self._generation = 0
        self._trusted = False
        self._inbox = Inbox()
        self._outbox: deque[bytes] = deque()
        self._execs: OrderedDict[str, _Exec] = OrderedDict()
        self._shells: dict[tuple[str, str], _Shell] = {}
        """By user and name: what one user's shell carries no other user's takes up."""
        self._selector = selectors.DefaultSelector()
        self._ending = False
        self._orphaned_at = time.monotonic()
        self._lease_until: float | None = None
        self._notes: OrderedDict[str, str] = OrderedDict()
        self._kill_all: Header | None = None
        self._spare: _Exec | None = None
        self._events = selectors.EVENT_READ
        self._wake, self._wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ, "wake")
        if settings.oom_path == "auto":
            settings.oom_path = next((p for p in OOM_PATHS if os.path.exists(p)), None)
        if listener is not None:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, "listener")
        if connection is not None:
            self._adopt(connection)

    def run(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_end, warn_on_full_buffer=False)
        gc.collect()
        gc.freeze()
        shell, *rest = self.settings.shell
        self.settings.shell = (_find(shell, self.settings.path), *rest)
        while not self._ending:
            for key, mask in self._selector.select(self._patience()):
                if key.data == "wake":
                    drain(self._wake)
                elif key.data == "listener":
                    self._accept()
                elif key.data == "connection":
                    if mask & selectors.EVENT_READ:
                        self._receive()
                    if mask & selectors.EVENT_WRITE:
                        self._flush()
                else:
                    self._hear(key.data)
            self._reap()
            self._step_kill_all()
            self._keep_spare()
            left = self._left()
            if left is not None and left <= 0:
                self._ending = True
        self._end_everything()

    def _left(self) -> float | None:
        """Until this sandbox ends itself; None: it does not. Without a host at the end of its lease, or, if
        it was told of none, after a grace; with a host that renews nothing, a while after its lease."""
        if self._connection is not None:
            if self._lease_until is None:
                return None
            return self._lease_until + LEASE_SLACK_S - time.monotonic()
        if self._listener is None:
            return 0.0
        until = self._orphaned_at + self.settings.orphan_grace_s
        return (until if self._lease_until is None else self._lease_until) - time.monotonic()

    def _patience(self) -> float | None:
        if self._kill_all is not None:
            return 0.02
        left = self._left()
        return None if left is None else max(0.0, left)

    # -- connection

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if self._connection is not None:
            self._drop()
        self._adopt(connection)

    def _adopt(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._generation += 1
        self._trusted = self._token is None
        self._inbox = Inbox()
        self._outbox.clear()
        self._events = selectors.EVENT_READ
        self._selector.register(connection, selectors.EVENT_READ, "connection")

    def _drop(self) -> None:
        if self._connection is not None:
            self._selector.unregister(self._connection)
            self._connection.close()
            self._connection = None
            self._orphaned_at = time.monotonic()

    def _receive(self) -> None:
        assert self._connection is not None
        try:
            data = self._connection.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop()
            return
        try:
            messages = self._inbox.feed(data)
        except (ValueError, KeyError, TypeError):
            self._drop()
            return
        generation = self._generation
        for header, body in messages:
            if generation == self._generation and self._open():
                self._handle(header, body)

    def _open(self) -> bool:
        return self._connection is not None

    def _reply(self, asker: tuple[int, Any], header: Header, body: bytes = b"") -> None:
        generation, number = asker
        if self._connection is None or generation != self._generation:
            return
        self._outbox.extend(frames({**header, "id": number}, body))
        self._flush()

    def _flush(self) -> None:
        if self._connection is None:
            return
        try:
            while self._outbox:
                sent = self._connection.send(self._outbox[0])
                if sent < len(self._outbox[0]):
                    self._outbox[0] = self._outbox[0][sent:]
                else:
                    self._outbox.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._drop()
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
        if events != self._events:
            self._selector.modify(self._connection, events, "connection")
            self._events = events

    # -- requests

    def _handle(self, header: Header, body: bytes) -> None:
        asker = (self._generation, header["id"])
        op = header.get("op")
        try:
            if not self._trusted:
                offered = str(header.get("token", "")) if op == "hello" else ""
                if not hmac.compare_digest(offered, self._token or ""):
                    self._drop()
                    return
                self._trusted = True
            answer = self._do(op, header, body, asker)
        except Refused as error:
            self._reply(asker, {"error": {"kind": error.kind, "message": str(error)}})
        except FileNotFoundError as error:
            self._reply(asker, {"error": {"kind": "not_found", "message": str(error)}})
        except (IsADirectoryError, NotADirectoryError) as error:
            self._reply(asker, {"error": {"kind": "is_dir", "message": str(error)}})
        except PermissionError as error:
            self._reply(asker, {"error": {"kind": "permission", "message": str(error)}})
        except OSError as error:
            message = error.strerror or str(error)  # Without the path, which is the asker's to name.
            self._reply(asker, {"error": {"kind": "os", "errno": error.errno, "message": message}})
        except (KeyError, TypeError, ValueError) as error:
            message = f"{type(error).__name__}: {error}"
            self._reply(asker, {"error": {"kind": "bad_request", "message": message}})
        else:
            if answer is not None:
                self._reply(asker, answer[0], answer[1])

    def _do(
        self, op: Any, header: Header, body: bytes, asker: tuple[int, Any]
    ) -> tuple[Header, bytes] | None:
        settings = self.settings
        if op == "exec":
            self._exec(header, body, asker)
            return None
        if op == "kill_all":
            self._start_kill_all(asker)
            return None
        if op == "hello":
            facts = {"protocol": PROTOCOL, "instance": self.instance, "pid": os.getpid(), "uid": os.getuid()}
            return {**facts, "two_users": settings.policy_uid is not None}, b""
        if op == "cancel":
            self._tell(header["exec_id"], b"c")
            return {}, b""
        if op == "signal":
            if not 0 < int(header["number"]) < 65:
                raise Refused("bad_request", "no signal has the number {}".format(header["number"]))
            running = self._pass_on(header["exec_id"], int(header["number"]), header.get("key"))
            return {"running": running}, b""
        if op == "probe":
            return self._probe(), b""
        if op == "output":
            return self._output(header)
        if op == "apply":
            uid = os.getuid() if settings.policy_uid is None else settings.policy_uid
            gid = os.getgid() if settings.policy_gid is None else settings.policy_gid
            return apply_changes(settings.workdir, header["changes"], body, uid, gid), b""
        if op == "shutdown":
            self._ending = True
            return {}, b""
        if op == "lease":
            self._lease_until = time.monotonic() + float(header["ttl_s"])
            return {}, b""
        if op == "note":
            self._note(header["key"], body)
            return {}, b""
        if op == "recall":
            return self._recall()
        path = header["path"]
        if "\0" in path:
            raise Refused("bad_request", "a path with a NUL byte")
        path = os.path.join(settings.workdir, path)
        _as_policy(settings, True)
        try:
            if op == "read":
                return read_file(path, int(header["max_bytes"]))
            if op == "read_part":
                return read_part(path, int(header["offset"]), int(header["max_bytes"]))
            if op == "write":
                owner = os.getuid() if settings.policy_uid is None else settings.policy_uid
                return write_file(path, body, header["mode"], header["sha256"], owner), b""
            if op == "stat":
                facts_ = os.stat(path)
                return {"size": facts_.st_size, "mode": facts_.st_mode, "uid": facts_.st_uid}, b""
        finally:
            _as_policy(settings, False)
        raise Refused("bad_request", f"unknown operation {op!r}")

    def _probe(self) -> Header:
        mine = _descendants(os.getpid()) - self._own()
        try:
            disk = os.statvfs(self.settings.workdir)
            free: int | None = disk.f_bavail * disk.f_frsize
        except OSError:
            free = None
        return {
            "instance": self.instance,
            "oom_kills": oom_kills(self.settings),
            "disk_free_bytes": free,
            "processes": len(mine),
            "cpu_stalled_us": cpu_stalled_us(),
        }

    def _note(self, key: str, value: bytes) -> None:
        if len(value) > NOTE_BYTES:
            raise Refused("too_large", f"a note of {len(value)} bytes")
        self._notes.pop(key, None)
        self._notes[key] = value.decode("utf-8", "backslashreplace")
        while len(self._notes) > KEPT_NOTES:
            # What was noted once and for all is not pushed out by what comes with every call.
            self._notes.pop(next((k for k in self._notes if ":" in k), next(iter(self._notes))))

    def _recall(self) -> tuple[Header, bytes]:
        """Everything that a new host must know of what was done here before it came."""
        facts = ("status", "reason", "kill_verified")
        execs = {
            name: None if run.header is None else {fact: run.header[fact] for fact in facts}
            for name, run in self._execs.items()
        }
        said = {name: run.said for name, run in self._execs.items() if run.said is not None}
        body = json.dumps({"execs": execs, "notes": self._notes, "said": said}).encode()
        left = None if self._lease_until is None else self._lease_until - time.monotonic()
        return {"lease_left_s": left}, body

    def _output(self, header: Header) -> tuple[Header, bytes]:
        run = self._execs.get(header["exec_id"])
        if run is None:
            raise Refused("not_found", "no command {}".format(header["exec_id"]))
        second = header.get("stream", "stdout") != "stdout"
        offset, most = int(header["offset"]), min(int(header["max_bytes"]), SPOOL_BYTES)
        if run.spools is None:
            # Nothing was spooled: the result itself may hold all of it.
            facts = None if run.header is None else run.header["stderr" if second else "stdout"]
            if run.header is None or run.body is None or facts is None or facts["truncated"]:
                raise Refused("expired", "the output of {} is no longer kept".format(header["exec_id"]))
            before = run.header["stdout"]["head"] + run.header["stdout"]["tail"] if second else 0
            whole = run.body[before : before + facts["head"] + facts["tail"]]
            return {"size": len(whole), "finished": True}, whole[offset : offset + most]
        fd = run.spools[1 if second else 0]
        data = os.pread(fd, most, offset)
        return {"size": os.fstat(fd).st_size, "finished": run.header is not None}, data

    # -- commands

    def _exec(self, header: Header, body: bytes, asker: tuple[int, Any]) -> None:
        exec_id = header["exec_id"]
        known = self._execs.get(exec_id)
        if known is not None:
            if known.header is None:
                known.askers.append(asker)
            elif known.body is None:
                raise Refused("expired", f"command {exec_id} has run; its result is no longer kept")
            else:
                self._reply(asker, known.header, known.body)
            return
        if not float(header["timeout_s"]) > 0:
            raise Refused("bad_request", "a timeout must be above 0, not {!r}".format(header["timeout_s"]))
        strings = [header.get("command") or "", header.get("cwd") or "", *(header.get("argv") or ())]
        if any("\0" in text for text in [*strings, *header.get("env", {}), *header.get("env", {}).values()]):
            raise Refused("bad_request", "a NUL byte in the command, its directory or its environment")
        if header.get("command") is None and not header.get("argv"):
            raise Refused("bad_request", "neither a command nor a program")
        shell = None if header.get("shell") is None else self._shell(header)
        given: list[bytes] = []
        if shell is not None:
            was = shell.carried or _Carried(b"", b"", b"", b"")
            given = [was.state, b"" if shell.lost else was.modes, was.functions, was.folder]
        try:
            run = self._spare or self._fork_supervisor()
        except BlockingIOError as error:
            # The policy's own processes fill the sandbox: its command can not start, which is its result.
            self._reply(asker, *_not_started(error))
            return
        self._spare = None
        assert run.link is not None
        self._execs[exec_id] = run
        run.said = header.get("said")
        run.kills_before = machine_kills() if self.settings.policy_uid is None else None
        run.askers.append(asker)
        if shell is not None:
            run.shell, shell.run = shell, run
        request = {**header, "id": 0, "given": [len(text) for text in given]}
        request["new_shell"] = shell is not None and shell.carried is None
        try:
            run.link.settimeout(KILL_DEADLINE_S)
            for piece in frames(request, b"".join([body, *given])):
                run.link.sendall(piece)
        except OSError:
            _signal(run.pid, signal.SIGKILL)  # It hangs or is gone; the end of its link will say so.
        run.link.setblocking(False)
        self._selector.register(run.link, selectors.EVENT_READ, run)

    def _shell(self, header: Header) -> _Shell:
        """The shell that a command names. Nothing is run when it can not be had."""
        name, user = str(header["shell"]), header.get("user", "policy")
        if header.get("command") is None:
            raise Refused("bad_request", "a shell takes a command, not the words of a program")
        if os.path.basename(self.settings.shell[0]) != "bash":
            raise Refused("not_run", f"a named shell is a bash; this sandbox has {self.settings.shell[0]}")
        shell = self._shells.get((user, name))
        if shell is None and len(self._shells) >= SHELLS:
            raise Refused("not_run", f"{SHELLS} shells are in use: name one of them, not {name!r}")
        if shell is not None and shell.run is not None and shell.run.header is None:
            raise Refused("not_run", f"shell {name!r} still runs a command: wait for it, or name another")
        return self._shells.setdefault((user, name), shell or _Shell())

    @staticmethod
    def _leave_shell(shell: _Shell, header: Header, report: bytes, began: bool) -> None:
        """What a shell carries after a command. One that was ended, killed or ran out of time leaves it as it
        was before; so does one whose report is not whole."""
        header["shell_restarted"] = shell.lost and began
        if not began:
            return
        exited = header["exit_code"] is not None
        now = _Carried.of(report, header["exit_code"]) if exited else None
        shell.lost = now is None
        if now is not None:
            shell.carried = now
        elif exited and not report.startswith(b"R\0"):
            shell.carried = None  # It does not even come to its command any more: it begins anew.

    def _fork_supervisor(self) -> _Exec:
        ours, theirs = socket.socketpair()
        spools = (os.memfd_create("out"), os.memfd_create("err"))
        try:
            pid = os.fork()
        except OSError:
            for fd in spools:
                os.close(fd)
            ours.close()
            theirs.close()
            raise
        if pid == 0:
            try:
                gc.disable()  # A collection would copy every page that it looks at.
                signal.set_wakeup_fd(-1)
                close_others({0, 1, 2, theirs.fileno(), *spools, self.settings.oom_fd or 0})
                _Supervisor(self.settings, theirs, spools).run()
            except BaseException as error:
                sys.stderr.write(f"supervisor: {error!r}\n")
                sys.stderr.flush()
            finally:
                os._exit(0)
        theirs.close()
        return _Exec(pid, ours, spools)

    def _keep_spare(self) -> None:
        """While nothing runs, have the next supervisor ready: half of what a short command costs."""
        if self._spare is None and self._trusted and self._connection is not None and not self._running():
            with contextlib.suppress(OSError):  # No room for another process: it is forked when needed.
                self._spare = self._fork_supervisor()

    def _running(self) -> bool:
        return any(run.header is None for run in self._execs.values())

    def _own(self) -> set[int]:
        """Processes that are ours, not the policy's."""
        own = {run.pid for run in self._execs.values() if not run.exited}
        return own if self._spare is None else own | {self._spare.pid}

    def _pass_on(self, exec_id: str, number: int, key: str | None) -> bool:
        """Signal a command, once per key: whether it was running."""
        run = self._execs.get(exec_id)
        if run is None:
            raise Refused("not_found", f"no command {exec_id}")
        known = None if key is None else run.signals.get(key)
        if known is not None:
            if known[0] != number:
                raise Refused("bad_request", f"key {key} was signal {known[0]} before, not {number}")
            return known[1]
        running = run.header is None
        self._tell(exec_id, b"s" + bytes([number]))
        if key is not None:
            run.signals[key] = (number, running)
            while len(run.signals) > KEPT_SIGNALS:
                run.signals.popitem(last=False)
        return running

    def _tell(self, exec_id: str, word: bytes) -> None:
        run = self._execs.get(exec_id)
        if run is not None and run.link is not None and run.header is None:
            with contextlib.suppress(OSError):  # It is ending by itself.
                run.link.send(word)

    def _hear(self, run: _Exec) -> None:
        if run.link is None:
            return
        try:
            data = run.link.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        for header, body in run.inbox.feed(data) if data else ():
            if header["id"] == 1:
                run.late_kills += int(header["killed"])
            else:
                self._settle(run, header, body)
        if not data:
            self._selector.unregister(run.link)
            run.link.close()
            run.link = None
            if run.header is None:
                # Its supervisor died without an answer: nobody can say what the command did …
                self._await_end(run)
                killed, verified = self._kill_strays()
                header = _unknown(killed, verified)
                if self._killed_from_inside(run):  # … but who ended it, and that it is over.
                    header.update(status="signaled", reason=None, signal=int(signal.SIGKILL))
                self._settle(run, header, b"")

    def _await_end(self, run: _Exec) -> None:
        """A supervisor's link ends a little before it does, and only then are its children ours to kill."""
        until = time.monotonic() + KILL_DEADLINE_S
        while not run.exited and time.monotonic() < until:
            self._reap()
            time.sleep(0.001)

    def _killed_from_inside(self, run: _Exec) -> bool:
        """Whether a supervisor was killed by the policy, whose user it is here: nobody else lives in our
        process namespace, and the kernel killed nothing for memory meanwhile on the whole machine."""
        if os.getpid() != 1 or run.kills_before is None:
            return False
        killed = run.status is not None and os.WIFSIGNALED(run.status) and os.WTERMSIG(run.status) == 9
        return killed and run.kills_before == machine_kills()

    def _settle(self, run: _Exec, header: Header, body: bytes) -> None:
        told = header.pop("told", None)
        if run.shell is not None and told is not None:
            size = len(body) - told["bytes"]
            self._leave_shell(run.shell, header, body[size:], told["began"])
            body = body[:size]
        elif run.shell is not None:
            run.shell.lost = True  # Nobody knows what became of it.
        run.header, run.body = header, body
        for asker in run.askers:
            self._reply(asker, header, body)
        run.askers.clear()
        kept = kept_spool = spools = 0
        for old in reversed(self._execs.values()):
            if old.header is None:
                continue
            kept += len(old.body or b"")
            if kept > KEPT_RESULT_BYTES:
                old.body = None
            if old.spools is not None:
                size = sum(os.fstat(fd).st_size for fd in old.spools)
                kept_spool += size
                spools += size > 0
                if size == 0 or kept_spool > KEPT_SPOOL_BYTES or spools > KEPT_SPOOLS:
                    for fd in old.spools:
                        os.close(fd)
                    old.spools = None

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._spare is not None and self._spare.pid == pid:
                self._spare.discard()
                self._spare = None
            for run in self._execs.values():
                if run.pid == pid:
                    run.exited, run.status = True, status

    # -- ending

    def _kill_strays(self) -> tuple[int, bool]:
        """Kill our descendants that belong to no living supervisor."""
        until = time.monotonic() + KILL_DEADLINE_S
        killed: set[int] = set()
        while True:
            self._reap()
            strays = _descendants(os.getpid(), skip=self._own())
            if not strays or time.monotonic() > until:
                self._reap()  # The last of them may have become a zombie only now.
                return len(killed), not strays
            for pid in strays:
                _signal(pid, signal.SIGSTOP)
            for pid in strays:
                _signal(pid, signal.SIGKILL)
            killed |= strays
            time.sleep(0.001)

    def _start_kill_all(self, asker: tuple[int, Any]) -> None:
        if self._kill_all is not None:
            self._kill_all["askers"].append(asker)
            return
        count = len(_descendants(os.getpid()) - self._own())
        self._kill_all = {"askers": [asker], "count": count, "until": time.monotonic() + KILL_DEADLINE_S + 1}
        for run in self._execs.values():
            if run.link is not None:
                with contextlib.suppress(OSError):  # It is ending by itself.
                    run.link.send(b"a")

    def _step_kill_all(self) -> None:
        if self._kill_all is None:
            return
        waiting = any(not e.exited for e in self._execs.values())
        late = time.monotonic() > self._kill_all["until"]
        if waiting and not late:
            return
        for run in self._execs.values():
            if not run.exited:
                _signal(run.pid, signal.SIGKILL)
        for run in list(self._execs.values()):
            self._hear(run)
        _, verified = self._kill_strays()
        for asker in self._kill_all["askers"]:
            self._reply(asker, {"killed": self._kill_all["count"], "verified": verified})
        self._kill_all = None

    def _end_everything(self) -> None:
        """PID 1 just leaves: the kernel kills its namespace. Elsewhere the supervisors see their link end."""
        self._flush()
        if os.getpid() == 1:
            return
        if self._spare is not None:
            self._spare.discard()
            self._spare = None
        for run in self._execs.values():
            if run.link is not None:
                run.link.close()
        until = time.monotonic() + KILL_DEADLINE_S
        while any(not e.exited for e in self._execs.values()) and time.monotonic() < until:
            self._reap()
            time.sleep(0.002)
        self._kill_strays()


def _find(program: str, path: str) -> str:
    """The program's full path, so that each start of it is one system call."""
    if "/" not in program:
        for folder in path.split(":"):
            if os.access(folder + "/" + program, os.X_OK):
                return folder + "/" + program
    return program


def _unknown(killed: int, verified: bool) -> Header:
    empty = {
        "total": 0,
        "head": 0,
        "tail": 0,
        "truncated": True,
        "sha256": hashlib.sha256(b"").hexdigest(),
        "spooled": 0,
    }
    return {
        "status": "unknown",
        "reason": "supervisor_died",
        "exit_code": None,
        "signal": None,
        "stdout": empty,
        "stderr": empty,
        "report": None,
        "cpu_ms": 0.0,
        "memory_peak_kib": None,
        "io_bytes": None,
        "wall_ms": 0.0,
        "leftovers_killed": killed,
        "leftovers_alive": 0,
        "kill_verified": verified,
    }


def _not_started(error: OSError) -> tuple[Header, bytes]:
    """The result of a command for which there was no process left."""
    words = f"agentrl: cannot start the command: {error}\n".encode()
    header = {
        **_unknown(0, True),
        "status": "exited",
        "reason": None,
        "exit_code": 127,
        "kill_verified": None,
    }
    nothing = {**header["stdout"], "truncated": False}
    stderr = {**nothing, "total": len(words), "head": len(words), "sha256": hashlib.sha256(words).hexdigest()}
    return {**header, "stdout": nothing, "stderr": stderr}, words


def close_others(keep: set[int]) -> None:
    """Close every descriptor but these: what a fork inherited is not its business."""
    low = 0
    for fd in sorted(keep):
        if low < fd:  # An empty range from 0 would mean everything.
            os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, MAX_DESCRIPTORS)


def serve(settings: Settings, connection: socket.socket, listener: socket.socket | None = None) -> None:
    """Be the agent over a connected socket, in this process, until the other side closes it; with a listener,
    until nobody has come back through it in time."""
    harden(settings)
    Agent(settings, connection=connection, listener=listener).run()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Runs commands inside a sandbox for the gateway.")
    parser.add_argument("--config", required=True, help="JSON object of settings; -: read it from stdin")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--fd", type=int, help="an inherited, connected stream socket")
    where.add_argument("--listen", help="path of a unix socket to listen on")
    where.add_argument("--listen-tcp", metavar="HOST:PORT", help="address to listen on; needs AGENTRL_TOKEN")
    options = parser.parse_args(argv)
    settings = Settings(**json.loads(sys.stdin.read() if options.config == "-" else options.config))
    token = os.environ.pop("AGENTRL_TOKEN", None)
    harden(settings)
    if options.fd is not None:
        agent = Agent(settings, connection=socket.socket(fileno=options.fd), token=token)
    elif options.listen is not None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if os.path.exists(options.listen):
            os.unlink(options.listen)
        listener.bind(options.listen)
        os.chmod(options.listen, 0o600)
        listener.listen(8)
        agent = Agent(settings, listener=listener, token=token)
    else:
        if not token:
            parser.error("a TCP listener needs a token: set AGENTRL_TOKEN")
        host, _, port = options.listen_tcp.rpartition(":")
        agent = Agent(settings, listener=socket.create_server((host, int(port))), token=token)
    agent.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
