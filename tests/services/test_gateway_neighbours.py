"""Faults that are neighbours of those in the field's reports: clocks that are set, a store that is away for a
while, groups that can not get whole, numbers that no store holds, results that are gone."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gateway_given import MemoryBackend, finished, ready, task_at, tenant, until, world

from agentrl.errors import SandboxError, StoreError
from agentrl.store import Store
from agentrl.types import Fault, Task
from envs import session as sessions
from envs.sandbox.contract import Expired, NotRegular
from harness.gateway import client as calls
from harness.gateway import wire
from services.gateway import core, journal, metrics, process
from services.gateway.limits import MAX_FILE_BYTES


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def opened(task: Task, key: str, **more: Any) -> calls.Call[wire.SessionView]:
    return calls.open_session(client_key=key, task_id=task.id, **more)


# ---------------------------------------------------------------------------------------------------- clocks


@pytest.mark.parametrize("jump_s", [86_400.0, -86_400.0])
def test_who_sets_the_machines_clock_ends_no_session_and_keeps_none_alive(
    store: Store, task: Task, jump_s: float
) -> None:
    wall, steady = Clock(), Clock()
    wall.now = 1e9

    async def run() -> None:
        async with world(store, [task], slots=1, clock=wall, steady=steady) as here:
            held = await ready(here, task, "held", lease_ttl_s=60)
            waiting = await here.ada.send(opened(task, "waiting", queue_timeout_s=60, lease_ttl_s=60))
            wall.now += jump_s
            await asyncio.sleep(0.05)  # the reaper has looked
            seen = await here.ada.send(calls.session(held.id))
            assert (seen.state, seen.lease.until) == ("ready", wall.now + 60)
            assert (await here.ada.send(calls.session(waiting.id))).state == "queued"
            steady.now += 61
            await until(lambda: all(store.session(v.id).ended_at is not None for v in (held, waiting)))
            assert {store.session(v.id).state for v in (held, waiting)} == {"expired"}
            await here.quiet()

    asyncio.run(run())


def test_a_task_is_validated_again_after_a_month(store: Store, task: Task) -> None:
    """What it depends on may have changed since, a date for one. The fake's tests pass whatever is done."""
    wall = Clock()
    wall.now = time.time()

    async def run(admission: str) -> bool | None:
        async with world(store, [task], clock=wall, admission=admission) as here:
            await ready(here, task, f"k{wall.now}{admission}")
            (seen,) = await here.ada.send(calls.tasks())
            return seen.admitted

    assert asyncio.run(run("light")) is True
    wall.now += core.ADMISSION_FRESH_S + 60
    assert asyncio.run(run("stored")) is True  # nothing else is asked for
    assert asyncio.run(run("light")) is False


# ----------------------------------------------------------------------------------------------------- store


