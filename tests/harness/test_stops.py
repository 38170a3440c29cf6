"""Stop strings: the text is cut, the tokens are not."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ModelError
from agentrl.inference.sampler import SampleRequest, SampleResult
from agentrl.types import FinishReason, LogProbKind, SamplingParams, VersionSpan
from harness import stops

PIECES = {1: "ab", 2: "c</", 3: "s>x", 4: "more", 5: "\u03d5", 9: ""}
END = 9


def decode(ids: tuple[int, ...]) -> str:
    return "".join(PIECES.get(i, chr(i)) for i in ids)


class Fixed:
    """Says `ids` after `prompt`, whatever pieces are asked for; the version changes after `switch` tokens."""

    model = "fixed"
    policy_version = 0

    def __init__(self, prompt: tuple[int, ...], ids: tuple[int, ...], *, switch: int = 10**9) -> None:
        self._prompt = prompt
        self._ids = ids
        self._switch = switch
        self.drawn = 0
        self.forget = False

    async def sample(self, request: SampleRequest) -> SampleResult:
        at = len(request.prompt_token_ids) - len(self._prompt)
        said = self._ids[at : at + request.params.max_tokens]
        self.drawn += len(said)
        over = at + len(said) == len(self._ids)
        before = min(max(self._switch - at, 0), len(said))
        spans = [(0, 0, before), (1, before, len(said))]
        return SampleResult(
            request_id=request.id,
            prompt_token_ids=self._prompt if self.forget else request.prompt_token_ids,
            token_ids=said,
            log_probs=tuple(-float(at + i + 1) for i in range(len(said))),
            log_prob_kind=LogProbKind.PROCESSED,
            policy_versions=tuple(VersionSpan(version=v, start=a, end=b) for v, a, b in spans if b > a),
            finish_reason=FinishReason.STOP if over else FinishReason.LENGTH,
            model=self.model,
            started_at=time.time(),
            finished_at=time.time(),
        )

    async def close(self) -> None:
        return None


def draw(sampler: Fixed, stop: tuple[str, ...], *, max_tokens: int = 1000) -> SampleResult:
    request = SampleRequest(
        id="r", session="s", prompt_token_ids=(7,), params=SamplingParams(max_tokens=max_tokens)
    )
    return asyncio.run(stops.sample(sampler, request, stop, decode))


def test_a_stop_string_that_ends_inside_a_token_cuts_the_text_and_keeps_the_token() -> None:
    """MSK-10 by hand: 'ab', 'c</', 's>x' with '</s>': text 'abc', three ids, three log-probs."""
    got = draw(Fixed((7,), (1, 2, 3, 4, END)), ("</s>",))
    assert got.token_ids == (1, 2, 3)
    assert got.log_probs == (-1.0, -2.0, -3.0)
    assert got.finish_reason is FinishReason.STOP_STRING
    cut = stops.find(got.token_ids, ("</s>",), decode)
    assert cut == stops.Cut(tokens=3, text="abc", stop="</s>")


def test_without_stop_strings_nothing_is_cut_into_pieces() -> None:
    got = draw(Fixed((7,), (1, 2, 3, 4, END)), ())
    assert (got.request_id, got.token_ids, got.finish_reason) == ("r", (1, 2, 3, 4, END), FinishReason.STOP)


WORD = st.lists(st.sampled_from([ord("a"), ord("b"), 2, 3, 5]), min_size=1, max_size=150).map(tuple)


@given(WORD, st.sampled_from(["</s>", "ab", "aab", "x", "\u03d5a"]), st.integers(1, 200), st.integers(0, 200))
@settings(max_examples=150, deadline=None)
def test_what_is_kept_is_the_shortest_beginning_that_holds_a_stop(
    ids: tuple[int, ...], stop: str, max_tokens: int, switch: int
) -> None:
    said = (*ids, END)
    sampler = Fixed((7,), said, switch=switch)
    got = draw(sampler, (stop,), max_tokens=max_tokens)
    slow = next((k for k in range(1, len(said) + 1) if stop in decode(said[:k])), None)
    kept = min(len(said), max_tokens)
    if slow is not None and slow <= kept:
        kept = slow
        assert got.finish_reason is FinishReason.STOP_STRING
    else:
        assert got.finish_reason is (FinishReason.STOP if kept == len(said) else FinishReason.LENGTH)
    assert got.token_ids == said[:kept]
    assert got.log_probs == tuple(-float(i + 1) for i in range(kept))
    assert [v.version for v in got.policy_versions for _ in range(v.end - v.start)] == [
        int(i >= switch) for i in range(kept)
    ]
    assert sampler.drawn <= 2 * kept + stops.FIRST_PIECE_TOKENS


def test_the_earliest_stop_of_several_wins() -> None:
    cut = stops.find((1, 2, 3), ("s>", "b", "</s>"), decode)
    assert cut == stops.Cut(tokens=1, text="a", stop="b")


def test_a_piece_that_was_not_drawn_after_the_ones_before_is_refused() -> None:
    sampler = Fixed((7,), tuple([ord("a")] * 100))
    sampler.forget = True
    with pytest.raises(ModelError, match="did not continue") as caught:
        draw(sampler, ("</s>",))
    assert caught.value.code == "echo"
