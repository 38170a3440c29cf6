"""A proxy for tests: a fake engine with log-probs, sessions without an environment, and a real server."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from agentrl.inference.sampler import SampleRequest, SampleResult
from agentrl.types import FinishReason, LogProbKind, ModelCall, SamplingParams, Trajectory, VersionSpan
from harness.chat import ChatFormat
from harness.proxy.door import Request
from harness.proxy.model import Rules
from services.proxy.app import create_app
from services.proxy.sessions import Live, Sessions, Settings

sys.path.insert(0, str(Path(__file__).parent.parent / "harness"))

from tiny_tokenizer import tokenizer

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
Line = str | Sequence[int]


class Engine:
    """A sampler that says what `script` says, with a log-prob of -0.25 per token, from version 3.

    Args:
        script: (request, number of the request) to text or ids; it may raise.
        delay_s: before it answers.
    """

    model = "tiny"
    policy_version = 3

    def __init__(
        self, chat: ChatFormat, script: Callable[[SampleRequest, int], Line], *, delay_s: float = 0.0
    ) -> None:
        self.requests: list[SampleRequest] = []
        self.cancelled = 0
        self.delay_s = delay_s
        self._chat = chat
        self._script = script
        self._numbers: dict[str, int] = {}
        self._said: dict[str, tuple[tuple[int, ...], int]] = {}

    async def sample(self, request: SampleRequest) -> SampleResult:
        self.requests.append(request)
        base = request.id.partition(".p")[0] if ".p" in request.id else request.id
        known = self._said.get(base)
        started = time.time()
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if known is None:
            number = self._numbers.setdefault(base, len(self._numbers))
            line = self._script(request, number)
            whole = self._chat.encode_reply(line) if isinstance(line, str) else tuple(line)
            known = self._said[base] = (whole, len(request.prompt_token_ids))
        said = known[0][len(request.prompt_token_ids) - known[1] :]  # a later piece of the same reply
        ids = said[: request.params.max_tokens]
        return SampleResult(
            request_id=request.id,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=ids,
            log_probs=(-0.25,) * len(ids),
            log_prob_kind=LogProbKind.PROCESSED,
            policy_versions=(VersionSpan(version=3, start=0, end=len(ids)),),
            finish_reason=FinishReason.STOP if len(ids) == len(said) else FinishReason.LENGTH,
            model=self.model,
            started_at=started,
            finished_at=max(started, time.time()),
        )

    async def close(self) -> None:
        return None


class Proxy:
    """Sessions over one engine. `lines` are said one after the other, the last one for ever."""

    def __init__(
        self,
        *lines: Line,
        family: str = "chatml",
        script: Callable[[SampleRequest, int], Line] | None = None,
        delay_s: float = 0.0,
        rules: Rules | None = None,
        max_tokens: int = 256,
        max_context: int = 100_000,
        parser: str = "hermes",
    ) -> None:
        self.chat = ChatFormat(tokenizer(family), tool_parser=parser)
        said = script or (lambda request, number: lines[min(number, len(lines) - 1)])
        self.engine = Engine(self.chat, said, delay_s=delay_s)
        self.kept: list[Trajectory] = []
        self.sessions = Sessions(
            self.engine,
            self.chat,
            Settings(
                sampling=SamplingParams(max_tokens=max_tokens),
                max_context=max_context,
                rules=rules or Rules(end_on_fault=False),
            ),
            prefix="p",
            kept=self.kept.append,
        )
        self.live: Live = self.sessions.open("test", harness="test/1")

    @property
    def calls(self) -> tuple[ModelCall, ...]:
        return self.live.recorder.calls

    def facts(self) -> dict[str, Any]:
        return self.live.door.model.facts()

    def trajectory(self) -> Trajectory:
        """The session as a trajectory; it is over then."""
        return self.sessions.close(self.live.id)

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """One request at the door, its answer parsed."""
        raw = body if isinstance(body, bytes) else json_bytes(body)
        sent = {"authorization": f"Bearer {self.live.key}", **headers}
        response = await self.live.door.handle(Request(method="POST", path=path, headers=sent, body=raw))
        if isinstance(response.body, bytes):
            return response.status, httpx.Response(200, content=response.body).json()
        return response.status, b"".join([piece async for piece in response.body]).decode()

    async def say(self, *messages: Any, **more: Any) -> Any:
        """One `chat/completions` request that must succeed; its first message."""
        body = {"model": "m", "messages": list(messages), **more}
        status, answer = await self.post("v1/chat/completions", body, **{"x-stainless-retry-count": "0"})
        assert status == 200, answer
        return answer["choices"][0]["message"]


def json_bytes(body: Any) -> bytes:
    return httpx.Request("POST", "http://x", json=body).content


@contextmanager
def served(proxy: Proxy) -> Iterator[str]:
    """The base URL of the proxy's session on a real server, in a thread."""
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        create_app(proxy.sessions, admin_key="admin"), log_level="warning", access_log=False, ws="none"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/s/{proxy.live.id}"
    finally:
        server.should_exit = True
        thread.join(20)
        listening.close()
        assert not thread.is_alive(), "the server did not stop"
