"""A minimal root file system made of this machine's own programs, as a tar: the base image of the Docker
backend where no other is configured and no registry can be asked.

Turns a list of programs into the files that they need: the programs, the shared libraries that `ldd` names,
the standard library of the Python below any virtual environment, and a handful of files in /etc. Nothing else
of the machine goes in: no installed packages, no configuration, no user data. Every file belongs to root.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from agentrl.errors import SandboxError
from envs.sandbox.interpreter import base_python

VERSION = 2
"""Raised when what goes in changes."""
COMPANIONS = ("libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1", "libutil.so.1", "libgcc_s.so.1")
"""What every system has beside its C library: programs of elsewhere are linked to them, though newer ones of
this machine may not be."""
REQUIRED = ("bash", "sh", "env", "cat", "ls", "rm", "cp", "mv", "mkdir", "id", "sleep", "ldd")
OPTIONAL = """
    base64 basename chgrp chmod chown cksum comm csplit cut date dd df dirname du echo expand expr false
    fmt fold head hostname install join ln md5sum mkfifo mktemp nice nl nohup nproc od paste printenv
    printf pwd readlink realpath rmdir seq sha1sum sha256sum shuf sort split stat stty sum sync tac tail
    tee test timeout touch tr true truncate tty uname unexpand uniq wc which whoami yes find xargs grep
    egrep fgrep sed awk cmp diff diff3 patch tar gzip gunzip bzip2 xz ps kill pgrep pkill setsid flock
    unshare git make less file tree
