"""The agent alone: over a listener with reconnects and a token, and what it says when its helper dies."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.sandbox import agent
from envs.sandbox.contract import ExecRequest
from envs.sandbox.interpreter import base_python

DEADLINE_S = 20.0


class Client:
    """A blocking end of the protocol."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.connection.settimeout(DEADLINE_S)
        self._inbox = agent.Inbox()
        self._number = 0

    def send(self, body: bytes = b"", **header: Any) -> None:
        self._number += 1
        for piece in agent.frames({"id": self._number, **header}, body):
            self.connection.sendall(piece)

    def receive(self) -> tuple[dict[str, Any], bytes]:
        while True:
            data = self.connection.recv(1 << 20)
            if not data:
                raise EOFError
            for message in self._inbox.feed(data):
                return message

    def ask(self, body: bytes = b"", **header: Any) -> tuple[dict[str, Any], bytes]:
        self.send(body, **header)
        return self.receive()

    def close(self) -> None:
        self.connection.close()


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Path]:
    """An agent on a unix socket that wants a token and outlives its connection by two seconds."""
    path = tmp_path / "agent.sock"
    config = {
        "workdir": str(tmp_path),
        "home": str(tmp_path),
        "orphan_grace_s": 2.0,
        "rlimits": {"FSIZE": 512 * 1024},
    }
    process = subprocess.Popen(
        [base_python(), "-I", "-S", agent.__file__, "--config", json.dumps(config), "--listen", str(path)],
        env={"AGENTRL_TOKEN": "right", "PATH": "/usr/bin:/bin"},
    )
    until = time.monotonic() + DEADLINE_S
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)
    yield path
    process.kill()
    process.wait()


def connect(path: Path, token: str = "right") -> Client:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    until = time.monotonic() + DEADLINE_S
    while True:
        try:
            connection.connect(str(path))
            break
        except ConnectionRefusedError:  # Its path is there before it listens.
            if time.monotonic() > until:
                connection.close()
                raise
            time.sleep(0.01)
    client = Client(connection)
    if token:
        client.send(op="hello", token=token)
    return client


def run(client: Client, exec_id: str, command: str) -> None:
    client.send(op="exec", exec_id=exec_id, command=command, timeout_s=10)


def test_a_dropped_connection_loses_nothing(listening: Path, tmp_path: Path) -> None:
    first = connect(listening)
    instance = first.receive()[0]["instance"]
    run(first, "1", "sleep 0.5; echo x >> count; cat count")
    time.sleep(0.2)
    first.close()
    second = connect(listening)
    assert second.receive()[0]["instance"] == instance
    run(second, "1", "echo another command under the same id >> count")
    header, body = second.receive()
    assert (header["status"], header["exit_code"], body) == ("exited", 0, b"x\n")
    second.close()
    third = connect(listening)
    third.receive()
    run(third, "1", "")
    assert third.receive()[1] == b"x\n"
    third.close()
    assert (tmp_path / "count").read_bytes() == b"x\n"


@pytest.mark.parametrize("token", ["wrong", ""])
def test_without_the_token_there_is_no_answer(listening: Path, token: str) -> None:
    client = connect(listening, token)
    with pytest.raises((EOFError, OSError)):
        client.ask(op="probe")
    client.close()
    good = connect(listening)
    assert good.receive()[0]["protocol"] == agent.PROTOCOL
    good.close()


def test_an_agent_that_nobody_comes_back_to_ends_with_its_commands(listening: Path, tmp_path: Path) -> None:
    client = connect(listening)
    client.receive()
    run(client, "1", "setsid sleep 300 & echo $! > pid; sleep 300")
    until = time.monotonic() + DEADLINE_S
    while not (tmp_path / "pid").exists() and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.1)
    pid = int((tmp_path / "pid").read_text())
    client.close()
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_a_dead_supervisor_leaves_an_unknown_outcome_and_no_processes(
    listening: Path, tmp_path: Path
) -> None:
    client = connect(listening)
    client.receive()
    run(client, "1", "echo $PPID > ppid; echo $$ > pid; sleep 300; true")
    until = time.monotonic() + DEADLINE_S
    while not (tmp_path / "pid").exists() and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.1)
    os.kill(int((tmp_path / "ppid").read_text()), signal.SIGKILL)
    header, _ = client.receive()
    assert (header["status"], header["exit_code"], header["reason"]) == ("unknown", None, "supervisor_died")
    assert header["kill_verified"] is True
    assert not Path(f"/proc/{int((tmp_path / 'pid').read_text())}").exists()
    client.close()


