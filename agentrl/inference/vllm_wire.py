"""What is said to a vLLM server and what its answers mean: requests to bodies, answers to evidence or errors.

Pure: no connection, no clock but the one that is given. Field names are those of vLLM's
`/inference/v1/generate` (token ids in, token ids out; the server must run with `--enable-scale-out`) as
measured on 0.32.

An answer becomes evidence only if it holds together: one choice, ids, one log-prob per id found by that id,
an echo of the prompt, version spans that cover every token. Anything else is a `ModelError`, at the first
call.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from agentrl.errors import ModelError
from agentrl.inference.sampler import SampleRequest, SampleResult
from agentrl.types import FinishReason, LogProbKind, SamplingParams, VersionSpan

GENERATE = "/inference/v1/generate"
UNKNOWN_LOG_PROB = -9999.0
"""vLLM writes this for minus infinity, which JSON does not have."""
UNVERSIONED = "default"
"""Label of a server that was never published to."""
LOADING = "loading"
"""Label while weights change: tokens that carry it are nobody's, whoever died in between."""
RETRIED_STATUS = frozenset({408, 429, 500, 502, 503, 504})
"""Answers that say nothing about the request: another try, here or elsewhere, may work."""
_LABEL = re.compile(r"^(\d+)(?:\.[0-9a-f]+)?$")


def label_of(version: int, content_hash: str = "") -> str:
    """What the server is told to stamp tokens with: the number, and the beginning of the weights' hash."""
    return f"{version}.{content_hash[:12]}" if content_hash else str(version)


def version_of(label: str) -> int | None:
    """The number in a label; None for a server that was never published to, or whose label is not ours."""
    found = _LABEL.match(label)
    return int(found.group(1)) if found else None


def sampling_params(params: SamplingParams) -> dict[str, Any]:
    """vLLM's fields, every one that would change the distribution said out loud: a server may have defaults
    of its own, and it ignores unknown fields silently."""
    fields: dict[str, Any] = {
        "n": 1,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "stop_token_ids": list(params.stop_token_ids),
        "detokenize": False,
    }
    if params.seed is not None:
        fields["seed"] = params.seed
    return fields


def body(request: SampleRequest, *, model: str, request_id: str, salt: str | None) -> dict[str, Any]:
    """The body of one generation. `salt` keeps prefix caches of different weights apart."""
    fields: dict[str, Any] = {
        "model": model,
        "request_id": request_id,
        "token_ids": list(request.prompt_token_ids),
        "sampling_params": sampling_params(request.params),
        "return_token_ids": True,
        "stream": False,
    }
    if salt is not None:
        fields["cache_salt"] = salt
    return fields


def result(
    request: SampleRequest,
    answer: Mapping[str, Any],
    *,
    model: str,
    server_kind: LogProbKind,
    labels: Mapping[str, int] | None,
    started_at: float,
    finished_at: float,
) -> SampleResult:
    """An answer as a `SampleResult`.

    Args:
        server_kind: what the server's log-probs are of (`--logprobs-mode`); greedy ones are always raw.
        labels: version labels that may appear, with their number; None: whatever is there, ours or not.

    Raises:
        ModelError: `answer` (fields are missing or of the wrong kind), `no_ids`, `no_echo`, `no_log_probs`,
            `lengths`, `wrong_token`, `foreign_version`. What they have in common: not evidence.
    """
    with _evidence(request):
        choices = answer.get("choices")
        if not isinstance(choices, list) or len(choices) != 1:
            n = len(choices) if isinstance(choices, list) else 0
            raise _not_evidence(request, "answer", f"{n} choices came for one generation")
        choice = choices[0]
        ids = _ids(choice, "token_ids")
        finish = _finish(request, choice)
        if not ids and finish is not FinishReason.ABORT:
            raise _not_evidence(request, "no_ids", "the answer has no token ids")
        prompt = _ids(answer, "prompt_token_ids") or _ids(choice, "prompt_token_ids")
        if not prompt:
            raise _not_evidence(request, "no_echo", "the server does not say which ids it fed")
        usage = answer.get("usage") or {}
        counted = usage.get("completion_tokens", len(ids))
        if counted != len(ids):
            raise _not_evidence(request, "lengths", f"{len(ids)} ids came, the server counted {counted}")
        greedy = request.params.temperature == 0
        return SampleResult(
            request_id=request.id,
            prompt_token_ids=prompt,
            token_ids=ids,
            log_probs=log_probs(request, choice, ids),
            log_prob_kind=LogProbKind.RAW if greedy else server_kind,
            policy_versions=_versions(request, choice, len(ids), labels),
            finish_reason=finish,
            model=model,
            started_at=started_at,
            finished_at=max(started_at, finished_at),
        )


