"""A recipe is a row of data: one choice on each axis, numbers, and where it comes from. No recipe has code of
its own.

`RECIPES` is the table that `agentrl recipes` prints; `compose` is how a run file takes a row and changes an
axis or a number; what makes no sense together is refused in `refusals.py`. A recipe knows which columns of
evidence it needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Literal, cast

from agentrl.algo.advantages import ADVANTAGE, BATCH_WIDE
from agentrl.algo.axes import Choice, Number, Operator, check_kind, choose, numbers_of, resolve
from agentrl.algo.critic_losses import VALUE
from agentrl.algo.imitation import IMITATION
from agentrl.algo.penalties import PENALTY, band
from agentrl.algo.ratios import CORRECTION, RATIO
from agentrl.algo.reductions import REDUCTION, TOKEN_WEIGHT
from agentrl.algo.rewards import REWARD, TOKEN_REWARD
from agentrl.algo.select import PRUNE, SELECT
from agentrl.algo.surrogates import SURROGATE
from agentrl.algo.teacher import SHAPING, TEACHER
from agentrl.errors import ConfigError, nearest

Old = Literal["behaviour", "proximal"]

AXES: Mapping[str, Mapping[str, Operator]] = MappingProxyType(
    {
        "select": SELECT,
        "reward": REWARD,
        "token_reward": TOKEN_REWARD,
        "advantage": ADVANTAGE,
        "shaping": SHAPING,
        "prune": PRUNE,
        "token_weight": TOKEN_WEIGHT,
        "ratio": RATIO,
        "correction": CORRECTION,
        "surrogate": SURROGATE,
        "reduction": REDUCTION,
        "penalty": PENALTY,
        "teacher": TEACHER,
        "imitation": IMITATION,
        "value": VALUE,
        "value_reduction": REDUCTION,
    }
)
"""Axis name to its operators, in the order in which the batch passes through them."""

LISTS = frozenset(
    {
        "select",
        "reward",
        "token_reward",
        "shaping",
        "prune",
        "token_weight",
        "penalty",
        "teacher",
        "imitation",
    }
)
"""Axes on which several operators follow one another."""

OPTIONAL_COLUMNS = frozenset(
    {
        "logb_N",
        "prox_logp_N",
        "ref_logp_N",
        "teacher_logp_N",
        "prm_logp_N",
        "values_N",
        "bootstrap_S",
        "entropy_N",
        "turn_reward_N",
        "potential_N",
        "components_SK",
        "greedy_reward_S",
        "off_policy_S",
        "density_S",
        "answer_S",
        "exit_index_S",
        "first_attempt_S",
        "history_mean_S",
        "history_std_S",
        "history_step_S",
        "node_value_N",
    }
)
"""Columns that a batch may lack (`objective.Columns`); a recipe that needs one is refused without it."""

RUN_COLUMNS = frozenset(
    {
        "logb_N",
        "prox_logp_N",
        "entropy_N",
        "turn_reward_N",
        "components_SK",
        "greedy_reward_S",
    }
)
"""Optional columns that a run of a run file fills by itself, beyond those of its critic, reference and
teacher. `components_SK` is there where all graders name the same components. Any other is given to
`Learner.update(extra=...)`."""

LIVE = MappingProxyType(
    {
        "live_entropy_N": "entropy_N",
        "live_values_N": "values_N",
        "live_ref_kl_N": "ref_kl_N",
        "live_teacher_divergence_N": "teacher_divergence_N",
    }
)
"""Operator columns that come from the current model with gradient, and the argument of `objective.loss` they
arrive in."""


_ZSCORE, _TOKEN, _CLIP, _TOKEN_MEAN = (choose(n) for n in ("group_zscore", "token", "ppo_clip", "token_mean"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One row. Axes hold choices, everything else is a number or a sentence."""

    name: str
    paper: str
    """Authors and year, or where the idea is described."""
    arxiv: str | None
    """arXiv id, None where there is none or it is not known."""
    equation: str
    differs: str
    """How this differs from the paper; "nothing" if it does not."""

    select: tuple[Choice, ...] = ()
    reward: tuple[Choice, ...] = ()
    token_reward: tuple[Choice, ...] = ()
    advantage: Choice = _ZSCORE
    shaping: tuple[Choice, ...] = ()
    prune: tuple[Choice, ...] = ()
    token_weight: tuple[Choice, ...] = ()
    ratio: Choice = _TOKEN
    old: Old = "behaviour"
    """Denominator of the ratio: the log-probs recorded at sampling, or those the learner recomputed before
    the update."""
    correction: Choice | None = None
    surrogate: Choice | None = _CLIP
    """None: there is no policy component (pure distillation, pure imitation)."""
    reduction: Choice = _TOKEN_MEAN
    penalty: tuple[Choice, ...] = ()
    teacher: tuple[Choice, ...] = ()
    imitation: tuple[Choice, ...] = ()
    value: Choice | None = None
    value_reduction: Choice = _TOKEN_MEAN
    value_coefficient: float = 0.5
    max_lag: int | None = None
    """Tokens more than this many policy versions old leave the loss (and its denominator). None: no bound
    here."""
    floor_batch_loss: bool = False
    """Skip the policy component when its batch loss at ratio 1 is negative (AGPO)."""
    critic_steps: int = 1
    """Critic updates per policy update."""
    critic_freezes_attention: bool = False
    group_size: int | None = None
    """Members per prompt that the method is defined for; None: any number above 1."""

    def choices(self) -> Iterable[tuple[str, Choice]]:
        """All choices with their axis, in order."""
        for axis in AXES:
            value = getattr(self, axis)
            if isinstance(value, Choice):
                yield axis, value
            elif value is not None:
                for choice in value:
                    yield axis, choice

    def operators(self) -> Iterable[tuple[str, Operator, Choice]]:
        """The choices that take part, looked up: a recipe without policy component reads no ratio, and so
        on."""
        idle: set[str] = set()
        if self.surrogate is None:
            idle |= {"ratio", "correction"}
        if not self.has_advantage:
            idle |= {"advantage", "shaping"}
        if self.value is None:
            idle.add("value_reduction")
        for axis, choice in self.choices():
            if axis not in idle:
                yield axis, resolve(axis, AXES[axis], choice), choice

    @property
    def has_advantage(self) -> bool:
        """Whether anything reads the advantage: a policy loss, or a critic's targets."""
        return self.surrogate is not None or self.value is not None

    @property
    def columns(self) -> frozenset[str]:
        """Optional columns that this recipe can not do without."""
        wanted: set[str] = set()
        for _, operator, _ in self.operators():
            wanted |= set(operator.columns)
        if "off_policy_N" in wanted:
            wanted.add("off_policy_S")
        if "old_logp_N" in wanted:
            wanted.add("logb_N" if self.old == "behaviour" else "prox_logp_N")
        if self.max_lag is not None:
            wanted.add("lag_N")
        return frozenset(wanted & (OPTIONAL_COLUMNS | {"lag_N"}))

    @property
    def live(self) -> frozenset[str]:
        """Arguments that `objective.loss` needs beside `logp_N`."""
        return frozenset(LIVE[c] for _, op, _ in self.operators() for c in op.columns if c in LIVE)

    @property
    def needs_critic(self) -> bool:
        """Whether it trains one. A recipe that only reads values (Monte-Carlo ones, those of a scorer) is
        given them."""
        return self.value is not None

    @property
    def needs_reference(self) -> bool:
        return "ref_logp_N" in self.columns or "ref_kl_N" in self.live

    @property
    def needs_teacher(self) -> bool:
        return "teacher_logp_N" in self.columns or "teacher_divergence_N" in self.live

    @property
    def bands(self) -> dict[str, tuple[float, float]]:
        """Components whose coefficient adapts, with the band of their KL in which it stays."""
        targets = {
            op.name: numbers_of(op, c).get("target") for a, op, c in self.operators() if a == "penalty"
        }
        return {f"penalty/{name}": band(t) for name, t in targets.items() if isinstance(t, int | float)}

    @property
    def batch_wide(self) -> bool:
        """Whether a statistic spans the whole batch, so that each rank must prepare all trajectories of the
        step."""
        names = {op.name for _, op, _ in self.operators()}
        whitens = any(bool(c.numbers.get("whiten")) for _, c in self.choices())
        return bool(names & (BATCH_WIDE | {"whiten", "forking_tokens"})) or whitens or self.floor_batch_loss

    def number(self, axis: str, operator: str, key: str) -> Number:
        """The value of one number with its default; `KeyError` if that operator is not chosen."""
        for a, op, choice in self.operators():
            if a == axis and op.name == operator:
                return numbers_of(op, choice)[key]
        raise KeyError(f"{axis}.{operator}.{key}")


