"""Groups of trajectories to the columns of evidence that `agentrl.algo` works on, with the staleness bound.

Every trajectory of the step becomes an entry. Ungraded ones (a fault, a cancellation) have no action tokens
and a NaN reward: they are counted and never enter statistics or a loss. So are those in which the policy was
never asked (an agent that gave up first, a task that does not fit the context): what they earned is nobody's
doing. A graded trajectory whose tokens are
all too old stays in the statistics of its group (its reward is a fact) and out of the gradient.

Where the recipe has turn rewards, what single steps earned leaves the outcome and stands on the last token of
its turn: each part of a reward is counted once.

Staleness is measured at one moment, when the step is made: `lag = trainer version - version of the token`. A
token may train iff `lag <= bound`; a token from a version above the trainer's is an error, never a small lag.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from agentrl.algo.columns import Layout, segment_sum
from agentrl.algo.objective import Columns
from agentrl.errors import EvidenceError
from agentrl.learner.samples import UNKNOWN_VERSION, Rows, build
from agentrl.types import Group, Trajectory, step_number


@dataclass(frozen=True, slots=True)
class Lag:
    """Policy versions between the moments of one trajectory's life, all as seen when it is trained."""

    submit: int
    """Since it was submitted."""
    oldest: int
    """Of its oldest token: what the bound is compared with."""
    newest: int
    """Of its newest token."""
    queued: int
    """Since it was complete."""


def lag_of(*, submitted: int, tokens: Sequence[int], completed: int, trained: int) -> Lag:
    """Lags from versions. Example: submitted 5, tokens [5, 6], completed at 6, trained at 8: 3, 3, 2, 2.

    Raises:
        EvidenceError: a token is newer than the trainer.
    """
    _refuse_newer(max(tokens), trained)
    return Lag(
        submit=trained - submitted,
        oldest=trained - min(tokens),
        newest=trained - max(tokens),
        queued=trained - completed,
    )


def admits(tokens: Sequence[int], *, trained: int, bound: int) -> bool:
    """Whether no token of a trajectory is more than `bound` versions older than the trainer's `trained`."""
    _refuse_newer(max(tokens), trained)
    return trained - min(tokens) <= bound


