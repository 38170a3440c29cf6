"""Policy log-probs at the action tokens of a micro-batch, from hidden states, in chunks.

`load` gives a plain transformers causal model; `Policy` runs its trunk over a micro-batch (packed,
prefix-shared or padded) and turns hidden states into log-prob, entropy and, if asked, the hidden states
themselves, at action positions only. The `[N, V]` matrix of logits never exists as a whole:
`selected_log_probs` works in chunks, forward and backward, with the softmax in float32 (float64 for a float64
model) and the temperature of the sampler.

Entry t speaks of predicting token t from tokens < t (see `samples`).

What it does not do: sampling, generation, masks from ids. An architecture whose logits are not `head(hidden)`
or whose attention crosses packed rows is refused by `check_support`, with numbers, before anything is
trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agentrl.algo.distributions import Divergence, divergence
from agentrl.errors import ConfigError
from agentrl.learner.batch import Block, MicroBatch

ATTENTION = "agentrl_blocks"
"""Name of our attention in transformers: blocks of a packed micro-batch; without blocks it is plain SDPA."""

CHUNK_BYTES = 32 * 2**20
"""Default bound on one temporary `[chunk, V]` of logits."""

VOCABULARY_TILE = 8192
"""Vocabulary entries that the backward pass of the head takes at once: the gradient of a tile is written
once, not added up over chunks of tokens, and no second `[V, D]` tensor is made."""

SUPPORT_TOLERANCE = 1e-3
"""Largest difference of log-probs that `check_support` takes for rounding."""


# -------------------------------------------------------------------------------------------------- attention


def _block_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    blocks: tuple[Block, ...] | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a packed width `[1, H, W, D]`: each block sees its ancestors and, causally, itself.

    `blocks=()` is plain causal attention without a mask; None (any other use of a model) is plain SDPA.
    """
    if blocks is None:
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out, None
    if not blocks:  # padded rows: causal attention alone keeps the padding on the right out
        out, _ = sdpa_attention_forward(
            module, query, key, value, None, dropout=dropout, scaling=scaling, is_causal=True, **kwargs
        )
        return out, None
    window = kwargs.get("sliding_window")
    if window is not None and max(_depth(blocks)) > window:
        raise ConfigError(
            f"This model attends to a window of {window} tokens and a row is longer.",
            fix="Use layout = 'padded' or a model with full attention.",
        )
    if key.shape[1] != query.shape[1]:
        repeat = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
    sizes = [block.end - block.start for block in blocks]
    # Split, not slices: its backward is one concatenation instead of a full-width zero tensor per block.
    query_K, key_K, value_K = (torch.split(x, sizes, dim=2) for x in (query, key, value))
    outputs = []
    for k, block in enumerate(blocks):
        if block.parent < 0:
            out = functional.scaled_dot_product_attention(
                query_K[k], key_K[k], value_K[k], is_causal=True, scale=scaling, dropout_p=dropout
            )
        else:
            path = [k]
            while blocks[path[-1]].parent >= 0:
                path.append(blocks[path[-1]].parent)
            path.reverse()
            keys = torch.cat([key_K[a] for a in path], dim=2)
            values = torch.cat([value_K[a] for a in path], dim=2)
            length, total = sizes[k], keys.shape[2]
            mask = torch.ones(length, total, dtype=torch.bool, device=keys.device).tril(total - length)
            out = functional.scaled_dot_product_attention(
                query_K[k], keys, values, attn_mask=mask, scale=scaling, dropout_p=dropout
            )
        outputs.append(out)
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _depth(blocks: tuple[Block, ...]) -> list[int]:
    """Row position of the end of each block."""
    ends: list[int] = []
    for block in blocks:
        ends.append(block.end - block.start + (ends[block.parent] if block.parent >= 0 else 0))
    return ends