"""
_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "ensurepip"}
)
_ETC = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\npolicy:x:1000:1000:policy:/home/policy:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/:/bin/false\n",
    "etc/group": "root:x:0:\npolicy:x:1000:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "etc/profile": "# Commands get their whole environment from the agent.\n",
    "etc/shells": "/bin/sh\n/bin/bash\n",
}
_FOLDERS = (
    "app",
    "dev",
    "home/policy",
    "opt",
    "proc",
    "root",
    "run",
    "sys",
    "tmp",
    "var/tmp",
    "usr/local/bin",
)
_LDD_DEADLINE_S = 180.0
"""It starts the dynamic linker once per file: on a machine that has no time to spare, half a minute."""


def identity() -> str:
    """What the image would hold, as a short tag: programs may change when the system is upgraded."""
    python = base_python()
    marks = [f"{p}:{facts.st_size}:{facts.st_mtime_ns}" for p in _programs() for facts in (os.stat(p),)]
    marks += [str(VERSION), platform.machine(), python]
    return hashlib.sha256("\n".join(marks).encode()).hexdigest()[:16]


def write_rootfs(out: BinaryIO) -> None:
    """Write the tar. Raises `SandboxError` when this machine lacks a shell or its Python can not be
    copied."""
    with tarfile.open(fileobj=out, mode="w|") as tar:
        _Rootfs(tar).write(_programs(), base_python())


def _programs() -> list[str]:
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    found = {name: shutil.which(name, path=path) for name in (*REQUIRED, *OPTIONAL.split())}
    lacking = [name for name in REQUIRED if found[name] is None]
    if lacking:
        raise SandboxError(
            f"This machine has no {', '.join(lacking)}: no base image can be made of it.",
            fix="Set AGENTRL_DOCKER_BASE to an image of your own, for example python:3.12-slim.",
            code="no_base",
            phase="prepare",
            retryable=False,
        )
    return sorted(path for path in found.values() if path is not None)


def _libraries(files: list[str]) -> set[str]:
    """The shared libraries of these files, as the dynamic linker finds them."""
    try:
        done = subprocess.run(
            ["ldd", *files],
            capture_output=True,
            text=True,
            timeout=_LDD_DEADLINE_S,
            check=False,
            env={"LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired as error:
        raise SandboxError(
            f"ldd did not name the libraries of {len(files)} programs within {_LDD_DEADLINE_S:g} s.",
            fix="Look at the load of this machine, or set AGENTRL_DOCKER_BASE to an image of your own.",
            code="no_base",
            phase="prepare",
        ) from error
    return {
        word
        for line in done.stdout.splitlines()
        for word in line.split()
        if word.startswith("/") and ":" not in word
    }


def _companions(libraries: set[str]) -> list[str]:
    """Those that are here, beside the C library that is among these."""
    folders = {os.path.dirname(path) for path in libraries if os.path.basename(path) == "libc.so.6"}
    beside = [os.path.join(folder, name) for folder in sorted(folders) for name in COMPANIONS]
    return [path for path in beside if os.path.exists(path)]


class _Rootfs:
    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self._seen: set[str] = set()

    def write(self, programs: list[str], python: str) -> None:
        for name in ("bin", "sbin", "lib", "lib32", "lib64"):
            if os.path.islink(f"/{name}"):
                self._link(name, os.readlink(f"/{name}"))
        for name in _FOLDERS:
            self._folder(name, 0o1777 if name.endswith("tmp") else 0o755)
        for name, text in _ETC.items():
            self._text(name, text)
        modules = self._python(Path(python))
        libraries = _libraries([*programs, python, *modules])
        for path in (*programs, *sorted(libraries), *_companions(libraries)):
            self._copy(path)
        if os.path.isfile("/etc/ld.so.cache"):
            self._copy("/etc/ld.so.cache")  # So that libraries in unusual folders are found there too.

    def _python(self, python: Path) -> list[str]:
        """The interpreter and its standard library. Returns its extension modules."""
        prefix = python.parent.parent
        library = next(
            (p for p in sorted(prefix.glob("lib*/python3.*"), reverse=True) if (p / "os.py").is_file()), None
        )
        if library is None:
            raise SandboxError(
                f"The standard library of {python} was not found below {prefix}.",
                fix="Set AGENTRL_DOCKER_BASE to an image that has a Python, for example python:3.12-slim.",
                code="no_base",
                phase="prepare",
                retryable=False,
            )
        self._copy(str(python))
        modules = []
        for root, folders, files in os.walk(library):
            folders[:] = sorted(f for f in folders if f not in _SKIPPED and not f.startswith("config-"))
            for name in sorted(files):
                path = os.path.join(root, name)
                self._copy(path)
                if name.endswith(".so"):
                    modules.append(path)
        for alias in ("python3", "python"):
            self._link(f"usr/local/bin/{alias}", str(python))
        return modules

    def _copy(self, path: str) -> None:
        """A file at its real folder; a link as a link, with what it points at."""
        folder = os.path.realpath(os.path.dirname(path))
        path = os.path.join(folder, os.path.basename(path))
        name = path.lstrip("/")
        if name in self._seen:
            return
        facts = os.lstat(path)
        if stat.S_ISLNK(facts.st_mode):
            target = os.readlink(path)
            self._link(name, target)
            self._copy(os.path.join(folder, target))
            return
        self._parents(name)
        self._seen.add(name)
        info = tarfile.TarInfo(name)
        info.size = facts.st_size
        info.mode = 0o755 if facts.st_mode & 0o111 else 0o644
        with open(path, "rb") as file:
            self._tar.addfile(info, file)

    def _parents(self, name: str) -> None:
        parent = os.path.dirname(name)
        if parent:
            self._folder(parent, 0o755)

    def _folder(self, name: str, mode: int) -> None:
        if name in self._seen:
            return
        self._parents(name)
        self._seen.add(name)
        info = tarfile.TarInfo(name)
        info.type, info.mode = tarfile.DIRTYPE, mode
        self._tar.addfile(info)

    def _link(self, name: str, target: str) -> None:
        if name in self._seen:
            return
        self._parents(name)
        self._seen.add(name)
        info = tarfile.TarInfo(name)
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, target, 0o777
        self._tar.addfile(info)

    def _text(self, name: str, text: str) -> None:
        data = text.encode()
        self._parents(name)
        self._seen.add(name)
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(data), 0o644
        self._tar.addfile(info, BytesIO(data))
