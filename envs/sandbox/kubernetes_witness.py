"""What runs inside a pod beside the policy: the witness, a container of its own with the same image, and the
two small programs that go with it. Standard library only, Python >= 3.8.

The witness prepares the pod (closes its network, limits and lays its disk), then is the only one that the
outside talks to: it hands frames between the gateway and the agent, keeps the agent alive while connections
to the gateway come and go, and compares the workdir with the image, from outside of the container in which
the policy runs and also after that container has ended. A sandbox that nobody has asked anything for the time
of its lease ends, with or without gateway and API server.

Roles: `witness`; `agent` (PID 1 of the policy's container: waits until the pod is prepared, then is the
agent); `relay` (started by an exec of the API server: standard input and output to the witness's door).

Who may talk is decided by a token of which the pod knows only the hash. Only one guest at a time: the newest.
A connection that does not prove itself never displaces one that did. Requests whose `op` begins with
`witness.` are the witness's own; all others go to the agent as they are, and whatever the agent answers goes
to the guest of that moment. The guest asks again for answers that it missed.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import hmac
import importlib
import json
import os
import queue
import select
import signal
import socket
import stat
import struct
import sys
import tarfile
import threading
import time
from typing import Any, Dict, List, NoReturn, Tuple  # noqa: UP035

BASE = "/opt/agentrl"
RUN, DISK, PLACE = BASE + "/run", BASE + "/disk", BASE + "/place"
DOOR = PLACE + "/door"
LOWER = PLACE + "/lower"
PROOF_BYTES = 4096
"""More than a first frame needs."""
PROOF_S = 5.0
UNPROVEN = 8
"""Connections that have not proven themselves yet, at most; more are closed at once."""
SEND_S = 30.0
AGENT_START_S = 90.0
END_S = 0.5
"""How long an agent that was told to end is waited for."""
FAREWELL_S = 1.0
"""How long a witness that said its last word waits for its guest to hang up."""
LAY_BYTES = 4 * 1024 * 1024
LAY_FILE_BYTES = 16 * 1024 * 1024
SIZE_SLACK = 1.02
KEEP = frozenset({1})
"""Capabilities after the preparation: reading what the policy closed to others (dac_override)."""
MS_NOSUID, MS_NODEV, MS_REMOUNT = 2, 4, 32
_WORDS = 4096

Header = Dict[str, Any]  # noqa: UP006  (evaluated at run time, also by 3.8)
Frame = Tuple[Header, bytes]  # noqa: UP006


class Broken(Exception):
    """The pod can not be prepared; `code` is for the backend, the message for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Frames:
    """Bytes in, whole frames out: the header and the frame as it was. See `agent` for their form."""

    def __init__(self, limit: int | None = None) -> None:
        self._buffer = bytearray()
        self.limit = limit

    def feed(self, data: bytes) -> list[Frame]:
        self._buffer += data
        found: List[Frame] = []  # noqa: UP006
        while len(self._buffer) >= 8:
            head, body = struct.unpack_from(">II", self._buffer)
            end = 8 + head + body
            if self.limit is not None:
                if found:
                    break  # The limit is for the first frame: what follows is looked at when that is proven.
                if end > self.limit:
                    raise ValueError(f"a frame of {end} bytes")
            if len(self._buffer) < end:
                break
            header = json.loads(bytes(self._buffer[8 : 8 + head]))
            found.append((header, bytes(self._buffer[:end])))
            del self._buffer[:end]
        return found


# -------------------------------------------------------------------------------------------- preparing a pod


