"""What is refused before a run starts: one table of combinations that are impossible or mean nothing, one
sentence each.

`check` looks at a recipe and at what the run can supply (`RunFacts`) and raises one `ConfigError` that lists
everything that is wrong, so that a run file is repaired in one go. Nothing here is discovered after the first
GPU hour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from agentrl.algo.advantages import GROUP_RELATIVE, PER_TOKEN
from agentrl.algo.axes import Number, numbers_of
from agentrl.algo.imitation import SCOPES
from agentrl.algo.penalties import KL_TO_REFERENCE
from agentrl.algo.ratios import LEVELS
from agentrl.algo.recipes import OPTIONAL_COLUMNS, Recipe
from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a run will do and can supply, as far as algorithms care."""

    group_size: int
    """Rollouts per prompt."""
    has_critic: bool = False
    has_reference: bool = False
    has_teacher: bool = False
    columns: frozenset[str] = OPTIONAL_COLUMNS
    """Optional columns that the run can fill, beyond those that follow from critic, reference and teacher."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    kept_set_recorded: bool = False
    """The sampler records which tokens top-p or top-k kept, so that the learner can replay the mask."""
    log_prob_kind: str = "processed"
    max_tokens: int | None = None
    """Largest number of generated tokens of a trajectory."""
    max_lag: int = 0
    """Largest staleness, in policy versions, that the run admits; 0 is synchronous."""
    updates_per_batch: int = 1
    shared_critic: bool = False
    """The critic is a head on the policy's trunk."""
    critic_warmup: int = 0
    """Updates that train only the critic."""
    adapter_rank: int = 0
    """Of the adapters that are trained in place of all weights; 0: there are none."""
    random_policy: bool = False
    """The policy's weights are drawn in the run, not those of a trained model."""
    whole_batch_on_every_rank: bool = True


def _has(recipe: Recipe, axis: str, *names: str) -> bool:
    return any(a == axis and op.name in names for a, op, _ in recipe.operators())


def _all(recipe: Recipe, key: str) -> list[tuple[str, Number]]:
    """Every number of that name, with the operator it belongs to."""
    out = []
    for _, op, choice in recipe.operators():
        numbers = {**op.defaults, **choice.numbers}
        if key in numbers:
            out.append((op.name, numbers[key]))
    return out


def _number(recipe: Recipe, axis: str, operator: str, key: str) -> Number:
    for a, op, choice in recipe.operators():
        if a == axis and op.name == operator:
            return {**op.defaults, **choice.numbers}.get(key)
    return None


def _outside(recipe: Recipe, keys: tuple[str, ...], low: float, high: float) -> bool:
    return any(
        isinstance(v, (int, float)) and not isinstance(v, bool) and not low <= v <= high
        for key in keys
        for _, v in _all(recipe, key)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """From `low` to `high`; `above`: without `low` itself, `below`: without `high`."""

    low: float = 0.0
    high: float = math.inf
    above: bool = False
    below: bool = False

    def holds(self, value: float) -> bool:
        low = value > self.low if self.above else value >= self.low
        return low and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.above else f"at least {self.low:g}"
        if math.isinf(self.high):
            return low
        return f"{low} and {'below' if self.below else 'at most'} {self.high:g}"


_POSITIVE, _NOT_NEGATIVE, _SHARE = Range(above=True), Range(), Range(high=1.0)

RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "coefficient": _NOT_NEGATIVE,
        "epsilon": _NOT_NEGATIVE,
        "ddof": _SHARE,
        "target": _POSITIVE,
        "gamma": _SHARE,
        "lambda_policy": _SHARE,
        "lambda_critic": _SHARE,
        "decay": _SHARE,
        "student": _SHARE,
        "share": _SHARE,
        "temperature": _POSITIVE,
        "concentration": _POSITIVE,
        "base": _POSITIVE,
        "cap": _POSITIVE,
        "clip": _POSITIVE,
        "shape": _POSITIVE,
        "sigma": _POSITIVE,
        "tau_positive": _POSITIVE,
        "tau_negative": _POSITIVE,
        "bins": Range(low=2),
        "n": Range(low=1),
        "max_length": Range(low=1),
        "short": Range(low=1),
        "long": Range(low=1),
        "at_most": _NOT_NEGATIVE,
        "gae_tokens.alpha": _POSITIVE,
        "gae_or_mean.alpha": _POSITIVE,
        "probability_weight.alpha": _SHARE,
        "teacher_interpolation.alpha": Range(high=1.0, below=True),
        "prune_small_advantage.keep": Range(high=1.0, above=True),
        "dynamic_clip.cap": Range(low=1),
        "mixed_value_at_risk.low": _POSITIVE,
        "mixed_value_at_risk.high": _SHARE,
    }
)
"""What a number may be, by its name or by `operator.name`, which goes first."""

