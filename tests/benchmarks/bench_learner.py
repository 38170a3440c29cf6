"""Tokens per second and peak memory of one policy step, beside a plain step with one padded row per call.

    python tests/benchmarks/bench_learner.py [--groups 8] [--size 8] [--turns 5] [--threads 2]

Synthetic multi-turn groups on a random Llama of a few million weights. Every variant runs in a process of its
own, so that its peak memory is its own. All variants train the same action tokens and give the same gradient;
tokens per second count the tokens of merged rows, whatever a variant computes to get there.

- `bare`: forward and backward of the merged rows, full logits at every position, no objective: a floor to
  compare with.
- `plain`: one row per model call (prompt and generation), padded to the longest of the batch, full `[B, L,
  V]` log-softmax: what a straightforward loss does with calls.
- `padded`, `packed`, `shared`: `Learner.update` in its three layouts (columns, objective, clipping, AdamW
  included).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent / "learner"))
import learner_given as given

from agentrl.algo import recipes
from agentrl.learner.batch import Packing
from agentrl.learner.samples import build
from agentrl.learner.step import Learner, LearnerConfig
from agentrl.types import Group

QUIET = os.environ | {"OMP_WAIT_POLICY": "passive"}
"""Threads that wait by spinning make everything several times slower when the machine is not idle."""
VARIANTS = ("bare", "plain", "padded", "packed", "shared")


def model(vocab: int) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=6,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            pad_token_id=None,
        )
    )


def groups(arguments: argparse.Namespace) -> list[Group]:
    """Groups that share a prompt; observations longer than generations, as tool output is."""
    rng = random.Random(0)
    out = []
    for k in range(arguments.groups):
        prompt = [rng.randrange(arguments.vocab) for _ in range(arguments.prompt)]
        out.append(
            given.group(
                [
                    given.chain(
                        rng,
                        id=f"{k}.{i}",
                        group=f"g{k}",
                        reward=float(i % 2),
                        prompt=prompt,
                        turns=rng.randint(2, arguments.turns),
                        generated=(15, 35),
                        observed=(10, 60),
                        vocab=arguments.vocab,
                    )
                    for i in range(arguments.size)
                ]
            )
        )
    return out


def plain_step(made: Any, batch: list[Group], rows_at_once: int) -> None:
    """REINFORCE on one padded row per call."""
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-4)
    rows = [
        (list(t.prompt_ids(c.id)), list(c.generation_token_ids), 1.0 if t.reward else -1.0)
        for g in batch
        for t in g.trajectories
        for c in t.calls
    ]
    total = sum(len(generation) for _, generation, _ in rows)
    for at in range(0, len(rows), rows_at_once):
        part = rows[at : at + rows_at_once]
        width = max(len(p) + len(g) for p, g, _ in part)
        ids = torch.zeros(len(part), width, dtype=torch.int64)
        weight = torch.zeros(len(part), width)
        attention = torch.zeros(len(part), width, dtype=torch.int64)
        for b, (prompt, generation, sign) in enumerate(part):
            ids[b, : len(prompt) + len(generation)] = torch.tensor([*prompt, *generation])
            attention[b, : len(prompt) + len(generation)] = 1
            weight[b, len(prompt) : len(prompt) + len(generation)] = sign / total
        log_p = torch.log_softmax(made(input_ids=ids, attention_mask=attention).logits[:, :-1].float(), -1)
        chosen = log_p.gather(2, ids[:, 1:, None]).squeeze(2)
        (-(chosen * weight[:, 1:]).sum()).backward()
    torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def bare_step(made: Any, batch: list[Group], budget: int) -> None:
    """Forward and backward of merged rows of about equal length, nothing else."""
    rows = sorted(
        (row for g in batch for t in g.trajectories for row in build(t).rows), key=len, reverse=True
    )
    while rows:
        part = rows[: max(1, budget // len(rows[0]))]
        rows = rows[len(part) :]
        ids = torch.zeros(len(part), len(part[0]), dtype=torch.int64)
        for b, row in enumerate(part):
            ids[b, : len(row)] = torch.from_numpy(row)
        logits = made(input_ids=ids).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    made.zero_grad()


def step_of(variant: str, arguments: argparse.Namespace, batch: list[Group]) -> Callable[[], object]:
    made = model(arguments.vocab)
    if variant == "plain":
        return lambda: plain_step(made, batch, arguments.size)
    if variant == "bare":
        return lambda: bare_step(made, batch, arguments.budget)
    packing = Packing(
        token_budget=arguments.budget,
        layout="padded" if variant == "padded" else "packed",
        share_prefixes=variant == "shared",
    )
    config = LearnerConfig(learning_rate=1e-4, max_mismatch=None, packing=packing)
    learner = Learner(made, recipes.get("cispo"), config)
    return lambda: learner.update(batch, version=0)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(variant: str, arguments: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(arguments.threads)
    batch = groups(arguments)
    step = step_of(variant, arguments, batch)
    before = peak_mib()
    seconds = []
    for _ in range(arguments.repeats):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    rows = [build(t) for g in batch for t in g.trajectories]
    tokens = sum(r.n_tokens for r in rows)
    return {
        "seconds": min(seconds),
        "tokens_per_s": tokens / min(seconds),
        "peak_mib": peak_mib() - before,
        "tokens": tokens,
        "actions": sum(r.n_actions for r in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in (
        ("groups", 8),
        ("size", 8),
        ("turns", 6),
        ("prompt", 150),
        ("vocab", 1024),
        ("budget", 4096),
        ("threads", 2),
        ("repeats", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--variant", choices=VARIANTS)
    arguments = parser.parse_args()
    if arguments.variant:
        print(json.dumps(measure(arguments.variant, arguments)))
        return
    found: dict[str, dict[str, float]] = {}
    for variant in VARIANTS:
        command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600, env=QUIET)
        found[variant] = json.loads(done.stdout.splitlines()[-1])
        one, plain = found[variant], found.get("plain", found[variant])
        print(
            f"{variant:8} {one['seconds']:7.2f} s {one['tokens_per_s']:9.0f} tokens/s "
            f"peak +{one['peak_mib']:6.0f} MiB"
            + (f"   {one['tokens_per_s'] / plain['tokens_per_s']:.2f} x plain" if "plain" in found else "")
        )


if __name__ == "__main__":
    main()
