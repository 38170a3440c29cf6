"""The gateway against its own OpenAPI document: requests made from it, good and broken. Every answer is one
that it documents, of the shape it documents; no broken request is taken, and none passes without a token."""

from __future__ import annotations

import asyncio
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import schemathesis
import uvicorn
from gateway_given import TOKENS, world
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from agentrl.store import Store
from agentrl.types import Task
from services.gateway.app import create_app

ADA = {"Authorization": f"Bearer {TOKENS['ada']}"}
GENERATION = {"allow-extra-parameters": False, "with-security-parameters": False}
"""Unknown query parameters are ignored, as everywhere in HTTP; the token is this test's."""


@schemathesis.serializer("application/gzip")
def archive(_: schemathesis.SerializationContext, value: object) -> bytes:
    return str(value).encode("utf-8", "surrogatepass")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, blank: Path, task: Task) -> Iterator[str]:
    """A gateway on a real server."""
    path = tmp_path_factory.mktemp("gateway") / "store.db"
    shutil.copy(blank, path)
    listening = socket.create_server(("127.0.0.1", 0))
    servers: list[uvicorn.Server] = []
    started = threading.Event()

    async def serve() -> None:
        with Store.open(path) as store:
            async with world(store, [task], slots=64, creates=64) as here:
                app = create_app(here.gateway, own=False)
                servers.append(
                    uvicorn.Server(uvicorn.Config(app, log_level="critical", access_log=False, ws="none"))
                )
                started.set()
                await servers[0].serve(sockets=[listening])

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(20)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        servers[0].should_exit = True
        thread.join(20)
        listening.close()
        assert not thread.is_alive(), "the server did not stop"


@pytest.fixture(scope="module")
def ada(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, headers=ADA, timeout=30) as client:
        yield client


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_every_answer_is_one_that_the_document_names(
    mode: GenerationMode, ada: httpx.Client, url: str
) -> None:
    """Good requests are about a session and a task that are there; their numbers may still be refused."""
    good = mode == GenerationMode.POSITIVE
    config = schemathesis.Config.from_dict({"generation": GENERATION})
    document = schemathesis.openapi.from_url(f"{url}/openapi.json", config=config)
    sessions: dict[str, str] = {}

    def ask(case: schemathesis.Case) -> None:
        if good and "session_id" in case.path_parameters:
            case.path_parameters["session_id"] = sessions[case.operation.label]
        if good and isinstance(case.body, dict) and "task" in case.body:
            case.body["task"] = {"id": "small/one"}
        case.call_and_validate(headers=ADA, excluded_checks=[positive_data_acceptance])

    few = settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    asked = 0
    for found in document.get_all_operations():
        operation = found.ok()
        body = {"client_key": f"{mode.value}{asked}", "task": {"id": "small/one"}}
        opened = ada.post("/v1/sessions", json=body).raise_for_status().json()["id"]
        ada.get(f"/v1/sessions/{opened}", params={"wait_s": 10}).raise_for_status()
        sessions[operation.label] = opened
        try:
            few(given(operation.as_strategy(generation_mode=mode))(ask))()
        except Unsatisfiable:  # nothing about it can be wrong
            assert not good
            continue
        asked += 1
    assert asked >= 10
