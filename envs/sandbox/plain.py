"""Sandboxes without isolation: the agent as an ordinary process in a copy of the image. For development, and
for machines whose kernel refuses namespaces, where it must be asked for by name (`--insecure-local`).

A policy's command can read and change whatever this user can. Every verdict says `isolation: none`. Paths
of the task (its workdir, mounts) do not exist here, so they are translated: at the start of arguments, in
`cwd`, in file calls and, where they stand as whole paths, in the text of a command; back again in reports.
Paths *inside* scripts are not. No limit is enforced.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from agentrl.errors import ExecUnknown
from agentrl.types import JsonScalar, SandboxSpec
from envs.sandbox import agent, oci
from envs.sandbox.channel import Channel, last_words
from envs.sandbox.contract import FileChange, Isolation, Mount, SandboxInfo
from envs.sandbox.diff import diff_trees
from envs.sandbox.images import Images
from envs.sandbox.interpreter import base_python
from envs.sandbox.live import LiveSandbox
from envs.sandbox.pressure import not_ready
from envs.sandbox.shelf import Shelf, held_while


class _FolderPaths:
    """Task paths to folders of this machine and back."""

    def __init__(self, folders: dict[str, str]) -> None:
        self._folders = folders
        names = "|".join(re.escape(name) for name in sorted(folders, key=len, reverse=True))
        self._pattern = re.compile(rf"(?<![\w./~-])({names})(?![\w.-])")

    def inside(self, text: str) -> str:
        return self._pattern.sub(lambda match: self._folders[match[1]], text)

    def outside(self, raw: bytes) -> bytes:
        for name, folder in self._folders.items():
            raw = raw.replace(os.fsencode(folder), os.fsencode(name))
        return raw


class PlainBackend:
    """See `contract.Backend`."""

    def __init__(self, state_dir: Path | None = None, *, python: str | None = None) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="agentrl-plain-") if state_dir is None else None
        self._state = Path(self._temporary.name) if self._temporary is not None else Path(state_dir or "")
        self._images = Images(self._state / "images", None)
        self._shelf = Shelf(self._state, {}, counts=lambda _: False)
        self._python = python or base_python()
        self._numbers = itertools.count(1)
        self._live: set[LiveSandbox] = set()

    @property
    def name(self) -> str:
        return "plain"

    @property
    def isolation(self) -> Isolation:
        return "none"

    async def prepare(self, environment_dir: str) -> str:
        if (image := oci.reference(environment_dir)) is not None:
            oci.refuse_elsewhere(image, "Use the local or the docker backend.")

        async def found() -> tuple[str, list[Path]]:
            digest = await self._images.prepare(environment_dir)
            return digest, [self._images.path(digest)]

        return await held_while(found, self._shelf.touch_all)

    async def has(self, environment_dir: str) -> bool:
        """See `contract.Foreseeing`."""
        return oci.reference(environment_dir) is None and await self._images.has(environment_dir)

    async def create(
        self,
        spec: SandboxSpec,
        *,
        image: str,
        session: str,
        mounts: tuple[Mount, ...] = (),
        apply: tuple[FileChange, ...] = (),
        deadline_s: float = 120.0,
    ) -> LiveSandbox:
        begun = time.monotonic()
        lower = self._images.require(image)
        await asyncio.to_thread(self._shelf.touch_all, [lower])  # it is copied: no longer needed after that
        name = f"plain-{os.getpid()}-{next(self._numbers)}"
        folder = Path(tempfile.mkdtemp(prefix=f"agentrl-{name}-"))
        try:
            sandbox = await self._start(spec, lower, image, name, folder, mounts, begun, deadline_s)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._live.add(sandbox)
        return await sandbox.beginning_with(apply, deadline_s=deadline_s)

    async def _start(
        self,
        spec: SandboxSpec,
        lower: Path,
        image: str,
        name: str,
        folder: Path,
        mounts: tuple[Mount, ...],
        begun: float,
        deadline_s: float,
    ) -> LiveSandbox:
        work, home, tools = folder / "work", folder / "home", folder / "bin"
        await asyncio.to_thread(shutil.copytree, lower, work, symlinks=True)
        home.mkdir()
        tools.mkdir()
        for alias in ("python3", "python"):
            (tools / alias).symlink_to(self._python)
        folders = {spec.workdir.rstrip("/"): str(work)}
        for number, mount in enumerate(mounts):
            target = folder / "mounts" / str(number)
            await asyncio.to_thread(shutil.copytree, mount.source, target, symlinks=True)
            folders[mount.target.rstrip("/")] = str(target)
        settings = {
            "workdir": str(work),
            "home": str(home),
            "path": f"{tools}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "env": spec.env,
            "shell": ["bash", "--noprofile", "-lc"],
        }
        ours, theirs = socket.socketpair()
        log = folder / "agent.log"
        with theirs, log.open("wb") as errors, tempfile.TemporaryFile() as config:
            config.write(json.dumps(settings).encode())  # not as an argument: everybody reads those
            config.seek(0)
            process = subprocess.Popen(  # noqa: ASYNC220  (a vfork and an exec: about a millisecond)
                [
                    *(self._python, "-I", "-S", agent.__file__),
                    *("--config", "-", "--fd", str(theirs.fileno())),
                ],
                pass_fds=(theirs.fileno(),),
                stdin=config,
                stdout=errors,
                stderr=errors,
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
                start_new_session=True,
            )

        async def post_mortem() -> dict[str, JsonScalar]:
            await _ended(process, 0.2)
            return {"exit": process.poll(), **last_words(log)}

        async def end() -> None:
            self._live.discard(sandbox)
            if not await _ended(process, 1.0):
                process.kill()  # Its supervisors notice and end their commands.
                await _ended(process, 5.0)
            await asyncio.to_thread(_remove, folder)

        async def differ() -> tuple[FileChange, ...]:
            fd = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                return await asyncio.to_thread(diff_trees, fd, lower)
            finally:
                os.close(fd)

        channel = await Channel.attach(ours, sandbox=name, post_mortem=post_mortem)
        try:
            hello, _ = await channel.call({"op": "hello"}, deadline_s=deadline_s)
        except BaseException as error:
            channel.close()
            process.send_signal(signal.SIGKILL)
            process.wait()
            if isinstance(error, ExecUnknown):
                raise not_ready(name, deadline_s, phase="agent", evidence=await post_mortem()) from error
            raise
        info = SandboxInfo(
            id=name,
            backend=self.name,
            isolation=self.isolation,
            image_digest=image,
            instance=hello["instance"],
            spec=spec,
            limits_enforced=(),
            ready_ms=(time.monotonic() - begun) * 1000,
        )
        sandbox = LiveSandbox(
            info,
            channel,
            differ=differ,
            end=end,
            paths=_FolderPaths(folders),
            agent_pid=process.pid,
        )
        return sandbox

    async def close(self) -> None:
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._live)))
        if self._temporary is not None:
            self._temporary.cleanup()


def _remove(folder: Path) -> None:
    """Remove a folder however deep it is; what can not be removed stays."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:  # One call for each level, before Python 3.13.
        subprocess.run(["rm", "-rf", "--", str(folder)], check=False, timeout=60.0)


async def _ended(process: subprocess.Popen[bytes], within_s: float) -> bool:
    """Whether the process ended, waiting at most that long, without a thread."""
    until = time.monotonic() + within_s
    pause = 0.001
    while process.poll() is None:
        if time.monotonic() > until:
            return False
        await asyncio.sleep(pause)
        pause = min(2 * pause, 0.05)
    return True
