"""What tests of several folders start from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from disks import mounted

from agentrl.errors import SandboxError
from envs.sandbox import images
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


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A disk of 48 MiB; with less than 8 free nobody new is let in, with less than 16 what nobody uses
    goes."""
    monkeypatch.setattr(images, "LOW_BYTES", 8 << 20)
    with mounted(tmp_path / "disk", mib=48) as disk:
        yield disk