AttentionInterface.register(ATTENTION, _block_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


# ----------------------------------------------------------------------------------------- selected log-probs


class _SelectedLogProbs(torch.autograd.Function):
    """log softmax(h W^T / T)[target] and its entropy, chunk by chunk, recomputing logits in the backward
    pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        target_N: torch.Tensor,
        inverse_temperature_N: torch.Tensor,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        n = hidden_ND.shape[0]
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        weight = weight_VD.to(hidden_ND.dtype)
        log_prob_N = torch.empty(n, dtype=wide, device=hidden_ND.device)
        entropy_N = torch.empty_like(log_prob_N)
        log_norm_N = torch.empty_like(log_prob_N)
        for a in range(0, n, chunk):
            b = min(a + chunk, n)
            logits = (hidden_ND[a:b] @ weight.t()).to(wide).mul_(inverse_temperature_N[a:b, None])
            top = logits.amax(dim=-1, keepdim=True)
            logits -= top
            chosen = logits.gather(1, target_N[a:b, None]).squeeze(1)
            odds = logits.exp()
            total = odds.sum(dim=-1)
            log_total = total.log()
            log_prob_N[a:b] = chosen - log_total
            entropy_N[a:b] = log_total - odds.mul_(logits).sum(dim=-1) / total
            log_norm_N[a:b] = log_total + top.squeeze(1)
        ctx.save_for_backward(hidden_ND, weight_VD, target_N, inverse_temperature_N, log_norm_N, entropy_N)
        ctx.chunk = chunk
        ctx.set_materialize_grads(False)
        return log_prob_N, entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        by_log_prob_N, by_entropy_N = grads
        hidden_ND, weight_VD, target_N, inverse_temperature_N, log_norm_N, entropy_N = ctx.saved_tensors
        if by_log_prob_N is None and by_entropy_N is None:
            return None, None, None, None, None
        wide = log_norm_N.dtype
        n, (vocab, _) = hidden_ND.shape[0], weight_VD.shape
        tile = min(vocab, VOCABULARY_TILE)
        rows = max(1, ctx.chunk * vocab // tile)
        by_hidden_ND = torch.zeros_like(hidden_ND, dtype=wide)
        by_weight_VD = torch.zeros_like(weight_VD, dtype=torch.promote_types(weight_VD.dtype, torch.float32))
        for first in range(0, vocab, tile):
            weight = weight_VD[first : first + tile].to(hidden_ND.dtype)
            width = weight.shape[0]
            for a in range(0, n, rows):
                at = slice(a, min(a + rows, n))
                logits = (hidden_ND[at] @ weight.t()).to(wide).mul_(inverse_temperature_N[at, None])
                logits -= log_norm_N[at, None]
                by_logits = logits.exp()
                if by_entropy_N is None:
                    by_logits *= -by_log_prob_N[at, None]  # type: ignore[index]
                else:
                    slope = logits.add_(entropy_N[at, None]).mul_(by_entropy_N[at, None])
                    if by_log_prob_N is not None:
                        slope += by_log_prob_N[at, None]
                    by_logits *= slope.neg_()
                if by_log_prob_N is not None:
                    place = target_N[at] - first
                    here = (place >= 0) & (place < width)
                    share = torch.where(here, by_log_prob_N[at], torch.zeros_like(by_log_prob_N[at]))
                    by_logits.scatter_add_(1, place.clamp(0, width - 1)[:, None], share[:, None])
                by_logits *= inverse_temperature_N[at, None]
                narrow = by_logits.to(hidden_ND.dtype)
                by_hidden_ND[at] += narrow @ weight
                by_weight_VD[first : first + width] += narrow.t() @ hidden_ND[at]
        by_hidden_ND = by_hidden_ND.to(hidden_ND.dtype)
        return by_hidden_ND, by_weight_VD.to(weight_VD.dtype), None, None, None


def selected_log_probs(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    target_N: torch.Tensor,
    *,
    temperature_N: torch.Tensor | None = None,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target and entropy of its distribution, `softmax(hidden W^T / temperature)`.

    `z[target] - logsumexp(z)` per chunk; the largest temporary is `[chunk, V]` in float32, in both
    directions. Values do not depend on `chunk` beyond matrix-product rounding.

    Args:
        hidden_ND: states that predict, in compute dtype.
        weight_VD: output embedding.
        target_N: int64 ids.
        temperature_N: of the sampler, > 0; None is 1.
        chunk: rows at once; default so that a chunk of float32 logits takes `CHUNK_BYTES`.

    Returns:
        `(log_prob_N, entropy_N)` in float32 (float64 for float64 states), nats. Both carry gradients.
    """
    if chunk is None:
        chunk = max(1, CHUNK_BYTES // (4 * weight_VD.shape[0]))
    wide = torch.promote_types(hidden_ND.dtype, torch.float32)
    if temperature_N is None:
        inverse_N = torch.ones(hidden_ND.shape[0], dtype=wide, device=hidden_ND.device)
    else:
        inverse_N = temperature_N.to(hidden_ND.device, wide).reciprocal()
    log_prob_N, entropy_N = _SelectedLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden_ND, weight_VD, target_N, inverse_N, chunk
    )
    return log_prob_N, entropy_N


def full_divergence(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    other_hidden_ND: torch.Tensor,
    other_weight_VD: torch.Tensor,
    *,
    kind: Divergence = "reverse",
    temperature_N: torch.Tensor | None = None,
    chunk: int | None = None,
) -> torch.Tensor:
    """Divergence of whole next-token distributions from another model's, `[N]` in nats, chunk by chunk.

    Gradient flows into the first pair only; logits are recomputed in the backward pass, so that no `[N, V]`
    tensor stays alive. `reverse` is `KL(ours || other)`; see `agentrl.algo.distributions`.
    """
    if chunk is None:
        chunk = max(1, CHUNK_BYTES // (8 * weight_VD.shape[0]))
    inverse_N = torch.ones(hidden_ND.shape[0], device=hidden_ND.device)
    if temperature_N is not None:
        inverse_N = temperature_N.to(hidden_ND.device).reciprocal()

    def part(
        mine: torch.Tensor, weight: torch.Tensor, other: torch.Tensor, inverse: torch.Tensor
    ) -> torch.Tensor:
        wide = torch.promote_types(mine.dtype, torch.float32)
        ours = (mine @ weight.to(mine.dtype).t()).to(wide) * inverse[:, None]
        theirs = (other @ other_weight_VD.to(other.dtype).t()).to(wide) * inverse[:, None]
        return divergence(ours, theirs, kind=kind)

    parts = [
        checkpoint(part, hidden_ND[s], weight_VD, other_hidden_ND[s], inverse_N[s], use_reentrant=False)
        for s in (slice(a, a + chunk) for a in range(0, hidden_ND.shape[0], chunk))
    ]
    return torch.cat(parts) if parts else hidden_ND.sum(dim=-1).float()


# ----------------------------------------------------------------------------------------------------- policy


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a policy says about the action tokens of a micro-batch, in its `_M` order."""

    log_prob_M: torch.Tensor
    entropy_M: torch.Tensor
    hidden_MD: torch.Tensor
    """State in which each action was chosen (input of a value head on a shared trunk)."""
    end_hidden_SD: torch.Tensor
    """End state of each trajectory."""
    anchor: torch.Tensor
    """A scalar on the graph of all weights: times 0, it makes the backward pass of a dummy run."""


class Policy(nn.Module):
    """A causal language model that is asked about micro-batches.

    A module, so that the whole pass (trunk, head, log-probs) lies inside one `forward`: that is what sharding
    (`fully_shard`) and autocast hook into.
    """

    def __init__(self, model: Any, *, compute_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.model = model
        self.compute_dtype = compute_dtype
        """bfloat16 runs the trunk under autocast while weights, gradients and moments stay float32; None: as
        is."""
        if hasattr(model, "set_attn_implementation"):
            model.set_attn_implementation(ATTENTION)

    def hidden(self, micro: MicroBatch) -> torch.Tensor:
        """Last hidden states after the final norm, flat: `[W, D]`."""
        return trunk_states(trunk(self.model), micro, self.compute_dtype)

    def forward(self, micro: MicroBatch, *, temperature: bool = True, chunk: int | None = None) -> Outputs:
        """Log-probs and entropies at the micro-batch's actions.

        Args:
            micro: on the model's device.
            temperature: apply each token's sampling temperature (False: 1, as imitation does).
            chunk: see `selected_log_probs`.
        """
        hidden_WD = self.hidden(micro)
        hidden_MD = hidden_WD.index_select(0, micro.predict_M)
        log_prob_M, entropy_M = selected_log_probs(
            hidden_MD,
            head_weight(self.model),
            micro.target_M,
            temperature_N=micro.temperature_M if temperature else None,
            chunk=chunk,
        )
        # Empty sums connect what a micro-batch without actions would leave out of the graph.
        anchor = hidden_WD[0, 0] + log_prob_M[:0].sum() + entropy_M[:0].sum()
        return Outputs(log_prob_M, entropy_M, hidden_MD, hidden_WD.index_select(0, micro.end_S), anchor)


def trunk_states(body: nn.Module, micro: MicroBatch, compute_dtype: torch.dtype | None) -> torch.Tensor:
    """Hidden states of a transformers trunk over a micro-batch, `[W, D]`."""
    # A mask that is already 4-D is passed through by transformers: no [W, W] mask is ever made.
    arguments = {"attention_mask": micro.ids_BL.new_zeros((1, 1, 1, 1)), "blocks": micro.blocks or ()}
    with torch.autocast(
        micro.ids_BL.device.type, dtype=compute_dtype or torch.bfloat16, enabled=compute_dtype is not None
    ):
        states: torch.Tensor = body(
            input_ids=micro.ids_BL, position_ids=micro.positions_BL, use_cache=False, **arguments
        ).last_hidden_state
    if compute_dtype is not None:
        states = states.to(compute_dtype)
    return states.reshape(-1, states.shape[-1])


def log_probs(
    policy: Policy, micro: MicroBatch, *, temperature: bool = True, chunk: int | None = None
) -> torch.Tensor:
    """`log π(a_i | s_i)` `[M]` for the actions of a micro-batch, without gradients, on the CPU."""
    with torch.no_grad():
        out = policy(micro.to(device_of(policy)), temperature=temperature, chunk=chunk)
    result: torch.Tensor = out.log_prob_M.cpu()
    return result


def device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def causal_model(model: nn.Module) -> Any:
    """The transformers model below wrappers such as LoRA."""
    get_base = getattr(model, "get_base_model", None)
    return get_base() if get_base is not None else model


def trunk(model: nn.Module) -> nn.Module:
    """The decoder without its output head."""
    body: nn.Module = causal_model(model).base_model
    return body


def head_weight(model: nn.Module) -> torch.Tensor:
    """Output embedding `[V, D]`."""
    weight: torch.Tensor = causal_model(model).get_output_embeddings().weight
    return weight


def load(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    gradient_checkpointing: bool = False,
) -> Any:
    """A causal language model from a folder or a hub id, ready for `Policy`.

    Args:
        path: folder with config and safetensors, or a hub id.
        dtype: of the master weights; keep float32 for training (small updates vanish in bfloat16).
        device: where it lives.
        gradient_checkpointing: trade compute for memory in the trunk.

    Raises:
        ConfigError: there is no such model, or its tied embeddings came apart.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype, attn_implementation=ATTENTION)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"Cannot load a model from '{path}': {str(error).splitlines()[0]}",
            fix="Give a folder with config.json and safetensors, or the id of a model reachable from here.",
        ) from error
    model.to(device)
    if gradient_checkpointing:
        checkpoint_activations(model)
    check_tied(model)
    return model


