"""What the recording proxy costs: the same conversations straight to a server and through the proxy.

    python tests/benchmarks/bench_proxy.py --concurrency 1 16 64 --delay-ms 300
    python tests/benchmarks/bench_proxy.py --vllm http://127.0.0.1:8000 --tokenizer MODEL --max-tokens 48

Without `--vllm` the server is a stand-in of this file, in a process of its own: it does a server's chat work
(template, encoding, decoding, JSON), speaks vLLM's token endpoint, and takes exactly `--delay-ms` for the
tokens, whoever else wants the processor. The proxy is a process of its own. All sides are asked by one client
over HTTP, in rounds that alternate, sampled alike. A real server is also asked for log-probs directly:
without them it has less to do than evidence needs. Targets: 5 ms added, 97 % of the throughput.

A server on the CPU takes every processor, and then the proxy waits for one as anything would; a server with a
GPU leaves them alone. So give each its own: `taskset -c 0` for the server, `taskset -c 1` for this file. More
than the whole throughput is possible: the proxy does the chat work, the server takes and gives token ids.

The columns
    bare, +logprobs   p50 of a request straight to the server, without and with log-probs
    proxied           p50 of a request through the proxy
    difference        proxied less bare: with it comes whatever the server did differently meanwhile
    added p50, p90    of one and the same request: until the client had its answer, less the proxy's wait for
                      the server; what the proxy, its HTTP and its wait for a processor add
    own CPU           processor time of the proxy per request
    queued            how long the proxy waited for a processor, per request: what a busy machine adds
    throughput        tokens per second through the proxy by those of the bare server, median of rounds
    vs +logprobs      the same by the bare server with log-probs
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from uvicorn.loops.auto import auto_loop_factory

from agentrl.inference import vllm_wire as wire
from agentrl.inference.connections import Reply
from agentrl.inference.vllm import VllmSampler
from agentrl.training.given import loaded_tokenizer
from agentrl.types import SamplingParams
from harness.chat import ChatFormat
from services.proxy.app import create_app
from services.proxy.sessions import Sessions, Settings

sys.path.insert(0, str(Path(__file__).parent.parent / "harness"))

from tiny_tokenizer import tokenizer

REPLY = "The quick brown fox jumps over the lazy dog. " * 4
ADMIN = "bench"


def chat_format(source: str | None) -> ChatFormat:
    return ChatFormat(tokenizer("chatml") if source is None else loaded_tokenizer(source))


async def whole_body(receive: Any) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


async def respond(send: Any, status: int, answer: Any) -> None:
    data = json.dumps(answer).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


# ---------------------------------------------------------------------------------------------- the stand-in


def stand_in(port: int, delay_s: float) -> None:
    """A server of chat completions and of vLLM's token endpoint."""
    chat = chat_format(None)
    said = chat.encode_reply(REPLY)

    def generated(asked: Mapping[str, Any]) -> dict[str, Any]:
        params = asked["sampling_params"]
        if params["logprobs"]:  # the look at how the temperature changes log-probs
            listed = [{"token_id": i, "logprob": -i / params["temperature"]} for i in (1, 2)]
            logs = [{"token_id": 1, "logprob": listed[0]["logprob"], "top_logprobs": listed}]
        else:
            logs = [{"token": f"token_id:{i}", "token_id": i, "logprob": -0.5, "bytes": None} for i in said]
        choice = {"index": 0, "token_ids": said, "finish_reason": "stop", "logprobs": {"content": logs}}
        return {
            "request_id": asked.get("request_id"),
            "choices": [choice],
            "prompt_token_ids": asked["token_ids"],
            "usage": {"completion_tokens": len(said)},
        }

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        asked = json.loads(await whole_body(receive) or b"{}")
        if scope["path"] == wire.GENERATE:
            await asyncio.sleep(delay_s)
            await respond(send, 200, generated(asked))
        elif scope["path"] == "/v1/models":
            await respond(send, 200, {"data": [{"id": "m", "root": "m", "max_model_len": 1 << 20}]})
        elif scope["path"] == "/v1/chat/completions":
            prompt = chat.prompt(asked["messages"])
            await asyncio.sleep(delay_s)
            message = {"role": "assistant", "content": chat.decode(said[:-1])}
            choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
            answer = {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": asked["model"],
                "choices": [choice],
                "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(said)},
            }
            await respond(send, 200, answer)
        else:
            await respond(send, 404, {"error": "none"})

    uvicorn.run(app, port=port, log_level="warning", access_log=False)


