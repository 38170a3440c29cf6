"""One policy step on stored multi-turn groups: ours, TRL's GRPO step, and a plain step with one row per call.

    agentrl bench learner                  the whole comparison
    agentrl bench learner --layers 4       a model cut to its first layers: minutes instead of tens of minutes

A group of 8 trajectories with one prompt of 1,024 tokens and 4 to 8 calls each is made from a seed, scored by
the model itself (so that recorded log-probs are those of the policy) and put into a store. Every side then
reads it from there in a process of its own, so that its peak memory is its own, and takes `--repeats` steps
of the same objective: PPO clip, group z-score, token mean, no KL; forward, backward, clipping and AdamW,
float32 master weights, gradient checkpointing, the same compute dtype. The gradient norms of the first step
are printed: they must agree, or the sides did not do the same work (`plain` takes one trajectory per step).

- `shared`: `Learner.update` as `agentrl train` runs it: a prefix tree over the group.
- `packed`: the same without sharing prefixes.
- `trl`: `trl.GRPOTrainer.train` (loss_type dapo, beta 0, its own defaults otherwise), fed the stored tokens
  by its `rollout_func` with `env_mask` over tool output: one row per trajectory, all 8 in one pass. On a CPU
  TRL 1.16 puts every position of a row through the output head; on Triton devices only those it scores.
- `plain`: one padded row per call and the log-softmax of every position; one trajectory per step, since its
  cost is that of its rows.

Tokens are those of the merged trajectories whatever a side computes to get there. Besides wall time the CPU
time of the process is given: on a busy machine only that compares. Peak memory is that of the process less
what it held before the model was loaded (libraries); "beyond state" also leaves out weights, gradients and
Adam moments in float32, which no side can do without.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent.parent / "learner"))
import learner_given as given
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from agentrl.algo import recipes
from agentrl.learner.batch import Packing, pack
from agentrl.learner.model import Policy, checkpoint_activations, load, log_probs
from agentrl.learner.samples import build
from agentrl.learner.step import Learner, LearnerConfig
from agentrl.store.store import Store
from agentrl.types import Group, Trajectory

RUN = "bench"
RATE = 1e-6
SIDES = ("shared", "packed", "trl", "plain")
QUIET = {"OMP_WAIT_POLICY": "passive", "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
"""Threads that wait by spinning make everything several times slower when the machine is not idle."""
SHAPE = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1_536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 32_768,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": True,
    "pad_token_id": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""SmolLM2-135M; random weights of this shape cost the same time and memory as the trained ones."""

PASSED = (
    "model", "store", "layers", "scaling_layers", "dtype", "threads", "repeats", "budget", "prompt", "size",
    "calls", "parameters",
)  # fmt: skip
"""Arguments that the parts of a comparison share."""
NO_TRL = (
    "trl      is not in this Python: `pip install 'trl>=1.16'` in an environment that also has agentrl, "
    "and give its interpreter as --trl"
)
PLAIN_ROWS = 2
"""Rows of a plain pass: full logits of more do not fit into a small machine."""


# -------------------------------------------------------------------------------------------------- what runs


def model(arguments: argparse.Namespace, *, layers: int | None = None, checkpointing: bool = True) -> Any:
    """float32 master weights: the given model, or a random one of SmolLM2-135M's shape."""
    if arguments.model is None:
        torch.manual_seed(0)
        made: Any = LlamaForCausalLM(LlamaConfig(**SHAPE))
    else:
        made = load(arguments.model)
    wanted = layers or arguments.layers
    if wanted is not None:
        made.model.layers = made.model.layers[:wanted]
        made.config.num_hidden_layers = wanted
    if checkpointing:
        checkpoint_activations(made)
    return made


def made_group(vocab: int, *, prompt: int, size: int, turns: tuple[int, int], seed: int = 0) -> Group:
    """Trajectories of one prompt; observations are longer than generations, as tool output is."""
    rng = random.Random(seed)
    first = [rng.randrange(3, vocab) for _ in range(prompt)]
    members = [
        given.chain(
            rng,
            id=f"t{i}",
            group="g0",
            reward=float(i % 2),
            prompt=first,
            turns=rng.randint(*turns),
            generated=(16, 32),
            observed=(16, 48),
            vocab=vocab,
        )
        for i in range(size)
    ]
    return given.group(members)


