"""`mcp`: the tools of any MCP server as an environment, over stdio or HTTP. Extra `mcp`.

    env:mcp?server=python server.py&problems=problems.jsonl
    env:mcp?server=http://localhost:8000/mcp&problems=problems.jsonl

The server's tools keep their schemas; a `submit` tool takes the answer. A problem is a line of JSON with
`instruction`, `answer` and `gold` (calls as `{"tool": …, "arguments": {…}}` that end with `submit`). What the
server does can not be replayed, so an attempt is judged by its `state()`: the answer that was handed in,
compared after normalization. Each attempt has a connection of its own; what is shared behind the server is
the server's own affair.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
from mcp import Client, MCPError, StdioServerParameters, types

from agentrl.errors import ConfigError, SandboxError, TaskError
from envs.builtin.search import normal
from envs.environment import Grade, Problem, Step, ToolLike, environment, method_tool, tool
from envs.tools import ToolResult, failed

CONNECT_DEADLINE_S = 90.0
INVALID_PARAMS = -32602
"""JSON-RPC's code for arguments that the server refuses: the policy's doing."""

_LISTED: dict[str, tuple[types.Tool, ...]] = {}
"""Tools by server, asked for once per process: schemas are needed before there is an attempt."""


def target(server: str) -> str | StdioServerParameters:
    """A URL as it is; anything else is a command line to start."""
    if server.startswith(("http://", "https://")):
        return server
    words = shlex.split(server)
    if not words:
        raise ConfigError("mcp needs a server.", fix="Give mcp?server=COMMAND or URL&problems=FILE.jsonl.")
    return StdioServerParameters(command=words[0], args=words[1:])


class Connection:
    """An open client, held by a task of its own: it must be closed by the task that opened it."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._closing = asyncio.Event()
        self._opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._holder = asyncio.create_task(self._hold())

    @classmethod
    async def open(cls, server: str) -> Connection:
        """Connect. Raises `SandboxError` when the server does not answer in time."""
        made = cls(server)
        try:
            async with asyncio.timeout(CONNECT_DEADLINE_S):
                await asyncio.shield(made._opened)
        except TimeoutError as error:
            await made.close()
            raise SandboxError(
                f"MCP server {server}: no answer within {CONNECT_DEADLINE_S:g} s.",
                fix="Start it, or look at its own log.",
                code="no_answer",
                phase="connect",
            ) from error
        return made

    async def _hold(self) -> None:
        try:
            async with Client(target(self._server)) as client:
                self._opened.set_result(client)
                await self._closing.wait()
        except Exception as error:  # the boundary to the server: classified
            if self._opened.done():
                return  # a server that fails while it is let go has nothing more to say
            told = SandboxError(
                f"MCP server {self._server} can not be used: {type(error).__name__}: {error}.",
                fix="Check the command or the URL.",
                code="connect",
                phase="connect",
            )
            told.__cause__ = error
            self._opened.set_exception(told)

    @property
    def client(self) -> Client:
        return self._opened.result()

    async def close(self) -> None:
        """Let the server go. Idempotent."""
        self._closing.set()
        _, waiting = await asyncio.wait({self._holder}, timeout=CONNECT_DEADLINE_S)
        for holder in waiting:
            holder.cancel()


def listed(server: str) -> tuple[types.Tool, ...]:
    """The server's tools; connects once per process. Raises `SandboxError`."""
    if server not in _LISTED:

        async def ask() -> tuple[types.Tool, ...]:
            connection = await Connection.open(server)
            try:
                async with asyncio.timeout(CONNECT_DEADLINE_S):
                    return tuple((await connection.client.list_tools()).tools)
            finally:
                await connection.close()

        found: list[tuple[types.Tool, ...]] = []
        raised: list[BaseException] = []

        def run() -> None:  # this thread may be inside a running loop, so it asks in another
            try:
                found.append(asyncio.run(ask()))
            except BaseException as error:  # handed to the caller
                raised.append(error)

        asking = threading.Thread(target=run, daemon=True, name="mcp-list")
        asking.start()
        asking.join(3 * CONNECT_DEADLINE_S)
        if raised:
            raise raised[0]
        if not found:
            raise SandboxError(
                f"MCP server {server} does not list its tools.", code="no_answer", phase="connect"
            )
        _LISTED[server] = found[0]
    return _LISTED[server]


