"""A small process, started once per local backend, that forks sandboxes: no interpreter start, no imports,
per sandbox.

host --request + socket--> zygote --fork--> launcher --namespaces, mounts, fork--> PID 1 = the agent

The launcher answers on the sandbox's own socket, either an error that names the phase and the primitive that
the kernel refused, or `started` with two descriptors: the overlay's upper directory and a pidfd of PID 1.
Then it is gone, PID 1 becomes a child of the zygote (a subreaper), and the host needs the zygote no more to
end it.

Two situations. *Root*: mounts are made by the host's root, then the agent enters a user namespace whose ids 0
to 65535 are a range that is nobody outside; it owns none of the namespaces it lives in. *User*: a user
namespace comes first (one id mapped), mounts are made in it, then a second one inside takes away the power
over them.

When the host ends (its socket closes), all sandboxes are killed and what they left in cgroups and folders
is removed. Unless sandboxes were made with an `owner` (see `adoption`): then the zygote stays until the last
of them ended by itself, keeps their descriptors, and hands them to a successor of that name who asks at the
socket `keeper`. Standard library only; this module must stay importable in a few milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from envs.sandbox import agent
from envs.sandbox import namespaces as ns
from envs.sandbox.scoped import inside

POLICY_ID = 1000
"""User and group of the policy inside a sandbox."""
IDS = 65536
"""How many ids a sandbox has in the root situation."""
READY = b"zygote"
KEEPER = "keeper"
"""Name of the socket in the backend's folder at which a successor asks for sandboxes."""
OUTLIVED_S = 3700.0
"""Longest that a zygote leaves a sandbox alone without any host: more than the longest lease. Its agent has
ended it long before."""
END = b'{"end": true}'
"""The host's word that it stops and wants nothing kept."""
MAX_REQUEST = 192 * 1024
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
DEVICES = ("null", "zero", "full", "random", "urandom")
TERMINALS = 64
"""Most pseudo-terminals of one sandbox: the machine has 4096 for everybody."""
TOOLS = "/opt/agentrl/bin"
"""Where `python3` and `python` are, first on the path."""
_SETUP_DEADLINE_S = 60
_PR_SET_PDEATHSIG = 1
_READ_ONLY = ns.ATTR_RDONLY | ns.ATTR_NOSUID | ns.ATTR_NODEV

Request = dict[str, Any]


class _Phase:
    """What is being done now; an error is reported with it."""

    def __init__(self) -> None:
        self.name = "start"


# --------------------------------------------------------------------------------------------------- launcher


def launch(
    request: Request, connection: socket.socket, births: socket.socket, listener: socket.socket | None
) -> int:
    """In the forked launcher: build the sandbox, leave the agent running in it, answer on `connection`.
    Returns the launcher's exit code."""
    phase = _Phase()
    child = 0
    try:
        child, upper = _build(request, connection, phase, listener)
        handle = os.pidfd_open(child)
        kept = [] if listener is None else [upper, handle]
        socket.send_fds(births, [f"{child} {request['id']}".encode()], kept)
        message = agent.frames({"id": 0, "event": "started", "pid": child})[0]
        socket.send_fds(connection, [message], [upper, handle])
    except BaseException as error:  # Whatever it is, the host must hear of it.
        if child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        problem = {"phase": phase.name, "message": f"{type(error).__name__}: {error}"}
        if isinstance(error, OSError):
            problem = {**problem, "errno": error.errno, "primitive": str(error.filename)}  # type: ignore[dict-item]
        with contextlib.suppress(OSError):
            connection.sendall(agent.frames({"id": 0, "event": "failed", "error": problem})[0])
        return 1
    return 0


