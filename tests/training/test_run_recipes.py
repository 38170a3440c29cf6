"""Which recipes a run file can train, and what the loop does for those that want more than one batch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl import config as configuration
from agentrl.algo import refusals
from agentrl.algo.recipes import RECIPES, compose
from agentrl.errors import ConfigError
from agentrl.store.store import Store
from agentrl.training import loop, sampling
from agentrl.training.events import Silent
from agentrl.training.folder import RunFolder
from agentrl.types import Group

sys.path.insert(0, str(Path(__file__).parent.parent / "learner"))
sys.path.insert(0, str(Path(__file__).parent.parent / "algo"))
import learner_given as given
from algo_evidence import NUMBERS

GIVEN_BY_HAND = {
    "sweet-rl": "values",
    "spo": "values",
    "grpo-vps": "values",
    "dast": "history_mean_S",
    "dsdr": "density_S",
    "dagrpo": "density_S",
    "prefix-rft": "off_policy_S",
    "luffy": "off_policy_S",
    "dcpo": "history_mean_S",
    "s-grpo": "exit_index_S",
    "dra-grpo": "density_S",
    "gapo": "answer_S",
    "score": "first_attempt_S",
    "prime": "prm_logp_N",
    "diver": "potential_N",
    "treerpo": "node_value_N",
}
"""Recipes that need evidence which no run file names a source for, and a word of what they lack."""


def parsed(recipe: str, **more: Any) -> configuration.RunConfig:
    size = RECIPES[recipe].group_size or 4
    return configuration.parse(
        {
            "teacher": {"source": "somewhere"} if RECIPES[recipe].needs_teacher else {},
            "rollout": {"group_size": size},
            "train": {"recipe": recipe, "overrides": NUMBERS.get(recipe, {})},
            **more,
        }
    )


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_run_file_trains_every_recipe_whose_evidence_a_run_makes_and_says_what_the_others_lack(
    name: str,
) -> None:
    config = parsed(name)
    recipe = compose(config.train.overrides, base=name)
    found = refusals.problems(recipe, loop._facts(config, recipe))
    if name in GIVEN_BY_HAND:
        assert any(GIVEN_BY_HAND[name] in sentence and "extra=" in sentence for sentence in found)
    else:
        assert found == ()


def test_a_teacher_is_named_by_one_key() -> None:
    config = parsed("kdrl", teacher={})
    recipe = RECIPES["kdrl"]
    with pytest.raises(ConfigError, match=r"set teacher\.source"):
        refusals.check(recipe, loop._facts(config, recipe))


def test_a_shared_critic_takes_no_steps_and_no_warm_up_of_its_own() -> None:
    for name, train in (
        ("sao", {"critic": "shared"}),
        ("ppo", {"critic": "shared", "critic_warmup_updates": 1}),
    ):
        config = parsed(name, train={"recipe": name, **train})
        with pytest.raises(ConfigError, match="critic"):
            refusals.check(RECIPES[name], loop._facts(config, RECIPES[name]))


# ---------------------------------------------------------------------------------------- dynamic sampling


def group_of(*rewards: float | None, name: str = "g") -> Group:
    return given.group(
        [
            given.trajectory([given.call(f"{name}{i}", [1], [2])], id=f"{name}{i}", group=name, reward=reward)
            for i, reward in enumerate(rewards)
        ]
    )


def test_an_update_is_sampled_for_until_enough_groups_have_a_spread_and_never_beyond_the_cap() -> None:
    """ENV-11: cap 3; at the cap it trains on what there is, or skips, as the recipe says; none is a skip."""
    flat, mixed = group_of(1.0, 1.0), group_of(1.0, 0.0)
    one_graded, unasked = (
        group_of(1.0, None),
        given.group([given.trajectory([], reward=r) for r in (1.0, 0.0)]),
    )
    train = compose({"recipe": "dapo", "select.mixed_groups.max_rounds": 3})
    skip = compose(
        {"recipe": "dapo", "select.mixed_groups.max_rounds": 3, "select.mixed_groups.at_cap": "skip"}
    )

    def decided(recipe: Any, batch: list[Group], rounds: int) -> tuple[str, int]:
        return sampling.next_round(recipe, batch, wanted=2, rounds=rounds)

    assert decided(train, [mixed, mixed], 1) == ("train", 2)
    assert decided(train, [mixed, flat], 1) == ("sample", 1)
    assert decided(train, [flat, one_graded, unasked], 2) == ("sample", 0)
    assert decided(train, [mixed, flat, flat], 3) == ("train", 1)
    assert decided(skip, [mixed, flat, flat], 3) == ("skip", 1)
    assert decided(train, [flat, flat], 3) == ("skip", 0)
    assert decided(RECIPES["grpo"], [flat], 1) == ("train", 0)
    assert (sampling.most_rounds(train), sampling.most_rounds(RECIPES["grpo"])) == (3, 1)


def one_update(folder: Path, recipe: str, **more: Any) -> configuration.RunConfig:
    """A run of one update of an untrained small policy, which solves nothing."""
    sections: dict[str, Any] = {
        "run": {"name": "one", "dir": str(folder), "threads": 1},
        "tasks": {"train": 2, "heldout": 1},
        "sandbox": {"backend": "plain"},
        "policy": {"small": {"hidden_size": 128, "heads": 2, "context": 1024}},
        "rollout": {"groups": 2, "group_size": 2, "max_tokens": 8},
        "train": {"recipe": recipe, "updates": 1, "learning_rate": 1e-4},
    }
    for name, section in more.items():
        sections[name] = {**sections.get(name, {}), **section}
    return configuration.parse(sections)


def trained(folder: Path, recipe: str, **more: Any) -> tuple[Silent, dict[str, int]]:
    """Such a run, done; trajectories by phase."""
    noted = Silent()
    loop.run(one_update(folder, recipe, **more), listener=noted)
    with Store.open(folder / "store.db") as store:
        rows = store.trajectories(store.runs()[0].id, limit=None)
        assert store.unconsumed(store.runs()[0].id, "train") == ()
    phases = [row.phase for row in rows]
    return noted, {phase: phases.count(phase) for phase in phases}


def source_at(folder: Path) -> str:
    """The folder of an untrained policy, as `policy.source` takes it."""
    trained(folder, "reinforce", train={"recipe": "reinforce", "updates": 0})
    return str(next((folder / "versions").glob("*/model.safetensors")).parent)


def test_where_no_group_has_a_spread_sampling_ends_at_the_cap_and_nothing_moves(tmp_path: Path) -> None:
    overrides = {"select": {"mixed_groups": {"max_rounds": 2}}}
    noted, phases = trained(tmp_path / "run", "dapo", train={"recipe": "dapo", "overrides": overrides})
    assert phases == {"train": 8}, "two rounds of two groups of two"
    (numbers,) = noted.numbers
    assert (numbers["sampling/rounds"], numbers["sampling/usable_groups"]) == (2, 0)
    assert (numbers["optimizer/step"], numbers["policy/version"]) == (0, 0)
    assert any("had nothing to train on" in line for line in noted.notes)
    newest = sorted((tmp_path / "run" / "checkpoints").glob("update-*"))[-1]
    (newest / "state.pt").write_bytes(b"torn")
    known = RunFolder(tmp_path / "run").begun()
    assert known is not None
    with pytest.raises(ConfigError, match="of update 0, and the store knows of update 1"):
        loop.run(known[1], listener=Silent(), resume=True)


def test_a_greedy_attempt_is_the_baseline_of_its_group_and_trained_by_nobody(tmp_path: Path) -> None:
    """ADV-10, in a run: one greedy attempt beside each group."""
    noted, phases = trained(tmp_path / "run", "remax")
    assert phases == {"greedy": 2, "train": 4}
    (numbers,) = noted.numbers
    assert (numbers["sampling/groups_without_greedy"], numbers["trajectories/total"]) == (0, 4)
    with Store.open(tmp_path / "run" / "store.db") as store:
        run_id = store.runs()[0].id
        greedy = list(store.iter_trajectories(run_id, phase="greedy"))
        members = {t.group_id for t in store.iter_trajectories(run_id, phase="train")}
    assert {call.sampling.temperature for t in greedy for call in t.calls} == {0.0}
    assert {t.group_id for t in greedy} == {sampling.greedy_of(name) for name in members}


class Stopping(Silent):
    """Breaks the run off after its first update."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        raise RuntimeError("stopped here")


