"""What the evidence store costs: adding a trajectory of 8 calls x 400 tokens, bytes per token, reading back.

    python tests/benchmarks/bench_store.py [database URL]

Without a URL it measures a new SQLite file. Stored tokens are the generated ones and those of prompt deltas.
"""

from __future__ import annotations

import random
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path

from agentrl.store import Store
from agentrl.types import (
    Action,
    Evidence,
    EvidenceKey,
    FinishReason,
    LogProbKind,
    ModelCall,
    Observation,
    SamplingParams,
    Split,
    Termination,
    Trajectory,
    Turn,
    Verdict,
    VersionSpan,
    token_hash,
)

N_TRAJECTORIES = 1000
N_CALLS, N_GENERATED, N_DELTA = 8, 400, 200
VOCABULARY = 49_152
TARGET_MS = 3.0


def trajectory(name: str, rng: random.Random) -> Trajectory:
    """8 calls that extend each other; near-random ids, so compression is not flattered."""
    calls: list[ModelCall] = []
    turns: list[Turn] = []
    prompt: tuple[int, ...] = ()
    for at in range(N_CALLS):
        keep, delta = len(prompt), tuple(rng.randrange(VOCABULARY) for _ in range(N_DELTA))
        prompt += delta
        logits = [-rng.expovariate(2.0) for _ in range(N_GENERATED)]
        call = ModelCall(
            id=f"c{at}",
            parent_id=calls[-1].id if calls else None,
            prompt_keep=keep,
            prompt_delta=delta,
            prompt_hash=token_hash(prompt),
            generation_token_ids=tuple(rng.randrange(VOCABULARY) for _ in range(N_GENERATED)),
            generation_log_probs=struct.unpack(f"{N_GENERATED}f", struct.pack(f"{N_GENERATED}f", *logits)),
            log_prob_kind=LogProbKind.PROCESSED,
            policy_versions=(VersionSpan(version=3, start=0, end=N_GENERATED),),
            sampling=SamplingParams(),
            finish_reason=FinishReason.STOP,
            model="m",
            view_hash="0" * 64,
            started_at=1.0,
            finished_at=2.0,
        )
        prompt += call.generation_token_ids
        text = " ".join(str(rng.randrange(10**6)) for _ in range(60))
        action = Action(id=f"a{at}", tool="bash", arguments={"command": f"cat file{at}"})
        calls.append(call)
        turns.append(
            Turn(
                call_id=call.id,
                actions=(action,),
                observations=(Observation(action_id=action.id, text=text),),
            )
        )
    return Trajectory(
        id=name,
        task_id="bench/one",
        task_revision="0" * 64,
        group_id=name,
        index=0,
        harness="bench/1",
        split=Split.TRAIN,
        calls=tuple(calls),
        turns=tuple(turns),
        termination=Termination.FINISHED,
        verdict=Verdict(
            reward=1.0,
            evidence=tuple(Evidence(key=key, holds=True) for key in EvidenceKey),
            fault=None,
            grader_revision="1",
            isolation="none",
        ),
        started_at=1.0,
        finished_at=2.0,
    )


def main(url: str | None) -> None:
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        with Store.open(url or path) as store:
            run = store.begin_run("bench", config={}, algo="none", seed=0).id
            taken_ms: list[float] = []
            for at in range(N_TRAJECTORIES):
                record = trajectory(f"{run}-{at}", rng)
                began = time.perf_counter()
                store.add_trajectory(run, record)
                taken_ms.append((time.perf_counter() - began) * 1e3)
            tokens = N_TRAJECTORIES * N_CALLS * (N_GENERATED + N_DELTA)
            ranked = sorted(taken_ms)
            worst = ranked[int(0.99 * len(ranked))]
            print(f"one trajectory: {N_CALLS} calls x {N_GENERATED} generated, {N_DELTA} new prompt tokens")
            print(
                f"add: median {statistics.median(ranked):.2f} ms, mean {statistics.mean(ranked):.2f} ms,",
                end=" ",
            )
            print(f"99 % {worst:.2f} ms (target: median below {TARGET_MS:g} ms)")
            began = time.perf_counter()
            read = sum(len(record.calls) for record in store.iter_trajectories(run))
            seconds = time.perf_counter() - began
            print(f"read: {N_TRAJECTORIES} trajectories, {read} calls in {seconds:.2f} s,", end=" ")
            print(f"{tokens / seconds:,.0f} tokens/s")
            began = time.perf_counter()
            rows = store.trajectories(run, limit=None)
            print(f"list: {len(rows)} light rows in {(time.perf_counter() - began) * 1e3:.0f} ms")
            began = time.perf_counter()
            report = store.verify(run)
            seconds = time.perf_counter() - began
            print(f"verify: {report.calls_checked} calls, ok={report.ok}, in {seconds:.2f} s")
        if url is None:
            size = path.stat().st_size / tokens
            print(f"size: {size:.2f} bytes per stored token, with all columns, observations and indexes")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
