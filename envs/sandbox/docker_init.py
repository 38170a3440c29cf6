"""PID 1 of a Docker sandbox: hardens itself further than the engine did, then is the agent.

Runs inside the container under any Python >= 3.8, beside `agent.py`; reads what to be from `start.json` in
the folder that it shares with the host, and removes that file, so that no setting stands in a command line
and a container that somebody restarts does not come back to life. Its own errors go to `agent.log` there.
"""

import base64
import ctypes
import importlib
import json
import os
import socket
import sys

FOLDER = "/opt/agentrl/run"
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2


def install_filter(code: bytes) -> None:
    """A seccomp filter on top of the engine's own, for this process and all that come from it."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    program = Program(len(code) // 8, ctypes.addressof(buffer))
    for arguments in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl {}".format(arguments[0]))  # noqa: UP032


def main() -> None:
    log = os.open(FOLDER + "/agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    with open(FOLDER + "/start.json", encoding="utf-8") as file:
        start = json.load(file)
    os.unlink(FOLDER + "/start.json")
    os.environ.clear()
    agent = importlib.import_module(
        "agent"
    )  # It lies beside this file in the container, outside of any package.
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(FOLDER + "/starting")
    os.chmod(FOLDER + "/starting", 0o600)
    os.chown(FOLDER + "/starting", start["owner"], -1)
    listener.listen(8)
    os.umask(0o022)
    install_filter(base64.b64decode(start["filter"]))
    settings = agent.Settings(**start["settings"])
    agent.harden(settings)
    os.rename(FOLDER + "/starting", FOLDER + "/agent")
    agent.Agent(settings, listener=listener).run()


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    main()
