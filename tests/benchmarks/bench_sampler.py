"""What the in-process sampler costs: decoded tokens per second beside `generate()` and a bare forward.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_sampler.py

The model is a random Llama of 1.8 M parameters (4 layers of width 192, 600 ids), the prompts have 40 to
100 tokens, 120 tokens are generated. `generate()` gets the same rows left-padded and reports no log-probs.
"step" is one decode step of the engine, "bare" one forward of as many rows over a cache of their mean length
with a mask, nothing sampled: their ratio is the price of everything else. Times are CPU times (with one
thread: what a quiet machine would take), the best of some alternating runs.

The last line is of turns: 64 sessions, each of 6 calls that append 60 tokens and sample 40.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import random
import statistics
import time
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from agentrl.inference.engine import Engine
from agentrl.inference.local import LocalSampler
from agentrl.inference.sampler import SampleRequest
from agentrl.types import SamplingParams

VOCABULARY, NEW = 600, 120
REPEATS = 3


def model() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=2048,
        )
    ).eval()


def request(ids: list[int], *, id: str, session: str, new: int = NEW) -> SampleRequest:
    return SampleRequest(
        id=id, session=session, prompt_token_ids=tuple(ids), params=SamplingParams(max_tokens=new)
    )


def prompts(rows: int) -> list[list[int]]:
    dice = random.Random(rows)
    return [[dice.randrange(2, VOCABULARY) for _ in range(dice.randrange(40, 100))] for _ in range(rows)]


def engine_rate(made: Any, rows: int) -> tuple[float, float]:
    """(tokens per second with prefill, milliseconds per decode step)."""
    engine = Engine(
        made,
        stop_token_ids=(),
        name="bench",
        version=0,
        max_slots=64,
        idle_slots=0,
        max_context=None,
        seed=0,
    )
    started = time.process_time()
    for n, ids in enumerate(prompts(rows)):
        engine.submit(engine.row(request(ids, id=str(n), session=str(n)), lambda outcome: None))
    engine.step()
    decoding = time.process_time()
    while engine.in_flight:
        engine.step()
    ended = time.process_time()
    return rows * NEW / (ended - started), (ended - decoding) * 1000 / engine.counts.decode_steps


def generate_rate(made: Any, rows: int) -> float:
    ragged = prompts(rows)
    width = max(map(len, ragged))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in ragged])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in ragged])
    started = time.process_time()
    with torch.inference_mode():
        made.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            pad_token_id=0,
        )
    return rows * NEW / (time.process_time() - started)


@torch.inference_mode()
def bare_ms(made: Any, rows: int) -> float:
    """One masked forward of one token per row over a cache as long as the rows are on average."""
    length = 70 + NEW // 2
    cache = DynamicCache(config=made.config)
    key = "cache" if "cache" in inspect.signature(made.forward).parameters else "past_key_values"
    made(input_ids=torch.randint(2, VOCABULARY, (rows, length)), use_cache=True, **{key: cache})
    token = torch.randint(2, VOCABULARY, (rows, 1))
    times = []
    for step in range(20):
        mask = torch.zeros(rows, 1, 1, length + step + 1)
        position = torch.full((rows, 1), length + step)
        started = time.process_time()
        made(input_ids=token, attention_mask=mask, position_ids=position, use_cache=True, **{key: cache})
        times.append((time.process_time() - started) * 1000)
    return statistics.median(times)


def turns(made: Any, sessions: int) -> None:
    async def whole() -> None:
        sampler = LocalSampler(made, stop_token_ids=(), name="bench", seed=0)

        async def talk(number: int) -> None:
            dice = random.Random(number)
            ids = [5] * 150
            for turn in range(6):
                ids += [dice.randrange(2, VOCABULARY) for _ in range(60)]
                result = await sampler.sample(
                    request(ids, id=f"{number}.{turn}", session=str(number), new=40)
                )
                ids += result.token_ids
                await asyncio.sleep(dice.random() * 0.2)  # its tools run

        started = time.process_time()
        await asyncio.gather(*(talk(n) for n in range(sessions)))
        seconds = time.process_time() - started
        counts = sampler.counts
        rate = counts.generated_tokens / seconds
        print(f"{sessions} sessions of 6 calls: {seconds:.2f} s CPU, {rate:,.0f} tokens/s sampled,")
        print(f"  {counts.prefilled_tokens:,} prompt tokens computed, {counts.reused_tokens:,} reused")
        await sampler.close()

    asyncio.run(whole())


def main() -> None:
    print(f"{torch.get_num_threads()} thread(s), float32")
    print(
        f"{'rows':>5} {'sampler tok/s':>14} {'generate tok/s':>15} {'ratio':>6} {'step ms':>8} {'bare ms':>8}"
    )
    plain = model()
    for rows in (1, 8, 32, 64):
        ours = theirs = 0.0
        step = bare = float("inf")
        for _ in range(REPEATS):
            rate, step_ms = engine_rate(copy.deepcopy(plain), rows)
            ours, step = max(ours, rate), min(step, step_ms)
            theirs = max(theirs, generate_rate(plain, rows))
            bare = min(bare, bare_ms(plain, rows))
        print(f"{rows:>5} {ours:>14,.0f} {theirs:>15,.0f} {ours / theirs:>6.2f} {step:>8.2f} {bare:>8.2f}")
    turns(copy.deepcopy(plain), 64)


if __name__ == "__main__":
    main()
