"""One update: groups of trajectories in, moved weights and a report out.

`Learner.update` is the whole path: records to columns (`evidence`), columns that need a model (`passes`),
`agentrl.algo.objective.prepare`, mini-batches, micro-batches, backward on plain weighted sums, one optimizer
step per mini-batch. `Learner.imitate` is cross-entropy on demonstrations.

Invariants: denominators are global, so no split into micro-batches or ranks changes the gradient; a
mini-batch is normalised by its own counts and never dropped, however small; a step whose loss or gradient is
not finite, or whose evidence disagrees with the learner's own log-probs, changes nothing and says why; the
unit of the schedule, of the counter and of the checkpoint is the optimizer step. Master weights, gradients
and Adam moments are float32.

What it does not do: sample, publish, write to disk, decide when to stop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from torch import nn

from agentrl.algo.axes import apply, numbers_of, resolve
from agentrl.algo.columns import segment_sum
from agentrl.algo.critic_losses import VALUE
from agentrl.algo.diagnostics import calibration, critic_report
from agentrl.algo.distributions import Divergence
from agentrl.algo.metrics import Metrics, finish_metrics, merge
from agentrl.algo.objective import Columns, Prepared, loss, prepare
from agentrl.algo.penalties import adapt_beta
from agentrl.algo.recipes import Recipe
from agentrl.algo.reductions import REDUCTION
from agentrl.errors import ConfigError, EvidenceError, nearest
from agentrl.learner import imitation, parallel, passes
from agentrl.learner.batch import MicroBatch, Packing, for_ranks, pack, padding_share
from agentrl.learner.critic import Critic, HeadShape, ValueHead
from agentrl.learner.evidence import Batch, gather
from agentrl.learner.imitation import ImitationProgress
from agentrl.learner.lora import is_adapted
from agentrl.learner.model import (
    Outputs,
    Policy,
    check_support,
    check_tied,
    checkpoint_activations,
    device_of,
    full_divergence,
    head_weight,
)
from agentrl.learner.optimizer import Schedule, adam, clip_and_step, rate_factor
from agentrl.learner.profile import profile
from agentrl.learner.report import Clock, Gaps, StepReport, group_facts, of_one_step
from agentrl.learner.samples import Rows, build
from agentrl.types import Group, Trajectory

OWN_KL = "penalty/kl_old"
ROUNDING_KL = 1e-8
"""A KL to the policy that sampled below this was measured before anything moved: it says nothing about a
coefficient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """Numbers of the learner that are not the recipe's."""

    learning_rate: float = 1e-6
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    max_grad_norm: float | None = 1.0
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    total_steps: int | None = None
    """Optimizer steps (not batches) until a linear or cosine schedule reaches 0: see `optimizer_steps`."""
    mini_batches: int = 1
    """Optimizer steps per pass over the trajectories of one update."""
    epochs: int = 1
    """Passes over the trajectories of one update."""
    max_lag: int | None = None
    """Tokens more than this many policy versions old are withheld from the gradient. None: only the recipe's
    bound."""
    max_mismatch: float | None = 0.1
    """Refuse a step when tokens sampled from the very weights being trained differ in log-prob by more than
    this on average (or in k3): the sampler is not what it claims to be. None: measured only."""
    skip_zero_advantage: bool = True
    """Do not compute trajectories whose gradient is exactly 0 (advantage 0 and no other component)."""
    packing: Packing = field(default_factory=Packing)
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    gradient_checkpointing: bool = False
    """Compute the trunk's activations again in the backward pass instead of keeping them."""
    critic: Literal["separate", "shared"] = "separate"
    """Used only by recipes that need values."""
    critic_learning_rate: float | None = None
    """None: the policy's."""
    adaptive: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Component name to (low, high): its coefficient doubles above and halves below, after every update. Over
    those of the recipe (`target` of a penalty)."""
    shard: bool = False
    """Shard weights, gradients and moments over ranks (FSDP2) instead of replicating them."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("mini_batches", "epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.learning_rate < 0 or (self.max_grad_norm is not None and self.max_grad_norm <= 0):
            raise ConfigError("learning_rate must not be negative and max_grad_norm must be positive.")
        if self.schedule != "constant" and self.total_steps is None:
            raise ConfigError(
                f"Schedule '{self.schedule}' has no end.", fix="Set total_steps, in optimizer steps."
            )

    def optimizer_steps(self, updates: int) -> int:
        """Optimizer steps that so many updates take: the unit of `total_steps`."""
        return updates * self.mini_batches * self.epochs


