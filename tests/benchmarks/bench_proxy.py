"""What the recording proxy costs: the same conversations straight to a server and through the proxy.

python tests/benchmarks/bench_proxy.py --concurrency 1 16 64 --delay-ms 300
python tests/benchmarks/bench_proxy.py --vllm http://127.0.0.1:8000 --tokenizer path/to/model

Without `--vllm` the server is a stand-in of this file, in a process of its own: it does a server's chat work
(template, encoding, decoding, JSON) and takes `--delay-ms` for the tokens, as chat or as ids. The proxy is a
process of its own with the client for that server; both sides are asked by one client over HTTP, in rounds
that alternate, so that what else the machine does falls on both. Targets: p50 + 5 ms, throughput 97 %.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from agentrl.inference.sampler import Sampler, SampleRequest, SampleResult
from agentrl.inference.vllm import VllmSampler
from agentrl.training.given import loaded_tokenizer
from agentrl.types import FinishReason, LogProbKind, SamplingParams, VersionSpan
from harness.chat import ChatFormat
from services.proxy.app import create_app
from services.proxy.sessions import Sessions, Settings

sys.path.insert(0, str(Path(__file__).parent.parent / "harness"))

from tiny_tokenizer import tokenizer

REPLY = "The quick brown fox jumps over the lazy dog. " * 4
TURNS = 4
ADMIN = "bench"


def chat_format(source: str | None) -> ChatFormat:
    return ChatFormat(tokenizer("chatml") if source is None else loaded_tokenizer(source))


# ---------------------------------------------------------------------------------------------- the stand-in


def stand_in(port: int, delay_s: float) -> None:
    """A server of chat completions and of ids."""
    chat = chat_format(None)
    said = chat.encode_reply(REPLY)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        asked = json.loads(body or b"{}")
        if scope["path"] == "/generate":
            await asyncio.sleep(delay_s)
            answer = {"prompt": asked["prompt"], "ids": said, "log_probs": [-0.5] * len(said)}
        else:
            prompt = chat.prompt(asked["messages"])
            await asyncio.sleep(delay_s)
            content = chat.decode(said[:-1])
            answer = {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": asked["model"],
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": content},
                        "logprobs": None,
                        "finish_reason": "stop",
                    }
                ],
                "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(said)},
            }
        data = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    uvicorn.run(app, port=port, log_level="warning", access_log=False)


class StandInSampler:
    """The stand-in as a policy."""

    model = "stand-in"
    policy_version = 0

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=None))

    async def sample(self, request: SampleRequest) -> SampleResult:
        started = time.time()
        answer = (await self._http.post("/generate", json={"prompt": request.prompt_token_ids})).json()
        n = len(answer["ids"])
        return SampleResult(
            request_id=request.id,
            prompt_token_ids=tuple(answer["prompt"]),
            token_ids=tuple(answer["ids"]),
            log_probs=tuple(answer["log_probs"]),
            log_prob_kind=LogProbKind.PROCESSED,
            policy_versions=(VersionSpan(version=0, start=0, end=n),),
            finish_reason=FinishReason.STOP,
            model=self.model,
            started_at=started,
            finished_at=max(started, time.time()),
        )

    async def close(self) -> None:
        await self._http.aclose()


def proxy(port: int, server: str, source: str | None, max_tokens: int) -> None:
    """The proxy in front of a server."""

    async def run() -> None:
        sampler: Sampler = StandInSampler(server) if source is None else await VllmSampler.connect([server])
        sessions = Sessions(
            sampler,
            chat_format(source),
            Settings(sampling=SamplingParams(max_tokens=max_tokens)),
            prefix="b",
        )
        app = create_app(sessions, admin_key=ADMIN)
        config = uvicorn.Config(app, port=port, log_level="warning", access_log=False, ws="none")
        await uvicorn.Server(config).serve()

    asyncio.run(run())


# --------------------------------------------------------------------------------------------------- asking


async def conversations(
    base: str, keys: list[tuple[str, str]], *, model: str, max_tokens: int, concurrency: int
) -> tuple[list[float], float]:
    """One conversation of `TURNS` requests per key, at most `concurrency` at once: the latencies in
    milliseconds, and requests per second."""
    limit = asyncio.Semaphore(concurrency)
    took: list[float] = []

    async def one(http: httpx.AsyncClient, number: int, url: str, key: str) -> None:
        messages: list[Any] = [{"role": "user", "content": f"Conversation {number}. " + "Some words. " * 60}]
        async with limit:
            for _ in range(TURNS):
                body = {"model": model, "messages": messages, "max_tokens": max_tokens}
                begun = time.perf_counter()
                answer = await http.post(
                    f"{url}/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
                )
                took.append((time.perf_counter() - begun) * 1000)
                answer.raise_for_status()
                reply = answer.json()["choices"][0]["message"]
                said = {"role": "assistant", "content": reply["content"] or ""}
                messages = [*messages, said, {"role": "user", "content": "Go on. " * 20}]

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    async with httpx.AsyncClient(timeout=120, limits=limits) as http:
        begun = time.perf_counter()
        await asyncio.gather(*(one(http, n, url or base, key) for n, (url, key) in enumerate(keys)))
        return took, len(took) / (time.perf_counter() - begun)


def cpu_ms(pid: int) -> float:
    """Processor time that a process has used: what the proxy costs however busy the machine is."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")