def scored(group: Group, arguments: argparse.Namespace) -> tuple[Group, int]:
    """The same with the log-probs that the model gives its tokens, and the model's number of weights."""
    policy = Policy(model(arguments, checkpointing=False), compute_dtype=_dtype(arguments))
    rows = [build(t) for t in group.trajectories]
    members: list[Trajectory] = []
    for micro in pack(rows, Packing(token_budget=8192, share_prefixes=True)):
        known = log_probs(policy, micro).tolist()
        for s in micro.trajectories_S:
            calls = []
            for call in group.trajectories[s].calls:
                n = len(call.generation_token_ids)
                calls.append(replace(call, generation_log_probs=tuple(known[:n])))
                known = known[n:]
            members.append(replace(group.trajectories[s], calls=tuple(calls)))
    order = {t.id: i for i, t in enumerate(group.trajectories)}
    parameters = sum(p.numel() for p in policy.parameters())
    return given.group(sorted(members, key=lambda t: order[t.id])), parameters


def stored(arguments: argparse.Namespace) -> Group:
    """What the store holds."""
    store = Store.open(f"sqlite:///{arguments.store}", create=False)
    return given.group(list(store.iter_trajectories(RUN)))


def write(arguments: argparse.Namespace) -> dict[str, float]:
    group = made_group(
        SHAPE["vocab_size"], prompt=arguments.prompt, size=arguments.size, turns=(4, arguments.calls)
    )
    group, parameters = scored(group, arguments)
    store = Store.open(f"sqlite:///{arguments.store}")
    store.begin_run("bench", config={}, algo="grpo", seed=0, run_id=RUN)
    for trajectory in group.trajectories:
        store.add_trajectory(RUN, trajectory)
    rows = [build(t) for t in group.trajectories]
    micro = pack(rows, Packing(token_budget=10**9, share_prefixes=True))
    return {
        "trajectories": len(rows),
        "calls": sum(len(t.calls) for t in group.trajectories),
        "tokens": sum(r.n_tokens for r in rows),
        "actions": sum(r.n_actions for r in rows),
        "distinct_tokens": sum(m.n_tokens for m in micro),
        "parameters": parameters,
    }


def _dtype(arguments: argparse.Namespace) -> torch.dtype | None:
    return torch.bfloat16 if arguments.dtype == "bfloat16" else None


OBJECTIVE = {
    "recipe": "grpo",
    "penalty": "none",
    "reduction": "token_mean",
    "advantage": {"ddof": 1, "epsilon": 1e-4},
}
"""TRL's: standard deviation with ddof 1, 1e-4 added to it."""


class Ours:
    """`Learner.update` on the whole group."""

    def __init__(self, arguments: argparse.Namespace, group: Group, *, share: bool) -> None:
        packing = Packing(token_budget=arguments.budget, share_prefixes=share)
        config = LearnerConfig(
            learning_rate=RATE, max_mismatch=None, packing=packing, compute_dtype=arguments.dtype
        )
        self.learner = Learner(model(arguments), recipes.compose(OBJECTIVE), config)
        self.group = group

    def step(self, _: int) -> dict[str, float]:
        report = self.learner.update([self.group], version=0)
        assert report.taken == 1, report
        wanted = ("optimizer/grad_norm", "loss/policy", "batch/tokens")
        wanted += tuple(k for k in report.metrics if k.startswith(("time/", "profile/")))
        return {k: report.metrics[k] for k in wanted}


