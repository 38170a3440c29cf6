"""Which Python the sandboxes of this machine get: the one below any virtual environment, standard library
only."""

from __future__ import annotations

import os
import sys

from agentrl.errors import SandboxError


def base_python() -> str:
    """Path of the interpreter, links resolved. Raises `SandboxError` when it can not be run."""
    path = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    if not os.access(path, os.X_OK):
        raise SandboxError(
            f"The Python interpreter {path} can not be run.",
            fix="Run agentrl with a Python that this user may execute.",
            code="no_python",
            phase="start",
        )
    return path
