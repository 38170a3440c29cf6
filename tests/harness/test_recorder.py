"""Transcript and recorder: what becomes evidence, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import EvidenceError, ModelError
from agentrl.inference.sampler import SampleRequest, SampleResult
from agentrl.types import (
    BranchReason,
    FinishReason,
    LogProbKind,
    ModelCall,
    SamplingParams,
    VersionSpan,
    from_json,
    to_json,
)
from harness.recorder import Recorder, finite, view_hash
from harness.transcript import Prompt, Transcript, common_prefix

Ids = tuple[int, ...]


def asked(prompt: Prompt, *, id: str = "c0") -> SampleRequest:
    return SampleRequest(
        id=id, session="s", prompt_token_ids=prompt.token_ids, params=SamplingParams(max_tokens=9)
    )


def answered(request: SampleRequest, ids: Ids, **changes: Any) -> SampleResult:
    return replace(
        SampleResult(
            request_id=request.id,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=ids,
            log_probs=tuple(-0.5 for _ in ids),
            log_prob_kind=LogProbKind.PROCESSED,
            policy_versions=(VersionSpan(version=3, start=0, end=len(ids)),) if ids else (),
            finish_reason=FinishReason.STOP,
            model="m",
            started_at=1.0,
            finished_at=2.0,
        ),
        **changes,
    )


def recorded(
    recorder: Recorder, transcript: Transcript, prompt: Prompt, ids: Ids, *, id: str = "c0", **changes: Any
) -> ModelCall:
    request = asked(prompt, id=id)
    call = recorder.record(prompt, request, answered(request, ids, **changes), view="v")
    transcript.commit(prompt, call)
    return call


def a_recorder(**options: Any) -> Recorder:
    return Recorder(**{"vocab_size": 100, "require_log_probs": True, **options})


def test_prompts_extend_prompt_and_generation_token_by_token() -> None:
    """TOK-17's ids: header 4; row [1,4,7,2,4,8]."""
    recorder, transcript = a_recorder(), Transcript()
    recorded(recorder, transcript, transcript.start((1, 4)), (7,))
    second = recorded(recorder, transcript, transcript.extend((2, 4)), (8,), id="c1")
    assert transcript.ids == (1, 4, 7, 2, 4, 8)
    assert (second.parent_id, second.prompt_keep, second.prompt_delta) == ("c0", 3, (2, 4))
    assert second.branch_reason is None
    assert recorder.generated_tokens == 2


def test_a_changed_history_is_a_branch_that_keeps_the_common_beginning() -> None:
    """TOK-04's ids: turn 2 is [U1, A1, U2] after [U1] + [T1, A1]."""
    recorder, transcript = a_recorder(), Transcript()
    recorded(recorder, transcript, transcript.start((11,)), (12, 13))
    prompt = transcript.branch((11, 13, 14), BranchReason.REASONING_DROPPED)
    assert (prompt.keep, prompt.delta, prompt.reason) == (1, (13, 14), BranchReason.REASONING_DROPPED)
    call = recorded(recorder, transcript, prompt, (15, 16), id="c1")
    assert call.branch_reason is BranchReason.REASONING_DROPPED
    assert transcript.ids == (11, 13, 14, 15, 16)


def test_a_branch_that_changes_nothing_is_an_extension() -> None:
    recorder, transcript = a_recorder(), Transcript()
    recorded(recorder, transcript, transcript.start((1,)), (2,))
    prompt = transcript.branch((1, 2, 3), BranchReason.TEMPLATE)
    assert (prompt.keep, prompt.delta, prompt.reason) == (2, (3,), None)