class _Remote:
    """One tool of the server."""

    def __init__(self, described: types.Tool) -> None:
        self.name = described.name
        self._described = described

    def schema(self) -> dict[str, Any]:
        """The server's own."""
        parameters = {"required": [], **self._described.input_schema}
        about = (self._described.description or self.name).strip()
        return {
            "type": "function",
            "function": {"name": self.name, "description": about, "parameters": parameters},
        }

    async def call(self, workspace: Mcp, arguments: Mapping[str, Any]) -> ToolResult:
        """Check the arguments here, so that whose a mistake is does not depend on the server; then ask it."""
        try:
            jsonschema.validate(dict(arguments), self._described.input_schema)
        except jsonschema.ValidationError as error:
            return failed(f"{self.name}: {error.message}")
        known = self._described.input_schema.get("properties", {})
        if unknown := set(arguments) - set(known):
            return failed(f"{self.name}: unknown argument {', '.join(sorted(unknown))}.")
        try:
            answer = await (await workspace.connected()).client.call_tool(self.name, dict(arguments))
        except MCPError as error:
            if error.error.code == INVALID_PARAMS:
                return failed(f"{self.name}: {error.error.message}")
            raise
        return ToolResult(text=_text(answer), is_error=bool(answer.is_error))


def _text(answer: types.CallToolResult) -> str:
    """What a model is shown of a result: its texts; other content by kind."""
    parts = [c.text if isinstance(c, types.TextContent) else f"[{c.type}]" for c in answer.content]
    if not parts and answer.structured_content is not None:
        parts = [json.dumps(answer.structured_content, ensure_ascii=False)]
    return "\n".join(parts)


@environment("mcp")
class Mcp:
    """Answer a question with the tools of an MCP server."""

    def __init__(self, server: str = "", problems: str = "") -> None:
        target(server)
        self.done = False
        self._server = server
        self._problems = problems
        self._connection: Connection | None = None
        self._answer = ""
        self._given: str | None = None

    def problem(self, seed: int) -> Problem:
        """Line `seed` of the file, and around again."""
        rows = [
            line for line in Path(self._problems).read_text(encoding="utf-8").splitlines() if line.strip()
        ]
        row = json.loads(rows[seed % len(rows)])
        missing = [key for key in ("instruction", "answer") if key not in row]
        if missing:
            raise TaskError(
                f"{self._problems}: line {seed % len(rows) + 1} has no {' and no '.join(missing)}."
            )
        gold = [Step(tool=step["tool"], arguments=step.get("arguments", {})) for step in row.get("gold", ())]
        answer = str(row["answer"])
        return Problem(
            instruction=row["instruction"], data={"answer": answer}, gold=tuple(gold), secrets=(answer,)
        )

    async def reset(self, problem: Problem) -> None:
        """Note the answer. The server is connected to by the first call, so judging needs none."""
        self._answer = problem.data["answer"]

    def tools(self) -> Sequence[ToolLike]:
        """The server's tools and `submit`."""
        return [*(_Remote(each) for each in listed(self._server)), method_tool(Mcp.submit)]

    async def connected(self) -> Connection:
        """The connection of this attempt."""
        if self._connection is None:
            self._connection = await Connection.open(self._server)
        return self._connection

    @tool
    async def submit(self, answer: str) -> str:
        """Hand in the answer.

        answer: the answer, nothing else
        """
        self._given = answer
        self.done = True
        return "Submitted."

    def state(self) -> dict[str, Any]:
        """What was handed in."""
        return {"given": self._given}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The opposite of `state`."""
        self._given = state["given"]

    def grade(self) -> Grade:
        """Exact match after normalization."""
        right = self._given is not None and normal(self._given) == normal(self._answer)
        return Grade(reward=float(right), components={"exact_match": float(right)})

    async def close(self) -> None:
        """Let the server go."""
        if self._connection is not None:
            await self._connection.close()