def _refuse_newer(newest: int, trained: int) -> None:
    if newest > trained:
        raise EvidenceError(
            f"A token was sampled from policy version {newest}, the learner is at {trained}.",
            fix="Two runs share a store or a publication was lost: stop and compare their versions.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """All trajectories of one step, in the flat layout."""

    trajectories: tuple[Trajectory, ...]
    rows: tuple[Rows | None, ...]
    """None: ungraded or without a call, nothing to compute."""
    columns: Columns
    facts: Mapping[str, float]

    @property
    def layout(self) -> Layout:
        return self.columns.layout


def gather(
    groups: Sequence[Group],
    *,
    version: int,
    max_lag: int | None = None,
    vocab_size: int | None = None,
    expected_group_size: int | None = None,
    turn_rewards: bool = False,
) -> Batch:
    """Columns of a step.

    Args:
        groups: graded and ungraded members alike; one group id may come in several pieces.
        version: the learner's policy version now.
        max_lag: tokens more than this many versions old are withheld from the gradient. None: no bound.
        vocab_size: see `samples.build`.
        expected_group_size: refuse groups of another size.
        turn_rewards: put what steps earned on their turns, and only the rest into `reward_S`. Otherwise
            `reward_S` is the whole reward.

    Raises:
        EvidenceError: a trajectory twice, a token from the future, a graded trajectory whose calls are all of
            a kind that can not be trained (see `samples.REASONS`), a rewarded step that is in no turn, or
            whatever `samples.build` refuses.
    """
    trajectories = tuple(t for group in groups for t in group.trajectories)
    if not trajectories:
        raise EvidenceError("An update without trajectories.", fix="Give it at least one group.")
    twice = [i for i, n in Counter(t.id for t in trajectories).items() if n > 1]
    if twice:
        raise EvidenceError(f"Trajectory {twice[0]} is in the step twice.", fix="Train each one once.")
    number: dict[str, int] = {}
    group_S = [number.setdefault(t.group_id, len(number)) for t in trajectories]
    counts_S = [t.reward is not None and bool(t.calls) for t in trajectories]
    rows = tuple(
        build(t, vocab_size=vocab_size) if counts else None
        for t, counts in zip(trajectories, counts_S, strict=True)
    )
    facts: Counter[str] = Counter()
    unasked = sum(t.reward is not None and not t.calls for t in trajectories)
    if unasked:
        facts["trajectories/without_calls"] = unasked
    for one, trajectory in zip(rows, trajectories, strict=True):
        if one is not None:
            _refuse_untrainable(one, trajectory)
            facts.update({f"tokens/invalid_{reason}": n for reason, n in one.invalid.items()})
    known = [one for one in rows if one is not None]
    layout = Layout.of(
        [0 if one is None else one.n_actions for one in rows],
        group_S,
        torch.from_numpy(_cat(known, "turn_N")),
    )
    version_N = _cat(known, "version_N")
    valid_N = _cat(known, "valid_N").astype(np.bool_)
    if len(version_N):
        _refuse_newer(int(version_N.max()), version)
    lag_N = np.where(version_N == UNKNOWN_VERSION, 0, version - version_N)
    if max_lag is not None:
        fresh_N = lag_N <= max_lag
        facts["tokens/withheld_stale"] = int((valid_N & ~fresh_N).sum())
        facts.update(_admission(layout, valid_N, fresh_N))
        valid_N = valid_N & fresh_N
    reward_S = torch.tensor(
        [
            t.reward if counts and t.reward is not None else np.nan
            for t, counts in zip(trajectories, counts_S, strict=True)
        ],
        dtype=torch.float64,
    )
    turn_reward_N = None
    if turn_rewards:
        turn_reward_N = _turn_rewards(trajectories, rows, layout)
        reward_S = reward_S - segment_sum(turn_reward_N, layout)
        rewarded = sum(
            bool(t.verdict.step_rewards) for t, counts in zip(trajectories, counts_S, strict=True) if counts
        )
        facts["turn_reward/trajectories"] = rewarded
    columns = Columns(
        layout=layout,
        reward_S=reward_S,
        terminated_S=torch.tensor([t.termination.terminated for t in trajectories]),
        truncated_S=torch.tensor([t.termination.truncated for t in trajectories]),
        valid_N=torch.from_numpy(valid_N),
        logb_N=torch.from_numpy(_cat(known, "log_prob_N").astype(np.float64)),
        lag_N=torch.from_numpy(lag_N),
        expected_group_size=expected_group_size,
        components_SK=_components(trajectories),
        turn_reward_N=turn_reward_N,
    )
    return Batch(
        trajectories=trajectories,
        rows=rows,
        columns=columns,
        facts={k: float(v) for k, v in facts.items()} | _lengths(layout, valid_N),
    )


def _cat(rows: Sequence[Rows], name: str) -> np.ndarray:
    return np.concatenate([getattr(one, name) for one in rows]) if rows else np.zeros(0, dtype=np.int64)


def _refuse_untrainable(rows: Rows, trajectory: Trajectory) -> None:
    """Evidence of a kind that never trains is a mistake of the run. Single tokens that an engine got wrong
    (no log-prob, no such id) only leave the loss, also where they are all of a trajectory."""
    spoiled = set(rows.invalid) <= {"phantom_token", "no_log_prob"} and all(
        call.generation_log_probs is not None for call in trajectory.calls
    )
    if not rows.valid_N.any() and not spoiled:
        why = ", ".join(f"{reason} ({n} tokens)" for reason, n in rows.invalid.items())
        raise EvidenceError(
            f"Trajectory {rows.trajectory_id} is graded but no token of it can enter a policy loss: {why}.",
            fix="Sample with temperature > 0, top_p 1, top_k 0, processed log-probs and a version; "
            "demonstrations go to imitate().",
        )


def _admission(layout: Layout, valid_N: np.ndarray, fresh_N: np.ndarray) -> dict[str, int]:
    """Trajectories whose valid tokens are all, partly, or not at all within the bound."""
    traj_N = layout.traj_N.numpy()
    n = layout.n_trajectories
    valid_S = np.bincount(traj_N[valid_N], minlength=n)
    fresh_S = np.bincount(traj_N[valid_N & fresh_N], minlength=n)
    has_S = valid_S > 0
    return {
        "trajectories/fresh": int((has_S & (fresh_S == valid_S)).sum()),
        "trajectories/partly_stale": int((has_S & (fresh_S > 0) & (fresh_S < valid_S)).sum()),
        "trajectories/stale": int((has_S & (fresh_S == 0)).sum()),
    }


def _lengths(layout: Layout, valid_N: np.ndarray) -> dict[str, float]:
    """Mean action tokens of what was given and of what may train: dropping stale work favours short ones."""
    lengths_S = layout.lengths_S.numpy()
    graded_S = lengths_S > 0
    if not graded_S.any():
        return {}
    left_S = np.bincount(layout.traj_N.numpy()[valid_N], minlength=len(lengths_S)) > 0
    facts = {"length/given_mean": float(lengths_S[graded_S].mean())}
    if left_S.any():
        facts["length/admitted_mean"] = float(lengths_S[left_S].mean())
    return facts


def _turn_rewards(
    trajectories: Sequence[Trajectory], rows: Sequence[Rows | None], layout: Layout
) -> torch.Tensor:
    """float64 `[N]`: what the steps of a turn earned, on the last token of its call, the one before their
    observations."""
    reward_N = torch.zeros(layout.n_tokens, dtype=torch.float64)
    for start, trajectory, one in zip(layout.start_S.tolist(), trajectories, rows, strict=True):
        if one is None:
            continue
        try:
            earned = trajectory.turn_rewards
        except ValueError as error:
            raise EvidenceError(
                f"Trajectory {trajectory.id}: {error}.",
                fix="Its harness notes no actions: train it with a recipe without turn rewards.",
            ) from error
        last = {
            call.id: int(np.flatnonzero(one.call_N == at)[-1]) for at, call in enumerate(trajectory.calls)
        }
        for turn, value in zip(trajectory.turns, earned, strict=True):
            reward_N[start + last[turn.call_id]] += value
    return reward_N


def _components(trajectories: Sequence[Trajectory]) -> torch.Tensor | None:
    """`[S, K]` of the verdicts' components, in sorted order of their names, if all graded ones have the
    same. Rewards of single steps are none of them."""
    names = {
        tuple(sorted(name for name in t.verdict.components if step_number(name) is None))
        for t in trajectories
        if t.reward is not None
    }
    if len(names) != 1 or not (keys := names.pop()):
        return None
    return torch.tensor(
        [[t.verdict.components.get(k, np.nan) for k in keys] for t in trajectories], dtype=torch.float64
    )