def test_an_end_that_could_not_be_written_is_told_as_soon_as_it_can(
    store: Store, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = False
    append = store.append_sessions

    def written(*given: Any) -> None:
        if away:
            raise StoreError("database or disk is full")
        append(*given)

    monkeypatch.setattr(store, "append_sessions", written)

    async def run() -> None:
        nonlocal away
        async with world(store, [task]) as here, here.raw() as http:
            view = await ready(here, task)
            left = await ready(here, task, "left")
            away = True
            monkeypatch.setattr(journal, "FLUSH_DEADLINE_S", 0.2)
            url, body = f"/v1/sessions/{view.id}/finalize", {"termination": "finished"}
            for _ in range(2):
                async with asyncio.timeout(60):
                    while (answer := await http.post(url, json=body)).status_code == 202:
                        pass  # it is still judged
                assert (answer.status_code, answer.json()["code"]) == (503, "store")
                assert answer.headers["retry-after"]
            assert (await http.get(f"/v1/sessions/{view.id}")).status_code == 503
            assert (await http.delete(f"/v1/sessions/{left.id}")).status_code == 503
            assert (await http.get("/readyz")).status_code == 503
            away = False
            monkeypatch.setattr(journal, "FLUSH_DEADLINE_S", 30.0)
            assert (await here.ada.send(finished(view.id))).reward == 1.0
            assert (await here.ada.send(calls.session(view.id))).state == "done"
            assert (await here.ada.send(calls.delete(left.id))).state == "cancelled"
            assert (store.session(view.id).state, store.session(left.id).state) == ("done", "cancelled")
            await until(lambda: here.gateway.trouble() is None)

    asyncio.run(run())


def test_a_number_that_no_store_holds_is_refused_and_stops_nobodys_log(store: Store, task: Task) -> None:
    async def run() -> None:
        async with world(store, [task]) as here, here.raw() as http:
            view = await ready(here, task)
            huge = await http.post(f"/v1/sessions/{view.id}/lease", json={"epoch": 2**63, "ttl_s": 60})
            assert (huge.status_code, huge.json()["code"]) == (422, "malformed")
            await here.ada.send(calls.lease(view.id, epoch=wire.MAX_EPOCH, ttl_s=60))
            assert (await here.ada.send(finished(view.id))).reward == 1.0
            assert store.session(view.id).lease_epoch == wire.MAX_EPOCH
            bad = {"owner": "model", "code": "a\0b", "phase": "p", "retryable": True, "message": "m"}
            view = await ready(here, task, "other")
            for code in ("a\0b", "a\nb", "x" * 201):
                body = {"termination": "fault", "fault": {**bad, "code": code}}
                answer = await http.post(f"/v1/sessions/{view.id}/finalize", json=body)
                assert (answer.status_code, answer.json()["code"]) == (422, "malformed")
            assert (await here.ada.send(calls.session(view.id))).state == "ready"

    asyncio.run(run())


def test_codes_that_callers_make_up_do_not_grow_the_metrics_for_ever() -> None:
    made = metrics.Metrics()
    for number in range(metrics.MOST_CODES + 50):
        fault = Fault(owner="model", code=f"c{number}", phase="p", retryable=True, message="m")
        made.ended(core.State.FAILED, fault, "small/one")
    page = made.page({}, 0, {}).decode()
    lines = [line for line in page.splitlines() if line.startswith("agentrl_sessions_ended_total{")]
    assert len(lines) == metrics.MOST_CODES + 1
    assert any('code="other"' in line and line.endswith(" 50.0") for line in lines)


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        *(("", 1.0), (" a", 1.0), ("a\nb", 1.0), ("a\0", 1.0), ("x" * 101, 1.0)),
        *(("a", float("nan")), ("a", float("inf")), ("a", 0.0), ("a", -1.0)),
    ],
)
def test_a_tenant_that_nobody_could_serve_is_not_made(store: Store, name: str, weight: float) -> None:
    with pytest.raises(Exception, match=r"tenant|Tenant") as refused:
        process.add_tenant(store.url, name, weight=weight, max_sessions=1, max_queue=1)
    assert refused.value.exit_code == 2  # type: ignore[attr-defined]
    assert [row.name for row in store.tenants()] == ["ada", "bob"]


def test_tenants_may_be_named_in_any_script(store: Store) -> None:
    process.add_tenant(store.url, "équipe 研究", weight=1.0, max_sessions=1, max_queue=1)
    assert "équipe 研究" in [row.name for row in store.tenants()]


# ---------------------------------------------------------------------------------------------------- groups


def test_two_groups_in_a_short_queue_do_not_wait_for_each_other_for_ever(store: Store, task: Task) -> None:
    """Four places, two groups of three, one member of each by turns: the first keeps places for all of its
    own."""
    store.add_tenant(tenant("ada", max_queue=4))

    async def run() -> None:
        async with world(store, [task], slots=3) as here, here.raw() as http:

            async def ask(group: str, member: int) -> int:
                body = {"client_key": f"{group}{member}", "task": {"id": task.id}}
                more = {"group_id": group, "group_size": 3}
                return (await http.post("/v1/sessions", json={**body, **more})).status_code

            asked = [await ask(group, member) for member in range(3) for group in ("a", "b")]
            assert asked[0] == asked[2] == 202
            assert asked[4] in (201, 202)
            assert asked[1] == asked[3] == 429  # with its whole group, not member by member
            view = await here.ada.send(opened(task, "a0", group_id="a", group_size=3))
            assert (await here.ada.send(calls.session(view.id, wait_s=30))).state == "ready"

    asyncio.run(run())


def test_a_group_has_one_size_and_must_fit_the_queue(store: Store, task: Task) -> None:
    store.add_tenant(tenant("ada", max_queue=3))

    async def run() -> None:
        async with world(store, [task], slots=8) as here, here.raw() as http:

            async def ask(key: str, size: int) -> tuple[int, str]:
                body = {"client_key": key, "task": {"id": task.id}, "group_id": "g", "group_size": size}
                answer = await http.post("/v1/sessions", json=body)
                return answer.status_code, answer.json().get("code", "")

            assert await ask("0", 4) == (422, "never_fits")
            assert (await ask("0", 3))[0] == 202
            assert await ask("1", 2) == (409, "other_group_size")
            assert (await ask("1", 3))[0] == 202
            assert (await ask("1", 3))[0] == 202  # the same member again is no other one
            assert (await ask("2", 3))[0] in (201, 202)
            for key in "012":
                view = await here.ada.send(opened(task, key, group_id="g", group_size=3))
                assert (await here.ada.send(calls.session(view.id, wait_s=30))).state == "ready"
            assert here.backend.most_live == 3

    asyncio.run(run())


