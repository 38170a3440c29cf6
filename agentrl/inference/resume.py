"""A generation that an engine aborts (a weight update, an operator) goes on from the tokens it already has.

Each try is a leg: it asks for the prompt plus everything sampled so far, with what is left of the budget,
and its tokens are appended. The caller sees one result whose tokens keep the log-prob and the policy
version of the leg that sampled them. Nothing is counted twice and nothing sampled is thrown away.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from agentrl.errors import ModelError
from agentrl.inference.sampler import SampleRequest, SampleResult
from agentrl.types import FinishReason, VersionSpan

MAX_LEGS = 64
"""More aborts of one generation than this mean that something aborts whatever it sees."""

Leg = Callable[[SampleRequest], Awaitable[SampleResult]]


def remaining(*, max_new: int, generated: int, context: int, prompt: int) -> int:
    """Tokens that the next leg may ask for: `min(max_new - generated, context - prompt - generated)`, never
    negative. Example: 24 and 10, context 40: 14 after a prompt of 8, 10 after one of 20."""
    return max(0, min(max_new - generated, context - prompt - generated))


async def sample_whole(leg: Leg, request: SampleRequest, *, context: int) -> SampleResult:
    """Sample `request` in as many legs as it takes.

    Args:
        leg: one try; it may end as `FinishReason.ABORT` with any number of tokens, also none.
        context: prompt plus generation that the model holds.

    Raises:
        ModelError: `aborted` after `MAX_LEGS`, `echo` when a later leg was fed another prefix; what `leg`
            raises.
    """
    ends = time.monotonic() + request.deadline_s
    first: SampleResult | None = None
    ids: tuple[int, ...] = ()
    log_probs: tuple[float | None, ...] | None = ()
    spans: tuple[VersionSpan, ...] | None = ()
    for number in range(MAX_LEGS):
        left = remaining(
            max_new=request.params.max_tokens,
            generated=len(ids),
            context=context,
            prompt=len(request.prompt_token_ids),
        )
        if ids and not left:
            assert first is not None
            return _merged(first, first, ids, log_probs, spans, FinishReason.LENGTH)
        asked = request if number == 0 else _next(request, ids, number, left, ends - time.monotonic())
        result = await leg(asked)
        if first is None:
            first = result
        elif result.prompt_token_ids != asked.prompt_token_ids:
            raise ModelError(
                f"{request.id}: after an abort the engine was fed another prefix.",
                fix="Look for a server that truncates prompts.",
                code="echo",
                phase="sample",
                evidence={"request": request.id, "leg": number},
            )
        spans = _joined(spans, result, at=len(ids))
        ids += result.token_ids
        log_probs = None if log_probs is None or result.log_probs is None else log_probs + result.log_probs
        if result.finish_reason is not FinishReason.ABORT:
            if number == 0:
                return result
            return _merged(first, result, ids, log_probs, spans, result.finish_reason)
    raise ModelError(
        f"{request.id} was aborted {MAX_LEGS} times, {len(ids)} tokens so far.",
        fix="Look for what aborts requests; publish with mode 'keep'.",
        code="aborted",
        phase="sample",
    )


def _next(
    request: SampleRequest, ids: tuple[int, ...], number: int, left: int, seconds: float
) -> SampleRequest:
    seed = request.params.seed
    return replace(
        request,
        id=f"{request.id}+{number}",
        prompt_token_ids=request.prompt_token_ids + ids,
        # The same seed would draw the same numbers again.
        params=replace(request.params, max_tokens=left, seed=None if seed is None else seed + number),
        deadline_s=max(0.001, seconds),
    )


def _joined(
    spans: tuple[VersionSpan, ...] | None, result: SampleResult, *, at: int
) -> tuple[VersionSpan, ...] | None:
    """Spans of all legs so far; None once a leg with tokens had none."""
    if spans is None or (result.token_ids and not result.policy_versions):
        return None
    moved = [
        VersionSpan(version=span.version, start=span.start + at, end=span.end + at)
        for span in result.policy_versions
    ]
    if spans and moved and spans[-1].version == moved[0].version:
        moved[0] = VersionSpan(version=moved[0].version, start=spans[-1].start, end=moved[0].end)
        spans = spans[:-1]
    return (*spans, *moved)


def _merged(
    first: SampleResult,
    last: SampleResult,
    ids: tuple[int, ...],
    log_probs: tuple[float | None, ...] | None,
    spans: tuple[VersionSpan, ...] | None,
    finish: FinishReason,
) -> SampleResult:
    return replace(
        first,
        token_ids=ids,
        log_probs=log_probs,
        log_prob_kind=None if log_probs is None else first.log_prob_kind,
        policy_versions=spans or (),
        finish_reason=finish,
        finished_at=max(first.started_at, last.finished_at),
    )