INTERVALS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("masked", "hl_gauss", "clip_advantage", "teacher_magnitude", "mixed_value_at_risk"),
            ("low", "high"),
        ),
        "difficulty_budget": ("short", "long"),
    }
)
"""Operators with two numbers of which the first lies below the second."""
COMPARED_REWARDS = ("group_length_reward", "set_marginal", "frequency_weighted")
"""Rewards that look at the other members of the group."""


def _out_of_range(recipe: Recipe) -> list[str]:
    out = []
    for axis, op, choice in recipe.operators():
        for key, value in {**op.defaults, **choice.numbers}.items():
            allowed = RANGES.get(f"{op.name}.{key}") or RANGES.get(key)
            if allowed is None or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if not allowed.holds(value):
                out.append(f"{axis}.{op.name}.{key} = {value:g} is not {allowed}")
    for key, allowed in (
        ("critic_steps", Range(low=1)),
        ("max_lag", _NOT_NEGATIVE),
        ("value_coefficient", _NOT_NEGATIVE),
        ("group_size", Range(low=1)),
    ):
        value = getattr(recipe, key)
        if value is not None and not allowed.holds(value):
            out.append(f"{key} = {value:g} is not {allowed}")
    return out


def _upside_down(recipe: Recipe) -> list[str]:
    """Intervals without an inside."""
    out = []
    for axis, op, choice in recipe.operators():
        numbers = {**op.defaults, **choice.numbers}
        names = INTERVALS.get(op.name)
        if names is None:
            continue
        low, high = (numbers.get(name) for name in names)
        if isinstance(low, int | float) and isinstance(high, int | float) and not low < high:
            out.append(f"{axis}.{op.name}: {names[0]} = {low} is not below {names[1]} = {high}")
    return out


def _levels(recipe: Recipe) -> list[str]:
    return [f"{op} = {level!r}" for op, level in _all(recipe, "level") if level not in LEVELS]


def _missing_numbers(recipe: Recipe) -> list[str]:
    out = []
    for axis, op, choice in recipe.operators():
        try:
            numbers_of(op, choice)
        except ConfigError:
            out += [f"{axis}.{op.name}.{key}" for key in op.required if choice.numbers.get(key) is None]
    return out


def _missing_columns(recipe: Recipe, run: RunFacts) -> list[str]:
    follows = {"values_N", "bootstrap_S", "ref_logp_N", "teacher_logp_N", "logb_N", "prox_logp_N", "lag_N"}
    return sorted(recipe.columns - run.columns - follows)


def _ratio_level(recipe: Recipe) -> str:
    return recipe.ratio.operator if recipe.surrogate is not None else "none"


