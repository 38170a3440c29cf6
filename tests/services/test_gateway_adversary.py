"""What somebody does who wants a gateway to lose something, to hand out more than there is, or to sign what
it did not judge."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import socket
import sqlite3
import tarfile
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from gateway_given import (
    TOKENS,
    URL,
    MemoryBackend,
    MemorySandbox,
    finished,
    ready,
    task_at,
    tenant,
    until,
    world,
)

from agentrl.errors import ConfigError
from agentrl.store import Store
from agentrl.types import Fault, Task, Termination
from envs import grading
from envs.tasks.package import load_task
from harness.gateway import client as calls
from harness.gateway import wire
from services.gateway import core, limits, process
from services.gateway.app import create_app

JSON = {"Content-Type": "application/json"}


# --------------------------------------------------------------------------------------------------- verdicts


def test_a_scored_fault_waits_for_a_verification_however_the_attempt_ended(store: Store, task: Task) -> None:
    async def before(operation: str, session: str) -> None:
        if operation == "exec" and "-verify" in session:
            await asyncio.sleep(0.02)

    async def run() -> None:
        backend = MemoryBackend(before=before)
        async with world(store, [task], backend=backend, slots=4, verify=1) as here:
            views = [await ready(here, task, str(number)) for number in range(4)]
            mine = Fault(owner="policy", code="c", phase="p", retryable=False, message="m")
            ends = (Termination.FAULT, Termination.CANCELLED, Termination.FAULT, Termination.FINISHED)
            asked = (
                calls.finalize(view.id, termination=end, fault=mine, deadline_s=20)
                for view, end in zip(views, ends, strict=True)
            )
            verdicts = await asyncio.gather(*(here.ada.send(call) for call in asked))
            assert [verdict.reward for verdict in verdicts] == [1.0] * 4
            assert backend.most_verifying == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    "edited", ['{"reward":1.0,"signature":""}', '{"signature":"é"}', '{"reward":"much"}']
)
def test_a_verdict_that_was_edited_in_the_store_is_never_signed(
    store: Store, task: Task, edited: str
) -> None:
    async def run() -> None:
        async with world(store, [task], backend=MemoryBackend(reward="0.0")) as here:
            view = await ready(here, task)
            assert (await here.ada.send(finished(view.id))).reward == 0.0
        with sqlite3.connect(store.url.removeprefix("sqlite:///")) as connection:
            kept = json.loads(store.session(view.id).verdict or "") | json.loads(edited)
            connection.execute("update sessions set verdict = ?", (json.dumps(kept),))
        connection.close()
        async with world(store, [task]) as here, here.raw() as http:
            body = {"termination": "finished"}
            answer = await http.post(f"/v1/sessions/{view.id}/finalize", json=body)
            if answer.status_code == 200:
                verdict = await here.ada.send(finished(view.id))
                assert not grading.verify_signature(verdict, wire.signing_key(TOKENS["ada"]))
            else:
                assert (answer.status_code, answer.json()["code"]) == (503, "verdict_damaged")
                assert not answer.json()["retryable"]

    asyncio.run(run())


@pytest.mark.parametrize("judged_first", [True, False])
def test_a_token_that_is_replaced_meanwhile_costs_no_verdict(
    store: Store, task: Task, judged_first: bool
) -> None:
    async def run() -> None:
        async with world(store, [task]) as here:
            view = await ready(here, task)
            if judged_first:
                await here.ada.send(finished(view.id))
            token = process.add_tenant(store.url, "ada", weight=1.0, max_sessions=9, max_queue=9)
            here.gateway._tenants_at = float("-inf")  # they are read again
            newer = calls.AsyncClient(URL, token=token, way=here.transport)
            verdict = await newer.send(finished(view.id))
            assert verdict.reward == 1.0
            assert grading.verify_signature(verdict, wire.signing_key(token))
            with pytest.raises(ConfigError, match="no tenant's"):
                await here.ada.send(finished(view.id))

    asyncio.run(run())


# ----------------------------------------------------------------------------------------------- two gateways


def test_a_gateway_that_was_replaced_leaves_the_sandboxes_to_its_successor(
    store: Store, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "FENCE_S", 0.05)

    async def none(session: str) -> None:
        return None

    async def forget() -> int:
        return 0

    async def run() -> None:
        backend: Any = MemoryBackend()
        backend.outlive, backend.adopt, backend.forget = (lambda _: None), none, forget
        async with world(store, [task], backend=backend) as first:
            view = await ready(first, task)
            async with world(store, [task]):
                await until(lambda: first.gateway.trouble() is not None)
                async with first.raw() as http:
                    for method, url in (("GET", ""), ("POST", "/finalize"), ("DELETE", "")):
                        body = {"termination": "finished"} if url else None
                        told = await http.request(method, f"/v1/sessions/{view.id}{url}", json=body)
                        assert (told.status_code, told.json()["code"]) == (503, "superseded")
                        assert told.headers["retry-after"]
                    asked = {"client_key": "new", "task": {"id": task.id}}
                    told = await http.post("/v1/sessions", json=asked)
                    assert told.json()["code"] == "superseded"
                    assert (await http.get("/readyz")).status_code == 503
                await first.gateway.stop()
                assert backend.live == {view.id}
                assert not backend.closed
        assert backend.live == {view.id}

    asyncio.run(run())


def test_a_sandbox_that_never_closes_does_not_keep_a_stopped_gateway(
    store: Store, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "CLOSE_DEADLINE_S", 0.05)
    monkeypatch.setattr(core, "STOP_DEADLINE_S", 0.2)

    async def hangs(self: MemorySandbox) -> None:
        await asyncio.sleep(3600)

    async def run() -> str:
        async with world(store, [task]) as here:
            view = await ready(here, task)
            monkeypatch.setattr(MemorySandbox, "close", hangs)
        return view.id

    session_id = asyncio.run(asyncio.wait_for(run(), 20))
    assert store.session_log(session_id)[-1].code == "stopped"


# ----------------------------------------------------------------------------------------------------- groups


def test_a_group_that_a_smaller_quota_shuts_out_ends_and_holds_nobody_up(store: Store, task: Task) -> None:
    async def run() -> None:
        async with world(store, [task], slots=4) as here:
            held = await ready(here, task, "held")
            more = {"group_id": "g", "group_size": 4}
            group = [
                await here.ada.send(calls.open_session(client_key=f"g{n}", task_id=task.id, **more))
                for n in range(4)
            ]
            later = await here.ada.send(calls.open_session(client_key="later", task_id=task.id))
            store.add_tenant(tenant("ada", max_sessions=3))
            await here.gateway._load_tenants()
            for view in group:
                seen = await here.ada.send(calls.session(view.id, wait_s=30))
                assert seen.fault is not None
                assert (seen.state, seen.fault.code, seen.fault.owner) == (
                    *("failed", "never_fits", "environment"),
                )
            assert (await here.ada.send(calls.session(later.id, wait_s=30))).state == "ready"
            assert (await here.ada.send(calls.session(held.id))).state == "ready"

    asyncio.run(run())


def test_a_group_that_fits_no_more_after_a_restart_holds_nobody_up(store: Store, task: Task) -> None:
    async def run() -> None:
        async with world(store, [task], slots=4) as first:
            await ready(first, task, "held")
            for n in range(4):
                more = {"group_id": "g", "group_size": 4}
                await first.ada.send(calls.open_session(client_key=f"g{n}", task_id=task.id, **more))
            async with world(store, [task], slots=2) as second:
                view = await second.bob.send(calls.open_session(client_key="bobs", task_id=task.id))
                assert (await second.bob.send(calls.session(view.id, wait_s=30))).state == "ready"

    asyncio.run(run())


def test_a_member_that_comes_after_a_restart_to_a_group_that_was_whole_goes_alone(
    store: Store, task: Task
) -> None:
    async def run() -> None:
        more = {"group_id": "g", "group_size": 3}
        async with world(store, [task]) as first:
            for n in range(3):
                await first.ada.send(calls.open_session(client_key=f"g{n}", task_id=task.id, **more))
            view = await ready(first, task, "g0", **more)
            assert (await first.ada.send(finished(view.id))).reward == 1.0
        async with world(store, [task]) as second:
            assert (await ready(second, task, "again", **more)).state == "ready"

    asyncio.run(run())


# ------------------------------------------------------------------------------------------------------ words


def test_text_that_is_none_is_refused_by_its_place_and_ends_nothing(store: Store, task: Task) -> None:
    async def run() -> None:
        async with world(store, [task]) as here, here.raw() as http:
            view = await ready(here, task)
            at = f"/v1/sessions/{view.id}"
            for url, body in (
                ("/v1/sessions", {"client_key": "a", "task": {"id": task.id}, "tenant": "\ud800"}),
                (f"{at}/tools/bash", {"call_id": "1", "action_id": "\udfff", "arguments": {}}),
                (f"{at}/exec", {"exec_id": "1", "command": "echo \ud800"}),
                (f"{at}/exec", {"exec_id": "1", "argv": ["\ud800"]}),
                (f"{at}/exec", {"exec_id": "1", "command": "true", "cwd": "\ud800"}),
                (f"{at}/exec", {"exec_id": "1", "command": "true", "env": {"A": "\ud800"}}),
                *((f"{at}/exec", {"exec_id": name, "command": "true"}) for name in ("a/b", ".", "..", "/")),
            ):
                answer = await http.post(url, content=json.dumps(body), headers=JSON)
                assert (answer.status_code, answer.json()["code"]) == (422, "malformed"), (url, body)
            assert (await here.ada.send(calls.session(view.id))).state == "ready"
            fault = {"owner": "model", "code": "c", "phase": "p", "retryable": True, "message": "half \ud800"}
            body = {"termination": "fault", "fault": {**fault, "evidence": {"\ud800": "\udfff"}}}
            answer = await http.post(f"{at}/finalize", content=json.dumps(body), headers=JSON)
            assert answer.status_code == 200
            verdict = await here.ada.send(finished(view.id))
            assert verdict.fault is not None
            assert (verdict.fault.code, verdict.fault.message) == ("c", "half \\ud800")
            assert verdict.fault.evidence == {"\\ud800": "\\udfff"}
            assert grading.verify_signature(verdict, wire.signing_key(TOKENS["ada"]))

    asyncio.run(run())


def test_a_package_shows_no_folder_of_the_gateways_machine(
    store: Store, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    monkeypatch.chdir(tmp_path)

    def named(image: str, where: Path) -> Path:
        theirs = Path(task_at(where, "theirs").path)
        lines = (
            (theirs / "task.toml")
            .read_text()
            .replace("[environment]", f'[environment]\ndocker_image = "{image}"')
        )
        (theirs / "task.toml").write_text(lines)
        assert load_task(theirs).sandbox.image == image
        return theirs

    async def run() -> None:
        uploads = tmp_path / "uploads"
        async with world(store, [task], uploads=uploads) as here, here.raw() as http:
            for number, image in enumerate(
                (str(secret), "secret", f"oci:{secret}", "oci:../secret", "../secret")
            ):
                raw = io.BytesIO()
                with tarfile.open(fileobj=raw, mode="w:gz") as out:
                    out.add(named(image, tmp_path / f"t{number}"), arcname=".")
                answer = await http.post("/v1/tasks", content=raw.getvalue())
                assert answer.status_code == 422, image
                assert answer.json()["code"] in ("bad_image", "archive_path")
            assert not list(uploads.iterdir())
        named(str(secret), uploads / "before")
        async with world(store, [task], uploads=uploads) as here:
            assert sorted(here.gateway.tasks) == [task.id]

    asyncio.run(run())


# ------------------------------------------------------------------------------------------------ connections


def test_nothing_is_read_of_somebody_without_a_token(store: Store, task: Task) -> None:
    async def run() -> None:
        async with world(store, [task]) as here:
            read = 0

            async def endless() -> Any:
                nonlocal read
                for _ in range(9):
                    read += 1
                    yield b" " * 2**20

            async with here.raw(None) as http:
                for bearer in (None, "Bearer ", "Bearer guess", "Basic guess"):
                    headers = {} if bearer is None else {"Authorization": bearer}
                    for method, url in (("POST", "/v1/sessions"), ("PUT", "/v1/sessions/s/files?path=a")):
                        answer = await http.request(method, url, content=endless(), headers=headers)
                        assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")
            assert read == 0

    asyncio.run(run())


def test_a_body_that_does_not_come_is_refused_and_one_that_breaks_off_is_nobodys_error(
    store: Store, task: Task, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "BODY_DEADLINE_S", 0.05)
    caplog.set_level(logging.ERROR)

    async def ask(app: Any, path: str, then: str) -> int:
        """The status of an upload of which only the beginning comes."""
        sent: list[Any] = []
        pieces = [{"type": "http.request", "body": b"x", "more_body": True}]

        async def receive() -> Any:
            if pieces:
                return pieces.pop()
            if then == "breaks":
                return {"type": "http.disconnect"}
            await asyncio.sleep(3600)

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "PUT", "path": path, "raw_path": path.encode(), "root_path": ""}
        headers = [(b"authorization", f"Bearer {TOKENS['ada']}".encode())]
        more = {"query_string": b"path=a", "headers": headers, "scheme": "http", "http_version": "1.1"}
        await app({**scope, **more, "server": ("gateway", 80), "client": None, "state": {}}, receive, send)
        return int(sent[0]["status"])

    async def run() -> None:
        async with world(store, [task]) as here:
            view = await ready(here, task)
            path = f"/v1/sessions/{view.id}/files"
            assert await ask(here.transport.app, path, "waits") == 408
            assert await ask(here.transport.app, path, "breaks") == 400
            assert (await here.ada.send(calls.diff(view.id))).changes == []
            assert (await here.ada.send(finished(view.id))).reward == 1.0

    asyncio.run(run())
    assert not caplog.records


def test_a_connection_on_which_no_request_comes_is_closed_and_others_are_served(
    store: Store, task: Task
) -> None:
    async def run() -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        async with world(store, [task]) as here:
            app = create_app(here.gateway, own=False)
            config = uvicorn.Config(
                app, log_level="critical", access_log=False, ws="none", http=process.heads_in_time(0.3)
            )
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            silent = await asyncio.open_connection("127.0.0.1", port)
            slow = await asyncio.open_connection("127.0.0.1", port)
            slow[1].write(b"GET /healthz HT")
            kept = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(3):  # one that asks again and again stays
                kept[1].write(b"GET /healthz HTTP/1.1\r\nHost: g\r\n\r\n")
                assert b"200 OK" in await asyncio.wait_for(kept[0].readuntil(b"}"), 20)
            async with asyncio.timeout(20):
                assert await silent[0].read() == b""
                await slow[0].read()
            async with here.raw(None) as http:
                assert (await http.get("/healthz")).status_code == 200
            for _, writer in (silent, slow, kept):
                writer.close()
            server.should_exit = True
            await asyncio.wait_for(serving, 20)

    asyncio.run(run())