def test_a_run_that_was_broken_off_goes_on_with_the_groups_and_baselines_that_it_lacks(
    tmp_path: Path,
) -> None:
    config = one_update(tmp_path / "run", "remax", train={"recipe": "remax", "updates": 2})
    with pytest.raises(RuntimeError, match="stopped here"):
        loop.run(config, listener=Stopping())
    with Store.open(tmp_path / "run" / "store.db") as store:
        run_id = store.runs()[0].id
        before = {row.id: row.content_hash for row in store.trajectories(run_id, limit=None)}
    loop.run(config, listener=Silent(), resume=True)
    with Store.open(tmp_path / "run" / "store.db") as store:
        rows = store.trajectories(run_id, limit=None)
        assert before.items() <= {row.id: row.content_hash for row in rows}.items()
        assert [u.step for u in store.updates(run_id)] == [1, 2]
        assert store.unconsumed(run_id, "train") == ()
        assert store.verify(run_id).ok
    phases = [row.phase for row in rows]
    assert {phase: phases.count(phase) for phase in phases} == {"greedy": 4, "train": 8}


def test_a_policy_learns_from_a_teacher_that_a_run_file_names(tmp_path: Path) -> None:
    source = source_at(tmp_path / "first")
    noted, _ = trained(
        tmp_path / "second",
        "opd-full",
        policy={"source": source},
        teacher={"source": source},
    )
    (numbers,) = noted.numbers
    assert numbers["teacher/divergence"] == pytest.approx(0.0, abs=1e-6), "the teacher is the policy itself"
    with pytest.raises(ConfigError, match="tokenizer of teacher"):
        trained(tmp_path / "third", "opd", teacher={"source": source}, tasks={"train": 3, "heldout": 1})


