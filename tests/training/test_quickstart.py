"""What `agentrl quickstart` lays over its run file."""

from __future__ import annotations

import pytest

from agentrl.algo import recipes
from agentrl.cli.training import QUICKSTART, for_the_suite
from agentrl.config import load
from agentrl.training.sampling import draws_of


def composed(algo: str) -> recipes.Recipe:
    train = load(QUICKSTART, [f'train.recipe="{algo}"', *for_the_suite(algo)]).train
    return recipes.compose(train.overrides, base=train.recipe)


@pytest.mark.parametrize("algo", ["grpo", "ppo", "vapo", "rloo"])
def test_the_one_kl_term_is_the_one_whose_gradient_stays_bounded(algo: str) -> None:
    assert [(c.operator, c.numbers["coefficient"]) for c in composed(algo).penalty] == [("kl_k2", 0.05)]


def test_where_the_state_at_the_turn_limit_is_graded_no_critic_adds_a_future_to_it() -> None:
    for algo in ("ppo", "vapo", "sao", "ppo-turn", "evpo"):
        assert composed(algo).advantage.numbers["bootstrap"] is False
    assert composed("ppo").advantage.numbers["lambda_policy"] == 1.0
    assert composed("vapo").advantage.numbers["alpha"] == recipes.get("vapo").advantage.numbers["alpha"]


def test_a_recipe_without_critic_is_told_nothing_more() -> None:
    assert for_the_suite("grpo") == for_the_suite("rloo") == []


def test_the_demonstrator_of_a_seed_draws_the_same_in_every_run() -> None:
    first, again = (draws_of(1, run, f"{run}-d00007", 0) for run in ("15dccd016738", "5fad1865bc65"))
    assert first == again
    assert len({first, draws_of(2, "x", "x-d00007", 0), draws_of(1, "x", "x-d00008", 0)}) == 3
