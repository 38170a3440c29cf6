"""An environment served as MCP tools, by the official `mcp` package. Extra `mcp`.

One server is one attempt at the problem of one seed: the instruction is the server's `instructions`, and its
tools are those of the task, with the same schemas and answers. What the policy gets wrong is a result with
`is_error`; a fault of the environment is a protocol error and ends the attempt. `verdict` judges it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from mcp import MCPError, types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from agentrl.errors import BoundaryError
from agentrl.types import Action, Termination, Verdict
from envs.adapters.attempts import Attempts
from envs.inprocess import EnvironmentSession
from envs.session import Session

INTERNAL_ERROR = -32603
"""JSON-RPC's code for a failure of the server."""
VERDICT_DEADLINE_S = 600.0
"""A packaged task runs its tests before it has a verdict."""


class Served:
    """An open attempt and its MCP server. Made by `open`; `close` always."""

    def __init__(self, session: Session | EnvironmentSession) -> None:
        self.session = session
        self.server: Server[Any] = Server(
            f"agentrl-{session.task.id.partition('/')[0]}",
            instructions=session.task.instruction,
            on_list_tools=self._list,
            on_call_tool=self._call,
        )
        self._calls = 0

    @classmethod
    async def open(cls, attempts: Attempts, seed: int) -> Served:
        """Open a session on the problem of the seed. Raises `BoundaryError`."""
        return cls(await attempts.open(seed, name=f"mcp-{seed}"))

    async def _list(self, context: Any, params: Any) -> types.ListToolsResult:
        functions = [schema["function"] for schema in self.session.tools]
        return types.ListToolsResult(
            tools=[
                types.Tool(name=f["name"], description=f["description"], input_schema=f["parameters"])
                for f in functions
            ]
        )

    async def _call(self, context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        self._calls += 1
        action = Action(
            id=f"t{self._calls % 10_000:04d}a000", tool=params.name, arguments=dict(params.arguments or {})
        )
        try:
            seen = await self.session.call(action)
        except BoundaryError as error:
            raise MCPError(INTERNAL_ERROR, f"Fault of the {error.owner} ({error.code}): {error}") from error
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=seen.text)], is_error=seen.is_error
        )

    async def verdict(self) -> Verdict:
        """Judge the attempt as it is now."""
        return await self.session.finalize(termination=Termination.FINISHED, fault=None)

    async def close(self) -> None:
        """End the session. Idempotent."""
        await self.session.close()


async def serve_stdio(attempts: Attempts, seed: int) -> Verdict:
    """Serve one attempt over stdin and stdout until the client goes; its verdict."""
    served = await Served.open(attempts, seed)
    try:
        async with stdio_server() as (read, write):
            await served.server.run(read, write, served.server.create_initialization_options())
        async with asyncio.timeout(VERDICT_DEADLINE_S):
            return await served.verdict()
    finally:
        await served.close()
