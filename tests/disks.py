"""Small disks that a test fills up, and things on them that nobody has used for long."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from envs.sandbox import images


@contextlib.contextmanager
def mounted(folder: Path, *, mib: int) -> Iterator[Path]:
    """A disk of that size, in memory. Skips where none can be mounted."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    folder.mkdir(parents=True, exist_ok=True)
    what = ["-t", "tmpfs", "-o", f"size={mib}m", "tmpfs"]
    done = subprocess.run(["mount", *what, str(folder)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode()[-200:]}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)


def fill(disk: Path, *, free_mib: float) -> Path:
    """Somebody else's file, that leaves so much."""
    free, _ = images.free_bytes(disk)
    file = disk / "somebody's"
    with file.open("wb") as out:
        left = free - int(free_mib * 2**20)
        while left > 0:
            left -= out.write(bytes(min(left, 1 << 20)))
    return file


def aged(state: Path, thing: Path, age_s: float) -> None:
    """It was last asked for so long ago."""
    mark = state / "used" / thing.relative_to(state)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    os.utime(mark, (time.time() - age_s,) * 2)
