"""Tiny byte-level tokenizers with the shapes of well-known chat formats, trained here in a moment.

The templates are written for these tests; each shows one habit that real templates have.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "You solve the task by calling tools. Call submit when you are done.",
    'def add(a, b): return a - b # bug {"name": "bash", "arguments": {"command": "ls"}}',
    "user assistant system tool response FAILED 1/2 test_add: 3 != 1 Replaced in calc.py.",
    "the quick brown fox jumps over the lazy dog 0123456789 hello world hellohello",
]

CHATML = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'system' %}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Qwen's habits: observations of one turn share a user block; a newline after the end marker."""

REASONING = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{% if m.role == 'assistant' and '</think>' in m.content and loop.index0 < ns.last %}
{{- m.content.split('</think>')[-1].lstrip('\\n') }}
{%- else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Drops the reasoning of replies before the last user message."""

LLAMA = """\
{{- '<|begin_of_text|>' }}
{%- for m in messages %}
{%- set role = 'ipython' if m.role == 'tool' else m.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
{%- if m.role == 'tool' %}{{ {'output': m.content} | tojson }}{% else %}{{ m.content | trim }}{% endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
"""BOS in the template, two newlines after a header, contents trimmed, tool output as JSON."""

MISTRAL = """\
{%- if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{{- '<s>' }}
{%- set ns = namespace(called=false) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}{% set ns.called = false %}
{%- elif m.role == 'assistant' and m.tool_calls %}
{{- '[TOOL_CALLS][' }}
{%- for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
{{- {'name': c.function.name, 'arguments': c.function.arguments, 'id': c.id} | tojson }}
{{- ', ' if not loop.last }}{% endfor %}{{ ']</s>' }}{% set ns.called = true %}
{%- elif m.role == 'assistant' %}{{ m.content + '</s>' }}{% set ns.called = false %}
{%- elif m.role == 'tool' %}
{%- if not ns.called %}{{ raise_exception('a tool message needs a call before it') }}{% endif %}
{{- '[TOOL_RESULTS]' + {'content': m.content, 'call_id': m.tool_call_id} | tojson + '[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}"""
"""No system role, calls as structure with nine-character ids, no generation prompt, no newlines."""

SMOLLM = """\
{%- for m in messages %}
{%- if loop.first and m.role != 'system' %}<|im_start|>system
You are a helpful assistant<|im_end|>
{% endif %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Plain ChatML: any role, no tools, its own system prompt where there is none, BOS before every message."""

HARMONY = """\
{%- for m in messages %}
{%- if m.role == 'tool' %}<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary
{{- '<|message|>' + m.content }}<|end|>
{%- elif m.role == 'assistant' %}<|start|>assistant{{ m.content }}<|end|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
"""Channels: a reply is one or more messages, a call ends with a marker of its own, nothing stands between."""

FAMILIES: dict[str, dict[str, Any]] = {
    "smollm": {
        "template": SMOLLM,
        "special": ["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
        "plain": [],
        "eos": "<|im_end|>",
        "bos": "<|im_start|>",
    },
    "harmony": {
        "template": HARMONY,
        "special": [
            "<|start|>",
            "<|end|>",
            "<|message|>",
            "<|channel|>",
            "<|constrain|>",
            "<|call|>",
            "<|return|>",
        ],
        "plain": [],
        "eos": "<|return|>",
    },
    "chatml": {
        "template": CHATML,
        "special": ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<image>"],
        "plain": ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"],
        "eos": "<|im_end|>",
    },
    "reasoning": {
        "template": REASONING,
        "special": ["<|im_start|>", "<|im_end|>"],
        "plain": ["<think>", "</think>", "<tool_call>", "</tool_call>"],
        "eos": "<|im_end|>",
    },
    "llama": {
        "template": LLAMA,
        "special": [
            "<|begin_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
            "<|python_tag|>",
        ],
        "plain": [],
        "eos": "<|eot_id|>",
        "bos": "<|begin_of_text|>",
    },
    "mistral": {
        "template": MISTRAL,
        "special": ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
        "plain": [],
        "eos": "</s>",
        "bos": "<s>",
    },
}


@cache
def tokenizer(family: str) -> Any:
    """A fast tokenizer of about 500 ids; any bytes can be written."""
    spec = FAMILIES[family]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    raw.train_from_iterator(CORPUS * 4, trainer)
    raw.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in spec["special"]])
    raw.add_tokens([AddedToken(word, special=False, normalized=False) for word in spec["plain"]])
    extra = {"bos_token": spec["bos"]} if "bos" in spec else {}
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=spec["eos"], **extra)
    made.chat_template = spec["template"]
    return made


@cache
def folding() -> Any:
    """ChatML on a tokenizer that folds case, and looks for its added tokens in what it folded."""
    raw = Tokenizer(models.BPE())
    raw.normalizer = normalizers.Lowercase()
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    raw.train_from_iterator(CORPUS * 4, trainer)
    spec = FAMILIES["chatml"]
    raw.add_special_tokens([AddedToken(word, special=True, normalized=True) for word in spec["special"]])
    raw.add_tokens([AddedToken(word, special=False, normalized=True) for word in spec["plain"]])
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=spec["eos"])
    made.chat_template = spec["template"]
    return made


def spaced(scheme: str) -> Any:
    """ChatML on a tokenizer that marks word beginnings, and the beginning of every (or the first) piece."""
    raw = Tokenizer(models.BPE(byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    raw.decoder = decoders.Metaspace(prepend_scheme=scheme, split=False)
    letters = sorted({c for text in [*CORPUS, CHATML, "\n<>|_"] for c in text} - {" "} | {"\u2581"})
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=letters, show_progress=False)
    raw.train_from_iterator(CORPUS * 4, trainer)
    raw.add_special_tokens(
        [AddedToken(word, special=True, normalized=False) for word in ("<|im_start|>", "<|im_end|>")]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>")
    made.chat_template = CHATML
    return made
