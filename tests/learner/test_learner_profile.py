"""The profile of an update: operations counted by hand, shares that add up."""

from __future__ import annotations

import learner_given as given
import pytest
import torch

from agentrl.algo import recipes
from agentrl.learner import profile
from agentrl.learner.batch import Packing, pack
from agentrl.learner.samples import build
from agentrl.learner.step import Learner, LearnerConfig


def test_operations_of_a_prefix_tree_are_those_worked_out_by_hand() -> None:
    """Two rows of 12 and 11 tokens share 9: 12 + 2 tokens, pairs 12 * 13 / 2 + 2 * 9 + 2 * 3 / 2."""
    prompt = list(range(1, 10))
    rows = [
        build(given.trajectory([given.call(str(i), prompt, tail)], id=str(i)))
        for i, tail in enumerate([[20, 21, 22], [30, 31]])
    ]
    (micro,) = pack(rows, Packing(token_budget=100, share_prefixes=True), groups=[0, 0])
    assert micro.n_tokens == 14
    assert profile.attended(micro) == 78 + 18 + 3
    model = given.model()  # width 32, 2 layers, 4 heads of 8 with 2 for keys, inner width 64, 40 ids
    in_layers = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64)
    assert profile.layer_weights(model) == profile.layer_weights(given.model(tied=True)) == in_layers
    expected = 6 * in_layers * 14 + 6 * 32 * 40 * 5 + 12 * 2 * 32 * 99
    assert profile.operations(model, [micro]) == expected
    assert profile.operations(model, [micro, micro]) == 2 * expected


def test_padding_is_computed_and_so_it_counts() -> None:
    rows = [build(given.trajectory([given.call("a", [1] * n, [2])])) for n in (3, 7)]
    (micro,) = pack(rows, Packing(layout="padded"))
    assert profile.attended(micro) == 2 * 8 * 9 // 2


def test_an_update_tells_its_rates_and_its_largest_memory() -> None:
    prompt = list(range(1, 21))
    members = [
        given.trajectory([given.call(str(i), prompt, [i, i + 1])], id=str(i), reward=float(i % 2))
        for i in range(4)
    ]
    packing = Packing(share_prefixes=True)
    config = LearnerConfig(max_mismatch=None, packing=packing, epochs=2)
    report = Learner(given.model(), recipes.get("cispo"), config).update([given.group(members)], version=0)
    found = report.metrics
    assert found["batch/sharing_ratio"] == pytest.approx(4 * 22 / 28)
    assert found["batch/row_tokens_per_s"] == pytest.approx(
        found["batch/tokens_per_s"] * found["batch/sharing_ratio"]
    )
    (micro,) = pack([build(t) for t in members], packing, groups=[0] * 4)
    once = profile.operations(given.model(), [micro])
    assert found["profile/operations"] == 2 * once, "an epoch each"
    seconds = found["time/forward_s"] + found["time/backward_s"]
    assert found["profile/operations_per_s"] == pytest.approx(2 * once / seconds)
    assert found["profile/mfu"] > 0
    assert found["profile/peak_memory_mib"] > 50


def test_the_peak_is_measured_once_and_positive() -> None:
    first = profile.peak_rate("cpu", torch.float32)
    assert first > 1e8
    assert profile.peak_rate("cpu", torch.float32) == first
