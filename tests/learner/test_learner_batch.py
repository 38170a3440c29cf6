"""Rows to micro-batches: whole trajectories, a token budget, three layouts with one result."""

from __future__ import annotations

import random
from collections.abc import Sequence

import learner_given as given
import numpy as np
import pytest
import torch

from agentrl.errors import ConfigError
from agentrl.learner.batch import MicroBatch, Packing, dummy, for_ranks, pack, padding_share
from agentrl.learner.model import Policy
from agentrl.learner.samples import Rows, build

LAYOUTS = {
    "packed": Packing(token_budget=90),
    "padded": Packing(token_budget=90, layout="padded"),
    "shared": Packing(token_budget=90, share_prefixes=True),
}


def sample_rows(n_groups: int = 3, seed: int = 0) -> tuple[list[Rows], list[int]]:
    rng = random.Random(seed)
    rows, groups = [], []
    for k in range(n_groups):
        prompt = [rng.randrange(given.VOCAB) for _ in range(rng.randint(9, 14))]
        for i in range(4):
            branch = 2 if i == 1 else None
            made = given.chain(rng, id=f"{k}.{i}", prompt=prompt, turns=rng.randint(1, 4), branch_at=branch)
            rows.append(build(made))
            groups.append(k)
    return rows, groups


def flat(
    per_micro: Sequence[torch.Tensor], micro: Sequence[MicroBatch], rows: Sequence[Rows]
) -> torch.Tensor:
    """From `_M` of each micro-batch to the flat order of all trajectories."""
    pieces: dict[int, torch.Tensor] = {}
    for values, one in zip(per_micro, micro, strict=True):
        for s, part in zip(
            one.trajectories_S, values.split([rows[s].n_actions for s in one.trajectories_S]), strict=True
        ):
            pieces[s] = part
    return torch.cat([pieces[s] for s in sorted(pieces)])


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_action_points_at_the_token_before_it(name: str) -> None:
    rows, groups = sample_rows()
    micro = pack(rows, LAYOUTS[name], groups=groups)
    assert sorted(s for m in micro for s in m.trajectories_S) == list(range(len(rows)))
    for one in micro:
        at = 0
        for s, end in zip(one.trajectories_S, one.end_S.tolist(), strict=True):
            mine = rows[s]
            for i in range(mine.n_actions):
                row, position = mine.rows[mine.row_N[i]], int(mine.position_N[i])
                index = int(one.predict_M[at])
                assert one.ids_BL.reshape(-1)[index] == row[position - 1]
                assert one.positions_BL.reshape(-1)[index] == position - 1
                assert one.target_M[at] == row[position]
                at += 1
            assert one.positions_BL.reshape(-1)[end] == mine.end_position - 1
        assert at == one.n_actions


@pytest.mark.parametrize("name", ["packed", "shared"])
def test_the_blocks_of_a_path_spell_the_row(name: str) -> None:
    rows, groups = sample_rows()
    for one in pack(rows, LAYOUTS[name], groups=groups):
        assert one.blocks is not None
        spelled = []
        for block in one.blocks:
            assert block.parent < len(spelled), "parents stand before their children"
            before = spelled[block.parent] if block.parent >= 0 else []
            positions = one.positions_BL[0, block.start : block.end].tolist()
            assert positions == list(range(len(before), len(before) + block.end - block.start))
            spelled.append([*before, *one.ids_BL[0, block.start : block.end].tolist()])
        for s in one.trajectories_S:
            for row in rows[s].rows:
                assert row.tolist() in spelled


def test_the_budget_bounds_a_pass_and_a_longer_trajectory_passes_alone() -> None:
    rows, groups = sample_rows()
    for packing in (
        Packing(token_budget=70),
        Packing(token_budget=70, layout="padded"),
        Packing(token_budget=70, share_prefixes=True),
    ):
        for one in pack(rows, packing, groups=groups):
            assert one.width <= 70 or len(one.trajectories_S) == 1


def test_packing_has_no_padding_and_sharing_computes_a_common_prompt_once() -> None:
    rows, groups = sample_rows()
    packed = pack(rows, Packing(token_budget=10_000))
    shared = pack(rows, Packing(token_budget=10_000, share_prefixes=True), groups=groups)
    padded = pack(rows, Packing(token_budget=10_000, layout="padded"))
    total = sum(r.n_tokens for r in rows)
    assert padding_share(packed) == padding_share(shared) == 0.0
    assert padding_share(padded) == pytest.approx(1 - total / padded[0].width)
    assert packed[0].n_tokens == packed[0].n_row_tokens == shared[0].n_row_tokens == total
    distinct = {tuple(row[: i + 1].tolist()) for r in rows for row in r.rows for i in range(len(row))}
    assert len(distinct) <= shared[0].n_tokens < total
    assert shared[0].n_tokens < len(distinct) + 8 * len(rows), "only short prefixes are repeated"


