"""Who comes next, how much is given out, and that waiting costs nobody their time."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from gateway_given import MemoryBackend, World, tenant, until, world

from agentrl.errors import SandboxError
from agentrl.store import Store
from agentrl.types import Task, Termination
from harness.gateway import client as calls
from harness.gateway import wire
from services.gateway.ration import Ration


def ration(slots: float, **weights: float) -> Ration:
    made = Ration(slots=slots)
    for name, weight in weights.items():
        made.tenant(name, weight=weight)
    return made


def order(made: Ration, waiting: dict[str, list[int]]) -> list[str]:
    """In which order units of these sizes are granted, one after the other as slots come back."""
    claims = {
        name: [[made.claim(name, slots=1) for _ in range(size)] for size in sizes]
        for name, sizes in waiting.items()
    }
    for name in waiting:
        for unit in claims[name]:
            made.queue(unit)
    seen: list[str] = []
    units = [(name, unit) for name, some in claims.items() for unit in some]
    while units:
        granted = [(n, u) for n, u in units if all(c.granted_at is not None for c in u)]
        assert granted, "somebody must be served"
        assert not any(0 < sum(c.granted_at is not None for c in u) < len(u) for _, u in units)
        for name, unit in granted:
            seen.append(name)
            units.remove((name, unit))
            for claim in unit:
                made.release(claim)
    return seen


def test_tenants_are_served_by_weight_and_in_order_of_their_own_queue() -> None:
    async def run() -> None:
        served = order(ration(1, ada=2.0, bob=1.0), {"ada": [1] * 8, "bob": [1] * 8})
        assert [served[:6].count("ada"), served[:9].count("ada")] == [4, 6]
        assert sorted(served) == ["ada"] * 8 + ["bob"] * 8

    asyncio.run(run())


def test_a_tenant_that_was_idle_has_saved_nothing() -> None:
    async def run() -> None:
        made = ration(1, ada=1.0, bob=1.0)
        order(made, {"ada": [1] * 50})
        served = order(made, {"ada": [1] * 4, "bob": [1] * 4})
        assert served[:4].count("bob") == 2

    asyncio.run(run())


def test_a_large_group_is_not_overtaken_for_ever_by_small_ones() -> None:
    async def run() -> None:
        made = ration(4, ada=1.0, bob=1.0)
        first = [made.claim("bob", slots=1) for _ in range(3)]
        made.queue(first)
        group = [made.claim("ada", slots=1) for _ in range(4)]
        made.queue(group)
        late = [made.claim("bob", slots=1) for _ in range(2)]
        made.queue(late)
        assert made.in_use["slots"] == 3
        for claim in first:
            made.release(claim)
        assert all(claim.granted_at is not None for claim in group)
        assert all(claim.granted_at is None for claim in late)

    asyncio.run(run())


def opened(task: Task, key: str, **more: Any) -> calls.Call[wire.SessionView]:
    return calls.open_session(client_key=key, task_id=task.id, **more)


async def states(here: World, views: list[wire.SessionView]) -> list[str]:
    return [(await here.ada.send(calls.session(view.id))).state for view in views]


def test_more_than_fits_waits_with_its_place_and_then_gets_a_slot(store: Store, task: Task) -> None:
    async def run() -> None:
        async with world(store, [task], slots=2) as here:
            views = [await here.ada.send(opened(task, str(n))) for n in range(4)]
            assert [v.position for v in views] == [None, None, 1, 2]
            assert (await here.ada.send(opened(task, "3"))).id == views[3].id  # asked again: no new place
            capacity = await here.ada.send(calls.capacity())
            assert (capacity.slots.in_use["slots"], capacity.slots.waiting) == (2.0, {"ada": 2})
            await here.ada.send(calls.session(views[0].id, wait_s=5))
            await here.ada.send(calls.delete(views[0].id))
            assert (await here.ada.send(calls.session(views[2].id, wait_s=5))).state == "ready"
            assert (await here.ada.send(calls.session(views[3].id))).position == 1
            assert here.backend.most_live == 2

    asyncio.run(run())


def test_a_full_queue_is_a_429_with_retry_after_and_leaves_nothing(store: Store, task: Task) -> None:
    store.add_tenant(tenant("ada", max_queue=1))

    async def run() -> None:
        async with world(store, [task], slots=1) as here:
            for key in ("a", "b"):
                await here.ada.send(opened(task, key))
            async with here.raw() as http:
                answer = await http.post("/v1/sessions", json={"client_key": "c", "task": {"id": task.id}})
                told = wire.ErrorBody.model_validate(answer.json())
                assert (answer.status_code, told.code, told.retryable) == (429, "queue_full", True)
                assert int(answer.headers["retry-after"]) >= 1
            assert store.find_session("ada", client_key="c") is None
            assert (await here.bob.send(opened(task, "c"))).state == "queued"  # bob has a queue of his own

    asyncio.run(run())


def test_the_members_of_a_group_are_admitted_together_or_not_at_all(store: Store, task: Task) -> None:
    async def run() -> None:
        async with world(store, [task], slots=3) as here:
            holder = await here.ada.send(opened(task, "holder"))
            await here.ada.send(calls.session(holder.id, wait_s=5))
            members = [
                await here.ada.send(opened(task, f"g{n}", group_id="g", group_size=3)) for n in range(3)
            ]
            await asyncio.sleep(0.05)
            assert await states(here, members) == ["queued"] * 3  # two slots are free, three are needed
            await here.ada.send(calls.delete(holder.id))
            for view in members:
                assert (await here.ada.send(calls.session(view.id, wait_s=5))).state == "ready"
            await here.ada.send(calls.delete(members[0].id))
            again = await here.ada.send(opened(task, "g0-again", group_id="g", group_size=3))
            again = await here.ada.send(calls.session(again.id, wait_s=5))
            assert again.state == "ready"  # the member is run again while its group is open

    asyncio.run(run())


def test_a_group_that_never_gets_whole_ends_and_says_why(store: Store, task: Task) -> None:
    async def run() -> None:
        async with world(store, [task]) as here:
            asked = opened(task, "g0", group_id="g", group_size=2, queue_timeout_s=0.05)
            view = await here.ada.send(asked)
            view = await here.ada.send(calls.session(view.id, wait_s=5))
            assert view.fault is not None
            assert (view.state, view.fault.code) == ("expired", "queue_timeout")
            assert "members of its group are missing" in view.fault.message
            await here.quiet()

    asyncio.run(run())


def test_waiting_for_a_run_permit_is_never_charged_to_the_command(store: Store, task: Task) -> None:
    """One permit, eight commands of 0.1 s with 0.3 s each: the last one waits longer than its limit."""

    async def run() -> None:
        async with world(store, [task], slots=8, permits=1, creates=8) as here:
            views = [await here.ada.send(opened(task, str(n))) for n in range(8)]
            for view in views:
                await here.ada.send(calls.session(view.id, wait_s=5))
            body = wire.ExecBody(exec_id="e", command="sleep 0.1", timeout_s=0.3)
            results = await asyncio.gather(*(here.ada.send(calls.run(v.id, body)) for v in views))
            assert [r.status for r in results] == ["exited"] * 8
            assert max(r.queue_ms for r in results) > 300
            assert here.backend.most_running == 1

    asyncio.run(run())


def test_finished_work_is_verified_while_every_slot_is_taken(store: Store, task: Task) -> None:
    async def run() -> None:
        async with world(store, [task], slots=2, verify=1) as here:
            views = [await here.ada.send(opened(task, str(n))) for n in range(6)]
            for view in views[:2]:
                await here.ada.send(calls.session(view.id, wait_s=5))
                call = calls.finalize(view.id, termination=Termination.FINISHED, fault=None, deadline_s=20)
                assert (await here.ada.send(call)).reward == 1.0
            assert here.backend.most_verifying == 1
            assert here.backend.most_live <= 2

    asyncio.run(run())


def test_failing_creations_open_the_breaker_and_nobody_new_is_failed_by_it(
    store: Store, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.core.BREAKER_PAUSE_S", 0.3)
    broken = True

    async def before(operation: str, session: str) -> None:
        if operation == "create" and broken:
            raise SandboxError("The engine is away.", code="engine", phase="create")

    async def run() -> None:
        nonlocal broken
        async with world(store, [task], backend=MemoryBackend(before=before), slots=1) as here:
            for number in range(5):
                view = await here.ada.send(opened(task, str(number)))
                view = await here.ada.send(calls.session(view.id, wait_s=5))
                assert view.fault is not None
                assert (view.state, view.fault.owner) == ("failed", "environment")
            capacity = await here.ada.send(calls.capacity())
            assert (capacity.breaker, capacity.limiters["create"].limit) == ("open", 1.0)
            assert capacity.slots.paused is not None
            broken = False
            began = time.monotonic()
            view = await here.ada.send(opened(task, "later"))
            assert view.state == "queued"
            assert (await here.ada.send(calls.session(view.id, wait_s=5))).state == "ready"
            assert time.monotonic() - began < 3
            assert (await here.ada.send(calls.capacity())).breaker == "closed"

    asyncio.run(run())


def test_how_many_attempts_are_masked_is_a_number_with_their_task(store: Store, task: Task) -> None:
    async def before(operation: str, session: str) -> None:
        await asyncio.sleep(0)
        if operation == "create" and here.gateway._live[session].request.client_key == "bad":
            raise SandboxError("no disk", code="no_disk", phase="create")

    async def run() -> None:
        nonlocal here
        async with world(store, [task], backend=MemoryBackend(before=before)) as here:
            for key in ("bad", "unwanted"):
                view = await here.ada.send(opened(task, key))
                await here.ada.send(calls.session(view.id, wait_s=5))
            await here.ada.send(calls.delete(view.id))
            async with here.raw(None) as http:
                page = (await http.get("/metrics")).text
            assert "agentrl_masked_rate 1.0" in page  # who deletes a session says nothing of how it would end
            assert f'agentrl_sessions_masked_total{{task="{task.id}"}} 1.0' in page

    here: World
    asyncio.run(run())


def test_numbers_for_prometheus_add_up(store: Store, task: Task) -> None:
    async def run() -> None:
        async with world(store, [task], slots=2) as here:
            for key in ("a", "b", "c"):
                await here.ada.send(opened(task, key))
            await until(lambda: len(here.backend.live) == 2)
            async with here.raw(None) as http:
                page = (await http.get("/metrics")).text
                assert 'agentrl_sessions{state="queued"} 1.0' in page
                assert 'agentrl_in_use{resource="session_slots"} 2.0' in page
                assert (await http.get("/readyz")).json() == {"ok": True, "epoch": 1}

    asyncio.run(run())
