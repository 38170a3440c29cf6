"""Records and tiny models that the learner's tests are made of. No test here."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from agentrl.types import (
    BranchReason,
    Evidence,
    EvidenceKey,
    Fault,
    FinishReason,
    Group,
    LogProbKind,
    ModelCall,
    SamplingParams,
    Split,
    Termination,
    Trajectory,
    Turn,
    Verdict,
    VersionSpan,
    token_hash,
)

VOCAB = 40


def model(*, seed: int = 0, tied: bool = False, layers: int = 2, dtype: torch.dtype = torch.float32) -> Any:
    """A two-layer random Llama of width 32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=2,
    )
    made = LlamaForCausalLM(config).to(dtype)
    if dtype == torch.float64:
        _norms_in_float64(made)
    return made


def _norms_in_float64(module: nn.Module) -> None:
    """transformers' RMSNorm computes in float32 whatever it is given; torch's does not."""
    for name, child in module.named_children():
        if type(child).__name__ == "LlamaRMSNorm":
            norm = nn.RMSNorm(child.weight.shape[0], eps=1e-6, dtype=torch.float64)
            norm.weight = child.weight
            setattr(module, name, norm)
        else:
            _norms_in_float64(child)


def call(
    id: str,
    prompt: Sequence[int],
    generation: Sequence[int],
    *,
    parent: ModelCall | None = None,
    parent_prompt: Sequence[int] = (),
    keep: int | None = None,
    log_probs: Sequence[float | None] | str | None = "default",
    kind: LogProbKind | None = LogProbKind.PROCESSED,
    versions: Sequence[int] | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    reason: BranchReason | None = None,
) -> ModelCall:
    """A call from its whole prompt; the delta is taken against the parent (`keep` defaults to all of it)."""
    before = [*parent_prompt, *parent.generation_token_ids] if parent is not None else []
    kept = len(before) if keep is None else keep
    assert list(prompt[:kept]) == before[:kept]
    if kept < len(before) and reason is None:
        reason = BranchReason.HISTORY_EDITED
    n = len(generation)
    known = tuple([-0.5] * n) if log_probs == "default" else log_probs
    spans: list[VersionSpan] = []
    for at, version in enumerate([0] * n if versions is None else versions):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version=version, start=spans[-1].start, end=at + 1)
        else:
            spans.append(VersionSpan(version=version, start=at, end=at + 1))
    return ModelCall(
        id=id,
        parent_id=parent.id if parent is not None else None,
        prompt_keep=kept,
        prompt_delta=tuple(prompt[kept:]),
        prompt_hash=token_hash(tuple(prompt)),
        branch_reason=reason,
        generation_token_ids=tuple(generation),
        generation_log_probs=None if known is None else tuple(known),
        log_prob_kind=kind if known is not None else None,
        policy_versions=tuple(spans),
        sampling=SamplingParams(temperature=temperature, top_p=top_p),
        finish_reason=FinishReason.STOP,
        model="tiny",
        view_hash="v",
        started_at=0.0,
        finished_at=1.0,
    )


def verdict(reward: float | None) -> Verdict:
    fault = None
    if reward is None:
        fault = Fault(owner="environment", code="lost", phase="run", retryable=True, message="gone")
    return Verdict(
        reward=reward,
        evidence=tuple(Evidence(key=key, holds=True) for key in EvidenceKey) if reward is not None else (),
        fault=fault,
        grader_revision="g",
        isolation="none",
    )


def trajectory(
    calls: Sequence[ModelCall],
    *,
    id: str = "t0",
    group: str = "g0",
    reward: float | None = 1.0,
    termination: Termination = Termination.FINISHED,
    turns: Sequence[str] | None = None,
) -> Trajectory:
    acted = [c.id for c in calls] if turns is None else turns
    return Trajectory(
        id=id,
        task_id=f"suite/{group}",
        task_revision="0" * 64,
        group_id=group,
        index=0,
        harness="test/1",
        split=Split.TRAIN,
        calls=tuple(calls),
        turns=tuple(Turn(call_id=c, actions=(), observations=()) for c in acted),
        termination=termination if reward is not None else Termination.FAULT,
        verdict=verdict(reward),
        started_at=0.0,
        finished_at=1.0,
    )


def chain(
    rng: random.Random,
    *,
    id: str,
    group: str = "g0",
    reward: float | None = 1.0,
    turns: int = 3,
    prompt: Sequence[int] | None = None,
    generated: tuple[int, int] = (2, 6),
    observed: tuple[int, int] = (1, 5),
    branch_at: int | None = None,
    versions: Sequence[int] = (0,),
    termination: Termination = Termination.FINISHED,
    temperature: float = 1.0,
    vocab: int = VOCAB,
) -> Trajectory:
    """A random multi-turn trajectory; turn `branch_at` starts a new branch from the first prompt."""
    draw = lambda n: [rng.randrange(vocab) for _ in range(n)]  # noqa: E731
    first = list(prompt) if prompt is not None else draw(rng.randint(4, 9))
    calls: list[ModelCall] = []
    whole: list[int] = []
    parent: ModelCall | None = None
    parent_prompt: list[int] = []
    for turn in range(turns):
        if turn == 0:
            now, keep = first, None
        elif turn == branch_at:
            now, keep = [*first, *draw(3)], len(first)
        else:
            now, keep = [*whole, *draw(rng.randint(*observed))], None
        generation = draw(rng.randint(*generated))
        made = call(
            f"{id}.{turn}",
            now,
            generation,
            parent=parent,
            parent_prompt=parent_prompt,
            keep=keep,
            log_probs=[-rng.random() * 3 for _ in generation],
            versions=[versions[min(turn, len(versions) - 1)]] * len(generation),
            temperature=temperature,
        )
        calls.append(made)
        parent, parent_prompt, whole = made, now, [*now, *generation]
    return trajectory(calls, id=id, group=group, reward=reward, termination=termination)


def group(trajectories: Sequence[Trajectory]) -> Group:
    return Group(
        id=trajectories[0].group_id, task_id=trajectories[0].task_id, trajectories=tuple(trajectories)
    )