class Plain:
    """The clipped objective on one padded row per call; at ratio 1 its gradient is that of A log pi."""

    def __init__(self, arguments: argparse.Namespace, group: Group) -> None:
        self.model = model(arguments)
        self.dtype = _dtype(arguments)
        self.group = group
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.0, fused=True)

    def step(self, number: int) -> dict[str, float]:
        one = self.group.trajectories[number % len(self.group.trajectories)]
        rows = [(list(one.prompt_ids(c.id)), list(c.generation_token_ids)) for c in one.calls]
        total = sum(len(generation) for _, generation in rows)
        advantage = 1.0 if one.reward else -1.0
        for at in range(0, len(rows), PLAIN_ROWS):
            part = rows[at : at + PLAIN_ROWS]
            width = max(len(p) + len(g) for p, g in part)
            ids = torch.zeros(len(part), width, dtype=torch.int64)
            weight = torch.zeros(len(part), width)
            attention = torch.zeros(len(part), width, dtype=torch.int64)
            for b, (prompt, generation) in enumerate(part):
                end = len(prompt) + len(generation)
                ids[b, :end] = torch.tensor([*prompt, *generation])
                attention[b, :end] = 1
                weight[b, len(prompt) : end] = advantage / total
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.dtype is not None):
                logits = self.model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1]
            chosen = torch.log_softmax(logits.float(), -1).gather(2, ids[:, 1:, None]).squeeze(2)
            (-(chosen * weight[:, 1:]).sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"tokens": float(build(one).n_tokens)}


def trl_steps(arguments: argparse.Namespace, group: Group, timed: Timed) -> None:
    """`GRPOTrainer.train` fed with the stored trajectories; `timed` is told of each of its steps."""
    from datasets import Dataset  # noqa: PLC0415 (not installed where TRL is not)
    from transformers import TrainerCallback  # noqa: PLC0415
    from trl import GRPOConfig, GRPOTrainer  # noqa: PLC0415

    members = group.trajectories
    rows = [build(t) for t in members]
    first = [len(t.prompt_ids(t.calls[0].id)) for t in members]

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        assert len(prompts) == len(members)
        masks = [r.action_mask(0)[n:].astype(int).tolist() for r, n in zip(rows, first, strict=True)]
        known = []
        for one, n in zip(rows, first, strict=True):
            values = [0.0] * (len(one.rows[0]) - n)
            for position, value in zip(one.position_N, one.log_prob_N, strict=True):
                values[int(position) - n] = float(value)
            known.append(values)
        return {
            "prompt_ids": [r.rows[0][:n].tolist() for r, n in zip(rows, first, strict=True)],
            "completion_ids": [r.rows[0][n:].tolist() for r, n in zip(rows, first, strict=True)],
            "logprobs": known,
            "env_mask": masks,
        }

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [float(t.reward or 0.0) for t in members]

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            timed(time.perf_counter() - self.began[0], time.process_time() - self.began[1])

    with tempfile.TemporaryDirectory() as out:
        trainer = GRPOTrainer(
            model=model(arguments, checkpointing=False),
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=out,
                per_device_train_batch_size=len(members),
                gradient_accumulation_steps=1,
                num_generations=len(members),
                max_steps=arguments.repeats,
                learning_rate=RATE,
                lr_scheduler_type="constant",
                max_grad_norm=1.0,
                loss_type="dapo",
                beta=0.0,
                bf16=_dtype(arguments) is not None,
                use_cpu=True,
                report_to="none",
                save_strategy="no",
                logging_steps=1,
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["x"] * 8}),
            processing_class=_tokenizer(arguments),
            rollout_func=rollout,
            callbacks=[Watch()],
        )
        trainer.train()
        norms = [e["grad_norm"] for e in trainer.state.log_history if "grad_norm" in e]
    timed.norm = float(norms[0])


def _tokenizer(arguments: argparse.Namespace) -> Any:
    """Only to satisfy the trainer: no text is used."""
    if arguments.model is not None and (Path(arguments.model) / "tokenizer.json").exists():
        found = AutoTokenizer.from_pretrained(arguments.model)
    else:
        words = {f"w{i}": i for i in range(SHAPE["vocab_size"])}
        found = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")))
        found.eos_token = "w2"
    if found.pad_token is None:
        found.pad_token = found.eos_token
    return found


# -------------------------------------------------------------------------------------------------- measuring


def memory_mib(what: str) -> float:
    """`VmRSS` (now) or `VmHWM` (peak since this program began) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {what}.")


class Timed:
    """Collects the times of steps."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.norm: float | None = None

    def __call__(self, wall: float, cpu: float) -> None:
        self.wall.append(wall)
        self.cpu.append(cpu)