def test_the_same_rows_give_the_same_micro_batches() -> None:
    rows, groups = sample_rows()
    for packing in LAYOUTS.values():
        first, second = (pack(rows, packing, groups=groups) for _ in range(2))
        assert [m.trajectories_S for m in first] == [m.trajectories_S for m in second]
        assert all(torch.equal(a.ids_BL, b.ids_BL) for a, b in zip(first, second, strict=True))


def test_ranks_run_the_same_number_of_passes_and_dummies_fill_up() -> None:
    """MDL-07: budget 100; lengths [60, 60, 60] are 3 passes, [30, 30, 30] is 1; every rank of two runs 2."""
    rng = random.Random(0)

    def of_length(n: int) -> Rows:
        return build(given.trajectory([given.call("a", [1] * (n - 2), [rng.randrange(9), 3])]))

    packing = Packing(token_budget=100)
    long, short = pack([of_length(60)] * 3, packing), pack([of_length(30)] * 3, packing)
    assert (len(long), len(short)) == (3, 1)
    shares = for_ranks([*long, *short], 3)
    assert [len(share) for share in shares] == [2, 2, 2]
    assert sum(bool(m.trajectories_S) for share in shares for m in share) == 4
    only_one = for_ranks(pack([of_length(30)], packing), 3)
    assert [[bool(m.trajectories_S) for m in share] for share in only_one] == [[True], [False], [False]]


def test_every_trajectory_counts_once_on_any_number_of_ranks() -> None:
    """RES-06: scores [0, 0, 0, 0, 1] have the mean 0.2 on 1, 2, 3, 4 and 8 ranks: what fills up counts
    nothing."""
    rows = [build(given.trajectory([given.call(f"{i}", [1, 2], [3 + i])], id=f"{i}")) for i in range(5)]
    scores = [0.0, 0.0, 0.0, 0.0, 1.0]
    for world in (1, 2, 3, 4, 8):
        shares = for_ranks(pack(rows, Packing(token_budget=1)), world)
        counted = [s for share in shares for one in share for s in one.trajectories_S]
        assert sorted(counted) == [0, 1, 2, 3, 4]
        assert sum(scores[s] for s in counted) / len(counted) == 0.2
        assert len({len(share) for share in shares}) == 1


def test_a_dummy_runs_and_changes_no_gradient() -> None:
    model = given.model()
    policy = Policy(model)
    out = policy(dummy())
    assert out.log_prob_M.shape == (0,)
    (out.anchor * 0.0 + out.log_prob_M.sum()).backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert any(p.grad is not None for p in model.parameters()), "the pass is on the graph"


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="token_budget"):
        Packing(token_budget=0)
    with pytest.raises(ConfigError, match="share_prefixes"):
        Packing(layout="padded", share_prefixes=True)


# ------------------------------------------------------------------------------------------- one result


def gradients(
    rows: Sequence[Rows], packing: Packing, groups: Sequence[int]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Log-probs of all actions and the gradient of a fixed weighted sum of them, in float64."""
    model = given.model(dtype=torch.float64)
    policy = Policy(model)
    weights = torch.randn(sum(r.n_actions for r in rows), generator=torch.Generator().manual_seed(0)).double()
    starts = np.cumsum([0, *(r.n_actions for r in rows)])
    micro = pack(rows, packing, groups=groups)
    outputs = []
    for one in micro:
        out = policy(one)
        mine = torch.cat([weights[starts[s] : starts[s + 1]] for s in one.trajectories_S])
        (out.log_prob_M * mine + 0.1 * out.entropy_M * mine).sum().backward()
        outputs.append(out.log_prob_M.detach())
    return flat(outputs, micro, rows), [p.grad for p in model.parameters()]


def test_all_layouts_and_splits_give_the_gradient_of_separate_rows() -> None:
    """Prefix sharing included: equal gradients in float64, rtol 1e-9."""
    rows, groups = sample_rows()
    expected, expected_gradients = gradients(rows, Packing(token_budget=1), groups)
    for packing in (
        *LAYOUTS.values(),
        Packing(token_budget=10_000),
        Packing(token_budget=10_000, layout="padded"),
        Packing(token_budget=10_000, share_prefixes=True),
    ):
        found, found_gradients = gradients(rows, packing, groups)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        for a, b in zip(found_gradients, expected_gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_a_prefix_tree_of_nested_and_equal_rows_is_right() -> None:
    """Rows that are prefixes of others, equal rows, and prefixes that split at several depths."""
    base = list(range(1, 21))
    variants = [base, base, base[:12], [*base[:12], 30, 31], [*base[:16], 33], [*base, 35, 36], [30, 31, 32]]
    rows = [
        build(given.trajectory([given.call("a", ids[:-2], ids[-2:])], id=str(i)))
        for i, ids in enumerate(variants)
    ]
    expected, expected_gradients = gradients(rows, Packing(token_budget=1), [0] * len(rows))
    shared = Packing(token_budget=1000, share_prefixes=True)
    found, found_gradients = gradients(rows, shared, [0] * len(rows))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    for a, b in zip(found_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    assert pack(rows, shared)[0].n_tokens == 22 + 2 + 1 + 3