# ------------------------------------------------------------------------------------------------ the proxy


class Timed:
    """Connections that note how long the server took, per session and in order."""

    def __init__(self, inner: Any) -> None:
        self.took_ms: defaultdict[str, list[float]] = defaultdict(list)
        self._inner = inner

    async def post(self, url: str, fields: Mapping[str, Any]) -> Reply:
        begun = time.perf_counter()
        reply: Reply = await self._inner.post(url, fields)
        session = str(fields.get("request_id", "")).partition("~")[0].rpartition(".c")[0]
        self.took_ms[session].append((time.perf_counter() - begun) * 1000)
        return reply

    async def get(self, url: str, *, deadline_s: float) -> Reply:
        reply: Reply = await self._inner.get(url, deadline_s=deadline_s)
        return reply

    async def close(self) -> None:
        await self._inner.close()


def proxy(port: int, server: str, source: str | None, max_tokens: int) -> None:
    """The proxy in front of a server, as `agentrl serve proxy` runs it; `/timings/SESSION` tells what it
    waited for."""

    async def run() -> None:
        sampler = await VllmSampler.connect([server])
        timed = sampler._http = Timed(sampler._http)  # type: ignore[assignment]
        sessions = Sessions(
            sampler,
            chat_format(source),
            Settings(sampling=SamplingParams(max_tokens=max_tokens), max_context=sampler.max_context),
            prefix="b",
        )
        inner = create_app(sessions, admin_key=ADMIN)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http" and scope["path"].startswith("/timings/"):
                await respond(send, 200, timed.took_ms.pop(scope["path"].rpartition("/")[2], []))
            else:
                await inner(scope, receive, send)

        config = uvicorn.Config(app, port=port, log_level="warning", access_log=False, ws="none")
        await uvicorn.Server(config).serve()

    with asyncio.Runner(loop_factory=auto_loop_factory()) as loop:
        loop.run(run())


# --------------------------------------------------------------------------------------------------- asking


@dataclass
class Round:
    """What one side did in one round: latencies per conversation, and tokens per second."""

    took_ms: list[list[float]] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


