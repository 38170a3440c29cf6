"""A two-layer random Llama, its plain forward as the reference, and a shorthand for requests."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentrl.inference.local import LocalSampler
from agentrl.inference.sampler import SampleRequest, SampleResult
from agentrl.types import SamplingParams

VOCAB = 97
STOP = 1


def model(*, seed: int = 0, positions: int = 512, kv_heads: int = 2, scale: float = 12.0) -> Any:
    """`scale` sharpens the logits: random models are otherwise nearly uniform, which hides mistakes."""
    torch.manual_seed(seed)
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
            max_position_embeddings=positions,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        made.lm_head.weight.mul_(scale)
        for layer in made.model.layers:
            layer.self_attn.q_proj.weight.mul_(scale)
            layer.self_attn.v_proj.weight.mul_(scale)
    return made.eval()


def sampler(made: Any, **options: Any) -> LocalSampler:
    return LocalSampler(
        made, **{"stop_token_ids": (STOP,), "name": "tiny", "version": 0, "seed": 7, **options}
    )


def twin(made: Any) -> Any:
    """The same weights in a model that nobody else touches."""
    return copy.deepcopy(made)


def request(
    ids: tuple[int, ...] | list[int],
    *,
    id: str = "r",
    session: str = "s",
    deadline_s: float = 60.0,
    **params: Any,
) -> SampleRequest:
    return SampleRequest(
        id=id,
        session=session,
        prompt_token_ids=tuple(ids),
        params=SamplingParams(**{"max_tokens": 12, **params}),
        deadline_s=deadline_s,
    )


def plain_log_probs(
    reference: Any, ids: tuple[int, ...], start: int, *, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs of `ids[start:]` by one forward over the whole sequence, without any cache."""
    with torch.no_grad():
        logits = reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    logp = torch.log_softmax(logits / temperature, dim=-1)
    return logp[start - 1 : len(ids) - 1].gather(1, torch.tensor(ids[start:])[:, None])[:, 0]


def worst_difference(reference: Any, result: SampleResult, *, temperature: float = 1.0) -> float:
    assert result.log_probs is not None
    ids = result.prompt_token_ids + result.token_ids
    plain = plain_log_probs(reference, ids, len(result.prompt_token_ids), temperature=temperature)
    return float((plain - torch.tensor(result.log_probs)).abs().max())
