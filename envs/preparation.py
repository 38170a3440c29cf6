"""Tasks and a backend to one status per image: what is there, and what is not and why.

A step of its own, before anything expensive waits for it (a policy's weights, GPUs): a registry that refuses
or a Dockerfile that does not build is told at once, all of them together, and not by the first attempt that
needs it. What makes an image ready is `envs.session.prepare`, as for every session. One bad image never ends
the others; nothing here retries what a registry asked to be left alone for.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from agentrl.errors import BoundaryError, FaultOwner, SandboxError, TaskError
from agentrl.types import Task
from envs.sandbox.contract import Backend, Foreseeing, Pulling
from envs.session import image_of, prepare

AT_ONCE = 4
"""Images that are looked after at the same time; a backend has bounds of its own for pulls and builds."""
TRIES = 2
"""Of what was the environment's fault and may pass."""
START_DEADLINE_S = 1800.0
"""For the one sandbox that shows that an image can be had; on a cluster that is what pulls it."""
_LIMITED = "pull_limited"
"""The backend has waited for that registry already, and long."""
Turn = AbstractAsyncContextManager[None]
SHOWN = 10
"""Failures that one error lists."""


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class ImageStatus:
    """One distinct image, of one task or of many."""

    image: str
    """As the tasks name it."""
    tasks: tuple[str, ...]
    """Ids of those that need it, in the order given."""
    state: Literal["ready", "failed"]
    seconds: float
    """Of preparing it; waiting for others is no part of it."""
    digest: str | None = None
    """None: it failed."""
    was_there: bool | None = None
    """Before it was asked for; None: the backend can not tell, or it failed."""
    owner: FaultOwner | None = None
    """Whose fault; like `code`, `message`, `fix` and `retryable` None for what is ready."""
    code: str | None = None
    message: str | None = None
    fix: str | None = None
    retryable: bool | None = None
    """Whether it may be there when it is asked for again."""


def images_of(tasks: Iterable[Task]) -> tuple[tuple[Task, ...], ...]:
    """Tasks by the image that they share. Tasks that live in no sandbox need none and are left out."""
    found: dict[str, list[Task]] = {}
    for task in tasks:
        if task.grader.kind != "environment":
            found.setdefault(_key(task), []).append(task)
    return tuple(tuple(sharing) for sharing in found.values())


def _key(task: Task) -> str:
    try:
        return image_of(task)
    except TaskError:  # It names none: told when it is prepared.
        return f"{task.path} {task.sandbox.image}"


async def prepare_images(
    tasks: Sequence[Task],
    backend: Backend,
    *,
    at_once: int = AT_ONCE,
    start: bool | None = None,
    turn: Callable[[], Turn] = nullcontext,
    heard: Callable[[ImageStatus], None] | None = None,
) -> tuple[ImageStatus, ...]:
    """Make every image of these tasks ready on a backend; a status for each, in the order of `images_of`.

    Args:
        at_once: bound on how many are prepared together.
        start: also make and end one sandbox of each. None: only where images are fetched no earlier than
        that (`Pulling`: a cluster), and once for those that are started from the same.
        turn: held while such a sandbox is alive.
        heard: called with each status as it comes.

    Never raises for an image: a failed one is a status that says whose fault and what to do.
    """
    limit = asyncio.Semaphore(at_once)
    starts = _Starts(backend, turn) if start or (start is None and isinstance(backend, Pulling)) else None

    async def one(sharing: tuple[Task, ...]) -> ImageStatus:
        async with limit:
            status = await _prepared(sharing, backend, starts)
        if heard is not None:
            heard(status)
        return status

    return tuple(await asyncio.gather(*(one(sharing) for sharing in images_of(tasks))))


class _Starts:
    """One sandbox for all that are started from the same image, whoever of them asks first."""

    def __init__(self, backend: Backend, turn: Callable[[], Turn]) -> None:
        self._backend = backend
        self._turn = turn
        self._locks: dict[str, asyncio.Lock] = {}
        self._seen: set[str] = set()

    async def try_one(self, task: Task, digest: str) -> None:
        """Raises what `Backend.create` does."""
        backend = self._backend
        source = await backend.pulled_for(digest) if isinstance(backend, Pulling) else digest
        async with self._locks.setdefault(source, asyncio.Lock()):
            if source not in self._seen:
                name = "prepare-" + hashlib.sha256(f"{source} {task.id}".encode()).hexdigest()[:16]
                async with self._turn():
                    box = await backend.create(
                        task.sandbox, image=digest, session=name, deadline_s=START_DEADLINE_S
                    )
                    await box.close()
                self._seen.add(source)


async def _prepared(sharing: tuple[Task, ...], backend: Backend, starts: _Starts | None) -> ImageStatus:
    task, began = sharing[0], time.monotonic()
    for last in (*[False] * (TRIES - 1), True):
        try:
            was_there = await backend.has(image_of(task)) if isinstance(backend, Foreseeing) else None
            digest = await prepare(task, backend)
            if starts is not None:
                await starts.try_one(task, digest)
        except Exception as error:  # the boundary to a backend, which may be anybody's: classified
            fault = _classified(task, error)
            if not last and fault.owner == "environment" and fault.retryable and fault.code != _LIMITED:
                continue
            return ImageStatus(
                image=task.sandbox.image,
                tasks=tuple(each.id for each in sharing),
                state="failed",
                seconds=round(time.monotonic() - began, 3),
                owner=fault.owner,
                code=fault.code,
                message=fault.message,
                fix=fault.fix,
                retryable=fault.retryable,
            )
        break
    return ImageStatus(
        image=task.sandbox.image,
        tasks=tuple(each.id for each in sharing),
        state="ready",
        digest=digest,
        seconds=round(time.monotonic() - began, 3),
        was_there=was_there,
    )


def _classified(task: Task, error: Exception) -> BoundaryError:
    if isinstance(error, BoundaryError):
        return error
    return SandboxError(
        f"The backend failed on the image of {task.id}: {type(error).__name__}: {error}.",
        fix="Report it to who wrote the backend.",
        code="backend_error",
        phase="prepare",
        retryable=False,
    )


def require_all(statuses: Sequence[ImageStatus]) -> None:
    """Raise `SandboxError` images_missing with the list of those that are not ready."""
    missing = [status for status in statuses if status.state == "failed"]
    if not missing:
        return
    told = [f"{s.image} ({s.code}, needed by {_few(s.tasks)}): {s.message}" for s in missing[:SHOWN]]
    told += [f"and {len(missing) - SHOWN} more"] if len(missing) > SHOWN else []
    fixes = dict.fromkeys(status.fix for status in missing[:SHOWN] if status.fix)
    raise SandboxError(
        f"{len(missing)} of {len(statuses)} images can not be had: " + "; ".join(told),
        fix=" ".join([*fixes, "See them all: agentrl tasks prepare."]),
        owner="task" if all(status.owner == "task" for status in missing) else "environment",
        code="images_missing",
        phase="prepare",
        retryable=any(status.retryable for status in missing),
        evidence={"missing": len(missing), "images": len(statuses)},
    )


def _few(ids: Sequence[str]) -> str:
    return ids[0] if len(ids) == 1 else f"{ids[0]} and {len(ids) - 1} more"
