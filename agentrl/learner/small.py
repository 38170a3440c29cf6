"""A small policy built in the run: a byte-level tokenizer made from given texts, and a Llama-architecture
model that begins with the two circuits that copying needs.

A transformer of a million weights learns from a few hundred demonstrations only what is easy to find by
gradient; attending to "what came after the last time I saw this" is known to appear late and suddenly
(induction heads, arXiv 2209.11895). So the model starts with them: in the first layer two heads that look
one and two tokens back and write what they see into reserved dimensions, in the second layer one head that
looks for the same two tokens earlier in the context and copies what followed. Everything else is random;
what to copy, when, and what to do is learned. All of it stays an ordinary `LlamaForCausalLM` that any
Hugging Face reader loads, and every weight is trained.

The tokenizer keeps identifiers, operators with their spaces and the glue of JSON tool calls in one piece,
so that a line of code has the same ids in a file and inside a tool call. It is lossless on any bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agentrl.errors import ConfigError

END = "<|im_end|>"
CONTROL = ("<|im_start|>", END)
TOOL_CALL = ("<tool_call>", "</tool_call>")

TEMPLATE = (
    "{%- macro names() %}Tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}{% endmacro %}"
    "{%- if tools and messages[0].role != 'system' %}"
    "{{- '<|im_start|>system\n' + names() + '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content }}"
    "{%- if tools and loop.first and message.role == 'system' %}{{- '\n' + names() }}{%- endif %}"
    "{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)

WORDS = Regex(
    r"""(?:[{}", ]*"[a-z_]+": ?)+"?"""  # keys of a tool call with the punctuation around them
    r"""|"?\}+"""
    r"""|\s*\n\s*"""  # a line end with the next line's indentation
    r"""| (?:[=+*/<>%!-]+) """  # an operator with its spaces
    r"""|, | ?[A-Za-z_]+|\d| ?[^\sA-Za-z_\d]| +|\s+"""
)

ROPE_THETA = 1e8
"""So large that enough rotary pairs hardly turn over a context: content can be compared at any distance."""
BACK_1, BACK_2 = 22, 20
"""Reserved dimensions for the token before and the one before that."""
SLOW = 2.5e-3
"""Rotary pairs below this many radians per token carry content comparisons."""
FAST = 0.02
"""Rotary pairs above this many radians per token tell one position from its neighbours."""
LOOK_BACK_SHARPNESS = 12.0
MATCH_SHARPNESS = 1.0
COPY_GAIN = 0.7
PAIR_HEADS = 2
"""Heads that copy by two tokens. Training can wear one out, and then all lines of a file look the same after
their ` = `; at twice the quickstart's learning rate that happened in one of two runs, with two in neither."""
RECENCY = 8.0
"""Of two equal matches the nearer one wins: this much of the score is lost over a quarter turn."""
RECENCY_TURN = 0.0056
"""Radians per token of that pair: a quarter turn is 280 tokens."""


def build_tokenizer(texts: Iterable[str], *, vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a ChatML template whose merges come from `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(WORDS, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[*CONTROL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([*TOOL_CALL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=CONTROL[0], clean_up_tokenization_spaces=False
    )
    fast.chat_template = TEMPLATE
    return fast


def build_model(
    *, vocabulary: int, hidden_size: int, layers: int, heads: int, head_dim: int, context: int, seed: int
) -> Any:
    """A float32 `LlamaForCausalLM` with tied embeddings, the copying circuits in place, the rest random.

    Args:
        vocabulary: rows of the embedding (the tokenizer's length).
        hidden_size: width; 42 of its dimensions are reserved for what the look-back heads write.
        head_dim: 64 or more, so that enough slow rotary pairs exist.
        seed: of the random part; the global random state is left as it was.

    Raises:
        ConfigError: too narrow for the circuits.
    """
    inverse = 1.0 / ROPE_THETA ** (torch.arange(0, head_dim, 2) / head_dim)
    slow = (inverse < SLOW).nonzero().flatten()
    channels = torch.cat([slow, slow + head_dim // 2])
    identity = hidden_size - BACK_1 - BACK_2
    if channels.numel() < BACK_1 + BACK_2 or identity < head_dim or heads < 2 or layers < 2:
        raise ConfigError(
            f"Width {hidden_size}, {heads} heads of {head_dim} and {layers} layers are too few to copy with.",
            fix="Use hidden_size >= 128, head_dim >= 64, heads >= 2, layers >= 2.",
        )
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            _embed(model, identity)
            content = torch.linalg.qr(torch.randn(identity, BACK_1))[0].T
            _look_back(model.model.layers[0].self_attn, content, inverse, identity, head_dim)
            _copy(model.model.layers[1].self_attn, content, channels, identity, head_dim)
            turn = int((inverse - RECENCY_TURN).abs().argmin())
            _prefer_recent(model.model.layers[1].self_attn, turn, head_dim)
    return model


def _embed(model: Any, identity: int) -> None:
    """Tokens live in the first `identity` dimensions; the others start nearly empty."""
    weight = model.model.embed_tokens.weight
    weight.normal_(0.0, 1.0 / math.sqrt(weight.shape[1]))
    weight[:, identity:] *= 0.02


def _look_back(
    attention: Any, content: torch.Tensor, inverse: torch.Tensor, identity: int, head_dim: int
) -> None:
    """Heads 0 and 1: constant queries and keys, turned against each other by one and two positions, so that
    the score depends on the distance alone; they write a projection of the token they see into the reserved
    dimensions."""
    half = head_dim // 2
    amplitude = torch.where(inverse > FAST, math.sqrt(LOOK_BACK_SHARPNESS * math.sqrt(head_dim)), 0.0)
    width = attention.o_proj.weight.shape[0]
    for head, (back, size, at) in enumerate(((1, BACK_1, identity), (2, BACK_2, identity + BACK_1))):
        rows = slice(head * head_dim, (head + 1) * head_dim)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.weight[rows] = 0.0
            projection.bias[rows] = 0.0
        attention.k_proj.bias[rows][:half] = amplitude
        attention.q_proj.bias[rows][:half] = amplitude * torch.cos(-inverse * back)
        attention.q_proj.bias[rows][half:] = amplitude * torch.sin(-inverse * back)
        attention.v_proj.weight[rows][:size, :identity] = content[:size]
        attention.o_proj.weight[:, rows] = 0.0
        attention.o_proj.weight[at : at + size, rows][:, :size] = torch.eye(size) / math.sqrt(width)


def _copy(
    attention: Any, content: torch.Tensor, channels: torch.Tensor, identity: int, head_dim: int
) -> None:
    """The first `PAIR_HEADS`: this token and the one before it, compared with the two tokens before each
    earlier position. The others begin without a preference: they compare something that is still to be
    learned with the token before each earlier position. The value of all of them is the token at the
    position found, written back as a prediction of itself."""
    first, second = channels[:BACK_1], channels[BACK_1 : BACK_1 + BACK_2]
    scale = math.sqrt(MATCH_SHARPNESS * math.sqrt(head_dim))
    heads = attention.q_proj.weight.shape[0] // head_dim
    for head in range(heads):
        rows = slice(head * head_dim, (head + 1) * head_dim)
        query, key = attention.q_proj.weight[rows], attention.k_proj.weight[rows]
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.bias[rows] = 0.0
        key.zero_()
        key[first, identity : identity + BACK_1] = torch.eye(BACK_1) * scale
        if head < PAIR_HEADS:
            query.zero_()
            query[first, :identity] = content * scale
            query[second, identity : identity + BACK_2] = torch.eye(BACK_2) * scale
            key[second, identity + BACK_1 :] = torch.eye(BACK_2) * scale
        copied = torch.linalg.qr(torch.randn(identity, head_dim))[0].T
        attention.v_proj.weight[rows] = 0.0
        attention.v_proj.weight[rows][:, :identity] = copied
        attention.o_proj.weight[:, rows] = 0.0
        attention.o_proj.weight[:identity, rows] = copied.T * COPY_GAIN / 2


def _prefer_recent(attention: Any, pair: int, head_dim: int) -> None:
    """The pair heads of `_copy` break ties by distance d: constant query and key on one rotary pair, a
    quarter turn apart, add -RECENCY * sin(turn * d) to the score."""
    half = head_dim // 2
    amplitude = math.sqrt(RECENCY * math.sqrt(head_dim))
    for start in range(0, PAIR_HEADS * head_dim, head_dim):
        for projection in (attention.q_proj, attention.k_proj):
            for channel in (start + pair, start + pair + half):
                projection.weight[channel] = 0.0
                projection.bias[channel] = 0.0
        attention.q_proj.bias[start + pair + half] = amplitude
        attention.k_proj.bias[start + pair] = amplitude
