"""Attempts at the problems of one environment, by seed: what an adapter opens for whoever connects to it.

A problem of a tool environment lives in this process; one of a packaged environment in a sandbox of a
backend, in packages that are made once. Every problem is admitted before its first attempt, so that a
reward has all its evidence. Verdicts are not kept; their signatures only matter in stored runs.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Self

from agentrl.errors import ConfigError, TaskError
from agentrl.types import Split, Task
from envs import admission as sandboxed
from envs import inprocess
from envs.builtin.packages import PackagedEnvironment
from envs.environment import ToolEnvironment
from envs.evidence import Admission
from envs.inprocess import EnvironmentSession
from envs.registry import Environment
from envs.sandbox.contract import Backend
from envs.session import Session

PACKAGES = 64
"""Packages that are made of a packaged environment; seeds go around them."""
SUITE_SEED = 1


class Attempts:
    """Opens sessions. Used as an async context manager; the backend is closed with it."""

    def __init__(self, environment: Environment, backend: Backend | None = None) -> None:
        if (backend is None) is isinstance(environment, PackagedEnvironment):
            raise ConfigError(
                f"{environment.name} needs {'sandboxes' if backend is None else 'no sandbox'}.",
                fix="Give a backend to packaged environments, and to no others.",
            )
        self.environment = environment
        self._folder: Path | None = None
        self._backend = backend
        self._packages: tuple[Task, ...] = ()
        self._admissions: dict[str, Admission] = {}
        self._admitting: dict[str, asyncio.Lock] = {}
        self._key = secrets.token_bytes(32)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the backend and remove the packages. Sessions must be closed before."""
        try:
            if self._backend is not None:
                await self._backend.close()
        finally:
            folder, self._folder = self._folder, None
            if folder is not None:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def task(self, seed: int) -> Task:
        """The task of a seed."""
        if not isinstance(self.environment, PackagedEnvironment):
            return self.environment.task(seed)
        if not self._packages:
            self._folder = self._folder or Path(tempfile.mkdtemp(prefix="agentrl-attempts-"))
            made = self.environment.tasks(self._folder / "suite", train=PACKAGES, heldout=0, seed=SUITE_SEED)
            self._packages = tuple(task for task in made if task.split is Split.TRAIN)
        return self._packages[seed % len(self._packages)]

    async def open(self, seed: int, *, name: str) -> Session | EnvironmentSession:
        """A session on the problem of a seed, called `name`.

        Raises:
            BoundaryError: the environment's own code failed, the backend did, or the problem can not be
                graded.
        """
        task = await asyncio.to_thread(self.task, seed)
        admission = await self._admitted(task)
        if self._backend is not None:
            return await Session.open(
                task, self._backend, session_id=name, signing_key=self._key, admission=admission
            )
        assert isinstance(self.environment, ToolEnvironment)
        return await EnvironmentSession.open(
            task, self.environment, session_id=name, signing_key=self._key, admission=admission
        )

    async def _admitted(self, task: Task) -> Admission:
        async with self._admitting.setdefault(task.id, asyncio.Lock()):
            if task.id not in self._admissions:
                self._admissions[task.id] = await self._admit(task)
        admission = self._admissions[task.id]
        if not admission.valid:
            raise TaskError(
                f"Task {task.id} can not be graded here: {'; '.join(admission.reasons)}.",
                fix="Mend it: agentrl envs check, or agentrl tasks validate.",
                code="not_admitted",
                phase="open",
            )
        return admission

    async def _admit(self, task: Task) -> Admission:
        if self._backend is not None:
            return await sandboxed.admit(task, self._backend, light=True)
        assert isinstance(self.environment, ToolEnvironment)
        return await inprocess.admit(task, self.environment, backend="none", light=True)
