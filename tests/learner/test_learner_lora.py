"""Adapters: the base stays what it was, bit by bit, and what is published is the merged model."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import learner_given as given
import pytest
import torch
from torch import nn

from agentrl.algo import recipes
from agentrl.errors import ConfigError
from agentrl.learner.batch import Packing, pack
from agentrl.learner.lora import adapt, merged_state
from agentrl.learner.model import Policy, load, log_probs
from agentrl.learner.publish import publish
from agentrl.learner.samples import build
from agentrl.learner.step import Learner, LearnerConfig


class Adapter(nn.Module):
    """What a PEFT layer looks like from outside: a base layer and a delta per active adapter."""

    active_adapters = ("default",)

    def __init__(self, base_layer: nn.Linear, delta: torch.Tensor) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.delta = delta

    def get_delta_weight(self, name: str) -> torch.Tensor:
        return self.delta


class Adapted:
    def __init__(self, base: nn.Module) -> None:
        self._base = base

    def get_base_model(self) -> nn.Module:
        return self._base


def test_a_hundred_exports_leave_a_bfloat16_base_bit_identical() -> None:
    """MDL-03: w = 1, delta = 0.003: merging in place and back gives 0.99609375; the export is bf16(1.003) =
    1."""
    base = nn.Module()
    linear = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(linear.weight)
    base.layer = Adapter(linear, torch.tensor([[0.003]], dtype=torch.bfloat16))
    base.other = nn.Linear(1, 1)
    w = linear.weight.detach().clone()
    drifted = (w + base.layer.delta) - base.layer.delta
    assert drifted.item() == 0.99609375
    for _ in range(100):
        state = merged_state(Adapted(base))
    assert torch.equal(linear.weight, w)
    assert sorted(state) == ["layer.weight", "other.bias", "other.weight"]
    assert state["layer.weight"].item() == 1.0
    assert state["layer.weight"].dtype == torch.bfloat16


def test_without_peft_the_error_says_what_to_install() -> None:
    try:
        import peft  # noqa: F401, PLC0415
    except ModuleNotFoundError:
        with pytest.raises(ConfigError, match=r"agentrl\[lora\]"):
            adapt(given.model())
    else:
        with pytest.raises(ConfigError, match="No layer"):
            adapt(given.model(), targets=("nothing",))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_train_against_their_own_base_and_publish_merged(tmp_path: Path, dtype: torch.dtype) -> None:
    pytest.importorskip("peft")
    base = given.model().to(dtype)
    frozen = {n: p.detach().clone() for n, p in base.named_parameters()}
    model: Any = adapt(base, rank=4)
    config = LearnerConfig(learning_rate=1e-2, max_mismatch=None)
    learner = Learner(model, replace(recipes.get("grpo")), config)
    rng = random.Random(0)
    groups = [given.group([given.chain(rng, id=str(i), reward=float(i % 2)) for i in range(4)])]
    first, second = (learner.update(groups, version=0).metrics for _ in range(2))
    assert first["penalty/kl_k3"] == pytest.approx(0.0, abs=1e-9), "adapters start at zero"
    assert second["penalty/kl_k3"] > 0
    now = {n.replace(".base_layer", ""): p for n, p in model.get_base_model().named_parameters()}
    assert all(torch.equal(now[n], p) for n, p in frozen.items())
    version = publish(learner.policy, tmp_path, parent=None, step=learner.optimizer_step)
    (micro,) = pack([build(groups[0].trajectories[0])], Packing())
    merged = load(version.location, dtype=dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 0.3
    torch.testing.assert_close(
        log_probs(Policy(merged), micro), log_probs(learner.policy, micro), rtol=0, atol=tolerance
    )
