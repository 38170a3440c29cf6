"""Evidence of a batch to a loss: `prepare` once per optimizer step, `loss` once per micro-batch.

`prepare` runs select, reward and advantage and gives every component its token weights, which already contain
the *global* denominator of the step. So the loss of a micro-batch is a plain weighted sum, the losses of all
micro-batches add up to the loss of the batch, and no split into micro-batches or ranks can change the
gradient.

Operators see gathered tokens only: a token that is excluded (`valid_N` false, too stale, ungraded trajectory)
is not multiplied by zero, it is absent from every sum, mean, ratio and carry. Whatever NaN it holds stays
there; a NaN anywhere else raises. Nothing here is a default for something unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch

from agentrl.algo.advantages import ADVANTAGE, Credit
from agentrl.algo.axes import Choice, apply, numbers_of, resolve
from agentrl.algo.columns import Layout, group_sum, segment_mean
from agentrl.algo.critic_losses import VALUE, explained_variance
from agentrl.algo.imitation import CORRECT_ABOVE, IMITATION, SCOPES
from agentrl.algo.metrics import Metrics, finish_metrics, maximum_of, mean_of, merge, total_of
from agentrl.algo.mismatch import mismatch_metrics
from agentrl.algo.penalties import PENALTY, k3
from agentrl.algo.ratios import CORRECTION, RATIO, Ratio, ratio_of
from agentrl.algo.recipes import AXES, LIVE, Recipe
from agentrl.algo.reductions import REDUCTION, TOKEN_WEIGHT, Share
from agentrl.algo.rewards import land_on_kept, place, trajectory_return
from agentrl.algo.select import PRUNE, SELECT, members_per_group
from agentrl.algo.surrogates import SURROGATE, Term
from agentrl.algo.teacher import SHAPING, TEACHER
from agentrl.errors import ConfigError, EvidenceError, nearest

__all__ = ["Columns", "Component", "Metrics", "Prepared", "finish_metrics", "loss", "prepare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """All evidence of a batch in the flat layout. None: this run does not have that column. Floats of any
    precision.

    Ungraded members are rows like any other (their reward is NaN): they never enter statistics nor the loss.
    """

    layout: Layout
    reward_S: torch.Tensor
    """float `[S]`: outcome of the trajectory (without turn rewards); NaN = ungraded."""
    terminated_S: torch.Tensor
    """bool `[S]`: ended by the policy or the verifier; nothing comes after."""
    truncated_S: torch.Tensor
    """bool `[S]`: ended by a budget; the final state has a value."""
    valid_N: torch.Tensor | None = None
    """bool `[N]`: False takes the token out of every numerator and denominator. None: all True."""
    logb_N: torch.Tensor | None = None
    """float `[N]`: log-prob recorded at sampling; NaN = unknown (such a token must not be valid where it is
    needed)."""
    lag_N: torch.Tensor | None = None
    """int `[N]`: trainer's policy version minus the one that sampled the token, >= 0."""
    length_S: torch.Tensor | None = None
    """int `[S]`: generated tokens, for length rewards. None: the action tokens of the layout."""
    expected_group_size: int | None = None
    """Planned members per prompt; a batch with other group sizes is refused. None: not checked."""
    prox_logp_N: torch.Tensor | None = None
    """float `[N]`: log-prob recomputed by the learner before the first update of the step."""
    ref_logp_N: torch.Tensor | None = None
    """float `[N]`: log-prob of the frozen reference."""
    teacher_logp_N: torch.Tensor | None = None
    """float `[N]`: log-prob of the teacher for the sampled token."""
    prm_logp_N: torch.Tensor | None = None
    """float `[N]`: log-prob of an implicit process reward model."""
    values_N: torch.Tensor | None = None
    """float `[N]`: critic in the state in which the token was chosen, before the update."""
    bootstrap_S: torch.Tensor | None = None
    """float `[S]`: critic on the final state; read where truncated."""
    entropy_N: torch.Tensor | None = None
    """float `[N]`: entropy of the policy before the update, for token weights."""
    turn_reward_N: torch.Tensor | None = None
    """float `[N]`: rewards that arrived with an observation, on any token of the turn before it; 0
    elsewhere."""
    potential_N: torch.Tensor | None = None
    """float `[N]`: potential of the state in which the token was chosen, for shaping."""
    components_SK: torch.Tensor | None = None
    """float `[S, K]`: several rewards per trajectory."""
    greedy_reward_S: torch.Tensor | None = None
    """float `[S]`: all turn rewards of one greedy rollout of the same prompt (never itself a row)."""
    off_policy_S: torch.Tensor | None = None
    """bool `[S]`: sampled by a teacher, not by this policy."""
    density_S: torch.Tensor | None = None
    """float `[S]`: similarity mass of the other members of the group."""
    answer_S: torch.Tensor | None = None
    """int `[S]`: class of the final answer."""
    exit_index_S: torch.Tensor | None = None
    """int `[S]`: 0-based place among the exits of one reasoning path."""
    first_attempt_S: torch.Tensor | None = None
    """float `[S]`: reward of the first attempt inside the trajectory."""
    history_mean_S: torch.Tensor | None = None
    """float `[S]`: mean reward of the prompt over all steps so far, this one included."""
    history_std_S: torch.Tensor | None = None
    """float `[S]`: standard deviation of the same."""
    history_step_S: torch.Tensor | None = None
    """int `[S]`: how many steps the prompt was sampled in, this one included (>= 1)."""
    node_value_N: torch.Tensor | None = None
    """float `[N]`: Monte-Carlo value of the tree node (segment) the token belongs to, minus that of its
    parent."""

    def __post_init__(self) -> None:
        n, s = self.layout.n_tokens, self.layout.n_trajectories
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, torch.Tensor):
                continue
            suffix = field.name.rsplit("_", 1)[-1]
            shape = {"N": (n,), "S": (s,), "SK": (s, value.shape[-1] if value.dim() else 0)}[suffix]
            if tuple(value.shape) != shape:
                raise EvidenceError(
                    f"Column {field.name} has shape {tuple(value.shape)}, the layout says {shape}.",
                    fix="One entry per action token (_N) or per trajectory (_S), in the order of the layout.",
                )

    @property
    def present(self) -> frozenset[str]:
        """Names of the columns that are not None."""
        return frozenset(f.name for f in fields(self) if getattr(self, f.name) is not None)