async def measure(
    options: argparse.Namespace, server: str, proxied: str, proxy_pid: int
) -> list[dict[str, Any]]:
    model = "m"
    rows = []
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {ADMIN}"}, timeout=60) as admin:
        if options.vllm:
            model = (await admin.get(f"{server}/v1/models")).json()["data"][0]["id"]
        for concurrency in options.concurrency:
            count = max(options.conversations, concurrency)
            sides: dict[str, list[tuple[list[float], float]]] = {"direct": [], "proxy": []}
            used_ms = 0.0
            for number in range(options.rounds + 1):  # the first round warms up and is not counted
                for side in ("direct", "proxy") if number % 2 else ("proxy", "direct"):
                    keys = [("", "none")] * count
                    if side == "proxy":
                        opened = [(await admin.post(f"{proxied}/sessions")).json() for _ in range(count)]
                        keys = [(o["openai_base_url"], o["key"]) for o in opened]
                    before_ms = cpu_ms(proxy_pid)
                    found = await conversations(
                        f"{server}/v1",
                        keys,
                        model=model,
                        max_tokens=options.max_tokens,
                        concurrency=concurrency,
                    )
                    if number:
                        sides[side].append(found)
                        used_ms += cpu_ms(proxy_pid) - before_ms
                    if side == "proxy":
                        for one in opened:
                            await admin.post(f"{proxied}/sessions/{one['session']}/close")
            p50 = {side: statistics.median([t for took, _ in of for t in took]) for side, of in sides.items()}
            rate = {side: statistics.median([r for _, r in of]) for side, of in sides.items()}
            rows.append(
                {
                    "concurrency": concurrency,
                    "requests": sum(len(took) for took, _ in sides["direct"]),
                    "direct_p50_ms": round(p50["direct"], 2),
                    "proxy_p50_ms": round(p50["proxy"], 2),
                    "added_p50_ms": round(p50["proxy"] - p50["direct"], 2),
                    "throughput_share": round(rate["proxy"] / rate["direct"], 4),
                    "direct_per_s": round(rate["direct"], 1),
                    "proxy_cpu_ms_per_request": round(
                        used_ms / sum(len(took) for took, _ in sides["proxy"]), 2
                    ),
                    "load": round(os.getloadavg()[0], 1),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--conversations", type=int, default=16, help="of 4 requests each, per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--delay-ms", type=float, default=300.0)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--vllm", help="a running vLLM server with --enable-scale-out")
    parser.add_argument("--tokenizer", help="of that server's model")
    parser.add_argument("--be", choices=["server", "proxy"], help=argparse.SUPPRESS)
    parser.add_argument("--server", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be == "server":
        stand_in(options.port, options.delay_ms / 1000)
        return
    if options.be == "proxy":
        proxy(options.port, options.server, options.tokenizer, options.max_tokens)
        return
    with contextlib.ExitStack() as stack:
        server = options.vllm
        if not server:
            words = ["--be", "server", "--delay-ms", str(options.delay_ms)]
            server, _ = stack.enter_context(process(*words, port=free_port()))
        given = ["--tokenizer", options.tokenizer] if options.vllm else []
        given += ["--max-tokens", str(options.max_tokens)]
        words = ["--be", "proxy", "--server", server, *given]
        proxied, pid = stack.enter_context(process(*words, port=free_port()))
        rows = asyncio.run(measure(options, server, proxied, pid))
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