def test_output_beyond_head_and_tail_can_be_read_from_the_spool(listening: Path) -> None:
    client = connect(listening)
    client.receive()
    run(client, "1", "seq 1000000")
    header, _ = client.receive()
    whole = b"".join(b"%d\n" % i for i in range(1, 1000001))
    assert header["stdout"]["total"] == header["stdout"]["spooled"] == len(whole)
    facts, middle = client.ask(op="output", exec_id="1", stream="stdout", offset=3_000_000, max_bytes=100_000)
    assert facts["size"] == len(whole)
    assert middle == whole[3_000_000:3_100_000]
    client.close()


def test_old_results_are_dropped_but_never_run_again(listening: Path, tmp_path: Path) -> None:
    client = connect(listening)
    client.receive()
    for number in range(70):  # 70 x 256 KiB is more than is kept
        run(client, str(number), "echo x >> ran; head -c 300000 /dev/zero")
        assert client.receive()[0]["exit_code"] == 0
    run(client, "0", "true")
    assert client.receive()[0]["error"]["kind"] == "expired"
    assert len((tmp_path / "ran").read_text().split()) == 70
    client.close()


def test_a_corrupt_upload_leaves_the_old_file(listening: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    client = connect(listening)
    client.receive()
    answer, _ = client.ask(b"new", op="write", path="file", mode=0o644, sha256="0" * 64)
    assert answer["error"]["kind"] == "corrupt"
    assert (tmp_path / "file").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["agent.sock", "file"]
    client.close()


def test_a_write_that_is_asked_for_again_is_done_and_needs_no_room(listening: Path, tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    wanted = {"op": "write", "path": "file", "mode": 0o644, "sha256": hashlib.sha256(data).hexdigest()}
    client = connect(listening)
    client.receive()

    def written() -> int:
        assert client.ask(data, **wanted)[0]["size"] == len(data)
        assert (tmp_path / "file").read_bytes() == data
        return (tmp_path / "file").lstat().st_ino

    first = written()
    os.utime(tmp_path / "file", (1, 1))
    assert written() == first
    assert (tmp_path / "file").stat().st_mtime > 1
    (tmp_path / "file").chmod(0o600)
    assert written() != first
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644
    (tmp_path / "file").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    written()
    os.rename(tmp_path / "file", tmp_path / "elsewhere")
    (tmp_path / "file").symlink_to("elsewhere")
    written()
    assert not (tmp_path / "file").is_symlink()
    os.link(tmp_path / "file", tmp_path / "second")
    written()
    assert (tmp_path / "file").stat().st_nlink == 1
    client.close()


@settings(deadline=None)
@given(
    bodies=st.lists(st.binary(max_size=2000), min_size=1, max_size=5),
    large=st.integers(min_value=0, max_value=2 * agent.FRAME_BODY_BYTES + 1),
    cuts=st.lists(st.integers(min_value=1, max_value=5000), max_size=20),
)
def test_messages_survive_any_cutting_of_the_stream(bodies: list[bytes], large: int, cuts: list[int]) -> None:
    sent = [({"id": i, "n": i}, body) for i, body in enumerate([*bodies, bytes(large)])]
    stream = b"".join(piece for header, body in sent for piece in agent.frames(header, body))
    inbox, received, at = agent.Inbox(), [], 0
    for cut in [*cuts, len(stream)]:
        received += inbox.feed(stream[at : at + cut])
        at += cut
    assert received == sent


def test_frames_are_small_so_that_no_answer_holds_up_another() -> None:
    pieces = agent.frames({"id": 1}, bytes(10 * agent.FRAME_BODY_BYTES))
    assert len(pieces) == 10
    assert max(len(piece) for piece in pieces) < agent.FRAME_BODY_BYTES + 1024


def test_the_agent_is_one_file_that_python_3_8_can_read() -> None:
    source = Path(agent.__file__).read_text()
    tree = ast.parse(source, feature_version=(3, 8))
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else alias.name) or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not [name for name in imported if name.split(".")[0] in ("agentrl", "envs", "pydantic")]


def test_commands_that_are_followed_do_not_use_up_the_descriptors(listening: Path, tmp_path: Path) -> None:
    client = connect(listening)
    pid = client.receive()[0]["pid"]

    def followed(number: int) -> None:
        header = {"op": "exec", "exec_id": str(number), "command": "echo on", "timeout_s": 10, "follow": True}
        assert client.ask(**header)[0]["status"] == "exited"

    for number in range(agent.KEPT_SPOOLS + 6):
        followed(number)
    held = len(os.listdir(f"/proc/{pid}/fd"))
    for number in range(1000, 1030):
        followed(number)
    assert abs(len(os.listdir(f"/proc/{pid}/fd")) - held) <= 4
    newest, data = client.ask(op="output", exec_id="1029", stream="stdout", offset=0, max_bytes=100)
    assert (newest["finished"], data) == (True, b"on\n")
    assert client.ask(op="output", exec_id="0", stream="stdout", offset=0, max_bytes=9)[1] == b"on\n"
    client.close()


def test_requests_that_make_no_sense_are_refused_and_the_agent_goes_on(listening: Path) -> None:
    client = connect(listening)
    client.receive()
    for header in (
        {"op": "exec", "exec_id": "a", "timeout_s": 1},
        {"op": "exec", "exec_id": "a", "argv": [], "timeout_s": 1},
        {"op": "exec", "exec_id": "a", "command": "true", "timeout_s": float("nan")},
        {"op": "exec", "exec_id": "a", "command": "true", "timeout_s": "soon"},
        {"op": "exec", "command": "true", "timeout_s": 1},
        {"op": "exec", "exec_id": "a", "command": "true", "timeout_s": 1, "cwd": "a\0b"},
        {"op": "read", "path": "a\0b", "max_bytes": 1},
        {"op": "read", "path": "\ud800", "max_bytes": 1},
        {"op": "signal", "exec_id": "a", "number": 999},
        {"op": "lease", "ttl_s": "long"},
        {"op": "nothing"},
    ):
        answer, _ = client.ask(**header)
        assert answer["error"]["kind"] in ("bad_request", "not_found"), (header, answer)
    run(client, "a", "echo on")  # none of them has used up the id
    assert client.receive()[1] == b"on\n"
    client.close()


def test_what_a_shell_carries_is_no_file_of_its_user(listening: Path) -> None:
    client = connect(listening)
    client.receive()

    def ask(exec_id: str, command: str) -> tuple[dict[str, Any], bytes]:
        return client.ask(op="exec", exec_id=exec_id, command=command, timeout_s=20, shell="main")

    assert ask("1", "V=$(head -c 1M /dev/zero | tr '\\0' x)")[0]["exit_code"] == 0
    header, body = ask("2", "echo ${#V}; head -c 1M /dev/zero > big")
    assert (header["exit_code"], header["shell_restarted"]) == (128 + signal.SIGXFSZ, False)
    assert body.startswith(b"1048576\n")
    assert ask("3", "ls /proc/self/fd")[1].split() == [b"0", b"1", b"2", b"3"], "nor open in its programs"
    client.close()


def test_a_request_without_a_shell_is_the_one_that_it_was() -> None:
    """Digests of requests outlive the version of this program that made them."""
    plain = ExecRequest(exec_id="e", command="true")
    assert plain.digest() == "641226017eb9baa36aa06ad36f395f2f8193b0809612634ed489d5d997b5769a"
    dressed = ExecRequest(
        exec_id="e",
        argv=("ls", "-l"),
        cwd="pkg",
        env={"B": "2", "A": "1"},
        stdin=b"x",
        timeout_s=5,
        user="root",
        follow=True,
        report_fd=True,
    )
    assert dressed.digest() == "548888157d0be5c0581d67a72334763d74df87d068b660ebb7b9e1a4e9e769de"
    named = [ExecRequest(exec_id="e", command="true", shell=name).digest() for name in ("a", "b")]
    assert len({plain.digest(), *named}) == 3
