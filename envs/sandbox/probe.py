"""What this machine offers for sandboxes, as findings with a fix each: the facts that `agentrl doctor`
prints.

Cheap and read-only, apart from one trial sandbox that is ended at once. An engine and a cluster, where one is
configured, are asked what they are and what they allow.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentrl.errors import AgentRLError, SandboxError
from envs.sandbox import cgroups
from envs.sandbox.docker import examine, sandboxes
from envs.sandbox.engine import socket_path
from envs.sandbox.interpreter import base_python
from envs.sandbox.local import LocalBackend

Status = Literal["ok", "degraded", "missing"]
"""`degraded`: works, with less than it could; `missing`: what needs it will refuse."""

LOW_DISK_BYTES = 2 * 1024**3
LOW_INODES = 100_000
LOW_PID_MAX = 65_536
LOW_OPEN_FILES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fact about this machine. `fix` is empty when there is nothing to do."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def probe_machine(state_dir: Path | None = None) -> list[Finding]:
    """Everything that decides which backends work here and how well."""
    return [
        _kernel(),
        _python(),
        _local(state_dir),
        _cgroups(),
        _pid_max(),
        _open_files(),
        _disk(state_dir or Path.home()),
        _docker(),
        _kubernetes(),
    ]


def _kernel() -> Finding:
    release = platform.release()
    numbers = tuple(int(n) for n in re.findall(r"\d+", release)[:2])
    if platform.system() != "Linux":
        return Finding(
            name="kernel",
            status="missing",
            detail=f"{platform.system()} has no namespaces",
            fix="Use the docker or kubernetes backend.",
        )
    if numbers < (5, 14):
        return Finding(
            name="kernel",
            status="missing",
            detail=f"Linux {release} is older than 5.14",
            fix="Use Linux 5.14 or newer (6.6 without root), or the docker backend.",
        )
    return Finding(name="kernel", status="ok", detail=f"Linux {release}, {platform.machine()}")


def _python() -> Finding:
    try:
        return Finding(name="python in sandboxes", status="ok", detail=base_python())
    except SandboxError as error:
        return Finding(
            name="python in sandboxes", status="missing", detail=error.message, fix=error.fix or ""
        )


def _local(state_dir: Path | None) -> Finding:
    """Namespaces, id maps, overlay, pivot_root and seccomp, by making one sandbox."""
    try:
        LocalBackend(state_dir).check()
    except (SandboxError, OSError) as error:
        fix = (
            error.fix
            if isinstance(error, SandboxError)
            else "Check the rights and space of the state folder."
        )
        message = error.message if isinstance(error, SandboxError) else str(error)
        return Finding(name="local sandboxes", status="missing", detail=message, fix=fix or "")
    how = "as root: a sandbox's ids are nobody's" if os.geteuid() == 0 else "as a user: one id per sandbox"
    return Finding(name="local sandboxes", status="ok", detail=f"namespaces, overlay, seccomp; {how}")


def _cgroups() -> Finding:
    found = cgroups.detect()
    held = [] if found is None else list(found.parents)
    lacking = [c for c in cgroups.CONTROLLERS if c not in held]
    if not lacking and found is not None:
        return Finding(
            name="control groups", status="ok", detail=f"version {found.version}: {', '.join(held)}"
        )
    return Finding(
        name="control groups",
        status="degraded",
        detail=f"not writable for {', '.join(lacking)}: those limits do not hold for local sandboxes",
        fix="Run as root, or in a delegated group: `systemd-run --user --scope -p Delegate=yes agentrl …`.",
    )


def _pid_max() -> Finding:
    try:
        value = int(Path("/proc/sys/kernel/pid_max").read_text())
    except (OSError, ValueError):
        return Finding(name="pid_max", status="degraded", detail="unknown", fix="Mount /proc.")
    if value < LOW_PID_MAX:
        return Finding(
            name="pid_max",
            status="degraded",
            detail=f"{value}: enough for about {value // 64} sandboxes with background processes",
            fix="Set `sysctl -w kernel.pid_max=4194304`.",
        )
    return Finding(name="pid_max", status="ok", detail=str(value))


def _open_files() -> Finding:
    limit = os.sysconf("SC_OPEN_MAX")
    if limit < LOW_OPEN_FILES:
        return Finding(
            name="open files",
            status="degraded",
            detail=f"{limit}: enough for about {max(0, limit - 100) // 4} local sandboxes",
            fix="Raise it: `ulimit -n 65536`.",
        )
    return Finding(name="open files", status="ok", detail=str(limit))


def _disk(folder: Path) -> Finding:
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    facts = os.statvfs(folder)
    inodes = facts.f_favail if facts.f_files else None
    detail = (
        f"{free / 1024**3:.1f} GiB and {'unlimited' if inodes is None else inodes} inodes free at {folder}"
    )
    if free < LOW_DISK_BYTES or (inodes is not None and inodes < LOW_INODES):
        return Finding(
            name="disk",
            status="degraded",
            detail=detail,
            fix="Free some space, or give another state folder.",
        )
    return Finding(name="disk", status="ok", detail=detail)


def _docker(host: str | None = None) -> Finding:
    """Whether sandboxes can be made on the engine (`DOCKER_HOST`, its own convention), and what it is."""
    try:
        facts = examine(socket_path(host))
        running, ahead = sandboxes(socket_path(host))
    except SandboxError as refused:
        fix = refused.fix or ""
        return Finding(name="docker engine", status="missing", detail=refused.message, fix=fix)
    root = str(facts.get("DockerRootDir", "?"))
    detail = (
        f"{facts.get('ServerVersion', '?')}, {facts.get('Driver', '?')}, "
        f"control groups version {facts.get('CgroupVersion', '?')}, images and containers in {root}"
        f", {running} sandboxes running" + (f" ({ahead} started ahead)" if ahead else "")
    )
    free = shutil.disk_usage(root).free if os.path.isdir(root) else None
    if free is not None and free < LOW_DISK_BYTES:
        return Finding(
            name="docker engine",
            status="degraded",
            detail=f"{detail}: {free / 1024**3:.1f} GiB free",
            fix="Free some space: `docker image prune`.",
        )
    if facts.get("Driver") == "vfs":
        fix = "Use the overlay2 storage driver: vfs copies a whole image for every container."
        return Finding(name="docker engine", status="degraded", detail=detail, fix=fix)
    return Finding(name="docker engine", status="ok", detail=detail)


def _kubernetes() -> Finding:
    """Whether a cluster is configured, and if so whether it answers and allows what sandboxes need."""
    inside = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
    named = os.environ.get("KUBECONFIG")
    files = [Path(p) for p in named.split(os.pathsep)] if named else [Path.home() / ".kube" / "config"]
    if not inside.exists() and not any(path.is_file() for path in files):
        return Finding(
            name="kubernetes",
            status="missing",
            detail=f"no configuration at {files[0]}",
            fix="Set KUBECONFIG; only the kubernetes backend needs it.",
        )
    try:
        facts = importlib.import_module("envs.sandbox.kubernetes").examined()
    except ModuleNotFoundError as error:
        return Finding(
            name="kubernetes",
            status="missing",
            detail=f"a cluster is configured, but {error.name} is not installed",
            fix="Install it: `pip install 'agentrl[kubernetes]'`.",
        )
    except AgentRLError as refused:
        fix = refused.fix or ""
        return Finding(name="kubernetes", status="missing", detail=refused.message, fix=fix)
    how = "over the pod network" if facts["reach"] == "pod" else "through the API server"
    detail = f"{facts['version']}, namespace {facts['namespace']}, pods are reached {how}{facts['disk']}"
    return Finding(name="kubernetes", status="ok", detail=detail)