# ---------------------------------------------------------------------------------------------- what is gone


def test_a_result_that_the_sandbox_no_longer_has_ends_no_session(store: Store, task: Task) -> None:
    gone = False

    async def before(operation: str, session: str) -> None:
        if operation == "exec" and gone:
            raise Expired("command e has run; its result is no longer kept")
        if operation == "read_file":
            raise NotRegular("pipe is not a regular file")

    async def run() -> None:
        nonlocal gone
        async with world(store, [task], backend=MemoryBackend(before=before)) as here, here.raw() as http:
            view = await ready(here, task)
            live = here.gateway._live[view.id]
            assert live.session is not None
            live.session.past_execs = {f"{view.id}.x.e": None}  # sent by a process before this one
            gone = True
            url = f"/v1/sessions/{view.id}/exec"
            asked = await http.get(f"{url}/e")
            assert asked.status_code in (202, 410)
            told = await http.get(f"{url}/e", params={"wait_s": 30})
            assert (told.status_code, told.json()["code"]) == (410, "forgotten")
            again = await http.post(url, json={"exec_id": "e", "command": "make all"})
            assert (again.status_code, again.json()["code"]) == (410, "forgotten")  # not "used otherwise"
            pipe = await http.get(f"/v1/sessions/{view.id}/files", params={"path": "pipe"})
            assert (pipe.status_code, pipe.json()["code"]) == (409, "not_regular")
            gone = False
            assert (await here.ada.send(calls.session(view.id))).state == "ready"
            done = await here.ada.send(calls.run(view.id, wire.ExecBody(exec_id="f", command="true")))
            assert done.exit_code == 0

    asyncio.run(run())


