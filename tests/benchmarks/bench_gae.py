"""Milliseconds of skip-observation GAE over 1 M action tokens on one thread, beside the plain loop.

Run: `python tests/benchmarks/bench_gae.py`
"""

from __future__ import annotations

import time

import torch

from agentrl.algo.columns import Layout
from agentrl.algo.gae import gae

N = 1_000_000
SHAPES = {
    "one trajectory of 1 M": [N],
    "10 of 100 k": [N // 10] * 10,
    "125 of 8 k": [8_000] * 125,
    "geometric, 16 to 262 k": [2**k for k in range(4, 19)] + [N - sum(2**k for k in range(4, 19))],
    "10 k of 100": [100] * 10_000,
    "100 k of 10": [10] * 100_000,
}


def plain_loop(
    rewards: list[float], values: list[float], lengths: list[int], gamma: float, lam: float
) -> list[float]:
    """The six lines that the scan replaces."""
    out = [0.0] * len(values)
    end = len(values)
    for length in reversed(lengths):
        carry, following = 0.0, 0.0
        for i in range(end - 1, end - 1 - length, -1):
            carry = rewards[i] + gamma * following - values[i] + gamma * lam * carry
            following, out[i] = values[i], carry
        end -= length
    return out


def main() -> None:
    """Print a table: the best of 7 runs of the scan, one run of the loop, the largest difference."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rewards_N, values_N = torch.randn(N, dtype=torch.float64), torch.randn(N, dtype=torch.float64)
    print(f"{'1 M tokens, float64, one thread':34s} {'scan':>9s} {'loop':>10s} {'max diff':>10s}")
    for name, lengths in SHAPES.items():
        layout = Layout.of(lengths)
        took = []
        for _ in range(7):
            started = time.perf_counter()
            estimate = gae(rewards_N, values_N, layout, gamma=1.0, lambda_policy=0.95)
            took.append(time.perf_counter() - started)
        started = time.perf_counter()
        slow = plain_loop(rewards_N.tolist(), values_N.tolist(), lengths, 1.0, 0.95)
        loop_s = time.perf_counter() - started
        worst = float((estimate.advantage_N - torch.tensor(slow, dtype=torch.float64)).abs().max())
        print(f"{name:34s} {min(took) * 1e3:6.1f} ms {loop_s * 1e3:7.0f} ms {worst:10.1e}")


if __name__ == "__main__":
    main()