def prepare(facts: Header) -> None:
    """Network, disk, folders, capabilities; then the word by which the agent starts. Raises `Broken`."""
    if facts["fence"]:
        fence = importlib.import_module("kubernetes_fence")
        try:
            fence.close_network(facts["port"])
        except OSError as error:
            raise Broken("no_fence", f"The pod's network could not be closed: {error}") from error
    os.umask(0)
    _limit_disk(facts["disk_mib"])
    uid = facts["uid"]
    for name, mode, owner in (
        ("work", 0o755, uid),
        ("tmp", 0o1777, 0),
        ("var-tmp", 0o1777, 0),
        ("shm", 0o1777, 0),
        ("logs", 0o755, 0),
        ("home", 0o700, uid),
    ):
        _folder(f"{DISK}/{name}", mode, owner)
    os.chmod(DISK, 0o700)
    os.chmod(PLACE, 0o700)
    for name in ("lower", *(f"mount-{i}" for i in range(facts["mounts"]))):
        _folder(f"{PLACE}/{name}", 0o755, 0)
    os.chmod(RUN, 0o700)
    os.umask(0o077)
    agent = importlib.import_module("agent")
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(64):
        if capability not in KEEP and libc.prctl(24, capability, 0, 0, 0) != 0:
            break
    agent._drop_capabilities(KEEP)
    with open(RUN + "/start.part", "w") as file:
        json.dump(facts["start"], file)
    os.rename(RUN + "/start.part", RUN + "/start.json")


def _folder(path: str, mode: int, owner: int) -> None:
    os.makedirs(path, exist_ok=True)  # The kubelet may have made it, for the other container's mount.
    os.chmod(path, mode)
    os.chown(path, owner, owner)


def _limit_disk(mib: int) -> None:
    """See that the disk has its size; where the kubelet gave it none (before Kubernetes 1.22), give it."""
    if _disk_bytes() <= (mib << 20) * SIZE_SLACK:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"size={mib}m,nr_inodes={mib * 256}".encode()
    flags = ctypes.c_ulong(MS_REMOUNT | MS_NOSUID | MS_NODEV)
    result = libc.mount(b"none", DISK.encode(), None, flags, options)
    if result != 0 or _disk_bytes() > (mib << 20) * SIZE_SLACK:
        why = os.strerror(ctypes.get_errno()) if result != 0 else "its size did not change"
        raise Broken("no_disk_limit", f"The disk has {_disk_bytes() >> 20} MiB instead of {mib} ({why})")


def _disk_bytes() -> int:
    facts = os.statvfs(DISK)
    return facts.f_blocks * facts.f_frsize


# -------------------------------------------------------------------------------------------------- the agent


class AgentLink:
    """The one connection to the agent, kept for the pod's whole life."""

    def __init__(self, witness: Witness) -> None:
        self._witness = witness
        self._socket: socket.socket | None = None
        self._sending = threading.Lock()
        self._asked: Dict[str, queue.Queue[Header]] = {}  # noqa: UP006
        self._numbers = 0
        self.up = threading.Event()
        self.gone = False

    def run(self) -> None:
        until = time.monotonic() + AGENT_START_S
        while True:
            try:
                link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                link.connect(RUN + "/agent")
                break
            except OSError:
                link.close()
                if time.monotonic() > until:
                    self._end()
                    return
                time.sleep(0.01)
        self._socket = link
        self.up.set()
        frames = Frames()
        with contextlib.suppress(OSError, ValueError):
            while data := link.recv(1 << 20):
                for header, raw in frames.feed(data):
                    waiting = self._asked.get(str(header.get("id")))
                    if waiting is not None:
                        waiting.put(header)
                    else:
                        self._witness.hand(raw)
        self._end()

    def _end(self) -> None:
        self.gone = True
        self.up.set()
        for waiting in list(self._asked.values()):
            waiting.put({"error": {"kind": "agent_gone", "message": "the agent ended"}})
        self._witness.hand(frame({"id": 0, "event": "agent_gone", "log": agent_log()}))

    def send(self, raw: bytes) -> bool:
        """False when there is no agent (any more)."""
        self.up.wait(AGENT_START_S)
        if self.gone or self._socket is None:
            return False
        try:
            with self._sending:
                self._socket.sendall(raw)
        except OSError:
            return False
        return True

    def ask(self, header: Header, body: bytes) -> Header:
        """A request of the witness's own."""
        agent = importlib.import_module("agent")
        self._numbers += 1
        name = f"w{self._numbers}"
        answer: queue.Queue[Header] = queue.Queue()
        self._asked[name] = answer
        try:
            for raw in agent.frames({**header, "id": name}, body):
                if not self.send(raw):
                    return {"error": {"kind": "agent_gone", "message": agent_log()}}
            return answer.get(timeout=AGENT_START_S)
        except queue.Empty:
            return {"error": {"kind": "agent_hangs", "message": "the agent does not answer"}}
        finally:
            del self._asked[name]


