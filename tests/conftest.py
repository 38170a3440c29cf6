"""What tests of several folders start from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from disks import mounted

from agentrl.errors import SandboxError
from envs.sandbox import images
from envs.sandbox.local import LocalBackend

MOST_WORKERS = 4
"""Each loads torch and starts sandboxes of its own."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The whole suite runs on several processes; what was asked for by name, mark or word in this one. So do
    the suites of an engine and of a cluster: those are shared."""
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if not whole or config.option.markexpr or config.option.keyword:
        return 0
    workers = min(MOST_WORKERS, os.cpu_count() or 1)
    return workers if workers > 1 else 0


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