@dataclass(slots=True)
class _Work:
    """What an update collects on its way."""

    clock: Clock
    micro: list[MicroBatch] = field(default_factory=list)
    mine: list[MicroBatch] = field(default_factory=list)
    """Those of this rank, once per forward and backward pass of the policy."""
    sums: list[Metrics] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    passes: int = 0
    untrusted: str | None = None
    """The evidence of this update disagrees with the learner: no later mini-batch of it trains either."""


class Learner:
    """Owns the policy's master weights, their optimizer, and the critic's."""

    def __init__(
        self,
        model: Any,
        recipe: Recipe,
        config: LearnerConfig | None = None,
        *,
        reference: Any | None = None,
        teacher: Any | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Wrap a transformers model (see `model.load`), which is trained in place.

        Args:
            model: float32 master weights.
            recipe: what is optimized.
            config: numbers.
            reference: frozen model for KL terms; a recipe that needs one is refused without. With LoRA, the
                adapted model with its adapters off is used when none is given.
            teacher: frozen model for teacher terms.
            vocab_size: ids of the tokenizer, if fewer than the model's output rows.

        Raises:
            ConfigError: the recipe needs a model that is not given, the architecture is not supported, the
                master weights are not float32, tied embeddings came apart.
        """
        self.config = config or LearnerConfig()
        self.recipe = recipe
        self.vocab_size = vocab_size
        _require_models(
            recipe,
            reference=reference is not None or is_adapted(model),
            teacher=teacher is not None,
        )
        check_tied(model)
        check_support(model, layout=self.config.packing.layout)
        if self.config.shard and is_adapted(model):
            raise ConfigError("shard = true does not support adapters.", fix="Set shard = false for LoRA.")
        if self.config.gradient_checkpointing:
            checkpoint_activations(model)
        compute = torch.bfloat16 if self.config.compute_dtype == "bfloat16" else None
        self.policy = Policy(model, compute_dtype=compute)
        self.device = device_of(model)
        self.model_rows = head_weight(model).shape[0]
        self.reference = None if reference is None else _frozen(reference, compute)
        self.teacher = None if teacher is None else _frozen(teacher, compute)
        self._kind = _divergence_kind(recipe)
        whole = {"ref_kl_N", "teacher_divergence_N"} & recipe.live
        for word, other in (("reference", self.reference), ("teacher", self.teacher)):
            if other is not None:
                _check_rows(word, other, rows=self.model_rows, ids=vocab_size, equal=bool(whole))
        self.critic, self.value_head = _values(self.policy, recipe, self.config)
        modules = [self.policy, *([] if self.critic is None else [self.critic])]
        if self.config.shard:
            for module in modules:
                parallel.shard(module)
        else:
            parallel.broadcast(modules)
        trained = [self.policy, *([] if self.value_head is None else [self.value_head])]
        self.optimizer = self._adam(trained, self.config.learning_rate)
        self.critic_optimizer = None if self.critic is None else self._adam([self.critic], self._critic_rate)
        self.optimizer_step = 0
        self.updates = 0
        self.coefficients: dict[str, float] = {}
        """Current coefficients of adaptive components."""

    @property
    def _critic_rate(self) -> float:
        rate = self.config.critic_learning_rate
        return self.config.learning_rate if rate is None else rate

    def _adam(self, modules: Sequence[nn.Module], rate: float) -> torch.optim.AdamW:
        config = self.config
        return adam(
            modules,
            rate=rate,
            weight_decay=config.weight_decay,
            betas=config.betas,
            epsilon=config.epsilon,
            fused=not config.shard,
        )

    # --------------------------------------------------------------------------------------------- update

    def update(
        self,
        groups: Sequence[Group],
        *,
        version: int,
        extra: Mapping[str, torch.Tensor] | None = None,
        train_policy: bool = True,
        expected_group_size: int | None = None,
    ) -> StepReport:
        """Train on groups of trajectories.

        Args:
            groups: the same on every rank, ungraded members included.
            version: the policy version of the current weights.
            extra: further columns of `objective.Columns` by name, in the order of the trajectories.
            train_policy: False trains the critic only (its pre-training on stored trajectories).
            expected_group_size: refuse groups of another size.

        Returns:
            the report; refused mini-batches are named in it, they do not raise.

        Raises:
            EvidenceError: the records or columns are not what the recipe needs.
        """
        clock = Clock(self.device)
        batch = gather(
            groups,
            version=version,
            max_lag=self.config.max_lag,
            vocab_size=self.vocab_size,
            expected_group_size=expected_group_size,
            turn_rewards="turn_reward_N" in self.recipe.columns,
        )
        parallel.require_same("the step's trajectories", "\n".join(t.id for t in batch.trajectories))
        self._refuse_large_ids(batch.rows)
        if extra:
            known = {f.name for f in fields(Columns)}
            for name in extra:
                if name not in known:
                    raise ConfigError(f"There is no column '{name}'.", fix=nearest(name, known))
            batch = replace(batch, columns=replace(batch.columns, **extra))  # type: ignore[arg-type]
        clock.lap("data")
        columns = passes.fill(batch, self._passes(batch.columns), self.config.packing, self.device)
        prepared = prepare(self.recipe, columns)
        facts = {**batch.facts, **prepared.facts, **group_facts(columns)}
        facts |= _critic_facts(columns, prepared)
        clock.lap("columns")
        work = _Work(clock=clock)
        if prepared.nothing is None:
            compute = self._with_gradient(prepared)
            for epoch in range(self.config.epochs):
                for members in self._mini_batches(prepared, epoch):
                    self._mini_batch(batch, columns, prepared, members, compute, work, train_policy)
        self.updates += 1
        return self._report(prepared, facts, work)

    def skip(self, why: str) -> StepReport:
        """Count an update that trains nothing, as when nothing worth training on could be sampled."""
        self.updates += 1
        metrics = {"optimizer/step": float(self.optimizer_step), "optimizer/refused": 0.0}
        return StepReport(step=self.optimizer_step, taken=0, refused=(), nothing=why, metrics=metrics)

    def _mini_batches(self, prepared: Prepared, epoch: int) -> Iterator[list[int]]:
        """Trajectories of each optimizer step: whole groups where there are enough, shuffled by the seed."""
        n = self.config.mini_batches
        active_N = torch.stack([c.active_N for c in prepared.components]).any(0)
        members = _trajectories_with(active_N, prepared)
        if n == 1:
            yield members
            return
        rng = np.random.default_rng((self.config.seed, self.updates, epoch))
        by_group: dict[int, list[int]] = {}
        for s in members:
            by_group.setdefault(int(prepared.layout.group_S[s]), []).append(s)
        units = list(by_group.values()) if len(by_group) >= n else [[s] for s in members]
        for part in np.array_split(rng.permutation(len(units)), n):
            yield sorted(s for k in part for s in units[k])

    def _with_gradient(self, prepared: Prepared) -> set[int]:
        """Trajectories on which a component has a gradient that is not exactly zero."""
        acts_N = torch.zeros(prepared.layout.n_tokens, dtype=torch.bool)
        for component in prepared.components:
            here_N = component.active_N & (component.weight_N != 0)
            if component.kind == "policy" and self.config.skip_zero_advantage:
                here_N = here_N & (prepared.advantage_N != 0)
            if self.coefficients.get(component.name, component.coefficient) != 0:
                acts_N |= here_N
        return set(_trajectories_with(acts_N, prepared))

    def _mini_batch(
        self,
        batch: Batch,
        columns: Columns,
        prepared: Prepared,
        members: list[int],
        compute: set[int],
        work: _Work,
        train_policy: bool,
    ) -> None:
        """K critic steps and one policy step on the given trajectories.

        Denominators count all members; only those with a gradient are computed.
        """
        indices = [s for s in members if s in compute]
        if not indices:
            return
        if work.untrusted is not None:
            work.refused.append(work.untrusted)
            return
        if self.config.mini_batches > 1:
            counts = _counts(self.recipe, prepared.take(members))
            prepared = prepared.rescale({name: count or 1.0 for name, count in counts.items()})
        micro = pack(
            batch.rows, self.config.packing, indices=indices, groups=prepared.layout.group_S.tolist()
        )
        mine = for_ranks(micro, parallel.world())[parallel.rank()]
        work.micro += micro
        work.clock.lap("data")
        if self.critic is not None:
            for _ in range(self.recipe.critic_steps):
                self._critic_step(prepared, mine, work)
        if train_policy:
            self._policy_step(prepared, columns, mine, work)

    def _policy_step(self, prepared: Prepared, columns: Columns, mine: list[MicroBatch], work: _Work) -> None:
        recipe = self.recipe
        if self.critic is not None:
            recipe = replace(recipe, value=None)
            prepared = _only(prepared, lambda kind: kind != "value")
        first = work.passes == 0
        work.passes += 1
        work.mine += mine
        causes: list[str] = []
        parts: list[Metrics] = []
        gaps = Gaps()
        for one in mine:
            micro = one.to(self.device)
            with parallel.reduce_only(self.policy, last=one is mine[-1], sharded=self.config.shard):
                out = self.policy(micro)
                work.clock.lap("forward")
                try:
                    value, metrics = loss(
                        recipe,
                        prepared.take(list(one.trajectories_S)),
                        logp_N=out.log_prob_M,
                        coefficients=self.coefficients or None,
                        **self._live(recipe, micro, out),
                    )
                    parts.append(metrics)
                except EvidenceError as error:
                    causes.append(error.message)
                    value = out.anchor * 0.0
                if not one.trajectories_S:
                    value = value + out.anchor * 0.0
                torch.autograd.backward(value)
            if first:
                gaps.add(out.log_prob_M, columns, one)
            work.clock.lap("backward")
        if not self.config.shard:
            parallel.sum_gradients(self.policy.parameters())
            if self.value_head is not None:
                parallel.sum_gradients(self.value_head.parameters())
        if first:
            gaps.sum_over_ranks()
            work.metrics |= gaps.facts()
            work.untrusted = gaps.refusal(self.config.max_mismatch)
            if work.untrusted is not None:
                causes.append(work.untrusted)
        norm = self._step(self.optimizer, self.config.learning_rate, causes, parts, work)
        if norm is not None:
            self.optimizer_step += 1
            work.norms.append(norm)

    def _critic_step(self, prepared: Prepared, mine: list[MicroBatch], work: _Work) -> None:
        assert self.critic is not None
        assert self.critic_optimizer is not None
        recipe = replace(self.recipe, surrogate=None, penalty=(), teacher=(), imitation=(), token_weight=())
        prepared = _only(prepared, lambda kind: kind == "value")
        causes: list[str] = []
        parts: list[Metrics] = []
        for one in mine:
            with parallel.reduce_only(self.critic, last=one is mine[-1], sharded=self.config.shard):
                live_M, end_S, anchor = self.critic(one.to(self.device))
                work.clock.lap("forward")
                try:
                    value, metrics = loss(
                        recipe,
                        prepared.take(list(one.trajectories_S)),
                        logp_N=torch.zeros(one.n_actions, device=self.device),
                        values_N=live_M,
                    )
                    metrics.totals.pop("loss/total", None)
                    parts.append(metrics)
                except EvidenceError as error:
                    causes.append(f"critic: {error.message}")
                    value = anchor * 0.0
                torch.autograd.backward(value + end_S.sum() * 0.0 + anchor * 0.0)
            work.clock.lap("backward")
        if not self.config.shard:
            parallel.sum_gradients(self.critic.parameters())
        norm = self._step(self.critic_optimizer, self._critic_rate, causes, parts, work, who="critic: ")
        if norm is not None:
            work.metrics["critic/grad_norm"] = norm

    def _step(
        self,
        optimizer: torch.optim.Optimizer,
        rate: float,
        causes: list[str],
        parts: list[Metrics],
        work: _Work,
        *,
        who: str = "",
    ) -> float | None:
        """Step unless any rank has a cause not to; the gradient norm, or None when refused."""
        causes = [cause for of_rank in parallel.gather_objects(causes) for cause in of_rank]
        factor = rate_factor(
            self.optimizer_step,
            schedule=self.config.schedule,
            warmup_steps=self.config.warmup_steps,
            total_steps=self.config.total_steps,
        )
        norm = clip_and_step(
            optimizer,
            rate=rate * factor,
            max_grad_norm=self.config.max_grad_norm,
            refuse=bool(causes),
        )
        if norm is None:
            work.refused.append(causes[0] if causes else f"{who}The gradient is not finite.")
        else:
            work.sums.append(of_one_step(parts))
        work.clock.lap("optimizer")
        return norm

    # --------------------------------------------------------------------------------- what models say

    def _live(self, recipe: Recipe, micro: MicroBatch, out: Outputs) -> dict[str, torch.Tensor]:
        """Arguments of `loss` beside log-probs, with gradient."""
        live: dict[str, torch.Tensor] = {"entropy_N": out.entropy_M}
        if self.value_head is not None:
            live["values_N"] = self.value_head(out.hidden_MD)
        for name, other in (("ref_kl_N", self.reference), ("teacher_divergence_N", self.teacher)):
            if name in recipe.live:
                with torch.no_grad(), self._other(other) as policy:
                    theirs = policy.hidden(micro).index_select(0, micro.predict_M)
                live[name] = full_divergence(
                    out.hidden_MD,
                    head_weight(self.policy.model),
                    theirs,
                    head_weight(policy.model),
                    kind=self._kind if name == "teacher_divergence_N" else "reverse",
                    temperature_N=micro.temperature_M,
                )
        return live

    @contextlib.contextmanager
    def _other(self, other: Policy | None) -> Iterator[Policy]:
        """A frozen model; None: the policy with its adapters off."""
        if other is not None:
            yield other
            return
        with self.policy.model.disable_adapter():
            yield self.policy

    def _passes(self, columns: Columns) -> list[passes.Pass]:
        """Passes before the update for what the recipe needs and the batch does not have."""
        wanted = self.recipe.columns - columns.present
        out: list[passes.Pass] = []
        if wanted & {"prox_logp_N", "entropy_N"}:
            out.append(self._pass_proximal)
        if "ref_logp_N" in wanted:
            out.append(lambda micro: {"ref_logp_N": self._other_log_probs(self.reference, micro)})
        if "teacher_logp_N" in wanted:
            out.append(lambda micro: {"teacher_logp_N": self._other_log_probs(self.teacher, micro)})
        if self.recipe.needs_critic and columns.values_N is None:
            head = self.critic.head if self.critic is not None else self.value_head
            assert head is not None
            graded = columns.reward_S[torch.isfinite(columns.reward_S)]
            if graded.numel():
                head.start_at(float(graded.mean()))
            out.append(self._pass_values)
        return out

    def _pass_proximal(self, micro: MicroBatch) -> dict[str, torch.Tensor]:
        out = self.policy(micro)
        return {"prox_logp_N": out.log_prob_M, "entropy_N": out.entropy_M}

    def _other_log_probs(self, other: Policy | None, micro: MicroBatch) -> torch.Tensor:
        with self._other(other) as policy:
            value: torch.Tensor = policy(micro).log_prob_M
        return value

    def _pass_values(self, micro: MicroBatch) -> dict[str, torch.Tensor]:
        if self.critic is not None:
            live_M, end_S, _ = self.critic(micro)
            return {"values_N": self.critic.head.scalar(live_M), "bootstrap_S": end_S}
        assert self.value_head is not None
        out, head = self.policy(micro), self.value_head
        return {
            "values_N": head.scalar(head(out.hidden_MD)),
            "bootstrap_S": head.scalar(head(out.end_hidden_SD)),
        }

    def _refuse_large_ids(self, rows: Sequence[Rows | None]) -> None:
        for one in rows:
            if one is not None and max(int(row.max()) for row in one.rows) >= self.model_rows:
                raise EvidenceError(
                    f"Trajectory {one.trajectory_id} holds an id that the model has no embedding for "
                    f"({self.model_rows} rows).",
                    fix="It was sampled from another model, or recorded with another tokenizer.",
                )

    # --------------------------------------------------------------------------------------------- report

    def _report(self, prepared: Prepared, facts: Mapping[str, float], work: _Work) -> StepReport:
        metrics = dict(facts) | finish_metrics(merge(*work.sums)) | work.metrics
        if work.norms:
            metrics["optimizer/grad_norm"] = sum(work.norms) / len(work.norms)
        metrics |= self._adapt(prepared, metrics)
        seconds = work.clock.seconds
        total = sum(seconds.values())
        tokens = sum(m.n_tokens for m in work.micro)
        metrics |= {f"time/{k}_s": v for k, v in seconds.items()}
        metrics |= profile(
            self.policy.model,
            work.mine,
            seconds=seconds.get("forward", 0.0) + seconds.get("backward", 0.0),
            compute=self.policy.compute_dtype,
        )
        row_tokens = sum(m.n_row_tokens for m in work.micro)
        metrics |= {
            "time/total_s": total,
            "batch/tokens": float(tokens),
            "batch/row_tokens": float(row_tokens),
            "batch/sharing_ratio": row_tokens / tokens if tokens else 1.0,
            "batch/micro_batches": float(len(work.micro)),
            "batch/padding_share": padding_share(work.micro),
            "batch/tokens_per_s": tokens / total if total > 0 else 0.0,
            "batch/row_tokens_per_s": row_tokens / total if total > 0 else 0.0,
            "optimizer/step": float(self.optimizer_step),
            "optimizer/refused": float(len(work.refused)),
            "optimizer/learning_rate": float(self.optimizer.param_groups[0]["lr"]),
        }
        nothing = prepared.nothing
        if nothing is None and not work.micro:
            nothing = "Nothing to train: every advantage is 0 and no other component acts."
        return StepReport(
            step=self.optimizer_step,
            taken=len(work.norms),
            refused=tuple(work.refused),
            nothing=nothing,
            metrics=metrics,
        )

    def _adapt(self, prepared: Prepared, metrics: Mapping[str, float]) -> dict[str, float]:
        """Move the coefficients of adaptive components after what was measured."""
        known = {c.name: c.coefficient for c in prepared.components}
        for name, (low, high) in {**self.recipe.bands, **self.config.adaptive}.items():
            if name not in known:
                raise ConfigError(f"adaptive names no component '{name}'.", fix=nearest(name, known))
            now = self.coefficients.get(name, known[name])
            if name in metrics and not (name == OWN_KL and metrics[name] < ROUNDING_KL):
                now = adapt_beta(now, metrics[name], low=low, high=high)
            self.coefficients[name] = now
        return {f"coefficient/{name}": value for name, value in self.coefficients.items()}

    # ------------------------------------------------------------------------------------------ imitation

    def imitate(
        self,
        trajectories: Sequence[Trajectory],
        *,
        epochs: int = 1,
        mini_batch: int = 16,
        learning_rate: float | None = None,
        schedule: Schedule = "linear",
        warmup_steps: int = 0,
        progress: Callable[[ImitationProgress], None] | None = None,
    ) -> list[float]:
        """Train on the sampled tokens of demonstrations (see `imitation.imitate`).

        With an optimizer of its own, so that its moments do not leak into the policy updates that follow;
        `optimizer_step` does not count these steps.

        Args:
            trajectories: graded or not: choosing the good ones is the caller's. Log-probs are not needed. One
                that ended before its first call has nothing to imitate and is left out.
            epochs: passes over all of them.
            mini_batch: trajectories per optimizer step.
            learning_rate: default the config's.
            schedule: of the rate over this call.
            warmup_steps: optimizer steps of linear warm-up.
            progress: called after each optimizer step.

        Returns:
            mean cross-entropy per token before each optimizer step, nats.
        """
        rows = [build(t, vocab_size=self.vocab_size) for t in trajectories if t.calls]
        self._refuse_large_ids(rows)
        rate = self.config.learning_rate if learning_rate is None else learning_rate
        return imitation.imitate(
            self.policy,
            self._adam([self.policy], rate),
            rows,
            rate=rate,
            packing=self.config.packing,
            epochs=epochs,
            mini_batch=mini_batch,
            schedule=schedule,
            warmup_steps=warmup_steps,
            max_grad_norm=self.config.max_grad_norm,
            seed=self.config.seed,
            sharded=self.config.shard,
            progress=progress,
        )


# ------------------------------------------------------------------------------------------------ small parts


def _values(policy: Policy, recipe: Recipe, config: LearnerConfig) -> tuple[Critic | None, ValueHead | None]:
    """The critic that the recipe needs: a separate model, or a head on the policy's trunk."""
    if not recipe.needs_critic:
        return None, None
    shape = HeadShape()
    if recipe.value is not None and recipe.value.operator == "hl_gauss":
        numbers = numbers_of(VALUE["hl_gauss"], recipe.value)
        bins, low, high, sigma = (float(str(numbers[k])) for k in ("bins", "low", "high", "sigma"))
        shape = HeadShape(bins=int(bins), low=low, high=high, sigma=sigma)
    if config.critic == "shared":
        head = ValueHead(head_weight(policy.model).shape[1], shape)
        return None, head.to(device_of(policy), head_weight(policy.model).dtype)
    critic = Critic(
        policy.model,
        shape,
        compute_dtype=policy.compute_dtype,
        freeze_attention=recipe.critic_freezes_attention,
    )
    return critic, None


def _divergence_kind(recipe: Recipe) -> Divergence:
    """Of the divergence from the teacher."""
    kinds = {c.numbers.get("kind", "reverse") for c in recipe.teacher if c.operator == "divergence"}
    kind = kinds.pop() if kinds else "reverse"
    if kind not in get_args(Divergence):
        raise ConfigError(
            f"teacher.divergence.kind = '{kind}' is no divergence.",
            fix=nearest(str(kind), get_args(Divergence)),
        )
    return cast(Divergence, kind)


def _frozen(model: Any, compute: torch.dtype | None) -> Policy:
    model.requires_grad_(False)
    model.eval()
    return Policy(model, compute_dtype=compute)


def _require_models(recipe: Recipe, *, reference: bool, teacher: bool) -> None:
    for needed, given, word in (
        (recipe.needs_reference, reference, "reference"),
        (recipe.needs_teacher, teacher, "teacher"),
    ):
        if needed and not given:
            raise ConfigError(
                f"Recipe '{recipe.name}' needs a {word} model.",
                fix=f"Give Learner(..., {word}=model), or take the {word} term out of the recipe.",
            )


def _check_rows(word: str, other: Policy, *, rows: int, ids: int | None, equal: bool) -> None:
    """Refuse a frozen model that can not speak of every token of the policy."""
    theirs = head_weight(other.model).shape[0]
    if theirs < (ids or rows) or (equal and theirs != rows):
        raise ConfigError(
            f"The {word} has {theirs} output rows, the policy {rows}.",
            fix=f"Give a {word} with the policy's tokenizer"
            + (" and as many rows: whole distributions are compared." if equal else "."),
        )


def _only(prepared: Prepared, wanted: Callable[[str], bool]) -> Prepared:
    return replace(prepared, components=tuple(c for c in prepared.components if wanted(c.kind)))


def _trajectories_with(token_N: torch.Tensor, prepared: Prepared) -> list[int]:
    """Trajectories that have a token where bool `token_N` holds, ascending."""
    found: list[int] = torch.nonzero(segment_sum(token_N.to(torch.int64), prepared.layout)).flatten().tolist()
    return found


def _counts(recipe: Recipe, part: Prepared) -> dict[str, float]:
    """Denominator of each component over a part of the batch, in units of its reduction."""
    counts: dict[str, float] = {}
    for component in part.components:
        choice = recipe.value_reduction if component.kind == "value" else recipe.reduction
        evidence = {"layout": part.layout.keep(component.active_N)}
        counts[component.name] = apply(resolve("reduction", REDUCTION, choice), choice, evidence).count
    return counts


def _critic_facts(columns: Columns, prepared: Prepared) -> dict[str, float]:
    """How good the values before the update were, on the tokens that the critic trains on."""
    if columns.values_N is None or prepared.returns_N is None:
        return {}
    value = next((c for c in prepared.components if c.kind == "value"), None)
    in_N = value.active_N if value is not None else prepared.advantage_N != 0
    if not bool(in_N.any()):
        return {}
    values_N = columns.values_N[in_N]
    facts = critic_report(values_N, prepared.returns_N[in_N], prepared.layout.keep(in_N))
    graded = columns.reward_S[torch.isfinite(columns.reward_S)]
    if bool(((graded == 0) | (graded == 1)).all()):
        error = calibration(values_N, columns.reward_S[prepared.layout.traj_N][in_N])
        if error is not None:
            facts["critic/calibration_error"] = error
    return facts