def _build(
    request: Request, connection: socket.socket, phase: _Phase, listener: socket.socket | None
) -> tuple[int, int]:
    base: int | None = request["uid_base"]
    phase.name = "cgroup"
    joining = _join_cgroups(request["cgroup_procs"])
    oom = os.open(request["oom_file"], os.O_RDONLY | os.O_CLOEXEC) if request["oom_file"] else None
    if base is None:
        phase.name = "user_namespace"
        uid, gid = os.getuid(), os.getgid()
        ns.unshare(ns.CLONE_NEWUSER, "unshare user namespace")
        _write_map("/proc/self/setgroups", "deny")
        _write_map("/proc/self/uid_map", f"0 {uid} 1")
        _write_map("/proc/self/gid_map", f"0 {gid} 1")
    phase.name = "mount_namespace"
    ns.unshare(ns.CLONE_NEWNS, "unshare mount namespace")
    phase.name = "pid_namespace"
    ns.unshare(ns.CLONE_NEWPID, "unshare pid namespace")
    phase.name = "ipc_namespace"
    ns.unshare(ns.CLONE_NEWIPC | ns.CLONE_NEWUTS, "unshare ipc and uts namespaces")
    _limit_ipc()
    phase.name = "network_namespace"
    ns.unshare(ns.CLONE_NEWNET, "unshare network namespace")
    ns.loopback_up()
    socket.sethostname("sandbox")
    phase.name = "mount"
    root, upper = _mounts(request, base)
    phase.name = "cgroup"
    _await_child(joining, "join the cgroups")
    phase.name = "fork"
    processes = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    ours, theirs = socket.socketpair()
    ours.settimeout(_SETUP_DEADLINE_S)
    theirs.settimeout(_SETUP_DEADLINE_S)
    child = os.fork()
    if child == 0:
        _inside(request, connection, theirs, root, oom, listener)
    theirs.close()
    while True:
        word = json.loads(ours.recv(65536) or b'{"failed": "the first process ended", "phase": "fork"}')
        if "failed" in word:
            phase.name = word["phase"]
            raise OSError(word.get("errno") or 0, word["failed"], word.get("primitive"))
        if word["phase"] == "map":
            phase.name = "user_namespace"
            outside = (base, IDS, 0) if base is not None else (0, 1, POLICY_ID)
            for kind in ("gid_map", "uid_map"):
                fd = os.open(f"{child}/{kind}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=processes)
                os.write(fd, f"{outside[2]} {outside[0]} {outside[1]}".encode())
                os.close(fd)
            ours.sendall(b"mapped")
        else:
            return child, upper


def _join_cgroups(files: list[str]) -> int | None:
    """Move this process, from a helper: the kernel waits some ten milliseconds for it, in which we go on."""
    if not files:
        return None
    me = str(os.getpid()).encode()
    helper = os.fork()
    if helper == 0:
        try:
            for path in files:
                fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
                os.write(fd, me)
            os._exit(0)
        except OSError as error:
            os._exit(min(error.errno or 255, 255))
    return helper


def _await_child(pid: int | None, what: str) -> None:
    if pid is not None:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code != 0:
            raise OSError(abs(code), os.strerror(abs(code)), what)


def _write_map(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="ascii") as file:
            file.write(text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"write {path}") from None


def _limit_ipc() -> None:
    """System V memory outlives its processes: let it not, and keep it small. It is charged to the cgroup
    anyway."""
    for name, value in (("shm_rmid_forced", "1"), ("shmall", "16384")):
        with contextlib.suppress(OSError), open(f"/proc/sys/kernel/{name}", "w", encoding="ascii") as file:
            file.write(value)


def _mounts(request: Request, base: int | None) -> tuple[str, int]:
    """Everything but /proc. Returns the new root and a descriptor of the overlay's upper directory."""
    owner = base or 0
    policy = owner + POLICY_ID if base is not None else 0
    ids = f"uid={owner},gid={owner},mode=755"
    here: str = request["folder"]
    root, disk = here + "/root", here + "/disk"
    ns.mount("none", "/", None, ns.MS_REC | ns.MS_PRIVATE, name="make / private")
    size, inodes = request["disk_mib"], request["disk_mib"] * 256
    ns.mount("tmpfs", disk, "tmpfs", ns.MS_NOSUID | ns.MS_NODEV, f"size={size}m,nr_inodes={inodes},{ids}")

    def folder(path: str, uid: int = owner, mode: int = 0o755) -> str:
        if not os.path.isdir(path):
            if not os.path.isdir(os.path.dirname(path)):
                folder(os.path.dirname(path))
            os.mkdir(path)
            os.chown(path, uid, uid)
            os.chmod(path, mode)
        return path

    def place(path: str) -> str:
        """A folder of the new root, never one that a link in somebody's image leads to outside of it."""
        return folder(inside(root, path))

    if request["tree"] is None:
        ns.mount("tmpfs", root, "tmpfs", ns.MS_NOSUID | ns.MS_NODEV, f"size=16m,nr_inodes=4096,{ids}")
        _this_machine(request, root, folder)
    else:
        _overlay(request["tree"], folder(disk + "/system"), folder(disk + "/system-work"), root, base)
        _names(here + "/etc", place("/etc"))
        size_of_dev = f"size=64k,nr_inodes=64,{ids}"
        ns.mount("tmpfs", place("/dev"), "tmpfs", ns.MS_NOSUID | ns.MS_NODEV, size_of_dev)
    devices = place("/dev")
    for name in DEVICES:
        with open(f"{devices}/{name}", "wb"):
            pass
        ns.bind(f"/dev/{name}", f"{devices}/{name}", 0)
    for name, target in (("fd", "/fd"), ("stdin", "/fd/0"), ("stdout", "/fd/1"), ("stderr", "/fd/2")):
        os.symlink("/proc/self" + target, f"{devices}/{name}")
    terminals = f"newinstance,ptmxmode=0666,mode=0600,max={TERMINALS}"
    ns.mount("devpts", folder(devices + "/pts"), "devpts", ns.MS_NOSUID | ns.MS_NOEXEC, terminals)
    os.symlink("pts/ptmx", devices + "/ptmx")
    for name, target, uid, mode in (
        ("tmp", "/tmp", owner, 0o1777),
        ("var-tmp", "/var/tmp", owner, 0o1777),
        ("shm", "/dev/shm", owner, 0o1777),
        ("home", request["home"], policy, 0o700),
        *([] if request["tree"] is None else [("logs", "/logs", owner, 0o755)]),
    ):
        ns.bind(folder(f"{disk}/{name}", uid, mode), place(target), 0)
    for number, target in enumerate(request["volumes"]):
        ns.bind(folder(f"{disk}/volume-{number}", owner, 0o1777), place(target), 0)
    for name in ("/proc", "/root", "/run"):
        place(name)
    for source, target in request["binds"]:
        ns.bind(source, place(target), _READ_ONLY)
    workdir = place(request["workdir"])
    upper = _overlay(request["lower"], folder(disk + "/upper", policy), folder(disk + "/work"), workdir, base)
    if request["tree"] is not None:
        ns.restrict(root, _READ_ONLY)
    return root, upper


def _overlay(lower: str, upper: str, work: str, target: str, base: int | None) -> int:
    """Mount it; returns a descriptor of the upper directory."""
    handles = [os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) for path in (lower, upper, work)]
    names = [f"/proc/self/fd/{fd}" for fd in handles]
    options = "lowerdir={},upperdir={},workdir={},index=off".format(*names)
    options += ",redirect_dir=nofollow,metacopy=off" if base is not None else ",userxattr"
    ns.mount("overlay", target, "overlay", ns.MS_NOSUID | ns.MS_NODEV, options, name="mount overlay")
    return handles[1]


