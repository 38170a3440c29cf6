"""Images that callers want ready before their sessions need them: what was asked for under a key goes on
whether or not anybody waits, and is told by how far it has come.

Kept in memory only: after a restart the same request begins again, and finds what is there. Each image waits
for its turn to be pulled or built like that of any session (see `limiters`).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentrl.types import Task
from envs.preparation import ImageStatus, Turn, images_of, prepare_images
from envs.sandbox.contract import Backend
from harness.gateway import wire
from services.gateway.limiters import IMAGES_AT_ONCE
from services.gateway.refused import Refused, key_reused

KEPT = 16
"""Preparations of a tenant that can be asked for again; of those that are over the oldest are forgotten."""
AT_ONCE = 4
"""Preparations of a tenant that are not over."""
BUSY_S = 10.0


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


class Preparations:
    """Of all tenants of one gateway.

    `fetches`: machines of the backend fetch an image when a sandbox starts. One that is made only for that
    takes a `turn` of its tenant, so that it never comes on top of what the gateway may have alive.
    """

    def __init__(self, backend: Backend, *, fetches: bool, turn: Callable[[str], Turn]) -> None:
        self._backend = backend
        self._fetches = fetches
        self._turn = turn
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
            prepare_images(
                tasks,
                self._backend,
                at_once=IMAGES_AT_ONCE,
                start=self._fetches,
                turn=lambda: self._turn(tenant),
                heard=made.images.append,
            )
        )
        return made

    def cancel(self) -> set[asyncio.Task[object]]:
        """End what is not over; returns what may take a moment to end."""
        running = {one.task for known in self._of.values() for one in known.values() if one.task is not None}
        for task in running:
            task.cancel()
        return running
