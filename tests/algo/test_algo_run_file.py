"""A recipe that nobody wrote down: composed in a run file, accepted or refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from algo_evidence import full, gradients

from agentrl.algo.objective import prepare
from agentrl.algo.recipes import RECIPES, compose
from agentrl.algo.refusals import RunFacts, check
from agentrl.config import load
from agentrl.errors import ConfigError

pytestmark = pytest.mark.algorithms

COMPOSED = """
[train]
recipe = "gspo"

[train.overrides]
advantage = "leave_one_out"
reduction = "token_mean"
old = "proximal"
correction = { operator = "masked", low = 0.5, high = 2.0 }
shaping = ["whiten"]
token_weight = { probability_weight = { alpha = 0.4 } }
select = ["mixed_groups", { operator = "overlong_filter" }]

[train.overrides.penalty]
entropy_bonus = { coefficient = 0.01 }
kl_k2 = { coefficient = 0.02 }
"""


def composed(tmp_path: Path, text: str = COMPOSED):
    path = tmp_path / "run.toml"
    path.write_text(text)
    train = load(path, []).train
    return compose(train.overrides, base=train.recipe)


def test_a_recipe_composed_in_a_run_file_trains(tmp_path) -> None:
    recipe = composed(tmp_path)
    check(recipe, RunFacts(group_size=4, has_reference=True))
    assert recipe.advantage.operator == "leave_one_out"
    assert [c.operator for c in recipe.penalty] == ["entropy_bonus", "kl_k2"]
    assert recipe.columns >= {"prox_logp_N", "ref_logp_N", "logb_N"}
    columns, live = full(0)
    prepared = prepare(recipe, columns)
    assert [c.name for c in prepared.components] == ["policy", "penalty/entropy_bonus", "penalty/kl_k2"]
    whole, gradient, _ = gradients(recipe, prepared, live)
    assert bool(gradient["logp_N"].any())
    assert bool(gradient["entropy_N"].any())
    split, other, _ = gradients(recipe, prepared, live, [[i] for i in range(8)])
    assert split == pytest.approx(whole, abs=1e-12)
    assert other["logp_N"].tolist() == pytest.approx(gradient["logp_N"].tolist(), abs=1e-15)
    assert RECIPES["gspo"].advantage.operator == "group_zscore", "the row it began with is as it was"


def test_a_composition_that_means_nothing_is_refused_before_launch(tmp_path) -> None:
    twice = COMPOSED + "kl_k3 = { coefficient = 0.1 }\n"
    with pytest.raises(ConfigError, match="Two KL penalties"):
        check(composed(tmp_path, twice), RunFacts(group_size=4, has_reference=True))
    with pytest.raises(ConfigError, match="Did you mean 'leave_one_out'"):
        composed(tmp_path, COMPOSED.replace("leave_one_out", "leave_one_in"))