# ------------------------------------------------------------------------------------------------ adapters


def with_adapters(folder: Path, source: str, *, updates: int = 2) -> configuration.RunConfig:
    """The entropy bonus moves a policy that earns nothing."""
    return one_update(
        folder,
        "grpo",
        policy={"source": source},
        train={
            "recipe": "grpo",
            "updates": updates,
            "learning_rate": 1e-2,
            "overrides": {"penalty": {"entropy_bonus": {"coefficient": 0.01}, "kl_k3": {"coefficient": 0.1}}},
            "lora": {"rank": 2, "targets": ["q_proj", "down_proj"]},
        },
    )


def broken_off(tmp_path: Path) -> tuple[Path, configuration.RunConfig]:
    """A run with adapters that stopped after its first update, and where its base lies."""
    pytest.importorskip("peft")
    source = source_at(tmp_path / "first")
    config = with_adapters(tmp_path / "run", source)
    with pytest.raises(RuntimeError, match="stopped here"):
        loop.run(config, listener=Stopping())
    return Path(source), config


def test_a_run_file_trains_adapters_and_publishes_the_sum_and_goes_on_after_a_break(tmp_path: Path) -> None:
    source, config = broken_off(tmp_path)
    noted = Silent()
    loop.run(config, listener=noted, resume=True)
    base = load_file(source / "model.safetensors")
    first, second, third = (
        load_file(tmp_path / "run" / "versions" / f"v{n:06d}" / "model.safetensors") for n in range(3)
    )
    assert all(torch.equal(base[name], first[name]) for name in base), "adapters begin at zero"
    for before, after in ((first, second), (second, third)):
        moved = {name for name in base if not torch.equal(before[name], after[name])}
        assert {name.split(".")[-2] for name in moved} == {"q_proj", "down_proj"}
    (numbers,) = noted.numbers
    assert numbers["penalty/kl_k3"] > 0, "compared with the base, the adapters off"
    state = torch.load(
        sorted((tmp_path / "run" / "checkpoints").glob("update-*"))[-1] / "state.pt", weights_only=True
    )
    assert all("lora_" in name for name in state["policy"]), "a checkpoint does not repeat the base"


def test_a_run_with_adapters_does_not_go_on_from_another_base(tmp_path: Path) -> None:
    source, config = broken_off(tmp_path)
    weights = load_file(source / "model.safetensors")
    weights["model.norm.weight"] += 1e-3
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="is not version 1, which this run published"):
        loop.run(config, listener=Silent(), resume=True)


def test_adapters_on_weights_drawn_at_random_are_refused_before_anything_starts(tmp_path: Path) -> None:
    config = one_update(tmp_path / "run", "grpo", train={"recipe": "grpo", "lora": {"rank": 4}})
    with pytest.raises(ConfigError, match=r"set policy\.source to a trained model"):
        loop.run(config, listener=Silent())
    assert not (tmp_path / "run").exists()
