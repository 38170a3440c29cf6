"""The writable places of a Docker sandbox, made on this machine and bound into it: one tmpfs of the task's
disk size for the workdir, /tmp, /var/tmp, /dev/shm, the home, and /logs, where only the sandbox's own root
writes (verifiers).

The workdir is an overlay of the prepared tree and a folder of that tmpfs, so the diff is read from the host,
by the same code as for local sandboxes, also after the container is gone. Needs root on the engine's machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from envs.sandbox import namespaces as ns

POLICY_ID = 1000
HOME = "/home/policy"


def can_mount() -> bool:
    """Whether this process may make the mounts."""
    return os.geteuid() == 0 and ns.has_capability(ns.CAP_SYS_ADMIN)


def make(folder: Path, lower: Path, *, workdir: str, disk_mib: int) -> tuple[dict[str, str], int]:
    """Mount below `folder`. Returns {path inside: folder here} and a descriptor of the upper directory, which
    keeps the changes alive until it is closed. Raises OSError, with nothing mounted."""
    disk, work = folder / "disk", folder / "work"
    disk.mkdir()
    work.mkdir()
    flags = ns.MS_NOSUID | ns.MS_NODEV
    handles: list[int] = []
    try:
        ns.mount("tmpfs", str(disk), "tmpfs", flags, f"size={disk_mib}m,nr_inodes={disk_mib * 256},mode=755")
        for name, uid, mode in (
            ("tmp", 0, 0o1777),
            ("var-tmp", 0, 0o1777),
            ("shm", 0, 0o1777),
            ("logs", 0, 0o755),
            ("home", POLICY_ID, 0o700),
            ("upper", POLICY_ID, 0o755),
            ("overlay", 0, 0o755),
        ):
            (disk / name).mkdir()
            os.chown(disk / name, uid, uid)
            (disk / name).chmod(mode)
        for path in (lower, disk / "upper", disk / "overlay"):
            handles.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        places = [f"/proc/self/fd/{fd}" for fd in handles]
        options = f"lowerdir={places[0]},upperdir={places[1]},workdir={places[2]}"
        options += ",index=off,redirect_dir=nofollow,metacopy=off"
        ns.mount("overlay", str(work), "overlay", flags, options)
        upper = os.dup(handles[1])
    except BaseException:
        remove(folder)
        raise
    finally:
        for fd in handles:
            os.close(fd)
    binds = {
        workdir: work,
        "/tmp": disk / "tmp",
        "/var/tmp": disk / "var-tmp",
        "/dev/shm": disk / "shm",
        "/logs": disk / "logs",
        HOME: disk / "home",
    }
    return {inside: str(here) for inside, here in binds.items()}, upper


def upper_of(folder: Path) -> int:
    """A descriptor of the upper directory of a sandbox that another process made. Raises OSError."""
    return os.open(folder / "disk" / "upper", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def remove(folder: Path) -> None:
    """Unmount and remove what is left of a sandbox. A container that still runs keeps its own view."""
    for name in ("work", "disk"):
        with contextlib.suppress(OSError):
            ns.unmount(str(folder / name))
    for name in ("work", "disk"):
        with contextlib.suppress(OSError):
            (folder / name).rmdir()  # Never a tree: if it is still mounted, this fails, and nothing is lost.
    if not (folder / "work").exists() and not (folder / "disk").exists():
        shutil.rmtree(folder, ignore_errors=True)
