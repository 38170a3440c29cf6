"""The table of recipes as data: what a run file may change, and what is refused before launch."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch
from algo_evidence import NUMBERS, recipe_of

from agentrl.algo import diagnostics
from agentrl.algo.advantages import GROUP_RELATIVE
from agentrl.algo.columns import Layout
from agentrl.algo.recipes import AXES, LIVE, OPTIONAL_COLUMNS, RECIPES, compose, get
from agentrl.algo.refusals import COMPARED_REWARDS, REFUSALS, RunFacts, check, problems
from agentrl.errors import ConfigError

pytestmark = pytest.mark.algorithms
GOOD = RunFacts(group_size=8, has_critic=True, has_reference=True, has_teacher=True)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_is_accepted_by_a_run_that_has_everything(name):
    recipe = recipe_of(name)
    check(recipe, dataclasses.replace(GOOD, group_size=recipe.group_size or 8))


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_says_where_it_comes_from(name):
    recipe = RECIPES[name]
    assert recipe.name == name
    assert recipe.paper
    assert recipe.equation
    assert recipe.differs
    assert recipe.arxiv is None or len(recipe.arxiv) == 10


def test_every_operator_has_an_equation_and_only_columns_that_exist():
    words = (
        "layout group_S counted_S trained_S trained_N reward_S outcome_S return_S rewards_N token_reward_N",
        "truncated_S length_S advantage_S advantage_N returns_N logp_N old_logp_N ratio off_policy_N",
    )
    derived = set(" ".join(words).split())
    for axis, operators in AXES.items():
        for name, operator in operators.items():
            assert "`" in operator.equation or axis == "select", f"{axis}.{name}"
            unknown = set(operator.columns) - derived - OPTIONAL_COLUMNS - set(LIVE)
            assert not unknown, f"{axis}.{name} reads {unknown}"
            assert inspect.getdoc(operator.function)


def test_composing_leaves_the_run_file_as_it_was():
    section = {
        "recipe": "dapo",
        "reward": {"soft_overlong": {"max_length": 5}},
        "reward.soft_overlong.cache": 2,
    }
    compose(section)
    assert section["reward"] == {"soft_overlong": {"max_length": 5}}


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'grpo'"):
        get("grpoo")


def test_a_run_file_overrides_axes_and_numbers():
    recipe = compose(
        {
            "recipe": "grpo",
            "surrogate": {"low": 0.1},
            "surrogate.high": 0.3,
            "advantage": "leave_one_out",
            "penalty": {"kl_k3": False, "kl_k2": {"coefficient": 0.2}},
            "select": ["mixed_groups", {"operator": "overlong_filter"}],
            "max_lag": 2,
        }
    )
    assert recipe.number("surrogate", "ppo_clip", "low") == 0.1
    assert recipe.number("surrogate", "ppo_clip", "high") == 0.3
    assert recipe.number("surrogate", "ppo_clip", "dual") is None
    assert recipe.advantage.operator == "leave_one_out"
    assert [c.operator for c in recipe.penalty] == ["kl_k2"]
    assert [c.operator for c in recipe.select] == ["mixed_groups", "overlong_filter"]
    assert recipe.max_lag == 2
    assert RECIPES["grpo"].max_lag is None


def test_changing_the_operator_forgets_numbers_that_belong_to_another():
    recipe = compose({"recipe": "dapo", "surrogate": {"operator": "cispo", "high": 0.5}})
    assert dict(recipe.surrogate.numbers) == {"high": 0.5}
    assert dict(compose({"recipe": "dapo", "surrogate.dual": 3.0}).surrogate.numbers) == {
        "low": 0.2,
        "high": 0.28,
        "dual": 3.0,
    }


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"advantge": "group_centred"}, "Did you mean 'advantage'"),
        ({"advantage": "group_centered"}, "Did you mean 'group_centred'"),
        ({"surrogate.hihg": 0.3}, "Did you mean 'high'"),
        ({"penalty": {"kl_k4": {}}}, "kl_k"),
        ({"old": "behavior"}, "proximal"),
        ({"max_lag": "two"}, "wrong type"),
        ({"reduction": "none"}, "can not be empty"),
        ({"reduction": 3}, "neither a word nor a table"),
        ({"correction": {"cap": 2.0}}, "correction.operator"),
        ({"surrogate": "ppo_clip", "surrogate.low": 0.1}, "twice"),
    ],
)
def test_a_mistake_in_a_run_file_is_one_sentence_with_the_nearest_key(overrides, message):
    with pytest.raises(ConfigError, match=message):
        compose({"recipe": "grpo", **overrides})


def test_a_section_without_recipe_lists_them():
    with pytest.raises(ConfigError, match="grpo"):
        compose({"surrogate.low": 0.1})


def facts(**changes):
    return dataclasses.replace(GOOD, **changes)


REFUSED = {
    "critic": (recipe_of("ppo"), facts(has_critic=False)),
    "values": (recipe_of("spo"), facts(has_critic=False, columns=frozenset())),
    "untrained_critic": (recipe_of("ppo", value="none"), GOOD),
    "critic_without_targets": (recipe_of("grpo", value="value_mse"), GOOD),
    "reference": (recipe_of("grpo"), facts(has_reference=False)),
    "teacher": (recipe_of("kdrl"), facts(has_teacher=False)),
    "columns": (recipe_of("mt-grpo"), facts(columns=frozenset())),
    "kl_twice": (recipe_of("grpo", token_reward="kl_in_reward"), GOOD),
    "kl_two_estimators": (recipe_of("grpo", penalty=["kl_k2", "kl_k3"]), GOOD),
    "k1_in_loss": (recipe_of("grpo", penalty="kl_k1"), GOOD),
    "group_of_one": (recipe_of("dr-grpo"), facts(group_size=1)),
    "mixed_groups_of_one": (recipe_of("dapo", advantage="constant_baseline"), facts(group_size=1)),
    "single_rollout": (recipe_of("sao"), GOOD),
    "downsampling": (recipe_of("pods"), facts(group_size=1)),
    "dynamic_sampling_cap": (recipe_of("dapo", **{"select": {"mixed_groups": {"max_rounds": None}}}), GOOD),
    "dynamic_sampling_at_cap": (recipe_of("dapo", **{"select": {"mixed_groups": {"at_cap": "wait"}}}), GOOD),
    "truncated_sampling": (recipe_of("grpo"), facts(top_p=0.9)),
    "greedy_sampling": (recipe_of("grpo"), facts(temperature=0.0)),
    "raw_log_probs": (recipe_of("grpo"), facts(log_prob_kind="raw", temperature=0.7)),
    "constant_length": (recipe_of("dr-grpo"), facts(max_tokens=4096)),
    "overlong_window": (
        compose({"recipe": "dapo-soft-overlong", "reward": {"soft_overlong": {"max_length": 5, "cache": 9}}}),
        GOOD,
    ),
    "sequence_ratio_token_credit": (recipe_of("ppo", ratio="sequence_geomean"), GOOD),
    "sequence_product_length": (recipe_of("grpo", ratio="sequence_product"), facts(max_tokens=4096)),
    "on_policy_reuse": (recipe_of("rloo"), facts(updates_per_batch=4)),
    "on_policy_stale": (recipe_of("reinforce"), facts(max_lag=1)),
    "idle_ratio": (recipe_of("rloo", ratio="token"), GOOD),
    "ratio_without_gradient": (recipe_of("grpo", ratio="on_policy"), GOOD),
    "idle_correction": (recipe_of("grpo", correction="truncated"), GOOD),
    "local_statistics": (recipe_of("reinforce++"), facts(whole_batch_on_every_rank=False)),
    "scope": (recipe_of("vapo", **{"imitation": {"nll": {"on": "winners"}}}), GOOD),
    "ranges": (recipe_of("ppo", **{"advantage.gamma": 1.2}), GOOD),
    "intervals": (
        recipe_of("grpo-decoupled", correction={"operator": "masked", "low": 2.0, "high": 1.0}),
        GOOD,
    ),
    "levels": (recipe_of("grpo-decoupled", **{"correction.level": "sequence"}), GOOD),
    "correction_product_length": (
        recipe_of("grpo-decoupled", **{"correction.level": "sequence_product"}),
        GOOD,
    ),
    "shared_critic": (recipe_of("sao"), facts(group_size=1, shared_critic=True)),
    "critic_warmup": (recipe_of("ppo"), facts(critic_warmup=2, shared_critic=True)),
    "compared_rewards": (recipe_of("kimi-length", advantage="constant_baseline"), facts(group_size=1)),
    "clip_range": (recipe_of("grpo", **{"surrogate.low": 1.5}), GOOD),
    "dual_clip": (recipe_of("grpo", **{"surrogate.dual": 0.5}), GOOD),
    "nothing_to_minimise": (recipe_of("opd", teacher="none"), GOOD),
    "numbers": (RECIPES["dr-grpo"], GOOD),
    "adapters_on_nothing": (RECIPES["grpo"], facts(adapter_rank=8, random_policy=True)),
}


def test_every_refusal_has_a_case():
    assert set(REFUSED) == {r.name for r in REFUSALS}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_meaningless_combination_is_refused_in_one_clear_sentence(name):
    recipe, run = REFUSED[name]
    rule = next(r for r in REFUSALS if r.name == name)
    detail = rule.when(recipe, run)
    assert detail
    sentence = rule.sentence.format(recipe=recipe, run=run, detail=detail)
    assert sentence in problems(recipe, run)
    with pytest.raises(ConfigError) as caught:
        check(recipe, run)
    assert sentence in str(caught.value)
    assert "{" not in sentence


WORTHLESS = [
    ("sapo", "surrogate.tau_positive", 0.0),
    ("grpo", "advantage.ddof", 2),
    ("grpo", "advantage.epsilon", -1e-6),
    ("grpo", "penalty.kl_k3.coefficient", -0.1),
    ("grpo", "penalty.kl_k3.target", 0.0),
    ("dr-grpo", "reduction.max_length", 0),
    ("cppo", "prune.prune_small_advantage.keep", 0.0),
    ("cppo", "prune.prune_small_advantage.keep", 1.5),
    ("lopti", "token_weight.probability_weight.alpha", 2.0),
    ("highent", "token_weight.forking_tokens.share", 1.1),
    ("vapo", "advantage.alpha", 0.0),
    ("vapo", "critic_steps", 0),
    ("vapo", "value_coefficient", -1.0),
    ("ppo", "value.clip", 0.0),
    ("actor-critic", "advantage.n", 0),
    ("grpo-decoupled", "correction.cap", 0.0),
    ("drpo", "advantage.temperature", 0.0),
    ("grpo-lambda", "advantage.decay", 1.01),
    ("rlad", "ratio.student", -0.1),
    ("luffy", "surrogate.shape", 0.0),
    ("dcpo", "surrogate.cap", 0.5),
    ("s-grpo", "reward.exit_decay.base", 0.0),
    ("risk-po", "advantage.low", 0.0),
    ("grpo", "max_lag", -1),
]


@pytest.mark.parametrize(("name", "key", "value"), WORTHLESS)
def test_a_number_that_means_nothing_is_refused_by_name(name, key, value):
    recipe = recipe_of(name, **{key: value})
    (found,) = problems(recipe, facts(group_size=recipe.group_size or 8))
    assert key.rsplit(".", 1)[-1] in found
    assert f"{value:g}" in found
    check(recipe_of(name), facts(group_size=recipe.group_size or 8))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("surrogate.low", "wide", "is not float"),
        ("surrogate.low", True, "is not float"),
        ("surrogate.dual", [1.0], "is not float or None"),
        ("advantage.ddof", 0.5, "is not int"),
        ("advantage.epsilon", float("nan"), "finite"),
        ("penalty.kl_k3.coefficient", float("inf"), "finite"),
        ("value_coefficient", float("nan"), "wrong type"),
    ],
)
def test_a_value_of_another_kind_is_refused_when_the_recipe_is_composed(key, value, said):
    with pytest.raises(ConfigError, match=said):
        compose({"recipe": "grpo", key: value})


INCOMPATIBLE = {
    "a group of one": (
        {},
        {"group_size": 1},
        lambda r: (
            r.group_size != 1
            and (
                (r.advantage.operator in GROUP_RELATIVE and r.has_advantage)
                or any(c.operator in ("mixed_groups", "max_variance") for c in r.select)
                or any(c.operator in COMPARED_REWARDS for c in r.reward)
            )
        ),
    ),
    "no reference": ({}, {"has_reference": False}, lambda r: r.needs_reference),
    "no teacher": ({}, {"has_teacher": False}, lambda r: r.needs_teacher),
    "no critic": (
        {},
        {"has_critic": False, "columns": OPTIONAL_COLUMNS - {"values_N"}},
        lambda r: r.value is not None or "values_N" in r.columns,
    ),
    "no columns": ({}, {"columns": frozenset()}, lambda r: bool(r.columns - FOLLOW)),
    "greedy rollouts": ({}, {"temperature": 0.0}, lambda r: r.surrogate is not None),
    "top_p": ({}, {"top_p": 0.9}, lambda r: r.surrogate is not None),
    "stale evidence": (
        {},
        {"max_lag": 2},
        lambda r: r.surrogate is not None and r.ratio.operator == "on_policy",
    ),
    "several updates": (
        {},
        {"updates_per_batch": 4},
        lambda r: r.surrogate is not None and r.ratio.operator == "on_policy",
    ),
    "both KL placements": (
        {"token_reward": ["kl_in_reward"], "penalty": ["kl_k3"]},
        {},
        lambda r: True,
    ),
    "k1 in the loss": ({"penalty": ["kl_k1"]}, {}, lambda r: True),
    "a sequence ratio over GAE": (
        {
            "ratio": "sequence_geomean",
            "surrogate": "ppo_clip",
            "advantage": "gae_tokens",
            "value": "value_mse",
        },
        {},
        lambda r: True,
    ),
    "GAE without a critic": (
        {"advantage": "gae_tokens", "value": "none", "ratio": "token", "surrogate": "ppo_clip"},
        {},
        lambda r: True,
    ),
    "a critic without targets": (
        {"advantage": "group_centred", "value": "value_mse", "ratio": "token", "surrogate": "ppo_clip"},
        {},
        lambda r: True,
    ),
    "an idle correction": (
        {"old": "behaviour", "correction": "truncated", "ratio": "token", "surrogate": "ppo_clip"},
        {},
        lambda r: True,
    ),
    "a warm-up of a shared critic": (
        {},
        {"critic_warmup": 3, "shared_critic": True},
        lambda r: r.value is not None,
    ),
}
FOLLOW = {"values_N", "bootstrap_S", "ref_logp_N", "teacher_logp_N", "logb_N", "prox_logp_N", "lag_N"}


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_refuses_exactly_the_options_that_it_can_not_have(name):
    for what, (overrides, changes, refused) in INCOMPATIBLE.items():
        recipe = recipe_of(name, **overrides)
        found = problems(recipe, facts(**{"group_size": recipe.group_size or 8, **changes}))
        assert bool(found) == bool(refused(recipe)), f"{what}: {found}"
        assert all(":" in sentence or "use" in sentence.lower() for sentence in found), "it names the fix"


def test_all_problems_are_reported_at_once():
    found = problems(recipe_of("grpo"), RunFacts(group_size=1, top_p=0.9))
    assert len(found) == 3


def test_a_kept_set_that_is_recorded_allows_truncated_sampling():
    check(recipe_of("dapo"), facts(top_p=0.9, kept_set_recorded=True))


def test_a_recipe_knows_its_columns():
    assert RECIPES["grpo"].columns == {"logb_N", "ref_logp_N"}
    assert RECIPES["reinforce"].columns == frozenset()
    assert RECIPES["ppo"].live == {"values_N"}
    assert RECIPES["imitation"].columns == frozenset()
    assert recipe_of("grpo", old="proximal").columns == {"prox_logp_N", "ref_logp_N"}
    assert recipe_of("cispo", max_lag=1).columns == {"logb_N", "lag_N"}
    assert set(NUMBERS) <= set(RECIPES)


def test_layout_refuses_turns_that_go_back():
    with pytest.raises(ValueError, match="must not decrease"):
        Layout.of([3], turns=[0, 1, 0])
    assert Layout.of([2, 2], turns=[0, 1, 0, 1]).unit_N.tolist() == [0, 1, 2, 3]


def test_template_collapse_shows_where_entropy_does_not():
    same = torch.zeros(4, 4, dtype=torch.float64)
    assert diagnostics.distinguishability(same) == pytest.approx(0.0)
    apart = torch.full((4, 4), -50.0, dtype=torch.float64).fill_diagonal_(0.0)
    assert diagnostics.distinguishability(apart) == pytest.approx(1.3862943611)


def test_a_critic_report_shows_where_it_is_wrong():
    layout = Layout.of([4], turns=[0, 0, 1, 1])
    values_N = torch.tensor([0.5, 0.5, 1.0, 1.0], dtype=torch.float64)
    out = diagnostics.critic_report(values_N, torch.ones(4, dtype=torch.float64), layout, position_bins=2)
    assert out == {
        "critic/bias_position_0": -0.5,
        "critic/bias_position_1": 0.0,
        "critic/bias_turn_0": -0.5,
        "critic/bias_turn_1": 0.0,
    }
    calibrated = diagnostics.calibration(torch.tensor([0.25] * 4), torch.tensor([1.0, 0, 0, 0]))
    assert calibrated == pytest.approx(0.0)
    assert diagnostics.calibration(torch.tensor([0.9] * 4), torch.tensor([1.0, 0, 0, 0])) == pytest.approx(
        0.65
    )
