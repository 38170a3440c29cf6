"""Memory, process and CPU limits of a sandbox as control groups, version 1 or 2, where this user may make
them.

Invariant: `limits` names exactly what the kernel was told and accepted. What can not be written is not
enforced and not claimed. Does not move processes (the launcher does, from inside its own start).
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from agentrl.types import SandboxSpec

CONTROLLERS = ("memory", "pids", "cpu")
RESERVED_PIDS = 64
"""For the agent and its supervisors. The policy's own number is held by RLIMIT_NPROC."""
RESERVED_MEMORY_MIB = 64
"""For the agent, its supervisors and the output that they keep."""
_PERIOD_US = 100_000
_REMOVE_DEADLINE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The control groups of one sandbox."""

    folders: tuple[str, ...]
    limits: tuple[str, ...]
    oom_file: str | None

    @property
    def procs(self) -> tuple[str, ...]:
        return tuple(f"{folder}/cgroup.procs" for folder in self.folders)

    def remove(self, within_s: float = _REMOVE_DEADLINE_S) -> bool:
        """Give them back; False when a process held one for longer than that."""
        until = time.monotonic() + within_s
        for folder in self.folders:
            while True:
                try:
                    os.rmdir(folder)
                except FileNotFoundError:
                    break
                except OSError:
                    if time.monotonic() >= until:
                        return False
                    time.sleep(0.001)
                else:
                    break
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """Where groups can be made: per controller (version 1), or one folder for all (version 2)."""

    version: int
    parents: dict[str, str]

    def create(self, name: str, spec: SandboxSpec) -> Group:
        folders: list[str] = []
        limits: list[str] = []
        oom_file = None
        memory = (spec.memory_mib + spec.disk_mib + RESERVED_MEMORY_MIB) * 1024 * 1024
        quota = max(1000, int(spec.cpus * _PERIOD_US))
        for controller, parent in self.parents.items():
            folder = f"{parent}/{name}"
            try:
                os.mkdir(folder)
            except FileExistsError:
                pass
            except OSError:
                continue
            if folder not in folders:
                folders.append(folder)
            held = False
            if controller == "memory":
                # The workdir lies in memory too: files up to the disk limit must not eat the memory limit.
                if self.version == 1:
                    held = _write(folder, "memory.limit_in_bytes", memory)
                    _write(folder, "memory.memsw.limit_in_bytes", memory)
                    oom_file = f"{folder}/memory.oom_control"
                else:
                    held = _write(folder, "memory.max", memory)
                    _write(folder, "memory.swap.max", 0)
                    oom_file = f"{folder}/memory.events"
            elif controller == "pids":
                held = _write(folder, "pids.max", spec.pids + RESERVED_PIDS)
            elif self.version == 1:
                held = _write(folder, "cpu.cfs_period_us", _PERIOD_US) and _write(
                    folder, "cpu.cfs_quota_us", quota
                )
            else:
                held = _write(folder, "cpu.max", f"{quota} {_PERIOD_US}")
            if held:
                limits.append(controller)
        return Group(folders=tuple(folders), limits=tuple(limits), oom_file=oom_file)

    def sweep(self, prefix: str) -> None:
        """Remove empty groups whose name starts with `prefix`: what a killed backend left."""
        for parent in set(self.parents.values()):
            with contextlib.suppress(OSError):
                for name in os.listdir(parent):
                    if name.startswith(prefix):
                        with contextlib.suppress(OSError):
                            os.rmdir(f"{parent}/{name}")


def _write(folder: str, name: str, value: int | str) -> bool:
    try:
        Path(folder, name).write_text(str(value), encoding="ascii")
    except OSError:
        return False
    return True


def detect(own: str = "/proc/self/cgroup", mounts: str = "/proc/self/mountinfo") -> Hierarchy | None:
    """The hierarchy that this process may make groups in; None when there is none."""
    paths: dict[str, str] = {}
    for line in Path(own).read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    first: dict[str, str] = {}
    unified: str | None = None
    for line in Path(mounts).read_text().splitlines():
        left, _, right = line.partition(" - ")
        root, point = left.split()[3:5]
        kind, _, options = right.split(" ", 2)
        if kind == "cgroup":
            for controller in set(CONTROLLERS) & set(options.split(",")) & set(paths):
                first.setdefault(controller, _below(point, root, paths[controller]))
        elif kind == "cgroup2" and "" in paths:
            unified = unified or _below(point, root, paths[""])
            mount_point = point
    usable = {c: first[c] for c in CONTROLLERS if c in first and _can_make(first[c])}
    if usable:
        return Hierarchy(version=1, parents=usable)
    if unified is not None:
        return _detect_unified(Path(unified), Path(mount_point))
    return None


def _below(point: str, root: str, path: str) -> str:
    if root != "/" and (path == root or path.startswith(root + "/")):
        path = path[len(root) :]
    return (point + path).rstrip("/") if not path.startswith("/..") else point


def _can_make(folder: str) -> bool:
    probe = f"{folder}/agentrl-probe-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        os.mkdir(probe)
        os.rmdir(probe)
    except OSError:
        return False
    return True


def _detect_unified(own: Path, top: Path) -> Hierarchy | None:
    """The nearest folder, from our own upwards, that hands the controllers down to its children. (A group
    with processes in it can not, except the top one.)"""
    for folder in (own, *own.parents):
        if not folder.is_relative_to(top):
            break
        control = Path(folder, "cgroup.subtree_control")
        try:
            given = control.read_text().split()
            for controller in set(CONTROLLERS) - set(given):
                _write(str(folder), control.name, f"+{controller}")
            given = control.read_text().split()
        except OSError:
            continue
        held = [c for c in CONTROLLERS if c in given]
        if "memory" in held and _can_make(str(folder)):
            return Hierarchy(version=2, parents=dict.fromkeys(held, str(folder)))
    return None
