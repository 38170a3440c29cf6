"""The small policy: it copies before it has learned anything, and its tokenizer loses nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.learner import small
from harness.chat import ChatFormat

VOCABULARY = 300


def build(**changes):
    shape = {"hidden_size": 160, "layers": 2, "heads": 4, "head_dim": 64, "context": 512, "seed": 0}
    return small.build_model(vocabulary=VOCABULARY, **(shape | changes))


def test_an_untrained_model_repeats_a_sequence_that_it_saw_once() -> None:
    generator = torch.Generator().manual_seed(3)
    first = torch.randint(5, VOCABULARY, (8, 60), generator=generator)
    seen_twice = torch.cat([first, first], dim=1)
    with torch.no_grad():
        guess = build()(seen_twice).logits.argmax(-1)
    again = slice(first.shape[1] + 2, -1)  # two tokens are needed to know the place
    hits = (guess[:, again] == seen_twice[:, first.shape[1] + 3 :]).float().mean()
    assert hits > 0.9
    before = (guess[:, 2:59] == seen_twice[:, 3:60]).float().mean()
    assert before < 0.1, "what was never seen can not be copied"


@pytest.mark.parametrize("worn_out", range(small.PAIR_HEADS))
def test_one_pair_head_is_enough_to_repeat_what_was_seen(worn_out: int) -> None:
    """Of two places with the same token before, the one whose last two tokens are the same: the other pair
    head finds it. Without any there is nothing to tell them apart by."""
    generator = torch.Generator().manual_seed(5)
    first = torch.randint(5, 25, (8, 60), generator=generator)
    seen_twice = torch.cat([first, first], dim=1)

    def hits(*heads: int) -> float:
        model = build()
        with torch.no_grad():
            for head in heads:
                model.model.layers[1].self_attn.o_proj.weight[:, 64 * head : 64 * (head + 1)] = 0.0
            guess = model(seen_twice).logits.argmax(-1)
        return float((guess[:, 62:-1] == seen_twice[:, 63:]).float().mean())

    assert hits(worn_out) > 2 * hits(*range(small.PAIR_HEADS))


def test_of_two_continuations_of_the_same_words_the_nearer_one_is_repeated() -> None:
    generator = torch.Generator().manual_seed(4)
    noise = torch.randint(50, VOCABULARY, (16, 90), generator=generator)
    context, far, near = 11, 12, 13
    noise[:, 10:13] = torch.tensor([7, context, far])
    noise[:, 60:63] = torch.tensor([7, context, near])
    noise[:, -2:] = torch.tensor([7, context])
    with torch.no_grad():
        logits = build()(noise).logits[:, -1]
    assert (logits[:, near] > logits[:, far]).all()


def test_building_leaves_the_global_random_state_alone_and_follows_the_seed() -> None:
    torch.manual_seed(1)
    one = build(seed=9)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(1))
    two = build(seed=9)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_a_model_too_narrow_to_copy_is_refused() -> None:
    with pytest.raises(ConfigError, match="hidden_size >= 128"):
        build(hidden_size=96)


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = _tokenizer()
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_a_line_of_code_has_the_same_ids_in_a_file_and_in_a_tool_call() -> None:
    tokenizer = _tokenizer()
    line = tokenizer("flint = m - p", add_special_tokens=False).input_ids
    in_file = tokenizer("def a(m, p):\n    flint = m - p\n", add_special_tokens=False).input_ids
    in_call = tokenizer('{"old": "flint = m - p", "new": ""}', add_special_tokens=False).input_ids
    for whole in (in_file, in_call):
        assert any(whole[i : i + len(line)] == line for i in range(len(whole)))


def test_the_template_is_extended_and_never_rendered_again() -> None:
    chat = ChatFormat(_tokenizer())
    assert chat.renders_system
    assert chat.renders_tools
    assert chat.renders_tool_role
    history = [{"role": "user", "content": "a"}]
    prompt = chat.prompt(history)
    said = chat.encode_reply("b")
    grown = chat.continuation([*history, {"role": "assistant", "content": "b"}], said, [history[0]])
    assert grown.reason is None
    assert grown.delta is not None
    whole = chat.prompt([*history, {"role": "assistant", "content": "b"}, history[0]])
    assert (*prompt, *said, *grown.delta) == whole


_MADE = []


def _tokenizer():
    if not _MADE:
        texts = ["def a(m, p):\n    flint = m - p\n", '{"old": "flint = m - p", "new": ""}'] * 3
        _MADE.append(small.build_tokenizer(texts, vocabulary=400))
    return _MADE[0]