def test_a_file_beyond_the_limit_is_refused_and_one_at_the_limit_is_whole(store: Store, task: Task) -> None:
    async def run() -> None:
        async with world(store, [task]) as here, here.raw() as http:
            view = await ready(here, task)
            live = here.gateway._live[view.id]
            assert live.session is not None
            whole = bytes(range(256)) * (MAX_FILE_BYTES // 256)
            await live.session.write_file("whole", whole, mode=None)
            await live.session.write_file("more", whole + b"x", mode=None)
            url = f"/v1/sessions/{view.id}/files"
            got = await http.get(url, params={"path": "whole"})
            assert (got.status_code, got.content == whole) == (200, True)
            more = await http.get(url, params={"path": "more"})
            assert (more.status_code, more.json()["code"]) == (413, "file_too_large")
            assert (await http.put(url, params={"path": "again"}, content=whole)).status_code == 200
            sent = await http.put(url, params={"path": "again"}, content=whole + b"x")
            assert (sent.status_code, sent.json()["code"]) == (413, "too_large")
            assert (await http.get(url, params={"path": "again"})).content == whole

    asyncio.run(run())


def test_arguments_of_any_depth_get_a_typed_answer_and_end_nothing(store: Store, task: Task) -> None:
    async def run() -> None:
        async with world(store, [task]) as here, here.raw() as http:
            view = await ready(here, task)
            for depth in (10, 500, 800, 900, 950, 990, 1000, 5000):
                deep = "[" * depth + "]" * depth
                body = f'{{"call_id": "c{depth}", "arguments": {{"command": {deep}}}}}'
                answer = await http.post(
                    f"/v1/sessions/{view.id}/tools/bash",
                    content=body,
                    headers={"Content-Type": "application/json"},
                )
                assert answer.status_code in (200, 400, 422), (depth, answer.text)
                if answer.status_code != 200:
                    assert wire.ErrorBody.model_validate(answer.json()).fix
            surrogate = await http.post(
                f"/v1/sessions/{view.id}/tools/bash",
                content=b'{"call_id": "s", "arguments": {"command": "\\ud800", "\\udfff": 1}}',
                headers={"Content-Type": "application/json"},
            )
            assert (surrogate.status_code, surrogate.json().get("is_error")) in ((200, True), (422, None))
            assert (await here.ada.send(calls.session(view.id))).state == "ready"

    asyncio.run(run())


# ---------------------------------------------------------------------------------------------- no more room


def test_a_disk_that_is_nearly_full_stops_new_sandboxes_and_nothing_else(store: Store, task: Task) -> None:
    why: str | None = None

    async def run() -> None:
        nonlocal why
        backend: Any = MemoryBackend()
        backend.short_of = lambda: why
        async with world(store, [task], backend=backend) as here:
            lives = await ready(here, task, "lives")
            why = "The disk has 3 MiB left."
            await until(lambda: here.gateway.slots.paused is not None)
            waits = await here.ada.send(opened(task, "waits"))
            assert waits.state == "queued"
            capacity = await here.ada.send(calls.capacity())
            assert capacity.slots.paused == "disk_pressure: The disk has 3 MiB left."
            done = await here.ada.send(calls.run(lives.id, wire.ExecBody(exec_id="e", command="true")))
            assert done.exit_code == 0
            assert (await here.ada.send(finished(lives.id))).reward == 1.0
            why = None
            assert (await here.ada.send(calls.session(waits.id, wait_s=30))).state == "ready"

    asyncio.run(run())


def test_an_image_that_is_never_ready_is_the_environments_fault_in_time(
    store: Store, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "PREPARE_DEADLINE_S", 0.1)

    async def before(operation: str, session: str) -> None:
        if operation == "prepare":
            await asyncio.sleep(3600)

    async def run() -> None:
        async with world(store, [task], backend=MemoryBackend(before=before)) as here:
            view = await ready(here, task)
            assert view.fault is not None
            assert (view.state, view.fault.owner, view.fault.code) == ("failed", "environment", "no_answer")
            assert view.fault.phase == "prepare"
            await here.quiet()

    asyncio.run(run())


def test_what_was_asked_in_other_words_under_one_id_is_refused_for_calls_too(
    store: Store, task: Task
) -> None:
    async def run() -> None:
        async with world(store, [task]) as here:
            view = await ready(here, task)

            def bash(command: str) -> calls.Call[Any]:
                return calls.tool(
                    view.id,
                    "bash",
                    call_id="1",
                    action_id="a",
                    arguments={"command": command},
                    deadline_s=5,
                )

            first, _ = await here.ada.send(bash("echo one"))
            assert (await here.ada.send(bash("echo one")))[0] == first
            with pytest.raises(SandboxError, match="something else"):
                await here.ada.send(bash("echo two"))
            assert len(here.backend.ran) == 1
            verdicts = [await here.ada.send(finished(view.id)) for _ in range(2)]
            other = replace(
                finished(view.id), body=json.dumps({"termination": "cancelled", "fault": None}).encode()
            )
            verdicts.append(await here.ada.send(other))
            assert verdicts[0] == verdicts[1] == verdicts[2]  # judged once, however it is asked

    asyncio.run(run())


# -------------------------------------------------------------------------------------------------- starting


def test_a_gateway_starts_whatever_one_session_or_one_tenants_package_is(
    store: Store, task: Task, tmp_path: Path
) -> None:
    """A row of another version of this program, an adoption that breaks, an upload that is damaged."""
    uploads = tmp_path / "uploads"
    task_at(uploads / "good", "good")
    task_at(uploads / "bad", "bad")
    (uploads / "bad" / "task.toml").write_text("[[[")

    async def adopt(session: str) -> None:
        raise KeyError("a note that is not there")

    async def forget() -> int:
        return 0

    async def run() -> None:
        async with world(store, [task]) as first:
            views = [await ready(first, task, str(number)) for number in range(3)]
            assert first.gateway._journal is not None
            await first.gateway._journal.flushed()
            with sqlite3.connect(store.url.removeprefix("sqlite:///")) as connection:
                change = "update sessions set body = ? where id = ?"
                connection.execute(change, ('{"client_key": "0", "colour": "blue"}', views[0].id))
            connection.close()
            backend: Any = MemoryBackend()
            backend.outlive, backend.adopt, backend.forget = (lambda _: None), adopt, forget
            async with world(store, [task], backend=backend, uploads=uploads) as second:
                assert sorted(second.gateway.tasks) == ["small/good", "small/one"]
                for view in views:
                    row = store.session(view.id)
                    assert (row.state, store.session_log(view.id)[-1].code) == ("failed", "lost_on_restart")
                for view in views[1:]:
                    assert (await second.ada.send(finished(view.id))).reward is None
                async with second.raw() as http:
                    assert (await http.get(f"/v1/sessions/{views[0].id}")).status_code == 409
                assert (await ready(second, task, "new")).state == "ready"

    asyncio.run(run())
