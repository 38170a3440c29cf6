"""Methods without a recipe of their own are sections of a run file that are valid."""

from __future__ import annotations

import dataclasses

import pytest
from algo_evidence import NUMBERS, full, gradients

from agentrl.algo.methods import METHODS
from agentrl.algo.objective import prepare
from agentrl.algo.recipes import RECIPES, compose
from agentrl.algo.refusals import RunFacts, check

pytestmark = pytest.mark.algorithms
EVERYTHING = RunFacts(group_size=8, has_critic=True, has_reference=True, has_teacher=True)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_every_method_is_a_section_that_is_accepted_and_has_a_gradient(method) -> None:
    recipe = compose({**NUMBERS.get(str(method.section["recipe"]), {}), **method.section})
    check(recipe, dataclasses.replace(EVERYTHING, group_size=recipe.group_size or 8))
    columns, live = full(1)
    if recipe.value is not None and recipe.value.operator == "hl_gauss":
        return  # its live values are logits: tested with a model in tests/learner
    _, gradient, _ = gradients(recipe, prepare(recipe, columns), live)
    assert any(bool(g.any()) for g in gradient.values())


def test_no_method_is_told_twice() -> None:
    names = [name for method in METHODS for name in method.name.split(", ")]
    assert len(set(names)) == len(names)
    assert not {name.lower() for name in names} & set(RECIPES)
