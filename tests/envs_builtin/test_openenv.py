"""Environments over OpenEnv's websocket protocol, both ways; also with its real client and server."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from env_sessions import KEY, Plain, act
from fastapi.testclient import TestClient
from openenv_real import CLIENT, SERVER
from websockets.sync.server import serve as websocket_server

from agentrl.errors import BoundaryError, ConfigError, SandboxError
from agentrl.types import Action, Termination, Verdict
from envs import registry
from envs.adapters import openenv_client
from envs.adapters.attempts import Attempts
from envs.environment import ToolEnvironment, of_class
from envs.inprocess import EnvironmentSession, admit
from envs.sandbox.plain import PlainBackend
from services.openenv import create_app

OPENENV_CORE = "openenv-core==0.3.0"


def calculator() -> ToolEnvironment:
    found = registry.get("calculator")
    assert isinstance(found, ToolEnvironment)
    return found


@contextmanager
def talking(attempts: Attempts, sessions: int = 4) -> Iterator[tuple[TestClient, Any]]:
    """An open connection to a server in this process."""
    with TestClient(create_app(attempts, sessions=sessions)) as client, client.websocket_connect("/ws") as ws:
        yield client, ws


def ask(ws: Any, kind: str, **data: Any) -> tuple[str, dict[str, Any]]:
    ws.send_json({"type": kind, "data": data})
    answer = ws.receive_json()
    return answer["type"], answer["data"]


# ----------------------------------------------------------------------------------------------------- served


def test_an_attempt_goes_from_reset_to_its_reward() -> None:
    problem = calculator().problem(5)
    with talking(Attempts(calculator())) as (_, ws):
        kind, data = ask(ws, "reset", seed=5, episode_id="mine", anything="else")
        assert (kind, data["reward"], data["done"]) == ("observation", None, False)
        assert data["observation"]["instruction"] == problem.instruction
        assert [tool["name"] for tool in data["observation"]["tools"]] == ["calculate", "submit"]
        _, data = ask(ws, "step", tool="calculate", arguments={"expression": problem.data["expression"]})
        assert data["observation"]["text"] == str(problem.data["answer"])
        assert (data["reward"], data["done"]) == (None, False)
        _, data = ask(ws, "step", tool="calculate", arguments={"expression": "import os"})
        assert data["observation"]["is_error"]
        _, data = ask(ws, "step", tool="submit", arguments={"answer": problem.data["answer"]})
        assert (data["reward"], data["done"], data["observation"]["terminated"]) == (1.0, True, True)
        assert data["observation"]["components"] == {"right": 1.0}
        assert ask(ws, "state") == (
            "state",
            {"episode_id": "mine", "step_count": 3, "task_id": "calculator/s5", "done": True},
        )
        assert ask(ws, "step", tool="submit", arguments={"answer": 1})[1]["code"] == "SESSION_ERROR"
        assert ask(ws, "reset", seed=6)[1]["done"] is False


def test_running_out_of_turns_is_truncated_not_terminated() -> None:
    with talking(Attempts(calculator().with_limits(max_turns=2))) as (_, ws):
        ask(ws, "reset", seed=5)
        ask(ws, "step", tool="calculate", arguments={"expression": "1 + 1"})
        _, data = ask(ws, "step", tool="calculate", arguments={"expression": "1 + 1"})
        seen = data["observation"]
        assert (data["reward"], data["done"]) == (0.0, True)
        assert (seen["terminated"], seen["truncated"]) == (False, True)


def test_tools_are_called_and_listed_as_openenv_spells_it() -> None:
    with talking(Attempts(calculator())) as (_, ws):
        _, data = ask(ws, "step", type="list_tools")
        assert [sorted(tool) for tool in data["observation"]["tools"]] == [
            ["description", "input_schema", "name"]
        ] * 2
        _, data = ask(ws, "step", type="call_tool", tool_name="calculate", arguments={"expression": "6 * 7"})
        seen = data["observation"]
        assert (seen["tool_name"], seen["result"], seen["error"]) == ("calculate", "42", None)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        ("{", "INVALID_JSON"),
        ("[]", "INVALID_JSON"),
        ('{"type": "dance"}', "UNKNOWN_TYPE"),
        ('{"type": "reset", "data": {"seed": -1}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": 3}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"tool": "submit", "argument": {}}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"tool": "submit"}}', "SESSION_ERROR"),
    ],
)
def test_what_can_not_be_done_is_a_typed_error_and_the_connection_goes_on(sent: str, code: str) -> None:
    with talking(Attempts(calculator())) as (_, ws):
        ws.send_text(sent)
        answer = ws.receive_json()
        assert (answer["type"], answer["data"]["code"]) == ("error", code)
        assert answer["data"]["message"]
        assert ask(ws, "reset", seed=1)[0] == "observation"


def test_a_fault_of_the_environment_names_its_owner_and_is_no_reward() -> None:
    with talking(Attempts(of_class(Plain))) as (_, ws):
        ask(ws, "reset", seed=0)
        kind, data = ask(ws, "step", tool="crash")
        assert (kind, data["code"], data["owner"]) == ("error", "EXECUTION_ERROR", "environment")
        assert "reward" not in data
        assert ask(ws, "step", tool="press", arguments={"button": 1})[1]["code"] == "SESSION_ERROR"


def test_a_server_that_is_full_says_so_and_has_room_again() -> None:
    with talking(Attempts(calculator()), sessions=1) as (client, ws):
        with client.websocket_connect("/ws") as other:
            assert other.receive_json()["data"]["code"] == "CAPACITY_REACHED"
        ws.send_json({"type": "close"})
        deadline = time.monotonic() + 30
        while True:
            with client.websocket_connect("/ws") as other:
                other.send_json({"type": "reset", "data": {"seed": 1}})
                if other.receive_json()["type"] == "observation":
                    break
            assert time.monotonic() < deadline, "waiting for room since 30 s"


def test_health_metadata_and_schemas_are_told() -> None:
    with TestClient(create_app(Attempts(calculator()), sessions=1)) as client:
        assert client.get("/health").json() == {"status": "healthy"}
        assert client.get("/metadata").json()["name"] == "calculator"
        assert set(client.get("/schema").json()) == {"action", "observation", "state"}


def swe_calls(seed: int) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """The instruction of a `swe` problem, and its solution as calls."""
    attempts = Attempts(registry.get("swe"), PlainBackend())
    try:
        task = attempts.task(seed)
    finally:
        asyncio.run(attempts.close())
    facts = task.metadata
    edit = {"path": facts["file"], "old": facts["buggy"], "new": facts["fix"]}
    return task.instruction, [("replace_in_file", edit), ("run_tests", {}), ("submit", {})]


def test_a_task_in_a_sandbox_is_served_alike(tmp_path: Path) -> None:
    instruction, calls = swe_calls(5)
    with talking(Attempts(registry.get("swe"), PlainBackend(tmp_path))) as (_, ws):
        for wanted, steps in ((0.0, calls[-1:]), (1.0, calls)):
            _, data = ask(ws, "reset", seed=5)
            assert data["observation"]["instruction"] == instruction
            for tool, arguments in steps:
                _, data = ask(ws, "step", tool=tool, arguments=arguments)
            assert (data["reward"], data["done"]) == (wanted, True)


def test_sandboxes_need_a_backend() -> None:
    with pytest.raises(ConfigError, match="needs sandboxes"):
        Attempts(registry.get("swe"))


# ----------------------------------------------------------------------------------------------------- driven


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def process(*words: str) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield started
    finally:
        started.terminate()
        started.wait(30)
        assert started.stdout is not None
        started.stdout.close()


@contextmanager
def our_server(*words: str) -> Iterator[str]:
    served = (
        "-m",
        "agentrl.cli.main",
        "envs",
        "serve",
        *words,
        "--protocol",
        "openenv",
        "--port",
        "0",
        "--json",
    )
    with process(*served) as started:
        assert started.stdout is not None
        yield json.loads(started.stdout.readline())["url"]


def driven(server: str, folder: Path, *rows: dict[str, Any]) -> ToolEnvironment:
    file = folder / "problems.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = registry.get("openenv")
    assert isinstance(found, ToolEnvironment)
    return found.with_options(server=server, problems=str(file))


def attempt(environment: ToolEnvironment, *steps: tuple[str, dict[str, Any]]) -> tuple[list[str], Verdict]:
    """What an admitted attempt of these calls shows, and its verdict."""

    async def run() -> tuple[list[str], Verdict]:
        task = environment.task(0)
        proof = await admit(task, environment, backend="none", light=True)
        assert proof.valid, proof.reasons
        session = await EnvironmentSession.open(
            task, environment, session_id="s", signing_key=KEY, admission=proof
        )
        async with session:
            seen = [
                (await session.call(Action(id=f"t{number:04d}a000", tool=tool, arguments=arguments))).text
                for number, (tool, arguments) in enumerate(steps)
            ]
            return seen, await session.finalize(termination=Termination.FINISHED, fault=None)

    return asyncio.run(run())


def test_our_server_is_an_environment_of_our_client(tmp_path: Path) -> None:
    problem = calculator().problem(5)
    gold = [{"tool": step.tool, "arguments": dict(step.arguments)} for step in problem.gold]
    with our_server("calculator") as url:
        environment = driven(
            url, tmp_path, {"seed": 5, "gold": gold, "secrets": [str(problem.data["answer"])]}
        )
        assert environment.problem(0).instruction == problem.instruction
        assert [schema["function"]["name"] for schema in environment.schemas()] == ["calculate", "submit"]
        seen, verdict = attempt(
            environment,
            ("calculate", {"expression": 3}),
            ("calculate", {"expression": "6 * 7"}),
            ("submit", {"answer": problem.data["answer"]}),
        )
    assert "is not of type 'string'" in seen[0]
    assert seen[1:] == ["42", "Submitted."]
    assert verdict.reward == 1.0
    assert all(link.holds for link in verdict.evidence)


class Odd:
    """A server that answers `step` with what it was told to."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def __call__(self, ws: Any) -> None:
        for text in ws:
            message = json.loads(text)
            if message["type"] == "close":
                return
            if message["data"].get("type") == "list_tools":
                tool = {
                    "name": "go",
                    "description": "Go.",
                    "input_schema": {"type": "object", "properties": {}},
                }
                answer: Any = {"type": "observation", "data": {"observation": {"tools": [tool]}}}
            elif message["type"] == "reset":
                answer = {"type": "observation", "data": {"observation": {"hello": 1}, "done": False}}
            else:
                answer = self.answers.pop(0)
            if answer is None:
                return
            ws.send(answer if isinstance(answer, str) else json.dumps(answer))