def log_probs(
    request: SampleRequest, choice: Mapping[str, Any], ids: Sequence[int]
) -> tuple[float | None, ...]:
    """The log-prob of each sampled id, looked up by that id. None where the server knows none."""
    given = choice.get("logprobs")
    entries = given.get("content") if isinstance(given, Mapping) else None
    if not isinstance(entries, list):
        if not ids:
            return ()
        raise _not_evidence(request, "no_log_probs", "the answer has ids without log-probs")
    if len(entries) != len(ids):
        raise _not_evidence(request, "lengths", f"{len(entries)} log-probs for {len(ids)} ids")
    return tuple(log_prob_of(request, entry, token_id) for entry, token_id in zip(entries, ids, strict=True))


def log_prob_of(request: SampleRequest, entry: Mapping[str, Any], token_id: int) -> float | None:
    """The log-prob of one id among what the server lists at its position: by id, never by order."""
    for one in (entry, *(entry.get("top_logprobs") or ())):
        if one.get("token_id") == token_id:
            value = one.get("logprob")
            known = isinstance(value, int | float) and math.isfinite(value) and value > UNKNOWN_LOG_PROB
            return float(value) if known else None
    raise _not_evidence(request, "wrong_token", f"no log-prob is that of the sampled id {token_id}")


def prompt_log_probs(answer: Mapping[str, Any], ids: Sequence[int]) -> tuple[float | None, ...]:
    """The log-probs of a prompt from an answer of `/v1/completions`: one per id, the first None.

    Raises:
        ModelError: `answer`: it is about other ids, or lacks some.
    """
    try:
        (choice,) = answer["choices"]
        if choice["prompt_token_ids"] != list(ids):
            raise ValueError("other ids")
        found: list[float | None] = [None]
        for token_id, entry in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True):
            value = (entry or {}).get(str(token_id), {}).get("logprob")
            known = isinstance(value, int | float) and math.isfinite(value) and value > UNKNOWN_LOG_PROB
            found.append(float(value) if known else None)
        return tuple(found)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(
            "the server scored other ids than it was asked to.",
            fix="Use vLLM itself, not an endpoint before it.",
            code="answer",
            phase="sample",
        ) from error


@contextmanager
def _evidence(request: SampleRequest) -> Iterator[None]:
    """What is read in it may have any form."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise _not_evidence(
            request, "answer", f"the answer has another form ({type(error).__name__}: {error})"
        ) from error


def _ids(part: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Ids of a field; some clients move fields they do not know into `provider_specific_fields`."""
    found = part.get(name) or (part.get("provider_specific_fields") or {}).get(name) or ()
    return tuple(found) if all(type(i) is int for i in found) else ()


def _finish(request: SampleRequest, choice: Mapping[str, Any]) -> FinishReason:
    said = str(choice.get("finish_reason"))
    try:
        return FinishReason(said)
    except ValueError as error:
        raise _not_evidence(request, "answer", f"the generation ended as '{said}'") from error


def _versions(
    request: SampleRequest, choice: Mapping[str, Any], count: int, labels: Mapping[str, int] | None
) -> tuple[VersionSpan, ...]:
    """Spans of the answer as policy versions; empty for a server that was never published to."""
    given = choice.get("weight_versions") or []
    if not count or (labels is None and all(version_of(str(s.get("version"))) is None for s in given)):
        return ()
    if not given:
        if labels is None:
            return ()
        raise _not_evidence(request, "no_version", "the answer does not say which weights sampled it")
    spans: list[VersionSpan] = []
    for span in given:
        label = str(span.get("version"))
        number = version_of(label) if labels is None else labels.get(label)
        if number is None:
            raise _not_evidence(
                request, "foreign_version", f"weights '{label}' sampled it, which nobody here published"
            )
        if span["end"] > span["start"]:
            spans.append(VersionSpan(version=number, start=span["start"], end=span["end"]))
    if not spans or spans[0].start != 0 or spans[-1].end != count:
        raise _not_evidence(request, "lengths", f"version spans do not cover the {count} ids")
    return tuple(spans)


_FIXES = {
    "answer": "Look for a proxy that rebuilds answers, or another version of the server.",
    "no_ids": "Ask the server itself, not a chat endpoint behind it; ids are never made from text.",
    "no_echo": "Look for a proxy that drops prompt_token_ids.",
    "no_log_probs": "Look for a proxy that drops logprobs.",
    "lengths": "Look for a proxy that rebuilds answers.",
    "wrong_token": "Look for a proxy that reorders log-probs.",
    "no_version": "Use a server that reports weight_versions (vLLM 0.32 or later).",
    "foreign_version": "Another run publishes to this server, or it was restarted: give each run its own.",
}


def _not_evidence(request: SampleRequest, code: str, message: str) -> ModelError:
    return ModelError(
        f"{request.id}: {message}.",
        fix=_FIXES[code],
        code=code,
        phase="sample",
        retryable=code == "foreign_version",
        evidence={"request": request.id},
    )
