"""Several attempts at one task, to be compared; and many such groups as a stream.

While a group is open, a member that was ended by a fault of the environment, the gateway or the model is run
again as a whole, at most `MAX_RERUNS` times. The faulted attempts are handed back beside the group: they are
evidence too (of the environment), to be stored and counted. Every attempt that was started is returned
exactly once, unless the caller cancels.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from agentrl.types import Group, Task, Trajectory

MAX_RERUNS = 2
"""Further tries of one member whose attempt ended by a fault that is nobody's in the group."""
RERUN_OWNERS = frozenset({"environment", "gateway", "model"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """One group to be made. `id` is unique in a run."""

    id: str
    task: Task
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """`group` has one trajectory per member; `faulted` are the attempts that were run again."""

    group: Group
    faulted: tuple[Trajectory, ...]

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """Everything that was attempted."""
        return (*self.faulted, *self.group.trajectories)


MakeAttempt = Callable[[Task, str, int, int], Awaitable[Trajectory]]
"""(task, group id, member index, attempt number) to a trajectory: `run_one` with everything else bound."""


def wants_rerun(trajectory: Trajectory) -> bool:
    """Whether the attempt says nothing about the policy and another try may."""
    fault = trajectory.verdict.fault
    return fault is not None and fault.retryable and fault.owner in RERUN_OWNERS


async def run(
    request: GroupRequest,
    make: MakeAttempt,
    *,
    limit: asyncio.Semaphore | None = None,
    max_reruns: int = MAX_RERUNS,
    member_done: Callable[[], None] | None = None,
) -> GroupOutcome:
    """Run the members of one group at once, each under `limit`, and those that faulted again.

    A member that faults every time stays in the group as its last attempt, without a reward. `member_done` is
    called as each member gets its final trajectory. If one member
    raises (a `ConfigError`, a cancellation), the others are cancelled and their sessions closed.
    """
    faulted: list[Trajectory] = []

    async def member(index: int) -> Trajectory:
        attempt = 1
        while True:
            async with limit or nullcontext():
                trajectory = await make(request.task, request.id, index, attempt)
            if attempt > max_reruns or not wants_rerun(trajectory):
                if member_done is not None:
                    member_done()
                return trajectory
            faulted.append(trajectory)
            attempt += 1

    try:
        async with asyncio.TaskGroup() as tasks:
            members = [tasks.create_task(member(index)) for index in range(request.size)]
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from several
    return GroupOutcome(
        group=Group(
            id=request.id, task_id=request.task.id, trajectories=tuple(task.result() for task in members)
        ),
        faulted=tuple(faulted),
    )


async def run_many(
    requests: Iterable[GroupRequest], make: MakeAttempt, *, concurrency: int, max_reruns: int = MAX_RERUNS
) -> AsyncGenerator[GroupOutcome]:
    """Groups as they finish, at most `concurrency` attempts at once.

    `requests` may be endless: a group is taken from it only when its members find room. Close the iterator
    (`contextlib.aclosing`) to stop early: what runs is cancelled and waited for.
    """
    limit = asyncio.Semaphore(concurrency)
    source: Iterator[GroupRequest] = iter(requests)
    running: set[asyncio.Task[GroupOutcome]] = set()
    room = asyncio.Event()
    unfinished = 0
    exhausted = False

    def member_done() -> None:
        nonlocal unfinished
        unfinished -= 1
        room.set()

    waiting: asyncio.Task[bool] | None = None
    try:
        while True:
            while not exhausted and unfinished < concurrency:
                request = next(source, None)
                if request is None:
                    exhausted = True
                    break
                unfinished += request.size
                running.add(
                    asyncio.create_task(
                        run(request, make, limit=limit, max_reruns=max_reruns, member_done=member_done)
                    )
                )
            if not running:
                return
            room.clear()
            waiting = asyncio.create_task(room.wait())
            await asyncio.wait({*running, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            for task in [task for task in running if task.done()]:
                running.discard(task)
                yield task.result()
    finally:
        ending: list[asyncio.Task[Any]] = [*running, *([waiting] if waiting is not None else [])]
        for left in ending:
            left.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