def checkpoint_activations(model: Any) -> None:
    """Recompute the trunk's activations in the backward pass instead of keeping them.

    transformers does so in training mode only, which also turns dropout on; so dropout is set to 0: log-probs
    must be those of the policy that is sampled.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    model.train()
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})


def check_tied(model: nn.Module) -> None:
    """`ConfigError` if the config ties input and output embeddings but they are different storage."""
    inner = causal_model(model)
    if not getattr(inner.config, "tie_word_embeddings", False):
        return
    embed, head = inner.get_input_embeddings().weight, inner.get_output_embeddings().weight
    if embed is not head and embed.data_ptr() != head.data_ptr():
        raise ConfigError(
            "The model's config ties its embeddings, but input and output embedding are different tensors.",
            fix="Call model.tie_weights() after loading or wrapping it, before the optimizer is made.",
        )


def check_support(model: nn.Module, *, layout: str = "packed") -> None:
    """Compare two packed rows with two plain forward passes of the model itself.

    Raises:
        ConfigError: log-probs differ: the architecture caps or scales its logits, or lets packed rows see
            each other.
    """
    policy = Policy(model)
    was_training = model.training
    model.eval()
    device = device_of(model)
    top = head_weight(model).shape[0] - 1
    rows = [torch.arange(1, n, device=device) % top for n in (6, 9)]
    if layout == "packed":
        ids_BL = torch.cat(rows)[None]
        positions_BL = torch.cat([torch.arange(len(r), device=device) for r in rows])[None]
        blocks: tuple[Block, ...] | None = (Block(0, 5), Block(5, 13))
        predict_M, offsets = [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11], (0, 5)
    else:
        ids_BL = torch.zeros((2, 8), dtype=torch.int64, device=device)
        for b, row in enumerate(rows):
            ids_BL[b, : len(row)] = row
        positions_BL = torch.arange(8, device=device).expand(2, 8)
        blocks, predict_M, offsets = None, [0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14], (0, 8)
    micro = MicroBatch(
        trajectories_S=(0, 1),
        ids_BL=ids_BL,
        positions_BL=positions_BL,
        blocks=blocks,
        predict_M=torch.tensor(predict_M, device=device),
        target_M=torch.cat([row[1:] for row in rows]),
        temperature_M=torch.ones(len(predict_M), device=device),
        end_S=torch.tensor([offsets[0] + 4, offsets[1] + 7], device=device),
        n_tokens=13,
        n_row_tokens=13,
    )
    with torch.no_grad():
        ours = policy(micro).log_prob_M
        plain = torch.cat(
            [
                torch.log_softmax(
                    causal_model(model)(input_ids=row[None], use_cache=False).logits[0, :-1].float(), -1
                )
                .gather(1, row[1:, None])
                .squeeze(1)
                for row in rows
            ]
        )
    model.train(was_training)
    worst = float((ours - plain).abs().max())
    limit = SUPPORT_TOLERANCE if head_weight(model).dtype in (torch.float32, torch.float64) else 0.1
    if not worst <= limit:
        raise ConfigError(
            f"This architecture is not supported: its log-probs differ from {layout} rows by {worst:.3g}.",
            fix="Use a decoder with full attention and logits = head(hidden); or try layout = 'padded'.",
        )
