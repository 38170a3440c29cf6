"""Everything a run needs to go on as if nothing had happened.

A checkpoint is a folder written whole (see `files`): weights, both optimizers, counters, adaptive
coefficients, the random states of python, numpy and torch, and, opaque to us, the caller's cursor and last
published version. A pointer file names the newest. Loading verifies every byte; a damaged or half-written
checkpoint is skipped for the last good one, and says so. k steps, resume, n - k steps give bit for bit what n
steps give (on the CPU).
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentrl.errors import ConfigError
from agentrl.learner import files, parallel
from agentrl.learner.lora import is_adapted
from agentrl.learner.model import Policy
from agentrl.learner.step import Learner
from agentrl.types import PolicyVersion, from_dict, to_dict

log = logging.getLogger(__name__)

STATE, MANIFEST, POINTER = "state.pt", "manifest.json", "latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What a checkpoint gives back beside the learner's state."""

    step: int
    """Optimizer steps."""
    updates: int
    cursor: Any
    """The JSON that was saved."""
    published: PolicyVersion | None
    notices: tuple[str, ...]
    """Why newer checkpoints were skipped."""


def save(
    root: Path,
    learner: Learner,
    *,
    cursor: Any = None,
    published: PolicyVersion | None = None,
    keep: int = 2,
) -> Path:
    """Write a checkpoint of the learner after its last update. Every rank calls this; rank 0 writes.

    Args:
        root: folder of the run's checkpoints.
        learner: between two updates.
        cursor: any JSON: what was *trained*, curriculum, groups in flight.
        published: last published policy version.
        keep: newest checkpoints that stay.

    Returns:
        the checkpoint's folder.
    """
    if keep < 1:
        raise ConfigError(f"keep = {keep} would delete the checkpoint just written.", fix="Keep at least 1.")
    state = learner_state(learner)
    again = len(list(root.glob(f"update-{learner.updates:08d}-*")))
    target = root / f"update-{learner.updates:08d}-{again:02d}"
    if parallel.rank() == 0:
        with files.whole_folder(target) as work:
            torch.save(state, work / STATE)
            manifest = {
                "step": learner.optimizer_step,
                "updates": learner.updates,
                "cursor": cursor,
                "published": None if published is None else to_dict(published),
                "sha256": _sha256(work / STATE),
            }
            (work / MANIFEST).write_text(json.dumps(manifest, indent=1))
        files.write_whole(root / POINTER, target.name.encode())
        for old in _candidates(root)[keep:]:
            files.remove_whole(old)
    return Path(parallel.from_rank_0(str(target)))


def load(root: Path, learner: Learner) -> Resumed | None:
    """Put the newest good checkpoint under `root` into the learner; None when there is none.

    The learner must have been made with the same model, recipe and configuration.
    """
    notices: list[str] = []
    candidates = _candidates(root)
    pointer = root / POINTER
    if pointer.exists():
        named = root / pointer.read_text().strip()
        if named not in candidates:
            notices.append(f"The pointer names {named.name}, which is not there.")
    for folder in candidates:
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            if _sha256(folder / STATE) != manifest["sha256"]:
                raise ValueError("its state does not have the recorded hash")
            if missing := {"step", "updates", "cursor", "published"} - set(manifest):
                raise ValueError(f"its manifest lacks {', '.join(sorted(missing))}")
            state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
        except (OSError, ValueError, LookupError, TypeError) as error:
            notices.append(f"Checkpoint {folder.name} is damaged ({error}); using the one before.")
            continue
        for notice in notices:
            log.warning(notice)
        restore(learner, state)
        published = manifest["published"]
        return Resumed(
            step=manifest["step"],
            updates=manifest["updates"],
            cursor=manifest["cursor"],
            published=None if published is None else from_dict(PolicyVersion, published),
            notices=tuple(notices),
        )
    if candidates:
        raise ConfigError(
            f"None of {len(candidates)} checkpoints under {root} is readable: {notices[0]}",
            fix="Restore the folder from a copy, or start a new run with another folder.",
        )
    return None


def _candidates(root: Path) -> list[Path]:
    """Checkpoint folders, newest first."""
    return sorted((p for p in root.glob("update-*") if p.is_dir()), reverse=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def learner_state(learner: Learner) -> dict[str, Any]:
    """The learner's state as tensors and plain values."""
    state: dict[str, Any] = {
        "policy": _weights(learner.policy),
        "optimizer": parallel.full_optimizer_state(learner.policy, learner.optimizer, learner.config.shard),
        "optimizer_step": learner.optimizer_step,
        "updates": learner.updates,
        "coefficients": dict(learner.coefficients),
        "random": _random_state(),
    }
    if learner.critic is not None and learner.critic_optimizer is not None:
        state["critic"] = parallel.full_state(learner.critic)
        state["critic_optimizer"] = parallel.full_optimizer_state(
            learner.critic, learner.critic_optimizer, learner.config.shard
        )
    if learner.value_head is not None:
        state["value_head"] = learner.value_head.state_dict()
    return state


def restore(learner: Learner, state: dict[str, Any]) -> None:
    """Put what `learner_state` answered into a learner made the same way, and the random states into place.

    Raises:
        ConfigError: the state is of another model or recipe.
    """
    has = {k for k in ("critic", "value_head") if k in state}
    wants = {k for k in ("critic", "value_head") if getattr(learner, k) is not None}
    if has != wants:
        raise ConfigError(
            f"The checkpoint has {sorted(has) or 'no critic'}, this run {sorted(wants) or 'no critic'}.",
            fix="Resume with the recipe and critic that the run was started with.",
        )
    sharded = learner.config.shard
    try:
        policy = state["policy"]
        if is_adapted(learner.policy.model):
            policy = {**parallel.full_state(learner.policy), **policy}
        parallel.load_full_state(learner.policy, policy, sharded)
        if learner.critic is not None:
            parallel.load_full_state(learner.critic, state["critic"], sharded)
        if learner.value_head is not None:
            learner.value_head.load_state_dict(state["value_head"])
    except RuntimeError as error:
        raise ConfigError(
            f"The checkpoint is of another model: {str(error).splitlines()[0]}",
            fix="Resume with the model that the run was started with.",
        ) from error
    parallel.load_full_optimizer_state(learner.policy, learner.optimizer, state["optimizer"], sharded)
    if learner.critic is not None and learner.critic_optimizer is not None:
        parallel.load_full_optimizer_state(
            learner.critic, learner.critic_optimizer, state["critic_optimizer"], sharded
        )
    learner.optimizer_step = state["optimizer_step"]
    learner.updates = state["updates"]
    learner.coefficients = dict(state["coefficients"])
    _restore_random(state["random"])


def _weights(policy: Policy) -> dict[str, torch.Tensor]:
    """What training changes: all of it, or the adapters without the base, which comes from where it came."""
    state = parallel.full_state(policy)
    if not is_adapted(policy.model):
        return state
    moving = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    return {name: tensor for name, tensor in state.items() if name in moving}


def _random_state() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _restore_random(state: dict[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
