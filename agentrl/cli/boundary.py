"""The one place where an error becomes a sentence and an exit code.

0 done · 1 what was asked did not succeed · 2 the input is wrong · 130 stopped by Ctrl-C. A traceback is shown
only under `AGENTRL_DEBUG=1`.
"""

from __future__ import annotations

import functools
import os
import select
import sys
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer

P = ParamSpec("P")
R = TypeVar("R")

STOPPED = 130
USER = 2
FAILED = 1


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """A command whose errors end in one sentence on stderr and the exit code that belongs to them."""

    @functools.wraps(command)
    def inner(*args: P.args, **kwargs: P.kwargs) -> R:
        from agentrl.config import environment
        from agentrl.errors import AgentRLError

        try:
            return command(*args, **kwargs)
        except typer.Exit:
            raise
        except KeyboardInterrupt:
            _tell("Stopped.")
            raise typer.Exit(STOPPED) from None
        except Exception as error:  # the outermost boundary
            if isinstance(error, BrokenPipeError) and _reader_gone():
                _let_go()
                raise typer.Exit(0) from None
            if environment("DEBUG") == "1":
                traceback.print_exception(error)
            if isinstance(error, AgentRLError):
                _tell(str(error))
                raise typer.Exit(error.exit_code) from None
            if isinstance(error, OSError):
                _tell(_about_file(error))
                raise typer.Exit(USER if error.filename is not None else FAILED) from None
            told = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            _tell(f"Internal error, {told}. Set AGENTRL_DEBUG=1 for the traceback and report it.")
            raise typer.Exit(FAILED) from None

    return inner


def _about_file(error: OSError) -> str:
    reason = (error.strerror or type(error).__name__).rstrip(".")
    if error.filename is None:
        return f"The system refused: {reason}."
    return f"{os.fsdecode(error.filename)}: {reason}. Check the path and its permissions."


def _tell(sentence: str) -> None:
    sys.stderr.write(f"agentrl: {' '.join(sentence.split())}\n")


def _reader_gone() -> bool:
    """Whether it is our own stdout that nobody reads, and not some pipe of a sandbox."""
    try:
        watched = sys.stdout.fileno()
    except OSError:
        return False
    poll = select.poll()
    poll.register(watched, select.POLLERR)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _let_go() -> None:
    """Nobody reads any more: point stdout away, so that its flush at exit is quiet too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