# ----------------------------------------------------------------------------------------------- overrides

_NUMBERS = {
    f.name: f
    for f in fields(Recipe)
    if f.name not in AXES and f.name not in ("name", "paper", "arxiv", "equation", "differs")
}
_NONE = "none"
"""The word for an axis left empty."""


def get(name: str) -> Recipe:
    """The recipe of that name; `ConfigError` with the nearest name."""
    recipe = RECIPES.get(name)
    if recipe is None:
        raise ConfigError(f"No recipe '{name}'.", fix=nearest(name, RECIPES))
    return recipe


def compose(overrides: Mapping[str, object], base: str | Recipe | None = None) -> Recipe:
    """A recipe with changed axes and numbers, from the algorithm section of a run file.

    Keys: `recipe` (the base row, unless `base` is given), an axis, or a number of the recipe (`max_lag`,
    `old`, ...). An axis takes an operator name (`"none"` empties it), a table of numbers for the operator it
    has (with `operator` to change it too), or, on axes that hold several, a list of those or a table
    `{operator: numbers | true | false}` that edits the list. `"surrogate.low"` is short for `{"surrogate":
    {"low": ...}}`.

    Raises:
        ConfigError: an unknown recipe, axis, operator or number (with the nearest), or a value of the wrong
            kind.
    """
    tree = _unfold(overrides)
    chosen = tree.pop("recipe", None)
    if base is None:
        if not isinstance(chosen, str):
            raise ConfigError(
                "The algorithm section names no recipe.", fix=f"Set recipe to one of: {', '.join(RECIPES)}."
            )
        base = chosen
    recipe = get(base) if isinstance(base, str) else base
    changes: dict[str, object] = {}
    for key, value in tree.items():
        if key in AXES:
            changes[key] = _several(recipe, key, value) if key in LISTS else _single(recipe, key, value)
        elif key in _NUMBERS:
            changes[key] = _scalar(recipe, key, value)
        else:
            raise ConfigError(
                f"Unknown key '{key}' in the algorithm section.",
                fix=nearest(key, {*AXES, *_NUMBERS, "recipe"}),
            )
    result = replace(recipe, **changes)  # type: ignore[arg-type]
    for _, operator, choice in result.operators():
        numbers_of(operator, choice)
    return result