def side(arguments: argparse.Namespace) -> dict[str, Any]:
    """One side in this process."""
    torch.set_num_threads(arguments.threads)
    group = stored(arguments)
    if arguments.side == "trl":
        importlib.import_module("trl.trainer.grpo_trainer")
    before = memory_mib("VmRSS")
    timed = Timed()
    tokens = [float(sum(build(t).n_tokens for t in group.trajectories))] * arguments.repeats
    last: dict[str, float] = {}
    if arguments.side == "trl":
        trl_steps(arguments, group, timed)
    else:
        runner: Any = (
            Plain(arguments, group)
            if arguments.side == "plain"
            else Ours(arguments, group, share=arguments.side == "shared")
        )
        for number in range(arguments.repeats):
            began = time.perf_counter(), time.process_time()
            last = runner.step(number)
            timed(time.perf_counter() - began[0], time.process_time() - began[1])
            tokens[number] = last.get("tokens", tokens[number])
            if number == 0:
                timed.norm = last.get("optimizer/grad_norm")
    peak = memory_mib("VmHWM") - before
    return {
        "side": arguments.side,
        "tokens_per_s": statistics.median(n / s for n, s in zip(tokens, timed.wall, strict=True)),
        "tokens_per_cpu_s": statistics.median(n / s for n, s in zip(tokens, timed.cpu, strict=True)),
        "wall_s": [round(s, 2) for s in timed.wall],
        "cpu_s": [round(s, 2) for s in timed.cpu],
        "peak_mib": peak,
        "beyond_state_mib": peak - 16 * arguments.parameters / 2**20,
        "grad_norm": timed.norm,
        "last": last,
    }


