"""A recipe is a row of data: one choice on each axis, numbers, and where it comes from. No recipe has code of
its own.

`RECIPES` is the table that `agentrl recipes` prints; `compose` is how a run file takes a row and changes an
axis or a number; what makes no sense together is refused in `refusals.py`. A recipe knows which columns of
evidence it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Literal, cast

from agentrl.algo.advantages import ADVANTAGE, BATCH_WIDE
from agentrl.algo.axes import Choice, Number, Operator, choose, numbers_of, resolve
from agentrl.algo.critic_losses import VALUE
from agentrl.algo.imitation import IMITATION
from agentrl.algo.penalties import PENALTY
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
        """All chosen operators, looked up."""
        for axis, choice in self.choices():
            if self.surrogate is None and axis in ("ratio", "correction", "surrogate", "reduction"):
                if axis == "reduction":
                    yield axis, resolve(axis, AXES[axis], choice), choice
                continue
            if self.value is None and axis == "value_reduction":
                continue
            if self.surrogate is None and not self.has_advantage and axis in ("advantage", "shaping"):
                continue
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
        return "values_N" in self.columns or self.value is not None

    @property
    def needs_reference(self) -> bool:
        return "ref_logp_N" in self.columns or "ref_kl_N" in self.live

    @property
    def needs_teacher(self) -> bool:
        return "teacher_logp_N" in self.columns or "teacher_divergence_N" in self.live

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

_WORDS = {"surrogate", "advantage", "ratio", "correction", "reduction", "value", "value_reduction"} | LISTS
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


def _unfold(overrides: Mapping[str, object]) -> dict[str, object]:
    tree: dict[str, object] = {}
    for key, value in overrides.items():
        head, *rest = key.split(".")
        if not rest:
            tree[head] = value
            continue
        node = tree.setdefault(head, {})
        for part in rest[:-1]:
            if not isinstance(node, dict):
                break
            node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ConfigError(
                f"'{key}' is set twice, once as a word and once as a table.", fix="Use one table."
            )
        node[rest[-1]] = value
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
    if not fits:
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
    resolve(axis, AXES[axis], choice)
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
    equation="L = -1/G sum_i 1/T_i sum_t min(rho A_i, clip(rho, 1-e, 1+e) A_i) + beta k3; "
    "A_i = (R_i-mean)/(std+eps)",
    differs="T_i counts action tokens of the whole trajectory; zero-variance groups stay (for their KL) unless "
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

RECIPES: Mapping[str, Recipe] = _rows(REINFORCE, RLOO, PPO, GRPO, DR_GRPO, DAPO, GSPO, CISPO)
