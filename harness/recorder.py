"""Request and result to a `ModelCall`, or a refusal. The only place where calls are made into evidence.

Refused (`ModelError`, so the attempt ends as a fault of the model and trains nothing): an echo that is not
the prompt that was asked for, an answer to another request, an empty generation, missing log-probs where
they are required, ids beyond the tokenizer. An unknown log-prob (-inf, NaN, None) is stored as None, never
as a number.

A retry carries the same request id and is the same request: recording it again returns the first record.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic

from agentrl.errors import EvidenceError, ModelError
from agentrl.inference.sampler import SampleRequest, SampleResult
from agentrl.types import ModelCall, content_hash, to_dict
from harness.transcript import Prompt, common_prefix


def view_hash(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    """sha256 of the messages and tools that a prompt was rendered from."""
    return content_hash(
        *(
            json.dumps(part, sort_keys=True, ensure_ascii=True, default=to_dict).encode()
            for part in ([*messages], [*tools])
        )
    )


def finite(log_probs: Sequence[float | None]) -> tuple[float | None, ...]:
    """Log-probs with everything that is not a finite number as None."""
    return tuple(p if p is not None and math.isfinite(p) else None for p in log_probs)


class Recorder:
    """The calls of one trajectory, in sampled order.

    Args:
        vocab_size: number of ids of the tokenizer; a sampled id at or above it is a phantom.
        require_log_probs: refuse a result without them (a policy that is to be trained).
    """

    def __init__(self, *, vocab_size: int, require_log_probs: bool) -> None:
        self._vocab_size = vocab_size
        self._require_log_probs = require_log_probs
        self._calls: dict[str, ModelCall] = {}
        self._generated = 0

    @property
    def calls(self) -> tuple[ModelCall, ...]:
        return tuple(self._calls.values())

    @property
    def generated_tokens(self) -> int:
        """Of all calls."""
        return self._generated

    def record(self, prompt: Prompt, request: SampleRequest, result: SampleResult, *, view: str) -> ModelCall:
        """The call's record; its id is the request's.

        Raises:
            ModelError: `wrong_request`, `echo`, `empty_generation`, `no_log_probs`, `lengths`,
                `phantom_token` (the call is kept in `calls`, ids unchanged, but the attempt must end).
            EvidenceError: the same request id with another outcome.
        """
        if result.request_id != request.id:
            raise _refused(
                "wrong_request", f"the answer to {result.request_id} came for {request.id}", request
            )
        if result.prompt_token_ids != request.prompt_token_ids:
            at = common_prefix(result.prompt_token_ids, request.prompt_token_ids)
            raise _refused(
                "echo",
                f"the engine fed {len(result.prompt_token_ids)} ids that differ at {at} from the"
                f" {len(request.prompt_token_ids)} that were asked for",
                request,
                position=at,
            )
        if prompt.token_ids != request.prompt_token_ids:
            raise EvidenceError(f"request {request.id} does not carry the prompt it was made for.")
        if not result.token_ids:
            raise _refused("empty_generation", "no token was generated", request)
        if result.log_probs is None and self._require_log_probs:
            raise _refused("no_log_probs", "the engine gave ids without log-probs", request)
        try:
            call = ModelCall(
                id=request.id,
                parent_id=prompt.parent_id,
                prompt_keep=prompt.keep,
                prompt_delta=prompt.delta,
                prompt_hash=prompt.hash,
                branch_reason=prompt.reason,
                generation_token_ids=result.token_ids,
                generation_log_probs=None if result.log_probs is None else finite(result.log_probs),
                log_prob_kind=result.log_prob_kind,
                policy_versions=result.policy_versions,
                sampling=request.params,
                finish_reason=result.finish_reason,
                model=result.model,
                view_hash=view,
                started_at=result.started_at,
                finished_at=result.finished_at,
            )
        except pydantic.ValidationError as error:
            problem = error.errors(include_url=False)[0]["msg"]
            raise _refused("lengths", f"the answer contradicts itself ({problem})", request) from error
        known = self._calls.get(call.id)
        if known is not None:
            if known != call:
                raise EvidenceError(f"request {request.id} was answered twice, differently.")
            return known
        self._calls[call.id] = call
        self._generated += len(call.generation_token_ids)
        if max(result.token_ids) >= self._vocab_size:
            phantom = next(i for i, t in enumerate(result.token_ids) if t >= self._vocab_size)
            raise _refused(
                "phantom_token",
                f"id {result.token_ids[phantom]} was sampled, the tokenizer has {self._vocab_size}",
                request,
                position=phantom,
            )
        return call


_FIXES = {
    "wrong_request": "Look for a proxy that mixes up answers.",
    "echo": "Send token ids, not text, and look for a server that truncates prompts.",
    "empty_generation": "Look at the server's log.",
    "no_log_probs": "Ask the server for one log-prob per sampled token.",
    "lengths": "Look for a proxy that rebuilds answers.",
    "phantom_token": "Mask the padded rows of the output matrix in the server.",
}


def _refused(code: str, message: str, request: SampleRequest, *, position: int | None = None) -> ModelError:
    evidence: dict[str, str | int | float | bool | None] = {"request": request.id}
    if position is not None:
        evidence["position"] = position
    return ModelError(
        f"{request.id}: {message}.", fix=_FIXES[code], code=code, phase="record", evidence=evidence
    )
