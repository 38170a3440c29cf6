"""Groups of the training loop at a gateway: admitted whole, and only the faulted member is run again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

from gateway_given import TOKENS, URL, MemoryBackend, World, world

from agentrl.errors import SandboxError
from agentrl.inference.scripted import ScriptedSampler
from agentrl.learner.small import build_tokenizer
from agentrl.store import Store
from agentrl.training import places
from agentrl.types import Task, Trajectory
from harness.chat import ChatFormat
from harness.demonstrator import tool_call
from harness.gateway.client import AsyncClient
from harness.gateway.remote import GatewayPlace
from harness.group import GroupOutcome, GroupRequest, MakeAttempt, run_many
from harness.rollout import RolloutSettings, run_one

SIZE = 3
GROUPS = 4


def attempts(place: GatewayPlace, task: Task, chat: ChatFormat) -> MakeAttempt:
    """As the training loop makes them, with a scripted policy."""
    lines = [tool_call("bash", command="echo on"), tool_call("submit")]

    async def make(given: Task, group_id: str, index: int, attempt: int) -> Trajectory:
        return await run_one(
            given,
            sampler=ScriptedSampler(lambda request, number: lines[number], encode=chat.encode_reply),
            chat=chat,
            backend=place,
            group_id=group_id,
            index=index,
            signing_key=b"key of the run",
            settings=RolloutSettings(require_log_probs=False),
            attempt=attempt,
            open_session=places.open_session(place),
        )

    return make


async def collected(here: World, task: Task, *, concurrency: int) -> list[GroupOutcome]:
    client = AsyncClient(URL, token=TOKENS["ada"], way=here.transport)
    place = GatewayPlace(URL, name="memory", isolation="docker", client=client)
    chat = ChatFormat(build_tokenizer([task.instruction] * 50, vocabulary=400))

    def requests() -> Iterator[GroupRequest]:
        for number in range(GROUPS):
            places.expect(place, f"run-g{number}", min(SIZE, concurrency))
            yield GroupRequest(id=f"run-g{number}", task=task, size=SIZE)

    made = attempts(place, task, chat)
    outcomes = [outcome async for outcome in run_many(requests(), made, concurrency=concurrency)]
    await place.close()
    return outcomes


def test_a_group_is_admitted_whole_though_single_members_would_fit(store: Store, task: Task) -> None:
    """Four slots, groups of three, eight attempts at once: never members of two groups side by side."""
    together: list[Counter[str | None]] = []

    async def run() -> None:
        async def looks(operation: str, session: str) -> None:
            await asyncio.sleep(0.002)
            if operation == "exec" and "-verify" not in session:
                together.append(
                    Counter(
                        here.gateway._live[name].request.group_id
                        for name in here.backend.live
                        if name in here.gateway._live and not here.gateway._live[name].ended
                    )
                )

        backend = MemoryBackend(before=looks)
        async with world(store, [task], backend=backend, slots=SIZE + 1, permits=8, verify=4) as here:
            outcomes = await collected(here, task, concurrency=8)
            assert sorted(outcome.group.id for outcome in outcomes) == [f"run-g{n}" for n in range(GROUPS)]
            assert {t.verdict.reward for o in outcomes for t in o.trajectories} == {1.0}
            await here.quiet()

    asyncio.run(run())
    assert together
    assert {len(groups) for groups in together} == {1}


def test_the_faulted_member_alone_is_run_again_while_its_group_is_open(store: Store, task: Task) -> None:
    faulted: set[str] = set()

    async def run() -> None:
        async def breaks(operation: str, session: str) -> None:
            await asyncio.sleep(0)
            if operation != "create" or "-verify" in session:
                return
            key = here.gateway._live[session].request.client_key
            if key.startswith(("run-g1.2.1", "run-g2.0.1")):
                faulted.add(key.partition(":")[0])
                raise SandboxError("no sandbox for this one", code="create", phase="create")

        backend = MemoryBackend(before=breaks)
        async with world(store, [task], backend=backend, slots=SIZE + 1, permits=8, verify=4) as here:
            outcomes = {o.group.id: o for o in await collected(here, task, concurrency=8)}
            assert faulted == {"run-g1.2.1", "run-g2.0.1"}
            assert {name: [t.id for t in o.faulted] for name, o in outcomes.items()} == {
                "run-g0": [],
                "run-g1": ["run-g1.2.1"],
                "run-g2": ["run-g2.0.1"],
                "run-g3": [],
            }
            tries = [t.id for o in outcomes.values() for t in o.trajectories]
            assert sorted(t for t in tries if t.endswith(".2")) == ["run-g1.2.2", "run-g2.0.2"]
            assert len(tries) == GROUPS * SIZE + 2
            await here.quiet()

    asyncio.run(run())


def test_a_loop_that_runs_fewer_at_once_than_a_group_has_still_goes_on(store: Store, task: Task) -> None:
    async def run() -> None:
        async with world(store, [task], slots=SIZE + 1) as here:
            outcomes = await asyncio.wait_for(collected(here, task, concurrency=2), 60)
            rewards: list[Any] = [t.verdict.reward for o in outcomes for t in o.group.trajectories]
            assert rewards == [1.0] * (GROUPS * SIZE)

    asyncio.run(run())
