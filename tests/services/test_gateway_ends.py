"""Leases, deadlines and restarts: whatever happens, each session ends once and leaves nothing behind."""

from __future__ import annotations

import asyncio

import pytest
from gateway_given import finished, ready, until, world

from agentrl.errors import SandboxError, StoreError
from agentrl.store import SessionMove, Store, Superseded
from agentrl.types import Task
from envs import grading
from harness.gateway import client as calls
from harness.gateway import wire


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_session_that_nobody_renews_ends_and_one_that_is_renewed_goes_on(store: Store, task: Task) -> None:
    clock = Clock()

    async def run() -> None:
        async with world(store, [task], clock=clock) as here:
            left = await ready(here, task, "left", lease_ttl_s=60)
            kept = await ready(here, task, "kept", lease_ttl_s=60)
            clock.now += 50
            held = await here.ada.send(calls.lease(kept.id, epoch=1, ttl_s=60))
            assert held.until == clock.now + 60
            clock.now += 20
            await until(lambda: store.session(left.id).ended_at is not None)
            row = store.session(left.id)
            assert row.state == "expired"
            verdict = await here.ada.send(finished(left.id))
            assert verdict.fault is not None
            assert (verdict.reward, verdict.fault.owner, verdict.fault.code) == (
                None,
                "gateway",
                "lease_expired",
            )
            assert (await here.ada.send(calls.session(kept.id))).state == "ready"
            await until(lambda: len(here.backend.live) == 1)
            clock.now += 61
            await here.quiet()

    asyncio.run(run())


def test_a_command_that_runs_for_nobody_is_ended_with_its_session(store: Store, task: Task) -> None:
    clock = Clock()

    async def run() -> None:
        async with world(store, [task], clock=clock) as here:
            view = await ready(here, task, lease_ttl_s=60)
            body = wire.ExecBody(exec_id="e", command="sleep 9")
            asked = asyncio.create_task(here.ada.send(calls.run(view.id, body)))
            await until(lambda: here.backend.running == 1)
            clock.now += 61
            with pytest.raises(SandboxError, match="Nobody renewed the lease"):
                await asked
            await here.quiet()
            assert here.backend.running == 0
            assert not any(here.gateway.permits.in_use.values())

    asyncio.run(run())


def test_a_stale_holder_is_refused_once_somebody_took_over(store: Store, task: Task) -> None:
    async def run() -> None:
        async with world(store, [task]) as here:
            view = await ready(here, task)
            await here.ada.send(calls.lease(view.id, epoch=2, ttl_s=60))
            with pytest.raises(SandboxError, match="held under epoch 2") as stale:
                await here.ada.send(calls.lease(view.id, epoch=1, ttl_s=60))
            assert stale.value.code == "stale_lease"
            async with here.raw() as http:
                old = await http.get(f"/v1/sessions/{view.id}", headers={"X-Lease-Epoch": "1"})
                assert (old.status_code, old.json()["code"]) == (409, "stale_lease")
                new = await http.get(f"/v1/sessions/{view.id}", headers={"X-Lease-Epoch": "2"})
                assert new.json()["lease"]["epoch"] == 2

    asyncio.run(run())


def test_an_absolute_deadline_ends_the_session_wherever_it_is(store: Store, task: Task) -> None:
    clock = Clock()

    async def run() -> None:
        async with world(store, [task], clock=clock, slots=1) as here:
            views = [
                await here.ada.send(
                    calls.open_session(
                        client_key=key, task_id=task.id, deadline_at=clock.now + 30, lease_ttl_s=3600
                    )
                )
                for key in ("running", "waiting")
            ]
            await here.ada.send(calls.session(views[0].id, wait_s=5))
            clock.now += 31
            await until(lambda: all(store.session(view.id).ended_at is not None for view in views))
            await here.quiet()
            for view in views:
                row = store.session(view.id)
                assert (row.state, store.session_log(view.id)[-1].code) == ("expired", "deadline")

    asyncio.run(run())


