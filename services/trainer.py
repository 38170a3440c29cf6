"""A training process: one run in this process, stopped cleanly by SIGINT or SIGTERM.

A scheduler (systemd, Kubernetes) ends a process with SIGTERM; here that is the same as Ctrl-C: attempts
are cancelled, sandboxes end, what is finished is kept, and the run can be resumed. A second signal ends it
at once. A shell starts what a script puts into the background with SIGINT ignored; a run listens all the
same, since what is ignored could not be passed on.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from agentrl.config import RunConfig
from agentrl.training.events import Listener
from agentrl.training.loop import RunSummary, follow, run


def train(config: RunConfig, *, listener: Listener, resume: bool = False) -> RunSummary:
    """Do the run; raises what `agentrl.training.loop.run` raises. Call it from the main thread."""
    with _term_is_interrupt():
        return run(config, listener=listener, resume=resume)


def help_train(config: RunConfig) -> None:
    """Be a further rank of a run that `torchrun` started (see `agentrl.training.ranks`). Signals come to all
    ranks; rank 0 stops the run, and this one when it is stopped."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: None)
    follow(config)


@contextmanager
def _term_is_interrupt() -> Iterator[None]:
    def interrupt(_number: int, _frame: FrameType | None) -> None:
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, interrupt)
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, before)
