"""A server that speaks vLLM's wire protocol on loopback, with a model that can be recomputed in a test.

The model is a function: the distribution after a prefix depends on the prefix and on one number, its
weights. A weight file holds that number. So every log-prob and every version span of an answer can be
checked against what those weights would have said after that prefix. `faults` makes the next requests of a
path go wrong.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import random
import zlib
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCAB = 40
STOP = 1

Fault = Callable[[dict[str, Any]], Any]
"""A body to an `Answer`, None (go on as if nothing were), or something to await for one of these."""


@dataclass
class Answer:
    """What a fault answers with: a status and body, or `raw` bytes, after which the connection is closed."""

    status: int = 200
    body: Any = None
    raw: bytes | None = None


def log_probs(weights: int, prefix: list[int] | tuple[int, ...], *, temperature: float = 1.0) -> list[float]:
    """Of every next id after `prefix`, float64."""
    rng = random.Random(zlib.crc32(repr((weights, tuple(prefix))).encode()))
    logits = [rng.gauss(0, 2) / (temperature or 1.0) for _ in range(VOCAB)]
    top = max(logits)
    total = top + math.log(sum(math.exp(x - top) for x in logits))
    return [x - total for x in logits]


def write_weights(folder: Path, weights: int | str) -> str:
    """A folder that the fake loads; a text is one that it refuses."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_text(json.dumps(weights))
    return str(folder)


def read_weights(location: str) -> Any:
    """What a location holds: a number, or a text that says why it can not be loaded."""
    if location.startswith("weights:"):
        return int(location.removeprefix("weights:"))
    file = Path(location) / "model.safetensors"
    return json.loads(file.read_text()) if file.exists() else "no safetensors there"


@dataclass(eq=False)
class Running:
    """One generation."""

    body: dict[str, Any]
    ids: list[int] = field(default_factory=list)
    listed: list[list[tuple[int, float]]] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    aborted: bool = False


