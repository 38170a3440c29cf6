"""Drawing: exact distribution, honest log-probs, no impossible ids."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.inference.draw import Draw, truncated
from agentrl.types import SamplingParams


def draw_of(*params: SamplingParams) -> Draw:
    return Draw.of(params, [None] * len(params), stop_token_ids=(), device=torch.device("cpu"))


def test_log_probs_are_those_of_the_scaled_logits() -> None:
    """LGP-01 by hand: logits [2, 1, 0], id 1: T = 0.5 gives -2.142932, T = 1 gives -1.407606."""
    logits = torch.tensor([[2.0, 1.0, 0.0]]).repeat(400, 1)
    for temperature, expected in ((0.5, -2.142932), (1.0, -1.407606)):
        draw = draw_of(*[SamplingParams(temperature=temperature)] * 400)
        ids, logp = draw.sample(logits, torch.Generator().manual_seed(0))
        assert torch.allclose(logp[ids == 1], torch.tensor(expected), atol=1e-6)


def test_frequencies_pass_a_chi_square_test() -> None:
    logits = torch.tensor([[0.0, -1.0, 1.0, -2.0, 0.5]]).repeat(50_000, 1)
    ids, _ = draw_of(*[SamplingParams()] * 50_000).sample(logits, torch.Generator().manual_seed(1))
    expected = torch.softmax(logits[0], -1) * 50_000
    seen = torch.bincount(ids, minlength=5)
    assert float(((seen - expected) ** 2 / expected).sum()) < 18.47, "0.1 % point of chi-square, 4 degrees"


@given(
    st.lists(st.floats(-30, 30), min_size=2, max_size=12),
    st.integers(0, 12),
    st.floats(0.05, 1.0),
    st.integers(0, 2**31),
)
@settings(max_examples=100, deadline=None)
def test_an_id_outside_what_truncation_keeps_is_never_drawn(
    logits: list[float], top_k: int, top_p: float, seed: int
) -> None:
    row = torch.tensor(logits)
    params = SamplingParams(top_k=top_k, top_p=top_p)
    ids, logp = draw_of(*[params] * 20).sample(row.repeat(20, 1), torch.Generator().manual_seed(seed))
    kept = truncated(row, top_k, top_p)
    assert bool(torch.isfinite(kept[ids]).all())
    assert bool((logp <= 1e-6).all())
    assert torch.allclose(logp, torch.log_softmax(kept, -1)[ids], atol=1e-6)
    count = int(torch.isfinite(kept).sum())
    assert 1 <= count <= (top_k or len(logits))


def test_a_row_that_is_not_finite_gets_a_log_prob_that_is_not_and_a_valid_id() -> None:
    logits = torch.tensor([[0.0, 1.0], [float("nan"), 1.0], [float("inf"), 0.0]])
    ids, logp = draw_of(*[SamplingParams()] * 3).sample(logits, torch.Generator())
    assert logp.isfinite().tolist() == [True, False, False]
    assert bool(((ids >= 0) & (ids < 2)).all())


def test_greedy_rows_ignore_chance_and_others_do_not() -> None:
    logits = torch.zeros(2, 50)
    logits[0, 17] = 0.01
    draw = draw_of(SamplingParams(temperature=0), SamplingParams())
    generator = torch.Generator().manual_seed(0)
    seen = torch.stack([draw.sample(logits, generator)[0] for _ in range(40)])
    assert seen[:, 0].unique().tolist() == [17]
    assert len(seen[:, 1].unique()) > 20


def test_a_truncated_draw_is_certain_within_what_was_kept_and_not_trainable() -> None:
    """LGP-10: the engine kept {1}; its log-prob is 0, the learner's full one is not: no loss may use it."""
    draw = Draw.of([SamplingParams(top_k=1)], [None], stop_token_ids=(9,), device=torch.device("cpu"))
    ids, log_probs = draw.sample(torch.tensor([[2.99, 3.00, 0.0]]), torch.Generator().manual_seed(1))
    assert (ids.tolist(), log_probs.tolist()) == ([1], [0.0])
    whole = torch.log_softmax(torch.tensor([2.99, 3.00, 0.0]), -1)
    assert float(whole[1]) < -0.69
    assert not SamplingParams(top_k=1).trainable
