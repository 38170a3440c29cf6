"""Metrics that can be added over micro-batches and ranks, and only then become means.

Invariant: a mean is a sum and a count until `finish_metrics`, so that the split into micro-batches cannot
change a reported number. A mean over nothing is absent from the result, never 0 and never NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

Scalar = torch.Tensor | float


@dataclass(frozen=True, slots=True)
class Metrics:
    """`sums / counts` are means once finished, `totals` only add up, `maxima` keep the largest. Keys:
    `area/name`."""

    sums: dict[str, Scalar] = field(default_factory=dict)
    counts: dict[str, Scalar] = field(default_factory=dict)
    totals: dict[str, Scalar] = field(default_factory=dict)
    maxima: dict[str, Scalar] = field(default_factory=dict)

    def __add__(self, other: Metrics) -> Metrics:
        def added(a: dict[str, Scalar], b: dict[str, Scalar]) -> dict[str, Scalar]:
            return {k: a[k] + b[k] if k in a and k in b else a.get(k, b.get(k, 0.0)) for k in a | b}

        return Metrics(
            sums=added(self.sums, other.sums),
            counts=added(self.counts, other.counts),
            totals=added(self.totals, other.totals),
            maxima={
                k: max(float(self.maxima.get(k, -torch.inf)), float(other.maxima.get(k, -torch.inf)))
                for k in self.maxima | other.maxima
            },
        )


def mean_of(name: str, values: torch.Tensor) -> Metrics:
    """A mean over all elements, detached."""
    values = values.detach()
    return Metrics(sums={name: values.sum()}, counts={name: float(values.numel())})


def total_of(name: str, value: torch.Tensor | float) -> Metrics:
    """A number that adds up over micro-batches (a loss that already holds its denominator, a count)."""
    return Metrics(totals={name: value.detach() if isinstance(value, torch.Tensor) else value})


def maximum_of(name: str, values: torch.Tensor) -> Metrics:
    """The largest element, detached; nothing for an empty tensor."""
    return Metrics(maxima={name: values.detach().max()}) if values.numel() else Metrics()


def merge(*parts: Metrics) -> Metrics:
    """Sum of several."""
    out = Metrics()
    for part in parts:
        out = out + part
    return out


def finish_metrics(metrics: Metrics) -> dict[str, float]:
    """Plain numbers: means where something was counted, totals, maxima."""
    out = {
        k: float(v) / float(metrics.counts[k])
        for k, v in metrics.sums.items()
        if float(metrics.counts[k]) > 0
    }
    out |= {k: float(v) for k, v in metrics.totals.items()}
    out |= {k: float(v) for k, v in metrics.maxima.items()}
    return out