def _this_machine(request: Request, root: str, folder: Callable[[str], str]) -> None:
    """The system of a sandbox that brings no image: this machine's own programs."""
    for path in SYSTEM_FOLDERS:
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        elif os.path.isdir(path):
            ns.bind(path, folder(root + path), _READ_ONLY)
    for path in request["python_folders"]:
        ns.bind(path, folder(root + path), _READ_ONLY)
    for path in request["hidden"]:
        ns.bind(request["folder"] + "/empty", root + path, _READ_ONLY)
    folder(root + TOOLS)
    for alias in ("python3", "python"):
        os.symlink(request["python"], f"{root}{TOOLS}/{alias}")
    ns.bind(request["folder"] + "/etc", folder(root + "/etc"), _READ_ONLY)


def _names(ours: str, theirs: str) -> None:
    """What an image can not know of the network that it runs in; its own files there are hidden."""
    for name in ("hosts", "hostname", "resolv.conf"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{theirs}/{name}")
        with open(f"{ours}/{name}", "rb") as file, open(f"{theirs}/{name}", "xb") as copy:
            copy.write(file.read())


def _inside(
    request: Request,
    connection: socket.socket,
    sync: socket.socket,
    root: str,
    oom: int | None,
    listener: socket.socket | None,
) -> None:
    """PID 1 of the sandbox, up to the agent's loop. Never returns."""
    phase = "proc"
    try:
        signal.set_wakeup_fd(-1)
        flags = ns.MS_NOSUID | ns.MS_NODEV | ns.MS_NOEXEC
        ns.mount("proc", inside(root, "/proc"), "proc", flags, name="mount proc")
        phase = "pivot_root"
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        ns.enter_root(root)
        phase = "user_namespace"
        ns.unshare(ns.CLONE_NEWUSER, "unshare user namespace")
        sync.sendall(b'{"phase": "map"}')
        if sync.recv(16) != b"mapped":
            raise OSError(0, "the launcher ended", "id map")
        inner = 0 if request["uid_base"] is not None else POLICY_ID
        os.setresgid(inner, inner, inner)
        os.setresuid(inner, inner, inner)
        if request["uid_base"] is None:
            ns.drop_all_capabilities()
        phase = "seccomp"
        ns.install_seccomp()
        phase = "agent"
        nothing = os.open("/dev/null", os.O_RDONLY)
        for fd, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(fd, target)
        os.umask(0o022)
        settings = agent.Settings(**request["settings"], oom_fd=oom)
        keep = {0, 1, 2, connection.fileno(), sync.fileno()}
        keep |= set() if oom is None else {oom}
        keep |= set() if listener is None else {listener.fileno()}
        agent.close_others(keep)
        sync.sendall(b'{"phase": "up"}')
        sync.close()
        agent.serve(settings, connection, listener)
    except BaseException as error:
        word: dict[str, Any] = {"failed": str(error), "phase": phase}
        if isinstance(error, OSError):
            word.update(failed=error.strerror, errno=error.errno, primitive=error.filename)
        with contextlib.suppress(OSError):
            sync.sendall(json.dumps(word).encode())
        with contextlib.suppress(OSError):
            os.write(2, f"agent: {error!r}\n".encode())
    finally:
        os._exit(0)


# ----------------------------------------------------------------------------------------------------- zygote


class _Zygote:
    def __init__(self, control: socket.socket, state: str) -> None:
        self._control = control
        self._state = state
        self._parent = os.getppid()
        self._alive: dict[int, str] = {}
        self._launchers: dict[int, str] = {}
        self._requests: dict[str, Request] = {}
        self._kept: dict[str, list[int]] = {}
        """By id: the upper directory and the pidfd of a sandbox that may outlive the host."""
        self._keeper: socket.socket | None = None
        self._hosts: dict[int, socket.socket] = {control.fileno(): control}
        self._left_behind: deque[Request] = deque(maxlen=4096)
        """Ended sandboxes whose remains are the host's to remove, unless it has ended too."""
        self._alone_since = 0.0
        self._births, self._births_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._births.setblocking(False)
        self._exits = os.open(state + "/exits", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._poller = select.poll()

    def run(self) -> None:
        wake, wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(agent.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        gc.collect()
        gc.freeze()
        self._control.sendall(READY)
        for fd in (wake, self._control.fileno(), self._births.fileno()):
            self._poller.register(fd, select.POLLIN)
        while self._wanted():
            for fd, _ in self._poller.poll(10_000):
                if fd == wake:
                    agent.drain(wake)
                elif fd == self._births.fileno():
                    self._note_births()
                elif fd == self._control.fileno():
                    if not self._take_request():
                        self._end()
                        return
                elif self._keeper is not None and fd == self._keeper.fileno():
                    self._welcome()
                else:
                    self._answer(fd)
            self._reap()
        self._end()

    def _wanted(self) -> bool:
        """A signal of death may come from a thread of the host that ended; the host itself is its process."""
        if self._keeper is None:
            return os.getppid() == self._parent
        if self._hosts:
            return True
        return bool(self._requests) and time.monotonic() - self._alone_since < OUTLIVED_S

    def _take_request(self) -> bool:
        """False when nothing is to stay."""
        data, fds, _, _ = socket.recv_fds(self._control, MAX_REQUEST, 4)
        if not data:
            if self._keeper is None:
                return False
            self._leave(self._control.fileno())
            return True
        if data == END:
            return False
        request = json.loads(data)
        if request["owner"] is not None and self._keeper is None:
            self._open_keeper()
        listener = socket.socket(fileno=fds[1]) if len(fds) > 1 else None
        with socket.socket(fileno=fds[0]) as connection:
            self._requests[request["id"]] = request
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    code = launch(request, connection, self._births_end, listener)
                finally:
                    os._exit(code)
            self._launchers[pid] = request["id"]
        if listener is not None:
            listener.close()
        return True

    def _note_births(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                line, fds, _, _ = socket.recv_fds(self._births, 4096, 2)
                pid, name = line.decode().split()
                self._alive[int(pid)] = name
                if fds:
                    self._kept[name] = fds

    def _reap(self) -> bool:
        """Collect the dead; True when no child is left."""
        while True:
            self._note_births()
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            self._note_births()
            launched = self._launchers.pop(pid, None)
            if launched is not None and status != 0:
                self._requests.pop(launched, None)
            name = self._alive.pop(pid, None)
            if name is not None:
                request = self._requests.pop(name, None)
                for fd in self._kept.pop(name, ()):
                    os.close(fd)
                if request is not None:
                    self._left_behind.append(request)
                    if not self._hosts:
                        self._tidy()
                if os.fstat(self._exits).st_size > 1 << 20:
                    os.ftruncate(self._exits, 0)
                os.write(self._exits, f"{name} {os.waitstatus_to_exitcode(status)}\n".encode())

    # -- hosts that come after the first

    def _open_keeper(self) -> None:
        keeper = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        folder = os.open(self._state, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        keeper.bind(f"/proc/self/fd/{folder}/{KEEPER}")  # Paths of sockets are short.
        os.close(folder)
        keeper.listen(8)
        keeper.setblocking(False)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        most = agent.MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, agent.MAX_DESCRIPTORS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        self._keeper = keeper
        self._poller.register(keeper, select.POLLIN)

    def _welcome(self) -> None:
        assert self._keeper is not None
        with contextlib.suppress(OSError):
            host, _ = self._keeper.accept()
            host.settimeout(5.0)
            self._hosts[host.fileno()] = host
            self._poller.register(host, select.POLLIN)

    def _leave(self, fd: int) -> None:
        self._poller.unregister(fd)
        host = self._hosts.pop(fd)
        if host is not self._control:
            host.close()
        if not self._hosts:
            self._alone_since = time.monotonic()
            self._tidy()

    def _answer(self, fd: int) -> None:
        """A successor's wish: which sandboxes there are, one of them, or the end of one."""
        host = self._hosts[fd]
        try:
            data = host.recv(MAX_REQUEST)
            if not data:
                self._leave(fd)
                return
            wish = json.loads(data)
            if "list" in wish:
                rows = [
                    [name, request["session"]]
                    for name, request in self._requests.items()
                    if request["owner"] == wish["list"] and name in self._kept
                ]
                host.sendall(json.dumps(rows).encode())
                return
            name = wish.get("take") or wish["end"]
            kept = self._kept.get(name)
            if kept is None:
                host.sendall(b"null")
            elif "take" in wish:
                pid = next(pid for pid, alive in self._alive.items() if alive == name)
                answer = {**self._requests[name], "pid": pid}
                socket.send_fds(host, [json.dumps(answer).encode()], kept)
            else:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(kept[1], signal.SIGKILL)
                host.sendall(b"true")
        except (OSError, ValueError, KeyError):
            self._leave(fd)

    def _end(self) -> None:
        """Nobody wants them any more: nothing of the sandboxes may stay."""
        until = time.monotonic() + 10.0
        left = dict(self._requests)
        while not self._reap() and time.monotonic() < until:
            for pid in self._alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        self._left_behind.extend(left.values())
        self._tidy()
        shutil.rmtree(self._state, ignore_errors=True)

    def _tidy(self) -> None:
        """Remove what sandboxes have left whose host is no more."""
        while self._left_behind:
            request = self._left_behind.popleft()
            for folder in request["cgroup_folders"]:
                for _ in range(100):
                    try:
                        os.rmdir(folder)
                        break
                    except FileNotFoundError:
                        break
                    except OSError:  # The kernel may hold it a moment longer.
                        time.sleep(0.001)
            for path in (request["log"], request["listen"]):
                with contextlib.suppress(OSError):
                    os.unlink(path)


def main(control: int, state: str) -> None:
    """Entry of the zygote process: `control` is an inherited SOCK_SEQPACKET to the host, `state` its own
    folder."""
    lock = os.open(state + "/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.umask(0o022)
    _Zygote(socket.socket(fileno=control), state).run()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