Kind = Literal["policy", "penalty", "teacher", "imitation", "value"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One stream of the loss: which tokens, with which weight. `loss = coefficient * sum_i weight_i *
    term_i`."""

    name: str
    kind: Kind
    choice: Choice
    coefficient: float
    active_N: torch.Tensor
    """bool `[N]`."""
    weight_N: torch.Tensor
    """float64 `[N]`: share of the token divided by `count`; 0 where not active."""
    count: float
    """The global denominator that is inside the weights, in units of the reduction."""


_TOKEN_COLUMNS = ("logb_N", "prox_logp_N", "ref_logp_N", "teacher_logp_N", "values_N")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A batch (or a part of it) ready for `loss`. Tensors over all `N` tokens of the layout, on the CPU,
    float64."""

    layout: Layout
    advantage_N: torch.Tensor
    """Advantage per token; 0 outside of the policy loss."""
    returns_N: torch.Tensor | None
    """Targets of the critic."""
    trained_S: torch.Tensor
    """bool `[S]`: in the policy loss."""
    off_policy_N: torch.Tensor | None
    columns: Mapping[str, torch.Tensor]
    """Token columns that the loss reads."""
    components: tuple[Component, ...]
    facts: Mapping[str, float]
    """What happened on the way: counts of groups, trajectories and tokens kept, dropped and why; reward
    means."""
    nothing: str | None
    """None, or the sentence that says why there is nothing to train on in the whole batch."""

    @property
    def denominators(self) -> dict[str, float]:
        """Count of each component in this process: add them over ranks and hand them to `prepare` or
        `rescale`."""
        return {c.name: c.count for c in self.components}

    def rescale(self, denominators: Mapping[str, float]) -> Prepared:
        """The same with global counts in the weights. For ranks that prepared only their own trajectories."""
        _check_denominators(denominators, self.components)
        parts = tuple(
            replace(
                c,
                weight_N=c.weight_N * (c.count / denominators[c.name])
                if denominators[c.name] > 0
                else c.weight_N,
                count=denominators[c.name],
            )
            for c in self.components
        )
        empty = all(c.count == 0 for c in parts)
        return replace(self, components=parts, nothing=self.nothing if empty else None)

    def take(self, indices_S: torch.Tensor | list[int]) -> Prepared:
        """A micro-batch of whole trajectories, in the given order, with unchanged weights."""
        indices = torch.as_tensor(indices_S, dtype=torch.int64)
        at = self.layout.tokens_of(indices)

        def pick(value: torch.Tensor | None) -> torch.Tensor | None:
            return None if value is None else value[at]

        return replace(
            self,
            layout=self.layout.take(indices),
            advantage_N=self.advantage_N[at],
            returns_N=pick(self.returns_N),
            trained_S=self.trained_S[indices],
            off_policy_N=pick(self.off_policy_N),
            columns={k: v[at] for k, v in self.columns.items()},
            components=tuple(
                replace(c, active_N=c.active_N[at], weight_N=c.weight_N[at]) for c in self.components
            ),
        )


def _check_denominators(denominators: Mapping[str, float], components: tuple[Component, ...]) -> None:
    names = {c.name for c in components}
    for name in denominators:
        if name not in names:
            raise ConfigError(f"No component '{name}' to give a denominator to.", fix=nearest(name, names))
    missing = sorted(names - set(denominators))
    if missing:
        raise ConfigError(
            f"No global denominator for {', '.join(missing)}.", fix="All-reduce Prepared.denominators."
        )


# --------------------------------------------------------------------------------------------------- prepare


def prepare(recipe: Recipe, columns: Columns, *, denominators: Mapping[str, float] | None = None) -> Prepared:
    """Select, reward, advantage, and token weights with global denominators.

    Give it *all* trajectories of the optimizer step on every rank (columns are small) and `take` the rank's
    share; or, for a recipe without batch-wide statistics, each rank's own trajectories with all-reduced
    `denominators`.

    Args:
        recipe: from `recipes.get` or `recipes.compose`.
        columns: evidence of the step.
        denominators: global count per component, replacing the local ones.

    Raises:
        EvidenceError: a column that the recipe needs is absent or NaN on a token in the loss; a trajectory
            without any action token; a graded trajectory that neither terminated nor was truncated; wrong
            group sizes.
        ConfigError: local columns for a recipe whose statistics span the batch; wrong denominator names.
    """
    missing = sorted(recipe.columns - columns.present)
    if missing:
        raise EvidenceError(
            f"Recipe '{recipe.name}' needs {', '.join(missing)}, which this batch does not have.",
            fix="Compute the column before the update, or choose a recipe that does without.",
        )
    if denominators is not None and recipe.batch_wide:
        raise ConfigError(
            f"Recipe '{recipe.name}' has batch-wide statistics, so ranks can not prepare their parts apart.",
            fix="Prepare all trajectories of the step on every rank and take() the rank's share.",
        )
    layout = columns.layout
    facts: dict[str, float] = {}
    graded_S = _graded(columns, facts)
    keep_N = _kept_tokens(recipe, columns, graded_S, facts)
    inner = layout.keep(keep_N)
    evidence = _evidence(columns, inner, keep_N, graded_S, recipe)
    has_tokens_S = inner.lengths_S > 0

    # select
    counted_S, trained_S = graded_S, graded_S & has_tokens_S
    for choice in recipe.select:
        chosen = apply(resolve("select", SELECT, choice), choice, evidence | {"counted_S": counted_S})
        counted_S, trained_S = counted_S & chosen.counted_S, trained_S & chosen.trained_S
        facts[f"select/{choice.operator}"] = float((graded_S & has_tokens_S & ~chosen.trained_S).sum())
    evidence["counted_S"] = counted_S

    # reward
    outcome_S = evidence["reward_S"]
    for choice in recipe.reward:
        outcome_S = apply(
            resolve("reward", AXES["reward"], choice), choice, evidence | {"outcome_S": outcome_S}
        )
    token_reward_N: torch.Tensor | None = None
    for choice in recipe.token_reward:
        part_N = apply(resolve("token_reward", AXES["token_reward"], choice), choice, evidence)
        token_reward_N = part_N if token_reward_N is None else token_reward_N + part_N
    evidence |= {
        "outcome_S": outcome_S,
        "return_S": trajectory_return(outcome_S, token_reward_N, inner),
        "rewards_N": place(torch.nan_to_num(outcome_S, nan=0.0), inner, token_reward_N),
        "token_reward_N": torch.zeros(inner.n_tokens, dtype=torch.float64)
        if token_reward_N is None
        else token_reward_N,
    }
    if bool(counted_S.any()):
        facts["reward/mean"] = float(evidence["reward_S"][graded_S].mean())
        facts["reward/shaped_mean"] = float(outcome_S[graded_S].mean())

    # advantage
    advantage_N = torch.zeros(inner.n_tokens, dtype=torch.float64)
    returns_N: torch.Tensor | None = None
    traj_N = inner.traj_N
    if recipe.has_advantage and inner.n_tokens:
        credit: Credit = apply(resolve("advantage", ADVANTAGE, recipe.advantage), recipe.advantage, evidence)
        facts |= credit.facts
        if credit.defined_S is not None:
            facts["trajectories/no_comparison"] = float((trained_S & ~credit.defined_S).sum())
            trained_S = trained_S & credit.defined_S
        if credit.advantage_N is not None:
            advantage_N = credit.advantage_N
        else:
            assert credit.advantage_S is not None
            advantage_N = credit.advantage_S[traj_N]
        returns_N = credit.returns_N
        trained_N = trained_S[traj_N]
        advantage_N = torch.where(trained_N, advantage_N, torch.zeros_like(advantage_N))
        for choice in recipe.shaping:
            shaped = evidence | {"advantage_N": advantage_N, "trained_N": trained_N, "trained_S": trained_S}
            advantage_N = apply(resolve("shaping", SHAPING, choice), choice, shaped)
            advantage_N = torch.where(trained_N, advantage_N, torch.zeros_like(advantage_N))
        if recipe.prune:
            # The scalar itself where there is one: a mean of equal numbers may differ in the last bit and
            # break ties.
            whole = credit.advantage_S is not None and not recipe.shaping
            mean_S = credit.advantage_S if whole else segment_mean(advantage_N, inner)
            for choice in recipe.prune:
                pruned = evidence | {"advantage_S": mean_S, "trained_S": trained_S}
                kept_S = apply(resolve("prune", PRUNE, choice), choice, pruned)
                facts[f"prune/{choice.operator}"] = float((trained_S & ~kept_S).sum())
                trained_S = trained_S & kept_S
            advantage_N = torch.where(trained_S[traj_N], advantage_N, torch.zeros_like(advantage_N))
        if not bool(torch.isfinite(advantage_N).all()):
            raise EvidenceError(
                f"Recipe '{recipe.name}' made an advantage that is not finite.",
                fix="Look for a NaN in the reward columns.",
            )
        _advantage_facts(advantage_N, trained_S, traj_N, returns_N, evidence, facts)
    facts["trajectories/trained"] = float(trained_S.sum())

    components = _components(recipe, evidence, inner, advantage_N, trained_S, graded_S & has_tokens_S, facts)
    if denominators is not None:
        _check_denominators(denominators, tuple(components))
    spread = tuple(_spread(c, keep_N, denominators) for c in components)
    nothing = None
    if all(c.count == 0 for c in spread):
        nothing = (
            f"Nothing to train: of {layout.n_trajectories} trajectories {int(graded_S.sum())} are graded, "
            f"{int((graded_S & has_tokens_S).sum())} of them have trainable tokens, "
            f"and recipe '{recipe.name}' keeps none."
        )
    off_policy_N = _off_policy(recipe, columns) if "off_policy_S" in recipe.columns else None
    return Prepared(
        layout=layout,
        advantage_N=_scatter(advantage_N, keep_N),
        returns_N=None if returns_N is None else _scatter(returns_N, keep_N),
        trained_S=trained_S,
        off_policy_N=off_policy_N,
        columns={
            name: value.detach().to("cpu", torch.float64)
            for name in _TOKEN_COLUMNS
            if (value := getattr(columns, name)) is not None
        },
        components=spread,
        facts=facts,
        nothing=nothing,
    )


def _graded(columns: Columns, facts: dict[str, float]) -> torch.Tensor:
    """bool `[S]`; checks what must hold of every graded trajectory."""
    layout = columns.layout
    reward_S = columns.reward_S
    if bool(torch.isinf(reward_S).any()):
        raise EvidenceError(
            "A reward is infinite.", fix="A verdict holds a finite reward or none (NaN here)."
        )
    graded_S = ~torch.isnan(reward_S)
    ended_S = columns.terminated_S ^ columns.truncated_S
    loose = torch.nonzero(graded_S & ~ended_S).flatten().tolist()
    if loose:
        raise EvidenceError(
            f"Graded trajectories {loose[:8]} are not exactly one of terminated and truncated.",
            fix="Take both flags from the termination reason; a cancelled trajectory has no reward.",
        )
    empty = torch.nonzero(graded_S & (layout.lengths_S == 0)).flatten().tolist()
    if empty:
        raise EvidenceError(
            f"Graded trajectories {empty[:8]} have no action token.",
            fix="A trajectory without sampled tokens is not evidence: remove it when the batch is built.",
        )
    sizes = members_per_group(layout.group_S)
    if columns.expected_group_size is not None and set(sizes) - {columns.expected_group_size}:
        raise EvidenceError(
            f"Groups have sizes {sizes}, the run plans {columns.expected_group_size} members each.",
            fix="Group by (task, role) over all repeats, and keep faulted members as rows with reward NaN.",
        )
    facts["trajectories/total"] = float(layout.n_trajectories)
    facts["trajectories/ungraded"] = float((~graded_S).sum())
    return graded_S


def _kept_tokens(
    recipe: Recipe, columns: Columns, graded_S: torch.Tensor, facts: dict[str, float]
) -> torch.Tensor:
    """bool `[N]`: valid, fresh enough, of a graded trajectory; every needed column is finite there."""
    layout = columns.layout
    valid_N = (
        torch.ones(layout.n_tokens, dtype=torch.bool) if columns.valid_N is None else columns.valid_N.bool()
    )
    keep_N = valid_N & graded_S[layout.traj_N]
    facts["tokens/total"] = float(layout.n_tokens)
    facts["tokens/excluded"] = float((~valid_N).sum())
    if columns.lag_N is not None:
        if bool((columns.lag_N[keep_N] < 0).any()):
            raise EvidenceError(
                "A token was sampled from a newer policy version than the trainer has.",
                fix="Two runs share a store, or a publication was lost; stop and check.",
            )
        if recipe.max_lag is not None:
            stale_N = columns.lag_N > recipe.max_lag
            facts["tokens/stale"] = float((keep_N & stale_N).sum())
            keep_N = keep_N & ~stale_N
        if bool(keep_N.any()):
            facts["tokens/lag_mean"] = float(columns.lag_N[keep_N].to(torch.float64).mean())
            facts["tokens/lag_max"] = float(columns.lag_N[keep_N].max())
    for name in sorted(recipe.columns):
        value = getattr(columns, name)
        if not name.endswith("_N") or not value.is_floating_point():
            continue
        needed_N = keep_N if name not in ("logb_N", "prox_logp_N") else keep_N & ~_off_policy(recipe, columns)
        bad = int((~torch.isfinite(value[needed_N])).sum())
        if bad:
            raise EvidenceError(
                f"Column {name} is not finite on {bad} tokens that recipe '{recipe.name}' would train on.",
                fix="Set valid_N false for tokens whose log-prob or value is unknown; never fill it in.",
            )
    facts["tokens/kept"] = float(keep_N.sum())
    lengths_S = torch.zeros_like(layout.lengths_S).index_add(0, layout.traj_N, keep_N.to(torch.int64))
    facts["trajectories/all_tokens_excluded"] = float((graded_S & (lengths_S == 0)).sum())
    return keep_N


def _off_policy(recipe: Recipe, columns: Columns) -> torch.Tensor:
    """bool `[N]`: tokens of a teacher's trajectories, for a recipe that knows what to do with them.

    They have no behaviour log-prob: their ratio is `pi` itself. For any other recipe they are like unknown
    tokens.
    """
    if columns.off_policy_S is None or "off_policy_S" not in recipe.columns:
        return torch.zeros(columns.layout.n_tokens, dtype=torch.bool)
    return columns.off_policy_S[columns.layout.traj_N]


def _evidence(
    columns: Columns, inner: Layout, keep_N: torch.Tensor, graded_S: torch.Tensor, recipe: Recipe
) -> dict[str, Any]:
    """Everything an operator may ask for, gathered to the kept tokens, float64."""
    layout = columns.layout
    out: dict[str, Any] = {}
    for field in fields(columns):
        value = getattr(columns, field.name)
        if not isinstance(value, torch.Tensor):
            continue
        value = value.detach().to("cpu")
        if value.is_floating_point():
            value = value.to(torch.float64)
        if field.name == "turn_reward_N":
            value = land_on_kept(
                torch.where(graded_S[layout.traj_N], value, torch.zeros_like(value)), layout, keep_N
            )
        elif field.name.endswith("_N"):
            value = value[keep_N]
        out[field.name] = value
    out["length_S"] = layout.lengths_S if columns.length_S is None else columns.length_S
    out |= {"layout": inner, "group_S": layout.group_S, "graded_S": graded_S}
    old = out.get("logb_N" if recipe.old == "behaviour" else "prox_logp_N")
    if old is not None:
        out["old_logp_N"] = old
    return out


def _advantage_facts(
    advantage_N: torch.Tensor,
    trained_S: torch.Tensor,
    traj_N: torch.Tensor,
    returns_N: torch.Tensor | None,
    evidence: Mapping[str, Any],
    facts: dict[str, float],
) -> None:
    trained = advantage_N[trained_S[traj_N]]
    if trained.numel():
        facts["advantage/mean"] = float(trained.mean())
        facts["advantage/std"] = float(trained.std(correction=0))
        facts["advantage/abs_max"] = float(trained.abs().max())
    if returns_N is not None and "values_N" in evidence:
        explained = explained_variance(evidence["values_N"], returns_N)
        if explained is not None:
            facts["critic/explained_variance"] = explained
        facts["critic/bias"] = float((evidence["values_N"] - returns_N).mean())


def _components(
    recipe: Recipe,
    evidence: Mapping[str, Any],
    inner: Layout,
    advantage_N: torch.Tensor,
    trained_S: torch.Tensor,
    graded_S: torch.Tensor,
    facts: dict[str, float],
) -> list[Component]:
    """All components over the kept tokens, with local counts."""
    traj_N = inner.traj_N
    scopes_S = {"trained": trained_S, "graded": graded_S}
    success_S = graded_S & (evidence["reward_S"] > CORRECT_ABOVE)
    wins_G = group_sum(success_S.to(torch.int64), evidence["group_S"])
    scopes_S |= {"positive": success_S, "all_fail": graded_S & (wins_G[evidence["group_S"]] == 0)}

    def part(
        name: str, kind: Kind, choice: Choice, coefficient: float, in_S: torch.Tensor, reduction: Choice
    ) -> Component:
        active_N = in_S[traj_N]
        share: Share = apply(
            resolve("reduction", REDUCTION, reduction), reduction, {"layout": inner.keep(active_N)}
        )
        weight_N = torch.zeros(inner.n_tokens, dtype=torch.float64)
        weight_N[active_N] = share.weight_N
        return Component(
            name=name,
            kind=kind,
            choice=choice,
            coefficient=coefficient,
            active_N=active_N,
            weight_N=weight_N,
            count=share.count,
        )

    out: list[Component] = []
    if recipe.surrogate is not None:
        policy = part("policy", "policy", recipe.surrogate, 1.0, trained_S, recipe.reduction)
        factor_N = torch.ones(inner.n_tokens, dtype=torch.float64)
        for choice in recipe.token_weight:
            # Weights that rank tokens rank only those in the loss.
            inside = {
                k: v[policy.active_N] if k.endswith("_N") and isinstance(v, torch.Tensor) else v
                for k, v in {**evidence, "advantage_N": advantage_N}.items()
            }
            factor_N[policy.active_N] *= apply(resolve("token_weight", TOKEN_WEIGHT, choice), choice, inside)
        policy = replace(policy, weight_N=policy.weight_N * factor_N)
        if recipe.floor_batch_loss and float(-(policy.weight_N * advantage_N).sum()) < 0.0:
            facts["policy/floored"] = 1.0
            policy = replace(policy, weight_N=torch.zeros_like(policy.weight_N))
        out.append(policy)
    for choice in recipe.penalty:
        coefficient = _coefficient(PENALTY, "penalty", choice)
        out.append(
            part(f"penalty/{choice.operator}", "penalty", choice, coefficient, trained_S, recipe.reduction)
        )
    for axis, operators, choices in (
        ("teacher", TEACHER, recipe.teacher),
        ("imitation", IMITATION, recipe.imitation),
    ):
        for choice in choices:
            numbers = numbers_of(resolve(axis, operators, choice), choice)
            on = str(numbers["on"])
            if on not in SCOPES:
                raise ConfigError(
                    f"{axis}.{choice.operator}.on = '{on}' is no scope.", fix=nearest(on, SCOPES)
                )
            kind: Kind = "teacher" if axis == "teacher" else "imitation"
            coefficient = _coefficient(operators, axis, choice)
            out.append(
                part(f"{axis}/{choice.operator}", kind, choice, coefficient, scopes_S[on], recipe.reduction)
            )
    if recipe.value is not None:
        out.append(
            part("value", "value", recipe.value, recipe.value_coefficient, graded_S, recipe.value_reduction)
        )
    return out


def _coefficient(operators: Mapping[str, Any], axis: str, choice: Choice) -> float:
    value = numbers_of(resolve(axis, operators, choice), choice)["coefficient"]
    assert isinstance(value, (int, float))
    return float(value)


def _spread(
    component: Component, keep_N: torch.Tensor, denominators: Mapping[str, float] | None
) -> Component:
    """From kept tokens to all tokens, with the global denominator inside the weights."""
    count = component.count if denominators is None else denominators[component.name]
    weight_N = component.weight_N / count if count > 0 else torch.zeros_like(component.weight_N)
    active_N = torch.zeros_like(keep_N)
    active_N[keep_N] = component.active_N
    return replace(component, active_N=active_N, weight_N=_scatter(weight_N, keep_N), count=count)


def _scatter(values: torch.Tensor, keep_N: torch.Tensor) -> torch.Tensor:
    out_N = torch.zeros(keep_N.numel(), dtype=values.dtype)
    out_N[keep_N] = values
    return out_N


# ------------------------------------------------------------------------------------------------------ loss


def loss(
    recipe: Recipe,
    prepared: Prepared,
    *,
    logp_N: torch.Tensor,
    entropy_N: torch.Tensor | None = None,
    values_N: torch.Tensor | None = None,
    ref_kl_N: torch.Tensor | None = None,
    teacher_divergence_N: torch.Tensor | None = None,
    coefficients: Mapping[str, float] | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """The loss of a (micro-)batch: a scalar to call backward on, and metrics to add up.

    Losses of micro-batches add; nothing is divided here. Under data parallelism that averages gradients,
    multiply by the number of ranks. A part without any active token answers a zero that is still connected to
    the graph.

    Args:
        recipe: the one that `prepared` was made with.
        prepared: from `prepare`, or `Prepared.take` of it.
        logp_N: float `[N]` log-probs of the current policy, with gradient.
        entropy_N: float `[N]` entropy of the current policy, with gradient; needed by entropy terms, else
            only logged.
        values_N: float `[N]` (or logits `[N, B]`) of the current critic, with gradient.
        ref_kl_N: float `[N]` full-vocabulary KL to the reference, with gradient.
        teacher_divergence_N: float `[N]` full-vocabulary divergence from the teacher, with gradient.
        coefficients: coefficient per component name, replacing the recipe's (adaptive beta).

    Raises:
        EvidenceError: wrong shapes, or a value that is not finite on a token in the loss.
        ConfigError: an input that a component needs was not given.
    """
    n = prepared.layout.n_tokens
    live = {
        "logp_N": logp_N,
        "live_entropy_N": entropy_N,
        "live_values_N": values_N,
        "live_ref_kl_N": ref_kl_N,
        "live_teacher_divergence_N": teacher_divergence_N,
    }
    for name, value in live.items():
        if value is not None and (
            value.dim() == 0 or value.shape[0] != n or (value.dim() > 1 and name != "live_values_N")
        ):
            raise EvidenceError(
                f"loss() got {name} of shape {tuple(value.shape)} for {n} action tokens.",
                fix="Gather one number per action token, in the order of the layout.",
            )
    for column, name in LIVE.items():
        if name in recipe.live and live[column] is None:
            raise ConfigError(
                f"Recipe '{recipe.name}' needs {name} of the current model.", fix=f"Pass {name} to loss()."
            )
    known = {c.name for c in prepared.components}
    for name in coefficients or {}:
        if name not in known:
            raise ConfigError(f"No component '{name}' to give a coefficient to.", fix=nearest(name, known))

    work = torch.promote_types(logp_N.dtype, torch.float32)
    total = _connected_zero(live, work)
    parts: list[Metrics] = []
    views: dict[str, dict[str, Any]] = {}
    for component in prepared.components:
        if not bool(component.active_N.any()):
            continue
        # Policy and penalties act on the same tokens, so they share one gathered view.
        key = "policy" if component.kind == "penalty" else component.name
        if key not in views:
            views[key] = _view(recipe, prepared, component.active_N, live, work)
        coefficient = (coefficients or {}).get(component.name, component.coefficient)
        weight_N = component.weight_N[component.active_N].to(logp_N.device, work)
        term_N, metrics = _term(recipe, component, views[key])
        part = coefficient * (weight_N * term_N).sum()
        total = total + part
        parts += [metrics, total_of(f"loss/{component.name}", part)]
    if not bool(torch.isfinite(total.detach())):
        raise EvidenceError(
            "The loss is not finite.",
            fix="A log-prob or a value of the current model is NaN on a token in the loss.",
        )
    parts.append(total_of("loss/total", total))
    return total, merge(*parts)


def _connected_zero(live: Mapping[str, torch.Tensor | None], work: torch.dtype) -> torch.Tensor:
    """0 with a gradient of 0: an empty selection, so that no masked NaN is touched."""
    zeros = [value[:0].sum().to(work) for value in live.values() if value is not None]
    return torch.stack(zeros).sum()


def _view(
    recipe: Recipe,
    prepared: Prepared,
    active_N: torch.Tensor,
    live: Mapping[str, torch.Tensor | None],
    work: torch.dtype,
) -> dict[str, Any]:
    """Columns of the active tokens only, on the device of the model."""
    logp_N = live["logp_N"]
    assert logp_N is not None
    index = torch.nonzero(active_N).flatten()
    on_device = index.to(logp_N.device)
    view: dict[str, Any] = {"layout": prepared.layout.keep(active_N)}
    for name, value in live.items():
        if value is not None:
            view[name] = value.index_select(0, on_device).to(work)
    for name, value in prepared.columns.items():
        view[name] = value[index].to(logp_N.device, work)
    view["advantage_N"] = prepared.advantage_N[index].to(logp_N.device, work)
    if prepared.returns_N is not None:
        view["returns_N"] = prepared.returns_N[index].to(logp_N.device, work)
    if prepared.off_policy_N is not None:
        view["off_policy_N"] = prepared.off_policy_N[index].to(logp_N.device)
    old = view.get("logb_N" if recipe.old == "behaviour" else "prox_logp_N")
    if old is not None and prepared.off_policy_N is not None:
        old = torch.where(view["off_policy_N"], torch.zeros_like(old), old)
    if old is not None:
        view["old_logp_N"] = old
    bad = (~torch.isfinite(view["logp_N"].detach())).sum()
    if bool(bad > 0):
        raise EvidenceError(
            f"The current policy's log-prob is not finite on {int(bad)} tokens in the loss.",
            fix="Check the model for NaN weights, and that sampled tokens are inside its vocabulary mask.",
        )
    return view


def _term(recipe: Recipe, component: Component, view: dict[str, Any]) -> tuple[torch.Tensor, Metrics]:
    """Loss per active token and its metrics."""
    name, choice = component.name, component.choice
    if component.kind == "policy":
        return _policy(recipe, choice, view)
    if component.kind == "value":
        value_N: torch.Tensor = apply(resolve("value", VALUE, choice), choice, view)
        return value_N, mean_of("value/loss", value_N)
    table = {"penalty": PENALTY, "teacher": TEACHER, "imitation": IMITATION}[component.kind]
    penalty = apply(resolve(component.kind, table, choice), choice, view)
    return penalty.loss_N, mean_of(name, penalty.value_N)


def _policy(recipe: Recipe, choice: Choice, view: dict[str, Any]) -> tuple[torch.Tensor, Metrics]:
    """Ratio, surrogate, correction; and everything that is logged about them."""
    log_ratio_N = apply(resolve("ratio", RATIO, recipe.ratio), recipe.ratio, view)
    ratio: Ratio = ratio_of(log_ratio_N)
    term: Term = apply(resolve("surrogate", SURROGATE, choice), choice, view | {"ratio": ratio})
    loss_N = term.loss_N
    raw_N = ratio.value_N.detach()
    metrics = [
        mean_of("ratio/raw", raw_N),
        mean_of("ratio/effective", term.effective_N),
        mean_of("ratio/clip_fraction", term.clipped_N.to(raw_N.dtype)),
        mean_of("ratio/saturated_fraction", ratio.saturated_N.to(raw_N.dtype)),
        maximum_of("ratio/log_abs_max", ratio.log_N.detach().abs()),
        mean_of("policy/surprise", -view["logp_N"]),
    ]
    if recipe.correction is not None:
        fixed: Ratio = apply(resolve("correction", CORRECTION, recipe.correction), recipe.correction, view)
        loss_N = fixed.value_N * loss_N
        before = ratio_of(fixed.log_N).value_N
        metrics += [
            mean_of("correction/raw", before),
            mean_of("correction/effective", fixed.value_N),
            mean_of("correction/changed_fraction", (before != fixed.value_N).to(raw_N.dtype)),
        ]
    if "live_entropy_N" in view:
        metrics.append(mean_of("policy/entropy", view["live_entropy_N"]))
    if "logb_N" in view:
        metrics.append(mismatch_metrics(view["logp_N"].detach(), view["logb_N"]))
    if "ref_logp_N" in view:
        known = torch.isfinite(view["ref_logp_N"])
        metrics.append(mean_of("policy/kl_ref_k3", k3((view["logp_N"].detach() - view["ref_logp_N"])[known])))
    return loss_N, merge(*metrics)
