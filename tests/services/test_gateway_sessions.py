"""Sessions over HTTP: what a caller gets, once, and what nobody else gets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gateway_given import MemoryBackend, World, prepared_store, until, world

from agentrl.errors import ConfigError, SandboxError, SandboxLost
from agentrl.store import Store
from agentrl.types import EvidenceKey, Fault, Task, Termination
from envs import grading
from harness.gateway import client as calls
from harness.gateway import wire


async def ready(here: World, task: Task, key: str = "k", **more: Any) -> wire.SessionView:
    client = more.pop("client", here.ada)
    view = await client.send(calls.open_session(client_key=key, task_id=task.id, **more))
    return await client.send(calls.session(view.id, wait_s=5.0))


def bash(session_id: str, command: str, call_id: str = "1") -> calls.Call[Any]:
    return calls.tool(
        session_id, "bash", call_id=call_id, action_id="a", arguments={"command": command}, deadline_s=10
    )


def finished(session_id: str) -> calls.Call[Any]:
    return calls.finalize(session_id, termination=Termination.FINISHED, fault=None, deadline_s=30)


def test_an_attempt_ends_with_a_signed_verdict_and_one_terminal_record(store: Store, task: Task) -> None:
    async def run() -> None:
        async with world(store, [task]) as here:
            view = await ready(here, task)
            assert view.state == "ready"
            assert [t["function"]["name"] for t in view.tools] == list(task.tools)
            seen, submitted = await here.ada.send(bash(view.id, "echo hello"))
            assert (seen.text, seen.action_id, submitted) == ("echo hello", "a", False)
            verdict = await here.ada.send(finished(view.id))
            assert verdict.reward == 1.0, verdict.fault
            assert {e.key for e in verdict.evidence if e.holds} == set(EvidenceKey)
            assert grading.verify_signature(verdict, wire.signing_key(here.ada.token))
            assert await here.ada.send(finished(view.id)) == verdict
            await here.quiet()
            states = [line.state for line in store.session_log(view.id)]
            assert states == [
                *("queued", "admitted", "provisioning", "ready", "running", "ready"),
                *("finalizing", "verifying", "done"),
            ]

    asyncio.run(run())


def test_the_same_key_and_body_is_the_same_session_and_another_body_is_refused(
    store: Store, task: Task
) -> None:
    async def run() -> None:
        async with world(store, [task]) as here:
            asked = calls.open_session(client_key="k", task_id=task.id)
            views = await asyncio.gather(*(here.ada.send(asked) for _ in range(5)))
            assert len({view.id for view in views}) == 1
            with pytest.raises(SandboxError, match="used for another request") as refused:
                await here.ada.send(calls.open_session(client_key="k", task_id=task.id, lease_ttl_s=9.0))
            assert refused.value.code == "client_key_reused"
            theirs = await here.bob.send(asked)
            assert theirs.id != views[0].id

    asyncio.run(run())


def test_an_ended_session_is_the_same_one_after_a_restart_too(store: Store, task: Task) -> None:
    async def run() -> None:
        asked = calls.open_session(client_key="k", task_id=task.id)
        async with world(store, [task]) as here:
            view = await ready(here, task)
            verdict = await here.ada.send(finished(view.id))
        async with world(store, [task]) as here:
            again = await here.ada.send(asked)
            assert (again.id, again.state) == (view.id, "done")
            assert await here.ada.send(finished(view.id)) == verdict

    asyncio.run(run())


def test_a_command_under_one_id_runs_once_however_often_it_is_sent(store: Store, task: Task) -> None:
    async def run() -> None:
        async with world(store, [task]) as here:
            view = await ready(here, task)
            body = wire.ExecBody(exec_id="e", command="sleep 0.05")
            results = await asyncio.gather(*(here.ada.send(calls.run(view.id, body)) for _ in range(4)))
            assert len({r.model_dump_json() for r in results}) == 1
            assert len(here.backend.ran) == 1
            with pytest.raises(SandboxError, match="something else"):
                await here.ada.send(calls.run(view.id, wire.ExecBody(exec_id="e", command="true")))
            await asyncio.gather(*(here.ada.send(bash(view.id, "true", "c")) for _ in range(3)))
            assert len(here.backend.ran) == 2

    asyncio.run(run())


def test_a_connection_that_drops_in_the_middle_of_a_command_loses_nothing(store: Store, task: Task) -> None:
    async def run() -> None:
        async with world(store, [task]) as here:
            view = await ready(here, task)
            asked = here.ada.send(calls.run(view.id, wire.ExecBody(exec_id="e", command="sleep 0.1")))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asked, 0.03)
            async with here.raw() as http:
                told = await http.get(f"/v1/sessions/{view.id}/exec/e", params={"wait_s": 0})
                assert told.status_code == 202
                done = await http.get(f"/v1/sessions/{view.id}/exec/e", params={"wait_s": 5})
                assert done.json()["status"] == "exited"
            assert len(here.backend.ran) == 1

    asyncio.run(run())


def test_a_tenant_can_neither_see_nor_touch_the_session_of_another(store: Store, task: Task) -> None:
    async def run() -> None:
        async with world(store, [task]) as here:
            view = await ready(here, task)
            body = wire.ExecBody(exec_id="e", command="true")
            for call in (
                calls.session(view.id),
                calls.lease(view.id, epoch=9, ttl_s=9),
                calls.run(view.id, body),
                bash(view.id, "true"),
                calls.put_file(view.id, "x", b""),
                calls.get_file(view.id, "hello.txt"),
                calls.diff(view.id),
                finished(view.id),
                calls.delete(view.id),
            ):
                with pytest.raises(SandboxError, match="bob has no session"):
                    await here.bob.send(call)
            assert (await here.ada.send(calls.session(view.id))).state == "ready"
            assert (await here.bob.send(calls.capacity())).sessions == {}
            assert here.backend.ran == []
            async with here.raw(None) as http:
                for path in ("/v1/tasks", "/v1/capacity", f"/v1/sessions/{view.id}"):
                    assert (await http.get(path)).status_code == 401
                wrong = {"Authorization": "Bearer token of eve"}
                assert (await http.get("/v1/tasks", headers=wrong)).json()["code"] == "unauthorized"

    asyncio.run(run())


def test_tokens_are_nowhere_in_the_store(store: Store, task: Task) -> None:
    async def run() -> None:
        async with world(store, [task]) as here:
            await here.ada.send(finished((await ready(here, task)).id))

    asyncio.run(run())
    path = store.url.removeprefix("sqlite:///")
    with open(path, "rb") as file:
        raw = file.read()
    assert b"token of ada" not in raw


def test_files_go_in_and_out_and_show_in_the_diff(store: Store, task: Task) -> None:
    async def run() -> None:
        async with world(store, [task]) as here:
            view = await ready(here, task)
            data = bytes(range(256)) * 9
            written = await here.ada.send(calls.put_file(view.id, "a/b.bin", data))
            assert (written.path, written.bytes) == ("a/b.bin", len(data))
            assert await here.ada.send(calls.get_file(view.id, "./a//b.bin")) == data
            changes = (await here.ada.send(calls.diff(view.id))).changes
            assert [c.path for c in changes] == ["a/b.bin"]
            with pytest.raises(SandboxError, match=r"There is no nothing\.txt"):
                await here.ada.send(calls.get_file(view.id, "nothing.txt"))

    asyncio.run(run())


def ask(**more: Any) -> dict[str, Any]:
    return {"client_key": "k", "task": {"id": "T"}, **more}


BAD_INPUT: list[tuple[str, str, Any, int, str]] = [
    ("POST", "/v1/sessions", ask(task={"id": "small/tow"}), 404, "unknown_task"),
    ("POST", "/v1/sessions", ask(task={"id": "T", "revision": "0" * 64}), 409, "other_revision"),
    ("POST", "/v1/sessions", ask(deadline_at=1.0), 422, "deadline_passed"),
    ("POST", "/v1/sessions", ask(deadlin_at=1.0), 422, "malformed"),
    ("POST", "/v1/sessions", ask(lease_ttl_s=-1), 422, "malformed"),
    ("POST", "/v1/sessions", ask(tenant="bob"), 403, "other_tenant"),
    ("POST", "/v1/sessions", ask(group_size=2), 422, "malformed"),
    ("POST", "/v1/sessions", ask(group_id="g", group_size=99), 422, "never_fits"),
    ("POST", "S/exec", {"exec_id": "e", "command": "a\0b"}, 422, "malformed"),
    ("POST", "S/exec", {"exec_id": "e", "command": "true", "timeout_s": -1}, 422, "malformed"),
    ("POST", "S/exec", {"exec_id": "e", "command": "true", "timeout_s": 1e9}, 422, "malformed"),
    ("POST", "S/exec", {"exec_id": "e"}, 422, "malformed"),
    ("POST", "S/exec", {"exec_id": "e", "argv": ["true"], "stdin_base64": "%"}, 422, "malformed"),
    ("POST", "S/exec", {"exec_id": "e", "argv": ["true"], "env": {"A=B": "1"}}, 422, "malformed"),
    ("POST", "S/exec", b"not json", 422, "malformed"),
    ("POST", "S/exec", b"\xff\xfe", 422, "malformed"),
    ("POST", "S/lease", {"epoch": 0, "ttl_s": 9}, 422, "malformed"),
    ("POST", "S/finalize", {"termination": "bored"}, 422, "malformed"),
    ("GET", "S/files?path=../../etc/passwd", None, 422, "path_outside"),
    ("GET", "S/files?path=/etc/passwd", None, 422, "path_outside"),
    ("GET", "S/files?path=a%00b", None, 422, "path_outside"),
    ("GET", "S/files?path=.", None, 422, "path_outside"),
    ("GET", "S/files", None, 422, "malformed"),
    ("PUT", "S/files?path=a&mode=99999", b"", 422, "malformed"),
    ("GET", "S/exec/never", None, 404, "unknown_exec"),
    ("GET", "S?wait_s=1e9", None, 422, "malformed"),
    ("GET", "/v1/sessions/s-0", None, 404, "unknown_session"),
    ("GET", "/v1/nothing", None, 404, "not_found"),
    ("DELETE", "/v1/tasks", None, 405, "http"),
    ("GET", "/v1/tasks?limit=-1", None, 422, "malformed"),
]  # fmt: skip
"""Method, path (S: a ready session), body, status, code."""


def test_bad_input_is_a_typed_refusal_that_says_what_to_do_and_changes_nothing(
    store: Store, task: Task
) -> None:
    async def run() -> None:
        async with world(store, [task]) as here:
            view = await ready(here, task, "mine")
            for method, path, body, status, code in BAD_INPUT:
                url = path.replace("S", f"/v1/sessions/{view.id}", 1) if path.startswith("S") else path
                if isinstance(body, dict) and body.get("task", {}).get("id") == "T":
                    body["task"]["id"] = task.id
                async with here.raw() as http:
                    sent = {"json": body} if isinstance(body, dict) else {"content": body}
                    answer = await http.request(method, url, **sent)
                told = wire.ErrorBody.model_validate(answer.json())
                assert (answer.status_code, told.code, told.owner) == (status, code, "caller"), (path, body)
                assert told.message
                assert told.fix
            assert here.backend.ran == []
            assert (await here.ada.send(calls.session(view.id))).state == "ready"
            assert (await here.ada.send(calls.capacity())).sessions == {"ready": 1}

    asyncio.run(run())


def test_a_body_beyond_its_limit_is_refused_declared_or_not(store: Store, task: Task) -> None:
    async def run() -> None:
        async with world(store, [task]) as here:
            view = await ready(here, task)

            async def endless() -> Any:
                for _ in range(9):
                    yield b" " * 2**20

            async with here.raw() as http:
                whole = await http.post(f"/v1/sessions/{view.id}/exec", content=b" " * (9 * 2**20))
                assert (whole.status_code, whole.json()["code"]) == (413, "too_large")
                pieces = await http.post(f"/v1/sessions/{view.id}/exec", content=endless())
                assert (pieces.status_code, pieces.json()["code"]) == (413, "too_large")

    asyncio.run(run())


def test_what_the_environment_does_wrong_is_never_the_policys(store: Store, task: Task) -> None:
    async def fails(operation: str, session: str) -> None:
        if operation == "exec":
            raise SandboxLost("The sandbox is gone.", phase="exec")

    async def run() -> None:
        async with world(store, [task], backend=MemoryBackend(before=fails)) as here:
            view = await ready(here, task)
            with pytest.raises(SandboxError) as lost:
                await here.ada.send(bash(view.id, "echo"))
            assert (lost.value.owner, lost.value.code) == ("environment", "sandbox_lost")
            assert lost.value.retryable
            verdict = await here.ada.send(finished(view.id))
            assert verdict.reward is None
            assert verdict.fault is not None
            assert (verdict.fault.owner, verdict.fault.code) == ("environment", "sandbox_lost")
            assert grading.verify_signature(verdict, wire.signing_key(here.ada.token))
            states = [line.state for line in store.session_log(view.id)]
            assert states[-3:] == ["running", "lost", "failed"]
            await here.quiet()

    asyncio.run(run())


def test_a_bug_of_our_own_is_the_gateways_and_leaves_no_slot_behind(store: Store, task: Task) -> None:
    async def fails(operation: str, session: str) -> None:
        if operation == "create":
            raise ZeroDivisionError("ours")

    async def run() -> None:
        async with world(store, [task], backend=MemoryBackend(before=fails)) as here:
            view = await ready(here, task)
            assert view.state == "failed"
            assert view.fault is not None
            assert (view.fault.owner, view.fault.code) == ("gateway", "internal")
            await here.quiet()

    asyncio.run(run())


def test_a_deleted_session_is_cancelled_without_a_reward(store: Store, task: Task) -> None:
    async def run() -> None:
        async with world(store, [task]) as here:
            view = await ready(here, task)
            slow = asyncio.create_task(
                here.ada.send(calls.run(view.id, wire.ExecBody(exec_id="e", command="sleep 5")))
            )
            await until(lambda: here.backend.running == 1)
            assert (await here.ada.send(calls.delete(view.id))).state == "cancelled"
            assert (await here.ada.send(calls.delete(view.id))).state == "cancelled"
            with pytest.raises(SandboxError):
                await slow
            await here.quiet()
            assert (await here.ada.send(finished(view.id))).reward is None
            with pytest.raises(SandboxError, match="deleted the session"):
                await here.ada.send(bash(view.id, "true"))

    asyncio.run(run())


def test_the_callers_fault_is_kept_in_the_verdict(store: Store, task: Task) -> None:
    async def run() -> None:
        async with world(store, [task]) as here:
            view = await ready(here, task)
            fault = Fault(owner="model", code="empty", phase="sample", retryable=True, message="No tokens.")
            call = calls.finalize(view.id, termination=Termination.FAULT, fault=fault, deadline_s=9)
            verdict = await here.ada.send(call)
            assert (verdict.reward, verdict.fault) == (None, fault)
            assert store.session(view.id).state == "failed"

    asyncio.run(run())


def test_a_task_that_was_never_validated_earns_nothing_and_says_so(tmp_path: Any, task: Task) -> None:
    async def run(store: Store) -> None:
        async with world(store, [task], admission="stored") as here:
            view = await ready(here, task)
            assert view.fault is not None
            assert (view.state, view.fault.owner, view.fault.code) == ("failed", "task", "not_admitted")
            with pytest.raises(SandboxError, match="never validated"):
                await here.ada.send(calls.admit(task.id, None, deadline_s=5))

    with prepared_store(tmp_path / "other.db", []) as store:
        asyncio.run(run(store))


def test_a_wrong_revision_is_the_callers_mistake(store: Store, task: Task) -> None:
    async def run() -> None:
        async with world(store, [task]) as here:
            with pytest.raises(ConfigError, match="same package folder"):
                await here.ada.send(calls.open_session(client_key="k", task_id=task.id, revision="0" * 64))

    asyncio.run(run())
