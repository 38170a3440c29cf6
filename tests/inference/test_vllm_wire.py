"""What a vLLM answer must hold to be evidence, with the vectors of the known faults."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ModelError
from agentrl.inference import vllm_wire as wire
from agentrl.inference.sampler import SampleRequest, SampleResult
from agentrl.types import FinishReason, LogProbKind, SamplingParams, VersionSpan

REQUEST = SampleRequest(
    id="g.0.1.c0", session="g.0.1", prompt_token_ids=(3, 4), params=SamplingParams(stop_token_ids=(9,))
)
ANSWER: dict[str, Any] = {
    "usage": {"prompt_tokens": 2, "completion_tokens": 3},
    "prompt_token_ids": [3, 4],
    "choices": [
        {
            "finish_reason": "stop",
            "token_ids": [5, 382, 9],
            "logprobs": {
                "content": [
                    {"token_id": 5, "logprob": -0.5, "top_logprobs": []},
                    {
                        "token_id": 13,
                        "logprob": -0.7,
                        "top_logprobs": [
                            {"token_id": 13, "logprob": -0.7},
                            {"token_id": 382, "logprob": -4.2},
                        ],
                    },
                    {"token_id": 9, "logprob": -0.1, "top_logprobs": []},
                ]
            },
            "weight_versions": [
                {"version": "6.ab", "start": 0, "end": 1},
                {"version": "7.cd", "start": 1, "end": 3},
            ],
        }
    ],
}


def answer(**choice: Any) -> dict[str, Any]:
    made = copy.deepcopy(ANSWER)
    made["choices"][0].update(choice)
    return made


def read(made: dict[str, Any], **options: Any) -> SampleResult:
    given: dict[str, Any] = {"model": "m", "server_kind": LogProbKind.PROCESSED, "labels": None}
    return wire.result(REQUEST, made, **{**given, **options}, started_at=1.0, finished_at=2.0)


def test_an_answer_keeps_ids_stop_token_log_probs_echo_and_versions() -> None:
    """LGP-04: the log-prob of the second token is that of 382, not that of the entry listed first."""
    found = read(ANSWER)
    assert found.token_ids == (5, 382, 9)
    assert found.log_probs == (-0.5, -4.2, -0.1)
    assert found.prompt_token_ids == (3, 4)
    assert found.finish_reason is FinishReason.STOP
    assert found.policy_versions == (
        VersionSpan(version=6, start=0, end=1),
        VersionSpan(version=7, start=1, end=3),
    )


def test_a_sampled_id_without_its_own_log_prob_is_an_error() -> None:
    """LGP-04: {7: -0.1} where 9 was sampled."""
    with pytest.raises(ModelError, match="no log-prob is that of the sampled id 9") as caught:
        wire.log_prob_of(REQUEST, {"token_id": 7, "logprob": -0.1}, 9)
    assert caught.value.code == "wrong_token"


@pytest.mark.parametrize("value", [None, math.nan, -math.inf, math.inf, -9999.0, "-0.1"])
def test_an_unknown_log_prob_is_none_and_never_a_number(value: Any) -> None:
    """LGP-06, with vLLM's own stand-in for minus infinity."""
    assert wire.log_prob_of(REQUEST, {"token_id": 9, "logprob": value}, 9) is None


def test_ids_are_found_where_a_client_library_moved_them() -> None:
    """SRV-04: the same ids in `provider_specific_fields`."""
    moved = answer(token_ids=None, provider_specific_fields={"token_ids": [5, 382, 9]})
    assert read(moved).token_ids == (5, 382, 9)


@pytest.mark.parametrize(
    ("code", "made"),
    [
        ("no_ids", answer(token_ids=[])),
        ("no_ids", answer(token_ids=None)),
        ("no_ids", answer(token_ids=["5", "382", "9"])),
        ("no_echo", {**ANSWER, "prompt_token_ids": None}),
        ("no_log_probs", answer(logprobs=None)),
        ("lengths", answer(logprobs={"content": ANSWER["choices"][0]["logprobs"]["content"][:2]})),
        ("lengths", {**ANSWER, "usage": {"completion_tokens": 2}}),
        ("lengths", answer(weight_versions=[{"version": "7", "start": 0, "end": 2}])),
        ("lengths", answer(weight_versions=[{"version": "7", "start": 1, "end": 3}])),
        (
            "foreign_version",
            answer(
                weight_versions=[
                    {"version": "7", "start": 0, "end": 1},
                    {"version": "default", "start": 1, "end": 3},
                ]
            ),
        ),
        ("answer", {**ANSWER, "choices": []}),
        ("answer", {**ANSWER, "choices": [*ANSWER["choices"], *ANSWER["choices"]]}),
        ("answer", answer(finish_reason=None)),
        ("answer", answer(finish_reason="tool_calls")),
    ],
)
def test_what_does_not_hold_together_is_refused_at_the_first_call(code: str, made: dict[str, Any]) -> None:
    """SRV-04, SRV-12 and their class: a choice too many or too few, ids, log-probs or spans that do not
    match."""
    with pytest.raises(ModelError) as caught:
        read(made)
    assert caught.value.code == code
    assert caught.value.owner == "model"
    assert caught.value.fix


