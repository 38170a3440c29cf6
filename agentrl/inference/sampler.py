"""The contract between a harness and a policy server: tokens in, tokens and evidence out."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from agentrl.types import FinishReason, LogProbKind, SamplingParams, VersionSpan

_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class SampleRequest:
    """`session` groups the calls of one trajectory (cache affinity); `id` makes a retry the same request."""

    id: str
    session: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    deadline_s: float = 600.0
    """Seconds from now after which the sampler must raise `ModelError(code='deadline')`."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class SampleResult:
    """What the engine says happened. `prompt_token_ids` are the ids that the engine really fed to the model,
    read back from its own buffer, not a copy of the request; the recorder compares the two and refuses a
    difference."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Generated ids; the stop token is included when it was sampled."""
    log_probs: tuple[float | None, ...] | None
    """One per id, float32 natural logs; None when this sampler has none (a scripted one)."""
    log_prob_kind: LogProbKind | None
    policy_versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    model: str
    started_at: float
    finished_at: float


@runtime_checkable
class Sampler(Protocol):
    """A policy that can be sampled. Safe to call from many tasks at once; cancellation aborts the request."""

    @property
    def model(self) -> str: ...

    @property
    def policy_version(self) -> int | None:
        """Version that a request started now would be sampled from; None for a policy without versions."""
        ...

    async def sample(self, request: SampleRequest) -> SampleResult: ...

    async def close(self) -> None: ...