def test_a_transcript_starts_once_and_extends_only_what_was_committed() -> None:
    recorder, transcript = a_recorder(), Transcript()
    with pytest.raises(EvidenceError, match="nothing to extend"):
        transcript.extend((1,))
    with pytest.raises(EvidenceError, match="empty_prompt"):
        transcript.start(())
    prompt = transcript.start((1,))
    recorded(recorder, transcript, prompt, (2,))
    with pytest.raises(EvidenceError, match="starts once"):
        transcript.start((1,))
    other = Transcript()
    call = recorder.calls[0]
    with pytest.raises(EvidenceError, match="does not continue"):
        other.commit(other.start((9,)), call)


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), max_size=8))
def test_the_common_prefix_is_the_longest_one(a: list[int], b: list[int]) -> None:
    n = common_prefix(tuple(a), tuple(b))
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("wrong_request", {"request_id": "other"}),
        ("echo", {"prompt_token_ids": (1, 5)}),
        ("echo", {"prompt_token_ids": (1, 4, 4)}),
        ("echo", {"prompt_token_ids": ()}),
        ("empty_generation", {"token_ids": (), "log_probs": (), "policy_versions": ()}),
        ("no_log_probs", {"log_probs": None}),
        ("lengths", {"log_probs": (-0.5,)}),
        ("lengths", {"log_prob_kind": None}),
        ("lengths", {"policy_versions": (VersionSpan(version=1, start=0, end=1),)}),
        ("lengths", {"log_probs": (0.5, -0.5)}),
        ("phantom_token", {"token_ids": (3, 112)}),
    ],
)
def test_what_is_not_evidence_is_refused_at_the_first_call(code: str, changes: dict[str, Any]) -> None:
    """SRV-04, SRV-10, LGP-11: loud, at once, and owned by the model."""
    recorder, transcript = a_recorder(), Transcript()
    prompt = transcript.start((1, 4))
    request = asked(prompt)
    with pytest.raises(ModelError) as caught:
        recorder.record(prompt, request, answered(request, (3, 12), **changes), view="v")
    assert (caught.value.code, caught.value.owner, caught.value.phase) == (code, "model", "record")
    assert caught.value.fix


def test_a_phantom_call_is_kept_with_its_ids_unchanged() -> None:
    """LGP-11: tokenizer of 10 ids, sampled [3, 12]."""
    recorder, transcript = a_recorder(vocab_size=10), Transcript()
    prompt = transcript.start((1, 4))
    request = asked(prompt)
    with pytest.raises(ModelError, match="id 12 was sampled"):
        recorder.record(prompt, request, answered(request, (3, 12)), view="v")
    assert [c.generation_token_ids for c in recorder.calls] == [(3, 12)]


def test_unknown_log_probs_are_null_never_a_number() -> None:
    """LGP-06: [-0.1, -inf, None] is stored as [-0.1, null, null]."""
    assert finite((-0.1, float("-inf"), None, float("nan"))) == (-0.1, None, None, None)
    recorder, transcript = a_recorder(), Transcript()
    call = recorded(recorder, transcript, transcript.start((1,)), (2, 3, 4), log_probs=(-0.1, None, None))
    assert call.generation_log_probs == (-0.1, None, None)
    assert b"[-0.1,null,null]" in to_json(call)
    assert from_json(ModelCall, to_json(call)) == call


def test_a_scripted_call_has_no_log_probs_and_that_is_said() -> None:
    recorder, transcript = a_recorder(require_log_probs=False), Transcript()
    call = recorded(
        recorder,
        transcript,
        transcript.start((1,)),
        (2,),
        log_probs=None,
        log_prob_kind=None,
        policy_versions=(),
    )
    assert call.generation_log_probs is None
    assert call.versions_T() == ()


def test_a_retry_is_the_same_call_and_is_counted_once() -> None:
    recorder, transcript = a_recorder(), Transcript()
    prompt = transcript.start((1,))
    request = asked(prompt)
    first = recorder.record(prompt, request, answered(request, (2, 3)), view="v")
    assert recorder.record(prompt, request, answered(request, (2, 3)), view="v") is first
    assert recorder.generated_tokens == 2
    with pytest.raises(EvidenceError, match="twice, differently"):
        recorder.record(prompt, request, answered(request, (2, 4)), view="v")


def test_every_call_has_its_own_prompt() -> None:
    """SRV-13: prompts of 3, 6, 9 ids with generations of 2 are stored as such."""
    recorder, transcript = a_recorder(), Transcript()
    recorded(recorder, transcript, transcript.start((1, 2, 3)), (4, 5))
    recorded(recorder, transcript, transcript.extend((6,)), (7, 8), id="c1")
    recorded(recorder, transcript, transcript.extend((9,)), (10, 11), id="c2")
    lengths = [c.prompt_keep + len(c.prompt_delta) for c in recorder.calls]
    assert lengths == [3, 6, 9]
    assert len(transcript) == 11
    assert recorder.generated_tokens == 6


def test_the_view_hash_is_of_messages_and_tools() -> None:
    one = view_hash([{"role": "user", "content": "a"}], [])
    assert one == view_hash([{"content": "a", "role": "user"}], [])
    assert len({one, view_hash([{"role": "user", "content": "b"}], []), view_hash([], [{"name": "a"}])}) == 3
