"""Resume: as if nothing had happened, from the last good checkpoint."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import learner_given as given
import numpy as np
import pytest
import torch

from agentrl.algo import recipes
from agentrl.errors import ConfigError
from agentrl.learner import checkpoint
from agentrl.learner.cursor import Cursor
from agentrl.learner.publish import publish
from agentrl.learner.step import Learner, LearnerConfig
from agentrl.types import Group

CONFIG = LearnerConfig(
    learning_rate=1e-2,
    schedule="linear",
    total_steps=40,
    mini_batches=2,
    max_mismatch=None,
    adaptive={"penalty/kl_k3": (0.01, 0.02)},
)
PPO_KL = replace(recipes.get("ppo"), penalty=recipes.get("grpo").penalty)


def learner(recipe: Any = PPO_KL, config: LearnerConfig = CONFIG, seed: int = 0) -> Learner:
    return Learner(given.model(seed=seed), recipe, config, reference=given.model())


def batch(step: int) -> list[Group]:
    rng = random.Random(step)
    return [
        given.group(
            [
                given.chain(rng, id=f"{step}.{k}.{i}", group=f"{step}.{k}", reward=float(i % 2))
                for i in range(2)
            ]
        )
        for k in range(4)
    ]


def state_of(made: Learner) -> dict[str, torch.Tensor]:
    flat: dict[str, torch.Tensor] = {}

    def walk(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            flat[name] = value.clone()
        elif isinstance(value, dict):
            for k, v in value.items():
                walk(f"{name}/{k}", v)
        elif isinstance(value, (list, tuple)):
            for k, v in enumerate(value):
                walk(f"{name}/{k}", v)
        elif isinstance(value, (int, float)):
            flat[name] = torch.tensor(value, dtype=torch.float64)

    state = checkpoint.learner_state(made)
    walk("", state)
    return flat


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_k_steps_resume_and_the_rest_are_bit_by_bit_n_steps(tmp_path: Path, critic: Any) -> None:
    """RES-04: weights, both optimizers, schedule, mini-batch order, adaptive coefficients, random states."""
    config = replace(CONFIG, critic=critic)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    whole = learner(config=config)
    for step in range(3):
        whole.update(batch(step), version=0)
        torch.rand(1)
        if step == 1:
            checkpoint.save(tmp_path, whole, cursor={"trained": [0, 1]})
    drawn = (random.random(), np.random.rand(), torch.rand(1).item())
    expected = state_of(whole)

    random.seed(99)
    torch.manual_seed(99)
    resumed = learner(config=config, seed=5)
    found = checkpoint.load(tmp_path, resumed)
    assert found is not None
    assert (found.step, found.updates, found.cursor, found.notices) == (4, 2, {"trained": [0, 1]}, ())
    resumed.update(batch(2), version=0)
    torch.rand(1)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == drawn
    got = state_of(resumed)
    names = [n for n in expected if not n.startswith("/random")]
    assert len(names) > 100
    assert [n for n in names if not torch.equal(got[n], expected[n])] == []


def test_without_a_checkpoint_nothing_is_resumed(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path / "none", learner()) is None


@pytest.mark.parametrize(
    "damage",
    ["flipped", "cut", "no state", "no manifest", "bad manifest", "null manifest", "half a manifest"],
)
def test_a_damaged_checkpoint_is_skipped_for_the_last_good_one_and_says_so(
    tmp_path: Path, damage: str
) -> None:
    made = learner(recipes.get("cispo"), replace(CONFIG, adaptive={}))
    made.update(batch(0), version=0)
    checkpoint.save(tmp_path, made, cursor=1)
    made.update(batch(1), version=0)
    newest = checkpoint.save(tmp_path, made, cursor=2)
    state, manifest = newest / checkpoint.STATE, newest / checkpoint.MANIFEST
    match damage:
        case "flipped":
            data = bytearray(state.read_bytes())
            data[len(data) // 2] ^= 1
            state.write_bytes(data)
        case "cut":
            state.write_bytes(state.read_bytes()[:1000])
        case "no state":
            state.unlink()
        case "no manifest":
            manifest.unlink()
        case "bad manifest":
            manifest.write_text("{")
        case "null manifest":
            manifest.write_text("null")
        case "half a manifest":
            manifest.write_text(json.dumps({"sha256": json.loads(manifest.read_text())["sha256"]}))
    found = checkpoint.load(tmp_path, learner(recipes.get("cispo"), replace(CONFIG, adaptive={})))
    assert found is not None
    assert found.cursor == 1
    assert found.updates == 1
    assert len(found.notices) == 1
    assert "is damaged" in found.notices[0]


def test_only_damaged_checkpoints_are_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    made = learner(recipes.get("cispo"), replace(CONFIG, adaptive={}))
    (checkpoint.save(tmp_path, made) / checkpoint.STATE).unlink()
    with pytest.raises(ConfigError, match="None of 1 checkpoints"):
        checkpoint.load(tmp_path, made)


def test_the_newest_checkpoints_are_kept_and_the_pointer_names_the_last(tmp_path: Path) -> None:
    made = learner(recipes.get("cispo"), replace(CONFIG, adaptive={}))
    paths = []
    for step in range(4):
        made.update(batch(step), version=0)
        paths.append(checkpoint.save(tmp_path, made))
    paths.append(checkpoint.save(tmp_path, made))
    assert sorted(p for p in tmp_path.iterdir() if p.is_dir()) == paths[-2:]
    assert (tmp_path / checkpoint.POINTER).read_text() == paths[-1].name


def test_the_last_published_version_travels_along(tmp_path: Path) -> None:
    made = learner(recipes.get("cispo"), replace(CONFIG, adaptive={}))
    version = publish(made.policy, tmp_path / "versions", parent=None, step=0)
    checkpoint.save(tmp_path / "c", made, published=version)
    found = checkpoint.load(tmp_path / "c", made)
    assert found is not None
    assert found.published == version


def test_a_checkpoint_of_another_model_or_recipe_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, learner())
    with pytest.raises(ConfigError, match="critic"):
        checkpoint.load(tmp_path, learner(recipes.get("cispo"), replace(CONFIG, adaptive={})))
    other = Learner(given.model(layers=1), PPO_KL, CONFIG, reference=given.model())
    with pytest.raises(ConfigError, match="another model"):
        checkpoint.load(tmp_path, other)


# ----------------------------------------------------------------------------------------------- cursor


def test_a_cursor_resumed_in_epoch_one_continues_the_order_of_epoch_one() -> None:
    """RES-02: 5 items; saved at epoch 1, item 2."""
    start = Cursor(seed=7, size=5)
    first, at = start.take(7)
    epoch0 = start.order()
    epoch1 = Cursor(seed=7, size=5, epoch=1).order()
    assert epoch0 != epoch1
    assert first == [*epoch0, *epoch1[:2]]
    resumed = Cursor.from_json(json.loads(json.dumps(at.to_json())))
    assert (resumed.epoch, resumed.position) == (1, 2)
    assert resumed.take(3)[0] == epoch1[2:]


def test_a_cursor_visits_every_item_once_per_epoch_however_it_is_cut() -> None:
    whole, _ = Cursor(seed=1, size=6).take(18)
    cut: list[int] = []
    cursor = Cursor(seed=1, size=6)
    for n in (1, 5, 2, 7, 3):
        part, cursor = cursor.take(n)
        cut += part
    assert cut == whole
    assert all(sorted(whole[k : k + 6]) == list(range(6)) for k in (0, 6, 12))
    with pytest.raises(ConfigError, match="No place"):
        Cursor(seed=0, size=3, position=4)