def frame(header: Header, body: bytes = b"") -> bytes:
    head = json.dumps(header).encode()
    return struct.pack(">II", len(head), len(body)) + head + body


def agent_log() -> str:
    try:
        with open(RUN + "/agent.log", errors="backslashreplace") as file:
            return file.read()[-_WORDS:]
    except OSError:
        return ""


# ------------------------------------------------------------------------------------------------ the witness


class Guest:
    """A connection that has proven itself."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._sending = threading.Lock()

    def send(self, raw: bytes) -> None:
        try:
            with self._sending:
                self.connection.sendall(raw)
        except OSError:
            self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class Witness:
    """Accepts, and ends the pod when its lease is over."""

    def __init__(self, facts: Header) -> None:
        self._facts = facts
        self._hash = bytes.fromhex(facts["token_sha256"])
        self.instance = os.urandom(8).hex()
        self._lease_s = float(facts["lease_s"])
        self._until = time.monotonic() + self._lease_s
        self._guest: Guest | None = None
        self._unproven = threading.BoundedSemaphore(UNPROVEN)
        self._link = AgentLink(self)
        self._laying = threading.Lock()
        self._lower: str | None = None
        self._leaving = False
        self._quit = os._exit
        self._listeners: List[socket.socket] = []  # noqa: UP006

    def run(self) -> NoReturn:
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(DOOR)
        door.bind(DOOR)
        door.listen(16)
        self._listeners.append(door)
        if self._facts["port"] is not None:
            self._listeners.append(_listen(self._facts["port"]))
        prepare(self._facts)
        signal.signal(signal.SIGTERM, lambda *_: self.end())
        threading.Thread(target=self._link.run, daemon=True).start()
        while True:
            left = self._until - time.monotonic()
            if left <= 0:
                self.end()
            ready, _, _ = select.select(self._listeners, [], [], min(left, 5.0))
            for listener in ready:
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    self._admit(connection)

    def end(self) -> NoReturn:
        self._end_agent()
        os._exit(0)

    def _end_agent(self) -> bool:
        """Whether the agent, and with it every process of its container, is known to be gone."""
        self._link.send(frame({"op": "shutdown", "id": "end"}))
        until = time.monotonic() + END_S
        while not self._link.gone and time.monotonic() < until:
            time.sleep(0.01)
        return self._link.gone

    def _take_leave(self) -> Header:
        """End the agent, and after the answer the pod: when the guest has it, or soon."""
        over = self._end_agent()
        self._leaving = True
        last = threading.Timer(FAREWELL_S, self._quit, (0,))
        last.daemon = True
        last.start()
        return {"over": over}

    def hand(self, raw: bytes) -> None:
        """A frame for the guest of this moment, if there is one."""
        guest = self._guest
        if guest is not None:
            guest.send(raw)

    def _admit(self, connection: socket.socket) -> None:
        if not self._unproven.acquire(blocking=False):
            connection.close()
            return
        threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            try:
                frames = Frames(PROOF_BYTES)
                rest = self._prove(connection, frames)
            finally:
                self._unproven.release()
            if rest is None:
                return
            connection.settimeout(None)
            seconds = struct.pack("@ll", int(SEND_S), 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
            frames.limit = None
            rest += frames.feed(b"")
            guest = Guest(connection)
            before, self._guest = self._guest, guest
            if before is not None:
                before.close()
            begun: set[Any] = set()
            try:
                while True:
                    for header, raw in rest:
                        (begun.add if header.get("more") else begun.discard)(header["id"])
                        self._until = max(self._until, time.monotonic() + self._lease_s)
                        self._take(guest, header, raw)
                    data = connection.recv(1 << 20)
                    if not data:
                        return
                    rest = frames.feed(data)
            finally:
                if self._leaving:
                    self._quit(0)
                if self._guest is guest:
                    self._guest = None
                for name in begun:  # So that the agent does not keep what will never be complete.
                    self._link.send(frame({"op": "void", "id": name}))

    def _prove(self, connection: socket.socket, frames: Frames) -> list[Frame] | None:
        """The frames that came with a good token, itself among them; None for anything else."""
        until = time.monotonic() + PROOF_S
        while True:
            connection.settimeout(max(0.01, until - time.monotonic()))
            data = connection.recv(PROOF_BYTES)
            if not data:
                return None
            found = frames.feed(data)
            if found:
                offered = hashlib.sha256(str(found[0][0].get("token", "")).encode()).digest()
                return found if hmac.compare_digest(offered, self._hash) else None

    def _take(self, guest: Guest, header: Header, raw: bytes) -> None:
        op = str(header.get("op", ""))
        if not op.startswith("witness."):
            if op == "lease":
                self._lease_s = float(header["ttl_s"])
                self._until = time.monotonic() + self._lease_s
            if not self._link.send(raw) and not header.get("more"):
                problem = {"kind": "agent_gone", "message": agent_log()}
                guest.send(frame({"id": header["id"], "error": problem}))
            return
        try:
            answer = self._do(guest, op, header, raw)
        except OSError as error:
            answer = {"error": {"kind": "os", "errno": error.errno, "message": str(error)}}
        except (KeyError, TypeError, ValueError, tarfile.TarError) as error:
            answer = {"error": {"kind": "bad_request", "message": repr(error)}}
        guest.send(frame({**answer, "id": header["id"]}))

    def _do(self, guest: Guest, op: str, header: Header, raw: bytes) -> Header:
        if op == "witness.hello":
            return {"witness": self.instance, "agent_gone": self._link.gone, "log": agent_log()}
        if op == "witness.put":
            _put(int(header["offset"]), raw[8 + struct.unpack_from(">I", raw)[0] :])
            return {}
        if op == "witness.lay":
            with self._laying:
                return self._lay(header)
        if op == "witness.diff":
            return self._diff(guest, header)
        if op == "witness.end":
            return self._take_leave()
        return {"error": {"kind": "bad_request", "message": f"unknown operation {op!r}"}}

    def _lay(self, header: Header) -> Header:
        """Unpack what was put, and give the agent its workdir. Once: asked again, it is the same."""
        if self._lower is None:
            if header["size"]:
                _unpack(int(header["size"]), header["sha256"])
            lower = LOWER if header["files"] else str(self._facts["workdir"])
            problem = self._fill(lower)
            if problem is not None:
                return {"error": problem}
            self._lower = lower
        return {}

    def _fill(self, lower: str) -> Header | None:
        """Lay the tree `lower` over the workdir, through the agent: its container pays for the memory."""
        changes: List[Header] = []  # noqa: UP006
        contents: List[bytes] = []  # noqa: UP006
        size = 0

        def flush() -> Header | None:
            answer = self._link.ask({"op": "apply", "changes": changes}, b"".join(contents))
            changes.clear()
            contents.clear()
            found: Header | None = answer.get("error")
            return found

        for root, folders, files in os.walk(lower):
            for name in sorted([*folders, *files]):
                path = os.path.join(root, name)
                facts = os.lstat(path)
                row: Header = {"path": os.path.relpath(path, lower), "mode": stat.S_IMODE(facts.st_mode)}
                content = b""
                if stat.S_ISDIR(facts.st_mode):
                    row["kind"] = "dir"
                elif stat.S_ISLNK(facts.st_mode):
                    row["kind"], content = "symlink", os.fsencode(os.readlink(path))
                elif stat.S_ISREG(facts.st_mode):
                    if facts.st_size > LAY_FILE_BYTES:
                        return {
                            "kind": "workdir_too_large",
                            "message": f"{path} has {facts.st_size} bytes; a file of the workdir may have "
                            f"{LAY_FILE_BYTES}",
                        }
                    with open(path, "rb") as file:
                        row["kind"], content = "file", file.read()
                else:
                    continue
                row["size"] = len(content)
                changes.append(row)
                contents.append(content)
                size += len(content) + 256
                if size > LAY_BYTES:
                    problem = flush()
                    if problem is not None:
                        return problem
                    size = 0
        return flush()

    def _diff(self, guest: Guest, header: Header) -> Header:
        """Stream the changed contents as parts of the answer, so that the pod need not hold them all."""
        trees = importlib.import_module("trees")
        agent = importlib.import_module("agent")
        if self._lower is None:
            raise ValueError("the workdir is not laid yet")
        rows: List[Any] = []  # noqa: UP006

        def add(change: Any) -> None:
            size = None if change.content is None else len(change.content)
            rows.append([change.path, change.kind, change.mode, size])
            view = memoryview(change.content or b"")
            while view:
                guest.send(frame({"id": header["id"], "more": True}, bytes(view[: agent.FRAME_BODY_BYTES])))
                view = view[agent.FRAME_BODY_BYTES :]

        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        lower = self._lower if os.path.isdir(self._lower) else LOWER
        upper = os.open(DISK + "/work", flags)
        below = os.open(lower, flags)
        try:
            trees.walk(upper, below, add, whole=True)
        except trees.TooLarge as large:
            return {"error": {"kind": "diff_too_large", "message": large.message, "evidence": large.evidence}}
        finally:
            os.close(upper)
            os.close(below)
        return {"changes": rows}


def _listen(port: int) -> socket.socket:
    """On every address of the pod, in both families where there are two."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=16)
    return socket.create_server(("", port), backlog=16)