@contextmanager
def odd_server(*answers: Any) -> Iterator[str]:
    with websocket_server(Odd(*answers), "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join(10)


def stepped(reward: Any, *, done: bool = False) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {"x": 1}, "reward": reward, "done": done}}


def test_rewards_of_steps_are_summed_and_an_absent_one_is_none(tmp_path: Path) -> None:
    answers = [stepped(1.0, done=True), stepped(0.25), stepped(None), stepped(0.5, done=True)]
    with odd_server(*answers) as url:
        environment = driven(url, tmp_path, {"seed": 0, "gold": [{"tool": "go"}]})
        assert environment.problem(0).instruction == '{"hello": 1}'
        seen, verdict = attempt(environment, ("go", {}), ("go", {}), ("go", {}))
    assert seen == ['{"x": 1}'] * 3
    assert (verdict.reward, verdict.components) == (0.75, {"return": 0.75})


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ({"type": "error", "data": {"message": "boom", "code": "EXECUTION_ERROR"}}, "server_error"),
        (stepped("much"), "answer"),
        ('{"type": "observation", "data": {"observation": {}, "reward": NaN}}', "answer"),
        ({"type": "state", "data": {}}, "answer"),
        ("nonsense", "answer"),
        (None, "lost"),
    ],
)
def test_what_is_not_an_observation_is_a_fault_and_no_reward(tmp_path: Path, answer: Any, code: str) -> None:
    async def run(environment: ToolEnvironment) -> None:
        task = environment.task(0)
        proof = await admit(task, environment, backend="none", light=True)
        session = await EnvironmentSession.open(
            task, environment, session_id="s", signing_key=KEY, admission=proof
        )
        async with session:
            with pytest.raises(BoundaryError) as caught:
                await session.call(act("go"))
            assert caught.value.code == code
            assert caught.value.owner == "environment"
            verdict = await session.finalize(termination=Termination.FINISHED, fault=None)
            assert verdict.reward is None

    with odd_server(stepped(1.0, done=True), answer) as url:
        asyncio.run(run(driven(url, tmp_path, {"seed": 0, "gold": [{"tool": "go"}]})))


