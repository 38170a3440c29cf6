"""Numbers that show what an average hides: where the critic is wrong, and whether answers still depend on the
input."""

from __future__ import annotations

import torch

from agentrl.algo.columns import Layout
from agentrl.algo.critic_losses import explained_variance


def critic_report(
    values_N: torch.Tensor, returns_N: torch.Tensor, layout: Layout, *, position_bins: int = 4, turns: int = 8
) -> dict[str, float]:
    """`critic/*`: explained variance, bias `mean(V - R)` by relative position in the trajectory and by turn
    index.

    Empty bins are absent. Everything in float64.
    """
    out: dict[str, float] = {}
    error_N = (values_N - returns_N).to(torch.float64)
    explained = explained_variance(values_N, returns_N)
    if explained is not None:
        out["critic/explained_variance"] = explained
    traj_N = layout.traj_N
    place_N = torch.arange(layout.n_tokens) - layout.start_S[traj_N]
    bin_N = place_N * position_bins // layout.lengths_S.clamp_min(1)[traj_N]
    for b in range(position_bins):
        if bool((bin_N == b).any()):
            out[f"critic/bias_position_{b}"] = float(error_N[bin_N == b].mean())
    for t in range(turns):
        if bool((layout.turn_N == t).any()):
            out[f"critic/bias_turn_{t}"] = float(error_N[layout.turn_N == t].mean())
    return out


def calibration(values_S: torch.Tensor, success_S: torch.Tensor, *, bins: int = 10) -> float | None:
    """Expected calibration error of values read as success probabilities: `sum_b n_b/n |mean V - success
    rate|`."""
    if values_S.numel() == 0:
        return None
    v = values_S.to(torch.float64).clamp(0.0, 1.0)
    bin_S = (v * bins).to(torch.int64).clamp(max=bins - 1)
    count = torch.bincount(bin_S, minlength=bins).to(torch.float64)
    gap = torch.zeros(bins, dtype=torch.float64).index_add(0, bin_S, v - success_S.to(torch.float64))
    return float(gap.abs().sum() / count.sum())


def distinguishability(cross_logp_PP: torch.Tensor) -> float:
    """Mean of `log p(y_i|x_i) - log mean_j p(y_i|x_j)` in nats: a lower bound of I(X; Y), at most log P.

    `cross_logp_PP[i, j]` is the log-prob of answer i under prompt j. Near 0 with high entropy is template
    collapse: answers vary, but not with the input (RAGEN-2, Wang et al., 2026).
    """
    c = cross_logp_PP.to(torch.float64)
    marginal = torch.logsumexp(c, 1) - torch.log(torch.tensor(float(c.shape[1]), dtype=torch.float64))
    return float((c.diagonal() - marginal).mean())