def scaling(arguments: argparse.Namespace) -> dict[str, Any]:
    """One trajectory of about the wanted length: REINFORCE, one step after one that is not counted."""
    torch.set_num_threads(arguments.threads)
    rng = random.Random(0)
    turns = max(1, (arguments.length - 512) // 128)
    prompt = [rng.randrange(3, SHAPE["vocab_size"]) for _ in range(512)]
    one = given.chain(
        rng,
        id="long",
        turns=turns,
        prompt=prompt,
        generated=(32, 32),
        observed=(96, 96),
        vocab=SHAPE["vocab_size"],
    )
    before = memory_mib("VmRSS")
    recipe = recipes.get("reinforce")
    config = LearnerConfig(
        learning_rate=RATE,
        max_mismatch=None,
        packing=Packing(token_budget=arguments.budget, share_prefixes=True),
        compute_dtype=arguments.dtype,
    )
    learner = Learner(model(arguments, layers=arguments.scaling_layers), recipe, config)
    began = time.perf_counter(), time.process_time()
    learner.update([given.group([one])], version=0)
    wall, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
    tokens = build(one).n_tokens
    return {
        "tokens": tokens,
        "wall_s": wall,
        "tokens_per_s": tokens / wall,
        "tokens_per_cpu_s": tokens / cpu,
        "peak_mib": memory_mib("VmHWM") - before,
    }


# --------------------------------------------------------------------------------------------- the comparison


def child(arguments: argparse.Namespace, python: str, *more: str) -> dict[str, Any]:
    """A part of the comparison in a fresh process; its answer is its last line."""
    passed = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in vars(arguments).items()
        if name in PASSED and value is not None
    ]
    command = [python, __file__, *passed, *more]
    environment = os.environ | QUIET | {"OMP_NUM_THREADS": str(arguments.threads)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=arguments.timeout_s, env=environment, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def has_trl(python: str) -> bool:
    if python == sys.executable:
        return importlib.util.find_spec("trl") is not None
    probe = [python, "-c", "import importlib.util as u; raise SystemExit(u.find_spec('trl') is None)"]
    return subprocess.run(probe, check=False, timeout=120).returncode == 0


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """All sides one after another, then the scaling."""
    found: dict[str, Any] = {"settings": {k: v for k, v in vars(arguments).items() if k != "store"}}
    with tempfile.TemporaryDirectory() as folder:
        arguments.store = str(Path(folder) / "store.db")
        found["data"] = child(arguments, sys.executable, "--part=write")
        arguments.parameters = found["data"]["parameters"]
        counts = "{trajectories} trajectories, {calls} calls: {tokens} tokens, {actions} of them sampled, "
        counts += "{distinct_tokens} distinct in their prefix tree"
        print(counts.format(**found["data"]), flush=True)
        found["sides"] = {}
        for name in arguments.sides.split(","):
            python = arguments.trl or sys.executable if name == "trl" else sys.executable
            if name == "trl" and not has_trl(python):
                print(NO_TRL)
                continue
            one = found["sides"][name] = child(arguments, python, "--part=side", f"--side={name}")
            print(_line(one), flush=True)
        found["scaling"] = []
        for length in [int(n) for n in arguments.scaling.split(",") if n]:
            one = child(arguments, sys.executable, "--part=scaling", f"--length={length}")
            found["scaling"].append(one)
            print(f"{one['tokens']:6} tokens in one trajectory ({arguments.scaling_layers} layers): "
                  f"{one['tokens_per_s']:7.0f} tokens/s, {one['tokens_per_cpu_s']:7.0f} per CPU second, "
                  f"peak {one['peak_mib']:6.0f} MiB", flush=True)  # fmt: skip
    found["verdict"] = verdict(found["sides"])
    for line in found["verdict"]:
        print(line)
    return found


def _line(one: dict[str, Any]) -> str:
    norm = "" if one["grad_norm"] is None else f", gradient norm {one['grad_norm']:.4f}"
    return (
        f"{one['side']:8} {one['tokens_per_s']:7.1f} tokens/s, "
        f"{one['tokens_per_cpu_s']:7.1f} per CPU second, "
        f"peak {one['peak_mib']:6.0f} MiB ({one['beyond_state_mib']:6.0f} beyond state){norm}"
    )


def verdict(sides: dict[str, Any]) -> list[str]:
    """Ratios against the targets of the project's design."""
    lines = []
    ours = sides.get("shared")
    for other in ("trl", "plain"):
        if ours is None or other not in sides:
            continue
        theirs = sides[other]
        wall = ours["tokens_per_s"] / theirs["tokens_per_s"]
        cpu = ours["tokens_per_cpu_s"] / theirs["tokens_per_cpu_s"]
        peak = ours["peak_mib"] / theirs["peak_mib"]
        beyond = ours["beyond_state_mib"] / theirs["beyond_state_mib"]
        lines.append(
            f"shared : {other}: {wall:.2f} x tokens/s ({cpu:.2f} x per CPU second), "
            f"{peak:.2f} of its peak memory, {beyond:.2f} of what it needs beyond state"
        )
    if ours is not None and "packed" in sides:
        wall = ours["tokens_per_s"] / sides["packed"]["tokens_per_s"]
        cpu = ours["tokens_per_cpu_s"] / sides["packed"]["tokens_per_cpu_s"]
        lines.append(f"shared : packed: {wall:.2f} x tokens/s ({cpu:.2f} x per CPU second) by sharing alone")
    return lines


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--model", help="folder of a model; default: random weights of SmolLM2-135M's shape")
    made.add_argument("--layers", type=int, help="cut the model to its first layers")
    made.add_argument("--trl", help="a Python that has TRL and agentrl; default: this one")
    made.add_argument("--sides", default=",".join(SIDES))
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--prompt", type=int, default=1024)
    made.add_argument("--size", type=int, default=8)
    made.add_argument("--calls", type=int, default=8, help="at most; at least 4")
    made.add_argument("--budget", type=int, default=16_384, help="tokens of a micro-batch")
    made.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    made.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    made.add_argument("--scaling", default="1024,2048,4096,8192,16384", help="lengths; empty: none")
    made.add_argument("--scaling-layers", type=int, default=4)
    made.add_argument("--timeout-s", type=float, default=3600.0, help="of one side")
    made.add_argument("--out", help="write all numbers as JSON")
    for name in ("part", "side", "store"):
        made.add_argument(f"--{name}", help=argparse.SUPPRESS)
    made.add_argument("--parameters", type=int, help=argparse.SUPPRESS)
    made.add_argument("--length", type=int, help=argparse.SUPPRESS)
    return made


def main(words: Sequence[str] | None = None) -> None:
    arguments = parser().parse_args(words)
    parts = {"write": write, "side": side, "scaling": scaling}
    if arguments.part is not None:
        print(json.dumps(parts[arguments.part](arguments)))
        return
    began = time.monotonic()
    found = compare(arguments)
    print(f"{time.monotonic() - began:.0f} s in all, with {arguments.threads} threads")
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
