"""Environments over the Model Context Protocol, both ways, by the official client and server."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from env_sessions import KEY, Plain, act
from mcp import Client, MCPError, StdioServerParameters, types

from agentrl.errors import SandboxError
from agentrl.types import EvidenceKey, Termination
from envs import registry
from envs.adapters.attempts import Attempts
from envs.adapters.mcp_server import Served
from envs.environment import ToolEnvironment, of_class
from envs.inprocess import EnvironmentSession, admit
from envs.sandbox.plain import PlainBackend

SERVER = '''\
"""The quick start of the official package: one tool that adds."""

import sys

from mcp.server.mcpserver import MCPServer

mcp = MCPServer("Demo")


@mcp.tool()
def add(a: int, b: int) -> int:
    """Add two numbers"""
    if a == 13:
        raise ValueError("thirteen is not added")
    return a + b


if len(sys.argv) > 1:
    mcp.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
else:
    mcp.run()
'''
PROBLEM = {
    "instruction": "What is 20 and 22?",
    "answer": "42",
    "gold": [
        {"tool": "add", "arguments": {"a": 20, "b": 22}},
        {"tool": "submit", "arguments": {"answer": "42"}},
    ],
}


def text(result: types.CallToolResult) -> str:
    (content,) = result.content
    assert isinstance(content, types.TextContent)
    return content.text


def calculator() -> ToolEnvironment:
    found = registry.get("calculator")
    assert isinstance(found, ToolEnvironment)
    return found


# ----------------------------------------------------------------------------------------------------- served


def test_the_official_client_solves_our_calculator_in_process() -> None:
    async def run() -> None:
        served = await Served.open(Attempts(calculator()), 5)
        problem = served.session.problem
        async with Client(served.server) as client:
            assert client.instructions == problem.instruction
            listed = (await client.list_tools()).tools
            assert [t.name for t in listed] == ["calculate", "submit"]
            assert listed[0].input_schema == calculator().schemas()[0]["function"]["parameters"]
            wrong = await client.call_tool("calculate", {"expression": "import os"})
            assert wrong.is_error
            unknown = await client.call_tool("calculatr", {})
            assert "Did you mean 'calculate'" in text(unknown)
            right = await client.call_tool("calculate", {"expression": problem.data["expression"]})
            assert text(right) == str(problem.data["answer"])
            await client.call_tool("submit", {"answer": problem.data["answer"]})
        assert (await served.verdict()).reward == 1.0
        await served.close()

    asyncio.run(run())


def test_a_task_in_a_sandbox_is_served_as_tools_too(tmp_path: Path) -> None:
    async def run() -> None:
        attempts = Attempts(registry.get("swe"), PlainBackend(tmp_path))
        async with attempts:
            task = attempts.task(5)
            facts = task.metadata
            served = await Served.open(attempts, 5)
            async with Client(served.server) as client:
                assert client.instructions == task.instruction
                assert [t.name for t in (await client.list_tools()).tools] == list(task.tools)
                shown = await client.call_tool("read_file", {"path": facts["file"]})
                assert facts["buggy"] in text(shown)
                missing = await client.call_tool("read_file", {"path": "gone.py"})
                assert missing.is_error
                edit = {"path": facts["file"], "old": facts["buggy"], "new": facts["fix"]}
                await client.call_tool("replace_in_file", edit)
                assert text(await client.call_tool("run_tests", {})).startswith("PASSED")
                await client.call_tool("submit", {})
            verdict = await served.verdict()
            await served.close()
        assert verdict.reward == 1.0
        assert {e.key for e in verdict.evidence if e.holds} == set(EvidenceKey)

    asyncio.run(run())


def test_a_fault_of_the_environment_is_an_error_of_the_protocol() -> None:
    async def run() -> None:
        served = await Served.open(Attempts(of_class(Plain)), 0)
        async with Client(served.server) as client:
            with pytest.raises(MCPError, match="Fault of the environment"):
                await client.call_tool("crash", {})
        assert (await served.verdict()).reward is None
        await served.close()

    asyncio.run(run())


def test_the_official_client_drives_the_command_that_serves() -> None:
    async def run() -> None:
        words = ["-m", "agentrl.cli.main", "envs", "serve", "calculator", "--seed", "5"]
        async with Client(StdioServerParameters(command=sys.executable, args=words)) as client:
            assert client.instructions == calculator().problem(5).instruction
            answer = await client.call_tool("calculate", {"expression": "6 * 7"})
            assert text(answer) == "42"

    asyncio.run(run())


# ----------------------------------------------------------------------------------------------------- driven


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mcp")
    (folder / "server.py").write_text(SERVER)
    (folder / "problems.jsonl").write_text(json.dumps(PROBLEM) + "\n")
    return folder


@pytest.fixture(scope="module")
def url(files: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, str(files / "server.py"), str(port)], stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 90
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < deadline, "waiting for the MCP server since 90 s"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.terminate()
        process.wait(10)


def attempt(environment: ToolEnvironment) -> None:
    async def run() -> None:
        task = environment.task(0)
        assert task.tools == ("add", "submit")
        proof = await admit(task, environment, backend="none", light=True)
        assert proof.valid, proof.reasons
        session = await EnvironmentSession.open(
            task, environment, session_id="s", signing_key=KEY, admission=proof
        )
        async with session:
            assert session.tools[0]["function"]["description"] == "Add two numbers"
            for wrong in ({"a": 1}, {"a": "x", "b": 1}, {"a": 1, "b": 2, "c": 3}, {"a": 13, "b": 1}):
                assert (await session.call(act("add", **wrong))).is_error
            seen = await session.call(act("add", a=20, b=22))
            assert (seen.text, seen.is_error) == ("42", False)
            await session.call(act("submit", answer=" 42."))
            verdict = await session.finalize(termination=Termination.FINISHED, fault=None)
        assert verdict.reward == 1.0
        assert {e.key for e in verdict.evidence if e.holds} == set(EvidenceKey)

    asyncio.run(run())


def driven(server: str, files: Path) -> ToolEnvironment:
    found = registry.get("mcp")
    assert isinstance(found, ToolEnvironment)
    return found.with_options(server=server, problems=str(files / "problems.jsonl"))


def test_a_server_of_the_official_package_is_an_environment_over_stdio(files: Path) -> None:
    found = registry.get(f"mcp?server={sys.executable} {files}/server.py&problems={files}/problems.jsonl")
    assert isinstance(found, ToolEnvironment)
    attempt(found)


def test_and_over_http(files: Path, url: str) -> None:
    attempt(driven(url, files))


def test_a_server_that_is_not_there_says_so(files: Path) -> None:
    with pytest.raises(SandboxError, match="can not be used"):
        driven("http://127.0.0.1:1/mcp", files).schemas()
