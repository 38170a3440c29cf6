"""The scripted policy: it says its lines, and never pretends to have probabilities."""

from __future__ import annotations

import asyncio

import pytest
from tiny_llama import request

from agentrl.errors import ModelError
from agentrl.inference.sampler import Sampler, SampleRequest
from agentrl.inference.scripted import ScriptedSampler
from agentrl.types import FinishReason


def letters(text: str) -> tuple[int, ...]:
    return (*map(ord, text), 0)


def test_each_session_hears_the_lines_in_order_and_a_retry_hears_the_same_one() -> None:
    engine = ScriptedSampler(lambda r, n: "abc"[n], encode=letters)

    async def whole() -> list[tuple[int, ...]]:
        asked = [("1", "x"), ("2", "x"), ("1", "x"), ("1", "y"), ("3", "x")]
        return [(await engine.sample(request([5], id=i, session=s))).token_ids for i, s in asked]

    assert asyncio.run(whole()) == [letters("a"), letters("b"), letters("a"), letters("a"), letters("c")]


def test_there_are_no_log_probs_and_no_version() -> None:
    engine = ScriptedSampler(lambda r, n: (7, 8), encode=letters)
    result = asyncio.run(engine.sample(request([5])))
    assert (result.token_ids, result.log_probs, result.log_prob_kind) == ((7, 8), None, None)
    assert result.policy_versions == ()
    assert engine.policy_version is None
    assert isinstance(engine, Sampler)


def test_a_line_longer_than_allowed_is_cut_and_says_so() -> None:
    engine = ScriptedSampler(lambda r, n: "abcdef", encode=letters)
    result = asyncio.run(engine.sample(request([5], max_tokens=3)))
    assert (result.token_ids, result.finish_reason) == (letters("abc")[:3], FinishReason.LENGTH)


def test_silence_and_lateness_are_model_errors() -> None:
    async def late(r: SampleRequest) -> str:
        await asyncio.sleep(10)
        return "a"

    for script, code in ((lambda r, n: (), "empty_generation"), (lambda r, n: late(r), "deadline")):
        engine = ScriptedSampler(script, encode=letters)
        with pytest.raises(ModelError) as caught:
            asyncio.run(engine.sample(request([5], deadline_s=0.05)))
        assert caught.value.code == code
