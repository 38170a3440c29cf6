"""Where a run's sessions come from: sandboxes made here, or a gateway; the rest of the loop does not know.

A gateway stands where the backend does. It makes sessions and validates tasks itself; tasks of environments
that need no sandbox stay in this process either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from agentrl.errors import BoundaryError
from agentrl.types import Task
from envs import registry
from envs.evidence import Admission
from envs.preparation import ImageStatus, prepare_images
from envs.sandbox.contract import Backend, Mount
from envs.session import Session
from harness.gateway.remote import GatewayPlace
from harness.group import MAX_RERUNS
from harness.rollout import OpenSession


def open_session(place: Backend, *, mounts: tuple[Mount, ...] = ()) -> OpenSession:
    """How sessions of a run are opened. `mounts`: read-only folders of the agent's, only where sandboxes are
    made here; a gateway's tasks have it in their image."""
    if isinstance(place, GatewayPlace):
        return place.open
    if mounts:
        return partial(Session.open, mounts=mounts)
    return registry.open_session


def expect(place: Backend, group_id: str, size: int) -> None:
    """Say that `size` members of a group will ask for a session at once, so that a gateway admits them
    together. Sandboxes of this process are bounded by the loop itself."""
    if isinstance(place, GatewayPlace):
        place.expect(group_id, size)


async def prepare(
    tasks: Sequence[Task], place: Backend, *, heard: Callable[[ImageStatus], None]
) -> tuple[ImageStatus, ...]:
    """Have the images of these tasks made ready where their sandboxes will be; see
    `envs.preparation.prepare_images`."""
    if isinstance(place, GatewayPlace):
        return await place.prepare_images(tasks, heard=heard)
    return await prepare_images(tasks, place, heard=heard)


async def admit(task: Task, place: Backend, *, light: bool) -> Admission:
    """Validate a task where its sessions will live; a gateway decides itself how thoroughly. What was the
    environment's fault and may pass is tried again, like an attempt."""
    if isinstance(place, GatewayPlace):
        return await place.admit(task, light=light)
    for _ in range(MAX_RERUNS):
        try:
            return await registry.admit(task, place, light=light)
        except BoundaryError as error:
            if error.owner != "environment" or not error.retryable:
                raise
    return await registry.admit(task, place, light=light)
