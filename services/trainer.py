"""A training process: one run in this process, stopped cleanly by SIGINT or SIGTERM.

A scheduler (systemd, Kubernetes) ends a process with SIGTERM; here that is the same as Ctrl-C: attempts
are cancelled, sandboxes end, what is finished is kept, and the run can be resumed. A second signal ends it
at once.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from agentrl.config import RunConfig
from agentrl.training.events import Listener
from agentrl.training.loop import RunSummary, run


def train(config: RunConfig, *, listener: Listener, resume: bool = False) -> RunSummary:
    """Do the run; raises what `agentrl.training.loop.run` raises. Call it from the main thread."""
    with _term_is_interrupt():
        return run(config, listener=listener, resume=resume)


@contextmanager
def _term_is_interrupt() -> Iterator[None]:
    def interrupt(_number: int, _frame: FrameType | None) -> None:
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