async def conversations(
    given: argparse.Namespace,
    keys: list[tuple[str, str]],
    *,
    model: str,
    concurrency: int,
    spread_s: float,
    more: Any,
) -> Round:
    """One conversation of `--turns` requests per key, at most `concurrency` at once. The first ones begin
    over `spread_s`, about the time of one request: in step, they would queue for each other and for nothing
    else."""
    limit = asyncio.Semaphore(concurrency)
    done = Round(took_ms=[[] for _ in keys])

    async def one(http: aiohttp.ClientSession, number: int, url: str, key: str) -> None:
        messages: list[Any] = [{"role": "user", "content": f"Conversation {number}. " + "Some words. " * 60}]
        async with limit:
            if number < concurrency:
                await asyncio.sleep(number / concurrency * spread_s)
            for _ in range(given.turns):
                body = {
                    "model": model,
                    "messages": messages,
                    "max_tokens": given.max_tokens,
                    "temperature": 1.0,
                    "top_p": 1.0,
                    **more,
                }
                begun = time.perf_counter()
                headers = {"authorization": f"Bearer {key}"}
                async with http.post(f"{url}/chat/completions", json=body, headers=headers) as response:
                    answer = await response.json()
                done.took_ms[number].append((time.perf_counter() - begun) * 1000)
                if response.status != 200:
                    raise SystemExit(f"{url} answered {response.status}: {answer}")
                done.tokens += answer["usage"]["completion_tokens"]
                said = {"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""}
                messages = [*messages, said, {"role": "user", "content": "Go on. " * 20}]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        begun = time.perf_counter()
        await asyncio.gather(*(one(http, n, url, key) for n, (url, key) in enumerate(keys)))
        done.seconds = time.perf_counter() - begun
    return done


def cpu_and_queued_ms(pid: int) -> tuple[float, float]:
    """Processor time that a process has used, and how long it waited for a processor."""
    rows = [p.read_text().split() for p in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(r[0]) for r in rows) / 1e6, sum(int(r[1]) for r in rows) / 1e6


@dataclass
class Side:
    """One way to ask, over all rounds."""

    rounds: list[Round] = field(default_factory=list)
    added_ms: list[float] = field(default_factory=list)
    cpu_ms: float = 0.0
    queued_ms: float = 0.0

    @property
    def took_ms(self) -> list[float]:
        return [t for r in self.rounds for one in r.took_ms for t in one]

    @property
    def p50(self) -> float:
        return statistics.median(self.took_ms)

    def share(self, other: Side) -> float:
        return statistics.median(a.rate / b.rate for a, b in zip(self.rounds, other.rounds, strict=True))


class Bench:
    """Asks both sides. `proxied` and `pid` are the proxy's."""

    def __init__(self, given: argparse.Namespace, server: str, proxied: str, pid: int) -> None:
        self._given = given
        self._server = server
        self._proxied = proxied
        self._pid = pid
        self._model = "m"
        self._spread_s = given.delay_ms / 1000

    async def rows(self) -> list[dict[str, Any]]:
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {ADMIN}"}) as admin:
            if self._given.vllm:
                async with admin.get(f"{self._server}/v1/models") as answer:
                    self._model = (await answer.json())["data"][0]["id"]
            return [await self._row(admin, concurrency) for concurrency in self._given.concurrency]

    async def _row(self, admin: aiohttp.ClientSession, concurrency: int) -> dict[str, Any]:
        names = ["bare", "logprobs", "proxied"] if self._given.vllm else ["bare", "proxied"]
        sides = {name: Side() for name in names}
        for number in range(self._given.rounds + 1):  # the first round warms up and is not counted
            for name in names if number % 2 else reversed(names):
                kept = sides[name] if number else Side()
                if name == "proxied":
                    await self._through_the_proxy(admin, concurrency, kept)
                else:
                    keys = [(f"{self._server}/v1", "none")] * self._count(concurrency)
                    more = {"logprobs": True} if name == "logprobs" else {}
                    kept.rounds.append(await self._ask(keys, concurrency, more))
                    if self._given.vllm:  # a real server takes the time it takes
                        self._spread_s = kept.p50 / 1000
        bare, proxied, logs = sides["bare"], sides["proxied"], sides.get("logprobs")
        requests = len(proxied.took_ms)
        return {
            "concurrency": concurrency,
            "requests": requests,
            "bare_p50_ms": round(bare.p50, 2),
            "logprobs_p50_ms": None if logs is None else round(logs.p50, 2),
            "proxied_p50_ms": round(proxied.p50, 2),
            "difference_ms": round(proxied.p50 - bare.p50, 2),
            "added_p50_ms": round(statistics.median(proxied.added_ms), 2),
            "added_p90_ms": round(statistics.quantiles(proxied.added_ms, n=10)[-1], 2),
            "cpu_ms_per_request": round(proxied.cpu_ms / requests, 2),
            "queued_ms_per_request": round(proxied.queued_ms / requests, 2),
            "throughput_share": round(proxied.share(bare), 4),
            "share_of_logprobs": None if logs is None else round(proxied.share(logs), 4),
            "bare_tokens_per_s": round(statistics.median(r.rate for r in bare.rounds), 1),
            "tokens_per_reply": [
                round(sum(r.tokens for r in s.rounds) / requests, 1) for s in sides.values()
            ],
            "load": round(os.getloadavg()[0], 1),
        }

    def _count(self, concurrency: int) -> int:
        return max(self._given.conversations, concurrency)

    async def _ask(self, keys: list[tuple[str, str]], concurrency: int, more: Any) -> Round:
        return await conversations(
            self._given,
            keys,
            model=self._model,
            concurrency=concurrency,
            spread_s=self._spread_s,
            more=more,
        )

    async def _through_the_proxy(self, admin: aiohttp.ClientSession, concurrency: int, kept: Side) -> None:
        opened = []
        for _ in range(self._count(concurrency)):
            async with admin.post(f"{self._proxied}/sessions") as answer:
                opened.append(await answer.json())
        before = cpu_and_queued_ms(self._pid)
        done = await self._ask([(o["openai_base_url"], o["key"]) for o in opened], concurrency, {})
        after = cpu_and_queued_ms(self._pid)
        kept.rounds.append(done)
        kept.cpu_ms += after[0] - before[0]
        kept.queued_ms += after[1] - before[1]
        for one, took in zip(opened, done.took_ms, strict=True):
            async with admin.get(f"{self._proxied}/timings/{one['session']}") as answer:
                waited = await answer.json()
            kept.added_ms += [a - b for a, b in zip(took, waited, strict=True)]
            async with admin.post(f"{self._proxied}/sessions/{one['session']}/close") as answer:
                await answer.read()


TABLE = (
    ("at once", "concurrency"),
    ("requests", "requests"),
    ("bare", "bare_p50_ms"),
    ("+logprobs", "logprobs_p50_ms"),
    ("proxied", "proxied_p50_ms"),
    ("difference", "difference_ms"),
    ("added p50", "added_p50_ms"),
    ("p90", "added_p90_ms"),
    ("own CPU", "cpu_ms_per_request"),
    ("queued", "queued_ms_per_request"),
    ("throughput", "throughput_share"),
    ("vs +logprobs", "share_of_logprobs"),
    ("load", "load"),
)


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds and shares, one line per concurrency."""
    cells = [[title for title, _ in TABLE]]
    for row in rows:
        cells.append(["-" if row[name] is None else f"{row[name]:g}" for _, name in TABLE])
    widths = [max(len(line[at]) for line in cells) for at in range(len(TABLE))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


@contextlib.contextmanager
def process(*words: str, port: int) -> Iterator[tuple[str, int]]:
    """This file again, as a server on a port: its URL and process id."""
    running = subprocess.Popen([sys.executable, __file__, *words, "--port", str(port)])
    try:
        deadline = time.monotonic() + 400
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if running.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{words} did not start") from None
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", running.pid
    finally:
        running.terminate()
        running.wait(20)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--conversations", type=int, default=16, help="per round, at least the concurrency")
    parser.add_argument("--turns", type=int, default=4, help="requests of one conversation")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--delay-ms", type=float, default=300.0)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--vllm", help="a running vLLM server with --enable-scale-out")
    parser.add_argument("--tokenizer", help="of that server's model")
    parser.add_argument("--json", action="store_true", help="the rows as JSON after the table")
    parser.add_argument("--be", choices=["server", "proxy"], help=argparse.SUPPRESS)
    parser.add_argument("--server", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.be == "server":
        stand_in(given.port, given.delay_ms / 1000)
        return
    if given.be == "proxy":
        proxy(given.port, given.server, given.tokenizer, given.max_tokens)
        return
    with contextlib.ExitStack() as stack:
        server = given.vllm
        if not server:
            words = ["--be", "server", "--delay-ms", str(given.delay_ms)]
            server, _ = stack.enter_context(process(*words, port=free_port()))
        source = ["--tokenizer", given.tokenizer] if given.vllm else []
        words = ["--be", "proxy", "--server", server, *source, "--max-tokens", str(given.max_tokens)]
        proxied, pid = stack.enter_context(process(*words, port=free_port()))
        rows = asyncio.run(Bench(given, server, proxied, pid).rows())
    print(table(rows))
    if given.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
