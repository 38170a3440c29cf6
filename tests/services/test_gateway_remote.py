"""A gateway's sessions stand in for local ones, over a lossy network too; and examples do what they say."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_given import TOKENS, URL, World, prepared_store, task_at, tenant, until, world

from agentrl.errors import ConfigError, SandboxError
from agentrl.inference.scripted import ScriptedSampler
from agentrl.learner.small import build_tokenizer
from agentrl.store import Store
from agentrl.types import Action, Task, Termination, Trajectory, to_json
from envs.grading import verify_signature
from envs.sandbox.plain import PlainBackend
from envs.session import Session
from envs.tasks.package import load_task
from envs.tasks.swe_mini import generate
from harness.chat import ChatFormat
from harness.demonstrator import tool_call
from harness.gateway import client as calls
from harness.gateway import wire
from harness.gateway.client import AsyncClient, Client
from harness.gateway.remote import GatewayPlace, RemoteSession
from harness.rollout import RolloutSettings, run_one
from services.gateway.app import create_app
from services.gateway.core import Gateway, Settings

LONE_SURROGATE = (
    '<tool_call>{"name": "replace_in_file",'
    ' "arguments": {"path": "a.py", "old": "\\ud800", "new": "b"}}</tool_call>'
)
"""Text that has no UTF-8: a policy can write it, and it must not break the wire."""


def place_of(here: World, transport: httpx.AsyncBaseTransport | None = None) -> GatewayPlace:
    client = AsyncClient(URL, token=TOKENS["ada"], way=transport or here.transport)
    return GatewayPlace(URL, name="memory", isolation="docker", client=client)


def test_an_attempt_through_a_gateway_is_the_attempt_made_here(tmp_path: Path) -> None:
    """The same scripted policy, with sessions of this process and through HTTP: same words, same reward."""
    task = load_task(generate(tmp_path / "suite", train=1, heldout=0, seed=3)[0])
    chat = ChatFormat(build_tokenizer([task.instruction] * 50, vocabulary=400))
    lines = [
        tool_call("bash", command="ls; exit 3"),
        tool_call("no_such_tool"),
        tool_call("replace_in_file", path=task.metadata["file"], old=task.metadata["buggy"], new="é"),
        LONE_SURROGATE,
        tool_call("read_file", path=task.metadata["file"]),
        tool_call("submit"),
    ]

    async def attempt(backend: Any, admission: Any, open_session: Any, group: str) -> Trajectory:
        return await run_one(
            task,
            sampler=ScriptedSampler(lambda request, number: lines[number], encode=chat.encode_reply),
            chat=chat,
            backend=backend,
            group_id=group,
            index=0,
            signing_key=b"key of the run",
            admission=admission,
            settings=RolloutSettings(require_log_probs=False),
            open_session=open_session,
        )

    async def both() -> tuple[Trajectory, Trajectory]:
        backend = PlainBackend()
        with Store.open(tmp_path / "store.db") as store:
            store.add_tenant(tenant("ada"))
            gateway = Gateway(store=store, backend=backend, tasks=[task], settings=Settings(slots=2))
            await gateway.start()
            transport = httpx.ASGITransport(create_app(gateway, own=False))
            client = AsyncClient(URL, token=TOKENS["ada"], way=transport)
            place = GatewayPlace(URL, name="plain", isolation="none", client=client)
            try:
                admission = await place.admit(task)
                assert admission.valid
                assert admission == await place.admit(task)
                remote = await attempt(place, admission, place.open, "remote")
                local = await attempt(backend, admission, Session.open, "local")
                return remote, local
            finally:
                await place.close()
                await gateway.stop()

    remote, local = asyncio.run(both())
    assert [o.text for t in remote.turns for o in t.observations] == [
        o.text for t in local.turns for o in t.observations
    ]
    assert [o.is_error for t in remote.turns for o in t.observations] == [
        o.is_error for t in local.turns for o in t.observations
    ]
    assert (remote.termination, remote.reward) == (local.termination, local.reward)
    assert remote.verdict.tests == local.verdict.tests
    assert remote.reward is not None
    for trajectory in (remote, local):
        assert verify_signature(trajectory.verdict, b"key of the run")


class Lossy(httpx.AsyncBaseTransport):
    """Forwards everything; what `lose` says about an answer happens to the caller instead of it."""

    def __init__(self, inner: httpx.AsyncBaseTransport, lose: Callable[[int], Any]) -> None:
        self._inner = inner
        self._lose = lose
        self.sent = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self._inner.handle_async_request(request)
        self.sent += 1
        instead = self._lose(self.sent)
        if isinstance(instead, Exception):
            await response.aread()
            raise instead
        return response if instead is None else instead


def test_answers_that_are_lost_are_asked_for_again_and_nothing_is_done_twice(
    store: Store, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.gateway.client.FIRST_PAUSE_S", 0.001)

    def lose(number: int) -> Any:
        match number % 4:
            case 1:
                return httpx.ReadError("cut")
            case 2:
                return httpx.Response(502, content=b"<html>bad gateway</html>")
            case 3:
                return httpx.Response(503, headers={"Retry-After": "0"}, content=b"")
        return None

    async def run() -> None:
        async with world(store, [task]) as here:
            lossy = Lossy(here.transport, lose)
            place = place_of(here, lossy)
            session = await place.open(task, place, session_id="g.0.1", signing_key=b"k", admission=None)
            action = Action(id="a", tool="bash", arguments={"command": "echo"})
            for _ in range(3):
                assert (await session.call(action)).text == "echo"
            assert len(here.backend.ran) == 3
            verdict = await session.finalize(termination=Termination.FINISHED, fault=None)
            assert verdict.reward == 1.0
            await session.close()
            assert lossy.sent >= 20
            assert len((await here.ada.send(calls.capacity())).sessions) == 1
            await place.close()

    asyncio.run(run())


def test_a_reward_that_was_changed_on_its_way_is_refused(store: Store, task: Task) -> None:
    class Liar(httpx.AsyncBaseTransport):
        def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
            self._inner = inner

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            response = await self._inner.handle_async_request(request)
            raw = await response.aread()
            changed = raw.replace(b'"reward":0.0', b'"reward":1.0', 1)
            return httpx.Response(response.status_code, content=changed)

    async def run() -> None:
        async with world(store, [task]) as here:
            here.backend.reward = "0.0"
            place = place_of(here, Liar(here.transport))
            session = await place.open(task, place, session_id="g.0.1", signing_key=b"k", admission=None)
            with pytest.raises(SandboxError, match="not signed with this tenant's key") as refused:
                await session.finalize(termination=Termination.FINISHED, fault=None)
            assert (refused.value.owner, refused.value.retryable) == ("gateway", False)
            await session.close()
            await place.close()

    asyncio.run(run())


def test_the_lease_is_kept_while_the_policy_thinks(
    store: Store, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.gateway.remote.LEASE_S", 0.3)

    async def run() -> None:
        async with world(store, [task]) as here:
            place = place_of(here)
            session = await place.open(task, place, session_id="g.0.1", signing_key=b"k", admission=None)
            assert isinstance(session, RemoteSession)
            await asyncio.sleep(0.8)
            assert (await here.ada.send(calls.session(session.id))).state == "ready"
            await session.close()
            assert (await here.ada.send(calls.session(session.id))).state == "cancelled"
            await here.quiet()
            await place.close()

    asyncio.run(run())


def test_a_caller_that_gives_up_at_any_moment_leaves_no_session(store: Store, task: Task) -> None:
    """While it waits, and also while its first request is on its way, whose answer it never sees."""

    async def run() -> None:
        async with world(store, [task], slots=1) as here:
            place = place_of(here)
            first = await place.open(task, place, session_id="g.0.1", signing_key=b"k", admission=None)

            async def given_up(number: int, when: Callable[[], bool]) -> None:
                asked = asyncio.create_task(
                    place.open(task, place, session_id=f"g.{number}.1", signing_key=b"k", admission=None)
                )
                await until(lambda: when() or asked.done())
                asked.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asked
                await until(lambda: here.gateway.slots.waiting() == 0)

            for number in range(12):
                looks = iter(range(number))
                await given_up(number, lambda looks=looks: next(looks, None) is None)
            await given_up(20, lambda: here.gateway.slots.waiting() == 1)
            await first.close()
            await here.quiet()
            await place.close()

    asyncio.run(run())


def test_mistakes_of_the_caller_are_config_errors_that_say_what_to_do(
    store: Store, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AGENTRL_GATEWAY_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="AGENTRL_GATEWAY_TOKEN"):
        Client(URL)
    with pytest.raises(ConfigError, match="no gateway URL"):
        Client("gateway:8080", token="t")

    async def run() -> None:
        async with world(store, [task]) as here:
            stranger = AsyncClient(URL, token="nobody's", way=here.transport)
            with pytest.raises(ConfigError, match="agentrl serve tenant"):
                await stranger.send(calls.capacity())
            await stranger.close()
            place = place_of(here)
            unknown = replace(task, id="small/two")
            with pytest.raises(ConfigError, match="Did you mean 'small/one'"):
                await place.open(unknown, place, session_id="g.0.1", signing_key=b"k", admission=None)
            with pytest.raises(ConfigError, match="made by the gateway"):
                await place.prepare("x")
            await place.close()

    asyncio.run(run())


def test_a_gateway_that_is_not_there_is_the_gateways_fault_after_the_deadline() -> None:
    with Client("http://127.0.0.1:9", token="t") as client, pytest.raises(SandboxError) as away:
        client.send(replace(calls.capacity(), deadline_s=0.2))
    assert (away.value.owner, away.value.code) == ("gateway", "gateway_no_answer")


@pytest.mark.parametrize(
    "answer", [b"<html>Sign in</html>", b"", b"{", b"[]", b'{"id": 3}', b"null", b'"\xff"']
)
def test_an_answer_that_is_no_gateways_is_the_gateways_fault_and_never_a_record(answer: bytes) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=answer))
    with Client("http://portal", token="t", transport=transport) as client:
        for call in (
            calls.capacity(),
            calls.session("s-1"),
            calls.finalize("s-1", termination=Termination.FINISHED, fault=None, deadline_s=1),
            calls.tool("s-1", "bash", call_id="1", action_id="1", arguments={}, deadline_s=1),
        ):
            with pytest.raises(SandboxError) as odd:
                client.send(call)
            assert (odd.value.owner, odd.value.code) == ("gateway", "gateway_answer")


def test_every_documented_request_works_as_its_example_says(tmp_path: Path) -> None:
    """Each operation of the OpenAPI page, with the example that stands there, gives a documented success."""
    task = task_at(tmp_path / "cart", "cart")

    async def run(store: Store) -> None:
        async with world(store, [task], uploads=tmp_path / "uploads") as here, here.raw() as http:
            page = (await http.get("/openapi.json")).json()
            schemas = page["components"]["schemas"]
            todo = {(m.upper(), path) for path, ops in page["paths"].items() for m in ops}
            known = {"name": "submit", "exec_id": "list", "snapshot_id": "none"}
            first = ("POST", "/v1/sessions")
            last = [("POST", "/v1/sessions/{session_id}/finalize"), ("DELETE", "/v1/sessions/{session_id}")]
            middle = sorted(
                todo - {first, *last}, key=lambda o: (o[0] != "PUT", "exec_id" in o[1], "tools" in o[1], o)
            )
            for method, path in (first, *middle, *last):
                operation = page["paths"][path][method.lower()]
                sent: dict[str, Any] = {}
                body = operation.get("requestBody", {}).get("content", {}).get("application/json")
                if body is not None:
                    sent["json"] = schemas[body["schema"]["$ref"].rpartition("/")[2]]["examples"][0]
                if path == "/v1/tasks" and method == "POST":
                    packed = io.BytesIO()
                    with tarfile.open(fileobj=packed, mode="w:gz") as out:
                        out.add(task.path, arcname=".")
                    sent["content"] = packed.getvalue()
                if path.endswith("/files"):
                    sent["params"] = {"path": "hello.txt"}
                answer = await http.request(method, path.format(**known), **sent)
                assert str(answer.status_code) in operation["responses"], (method, path, answer.text)
                assert answer.is_success, (method, path, answer.text)
                if (method, path) == first:
                    known["session_id"] = answer.json()["id"]
                    await here.ada.send(calls.session(known["session_id"], wait_s=5))
                todo.discard((method, path))
            assert not todo
            assert (await here.ada.send(calls.session(known["session_id"]))).state == "done"
            assert (await http.get("/docs")).status_code == 200

    with prepared_store(tmp_path / "store.db", [task]) as store:
        asyncio.run(run(store))


def serving(store: Path, suite: Path) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """A gateway process on a free port, and what it said when it was ready."""
    words = ["serve", "gateway", "--backend", "plain", "--port", "0", "--json"]
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "agentrl.cli.main", *words),
            *("--tasks", str(suite), "--store", str(store), "--slots", "4"),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the gateway ended with {process.wait(10)}"
    return process, json.loads(line)


def test_a_gateway_process_that_is_killed_and_started_again_keeps_its_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = tmp_path / "suite"
    task = load_task(generate(suite, train=1, heldout=0, seed=3)[0])
    store_path = tmp_path / "store.db"
    with Store.open(store_path) as store:
        store.add_tenant(tenant("ada"))
    monkeypatch.setenv("AGENTRL_GATEWAY_TOKEN", TOKENS["ada"])
    process, told = serving(store_path, suite)
    started = [process]
    try:
        assert (told["epoch"], told["tasks"], told["isolation"]) == (1, 1, "none")
        with Client(told["url"]) as client:
            place = GatewayPlace.connect(told["url"])
            assert (place.name, place.isolation) == ("plain", "none")
            view = client.send(calls.open_session(client_key="k", task_id=task.id, revision=task.revision))
            view = client.send(calls.session(view.id, wait_s=30))
            assert view.state == "ready"
            done = client.send(calls.run(view.id, wire.ExecBody(exec_id="e", command="sleep 300 & echo $!")))
            asleep = int(done.stdout.head)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        process, told = serving(store_path, suite)
        started.append(process)
        assert told["epoch"] == 2
        with Client(told["url"]) as client:
            view = client.send(calls.session(view.id))
            assert view.fault is not None
            assert (view.state, view.fault.code) == ("failed", "lost_on_restart")
            with pytest.raises(ProcessLookupError):
                os.kill(asleep, 0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        for one in started:
            assert one.stdout is not None
            one.kill()
            one.wait(10)
            one.stdout.close()


def test_records_survive_the_wire_byte_for_byte(store: Store, task: Task) -> None:
    async def run() -> None:
        async with world(store, [task]) as here:
            here.backend.reward = "0.1"
            view = await here.ada.send(calls.open_session(client_key="k", task_id=task.id))
            await here.ada.send(calls.session(view.id, wait_s=5))
            call = calls.finalize(view.id, termination=Termination.FINISHED, fault=None, deadline_s=20)
            verdict = await here.ada.send(call)
            assert store.session(view.id).verdict == to_json(verdict).decode()

    asyncio.run(run())
