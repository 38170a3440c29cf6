"""Every recipe through the whole learner: rows of a model, layouts, splits and ranks change no weight."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import learner_given as given
import pytest
import torch
from torch import distributed

sys.path.insert(0, str(Path(__file__).parent.parent / "algo"))
from algo_evidence import recipe_of

from agentrl.algo.recipes import RECIPES
from agentrl.learner import parallel
from agentrl.learner.batch import Packing, pack
from agentrl.learner.evidence import gather
from agentrl.learner.model import Policy, log_probs
from agentrl.learner.samples import build
from agentrl.learner.step import Learner, LearnerConfig
from agentrl.types import Group, Termination

pytestmark = pytest.mark.algorithms
NAMES = sorted(RECIPES)
WORLD = 2
REWARDS = ((1.0, 0.9, 0.3, 0.0), (0.0, 0.8, None, 0.2), (0.0, 0.0))
"""Two groups that mix success and failure, one member of them ungraded, and one that only fails."""
ONE_PASS = Packing(token_budget=10_000)
LAYOUTS = {
    "one row at a time": Packing(token_budget=1),
    "padded": Packing(token_budget=90, layout="padded"),
    "a prefix tree": Packing(token_budget=150, share_prefixes=True),
}
FIRST_STEP = LearnerConfig(learning_rate=1e6, epsilon=1e6, max_grad_norm=None, max_mismatch=None)
"""With these the first Adam step moves a weight by minus its gradient, to about 1e-6 of it."""


@cache
def groups() -> tuple[Group, ...]:
    """Recorded by the model itself to about 1e-4, so that all ratios lie inside the clips of all recipes."""
    rng = random.Random(0)
    policy = Policy(given.model(dtype=torch.float64))
    made = []
    for k, rewards in enumerate(REWARDS):
        prompt = [rng.randrange(given.VOCAB) for _ in range(10)]
        members = []
        for i, reward in enumerate(rewards):
            one = given.chain(
                rng,
                id=f"{k}.{i}",
                group=f"g{k}",
                reward=reward,
                prompt=prompt,
                turns=2 + i % 2,
                branch_at=2 if i == 1 else None,
                termination=Termination.MAX_TURNS if i == 3 else Termination.FINISHED,
            )
            (micro,) = pack([build(one)], ONE_PASS)
            known = [p + 2e-4 * (rng.random() - 0.5) for p in log_probs(policy, micro).tolist()]
            calls = []
            for call in one.calls:
                n = len(call.generation_token_ids)
                calls.append(replace(call, generation_log_probs=tuple(known[:n])))
                known = known[n:]
            members.append(replace(one, calls=tuple(calls)))
        made.append(given.group(members))
    return tuple(made)


def extra(name: str) -> dict[str, torch.Tensor]:
    """Columns that no model fills."""
    batch = gather(groups(), version=0)
    n, s = batch.layout.n_tokens, batch.layout.n_trajectories
    g = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    columns = {
        "turn_reward_N": rand(n) * (rand(n) > 0.5),
        "node_value_N": rand(n) - 0.5,
        "potential_N": rand(n),
        "prm_logp_N": -rand(n),
        "components_SK": rand(s, 2),
        "greedy_reward_S": rand(s),
        "off_policy_S": torch.arange(s) == 1,
        "density_S": rand(s),
        "answer_S": torch.arange(s) % 3,
        "exit_index_S": torch.arange(s) % 2,
        "first_attempt_S": rand(s),
        "history_mean_S": rand(s),
        "history_std_S": rand(s) + 0.1,
        "history_step_S": torch.ones(s, dtype=torch.int64) * 2,
    }
    if RECIPES[name].value is None:
        columns["values_N"] = rand(n)  # Monte-Carlo values
        columns["bootstrap_S"] = rand(s)
    return {k: v for k, v in columns.items() if k in RECIPES[name].columns or k == "bootstrap_S"}


def moved(name: str, packing: Packing, *, shard: bool = False) -> dict[str, torch.Tensor]:
    """Every weight after one update less what it was, policy's and critic's."""
    recipe = recipe_of(name)
    model = given.model(dtype=torch.float64)
    learner = Learner(
        model,
        recipe,
        replace(FIRST_STEP, packing=packing, shard=shard),
        reference=given.model(seed=1, dtype=torch.float64) if recipe.needs_reference else None,
        teacher=given.model(seed=2, dtype=torch.float64) if recipe.needs_teacher else None,
    )
    parts = {"policy": learner.policy} | ({} if learner.critic is None else {"critic": learner.critic})
    before = {k: {n: v.clone() for n, v in parallel.full_state(m).items()} for k, m in parts.items()}
    report = learner.update(groups(), version=0, extra=extra(name))
    assert not report.refused
    assert report.taken == 1
    return {
        f"{part}.{key}": value.to(torch.float64) - before[part][key].to(torch.float64)
        for part, module in parts.items()
        for key, value in parallel.full_state(module).items()
    }


@cache
def expected(name: str) -> dict[str, torch.Tensor]:
    return moved(name, ONE_PASS)


def assert_same(found: dict[str, torch.Tensor], name: str) -> None:
    assert found.keys() == expected(name).keys()
    for key, value in expected(name).items():
        torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("name", NAMES)
def test_no_layout_and_no_split_changes_the_step_of_any_recipe(name: str) -> None:
    assert max(float(v.abs().max()) for v in expected(name).values()) > 1e-5, "the step moves something"
    for packing in LAYOUTS.values():
        assert_same(moved(name, packing), name)


@pytest.mark.timeout(900)
def test_two_sharded_ranks_make_the_step_of_one_for_every_recipe(tmp_path: Path) -> None:
    """FSDP2 over gloo: each rank computes its share of the micro-batches and holds half of every weight."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    children = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(tmp_path), *NAMES],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(WORLD)
    ]
    try:
        texts = [child.communicate(timeout=800)[0].decode() for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0], "\n".join(t[-3000:] for t in texts)
    two = torch.load(tmp_path / "two.pt", weights_only=True)
    for name in NAMES:
        assert_same(two[name], name)


def _rank(rank: int, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD
    )
    packing = Packing(token_budget=170, share_prefixes=True)
    found = {name: moved(name, packing, shard=True) for name in names}
    if rank == 0:
        torch.save(found, folder / "two.pt")
    distributed.barrier()  # a rank that leaves first is aborted at exit by the other's closing connection
    distributed.destroy_process_group()


if __name__ == "__main__":
    _rank(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
