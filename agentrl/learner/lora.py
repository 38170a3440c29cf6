"""Adapters (LoRA, arXiv:2106.09685) through PEFT: few trainable weights on a frozen base.

The learner takes an adapted model like any other: its base is the reference policy with the adapters off, its
export is a merged *copy*. The base is never merged in place: `(w + d) - d != w` in bfloat16, so every such
cycle would move it a little. After any number of exports its bits are what they were.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from agentrl.errors import ConfigError

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapt(model: Any, *, rank: int = 16, alpha: float = 32.0, targets: Sequence[str] = PROJECTIONS) -> Any:
    """A model whose base is frozen and whose `targets` carry float32 adapters of rank `rank`.

    The base may be bfloat16. Dropout is 0: log-probs must be those of the policy that is sampled.

    Raises:
        ConfigError: PEFT is not installed, or no layer has a target's name.
    """
    try:
        peft = importlib.import_module("peft")
    except ModuleNotFoundError as error:
        raise ConfigError("LoRA needs the package peft.", fix="pip install 'agentrl[lora]'.") from error
    names = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    if not names & set(targets):
        raise ConfigError(f"No layer of this model is called {', '.join(targets)}.")
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=[t for t in targets if t in names],
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():  # PEFT still asks transformers by a name that is going away
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing", FutureWarning)
        adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)
    return adapted


def is_adapted(model: Any) -> bool:
    return hasattr(model, "get_base_model")


def merged_state(model: Any) -> dict[str, torch.Tensor]:
    """Names and weights of the plain causal model with the adapters added: new tensors where there is an
    adapter.

    `W + delta` is summed in float32 and rounded once to the base's dtype.
    """
    base = model.get_base_model()
    out: dict[str, torch.Tensor] = {}
    adapted = {name: layer for name, layer in base.named_modules() if hasattr(layer, "get_delta_weight")}
    for name, tensor in base.state_dict().items():
        owner = next((layer for layer in adapted if name.startswith(f"{layer}.")), None)
        if owner is None:
            out[name] = tensor
        elif name.startswith(f"{owner}.base_layer."):
            kind = name.removeprefix(f"{owner}.base_layer.")
            out[f"{owner}.{kind}"] = tensor if kind != "weight" else _merged(adapted[owner], tensor)
    return out


def _merged(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    total = weight.detach().to(torch.float32)
    for adapter in layer.active_adapters:
        total = total + layer.get_delta_weight(adapter).detach().to(torch.float32)
    return total.to(weight.dtype)