def _entry(*, at_cap: bool, recipe: Recipe) -> bool:
    if not _has(recipe, "select", "mixed_groups"):
        return False
    if at_cap:
        return _number(recipe, "select", "mixed_groups", "at_cap") not in ("train", "skip")
    rounds = _number(recipe, "select", "mixed_groups", "max_rounds")
    return not isinstance(rounds, int) or rounds < 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One rule. `sentence` may use `{recipe}`, `{run}` and `{detail}`."""

    name: str
    when: Callable[[Recipe, RunFacts], object]
    """Truthy when the combination is refused; its value is `{detail}`."""
    sentence: str


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        name="numbers",
        when=lambda r, _: ", ".join(_missing_numbers(r)),
        sentence="{detail} must be set: the method has no default for it.",
    ),
    Refusal(
        name="critic",
        when=lambda r, f: r.value is not None and not f.has_critic,
        sentence="Recipe '{recipe.name}' trains a critic, and the run has none: give it one, or set value to "
        '"none" and an advantage that reads no values.',
    ),
    Refusal(
        name="values",
        when=lambda r, f: "values_N" in r.columns and not f.has_critic and "values_N" not in f.columns,
        sentence="Recipe '{recipe.name}' reads values and the run has neither a critic nor Monte-Carlo "
        "values: give Learner.update(extra=...) some, or choose a recipe that trains a critic.",
    ),
    Refusal(
        name="untrained_critic",
        when=lambda r, _: _has(r, "advantage", "gae_tokens", "gae_or_mean", "n_step") and r.value is None,
        sentence="The advantage bootstraps from a critic that no value loss trains: set value.",
    ),
    Refusal(
        name="critic_without_targets",
        when=lambda r, _: (
            r.value is not None
            and not _has(r, "advantage", "gae_tokens", "gae_turns", "gae_or_mean", "n_step")
        ),
        sentence="value is set, but advantage '{recipe.advantage.operator}' makes no targets for a critic: "
        "remove value.",
    ),
    Refusal(
        name="reference",
        when=lambda r, f: r.needs_reference and not f.has_reference,
        sentence="Recipe '{recipe.name}' has a KL to a reference, and the run has none: add one or drop the "
        "penalty.",
    ),
    Refusal(
        name="teacher",
        when=lambda r, f: r.needs_teacher and not f.has_teacher,
        sentence="Recipe '{recipe.name}' needs a teacher, and the run has none: set teacher.source to a "
        "model with the policy's tokenizer.",
    ),
    Refusal(
        name="columns",
        when=lambda r, f: ", ".join(_missing_columns(r, f)),
        sentence="Recipe '{recipe.name}' needs {detail}, which this run does not produce: choose another "
        "recipe, or give Learner.update(extra=...) the column.",
    ),
    Refusal(
        name="kl_twice",
        when=lambda r, _: _has(r, "token_reward", "kl_in_reward") and _has(r, "penalty", *KL_TO_REFERENCE),
        sentence="The KL to the reference is in the reward and in the loss: keep exactly one.",
    ),
    Refusal(
        name="kl_two_estimators",
        when=lambda r, _: sum(op.name in KL_TO_REFERENCE for a, op, _ in r.operators() if a == "penalty") > 1,
        sentence="Two KL penalties to the same reference are in the loss: keep one estimator.",
    ),
    Refusal(
        name="k1_in_loss",
        when=lambda r, _: _has(r, "penalty", "kl_k1"),
        sentence="k1 in the loss has gradient 1 per token, zero in expectation: use kl_k2, kl_k3 or "
        "kl_in_reward.",
    ),
    Refusal(
        name="group_of_one",
        when=lambda r, f: _has(r, "advantage", *GROUP_RELATIVE) and f.group_size < 2,
        sentence="Advantage '{recipe.advantage.operator}' compares members of a group, and group_size is "
        "{run.group_size}: set it to 2 or more.",
    ),
    Refusal(
        name="mixed_groups_of_one",
        when=lambda r, f: _has(r, "select", "mixed_groups", "max_variance") and f.group_size < 2,
        sentence="Selection by reward spread needs at least two members per prompt, group_size is "
        "{run.group_size}: raise it.",
    ),
    Refusal(
        name="single_rollout",
        when=lambda r, f: r.group_size is not None and f.group_size != r.group_size,
        sentence="Recipe '{recipe.name}' is defined for group_size {recipe.group_size}, the run has "
        "{run.group_size}: set it to {recipe.group_size}.",
    ),
    Refusal(
        name="downsampling",
        when=lambda r, f: (
            _has(r, "select", "max_variance")
            and not 2 <= int(str(_number(r, "select", "max_variance", "keep") or 0)) <= f.group_size
        ),
        sentence="select.max_variance.keep must be at least 2 and at most group_size ({run.group_size}): "
        "change one of them.",
    ),
    Refusal(
        name="dynamic_sampling_cap",
        when=lambda r, _: _entry(at_cap=False, recipe=r),
        sentence="Dynamic sampling without a cap can run forever: set select.mixed_groups.max_rounds to 1 or "
        "more.",
    ),
    Refusal(
        name="dynamic_sampling_at_cap",
        when=lambda r, _: _entry(at_cap=True, recipe=r),
        sentence='select.mixed_groups.at_cap must be "train" (on what there is) or "skip".',
    ),
    Refusal(
        name="truncated_sampling",
        when=lambda r, f: (
            r.surrogate is not None and (f.top_p < 1.0 or f.top_k > 0) and not f.kept_set_recorded
        ),
        sentence="top_p {run.top_p} / top_k {run.top_k} change the sampled distribution and the kept set is "
        "not recorded: "
        "log-probs would not be those of the policy. Use top_p = 1, top_k = 0.",
    ),
    Refusal(
        name="greedy_sampling",
        when=lambda r, f: r.surrogate is not None and f.temperature <= 0.0,
        sentence="Greedy rollouts (temperature 0) have no score function: set a temperature above 0.",
    ),
    Refusal(
        name="raw_log_probs",
        when=lambda r, f: (
            "logb_N" in r.columns
            and f.log_prob_kind == "raw"
            and (f.temperature != 1.0 or f.top_p < 1.0 or f.top_k > 0)
        ),
        sentence="The engine reports raw log-probs at temperature {run.temperature}: they are not those of "
        "the sampled "
        "distribution. Ask it for processed log-probs.",
    ),
    Refusal(
        name="constant_length",
        when=lambda r, f: (
            f.max_tokens is not None
            and isinstance(_number(r, "reduction", "constant", "max_length"), int)
            and int(str(_number(r, "reduction", "constant", "max_length"))) < f.max_tokens
        ),
        sentence="reduction.constant.max_length is below the run's max_tokens {run.max_tokens}: it must be "
        "the constant bound.",
    ),
    Refusal(
        name="overlong_window",
        when=lambda r, _: (
            _has(r, "reward", "soft_overlong")
            and not 0
            < int(str(_number(r, "reward", "soft_overlong", "cache") or 0))
            <= int(str(_number(r, "reward", "soft_overlong", "max_length") or 0))
        ),
        sentence="reward.soft_overlong needs 0 < cache <= max_length.",
    ),
    Refusal(
        name="sequence_ratio_token_credit",
        when=lambda r, _: (
            _ratio_level(r) in ("sequence_geomean", "sequence_product") and _has(r, "advantage", *PER_TOKEN)
        ),
        sentence="Ratio '{recipe.ratio.operator}' gives a trajectory one number, advantage "
        "'{recipe.advantage.operator}' "
        "gives each token its own: use a token ratio, or sequence_geomean_token.",
    ),
    Refusal(
        name="sequence_product_length",
        when=lambda r, f: (
            _ratio_level(r) == "sequence_product" and (f.max_tokens is None or f.max_tokens > 512)
        ),
        sentence="sequence_product multiplies the ratios of all tokens and vanishes or explodes on long "
        "trajectories: "
        "use sequence_geomean (they are different definitions).",
    ),
    Refusal(
        name="on_policy_reuse",
        when=lambda r, f: _ratio_level(r) == "on_policy" and f.updates_per_batch > 1,
        sentence="Recipe '{recipe.name}' has no importance ratio, and the run updates "
        "{run.updates_per_batch} times per "
        "batch: set updates_per_batch = 1 or ratio = token with a surrogate that uses it.",
    ),
    Refusal(
        name="on_policy_stale",
        when=lambda r, f: _ratio_level(r) == "on_policy" and f.max_lag > 0,
        sentence="Recipe '{recipe.name}' has no importance ratio, and the run admits evidence {run.max_lag} "
        "versions old: set rollout.max_lag = 0, or ratio = token with a surrogate that uses it.",
    ),
    Refusal(
        name="idle_ratio",
        when=lambda r, _: _has(r, "surrogate", "reinforce") and _ratio_level(r) != "on_policy",
        sentence="Surrogate 'reinforce' does not read the ratio '{recipe.ratio.operator}': use on_policy, or "
        "another surrogate.",
    ),
    Refusal(
        name="ratio_without_gradient",
        when=lambda r, _: (
            _ratio_level(r) == "on_policy"
            and _has(r, "surrogate", "ppo_clip", "dynamic_clip", "mixed_policy")
        ),
        sentence="Clipping a ratio that is always 1 clips nothing: use ratio = token.",
    ),
    Refusal(
        name="idle_correction",
        when=lambda r, _: r.correction is not None and r.surrogate is not None and r.old == "behaviour",
        sentence='A behaviour correction needs the ratio against the proximal policy: set old = "proximal".',
    ),
    Refusal(
        name="local_statistics",
        when=lambda r, f: r.batch_wide and not f.whole_batch_on_every_rank,
        sentence="Recipe '{recipe.name}' has statistics over the whole batch: every rank must prepare all "
        "trajectories.",
    ),
    Refusal(
        name="scope",
        when=lambda r, _: ", ".join(f"{op}.on = {v}" for op, v in _all(r, "on") if v not in SCOPES),
        sentence="{detail} is no scope: use trained, graded, positive or all_fail.",
    ),
    Refusal(
        name="ranges",
        when=lambda r, _: "; ".join(_out_of_range(r)),
        sentence="Numbers out of range, to be changed: {detail}.",
    ),
    Refusal(
        name="intervals",
        when=lambda r, _: "; ".join(_upside_down(r)),
        sentence="An interval without an inside, to be changed: {detail}.",
    ),
    Refusal(
        name="levels",
        when=lambda r, _: ", ".join(_levels(r)),
        sentence="level of {detail} is none: use " + ", ".join(LEVELS) + ".",
    ),
    Refusal(
        name="correction_product_length",
        when=lambda r, f: (
            any(level == "sequence_product" for _, level in _all(r, "level"))
            and (f.max_tokens is None or f.max_tokens > 512)
        ),
        sentence="A correction at level sequence_product vanishes or explodes on long trajectories: use "
        "token or sequence_geomean.",
    ),
    Refusal(
        name="shared_critic",
        when=lambda r, f: (
            r.value is not None and f.shared_critic and (r.critic_steps > 1 or r.critic_freezes_attention)
        ),
        sentence="Recipe '{recipe.name}' takes {recipe.critic_steps} critic steps per policy step or "
        "freezes the critic's attention, and a shared critic moves with the policy: set train.critic to "
        '"separate".',
    ),
    Refusal(
        name="critic_warmup",
        when=lambda r, f: r.value is not None and f.shared_critic and f.critic_warmup > 0,
        sentence="train.critic_warmup_updates trains a critic before the policy, and a shared one moves with "
        'it: set it to 0, or train.critic to "separate".',
    ),
    Refusal(
        name="adapters_on_nothing",
        when=lambda r, f: f.adapter_rank > 0 and f.random_policy,
        sentence="Adapters of rank {run.adapter_rank} would stand on weights drawn at random, which stay as "
        "they are: set policy.source to a trained model, or train.lora.rank to 0.",
    ),
    Refusal(
        name="compared_rewards",
        when=lambda r, f: _has(r, "reward", *COMPARED_REWARDS) and f.group_size < 2,
        sentence="The reward compares members of a group, and group_size is {run.group_size}: set it to 2 or "
        "more.",
    ),
    Refusal(
        name="clip_range",
        when=lambda r, _: (
            _has(r, "surrogate", "ppo_clip", "double_sided", "cispo", "mixed_policy")
            and (_outside(r, ("low",), 0.0, 1.0) or _outside(r, ("high",), 0.0, float("inf")))
        ),
        sentence="A lower clip lies between 0 and 1 and an upper clip is not negative; they are distances "
        "from 1.",
    ),
    Refusal(
        name="dual_clip",
        when=lambda r, _: _outside(r, ("dual",), 1.0 + 1e-9, float("inf")),
        sentence="Dual clip bounds the loss of negative advantages at c |A| and needs c > 1.",
    ),
    Refusal(
        name="nothing_to_minimise",
        when=lambda r, _: r.surrogate is None and not (r.teacher or r.imitation or r.value or r.penalty),
        sentence="Recipe '{recipe.name}' has no component: choose a surrogate, a teacher or an imitation "
        "term.",
    ),
)


def problems(recipe: Recipe, run: RunFacts) -> tuple[str, ...]:
    """All sentences that apply, in the order of the table."""
    out = []
    for refusal in REFUSALS:
        detail = refusal.when(recipe, run)
        if detail:
            out.append(refusal.sentence.format(recipe=recipe, run=run, detail=detail))
    return tuple(out)


def check(recipe: Recipe, run: RunFacts) -> None:
    """Raise one `ConfigError` with every problem, or return."""
    found = problems(recipe, run)
    if found:
        raise ConfigError(" ".join(found), fix="Change the algorithm section of the run file.")
