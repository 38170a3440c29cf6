"""Stop strings over a sampler that knows only stop tokens.

The text view is cut before the stop string; the token view keeps every sampled id up to and including the one
that completed it, so that ids and log-probs stay equal in number and the next prompt is built from what was
sampled, never from the cut text. Worked example: ids that decode to 'ab', 'c</', 's>x' and the stop '</s>':
the text is 'abc', the ids are all three.

Tokens are drawn in pieces and what was drawn beyond the stop is dropped. That changes no probability: whether
a token is kept depends only on the tokens up to it, so what is kept is a sample of the policy ended by a rule
over its own past, as a stop token is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agentrl.errors import ModelError
from agentrl.inference.sampler import Sampler, SampleRequest, SampleResult
from agentrl.types import FinishReason, VersionSpan

FIRST_PIECE_TOKENS = 32
"""Drawn before the first look for a stop string; each further piece is twice as long, so at most half of what
is drawn is drawn for nothing."""

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Where a stop string ended a generation: `tokens` ids are kept, the text is `text`, `stop` was found."""

    tokens: int
    text: str
    stop: str


def find(ids: Ids, stops: Sequence[str], decode: Callable[[Ids], str]) -> Cut | None:
    """The earliest stop string in the text of `ids`; None when there is none. Ids are decoded as a whole,
    since bytes of one character may span tokens."""
    text = decode(ids)
    if not any(stop in text for stop in stops):
        return None
    few, enough = 0, len(ids)
    while enough - few > 1:  # decode(ids[:few]) holds no stop, decode(ids[:enough]) does
        half = (few + enough) // 2
        part = decode(ids[:half])
        if any(stop in part for stop in stops):
            enough = half
        else:
            few = half
    text = decode(ids[:enough])
    at, stop = min((text.find(stop), stop) for stop in stops if stop in text)
    return Cut(tokens=enough, text=text[:at], stop=stop)


async def sample(
    sampler: Sampler, request: SampleRequest, stops: Sequence[str], decode: Callable[[Ids], str]
) -> SampleResult:
    """`sampler.sample(request)`, ended by the first of `stops`. Without stops it is exactly that.

    The finish reason is `STOP_STRING` when one was found. Raises what the sampler raises, and
    `ModelError(code='echo')` when a later piece was not drawn after what came before it.
    """
    if not stops:
        return await sampler.sample(request)
    pieces: list[SampleResult] = []
    ids: Ids = ()
    size = FIRST_PIECE_TOKENS
    while True:
        number = len(pieces)
        left = request.params.max_tokens - len(ids)
        asked = replace(
            request,
            id=f"{request.id}.p{number}",
            prompt_token_ids=request.prompt_token_ids + ids,
            params=replace(
                request.params,
                max_tokens=min(size, left),
                seed=None if request.params.seed is None else request.params.seed + number,
            ),
        )
        piece = await sampler.sample(asked)
        if number and piece.prompt_token_ids != asked.prompt_token_ids:
            raise ModelError(
                f"{asked.id}: the engine did not continue from what it had sampled.",
                fix="Send token ids, not text, and look for a server that truncates prompts.",
                code="echo",
                phase="record",
            )
        pieces.append(piece)
        ids += piece.token_ids
        cut = find(ids, stops, decode)
        whole = len(ids) >= request.params.max_tokens or len(piece.token_ids) < asked.params.max_tokens
        if cut is not None:
            return _joined(request, pieces, cut.tokens, FinishReason.STOP_STRING)
        if piece.finish_reason is not FinishReason.LENGTH or whole:
            return _joined(request, pieces, len(ids), piece.finish_reason)
        size *= 2


def _joined(
    request: SampleRequest, pieces: Sequence[SampleResult], tokens: int, reason: FinishReason
) -> SampleResult:
    """Pieces as one result of `tokens` ids."""
    first, last = pieces[0], pieces[-1]
    known = all(piece.log_probs is not None for piece in pieces)
    versions: list[VersionSpan] = []
    at = 0
    for piece in pieces:
        for span in piece.policy_versions:
            start, end = at + span.start, min(at + span.end, tokens)
            if start >= end:
                continue
            if versions and versions[-1].version == span.version and versions[-1].end == start:
                start = versions.pop().start
            versions.append(VersionSpan(version=span.version, start=start, end=end))
        at += len(piece.token_ids)
    return SampleResult(
        request_id=request.id,
        prompt_token_ids=first.prompt_token_ids,
        token_ids=tuple(i for piece in pieces for i in piece.token_ids)[:tokens],
        log_probs=tuple(p for piece in pieces for p in piece.log_probs or ())[:tokens] if known else None,
        log_prob_kind=first.log_prob_kind if known else None,
        policy_versions=tuple(versions),
        finish_reason=reason,
        model=last.model,
        started_at=first.started_at,
        finished_at=last.finished_at,
    )
