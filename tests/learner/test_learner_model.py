"""Log-probs: those of the model itself, in the sampler's temperature, in chunks."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import learner_given as given
import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

from agentrl.errors import ConfigError
from agentrl.learner import model as models
from agentrl.learner.batch import Packing, pack
from agentrl.learner.model import (
    Policy,
    check_support,
    check_tied,
    checkpoint_activations,
    full_divergence,
    load,
    log_probs,
    selected_log_probs,
)
from agentrl.learner.samples import build


def test_log_probs_of_a_merged_row_are_those_of_its_separate_calls() -> None:
    """Fidelity rule 5. In float64 within 1e-12; in float32 within 2e-6: the same products are summed, but
    matrix kernels choose their order by the number of rows, so bit equality is not a property of the sums."""
    rng = random.Random(3)
    trajectory = given.chain(rng, id="t", turns=5, branch_at=3, generated=(2, 7), observed=(1, 9))
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        model = given.model(dtype=dtype)
        (micro,) = pack([build(trajectory)], Packing(token_budget=10_000))
        merged = log_probs(Policy(model), micro)
        separate = []
        for call in trajectory.calls:
            prompt = trajectory.prompt_ids(call.id)
            row = torch.tensor([[*prompt, *call.generation_token_ids]])
            logits = model(input_ids=row, use_cache=False).logits[0].detach()
            log_p = torch.log_softmax(logits, -1)
            separate += [
                log_p[len(prompt) - 1 + k, token] for k, token in enumerate(call.generation_token_ids)
            ]
        torch.testing.assert_close(merged, torch.stack(separate), rtol=0, atol=tolerance)


def test_a_row_of_one_call_alone_is_bit_equal_to_the_models_own_forward() -> None:
    """Where shapes are the same, nothing is lost at all."""
    model = given.model()
    row = [1, 2, 3, 4, 5, 6, 7, 8]
    trajectory = given.trajectory([given.call("a", row[:5], row[5:])])
    (micro,) = pack([build(trajectory)], Packing())
    policy = Policy(model)
    with torch.no_grad():
        hidden = policy.hidden(micro)
        plain = model.model(
            input_ids=torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]]), use_cache=False
        ).last_hidden_state[0]
    assert torch.equal(hidden, plain)


def test_temperature_is_applied_as_the_sampler_did() -> None:
    """LGP-01: logits [2, 1, 0], sampled id 1, T = 0.5: -2.142932, not -1.407606 and not -2.815212."""
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[2.0], [1.0], [0.0]])
    for temperature, expected in ((0.5, -2.142932), (1.0, -1.407606)):
        found, _ = selected_log_probs(
            hidden, weight, torch.tensor([1]), temperature_N=torch.tensor([temperature])
        )
        assert found.item() == pytest.approx(expected, abs=1e-6)


def test_each_token_has_the_temperature_of_its_own_call() -> None:
    a = given.call("a", [1, 2], [3, 4], temperature=0.5)
    b = given.call("b", [1, 2, 3, 4, 5], [6], parent=a, parent_prompt=[1, 2], temperature=2.0)
    model = given.model()
    (micro,) = pack([build(given.trajectory([a, b]))], Packing())
    found = log_probs(Policy(model), micro)
    logits = model(input_ids=torch.tensor([[1, 2, 3, 4, 5, 6]])).logits[0].detach()
    expected = [
        torch.log_softmax(logits[at] / t, -1)[token]
        for at, t, token in ((1, 0.5, 3), (2, 0.5, 4), (4, 2.0, 6))
    ]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-5, atol=1e-6)
    plain = log_probs(Policy(model), micro, temperature=False)
    assert plain[0].item() == pytest.approx(torch.log_softmax(logits[1], -1)[3].item(), abs=1e-5)


@pytest.mark.parametrize("tile", [7, 50, 8192])
def test_chunks_change_nothing_and_equal_the_full_softmax(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """MET-08: values equal the full version to 1e-6, gradients too, for every chunk of tokens and tile of the
    vocabulary."""
    monkeypatch.setattr(models, "VOCABULARY_TILE", tile)
    torch.manual_seed(0)
    hidden, weight = torch.randn(37, 8), torch.randn(50, 8)
    target, temperature = torch.randint(0, 50, (37,)), torch.rand(37) + 0.5
    weights = torch.randn(37)

    def run(chunk: int | None) -> list[torch.Tensor]:
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if chunk is None:
            log_p = torch.log_softmax(h @ w.t() / temperature[:, None], -1)
            log_prob, entropy = log_p.gather(1, target[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)
        else:
            log_prob, entropy = selected_log_probs(h, w, target, temperature_N=temperature, chunk=chunk)
        (log_prob * weights + 0.3 * entropy * weights).sum().backward()
        assert h.grad is not None
        assert w.grad is not None
        return [log_prob.detach(), entropy.detach(), h.grad, w.grad]

    full = run(None)
    for chunk in (1, 5, 37, 1000):
        for a, b in zip(run(chunk), full, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(run(5)[0], full[0], rtol=0, atol=1e-6)


def test_no_temporary_of_a_pass_is_larger_than_a_chunk_of_logits() -> None:
    """MET-08: forward and backward both stay below the full [N, V] matrix."""
    n, v, d, chunk = 64, 512, 4, 8
    hidden, weight = torch.randn(n, d, requires_grad=True), torch.randn(v, d, requires_grad=True)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    with Watch():
        log_prob, entropy = selected_log_probs(hidden, weight, torch.randint(0, v, (n,)), chunk=chunk)
        (log_prob.sum() + entropy.sum()).backward()
    assert largest <= chunk * v


@pytest.mark.parametrize("chunk", [2, 100])
def test_gradients_of_log_prob_and_entropy_are_exact(chunk: int) -> None:
    torch.manual_seed(1)
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    target, temperature = torch.tensor([0, 6, 3, 3, 1]), torch.tensor([1.0, 0.5, 2.0, 1.0, 0.7]).double()
    assert gradcheck(
        lambda h, w: selected_log_probs(h, w, target, temperature_N=temperature, chunk=chunk),
        (hidden, weight),
    )


def test_the_entropy_of_two_logits_has_the_known_gradient() -> None:
    """MET-05: logits [1, 0]: H = 0.582203, dH/dlogits = [-0.196612, 0.196612]."""
    weight = torch.tensor([[1.0], [0.0]], requires_grad=True)
    _, entropy = selected_log_probs(torch.tensor([[1.0]]), weight, torch.tensor([0]))
    entropy.sum().backward()
    assert entropy.item() == pytest.approx(0.582203, abs=1e-6)
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == pytest.approx([-0.196612, 0.196612], abs=1e-6)


def test_log_probs_of_extreme_logits_are_finite() -> None:
    weight = torch.tensor([[300.0], [-300.0]], requires_grad=True)
    log_prob, entropy = selected_log_probs(torch.tensor([[10.0]]), weight, torch.tensor([1]))
    (log_prob + entropy).sum().backward()
    assert log_prob.item() == -6000.0
    assert torch.isfinite(entropy).all()
    assert weight.grad is not None
    assert torch.isfinite(weight.grad).all()


def test_the_full_divergence_equals_the_unchunked_one() -> None:
    torch.manual_seed(0)
    ours, theirs = torch.randn(9, 4, requires_grad=True), torch.randn(9, 4)
    w_ours, w_theirs = torch.randn(11, 4, requires_grad=True), torch.randn(11, 4)
    found = full_divergence(ours, w_ours, theirs, w_theirs, chunk=4)
    p, q = torch.log_softmax(ours @ w_ours.t(), -1), torch.log_softmax(theirs @ w_theirs.t(), -1)
    expected = (p.exp() * (p - q)).sum(-1)
    torch.testing.assert_close(found, expected)
    mine = torch.autograd.grad(found.sum(), (ours, w_ours))
    for a, b in zip(mine, torch.autograd.grad(expected.sum(), (ours, w_ours)), strict=True):
        torch.testing.assert_close(a, b)


def test_bfloat16_compute_keeps_float32_weights_and_gradients() -> None:
    model = given.model()
    policy = Policy(model, compute_dtype=torch.bfloat16)
    (micro,) = pack([build(given.trajectory([given.call("a", [1, 2, 3], [4, 5])]))], Packing())
    out = policy(micro)
    assert out.log_prob_M.dtype == torch.float32
    exact = log_probs(Policy(given.model()), micro)
    torch.testing.assert_close(out.log_prob_M, exact, rtol=0, atol=0.1)
    out.log_prob_M.sum().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


def test_gradient_checkpointing_changes_no_gradient() -> None:
    (micro,) = pack([build(given.chain(random.Random(0), id="t"))], Packing())
    grads = []
    for on in (False, True):
        model = given.model()
        if on:
            checkpoint_activations(model)
        Policy(model)(micro).log_prob_M.sum().backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_untied_embeddings_that_should_be_tied_are_refused() -> None:
    """MDL-08: same storage, so that moving an input embedding moves the logit by as much."""
    model = given.model(tied=True)
    check_tied(model)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    with torch.no_grad():
        before = model.lm_head(torch.eye(32)[:1])[0, 3].item()
        model.get_input_embeddings().weight[3, 0] += 1.0
        assert model.lm_head(torch.eye(32)[:1])[0, 3].item() == pytest.approx(before + 1.0)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(ConfigError, match="tie"):
        check_tied(model)


def test_an_architecture_whose_logits_are_not_head_of_hidden_is_refused() -> None:
    class Capped(nn.Module):
        def __init__(self, head: nn.Linear) -> None:
            super().__init__()
            self.inner = head
            self.weight = head.weight

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return 2.0 * torch.tanh(self.inner(hidden) / 2.0)

    model = given.model()
    for layout in ("packed", "padded"):
        check_support(model, layout=layout)
    model.lm_head = Capped(model.lm_head)
    with pytest.raises(ConfigError, match="not supported"):
        check_support(model)


def test_a_model_that_is_trained_still_generates_with_a_cache() -> None:
    """Our attention is plain SDPA for every other use of the model."""
    model = given.model()
    plain = copy.deepcopy(model)
    Policy(model)
    prompt = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    a, b = (m.generate(prompt, attention_mask=torch.ones_like(prompt), **settings) for m in (model, plain))
    assert torch.equal(a, b)


def test_loading_gives_back_what_was_saved_and_names_what_is_missing(tmp_path: Path) -> None:
    model = given.model(tied=True)
    model.save_pretrained(tmp_path / "m")
    again = load(tmp_path / "m", gradient_checkpointing=True)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert again.training, "activations are recomputed in training mode only"
    with pytest.raises(ConfigError, match=r"Cannot load a model from .*config\.json"):
        load(tmp_path / "nothing")
