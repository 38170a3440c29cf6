"""The time at which a task's sandboxes live, where a task names one: canned certificates and tokens expire,
and what passed once no longer does.

The kernel has no namespace for the time of day. So a library (libfaketime, an extra: GPL-2, not part of this
package) is mounted read-only beside the image and preloaded into every command, of the policy as of the
verifier. One offset holds for all commands of a sandbox, so the clock goes on from each to the next.
Deadlines, timeouts and durations are measured from outside, by clocks that nobody shifts; inside, the
monotonic clock and the times of files are the machine's.

Invariant: where the clock does not stand at the task's time (another libc or architecture, a static Python or
`date`), that is seen before anything else runs and is `clock_not_held`: never an attempt, never a reward. Not
seen: a program of the task's own that is linked statically, or that asks the kernel itself.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import math
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from agentrl.errors import SandboxError, TaskError
from agentrl.types import Task
from envs.sandbox.contract import ExecRequest, ExecResult, Mount

TARGET = "/agentrl-clock"
LIBRARY = "libfaketime.so.1"
TOLERANCE_S = 60.0
"""Between this machine's clock and that of a sandbox's: they may be two machines."""
PROBE_S = 30.0
_SHARED = "agentrl.time"
"""Name of what the library's processes share in a sandbox. Left alone each makes its own: those of another
user can not open it and end, and a shell forgets that it made one."""
_SHARE = f"""\
import os
for name, kind in zip(os.environ["FAKETIME_SHARED"].split(), ("sem.", "")):
    made = "/dev/shm/" + kind + name[1:]
    os.chmod(made, 0o666)
    os.replace(made, "/dev/shm/" + kind + "{_SHARED}")
"""
"""Makes it, once: what the library has made for this process becomes everybody's."""
_PROBE = (
    "printf '%(%s)T\\n' -1 >&3 && { ! command -v date >/dev/null || date +%s >&3; } && "
    "exec python3 -I -S -c 'import os, time; os.write(3, b\"%d\\n\" % int(time.time()))'"
)
"""What time it is: by the shell, by the program that scripts ask, where there is one, and by Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """One sandbox's clock: `starts` is the task's, `offset_s` what lies between it and the real one."""

    starts: datetime
    offset_s: int
    preload: str
    mounts: tuple[Mount, ...]

    @classmethod
    def of(cls, task: Task, *, noted: str | None = None) -> Clock | None:
        """From now on, or as a process before this one `noted`; None: the task asks for none. Raises
        `SandboxError` where the library is not installed."""
        if task.clock is None:
            return None
        own = task.sandbox.env.get("LD_PRELOAD", "")
        return cls(
            starts=task.clock,
            offset_s=math.ceil(task.clock.timestamp() - time.time()) if noted is None else int(noted),
            preload=f"{TARGET}/{LIBRARY}" + (f":{own}" if own else ""),
            mounts=(Mount(source=str(_library()), target=TARGET),),
        )

    def dressed(self, request: ExecRequest) -> ExecRequest:
        """The command under this clock."""
        ours = {
            "LD_PRELOAD": self.preload,
            "FAKETIME": f"{self.offset_s:+d}",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
            "FAKETIME_SHARED": f"/{_SHARED} /{_SHARED}",
        }
        return replace(request, env={**request.env, **ours})

    async def hold(self, exec: Callable[[ExecRequest], Awaitable[ExecResult]], exec_id: str) -> None:
        """Look, by a command under it (`exec` is the witness's), whether it stands where it should. Raises
        `TaskError`."""
        share = ExecRequest(
            exec_id=f"{exec_id}-share",
            argv=("python3", "-I", "-S", "-c", _SHARE),
            timeout_s=PROBE_S,
            user="root",
        )
        look = ExecRequest(exec_id=exec_id, argv=("bash", "-c", _PROBE), timeout_s=PROBE_S, report_fd=True)
        result = await exec(share)
        if result.exit_code == 0:
            result = await exec(look)
        now = time.time() + self.offset_s
        seen = (result.report or b"").split()
        if result.exit_code == 0 and seen and all(_near(each, now) for each in seen):
            return
        raise TaskError(
            f"The clock of the sandbox does not stand at the task's {self.starts.isoformat()}.",
            fix="Use an image for this machine whose libc is glibc and whose bash, date and python3 are"
            " linked to it, or leave metadata.agentrl.clock away.",
            code="clock_not_held",
            phase="clock",
            evidence={
                "expected": int(now),
                "seen": " ".join(each.decode("ascii", "replace")[:20] for each in seen[:2]),
                "exit_code": result.exit_code,
                "said": result.stderr.text()[-200:],
            },
        )


def _near(said: bytes, now: float) -> bool:
    return said.isdigit() and abs(int(said) - now) < TOLERANCE_S


def mounts_of(clock: Clock | None) -> tuple[Mount, ...]:
    """What a sandbox is given to live at a task's time; nothing where the task has none."""
    return () if clock is None else clock.mounts


@functools.cache
def _library() -> Path:
    """A folder of this process's own that holds nothing but the library."""
    package = importlib.util.find_spec("libfaketime")
    places = () if package is None else package.submodule_search_locations or ()
    found = [path for place in places for path in Path(place).rglob(LIBRARY)]
    if not found:
        raise SandboxError(
            "The task has a clock of its own, and the library that holds it is not installed here.",
            fix="Install it where sandboxes are made: `pip install 'agentrl[clock]'`.",
            code="clock_missing",
            phase="clock",
            retryable=False,
        )
    folder = Path(tempfile.mkdtemp(prefix="agentrl-clock-"))
    atexit.register(shutil.rmtree, folder, True)
    shutil.copyfile(found[0], folder / LIBRARY)
    (folder / LIBRARY).chmod(0o755)
    folder.chmod(0o755)
    return folder