def test_arguments_that_the_server_refuses_are_the_policys(tmp_path: Path) -> None:
    refused = {"type": "error", "data": {"message": "Invalid message", "code": "VALIDATION_ERROR"}}
    with odd_server(stepped(1.0, done=True), refused, stepped(1.0, done=True)) as url:
        environment = driven(url, tmp_path, {"seed": 0, "gold": [{"tool": "go"}]})
        seen, verdict = attempt(environment, ("go", {}), ("go", {}))
    assert seen[0] == "go: Invalid message"
    assert verdict.reward == 1.0


def test_a_server_that_is_not_there_and_a_broken_file_say_so(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="can not be used"):
        driven("http://127.0.0.1:1", tmp_path, {"seed": 0, "gold": []}).schemas()
    with pytest.raises(BoundaryError, match='"seed" and "gold"'):
        driven("http://127.0.0.1:1", tmp_path, {"gold": []}).problem(0)
    with pytest.raises(ConfigError, match="the URL of a server"):
        openenv_client.address("python server.py")


# ------------------------------------------------------------------------------- with the real openenv-core


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real package alone, in a folder of its own."""
    folder = tmp_path_factory.mktemp("openenv-core")
    words = ["install", "--quiet", "--no-deps", "--target", str(folder), OPENENV_CORE]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", *words], capture_output=True, text=True, timeout=120, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip("the package index does not answer")
    if done.returncode != 0:
        pytest.skip(f"{OPENENV_CORE} can not be installed: {done.stderr.strip()[-200:]}")
    return folder


def real_client(real: Path, url: str, calls: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, url, json.dumps(calls)],
        env={"PYTHONPATH": str(real), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def test_the_real_client_solves_a_swe_task_on_our_server(real: Path) -> None:
    instruction, calls = swe_calls(5)
    with our_server("swe", "--backend", "plain") as url:
        seen = real_client(real, url, calls)
    assert seen["instruction"] == instruction
    assert seen["seen"][1][0].startswith("PASSED")
    assert seen["seen"][2] == ["Submitted.", 1.0, True]
    assert seen["steps"] == 3
    assert seen["tools"] == ["read_file", "replace_in_file", "run_tests", "submit"]


def test_the_real_client_solves_our_calculator(real: Path) -> None:
    problem = calculator().problem(5)
    calls = [(step.tool, dict(step.arguments)) for step in problem.gold]
    with our_server("calculator") as url:
        seen = real_client(real, url, calls)
    assert seen["seen"][-1] == ["Submitted.", 1.0, True]
    assert seen["called"] == str(problem.data["answer"])


def test_an_environment_of_the_real_server_is_ours(real: Path, tmp_path: Path, monkeypatch: Any) -> None:
    port = free_port()
    monkeypatch.setenv("PYTHONPATH", str(real))
    with process("-c", SERVER, str(port)):
        deadline = time.monotonic() + 120
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < deadline, "waiting for the OpenEnv server since 120 s"
            time.sleep(0.1)
        row = {"seed": 17, "gold": [{"tool": "step", "arguments": {"number": 7}}]}
        environment = driven(f"http://127.0.0.1:{port}", tmp_path, row)
        assert "Find a number" in environment.problem(0).instruction
        (schema,) = environment.schemas()
        assert schema["function"]["description"] == "Guess the number."
        assert list(schema["function"]["parameters"]["properties"]) == ["number"]
        seen, verdict = attempt(
            environment, ("step", {"number": "x"}), ("step", {"number": 3}), ("step", {"number": 7})
        )
    assert "is not of type 'integer'" in seen[0]
    assert json.loads(seen[1])["hint"] == "higher"
    assert verdict.reward == 1.0
    assert all(link.holds for link in verdict.evidence)