def test_versions_that_nobody_here_published_are_refused() -> None:
    assert [s.version for s in read(ANSWER, labels={"6.ab": 6, "7.cd": 7}).policy_versions] == [6, 7]
    with pytest.raises(ModelError, match=r"weights '6\.ab'") as caught:
        read(ANSWER, labels={"7.cd": 7, "6.xx": 6})
    assert caught.value.code == "foreign_version"
    with pytest.raises(ModelError) as caught:
        read(answer(weight_versions=[]), labels={"7.cd": 7})
    assert caught.value.code == "no_version"


@pytest.mark.parametrize("spans", [[], None, [{"version": "default", "start": 0, "end": 3}]])
def test_a_server_that_was_never_published_to_has_no_version_rather_than_version_0(spans: Any) -> None:
    assert read(answer(weight_versions=spans)).policy_versions == ()


def test_a_label_carries_the_number_and_the_beginning_of_the_hash() -> None:
    assert wire.label_of(7, "ab" * 32) == "7.abababababab"
    assert wire.version_of("7.abababababab") == 7
    assert wire.version_of("7") == 7
    assert [wire.version_of(x) for x in ("default", "loading", "step-7", "", "7.zz", "-1")] == [None] * 6


def test_a_request_says_every_setting_that_a_server_might_have_a_default_for() -> None:
    said = wire.body(REQUEST, model="m", request_id="x", salt="7.ab")
    assert said["token_ids"] == [3, 4]
    assert said["cache_salt"] == "7.ab"
    assert said["return_token_ids"] is True
    params = said["sampling_params"]
    assert (params["temperature"], params["top_p"], params["top_k"]) == (1.0, 1.0, 0)
    assert (params["min_p"], params["repetition_penalty"], params["n"]) == (0.0, 1.0, 1)
    assert "seed" not in params
    assert "cache_salt" not in wire.body(REQUEST, model="m", request_id="x", salt=None)


def test_greedy_log_probs_are_raw_whatever_the_server_calls_them() -> None:
    greedy = SampleRequest(id="a", session="a", prompt_token_ids=(3, 4), params=SamplingParams(temperature=0))
    found = wire.result(
        greedy, ANSWER, model="m", server_kind=LogProbKind.PROCESSED, labels=None, started_at=1, finished_at=2
    )
    assert found.log_prob_kind is LogProbKind.RAW


def test_prompt_log_probs_are_looked_up_by_id() -> None:
    listed = [None, {"8": {"logprob": -0.1}, "4": {"logprob": -2.5}}, {"5": {"logprob": -9999.0}}]
    made = {"choices": [{"prompt_token_ids": [3, 4, 5], "prompt_logprobs": listed}]}
    assert wire.prompt_log_probs(made, (3, 4, 5)) == (None, -2.5, None)
    with pytest.raises(ModelError):
        wire.prompt_log_probs(made, (3, 4, 6))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 400)
    | st.floats()
    | st.sampled_from(["", "stop", "6.ab", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["token_id", "logprob", "content", "version", "start"]), inner, max_size=2
        )
    ),
    max_leaves=5,
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, one in inside for place in places(one, (*at, key)))]


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_whatever_stands_in_a_field_an_answer_is_evidence_or_a_model_error(data: st.DataObject) -> None:
    """SRV-04: nothing that a proxy does to an answer ends as a mistake of ours, or passes as evidence."""
    made = copy.deepcopy(ANSWER)
    *way, last = data.draw(st.sampled_from(places(made)[1:]))
    here = made
    for key in way:
        here = here[key]
    here[last] = data.draw(VALUES)
    try:
        found = read(made, labels=data.draw(st.sampled_from([None, {"6.ab": 6, "7.cd": 7}])))
    except ModelError:
        return
    assert found.log_probs is not None
    assert len(found.log_probs) == len(found.token_ids) > 0 or found.finish_reason is FinishReason.ABORT
    assert all(p is None or math.isfinite(p) for p in found.log_probs)
    assert not found.policy_versions or found.policy_versions[-1].end == len(found.token_ids)


@pytest.mark.parametrize("found", [None, [], {}, [None], [{"prompt_token_ids": [3, 4, 5]}], [5, 6]])
def test_a_score_of_another_form_is_a_model_error(found: Any) -> None:
    with pytest.raises(ModelError, match="other ids"):
        wire.prompt_log_probs({"choices": found}, (3, 4, 5))
