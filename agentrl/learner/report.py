"""What an update says about itself: the report, seconds per phase, mismatch before the weights move."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from agentrl.algo.metrics import Metrics, merge
from agentrl.algo.mismatch import Mismatch
from agentrl.algo.objective import Columns
from agentrl.algo.ratios import LOG_RATIO_LIMIT
from agentrl.errors import EvidenceError
from agentrl.learner import parallel
from agentrl.learner.batch import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one update did. Means are over tokens of all ranks; times are of this rank."""

    step: int
    """Optimizer steps taken so far."""
    taken: int
    """Optimizer steps of this update."""
    refused: tuple[str, ...]
    """Why mini-batches changed nothing, in order; empty when all went well."""
    nothing: str | None
    """None, or why there was nothing to train on."""
    metrics: Mapping[str, float]
    """`loss/*`, `policy/*`, `mismatch/*`, `ratio/*`, `advantage/*`, `critic/*`, `trajectories/*`, `tokens/*`,
    `groups/*`, `optimizer/*`, `time/*_s`, `batch/*`, `profile/*`."""


class Clock:
    """Seconds per phase; the time between two laps goes to the phase named by the second."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.seconds: dict[str, float] = {}
        self._last = self._now()

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def lap(self, phase: str) -> None:
        now = self._now()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


class Gaps:
    """`|log pi - recorded|` on tokens that were sampled from the very weights being trained (lag 0), before
    they move: what should be rounding. Sums, so that ranks can be added."""

    def __init__(self) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64)  # |d|, k3, tokens
        self.largest = 0.0
        self.zero_run = 0

    def add(self, log_prob_M: torch.Tensor, columns: Columns, micro: MicroBatch) -> None:
        at = columns.layout.tokens_of(torch.tensor(micro.trajectories_S, dtype=torch.int64))
        assert columns.logb_N is not None
        assert columns.lag_N is not None
        assert columns.valid_N is not None
        use = columns.valid_N[at] & (columns.lag_N[at] == 0)
        known = columns.logb_N[at][use].to(torch.float64)
        gap = log_prob_M.detach().to("cpu", torch.float64)[use] - known
        if gap.numel() == 0:
            return
        bounded = gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        self.sums += torch.tensor(
            [float(gap.abs().sum()), float((bounded.exp() - 1 - bounded).sum()), gap.numel()],
            dtype=torch.float64,
        )
        self.largest = max(self.largest, float(gap.abs().max()))
        edges = torch.nonzero(torch.cat([torch.tensor([True]), known != 0.0, torch.tensor([True])])).flatten()
        self.zero_run = max(self.zero_run, int((edges[1:] - edges[:-1]).max()) - 1)

    def sum_over_ranks(self) -> None:
        parts = parallel.gather_objects((self.sums, self.largest, self.zero_run))
        self.sums = torch.stack([p[0] for p in parts]).sum(0)
        self.largest = max(p[1] for p in parts)
        self.zero_run = max(p[2] for p in parts)

    def _mismatch(self) -> Mismatch | None:
        n = float(self.sums[2])
        if n == 0:
            return None
        return Mismatch(
            abs_mean=float(self.sums[0]) / n,
            abs_max=self.largest,
            k3=float(self.sums[1]) / n,
            longest_zero_run=self.zero_run,
        )

    def facts(self) -> dict[str, float]:
        found = self._mismatch()
        if found is None:
            return {}
        return {
            "mismatch/on_policy_abs_mean": found.abs_mean,
            "mismatch/on_policy_abs_max": found.abs_max,
            "mismatch/on_policy_k3": found.k3,
            "mismatch/on_policy_tokens": float(self.sums[2]),
            "mismatch/longest_zero_run": float(found.longest_zero_run),
        }

    def refusal(self, limit: float | None) -> str | None:
        found = self._mismatch()
        if found is None or limit is None:
            return None
        try:
            found.refuse_above(limit)
        except EvidenceError as error:
            return str(error)
        return None


def of_one_step(parts: Sequence[Metrics]) -> Metrics:
    """Metrics of the micro-batches of all ranks of one optimizer step. Totals (losses) become means over
    steps."""
    mine = merge(*parts)
    plain = Metrics(
        sums={k: float(v) for k, v in mine.sums.items()},
        counts={k: float(v) for k, v in mine.counts.items()},
        totals={k: float(v) for k, v in mine.totals.items()},
        maxima={k: float(v) for k, v in mine.maxima.items()},
    )
    whole = merge(*parallel.gather_objects(plain))
    return Metrics(
        sums=whole.sums | whole.totals,
        counts=whole.counts | dict.fromkeys(whole.totals, 1.0),
        maxima=whole.maxima,
    )


def group_facts(columns: Columns) -> dict[str, float]:
    """Sizes of groups (rows given, graded or not) and how many can be compared."""
    group_S = columns.layout.group_S
    sizes = torch.bincount(group_S)
    graded = torch.bincount(group_S[torch.isfinite(columns.reward_S)], minlength=sizes.numel())
    facts = {"groups/total": float(sizes.numel()), "groups/fewer_than_two_graded": float((graded < 2).sum())}
    facts |= {f"groups/size_{int(n)}": float((sizes == n).sum()) for n in torch.unique(sizes)}
    return facts
