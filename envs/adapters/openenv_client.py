"""`openenv`: any OpenEnv server as an environment, over its websocket protocol. Extra `openenv`.

    env:openenv?server=http://localhost:8000&problems=problems.jsonl

A server that answers `list_tools` brings its tools with their schemas; any other has one tool, `step`, whose
arguments are the fields of its action (`GET /schema`). A problem is a line of JSON with `seed`, `gold` (calls
as `{"tool": …, "arguments": {…}}`) and, where it should not be what `reset` shows, `instruction`.

The server keeps the score: an attempt is judged by its `state()`, the rewards that came with the steps, and
the reward is their sum. Whatever the server calls an error is a fault and leaves no reward, except arguments
that it refuses (`VALIDATION_ERROR`), which are the policy's: the protocol does not say whose anything is.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
import urllib.parse
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidURI, WebSocketException

from agentrl.errors import ConfigError, SandboxError, TaskError
from envs.environment import Grade, Problem, Step, ToolLike, environment
from envs.tools import ToolResult, failed

CONNECT_DEADLINE_S = 90.0
MESSAGE_BYTES = 64 * 1024 * 1024
REFUSED = "VALIDATION_ERROR"


def address(server: str) -> str:
    """The websocket of a server's base URL."""
    parts = urllib.parse.urlsplit(server)
    scheme = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}.get(parts.scheme)
    if scheme is None or not parts.netloc:
        raise ConfigError(
            f"openenv needs the URL of a server, not '{server}'.",
            fix="Give openenv?server=http://HOST:PORT&problems=FILE.jsonl.",
        )
    return urllib.parse.urlunsplit((scheme, parts.netloc, parts.path.rstrip("/") + "/ws", "", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An observation of the server."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


class Refusal(Exception):
    """The server refuses the data of a message: the policy's doing when it was an action."""


class Connection:
    """One connection, which is one attempt at the server."""

    def __init__(self, server: str, socket: ClientConnection) -> None:
        self._server = server
        self._socket = socket

    @classmethod
    async def open(cls, server: str) -> Connection:
        """Connect. Raises `SandboxError` when the server can not be used."""
        try:
            socket = await connect(
                address(server), open_timeout=CONNECT_DEADLINE_S, max_size=MESSAGE_BYTES, proxy=None
            )
        except (OSError, TimeoutError, InvalidURI, WebSocketException) as error:
            raise SandboxError(
                f"OpenEnv server {server} can not be used: {type(error).__name__}: {error}.",
                fix="Start it, or look at its own log.",
                code="connect",
                phase="connect",
            ) from error
        return cls(server, socket)

    async def ask(self, kind: str, data: Mapping[str, Any]) -> Answer:
        """Send `reset` or `step` and read the observation.

        Raises:
            Refusal: the server does not take the data.
            SandboxError: anything else that is not an observation.
        """
        try:
            await self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
            message = json.loads(await self._socket.recv())
        except (OSError, WebSocketException) as error:
            raise self._lost(f"the connection broke: {type(error).__name__}: {error}", "lost") from error
        except ValueError as error:
            raise self._lost(f"it answers what is not JSON: {error}", "answer") from error
        value = message.get("data") if isinstance(message, dict) else None
        if not isinstance(value, dict):
            raise self._lost("its answer has no data", "answer")
        if message.get("type") == "error":
            if value.get("code") == REFUSED:
                raise Refusal(str(value.get("message", "The action was refused.")))
            told = f"{value.get('code', 'error')}: {value.get('message', '')}"
            raise self._lost(told, "server_error")
        observation, reward = value.get("observation"), value.get("reward")
        number = isinstance(reward, int | float) and math.isfinite(reward)
        if message.get("type") != "observation" or not isinstance(observation, dict):
            raise self._lost(f"it answers {message.get('type')!r} to {kind}", "answer")
        if reward is not None and not number:
            raise self._lost(f"its reward is {reward!r}, no finite number", "answer")
        return Answer(
            observation=observation,
            reward=None if reward is None else float(reward),
            done=bool(value.get("done", False)),
        )

    def _lost(self, what: str, code: str) -> SandboxError:
        return SandboxError(
            f"OpenEnv server {self._server}: {what}.",
            fix="Look at its own log; the protocol does not say whose a fault is.",
            code=code,
            phase="openenv",
        )

    async def close(self) -> None:
        """Say goodbye and leave. Idempotent."""
        with suppress(OSError, WebSocketException):  # it may be gone already
            await self._socket.send('{"type": "close"}')
        await self._socket.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a server offers: tools, or (`tool_calls` false) one kind of action."""

    tools: tuple[dict[str, Any], ...]
    """`name`, `description`, `input_schema`."""
    tool_calls: bool


_OFFERS: dict[str, Offer] = {}
_INSTRUCTIONS: dict[tuple[str, int], str] = {}
"""Asked for once per process: both are needed before there is an attempt."""


def _in_a_loop_of_its_own(work: Any) -> Any:
    """The value of a coroutine, from code that may itself be inside a running loop."""
    found: list[Any] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(asyncio.run(work))
        except BaseException as error:  # handed to the caller
            raised.append(error)

    asking = threading.Thread(target=run, daemon=True, name="openenv-ask")
    asking.start()
    asking.join(4 * CONNECT_DEADLINE_S)
    if raised:
        raise raised[0]
    if not found:
        raise SandboxError("OpenEnv server: no answer in time.", code="no_answer", phase="connect")
    return found[0]


def offer(server: str) -> Offer:
    """The server's tools; asked once per process. Raises `SandboxError`."""
    if server not in _OFFERS:
        _OFFERS[server] = _in_a_loop_of_its_own(_ask_offer(server))
    return _OFFERS[server]


async def _ask_offer(server: str) -> Offer:
    connection = await Connection.open(server)
    try:
        async with asyncio.timeout(CONNECT_DEADLINE_S):
            answer = await connection.ask("step", {"type": "list_tools"})
            listed = answer.observation.get("tools")
    except (Refusal, SandboxError):
        listed = None  # a server without tools calls this an error, in more than one way
    finally:
        await connection.close()
    if isinstance(listed, list):
        return Offer(tools=tuple(listed), tool_calls=True)
    base = address(server).removesuffix("/ws").replace("ws", "http", 1)
    try:
        async with httpx.AsyncClient(timeout=CONNECT_DEADLINE_S, trust_env=False) as client:
            answered = await client.get(f"{base}/schema")
            answered.raise_for_status()
            action = answered.json()["action"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise SandboxError(
            f"OpenEnv server {server} tells neither tools nor a schema: {type(error).__name__}: {error}.",
            fix="It must answer list_tools, or GET /schema.",
            code="no_schema",
            phase="connect",
        ) from error
    properties = {k: v for k, v in action.get("properties", {}).items() if k != "metadata"}
    schema = {**action, "properties": properties, "required": action.get("required", [])}
    about = action.get("description") or "Do one step in the environment."
    return Offer(tools=({"name": "step", "description": about, "input_schema": schema},), tool_calls=False)


async def _ask_instruction(server: str, seed: int) -> str:
    connection = await Connection.open(server)
    try:
        async with asyncio.timeout(CONNECT_DEADLINE_S):
            observation = (await connection.ask("reset", {"seed": seed})).observation
    except Refusal as error:
        raise SandboxError(f"OpenEnv server {server}: reset: {error}", code="reset", phase="reset") from error
    finally:
        await connection.close()
    told = observation.get("instruction")
    return told if isinstance(told, str) else json.dumps(observation, ensure_ascii=False)


class _Remote:
    """One tool of the server."""

    def __init__(self, described: Mapping[str, Any], *, tool_calls: bool) -> None:
        self.name = str(described["name"])
        self._about = str(described.get("description") or self.name).strip()
        self._schema = {"required": [], **described.get("input_schema", {})}
        self._tool_calls = tool_calls

    def schema(self) -> dict[str, Any]:
        """The server's own."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self._about, "parameters": self._schema},
        }

    async def call(self, workspace: OpenEnv, arguments: Mapping[str, Any]) -> ToolResult:
        """Check the arguments here, so that whose a mistake is does not depend on the server; then ask it."""
        try:
            jsonschema.validate(dict(arguments), self._schema)
        except jsonschema.ValidationError as error:
            return failed(f"{self.name}: {error.message}")
        known = self._schema.get("properties", {})
        if unknown := set(arguments) - set(known):
            return failed(f"{self.name}: unknown argument {', '.join(sorted(unknown))}.")
        data = dict(arguments)
        if self._tool_calls:
            data = {"type": "call_tool", "tool_name": self.name, "arguments": dict(arguments)}
        try:
            return await workspace.stepped(data)
        except Refusal as refusal:
            return failed(f"{self.name}: {refusal}")


@environment("openenv")
class OpenEnv:
    """Act in the environment of an OpenEnv server."""

    def __init__(self, server: str = "", problems: str = "") -> None:
        address(server)
        self.done = False
        self._server = server
        self._problems = problems
        self._seed = 0
        self._connection: Connection | None = None
        self._rewards: list[float] = []

    def problem(self, seed: int) -> Problem:
        """Line `seed` of the file, and around again. `TaskError` names the line."""
        try:
            text = Path(self._problems).read_text(encoding="utf-8")
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
            row = rows[seed % len(rows)]
            steps = [Step(tool=each["tool"], arguments=each.get("arguments", {})) for each in row["gold"]]
            own = int(row["seed"])
        except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            raise TaskError(
                f"{self._problems}: {type(error).__name__}: {error}.",
                fix='Write lines of JSON with "seed" and "gold".',
                code="problems",
                phase="problem",
            ) from error
        told = row.get("instruction")
        if told is None:
            key = (self._server, own)
            if key not in _INSTRUCTIONS:
                _INSTRUCTIONS[key] = _in_a_loop_of_its_own(_ask_instruction(*key))
            told = _INSTRUCTIONS[key]
        return Problem(
            instruction=str(told),
            data={"seed": own},
            gold=tuple(steps),
            secrets=tuple(str(secret) for secret in row.get("secrets", ())),
        )

    async def reset(self, problem: Problem) -> None:
        """Note the seed. The server is connected to by the first call, so judging needs none."""
        self._seed = problem.data["seed"]

    def tools(self) -> Sequence[ToolLike]:
        """The server's."""
        offered = offer(self._server)
        return [_Remote(each, tool_calls=offered.tool_calls) for each in offered.tools]

    async def stepped(self, data: Mapping[str, Any]) -> ToolResult:
        """One step at the server: what it shows, and the reward noted."""
        if self._connection is None:
            self._connection = await Connection.open(self._server)
            try:
                await self._connection.ask("reset", {"seed": self._seed})
            except Refusal as error:
                raise SandboxError(f"{self._server}: reset: {error}", code="reset", phase="reset") from error
        answer = await self._connection.ask("step", data)
        if answer.reward is not None:
            self._rewards.append(answer.reward)
        self.done = answer.done
        seen = answer.observation
        told = seen.get("result", seen.get("text"))
        shown = told if isinstance(told, str) else json.dumps(told or seen, ensure_ascii=False)
        return ToolResult(text=shown, is_error=bool(seen.get("is_error") or seen.get("error")))

    def state(self) -> dict[str, Any]:
        """The rewards that came with the steps."""
        return {"rewards": self._rewards, "done": self.done}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The opposite of `state`."""
        self._rewards, self.done = list(state["rewards"]), state["done"]

    def grade(self) -> Grade:
        """Their sum."""
        total = math.fsum(self._rewards)
        return Grade(reward=total, components={"return": total}, facts={"steps_rewarded": len(self._rewards)})

    async def close(self) -> None:
        """Let the server go."""
        if self._connection is not None:
            await self._connection.close()
