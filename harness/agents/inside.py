"""The far end of the bridge: starts an agent in a sandbox and lets it reach its model on the loopback.

One self-contained file on the standard library (Python >= 3.8): it is written into the sandbox and run there.
It listens on a free port of 127.0.0.1, starts the agent with that as its base URL, and lays each request of
the agent into a folder as a file; the answer comes back as another file. Whoever reads the named pipe `next`
is told what is new: `+N` (a request), `-N` (its client left), or nothing after a while.

    python3 inside.py FOLDER SECONDS -- COMMAND…

Its exit status is the agent's. A file `stop` in the folder ends the agent (TERM, then KILL).
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LOOK_S = 0.005
"""Between two looks for an answer."""
QUIET_S = 15.0
"""A reader of the pipe is never kept longer than this."""
TERM_S = 2.0
PLACES = {
    "OPENAI_BASE_URL": "/v1",
    "OPENAI_API_BASE": "/v1",
    "ANTHROPIC_BASE_URL": "",
    "AGENTRL_BASE_URL": "",
}
"""Where agents look for the address of their model."""


class Mailbox:
    """Requests out, answers in."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.news: queue.Queue[str] = queue.Queue()
        self.lock = threading.Lock()
        self.count = 0
        for name in ("out", "in"):
            os.makedirs(os.path.join(folder, name), exist_ok=True)
        os.mkfifo(os.path.join(folder, "next"))
        threading.Thread(target=self.tell, daemon=True).start()

    def post(self, head: dict[str, Any], body: bytes) -> int:
        with self.lock:
            number = self.count
            self.count += 1
        path = os.path.join(self.folder, "out", str(number))
        with open(path + ".part", "wb") as file:
            file.write(json.dumps(head).encode() + b"\n" + body)
        os.rename(path + ".part", path)
        self.news.put(f"+{number}")
        return number

    def tell(self) -> None:
        """Everything new to each reader of the pipe; what a reader did not take goes to the next one."""
        waiting: list[str] = []
        while True:
            try:
                waiting.append(self.news.get(timeout=0 if waiting else QUIET_S))
                continue
            except queue.Empty:
                pass
            try:
                pipe = os.open(os.path.join(self.folder, "next"), os.O_WRONLY)
                while not self.news.empty():
                    waiting.append(self.news.get())
                try:
                    os.write(pipe, ("\n".join(waiting) + "\n").encode())
                    waiting = []
                finally:
                    os.close(pipe)
            except OSError:
                time.sleep(LOOK_S)

    def answer(self, number: int, connection: socket.socket) -> tuple[dict[str, Any], bytes] | None:
        """The answer's head and body; None when the client left before."""
        path = os.path.join(self.folder, "in", str(number))
        while True:
            try:
                with open(path, "rb") as file:
                    head, _, body = file.read().partition(b"\n")
                os.unlink(path)
                os.unlink(os.path.join(self.folder, "out", str(number)))
                return json.loads(head.decode()), body
            except FileNotFoundError:
                pass
            if left(connection):
                self.news.put(f"-{number}")
                return None
            time.sleep(LOOK_S)


def left(connection: socket.socket) -> bool:
    """Whether the client closed its side."""
    readable, _, _ = select.select([connection], [], [], 0)
    if not readable:
        return False
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return True


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    mailbox: Mailbox

    def carry(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if (self.headers.get("transfer-encoding") or "").lower() == "chunked":
            body = self.chunks()
        head = {
            "method": self.command,
            "path": self.path,
            "headers": {name.lower(): value for name, value in self.headers.items()},
        }
        answer = self.mailbox.answer(self.mailbox.post(head, body), self.connection)
        if answer is None:
            self.close_connection = True
            return
        told, content = answer
        self.send_response(told["status"])
        for name, value in told["headers"].items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_DELETE = carry

    def chunks(self) -> bytes:
        parts = []
        while True:
            size = int(self.rfile.readline().split(b";")[0], 16)
            parts.append(self.rfile.read(size))
            self.rfile.readline()
            if size == 0:
                return b"".join(parts)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def end(process: subprocess.Popen[bytes]) -> None:
    for number, seconds in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, TERM_S)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(seconds)
            return
        except subprocess.TimeoutExpired:
            pass


def main(folder: str, seconds: float, command: list[str]) -> int:
    os.makedirs(folder, exist_ok=True)
    Handler.mailbox = Mailbox(folder)
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    env = dict(os.environ, **{name: url + path for name, path in PLACES.items()})
    process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + seconds
    stop = os.path.join(folder, "stop")
    while process.poll() is None:
        if time.monotonic() > deadline or os.path.exists(stop):
            end(process)
            return 124
        time.sleep(0.02)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


if __name__ == "__main__":
    split = sys.argv.index("--")
    sys.exit(main(sys.argv[1], float(sys.argv[2]), sys.argv[split + 1 :]))