def test_a_gateway_that_starts_again_ends_what_lost_its_sandbox(store: Store, task: Task) -> None:
    """The first gateway is left as a killed process leaves it: its log says ready, nothing runs any more."""

    async def run() -> None:
        async with world(store, [task]) as first:
            view = await ready(first, task)
            waiting = [await ready(first, task, str(n)) for n in range(3)]
            assert first.gateway._journal is not None
            await first.gateway._journal.flushed()
            async with world(store, [task]) as second:
                assert second.gateway.epoch == first.gateway.epoch + 1
                for one in (view, *waiting):
                    seen = await second.ada.send(calls.session(one.id))
                    assert seen.fault is not None
                    assert (seen.state, seen.fault.owner, seen.fault.code) == (
                        *("failed", "environment", "lost_on_restart"),
                    )
                    assert seen.fault.retryable
                verdict = await second.ada.send(finished(view.id))
                assert verdict.reward is None
                assert grading.verify_signature(verdict, wire.signing_key(second.ada.token))
                lines = store.session_log(view.id)
                assert [line.state for line in lines][-3:] == ["ready", "lost", "failed"]
                assert [line.epoch for line in lines][-3:] == [1, 2, 2]
                # The older gateway is still there, and can write nothing any more.
                with pytest.raises(SandboxError, match="superseded"):
                    await first.ada.send(
                        calls.open_session(client_key="late", task_id=task.id, queue_timeout_s=0.1)
                    )
                async with first.raw(None) as http:
                    assert (await http.get("/readyz")).status_code == 503
                    assert (await http.get("/healthz")).status_code == 200
                assert store.session_log(view.id) == lines

    asyncio.run(run())


def test_stopping_the_gateway_gives_every_session_its_record(store: Store, task: Task) -> None:
    async def run() -> list[str]:
        async with world(store, [task], slots=2) as here:
            views = [
                await here.ada.send(calls.open_session(client_key=str(n), task_id=task.id)) for n in range(4)
            ]
            await until(lambda: len(here.backend.live) == 2)
        assert here.backend.live == set()
        assert here.backend.closed
        return [view.id for view in views]

    for session_id in asyncio.run(run()):
        assert store.session(session_id).state == "failed"
        assert store.session_log(session_id)[-1].code == "stopped"


def test_the_log_is_fenced_written_once_and_never_goes_on_after_an_end(store: Store, task: Task) -> None:
    async def run() -> str:
        async with world(store, [task]) as here:
            view = await ready(here, task)
            await here.ada.send(finished(view.id))
        return view.id

    session_id = asyncio.run(run())
    last = store.session_log(session_id)[-1]
    store.append_sessions("gateway", 1, [], [last])  # the same line again is once
    more = {name: getattr(last, name) for name in SessionMove.__slots__} | {"seq": last.seq + 1}
    with pytest.raises(StoreError, match="has ended"):
        store.append_sessions("gateway", 1, [], [SessionMove(**more)])
    assert store.begin_gateway("gateway") == 2
    with pytest.raises(Superseded, match="epoch 2 has started"):
        store.append_sessions("gateway", 1, [], [last])


def test_a_verifier_without_room_gets_that_of_the_attempt(
    store: Store, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.core.ROOM_S", 0.2)

    async def run() -> None:
        async with world(store, [task]) as here:

            async def only_one(operation: str, session: str) -> None:
                if operation == "create":
                    await until(lambda: not here.backend.live)

            view = await ready(here, task)
            here.backend.before = only_one
            verdict = await here.ada.send(finished(view.id))
            assert (verdict.reward, verdict.fault) == (1.0, None)
            await here.quiet()

    asyncio.run(run())


def test_an_attempts_sandbox_outlives_its_verifier_where_there_is_room(store: Store, task: Task) -> None:
    """So that a gateway which is killed meanwhile can have it judged again."""

    async def run() -> None:
        async with world(store, [task]) as here:
            beside: list[set[str]] = []

            async def look(operation: str, session: str) -> None:
                if operation == "create":
                    beside.append(set(here.backend.live))

            view = await ready(here, task)
            here.backend.before = look
            await here.ada.send(finished(view.id))
            assert beside == [{view.id}]

    asyncio.run(run())