def _put(offset: int, data: bytes) -> None:
    fd = os.open(PLACE + "/incoming", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(fd, data, offset)
    finally:
        os.close(fd)


def _unpack(size: int, sha256: str) -> None:
    """The archive of the gateway (trusted; checked for completeness) to the pod's own disk."""
    path = PLACE + "/incoming"
    seen = hashlib.sha256()
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            seen.update(chunk)
    if os.path.getsize(path) != size or seen.hexdigest() != sha256:
        raise ValueError("the archive arrived damaged")
    with tarfile.open(path) as tar:
        if hasattr(tarfile, "fully_trusted_filter"):
            tar.extractall(PLACE, filter="fully_trusted")
        else:
            tar.extractall(PLACE)
    os.unlink(path)


# ------------------------------------------------------------------------------------------------- the others


def be_agent() -> None:
    """Wait for the pod to be prepared, then be the agent."""
    until = time.monotonic() + AGENT_START_S
    while not os.path.exists(RUN + "/start.json"):
        if time.monotonic() > until:
            raise Broken("unprepared", "The witness did not prepare the pod in time")
        time.sleep(0.01)
    with open(RUN + "/start.json") as file:
        start = json.load(file)
    settings = start["settings"]
    settings["path"] = os.environ.get("PATH") or settings["path"]
    settings["env"] = {**_image_environment(), **settings["env"]}
    with open(RUN + "/start.json", "w") as file:
        json.dump(start, file)
    importlib.import_module("docker_init").main()


def _image_environment() -> dict[str, str]:
    """What the image sets; not what the kubelet adds."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("PATH", "HOME", "HOSTNAME", "PWD", "SHLVL", "_")
        and not name.startswith("KUBERNETES_")
    }


def relay() -> None:
    """Standard input to the door, and back, until either ends."""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    door.connect(DOOR)
    there = door.fileno()
    while True:
        ready, _, _ = select.select([0, there], [], [])
        for source, target in ((0, there), (there, 1)):
            if source in ready:
                data = os.read(source, 1 << 18)
                if not data:
                    return
                view = memoryview(data)
                while view:
                    view = view[os.write(target, view) :]


def main(role: str) -> int:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    try:
        if role == "relay":
            relay()
        elif role == "agent":
            be_agent()
        else:
            Witness(json.loads(os.environ.pop("AGENTRL_POD"))).run()
    except Broken as broken:
        sys.stderr.write(json.dumps({"code": broken.code, "message": str(broken)}) + "\n")
        return 70
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
