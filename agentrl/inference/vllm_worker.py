"""What runs inside a vLLM worker: check a folder of weights, then load it in place. Given to the server as
`--worker-extension-cls agentrl.inference.vllm_worker.PolicyWeights`.

Two calls, so that nothing is touched before everything is known to be good: `agentrl_check_weights` opens the
files, compares names and shapes with those that the server started from and refuses values that are not
finite; `agentrl_load_weights` checks again and loads. A load that fails half way leaves a vLLM model
unusable, so the caller keeps the engine paused until a good load followed.

This module is imported by vLLM's own process, possibly in an environment without the rest of agentrl: it
needs torch and safetensors, which vLLM has, and nothing else. Measured on vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

Shapes = dict[str, tuple[int, ...]]


def weight_files(location: str) -> list[Path]:
    """The safetensors of a folder, or the file itself. `ValueError` when there are none."""
    path = Path(location)
    found = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not found or not all(file.is_file() for file in found):
        raise ValueError(f"no safetensors at {location} as this server sees it")
    return found


def shapes(location: str) -> Shapes:
    """Name and shape of every tensor. Raises what safetensors raises on a file that is cut or not one."""
    found: Shapes = {}
    for file in weight_files(location):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (not a mapping)
                found[name] = tuple(opened.get_slice(name).get_shape())
    return found


def tensors(location: str) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a location, one at a time."""
    for file in weight_files(location):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)


def check(location: str, expected: Shapes | None) -> int:
    """Refuse weights that would break the model; returns how many tensors there are.

    Raises:
        ValueError: a name or shape that is missing, too many or different, or a value that is not finite.
    """
    found = shapes(location)
    if expected is not None and found != expected:
        names = sorted(found.keys() ^ expected.keys()) or sorted(
            name for name in found if found[name] != expected[name]
        )
        raise ValueError(f"not the model that is served: {len(names)} tensors differ, first {names[0]}")
    for name, tensor in tensors(location):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{name} is not finite")
    return len(found)


class PolicyWeights:
    """Mixed into vLLM's worker, which has `reload_weights`, `model_config` and `model_runner`."""

    reload_weights: Any
    model_config: Any
    model_runner: Any

    def agentrl_check_weights(self, location: str) -> int:
        """Number of tensors at `location`. Raises `ValueError`; the model is not touched."""
        return check(location, self._expected())

    def agentrl_load_weights(self, location: str) -> int:
        """Load `location` in place; returns the number of tensors. Raises before the model is touched."""
        count = check(location, self._expected())
        self.reload_weights(weights_iterator=tensors(location))
        _tie_head_again(self.model_runner.get_model(), self.model_config.hf_config)
        return count

    def _expected(self) -> Shapes | None:
        """Of the folder that the server was started with; None when it was no folder."""
        started_with = str(self.model_config.model)
        return shapes(started_with) if Path(started_with).is_dir() else None


def _tie_head_again(model: Any, hf_config: Any) -> None:
    """On CPUs the output matrix is packed after loading; one tied to the embeddings keeps its old pack unless
    it is packed again, and would go on sampling from the old head."""
    if not getattr(hf_config, "tie_word_embeddings", False) or not hasattr(model, "lm_head"):
        return
    head = getattr(model.lm_head, "base_layer", model.lm_head)
    head.quant_method.process_weights_after_loading(head)
