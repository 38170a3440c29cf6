"""Our environments on OpenEnv's websocket protocol, for its clients (github.com/meta-pytorch/OpenEnv).

Messages as in `openenv.core.env_server.types` 0.3: `{"type": …, "data": …}` with `reset`, `step`, `state` and
`close`, answered by `observation`, `state` or `error`; beside them `GET /health`, `/schema`, `/metadata`. One
connection is one attempt at a time:

- `reset` takes `seed`; its observation has `instruction` and `tools` (as `list_tools` gives them).
- `step` takes `{"tool": …, "arguments": {…}}`, or OpenEnv's own `{"type": "call_tool", "tool_name": …,
  "arguments": {…}}` and `{"type": "list_tools"}`, answered in the form that its `MCPToolClient` reads.
- The reward is the verdict's, with the step that ends the attempt (`done`): by submission (`terminated`) or
  by the limit of turns (`truncated`). Before that it is null.

The protocol has no word for a fault. One that is not the policy's is an `EXECUTION_ERROR` whose message names
the owner, and the attempt is over: never a reward of 0.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import pydantic
import uvicorn
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from pydantic import BaseModel, ConfigDict, Field

from agentrl.errors import BoundaryError
from agentrl.types import Action, Termination
from envs.adapters.attempts import Attempts
from envs.inprocess import EnvironmentSession
from envs.session import Session

IDLE_S = 1800.0
"""A connection that says nothing for so long is closed."""
GRACE_S = 5
MESSAGE_BYTES = 4 * 1024 * 1024

Code = Literal[
    "INVALID_JSON", "UNKNOWN_TYPE", "VALIDATION_ERROR", "EXECUTION_ERROR", "CAPACITY_REACHED", "SESSION_ERROR"
]


class ToolCall(BaseModel):
    """The data of `step`. Either spelling; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    type: Literal["call_tool", "list_tools"] | None = None
    tool: str | None = Field(default=None, description="Name of the tool.")
    tool_name: str | None = Field(default=None, description="The same, as OpenEnv's call_tool spells it.")
    arguments: dict[str, Any] = Field(default_factory=dict, description="As the tool's schema says.")
    metadata: dict[str, Any] = Field(default_factory=dict, description="Ignored.")

    @pydantic.model_validator(mode="after")
    def _named(self) -> ToolCall:
        named = [name for name in (self.tool, self.tool_name) if name is not None]
        if self.type != "list_tools" and len(named) != 1:
            raise ValueError("name one tool: tool, or tool_name")
        return self

    @property
    def name(self) -> str:
        return self.tool if self.tool is not None else str(self.tool_name)


class Reset(BaseModel):
    """The data of `reset`. Other keys are allowed by the protocol and mean nothing here."""

    model_config = ConfigDict(extra="allow")

    seed: int | None = Field(default=None, ge=0)
    episode_id: str | None = Field(default=None, max_length=255)


class Seen(BaseModel):
    """The observation of a step or reset."""

    text: str = ""
    is_error: bool = False
    instruction: str | None = Field(default=None, description="With reset: what is to be done.")
    tools: list[dict[str, Any]] | None = Field(default=None, description="With reset, as list_tools.")
    terminated: bool = False
    truncated: bool = False
    components: dict[str, float] = Field(default_factory=dict, description="Of the reward, with the end.")


class State(BaseModel):
    """The answer to `state`."""

    episode_id: str | None = None
    step_count: int = 0
    task_id: str | None = None
    done: bool = False


class _Refusal(Exception):
    """An answer of type `error`."""

    def __init__(self, code: Code, message: str, **more: Any) -> None:
        super().__init__(message)
        self.data = {"message": message, "code": code, **more}


