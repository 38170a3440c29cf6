"""Requests nobody would think of: every answer is typed, none is a failure of the service."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from gateway_given import World, world
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.store import Store
from agentrl.types import Task
from harness.gateway import client as calls
from harness.gateway import wire

NASTY: list[Any] = [
    *(None, True, 0, -1, 1e308, 2**70, "", "\0", "\ud800", "../..", "x" * 5000, "é\u202e", [], {}),
    *([[[[]]]], {"a": {"b": None}}, float("nan"), float("inf"), "-1", "0 OR 1=1", "%00", "s-0"),
]
nasty = st.sampled_from(NASTY)
json_values = st.recursive(
    nasty | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
BODIES = {
    "/v1/sessions": {
        **{"client_key": "f", "task": {"id": "small/one"}, "lease_ttl_s": 5.0},
        **{"group_id": None, "from_snapshot": None},
    },
    "/v1/admissions": {"task": {"id": "small/one", "revision": None}},
    "S/lease": {"epoch": 1, "ttl_s": 60.0},
    "S/tools/bash": {"call_id": "c", "action_id": None, "arguments": {"command": "true"}},
    "S/exec": {"exec_id": "e", "command": "true", "cwd": None, "env": {}, "timeout_s": 1.0},
    "S/snapshot": {"client_key": "f", "ttl_s": 60.0},
    "S/finalize": {"termination": "x", "fault": {"owner": "model", "code": "c", "message": "m"}},
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A good body with one key replaced, added or dropped; or anything at all."""
    path = draw(st.sampled_from(sorted(BODIES)))
    body: Any = dict(BODIES[path])
    match draw(st.sampled_from(["replace", "replace", "replace", "add", "drop", "any", "bytes"])):
        case "replace":
            body[draw(st.sampled_from(sorted(body)))] = draw(json_values)
        case "add":
            body[draw(st.text(max_size=9))] = draw(json_values)
        case "drop":
            del body[draw(st.sampled_from(sorted(body)))]
        case "any":
            body = draw(json_values)
        case _:
            return path, draw(st.binary(max_size=64))
    return path, json.dumps(body).encode("ascii")


def test_any_body_gets_a_typed_answer(store: Store, task: Task) -> None:
    with asyncio.Runner() as runner:
        stack = world(store, [task], slots=64, creates=64)
        here: World = runner.run(stack.__aenter__())
        number = 0

        async def ready(http: httpx.AsyncClient) -> str:
            nonlocal number
            number += 1
            view = await here.ada.send(calls.open_session(client_key=f"mine{number}", task_id=task.id))
            return (await here.ada.send(calls.session(view.id, wait_s=5))).id

        async def ask(path: str, body: bytes) -> None:
            async with here.raw() as http:
                session_id = await ready(http) if path.startswith("S") else ""
                url = path.replace("S", f"/v1/sessions/{session_id}", 1) if session_id else path
                answer = await http.post(
                    url, content=body, headers={"Content-Type": "application/json"}, params={"wait_s": 5}
                )
                assert answer.status_code < 500, (path, body, answer.text)
                if not answer.is_success:
                    told = wire.ErrorBody.model_validate(answer.json())
                    assert told.message
                    assert told.fix
                if session_id:
                    await here.ada.send(calls.delete(session_id))

        @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(requests())
        def fuzz(request: tuple[str, bytes]) -> None:
            runner.run(ask(*request))

        try:
            fuzz()
        finally:
            runner.run(stack.__aexit__(None, None, None))


def test_any_path_gets_a_typed_answer(store: Store, task: Task) -> None:
    async def run() -> None:
        async with world(store, [task]) as here, here.raw() as http:
            for part in ("%00", "%ff", "..%2f..", "s-0", "é", "a" * 3000, "%2e%2e", "'", "%7f"):
                for url in (
                    *(f"/v1/sessions/{part}", f"/v1/sessions/{part}/exec/{part}", f"/v1/{part}"),
                    *(f"/v1/sessions/{part}/files?path={part}", f"/v1/tasks?limit={part}"),
                ):
                    for method in ("GET", "POST", "PUT", "DELETE"):
                        answer = await http.request(method, url)
                        if not answer.is_success:
                            assert 400 <= answer.status_code < 500, (method, url, answer.text)
                            assert wire.ErrorBody.model_validate(answer.json()).fix

    asyncio.run(run())
