"""How far the learner's log-probs are from those recorded at sampling: measured on every batch, refused
beyond a limit.

`d = log pi_learner - log pi_behaviour` on sampled tokens; before the first update it should be numerical
noise. `k3 = exp(d) - 1 - d` estimates the KL of the two. A long run of log-probs that are exactly 0.0 at
temperature > 0 means that an engine did not report them (accepted draft tokens), not that the policy was
certain.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agentrl.algo.metrics import Metrics, maximum_of, mean_of, merge
from agentrl.algo.ratios import LOG_RATIO_LIMIT
from agentrl.errors import EvidenceError

THRESHOLDS = (0.1, 1.0)
"""Shares of tokens with `|d|` beyond these are logged."""
ZERO_RUN = 8
"""So many exact zeros in a row are flagged."""


def _gap(logp_N: torch.Tensor, logb_N: torch.Tensor) -> torch.Tensor:
    known = torch.isfinite(logb_N)
    return (logp_N[known] - logb_N[known]).detach()


def mismatch_metrics(logp_N: torch.Tensor, logb_N: torch.Tensor) -> Metrics:
    """`mismatch/*`: mean and max `|d|`, k3, shares beyond `THRESHOLDS`. Tokens without behaviour log-prob are
    left out."""
    gap = _gap(logp_N, logb_N)
    bounded = gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return merge(
        mean_of("mismatch/abs_mean", gap.abs()),
        maximum_of("mismatch/abs_max", gap.abs()),
        mean_of("mismatch/k3", bounded.exp() - 1.0 - bounded),
        *(mean_of(f"mismatch/share_above_{t:g}", (gap.abs() > t).to(gap.dtype)) for t in THRESHOLDS),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """What the ingest gate looks at."""

    abs_mean: float
    abs_max: float
    k3: float
    longest_zero_run: int
    """Longest run of behaviour log-probs that are exactly 0.0."""

    def refuse_above(self, limit: float) -> None:
        """`EvidenceError` when mean `|d|` or k3 exceeds `limit`."""
        if self.abs_mean > limit or self.k3 > limit:
            zeros = f" {self.longest_zero_run} log-probs in a row are exactly 0."
            raise EvidenceError(
                f"Sampler and learner disagree: mean |d log-prob| {self.abs_mean:.4f}, k3 {self.k3:.4f}, "
                f"limit {limit}.{zeros if self.longest_zero_run >= ZERO_RUN else ''}",
                fix="Check temperature, weight version, cache flush and processed log-probs of the engine.",
            )


def measure(logp_N: torch.Tensor, logb_N: torch.Tensor) -> Mismatch:
    """Compare learner and behaviour log-probs `[N]` before an update; `EvidenceError` when none is known."""
    gap = _gap(logp_N, logb_N).to(torch.float64)
    if gap.numel() == 0:
        raise EvidenceError("No token has a behaviour log-prob.", fix="Use a sampler that reports log-probs.")
    bounded = gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    longest = run = 0
    for is_zero in (logb_N == 0.0).tolist():
        run = run + 1 if is_zero else 0
        longest = max(longest, run)
    return Mismatch(
        abs_mean=float(gap.abs().mean()),
        abs_max=float(gap.abs().max()),
        k3=float((bounded.exp() - 1.0 - bounded).mean()),
        longest_zero_run=longest,
    )


def saturated(log_ratio_N: torch.Tensor) -> torch.Tensor:
    """bool `[N]`: the exported raw log-ratio lies outside what exp() is given; the export keeps the raw
    number."""
    return log_ratio_N.abs() > LOG_RATIO_LIMIT