class FakeVllm:
    """One server. `step_s` is the time of a token. Its counters and logs are for assertions.

    `say` and `read` make another model of it: log-probs of every next id, and weights from a location.
    """

    def __init__(
        self,
        *,
        weights: int = 0,
        context: int = 256,
        step_s: float = 0.0,
        processed: bool = True,
        development: bool = True,
        model: str = "fake",
        vocab: int = VOCAB,
        say: Callable[..., list[float]] = log_probs,
        read: Callable[[str], Any] = read_weights,
    ) -> None:
        self.vocab = vocab
        self.say = say
        self.read = read
        self.started_with = weights
        self.weights: Any = weights
        self.context = context
        self.step_s = step_s
        self.processed = processed
        self.development = development
        self.model = model
        self.label = "default"
        self.paused: str | None = None
        self.running: list[Running] = []
        self.faults: dict[str, deque[Fault]] = defaultdict(deque)
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.disconnected = 0
        self.closes_idle = False
        """Close a connection that was used before as the next request comes, unread: what a busy server does
        whose timer fires first."""
        self.closed_idle = 0
        self.seconds = 0.0
        self.pauses = self.resumes = 0
        self.rng = random.Random(5)
        self.port = 0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def sent(self, path: str) -> list[dict[str, Any]]:
        """Bodies of the requests to a path, in order."""
        return [body for name, body in self.requests if name == path]

    async def start(self) -> FakeVllm:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        """As when the process is killed: all connections break."""
        if self._server is not None:
            self._server.close()
            for writer in list(self._connections):
                writer.transport.abort()
            await self._server.wait_closed()
            self._server = None

    async def crash_and_come_back(self) -> None:
        """A new process: the weights it was started with, no label, not paused."""
        await self.stop()
        self.weights, self.label, self.paused = self.started_with, "default", None
        await self.start()

    # ----------------------------------------------------------------------------------------------- HTTP

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            used = False
            while line := await reader.readline():
                if used and self.closes_idle:
                    self.closed_idle += 1
                    return
                used = True
                _, target, _ = line.decode().split()
                length = 0
                while (header := await reader.readline()).strip():
                    name, _, value = header.decode().partition(":")
                    length = int(value) if name.lower() == "content-length" else length
                body = json.loads(await reader.readexactly(length)) if length else {}
                answer = await self._answer(target, body, reader)
                if answer is None:
                    return
                if answer.raw is not None:
                    writer.write(answer.raw)
                    await writer.drain()
                    return
                data = json.dumps(answer.body).encode() if answer.body is not None else b""
                writer.write(
                    b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (answer.status, len(data)) + data
                )
                await writer.drain()
                if answer.status == 500:
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _answer(self, target: str, body: dict[str, Any], reader: asyncio.StreamReader) -> Answer | None:
        path, _, query = target.partition("?")
        self.requests.append((path, body))
        if self.faults[path]:
            answer = self.faults[path].popleft()(body)
            if inspect.isawaitable(answer):
                answer = await answer
            if answer is not None:
                return answer
        if path == "/inference/v1/generate":
            return await self._generate(body, reader)
        if path == "/v1/models":
            served = {"id": self.model, "root": f"weights:{self.started_with}", "max_model_len": self.context}
            return Answer(body={"data": [served]})
        if path == "/v1/completions":
            return Answer(body=self._score(body))
        if not self.development:
            return Answer(404, {"detail": "Not Found"})
        return self._control(path, query, body)

    def _control(self, path: str, query: str, body: dict[str, Any]) -> Answer:
        if path == "/pause":
            mode = query.partition("=")[2]
            self.pauses += 1
            self.paused = mode
            if mode == "abort":
                for one in self.running:
                    one.aborted = True
            return Answer(body={"status": "paused"})
        if path == "/resume":
            self.resumes += 1
            self.paused = None
            return Answer(body={"status": "resumed"})
        if path == "/is_paused":
            return Answer(body={"is_paused": self.paused is not None})
        if path == "/weight_info":
            return Answer(body={"weight_version": self.label})
        if path == "/update_weight_version":
            self.label = body["new_version"]
            return Answer(body={})
        if path == "/collective_rpc":
            return self._rpc(body["method"], body["args"][0])
        return Answer(404, {"detail": "Not Found"})

    def _rpc(self, method: str, location: str) -> Answer:
        found = self.read(location)
        if isinstance(found, str):
            if method == "agentrl_load_weights":
                self.weights = None  # as a load that fails half way leaves it
            return Answer(500, {"error": {"message": found}})
        if method == "agentrl_load_weights":
            assert self.paused is not None, "weights changed under running requests"
            self.weights = found
        return Answer(body={"results": ["1"]})

    # --------------------------------------------------------------------------------------------- the model

    def _score(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = body["prompt"]
        listed: list[Any] = [None]
        for at in range(1, len(ids)):
            listed.append({str(ids[at]): {"logprob": self.say(self.weights, ids[:at])[ids[at]]}})
        return {"choices": [{"prompt_logprobs": listed, "prompt_token_ids": ids}]}

    async def _generate(self, body: dict[str, Any], reader: asyncio.StreamReader) -> Answer | None:
        prompt = body["token_ids"]
        if max(prompt) >= self.vocab:
            return Answer(400, {"error": {"message": f"Token id {max(prompt)} is out of vocabulary"}})
        if len(prompt) >= self.context:
            return Answer(400, {"error": {"message": "the prompt is too long"}})
        one = Running(body)
        gone = asyncio.create_task(reader.read(1))
        work = asyncio.create_task(self._decode(one))
        self.running.append(one)
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.disconnected += 1
                return None
            return Answer(body=self._answered(one, work.result()))
        finally:
            self.running.remove(one)
            for task in (gone, work):
                task.cancel()
            await asyncio.gather(gone, work, return_exceptions=True)

    async def _decode(self, one: Running) -> str:
        """The finish reason. Without weights a step ends the process."""
        params, prompt = one.body["sampling_params"], one.body["token_ids"]
        temperature = params["temperature"]
        limit = min(params["max_tokens"], self.context - len(prompt))
        while len(one.ids) < limit:
            if self.step_s:
                await asyncio.sleep(self.step_s)
            while self.paused not in (None, "wait") and not one.aborted:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            if one.aborted:
                return "abort"
            assert self.weights is not None, "a step without weights"
            prefix = prompt + one.ids
            sampled = self.say(self.weights, prefix, temperature=temperature)
            said = sampled if self.processed and temperature else self.say(self.weights, prefix)
            token = (
                sampled.index(max(sampled))
                if not temperature
                else self.rng.choices(range(len(sampled)), [math.exp(x) for x in sampled])[0]
            )
            best = sorted(range(len(said)), key=lambda i: -said[i])[: params.get("logprobs", 0)]
            one.ids.append(token)
            one.listed.append([(i, said[i]) for i in dict.fromkeys([token, *best])])
            one.labels.append(self.label)
            if token in params.get("stop_token_ids", ()):
                return "stop"
        return "length"

    def _answered(self, one: Running, finish: str) -> dict[str, Any]:
        spans: list[dict[str, Any]] = []
        for at, label in enumerate(one.labels):
            if spans and spans[-1]["version"] == label:
                spans[-1]["end"] = at + 1
            else:
                spans.append({"version": label, "start": at, "end": at + 1})
        content = [
            {
                "token_id": listed[0][0],
                "logprob": listed[0][1],
                "top_logprobs": [{"token_id": i, "logprob": p} for i, p in listed],
            }
            for listed in one.listed
        ]
        choice = {
            "index": 0,
            "finish_reason": finish,
            "token_ids": list(one.ids),
            "logprobs": {"content": content},
            "weight_versions": spans if self.development else [],
        }
        return {
            "request_id": f"generate-tokens-{one.body['request_id']}" if "request_id" in one.body else "x",
            "usage": {"prompt_tokens": len(one.body["token_ids"]), "completion_tokens": len(one.ids)},
            "prompt_token_ids": one.body["token_ids"] if one.body.get("return_token_ids") else None,
            "choices": [choice],
        }


def status(code: int, message: str = "injected") -> Fault:
    """The next request gets this answer."""
    return lambda _: Answer(code, {"error": {"message": message}})


def broken(_: dict[str, Any]) -> Answer:
    """The connection closes without an answer."""
    return Answer(raw=b"")


def half(_: dict[str, Any]) -> Answer:
    """The connection closes in the middle of an answer."""
    return Answer(raw=b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n" + b'{"choices": [')


def garbage(_: dict[str, Any]) -> Answer:
    """Two hundred, and no JSON."""
    return Answer(raw=b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n<html>")
