"""Weights out: a folder per policy version that any Hugging Face reader (transformers, vLLM) can load.

A version is written beside, flushed, hashed and renamed, so a sampler that sees it sees all of it. Its number
is its parent's plus one. `load_published` hashes before it loads: a changed byte is an error, not another
policy. What was published is a copy: the learner's own weights stay bit-identical, adapters included.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from agentrl.errors import ConfigError, EvidenceError, StoreError
from agentrl.learner import files, parallel
from agentrl.learner.lora import is_adapted, merged_state
from agentrl.learner.model import Policy, causal_model, check_tied, load
from agentrl.types import PolicyVersion, content_hash, from_json, to_json

RECORD = "version.json"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Which versions survive collection: the newest `last`, and those whose number is a multiple of
    `every`."""

    last: int = 3
    every: int | None = None

    def __post_init__(self) -> None:
        if self.last < 1 or (self.every is not None and self.every < 1):
            raise ConfigError(f"Keep(last={self.last}, every={self.every}) would delete the current policy.")


def export_state(model: Any, *, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Names and copies of the weights as a plain causal model has them, on the CPU.

    Adapters are merged into the copies only; tied output embeddings are left out (they are the input's).
    Under sharding every rank must call this, and every rank gets the whole.

    Args:
        model: a transformers model or `Policy`.
        dtype: of floating-point weights (bfloat16 for serving); None keeps them.
    """
    inner = model.model if isinstance(model, Policy) else model
    named = merged_state(inner) if is_adapted(inner) else parallel.full_state(inner)
    base = causal_model(inner)
    tied = base.get_output_embeddings().weight is base.get_input_embeddings().weight
    out: dict[str, torch.Tensor] = {}
    for name, tensor in named.items():
        if tied and name == "lm_head.weight":
            continue
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        out[name] = tensor.detach().to("cpu", wanted, copy=True).contiguous()
    return out


def publish(
    model: Any,
    root: Path,
    *,
    parent: PolicyVersion | None,
    step: int,
    tokenizer: Any | None = None,
    dtype: torch.dtype | None = None,
    keep: Keep | None = None,
) -> PolicyVersion:
    """Write the next policy version under `root`. Rank 0 writes, all ranks return the same record.

    Args:
        model: a transformers model or `Policy`.
        root: folder of all versions of the run.
        parent: version that this one was trained from; None for version 0.
        step: optimizer steps taken.
        tokenizer: saved beside the weights if given (anything with `save_pretrained`).
        dtype: of the published weights; None keeps float32.
        keep: afterwards remove versions that this rule does not keep.

    Raises:
        StoreError: this number was already published with other weights.
        ConfigError: tied embeddings came apart.
    """
    inner = model.model if isinstance(model, Policy) else model
    check_tied(inner)
    state = export_state(inner, dtype=dtype)
    if parallel.rank() != 0:
        version: PolicyVersion = parallel.from_rank_0(None)
        return version
    number = 0 if parent is None else parent.number + 1
    target = root / f"v{number:06d}"
    config = causal_model(inner).config
    try:
        with files.whole_folder(target) as work:
            save_file(state, work / WEIGHTS, metadata={"format": "pt"})
            _write_config(config, work, dtype)
            if tokenizer is not None:
                tokenizer.save_pretrained(work)
            version = PolicyVersion(
                number=number,
                parent=None if parent is None else parent.number,
                step=step,
                location=str(target),
                content_hash=files.hash_of(work, without=RECORD),
                config_hash=content_hash((work / "config.json").read_bytes()),
                published_at=time.time(),
            )
            (work / RECORD).write_bytes(to_json(version))
    except FileExistsError:
        version = _same_again(target, state)
    if keep is not None:
        collect(root, keep)
    return parallel.from_rank_0(version)  # type: ignore[no-any-return]


def latest(root: Path) -> PolicyVersion | None:
    """The newest version under `root`, unverified; None when there is none."""
    found = versions(root)
    return found[-1] if found else None


def versions(root: Path) -> list[PolicyVersion]:
    """All published versions, oldest first."""
    return [from_json(PolicyVersion, p.read_bytes()) for p in sorted(root.glob(f"v*/{RECORD}"))]


def verify(version: PolicyVersion) -> None:
    """`EvidenceError` unless the folder of a version holds exactly what was published."""
    folder = Path(version.location)
    if not folder.is_dir():
        raise EvidenceError(
            f"Policy version {version.number} is not at {folder}.",
            fix="It was collected or moved: keep it with Keep(every=...), or sample a newer version.",
        )
    found = files.hash_of(folder, without=RECORD)
    if found != version.content_hash:
        raise EvidenceError(
            f"Policy version {version.number}: content hash {found[:12]} is not {version.content_hash[:12]}.",
            fix="A file was changed after publication: do not sample from it; publish again.",
        )


def load_published(
    version: PolicyVersion, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Any:
    """The model of a version, after its bytes were verified."""
    verify(version)
    return load(version.location, dtype=dtype, device=device)


def collect(root: Path, keep: Keep, *, pinned: frozenset[int] = frozenset()) -> list[int]:
    """Remove versions that `keep` does not hold and nobody pinned; their numbers."""
    all_versions = versions(root)
    newest = {v.number for v in all_versions[-keep.last :]}
    removed: list[int] = []
    for version in all_versions:
        n = version.number
        if n in newest or n in pinned or (keep.every is not None and n % keep.every == 0):
            continue
        files.remove_whole(root / f"v{n:06d}")
        removed.append(n)
    return removed


def retract_after(root: Path, number: int) -> list[int]:
    """Remove versions above `number`: what a resumed run published after the checkpoint it resumes from.

    Trajectories sampled from them name a version above the learner's and are refused, never mistaken.
    """
    removed: list[int] = []
    for version in versions(root):
        if version.number > number:
            files.remove_whole(root / f"v{version.number:06d}")
            removed.append(version.number)
    return removed


def require_same(model: Any, version: PolicyVersion) -> None:
    """`ConfigError` unless a model's weights are those of a version, bit for bit: what a resumed run stands
    on is what it published, whatever its base was loaded from."""
    verify(version)
    if not _holds(Path(version.location), export_state(model)):
        raise ConfigError(
            f"The policy that was loaded is not version {version.number}, which this run published.",
            fix="policy.source holds other weights than when the run began: restore them, or begin another"
            f" run with policy.source = '{version.location}'.",
        )


def _holds(folder: Path, state: dict[str, torch.Tensor]) -> bool:
    there = load_file(folder / WEIGHTS)
    return there.keys() == state.keys() and all(torch.equal(there[k], state[k]) for k in state)


def _write_config(config: Any, work: Path, dtype: torch.dtype | None) -> None:
    before = config.dtype
    try:
        if dtype is not None:
            config.dtype = dtype
        config.save_pretrained(work)
    finally:
        config.dtype = before


def _same_again(target: Path, state: dict[str, torch.Tensor]) -> PolicyVersion:
    """Publishing the same weights twice is once."""
    version = from_json(PolicyVersion, (target / RECORD).read_bytes())
    verify(version)
    if not _holds(target, state):
        raise StoreError(
            f"Policy version {version.number} is already published with other weights at {target}.",
            fix="After a resume, call retract_after(root, last published version of the checkpoint) first.",
        )
    return version
