"""One rank and two give the same numbers: replicated and sharded, on gloo."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import learner_given as given
import pytest
import torch
from torch import distributed

from agentrl.algo import recipes
from agentrl.errors import EvidenceError
from agentrl.learner import checkpoint, parallel
from agentrl.learner.batch import Packing
from agentrl.learner.publish import export_state
from agentrl.learner.step import Learner, LearnerConfig
from agentrl.types import Group

WORLD = 2
CASES: dict[str, tuple[str, LearnerConfig]] = {
    "replicated": ("ppo", LearnerConfig(packing=Packing(token_budget=80))),
    "one micro-batch": ("cispo", LearnerConfig(packing=Packing(token_budget=100_000))),
    "sharded": ("ppo", LearnerConfig(packing=Packing(token_budget=80), shard=True)),
}


def config_of(name: str) -> LearnerConfig:
    """The first Adam step moves weights by minus the clipped gradient."""
    return replace(
        CASES[name][1], learning_rate=1e6, epsilon=1e6, max_mismatch=None, mini_batches=2, max_grad_norm=0.05
    )


def groups() -> list[Group]:
    rng = random.Random(0)
    return [
        given.group(
            [
                given.chain(rng, id=f"{k}.{i}", group=f"g{k}", reward=float(i % 2), turns=1 + i)
                for i in range(3)
            ]
        )
        for k in range(3)
    ]


def run(name: str, folder: Path) -> dict[str, Any]:
    """Two updates with a checkpoint between them and imitation at the end; everything that should agree."""
    recipe = replace(recipes.get(CASES[name][0]), penalty=())
    config = config_of(name)
    learner = Learner(given.model(dtype=torch.float64), recipe, config)
    first = learner.update(groups(), version=0)
    checkpoint.save(folder / name, learner, cursor=name)
    again = Learner(given.model(seed=3, dtype=torch.float64), recipe, config)
    resumed = checkpoint.load(folder / name, again)
    assert resumed is not None
    second = again.update(groups(), version=0)
    losses = again.imitate([t for g in groups() for t in g.trajectories], mini_batch=4, learning_rate=1e-3)
    keep = ("loss/", "optimizer/grad", "policy/", "ratio/", "mismatch/", "critic/")
    return {
        "weights": export_state(again.policy),
        "critic": {} if again.critic is None else parallel.full_state(again.critic),
        "metrics": [{k: v for k, v in r.metrics.items() if k.startswith(keep)} for r in (first, second)],
        "taken": first.taken + second.taken,
        "losses": losses,
    }


def test_two_ranks_give_the_numbers_of_one(tmp_path: Path) -> None:
    out = tmp_path / "two.pt"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    children = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(WORLD)
    ]
    try:
        texts = [child.communicate(timeout=120)[0].decode() for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0], "\n".join(t[-3000:] for t in texts)
    two = torch.load(out, weights_only=False)
    for name in CASES:
        one = run_alone(name, tmp_path / "alone")
        got = two[name]
        assert got["taken"] == one["taken"] == 4
        for part in ("weights", "critic"):
            assert got[part].keys() == one[part].keys()
            for key, value in one[part].items():
                torch.testing.assert_close(got[part][key], value, rtol=1e-7, atol=1e-10, msg=f"{name}: {key}")
        for mine, theirs in zip(one["metrics"], got["metrics"], strict=True):
            assert theirs == pytest.approx(mine, rel=1e-6, abs=1e-9), name
        assert got["losses"] == pytest.approx(one["losses"], rel=1e-7)


def run_alone(name: str, folder: Path) -> dict[str, Any]:
    recipe_name, config = CASES[name]
    CASES[name] = (recipe_name, replace(config, shard=False))
    return run(name, folder)


def _rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD
    )
    results = {name: run(name, folder) for name in CASES}
    different = groups() if rank == 0 else groups()[:2]
    learner = Learner(given.model(), recipes.get("cispo"), config_of("one micro-batch"))
    with pytest.raises(EvidenceError, match="Ranks disagree"):
        learner.update(different, version=0)
    if rank == 0:
        torch.save(results, folder / "two.pt")
    distributed.barrier()  # a rank that leaves first is aborted at exit by the other's closing connection
    distributed.destroy_process_group()


if __name__ == "__main__":
    _rank(int(sys.argv[1]), Path(sys.argv[2]))