def _own(value: object) -> object:
    """Tables copied, so that composing never writes into the run file's data."""
    return {str(k): _own(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _unfold(overrides: Mapping[str, object]) -> dict[str, object]:
    """`{"a.b": 1}` to `{"a": {"b": 1}}`."""
    tree: dict[str, object] = {}
    for key, value in overrides.items():
        *parents, last = key.split(".")
        node = tree
        for part in parents:
            below = node.setdefault(part, {})
            if not isinstance(below, dict):
                raise ConfigError(f"'{key}' is set twice, as a word and as a table.", fix="Use one table.")
            node = below
        if last in node:
            raise ConfigError(f"'{key}' is set twice.", fix="Keep one of the two.")
        node[last] = _own(value)
    return tree


def _scalar(recipe: Recipe, key: str, value: object) -> object:
    current = getattr(recipe, key)
    if key == "old":
        if value not in ("behaviour", "proximal"):
            raise ConfigError(f"old = {value!r} is not a policy.", fix='Use "behaviour" or "proximal".')
        return value
    if isinstance(current, bool):
        fits = isinstance(value, bool)
    elif isinstance(current, float):
        fits = isinstance(value, (int, float)) and not isinstance(value, bool)
        value = float(cast(float, value)) if fits else value
    else:
        fits = value is None or (isinstance(value, int) and not isinstance(value, bool))
    if not fits or (isinstance(value, float) and not math.isfinite(value)):
        raise ConfigError(
            f"{key} = {value!r} has the wrong type.", fix=f"It is {current!r} in recipe '{recipe.name}'."
        )
    return value


def _choice(axis: str, operator: object, numbers: Mapping[str, object], old: Choice | None) -> Choice:
    if not isinstance(operator, str):
        raise ConfigError(
            f"{axis} names its operator with a word, not {operator!r}.", fix=nearest("", AXES[axis])
        )
    kept = dict(old.numbers) if old is not None and old.operator == operator else {}
    clean: dict[str, Number] = {}
    for key, value in numbers.items():
        if isinstance(value, list) and all(isinstance(v, (int, float)) for v in value):
            value = tuple(float(v) for v in value)
        if not isinstance(value, (int, float, str, tuple, type(None))):
            raise ConfigError(
                f"{axis}.{operator}.{key} = {value!r} is not a number.", fix="Give a number or a word."
            )
        clean[key] = cast(Number, value)
    choice = choose(operator, **{**kept, **clean})
    row = resolve(axis, AXES[axis], choice)
    for key, value in clean.items():
        check_kind(axis, row, key, value)
    return choice


def _single(recipe: Recipe, axis: str, value: object) -> Choice | None:
    current = cast("Choice | None", getattr(recipe, axis))
    if value is None or value == _NONE:
        if axis not in ("surrogate", "correction", "value"):
            raise ConfigError(f"{axis} can not be empty.", fix=nearest("", AXES[axis]))
        return None
    if isinstance(value, str):
        return _choice(axis, value, {}, current)
    if isinstance(value, Mapping):
        numbers = {str(k): v for k, v in value.items() if k != "operator"}
        operator = value.get("operator", None if current is None else current.operator)
        if operator is None:
            raise ConfigError(
                f"Recipe '{recipe.name}' has no {axis}, so its numbers can not be changed.",
                fix=f"Add {axis}.operator.",
            )
        return _choice(axis, operator, numbers, current)
    raise ConfigError(f"{axis} = {value!r} is neither a word nor a table.", fix=nearest("", AXES[axis]))


def _several(recipe: Recipe, axis: str, value: object) -> tuple[Choice, ...]:
    current = {c.operator: c for c in cast("tuple[Choice, ...]", getattr(recipe, axis))}
    if value is None or value == _NONE:
        return ()
    if isinstance(value, str):
        return (_choice(axis, value, {}, current.get(value)),)
    if isinstance(value, Mapping):
        for key, numbers in value.items():
            if numbers is False:
                resolve(axis, AXES[axis], choose(str(key)))
                current.pop(str(key), None)
            elif numbers is True or isinstance(numbers, Mapping):
                given = {str(k): v for k, v in numbers.items()} if isinstance(numbers, Mapping) else {}
                current[str(key)] = _choice(axis, key, given, current.get(str(key)))
            else:
                raise ConfigError(
                    f"{axis}.{key} = {numbers!r} is not a table, true or false.",
                    fix=nearest(str(key), AXES[axis]),
                )
        return tuple(current.values())
    if isinstance(value, (list, tuple)):
        out: list[Choice] = []
        for item in value:
            if isinstance(item, Mapping):
                numbers = {str(k): v for k, v in item.items() if k != "operator"}
                out.append(_choice(axis, item.get("operator"), numbers, None))
            else:
                out.append(_choice(axis, item, {}, None))
        return tuple(out)
    raise ConfigError(
        f"{axis} = {value!r} is neither a word, a list nor a table.", fix=nearest("", AXES[axis])
    )


# -------------------------------------------------------------------------------------------------- the rows


def _rows(*recipes: Recipe) -> Mapping[str, Recipe]:
    by_name = {r.name: r for r in recipes}
    assert len(by_name) == len(recipes), "two recipes with one name"
    return MappingProxyType(by_name)


REINFORCE = Recipe(
    name="reinforce",
    paper="Williams, 1992",
    arxiv=None,
    equation="L = -1/S sum_i sum_t G_{i,t} log pi(a_t|s_t)",
    differs="nothing; b is 0 unless another advantage is chosen",
    advantage=choose("reward_to_go"),
    ratio=choose("on_policy"),
    surrogate=choose("reinforce"),
    reduction=choose("sequence_sum"),
)
RLOO = Recipe(
    name="rloo",
    paper="Ahmadian et al., 2024",
    arxiv="2402.14740",
    equation="A_i = R_i - 1/(G-1) sum_{j != i} R_j;  L = -1/S sum_i A_i sum_t log pi(a_t|s_t)",
    differs="the KL in the reward is off unless token_reward.kl_in_reward is added",
    advantage=choose("leave_one_out"),
    ratio=choose("on_policy"),
    surrogate=choose("reinforce"),
    reduction=choose("sequence_sum"),
)
PPO = Recipe(
    name="ppo",
    paper="Schulman et al., 2017; GAE: Schulman et al., 2015",
    arxiv="1707.06347",
    equation="L = -E_t min(rho_t A_t, clip(rho_t, 1-e, 1+e) A_t) + c_V 1/2 max((V-R)^2, (V_clip-R)^2)",
    differs="GAE skips observations: the next state is that of the next action token",
    advantage=choose("gae_tokens", gamma=1.0, lambda_policy=0.95, whiten=True),
    surrogate=choose("ppo_clip", low=0.2, high=0.2),
    reduction=choose("token_mean"),
    value=choose("value_clipped", clip=0.2),
)
GRPO = Recipe(
    name="grpo",
    paper="Shao et al., 2024",
    arxiv="2402.03300",
    equation="L = -1/G sum_i 1/T_i sum_t min(rho A_i, clip(rho) A_i) + beta k3(pi, pi_ref); "
    "A_i = (R_i-mean)/(std+eps)",
    differs="T_i counts action tokens of the whole trajectory; zero-variance groups stay (for their KL) "
    "unless "
    "select drops them",
    advantage=choose("group_zscore", ddof=0, epsilon=1e-6),
    surrogate=choose("ppo_clip", low=0.2, high=0.2),
    reduction=choose("sequence_mean"),
    penalty=(choose("kl_k3", coefficient=0.04),),
)
DR_GRPO = Recipe(
    name="dr-grpo",
    paper="Liu et al., 2025",
    arxiv="2503.20783",
    equation="L = -1/(S L_max) sum_i sum_t min(rho A_i, clip(rho) A_i);  A_i = R_i - mean",
    differs="nothing; L_max is a constant of the run and must be set",
    advantage=choose("group_centred"),
    surrogate=choose("ppo_clip", low=0.2, high=0.2),
    reduction=choose("constant"),
)
DAPO = Recipe(
    name="dapo",
    paper="Yu et al., 2025",
    arxiv="2503.14476",
    equation="L = -1/N sum_i sum_t min(rho A_i, clip(rho, 0.8, 1.28) A_i), groups with 0 < sum R < G only",
    differs="resampling is capped; the overlong filter is on, add reward.soft_overlong for the soft penalty",
    select=(choose("mixed_groups", max_rounds=8), choose("overlong_filter")),
    advantage=choose("group_zscore", ddof=0, epsilon=1e-6),
    surrogate=choose("ppo_clip", low=0.2, high=0.28),
    reduction=choose("token_mean"),
)
GSPO = Recipe(
    name="gspo",
    paper="Zheng et al., 2025",
    arxiv="2507.18071",
    equation="L = -1/G sum_i min(s_i A_i, clip(s_i, 1-3e-4, 1+4e-4) A_i);  "
    "s_i = exp(1/T_i sum_t log rho_{i,t})",
    differs="T_i counts action tokens of the whole trajectory, over all its calls",
    advantage=choose("group_zscore", ddof=0, epsilon=1e-6),
    ratio=choose("sequence_geomean"),
    surrogate=choose("ppo_clip", low=3e-4, high=4e-4),
    reduction=choose("sequence_mean"),
)
CISPO = Recipe(
    name="cispo",
    paper="MiniMax, 2025",
    arxiv="2506.13585",
    equation="L = -1/N sum_i sum_t sg(min(rho, 1+e_high)) A_i log pi(a_t|s_t)",
    differs="nothing; the paper leaves e_high to tuning",
    advantage=choose("group_zscore", ddof=0, epsilon=1e-6),
    surrogate=choose("cispo", high=0.28),
    reduction=choose("token_mean"),
)


# ---------------------------------------------------------------------------- baselines without a critic

REINFORCE_PP = Recipe(
    name="reinforce++",
    paper="Hu et al., 2025",
    arxiv="2501.03262",
    equation="A_t = (G_t - mean)/std over the batch, G_t = R - beta sum_{k>=t} (log pi_b - log pi_ref)",
    differs="nothing; the KL is k1 in the reward, fixed at collection",
    token_reward=(choose("kl_in_reward", coefficient=0.01),),
    advantage=choose("global_normalised"),
)
REINFORCE_PP_BASELINE = Recipe(
    name="reinforce++-baseline",
    paper="Hu et al., 2025",
    arxiv="2501.03262",
    equation="A_i = (R_i - mean_group)/std_batch; KL to the reference by k2 in the loss",
    differs="nothing",
    advantage=choose("group_centred_global"),
    penalty=(choose("kl_k2", coefficient=0.001),),
)
REMAX = Recipe(
    name="remax",
    paper="Li et al., 2023",
    arxiv="2310.10505",
    equation="A_i = R_i - R(greedy rollout of the prompt);  L = -1/S sum_i A_i sum_t log pi(a_t|s_t)",
    differs="nothing; the greedy rollout is a column, never a row of the batch",
    advantage=choose("greedy_baseline"),
    ratio=choose("on_policy"),
    surrogate=choose("reinforce"),
    reduction=choose("sequence_sum"),
)
LOOP = Recipe(
    name="loop",
    paper="Chen et al., 2025",
    arxiv="2502.01600",
    equation="A_i = R_i - mean of the others; PPO clip per token, one copy of the model, no critic",
    differs="nothing",
    advantage=choose("leave_one_out"),
)

# ------------------------------------------------------------------------------------------ with a critic

RLHF = replace(
    PPO,
    name="rlhf",
    paper="Ziegler et al., 2019; Ouyang et al., 2022",
    arxiv="2203.02155",
    equation="r_t = [t = T] R - beta (log pi_b - log pi_ref), then PPO with GAE",
    differs="GAE skips observations; beta is fixed",
    token_reward=(choose("kl_in_reward", coefficient=0.02),),
)
PPO_PENALTY = replace(
    PPO,
    name="ppo-penalty",
    equation="L = -E_t rho_t A_t + beta KL(pi_old || pi); beta *2 above the KL band, /2 below it",
    differs="beta moves once per update, by the KL measured over its steps; it acts with more than one step "
    "per batch",
    surrogate=choose("importance"),
    penalty=(choose("kl_old", coefficient=1.0, target=0.01),),
)
PPO_TURN = replace(
    PPO,
    name="ppo-turn",
    paper="turn-level PPO",
    arxiv=None,
    equation="PPO with a turn as the step of GAE, broadcast to its tokens",
    differs="the seeds give a sentence only",
    advantage=choose("gae_turns", lambda_policy=0.95),
)
VAPO = Recipe(
    name="vapo",
    paper="Yue et al., 2025",
    arxiv="2504.05118",
    equation="lambda_pi = 1 - 1/(alpha l), lambda_V = 1; clip(rho, 0.8, 1.28), token mean; + mu NLL on "
    "positives",
    differs="value pre-training is a phase of the run, not of this row; l counts the whole trajectory's "
    "action tokens",
    advantage=choose("gae_tokens", alpha=0.05, lambda_critic=1.0),
    surrogate=choose("ppo_clip", low=0.2, high=0.28),
    value=choose("value_mse"),
    imitation=(choose("nll", coefficient=0.1, on="positive"),),
)
SAO = Recipe(
    name="sao",
    paper="Hou et al., 2026",
    arxiv=None,
    equation="L = -1/N sum_t sg(f(rho_t)) A_t log pi, f = rho inside (1-e_l, 1+e_h) else 0; skip-observation "
    "GAE",
    differs="one rollout per prompt, K = 2 critic steps, frozen critic attention and alpha = 1.5 as in the "
    "seeds; "
    "e_l, e_h are ours",
    advantage=choose("gae_tokens", alpha=1.5, lambda_critic=1.0),
    surrogate=choose("double_sided", low=0.2, high=0.2),
    value=choose("value_mse"),
    critic_steps=2,
    critic_freezes_attention=True,
    group_size=1,
)
EVPO = replace(
    VAPO,
    name="evpo",
    paper="Pan et al., 2026",
    arxiv=None,
    equation="A = GAE if explained variance of the critic > threshold, else R - mean (group, or batch)",
    differs="the seeds give a sentence only; the gate is per batch and logged",
    advantage=choose("gae_or_mean", lambda_policy=0.95, lambda_critic=1.0, threshold=0.0),
    imitation=(),
)

# ------------------------------------------------------------------------------- ratio, clip and surrogate

DSPO = replace(
    GSPO,
    name="dspo",
    paper="Gu et al., 2025",
    arxiv="2510.09255",
    equation="GSPO on groups that mix success and failure",
    differs="nothing; resampling is capped",
    select=(choose("mixed_groups", max_rounds=8),),
)
GSPO_TOKEN = replace(
    GSPO,
    name="gspo-token",
    equation="s_{i,t} = sg(s_i) pi/sg(pi): value of GSPO, gradient per token",
    ratio=choose("sequence_geomean_token"),
)
SAPO = replace(
    GRPO,
    name="sapo",
    paper="Gao et al., 2025",
    arxiv="2511.20347",
    equation="L = -1/G sum_i 1/T_i sum_t (4/tau) sigmoid(tau (rho - 1)) A_i",
    differs="A = 0 takes the negative temperature",
    surrogate=choose("sapo", tau_positive=1.0, tau_negative=1.05),
    penalty=(),
)
DCPO = replace(
    GRPO,
    name="dcpo",
    paper="Yang et al., 2025",
    arxiv="2509.02333",
    equation="bounds per token from pi_old; current and cumulative z-scores mixed, the smaller in size",
    differs="cumulative statistics arrive as columns; the paper's sum over a prompt's tokens is our prompt "
    "mean",
    advantage=choose("smooth_standardised"),
    surrogate=choose("dynamic_clip", low=0.16, high=0.2),
    reduction=choose("prompt_mean"),
    penalty=(),
)
DECOUPLED_GRPO = replace(
    GRPO,
    name="grpo-decoupled",
    paper="Fu et al., 2025 (decoupled objective)",
    arxiv="2505.24298",
    equation="L = -min(pi_prox/pi_b, C) min(rho A, clip(rho) A), rho = pi/pi_prox",
    differs="the correction is truncated at C = 2 per token",
    old="proximal",
    correction=choose("truncated", cap=2.0),
    penalty=(),
)

# --------------------------------------------------------------------------------- group signal and selection

PODS = replace(
    GRPO,
    name="pods",
    paper="Xu et al., 2025",
    arxiv="2504.13818",
    equation="GRPO on the m of n members with the largest reward variance",
    differs="statistics over the kept subset; ties prefer balanced splits",
    select=(choose("max_variance", keep=4),),
)
CPPO = replace(
    GRPO,
    name="cppo",
    paper="Lin et al., 2025",
    arxiv="2503.22342",
    equation="GRPO, only the ceil(k n) members of each group with the largest |A|",
    differs="dynamic completion allocation is the packer's business",
    prune=(choose("prune_small_advantage", keep=0.5),),
)
AGPO = replace(
    GRPO,
    name="agpo",
    paper="Li et al., 2025",
    arxiv="2503.15952",
    equation="zero-variance groups leave the loss; a batch whose loss is negative does not move the policy",
    differs="the sign of the batch loss is read at ratio 1, so that micro-batches can not disagree; token "
    "mean, "
    "because under a sequence mean it is always 0",
    select=(choose("mixed_groups"),),
    reduction=choose("token_mean"),
    penalty=(),
    floor_batch_loss=True,
)
NGRPO = replace(
    GRPO,
    name="ngrpo",
    paper="Nan et al., 2025",
    arxiv="2509.18851",
    equation="A = (R - mean')/std' over the group and one imagined member of reward 1; asymmetric clip",
    differs="nothing known; failures of an all-fail group get a negative advantage",
    advantage=choose("virtual_best", best=1.0),
    surrogate=choose("ppo_clip", low=0.16, high=0.24),
    penalty=(),
)
LOPTI = replace(
    GRPO,
    name="lopti",
    paper="Yang et al., 2025",
    arxiv="2505.12929",
    equation="GRPO with token weight alpha pi_b(a_t) + 1 - alpha",
    differs="the reweighting of the paper; its two-stage update (Lopti proper) is a schedule of the run",
    token_weight=(choose("probability_weight", alpha=0.3),),
    penalty=(),
)
HIGHENT = replace(
    DAPO,
    name="highent",
    paper="Wang et al., 2025",
    arxiv="2506.01939",
    equation="DAPO, gradient only on the 20 % of tokens with the highest entropy",
    differs="the threshold is taken over the tokens in the loss; the denominator counts all of them",
    token_weight=(choose("forking_tokens", share=0.2),),
)
RISK_PO = replace(
    DAPO,
    name="risk-po",
    paper="Ren et al., 2025",
    arxiv="2510.00911",
    equation="maximise (1+w) RVaR_{0:a} + RVaR_{a:b} of the reward distribution",
    differs="quantiles over the batch instead of bundles of questions; centred",
    select=(),
    advantage=choose("mixed_value_at_risk"),
)

# -------------------------------------------------------------------------------------------- reward side

SOFT_OVERLONG = replace(
    DAPO,
    name="dapo-soft-overlong",
    equation="DAPO with R + clamp((L_max - L_cache - |y|)/L_cache, -1, 0) instead of the filter",
    differs="|y| counts generated tokens; L_max and L_cache must be set",
    select=(choose("mixed_groups"),),
    reward=(choose("soft_overlong"),),
)
LASER = replace(
    GRPO,
    name="laser",
    paper="Liu et al., 2025",
    arxiv="2505.15612",
    equation="R + bonus [correct and |y| <= target]",
    differs="a fixed target; its difficulty-aware schedule is a plan of the run",
    reward=(choose("step_bonus"),),
    penalty=(),
)
KIMI = replace(
    GRPO,
    name="kimi-length",
    paper="Kimi Team, 2025",
    arxiv="2501.12599",
    equation="R + w l, l from the place of |y| between the shortest and longest of the group",
    differs="the length reward only, on the GRPO objective",
    reward=(choose("group_length_reward"),),
    penalty=(),
)
S_GRPO = replace(
    GRPO,
    name="s-grpo",
    paper="Dai et al., 2025",
    arxiv="2505.07686",
    equation="R / 2^k for a correct answer at the k-th exit of one reasoning path",
    differs="exits are made by the rollout; their index is a column",
    reward=(choose("exit_decay"),),
    penalty=(),
)
MULTI = replace(
    GRPO,
    name="multi-objective",
    paper="Kimi Team, 2025; Qwen Team, 2025",
    arxiv="2501.12599",
    equation="R + sum_k w_k c_k",
    differs="weights must be set",
    reward=(choose("weighted_components"),),
    penalty=(),
)
DRPO = replace(
    GRPO,
    name="drpo",
    paper="Li et al., 2025",
    arxiv="2510.04474",
    equation="correct: (1-p) n softmax(length reward) among correct ones; wrong: -p",
    differs="the seeds' form on a GRPO objective; the paper optimises a discriminative one",
    reward=(choose("group_length_reward", weight=1.0),),
    advantage=choose("correctness_first"),
    penalty=(),
)
VPO = replace(
    GRPO,
    name="vpo",
    paper="Bahlous-Boldi et al., 2026",
    arxiv=None,
    equation="R(S) = E_w max_{y in S} w . r(y); credit of a member R(S) - R(S without it), then z-score",
    differs="the set is the group and the credit its marginal gain; the seeds leave the split open",
    reward=(choose("set_marginal"),),
    penalty=(),
)
SWE_RL = replace(
    GRPO,
    name="swe-rl",
    paper="Wei et al., 2025",
    arxiv="2502.18449",
    equation="R = SequenceMatcher ratio of the patch to the reference patch, -1 if unusable; GRPO",
    differs="nothing; the grader calls rewards.patch_similarity",
)
DRA_GRPO = replace(
    GRPO,
    name="dra-grpo",
    paper="Chen et al., 2025",
    arxiv="2505.09655",
    equation="R / (1 + similarity mass of the other members)",
    differs="the density is a column, from any embedding",
    reward=(choose("density_weighted"),),
    penalty=(),
)
GAPO = replace(
    GRPO,
    name="gapo",
    paper="Anschel et al., 2025",
    arxiv=None,
    equation="R (1 - (n_a - 1)/(n - 1)), n_a members with the same answer",
    differs="the seeds give a sentence only: over-represented answers earn less",
    reward=(choose("frequency_weighted"),),
    penalty=(),
)
SCORE = replace(
    GRPO,
    name="score",
    paper="Kumar et al., 2024",
    arxiv="2409.12917",
    equation="R + alpha (R - R_first attempt)",
    differs="the bonus on a GRPO objective; the two stages of the paper are a schedule of the run",
    reward=(choose("improvement_bonus"),),
)
PRIME = Recipe(
    name="prime",
    paper="Cui et al., 2025",
    arxiv="2502.01456",
    equation="r_t = beta (log pi_phi - log pi_ref) plus the outcome; leave-one-out is replaced by batch "
    "whitening",
    differs="the process model is trained elsewhere; returns are whitened over the batch",
    token_reward=(choose("implicit_process"),),
    advantage=choose("global_normalised"),
)
R1_ZERO_DIV = replace(
    GRPO,
    name="r1-zero-div",
    paper="Yao et al., 2025",
    arxiv="2505.23433",
    equation="GRPO + entropy bonus on tokens of positive advantage",
    differs="nothing known",
    penalty=(choose("positive_entropy", coefficient=0.01),),
)

# ----------------------------------------------------------------------------------- turn and token credit

MT_GRPO = replace(
    GRPO,
    name="mt-grpo",
    paper="Zeng et al., 2025",
    arxiv="2505.11821",
    equation="A_k = z(turn reward k) + share A_outcome, last turn A_outcome",
    differs="any number of turns; the paper has two",
    token_reward=(choose("turn_rewards"),),
    advantage=choose("turn_blend", share=1.0),
    penalty=(),
)
IGPO = replace(
    GRPO,
    name="igpo",
    paper="Wang et al., 2025",
    arxiv="2510.14967",
    equation="A_k = sum_{j>=k} gamma^{j-k} z(information gain of turn j)",
    differs="information gains are turn rewards measured at collection",
    token_reward=(choose("turn_rewards"),),
    advantage=choose("turn_returns", gamma=1.0),
    penalty=(),
)
SPO = replace(
    GRPO,
    name="spo",
    paper="Guo et al., 2025",
    arxiv="2505.23564",
    equation="A of a segment = V(its end) - V(its start), Monte-Carlo values",
    differs="segments are turns; values_N holds Monte-Carlo values; no critic is trained",
    advantage=choose("gae_turns", lambda_policy=0.0),
    reduction=choose("token_mean"),
    penalty=(),
)
GRPO_VPS = replace(
    SPO,
    name="grpo-vps",
    paper="Wang et al., 2026",
    arxiv=None,
    equation="A of a segment = change of p(correct answer) over it, the outcome on the last one",
    differs="segments are turns; values_N holds p(answer | prefix) at their first tokens",
)
SCRL = replace(
    GRPO,
    name="scrl",
    paper="Jiang et al., 2026",
    arxiv=None,
    equation="A_k = z(reward of subproblem k) among the members, last turn A_outcome",
    differs="subproblems are turns; the seeds give a sentence only",
    token_reward=(choose("turn_rewards"),),
    advantage=choose("turn_blend", share=0.0),
    penalty=(),
)
DIVER = replace(
    GRPO,
    name="diver",
    paper="Hu et al., 2026",
    arxiv="2509.26209",
    equation="R + sum_t w (Phi_{t+1} - Phi_t), Phi the diversity of the trajectory so far",
    differs="the potential is a column, from any diversity measure",
    token_reward=(choose("potential_shaping", weight=0.1),),
    penalty=(),
)
TREE_RPO = replace(
    GRPO,
    name="treerpo",
    paper="Yang et al., 2025",
    arxiv="2506.05183",
    equation="A = V(node) - V(parent), V = mean of the leaves below",
    differs="not scaled among siblings; the tree is built by the rollout, advantages.tree_values fills the "
    "column",
    advantage=choose("tree_nodes"),
    reduction=choose("token_mean"),
    penalty=(),
)
GRPO_LAMBDA = replace(
    GRPO,
    name="grpo-lambda",
    paper="Parthasarathi et al., 2025",
    arxiv="2510.00194",
    equation="A_t = z_i w_t, w_t ~ lambda^(T-1-t), mean 1",
    differs="the recency trace in closed form",
    advantage=choose("trace_weighted", decay=0.99),
    penalty=(),
)
GTPO = replace(
    DAPO,
    name="gtpo",
    paper="Tan et al., 2025",
    arxiv="2508.04349",
    equation="token reward by share of entropy at its position, z-score over the tokens of the group",
    differs="successes and failures are scaled together",
    advantage=choose("entropy_shaped"),
)

# ---------------------------------------------------------------------------------------------- teachers

OPD = Recipe(
    name="opd",
    paper="Gu et al., 2023; Agarwal et al., 2023",
    arxiv="2306.08543",
    equation="L = 1/N sum_t KL(pi || pi_T) on the student's own tokens (gradient of the sampled reverse KL)",
    differs="outside of J(theta): the reward plays no part",
    surrogate=None,
    teacher=(choose("reverse_kl", coefficient=1.0, on="graded"),),
)
OPD_FULL = replace(
    OPD,
    name="opd-full",
    arxiv="2306.13649",
    equation="L = 1/N sum_t D(pi_T, pi) over the whole vocabulary; D = reverse KL, forward KL or JSD (kind)",
    teacher=(choose("divergence", coefficient=1.0, on="graded"),),
)
OPD_FORWARD = replace(
    OPD,
    name="opd-forward",
    equation="L = 1/N sum_t KL(pi_T || pi), importance-weighted on the student's tokens",
    teacher=(choose("forward_kl", coefficient=1.0, on="graded"),),
)
KDRL = replace(
    GRPO,
    name="kdrl",
    paper="Xu et al., 2025",
    arxiv="2506.02208",
    equation="GRPO with beta KL(pi || pi_T) in place of the reference KL (T_D)",
    differs="k2, whose gradient is that of the reverse KL",
    penalty=(),
    teacher=(choose("reverse_kl", coefficient=0.002, on="graded"),),
)
DGRPO = replace(
    GRPO,
    name="dgrpo",
    paper="Ramos et al., 2026",
    arxiv=None,
    equation="GRPO + beta_d log(pi_T/pi) per token inside the rollout expectation (T_C)",
    differs="by k2, so that the term has a gradient that is not zero in expectation",
    penalty=(),
    teacher=(choose("reverse_kl", coefficient=0.05, on="trained"),),
)
RLAD = replace(
    GRPO,
    name="rlad",
    paper="Zhang et al., 2026",
    arxiv=None,
    equation="ratio (pi/pi_old)^l (pi/pi_T)^(1-l) in the PPO clip (T_A)",
    differs="nothing known",
    ratio=choose("teacher_mixture", student=0.5),
    penalty=(),
)
HDPO = replace(
    GRPO,
    name="hdpo",
    paper="Ding, 2026",
    arxiv=None,
    equation="L_GRPO + lambda JSD(pi, pi_T) on all-fail groups, pi_T the policy given the answer",
    differs="pi_T is the teacher model on the same prompt: whoever gives one that knows the answer has the "
    "paper's",
    penalty=(),
    teacher=(choose("divergence", coefficient=0.1, on="all_fail", kind="jsd"),),
)
RLSD = replace(
    GRPO,
    name="rlsd",
    paper="Yang et al., 2026",
    arxiv=None,
    equation="A_t = A_i clip((pi_T/pi_b)^sign(A_i))",
    differs="the weight is bounded to [0.2, 5] and fixed at collection",
    shaping=(choose("teacher_magnitude"),),
    penalty=(),
)
CODISTILL = replace(
    GRPO,
    name="codistill",
    paper="Kwon et al., 2026",
    arxiv=None,
    equation="R + alpha mean_t (log pi_T - log pi_b), then GRPO (T_B)",
    differs="the teacher is not trained here",
    reward=(choose("teacher_mean", alpha=0.1),),
    penalty=(),
)
REOPOLD = replace(
    GRPO,
    name="reopold",
    paper="Ko et al., 2026",
    arxiv=None,
    equation="rho_t clip(log pi_T - log pi_b, -c, c) M_t",
    differs="one clip and an optional mask; the schedule of the paper is a schedule of the run",
    advantage=choose("constant_baseline"),
    shaping=(choose("teacher_reward", clip=2.0, mix=0.0),),
    surrogate=choose("importance"),
    reduction=choose("token_mean"),
    penalty=(),
)
LUFFY = replace(
    GRPO,
    name="luffy",
    paper="Yan et al., 2025",
    arxiv="2504.14945",
    equation="own tokens: GRPO; a teacher's: f(pi) A with f(x) = x/(x + 0.1); one group over both",
    differs="own tokens keep the clip",
    surrogate=choose("mixed_policy", shape=0.1),
    reduction=choose("token_mean"),
    penalty=(),
)
IMITATE = Recipe(
    name="imitation",
    paper="supervised fine-tuning on successful trajectories",
    arxiv=None,
    equation="L = -1/N sum_t log pi(a_t|s_t) over action tokens of successful trajectories",
    differs="outside of J(theta): no ratio, no advantage, no behaviour log-probs",
    surrogate=None,
    imitation=(choose("nll", coefficient=1.0, on="positive"),),
)

ACTOR_CRITIC = Recipe(
    name="actor-critic",
    paper="Mnih et al., 2016 (n-step advantage actor-critic)",
    arxiv="1602.01783",
    equation="A_t = sum_{k<n} gamma^k r_{t+k} + gamma^n V_{t+n} - V_t;  L = -1/N sum_t A_t log pi",
    differs="n-step returns run over action tokens only; add penalty.entropy_bonus for its bonus",
    advantage=choose("n_step", n=5),
    ratio=choose("on_policy"),
    surrogate=choose("reinforce"),
    value=choose("value_mse"),
)
SWEET_RL = replace(
    SPO,
    name="sweet-rl",
    paper="Zhou et al., 2025",
    arxiv="2503.15478",
    equation="A of a turn = V*(after it) - V*(before it), V* a turn critic with privileged information",
    differs="values_N comes from any scorer that sees what the actor does not; it is trained elsewhere",
)
DAST = replace(
    GRPO,
    name="dast",
    paper="Shen et al., 2025",
    arxiv="2503.04472",
    equation="R + bonus [correct and |y| <= budget], budget longer where the prompt is rarely solved",
    differs="difficulty is the prompt's success so far, a column; short and long must be set",
    reward=(choose("difficulty_budget"),),
    penalty=(),
)
DSDR = replace(
    GRPO,
    name="dsdr",
    paper="Wan et al., 2026",
    arxiv=None,
    equation="correct ones earn 1/(1 + similarity to the others); - c H on their tokens, mean per trajectory",
    differs="the seeds give a sentence only; correct means a positive advantage in the local term",
    reward=(choose("density_weighted"),),
    penalty=(choose("positive_entropy", coefficient=0.01),),
)
PRO_GRPO = replace(
    PODS,
    name="pro-grpo",
    paper="Ge et al., 2026",
    arxiv=None,
    equation="GRPO on the members that keep the rewards apart, out of a larger group",
    differs="pruned after sampling, by reward; the paper prunes while it samples, by latent features",
)
DAGRPO = replace(
    LUFFY,
    name="dagrpo",
    paper="Xie et al., 2025",
    arxiv=None,
    equation="GRPO without members that resemble the others; anchors by f(pi) A, f(x) = x/(x + 0.1)",
    differs="the seeds give a sentence only; similarity is a column, anchors train as in LUFFY",
    prune=(choose("distinct_only", at_most=2.0),),
)
PREFIX_RFT = replace(
    LUFFY,
    name="prefix-rft",
    paper="Huang et al., 2025",
    arxiv="2507.01679",
    equation="a teacher's prefix by f(pi) A, the student's continuation by the clipped ratio, one group",
    differs="the teacher's prefix is a member of its own, and context of the student's continuation",
)
REPO = replace(
    GRPO,
    name="repo",
    paper="Li et al., 2025",
    arxiv=None,
    equation="GRPO over fresh and replayed trajectories; the ratio of a replayed one is to who sampled it",
    differs="what is replayed is a plan of the run; a truncated correction bounds old ratios",
    old="proximal",
    correction=choose("truncated", cap=2.0),
    penalty=(),
)

RECIPES: Mapping[str, Recipe] = _rows(
    ACTOR_CRITIC,
    SWEET_RL,
    DAST,
    DSDR,
    PRO_GRPO,
    DAGRPO,
    PREFIX_RFT,
    REPO,
    REINFORCE,
    REINFORCE_PP,
    REINFORCE_PP_BASELINE,
    RLOO,
    REMAX,
    LOOP,
    PPO,
    PPO_PENALTY,
    PPO_TURN,
    RLHF,
    VAPO,
    SAO,
    EVPO,
    GRPO,
    DR_GRPO,
    DAPO,
    SOFT_OVERLONG,
    GSPO,
    GSPO_TOKEN,
    DSPO,
    CISPO,
    SAPO,
    DCPO,
    DECOUPLED_GRPO,
    PODS,
    CPPO,
    AGPO,
    NGRPO,
    LOPTI,
    HIGHENT,
    RISK_PO,
    LASER,
    KIMI,
    S_GRPO,
    MULTI,
    DRPO,
    VPO,
    SWE_RL,
    DRA_GRPO,
    GAPO,
    SCORE,
    PRIME,
    R1_ZERO_DIV,
    MT_GRPO,
    IGPO,
    SPO,
    GRPO_VPS,
    SCRL,
    DIVER,
    TREE_RPO,
    GRPO_LAMBDA,
    GTPO,
    OPD,
    OPD_FORWARD,
    OPD_FULL,
    KDRL,
    DGRPO,
    RLAD,
    HDPO,
    RLSD,
    CODISTILL,
    REOPOLD,
    LUFFY,
    IMITATE,
)
"""All recipes by name."""
