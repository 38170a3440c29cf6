"""Axis *penalty*: what is added to the policy loss per token, each with its coefficient.

With `d = log pi - log pi_ref` on a token sampled from `pi`: k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d all
estimate KL(pi || pi_ref), but a value is not a gradient (arXiv:2506.09477): in a loss, k1 has gradient 1 per
token, which is zero in expectation and controls nothing; k2 has gradient d, the true KL gradient on policy;
k3 has 1 - exp(-d), which pulls towards the forward KL. The reference carries no gradient.

`target` makes a coefficient adaptive: between updates it doubles where the measured KL is above 1.5 target,
and halves below target / 1.5 (`band`, `adapt_beta`). None: it stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agentrl.algo.axes import table
from agentrl.algo.ratios import LOG_RATIO_LIMIT
from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalty:
    """`loss_N` with gradient (before the coefficient), `value_N` detached: what is reported under the
    operator's name."""

    loss_N: torch.Tensor
    value_N: torch.Tensor


def _same(values_N: torch.Tensor) -> Penalty:
    return Penalty(loss_N=values_N, value_N=values_N.detach())


def k1(d_N: torch.Tensor) -> torch.Tensor:
    """`d`; gradient 1."""
    return d_N


def k2(d_N: torch.Tensor) -> torch.Tensor:
    """`d^2 / 2`; gradient d."""
    return 0.5 * d_N.square()


def k3(d_N: torch.Tensor) -> torch.Tensor:
    """`exp(-d) - 1 + d`; gradient `1 - exp(-d)`; the exponent is bounded."""
    return (-d_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp() - 1.0 + d_N


def kl_k1(logp_N: torch.Tensor, ref_logp_N: torch.Tensor, *, coefficient: float = 0.001) -> Penalty:
    """`beta (log pi - log pi_ref)` in the loss: zero-mean gradient, offered only to be compared with (refused
    by default)."""
    del coefficient
    return _same(k1(logp_N - ref_logp_N.detach()))


def kl_k2(
    logp_N: torch.Tensor, ref_logp_N: torch.Tensor, *, coefficient: float = 0.001, target: float | None = None
) -> Penalty:
    """`beta d^2/2`, gradient `beta d`: the on-policy gradient of the reverse KL."""
    del coefficient, target
    return _same(k2(logp_N - ref_logp_N.detach()))


def kl_k3(
    logp_N: torch.Tensor, ref_logp_N: torch.Tensor, *, coefficient: float = 0.001, target: float | None = None
) -> Penalty:
    """`beta (exp(-d) - 1 + d)`, gradient `beta (1 - exp(-d))` (GRPO, arXiv:2402.03300 eq. 4)."""
    del coefficient, target
    return _same(k3(logp_N - ref_logp_N.detach()))


def kl_full(
    live_ref_kl_N: torch.Tensor, *, coefficient: float = 0.001, target: float | None = None
) -> Penalty:
    """`beta KL(pi(.|s) || pi_ref(.|s))` over the whole vocabulary, computed by the learner with gradient."""
    del coefficient, target
    return _same(live_ref_kl_N)


def kl_old(
    logp_N: torch.Tensor, old_logp_N: torch.Tensor, *, coefficient: float = 1.0, target: float | None = None
) -> Penalty:
    """`beta KL(pi_old || pi)` by `exp(x) - 1 - x`, `x = log pi - log pi_old` (PPO penalty, arXiv:1707.06347
    eq. 8).

    Tokens come from pi_old, so this k3 form is unbiased for the direction of the paper. beta adapts:
    `adapt_beta`.
    """
    del coefficient, target
    return _same(k3(-(logp_N - old_logp_N.detach())))


def entropy_bonus(live_entropy_N: torch.Tensor, *, coefficient: float = 0.001) -> Penalty:
    """`-c H(pi(.|s))`: gradient flows through the entropy of the current policy."""
    del coefficient
    return Penalty(loss_N=-live_entropy_N, value_N=live_entropy_N.detach())


def positive_entropy(
    live_entropy_N: torch.Tensor, advantage_N: torch.Tensor, *, coefficient: float = 0.01
) -> Penalty:
    """`-c H` only on tokens of positive advantage (token diversity on positives, R1-zero-Div
    arXiv:2505.23433)."""
    del coefficient
    loss_N = torch.where(advantage_N > 0, -live_entropy_N, torch.zeros_like(live_entropy_N))
    return Penalty(loss_N=loss_N, value_N=-loss_N.detach())


def band(target: float) -> tuple[float, float]:
    """Where the measured KL leaves beta as it is: `target / 1.5` to `1.5 target` (arXiv:1707.06347 §4)."""
    return target / 1.5, 1.5 * target


def adapt_beta(beta: float, measured_kl: float, *, low: float, high: float, factor: float = 2.0) -> float:
    """The next beta: `* factor` when the measured KL is above `high`, `/ factor` below `low`, else unchanged.

    arXiv:1707.06347 §4 (there with low = target/1.5, high = 1.5 target). A state update between steps,
    outside the loss.
    """
    if not 0.0 <= low <= high:
        raise ConfigError(
            f"Adaptive KL needs 0 <= low <= high, got {low} and {high}.", fix="Set both, low first."
        )
    if measured_kl > high:
        return beta * factor
    return beta / factor if measured_kl < low else beta


PENALTY = table(kl_k1, kl_k2, kl_k3, kl_full, kl_old, entropy_bonus, positive_entropy)
KL_TO_REFERENCE = frozenset({"kl_k1", "kl_k2", "kl_k3", "kl_full"})
