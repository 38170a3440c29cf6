"""The value component: predicted values and return targets to a loss per token; and what tells whether a
critic is any good."""

from __future__ import annotations

import torch

from agentrl.algo.axes import table


def value_mse(live_values_N: torch.Tensor, returns_N: torch.Tensor) -> torch.Tensor:
    """`1/2 (V - R)^2`, target fixed (arXiv:1707.06347)."""
    return 0.5 * (live_values_N - returns_N).square()


def value_clipped(
    live_values_N: torch.Tensor, returns_N: torch.Tensor, values_N: torch.Tensor, *, clip: float = 0.2
) -> torch.Tensor:
    """`1/2 max((V - R)^2, (clip(V, V_old - e, V_old + e) - R)^2)`: no gradient for running away from
    V_old."""
    near_N = torch.minimum(torch.maximum(live_values_N, values_N - clip), values_N + clip)
    return 0.5 * torch.maximum((live_values_N - returns_N).square(), (near_N - returns_N).square())


def bin_centers(bins: int, low: float, high: float, like: torch.Tensor) -> torch.Tensor:
    """`[B]`: centres of `bins` equal bins of `[low, high]`."""
    edges = torch.linspace(low, high, bins + 1, dtype=like.dtype, device=like.device)
    return 0.5 * (edges[1:] + edges[:-1])


def hl_gauss_targets(
    returns_N: torch.Tensor, *, bins: int, low: float, high: float, sigma: float
) -> torch.Tensor:
    """`[N, B]`: mass of a Gaussian around each return in each bin, normalised (HL-Gauss,
    arXiv:2403.03950)."""
    edges = torch.linspace(low, high, bins + 1, dtype=returns_N.dtype, device=returns_N.device)
    cdf = torch.special.ndtr((edges - returns_N.clamp(low, high).unsqueeze(-1)) / sigma)
    mass: torch.Tensor = cdf[:, 1:] - cdf[:, :-1]
    return mass / mass.sum(-1, keepdim=True)


def hl_gauss(
    live_values_N: torch.Tensor,
    returns_N: torch.Tensor,
    *,
    bins: int = 101,
    low: float = 0.0,
    high: float = 1.0,
    sigma: float = 0.0075,
) -> torch.Tensor:
    """Cross-entropy of logits `[N, B]` with the Gaussian histogram of the return (HL-Gauss,
    arXiv:2403.03950)."""
    target = hl_gauss_targets(returns_N, bins=bins, low=low, high=high, sigma=sigma)
    return -(target * torch.log_softmax(live_values_N, dim=-1)).sum(-1)


def hl_gauss_value(logits_NB: torch.Tensor, *, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    """`[N]`: the value a classification head speaks of, `sum_b softmax_b * centre_b`."""
    return (torch.softmax(logits_NB, -1) * bin_centers(logits_NB.shape[-1], low, high, logits_NB)).sum(-1)


def explained_variance(values_N: torch.Tensor, returns_N: torch.Tensor) -> float | None:
    """`1 - Var(R - V) / Var(R)`; None when the returns do not vary (then nothing can be explained)."""
    total = float(returns_N.to(torch.float64).var(correction=0)) if returns_N.numel() else 0.0
    if total <= 1e-12:
        return None
    return 1.0 - float((returns_N - values_N).to(torch.float64).var(correction=0)) / total


VALUE = table(value_mse, value_clipped, hl_gauss)