class Connection:
    """One client. At most one attempt is open at a time."""

    def __init__(self, attempts: Attempts, numbers: itertools.count[int]) -> None:
        self._attempts = attempts
        self._numbers = numbers
        self._session: Session | EnvironmentSession | None = None
        self._state = State()
        self._seed = -1

    async def answer(self, text: str) -> dict[str, Any] | None:
        """The answer to one message; None when the client wants to leave."""
        try:
            message = json.loads(text)
            if not isinstance(message, dict):
                raise ValueError("a message is an object")
        except (ValueError, RecursionError) as error:
            return _error(_Refusal("INVALID_JSON", f"Invalid JSON: {error}"))
        data = message.get("data") or {}
        try:
            match message.get("type"):
                case "reset":
                    return {"type": "observation", "data": await self._reset(Reset.model_validate(data))}
                case "step":
                    return {"type": "observation", "data": await self._step(ToolCall.model_validate(data))}
                case "state":
                    return {"type": "state", "data": self._state.model_dump()}
                case "close":
                    return None
                case other:
                    raise _Refusal("UNKNOWN_TYPE", f"Unknown message type: {other!r}")
        except pydantic.ValidationError as error:
            wrong = error.errors(include_url=False, include_context=False, include_input=False)
            return _error(_Refusal("VALIDATION_ERROR", f"Invalid message: {wrong[0]['msg']}", errors=wrong))
        except BoundaryError as error:
            await self.close()
            told = f"Fault of the {error.owner} ({error.code}): {error}"
            return _error(_Refusal("EXECUTION_ERROR", told, owner=error.owner, fault=error.code))
        except _Refusal as refusal:
            return _error(refusal)

    async def _reset(self, wanted: Reset) -> dict[str, Any]:
        await self.close()
        number = next(self._numbers)
        seed = wanted.seed if wanted.seed is not None else number
        self._session = await self._attempts.open(seed, name=f"openenv-{number}")
        task = self._session.task
        self._state = State(episode_id=wanted.episode_id or f"openenv-{number}", task_id=task.id)
        seen = Seen(text=task.instruction, instruction=task.instruction, tools=self._tools())
        return {"observation": seen.model_dump(), "reward": None, "done": False}

    async def _step(self, call: ToolCall) -> dict[str, Any]:
        if call.type == "list_tools":
            return {"observation": {"tools": await self._listed()}, "reward": None, "done": self._state.done}
        session = self._session
        if session is None or self._state.done:
            raise _Refusal("SESSION_ERROR", "No attempt is open. Send reset first.")
        self._state.step_count += 1
        number = self._state.step_count
        seen = await session.call(
            Action(id=f"t{number % 10_000:04d}a000", tool=call.name, arguments=call.arguments)
        )
        terminated = session.submitted
        truncated = not terminated and number >= session.task.limits.max_turns
        reward: float | None = None
        components: dict[str, float] = {}
        if terminated or truncated:
            self._state.done = True
            reason = Termination.FINISHED if terminated else Termination.MAX_TURNS
            verdict = await session.finalize(termination=reason, fault=None)
            await self.close()
            reward, components = verdict.reward, dict(verdict.components)
            if reward is None:
                assert verdict.fault is not None
                fault = verdict.fault
                raise _Refusal(
                    "EXECUTION_ERROR",
                    f"Fault of the {fault.owner} ({fault.code}): {fault.message}",
                    owner=fault.owner,
                    fault=fault.code,
                )
        shown = Seen(
            text=seen.text,
            is_error=seen.is_error,
            terminated=terminated,
            truncated=truncated,
            components=components,
        ).model_dump(exclude={"tools", "instruction"})
        if call.type == "call_tool":
            shown |= {"tool_name": call.name, "result": seen.text, "error": None}
        return {"observation": shown, "reward": reward, "done": self._state.done}

    async def _listed(self) -> list[dict[str, Any]]:
        """Tools as OpenEnv lists them; asked before a reset, those of the first problem."""
        if self._session is None:
            await self._reset(Reset(seed=0))
        return self._tools()

    def _tools(self) -> list[dict[str, Any]]:
        assert self._session is not None
        functions = [schema["function"] for schema in self._session.tools]
        return [
            {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
            for f in functions
        ]

    async def close(self) -> None:
        """End the attempt, if one is open. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _error(refusal: _Refusal) -> dict[str, Any]:
    return {"type": "error", "data": refusal.data}


def create_app(attempts: Attempts, *, sessions: int) -> FastAPI:
    """The application. It closes `attempts` when it ends."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with attempts:
            yield

    app = FastAPI(title=f"{attempts.environment.name} (OpenEnv)", lifespan=lifespan)
    numbers = itertools.count()
    alive: set[Connection] = set()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "healthy"}

    @app.get("/metadata")
    async def metadata() -> dict[str, str]:
        return {"name": attempts.environment.name, "description": attempts.environment.summary}

    @app.get("/schema")
    async def schema() -> dict[str, Any]:
        models: dict[str, type[BaseModel]] = {"action": ToolCall, "observation": Seen, "state": State}
        return {name: model.model_json_schema() for name, model in models.items()}

    @app.websocket("/ws")
    async def websocket(socket: WebSocket) -> None:
        await socket.accept()
        if len(alive) >= sessions:
            full = _Refusal(
                "CAPACITY_REACHED",
                f"{sessions} sessions are open. Close one, or serve more with --sessions.",
                active_sessions=len(alive),
                max_sessions=sessions,
            )
            await socket.send_json(_error(full))
            await socket.close()
            return
        connection = Connection(attempts, numbers)
        alive.add(connection)
        try:
            while True:
                async with asyncio.timeout(IDLE_S):
                    text = await socket.receive_text()
                answer = await connection.answer(text)
                if answer is None:
                    await socket.close()
                    return
                await socket.send_json(answer)
        except (WebSocketDisconnect, KeyError):
            return  # it left, or sent bytes, which the protocol does not have
        except TimeoutError:
            await socket.send_json(_error(_Refusal("SESSION_ERROR", f"Nothing was said for {IDLE_S:g} s.")))
            await socket.close()
        finally:
            alive.discard(connection)
            await connection.close()

    return app


def serve(
    attempts: Attempts, *, host: str, port: int, sessions: int, announce: Callable[[str], None]
) -> None:
    """Serve until Ctrl-C or SIGTERM. Call it from the main thread."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listening:
        server = uvicorn.Server(
            uvicorn.Config(
                create_app(attempts, sessions=sessions),
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=GRACE_S,
                ws="websockets-sansio",
                ws_max_size=MESSAGE_BYTES,
            )
        )
        shown = f"[{host}]" if ":" in host else host
        announce(f"http://{shown}:{listening.getsockname()[1]}")
        before = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *_: None)  # the server raises it again after it has stopped
        try:
            asyncio.run(server.serve(sockets=[listening]))
        finally:
            signal.signal(signal.SIGTERM, before)
