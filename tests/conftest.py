"""What tests of several folders start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.errors import SandboxError
from envs.sandbox.local import LocalBackend


@pytest.fixture
def backend(tmp_path: Path) -> LocalBackend:
    """Sandboxes of this machine's kernel, or a reason to skip."""
    backend = LocalBackend(tmp_path / "state")
    try:
        backend.check()
    except SandboxError as error:
        pytest.skip(str(error))
    return backend
