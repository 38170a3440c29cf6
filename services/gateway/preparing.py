"""Images that callers want ready before their sessions need them: what was asked for under a key goes on
whether or not anybody waits, and is told by how far it has come.

Kept in memory only: after a restart the same request begins again, and finds what is there. Each image waits
for its turn to be pulled or built like that of any session (see `limiters`).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from agentrl.types import SandboxSpec, Task
from envs.preparation import ImageStatus, images_of, prepare_images
from envs.sandbox.contract import Backend, FileChange, Isolation, Mount, Pulling, Sandbox
from harness.gateway import wire
from services.gateway.limiters import IMAGES_AT_ONCE
from services.gateway.refused import Refused, key_reused

KEPT = 16
"""Preparations of a tenant that can be asked for again; of those that are over the oldest are forgotten."""
AT_ONCE = 4
"""Preparations of a tenant that are not over."""
BUSY_S = 10.0
Turn = Callable[[], AbstractAsyncContextManager[None]]


@dataclass(slots=True)
class _Preparation:
    digest: str
    total: int
    images: list[ImageStatus] = field(default_factory=list)
    task: asyncio.Task[object] | None = None

    @property
    def done(self) -> bool:
        return self.task is not None and self.task.done()

    def view(self) -> wire.PreparationView:
        return wire.PreparationView(total=self.total, done=self.done, images=list(self.images))


class Fetching:
    """A backend whose machines fetch an image when a sandbox starts; one that is made only for that takes a
    turn of those that verify, so that it never comes on top of what the gateway may have alive."""

    def __init__(self, backend: Backend, fetches: Pulling, turn: Turn) -> None:
        self._backend = backend
        self._fetches = fetches
        self._turn = turn

    @property
    def name(self) -> str:
        return self._backend.name

    @property
    def isolation(self) -> Isolation:
        return self._backend.isolation

    async def prepare(self, environment_dir: str) -> str:
        return await self._backend.prepare(environment_dir)

    async def pulled_for(self, digest: str) -> str:
        return await self._fetches.pulled_for(digest)

    async def create(
        self,
        spec: SandboxSpec,
        *,
        image: str,
        session: str,
        mounts: tuple[Mount, ...] = (),
        apply: tuple[FileChange, ...] = (),
        deadline_s: float = 120.0,
    ) -> Sandbox:
        """One that has ended by then: that it could be made is all that anybody wants to know."""
        async with self._turn():
            made = await self._backend.create(
                spec, image=image, session=session, mounts=mounts, apply=apply, deadline_s=deadline_s
            )
            await made.close()
        return made

    async def close(self) -> None:
        """The backend is the gateway's."""


class Preparations:
    """Of all tenants of one gateway. `place`: a tenant's way to the backend."""

    def __init__(self, place: Callable[[str], Backend]) -> None:
        self._place = place
        self._of: dict[str, dict[str, _Preparation]] = {}

    async def ask(
        self, tenant: str, request: wire.PrepareRequest, tasks: Sequence[Task], *, wait_s: float
    ) -> wire.PreparationView:
        """How far the preparation of this key has come, as soon as it is over or after `wait_s`. Raises
        `Refused`: the key was another request's, or too many are not over."""
        digest = hashlib.sha256(request.model_dump_json().encode()).hexdigest()
        known = self._of.setdefault(tenant, {})
        one = known.get(request.client_key)
        if one is None:
            one = known[request.client_key] = self._begin(tenant, known, digest, tasks)
        elif one.digest != digest:
            raise key_reused(request.client_key)
        assert one.task is not None
        await asyncio.wait({one.task}, timeout=wait_s)
        return one.view()

    def _begin(
        self, tenant: str, known: dict[str, _Preparation], digest: str, tasks: Sequence[Task]
    ) -> _Preparation:
        if sum(not one.done for one in known.values()) >= AT_ONCE:
            raise Refused(
                429,
                "preparing",
                f"{AT_ONCE} preparations of this tenant are not over.",
                fix="Wait for them; one may name many tasks.",
                owner="environment",
                retryable=True,
                retry_after_s=BUSY_S,
            )
        for key in [key for key, one in known.items() if one.done][: max(0, len(known) + 1 - KEPT)]:
            del known[key]
        made = _Preparation(digest, total=len(images_of(tasks)))
        made.task = asyncio.create_task(
            prepare_images(tasks, self._place(tenant), at_once=IMAGES_AT_ONCE, heard=made.images.append)
        )
        return made

    def cancel(self) -> set[asyncio.Task[object]]:
        """End what is not over; returns what may take a moment to end."""
        running = {one.task for known in self._of.values() for one in known.values() if one.task is not None}
        for task in running:
            task.cancel()
        return running
