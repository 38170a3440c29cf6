"""One update: what enters, how it is normalised, when it is refused."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import learner_given as given
import pytest
import torch

from agentrl.algo import distributions, recipes
from agentrl.algo.axes import choose
from agentrl.errors import ConfigError, EvidenceError
from agentrl.learner.batch import Packing, pack
from agentrl.learner.evidence import admits, gather, lag_of
from agentrl.learner.model import Policy, log_probs
from agentrl.learner.optimizer import adam, rate_factor
from agentrl.learner.samples import build
from agentrl.learner.step import Learner, LearnerConfig
from agentrl.types import Group, Termination, Trajectory

CISPO = recipes.get("cispo")
GRPO = replace(recipes.get("grpo"), penalty=())
PLAIN = LearnerConfig(learning_rate=1e6, epsilon=1e6, max_grad_norm=None, max_mismatch=None)
"""With these the first Adam step moves a weight by minus its gradient, to about 1e-6 of it."""


def some_groups(seed: int = 0, *, n: int = 3, size: int = 4, **options: Any) -> list[Group]:
    """Groups of mixed rewards; one member branches."""
    rng = random.Random(seed)
    return [
        given.group(
            [
                given.chain(
                    rng,
                    id=f"{k}.{i}",
                    group=f"g{k}",
                    reward=float(i % 2),
                    branch_at=2 if i == 1 else None,
                    turns=2 + i,
                    **options,
                )
                for i in range(size)
            ]
        )
        for k in range(n)
    ]


def gradient(
    groups: Sequence[Group], recipe: Any = GRPO, config: LearnerConfig = PLAIN, **update: Any
) -> torch.Tensor:
    """Minus the movement of all weights in one update, in float64."""
    model = given.model(dtype=torch.float64)
    before = torch.cat([p.detach().clone().flatten() for p in model.parameters()])
    report = Learner(model, recipe, config).update(groups, version=0, **update)
    assert not report.refused
    return before - torch.cat([p.detach().flatten() for p in model.parameters()])


def weights(model: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def unchanged(model: Any, before: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


# ------------------------------------------------------------------------------------------ normalisation


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo", "rloo", "ppo"])
def test_no_split_and_no_layout_changes_the_gradient(name: str) -> None:
    """AGG-01: denominators are those of the whole step."""
    recipe = replace(recipes.get(name), penalty=())
    groups = some_groups()
    expected = gradient(groups, recipe)
    assert expected.abs().max() > 1e-4
    for packing in (
        Packing(token_budget=1),
        Packing(token_budget=100, layout="padded"),
        Packing(token_budget=150, share_prefixes=True),
    ):
        found = gradient(groups, recipe, replace(PLAIN, packing=packing))
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_computing_activations_twice_changes_no_gradient(name: str) -> None:
    recipe, groups = replace(recipes.get(name), penalty=()), some_groups(n=1)
    twice = gradient(groups, recipe, replace(PLAIN, gradient_checkpointing=True))
    torch.testing.assert_close(twice, gradient(groups, recipe), rtol=1e-9, atol=1e-12)


def test_a_gradient_is_what_the_formula_says() -> None:
    """REINFORCE with a group baseline, token mean, worked out with plain log-softmax on whole rows."""
    recipe = replace(
        CISPO,
        surrogate=choose("reinforce"),
        ratio=choose("on_policy"),
        advantage=choose("group_centred"),
    )
    (group,) = some_groups(n=1)
    model = given.model(dtype=torch.float64)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for trajectory in group.trajectories:
        assert trajectory.reward is not None
        for call in trajectory.calls:
            prompt = trajectory.prompt_ids(call.id)
            logits = model(input_ids=torch.tensor([[*prompt, *call.generation_token_ids]])).logits[0]
            for k, token in enumerate(call.generation_token_ids):
                total = total - (trajectory.reward - 0.5) * logits[len(prompt) - 1 + k].log_softmax(-1)[token]
                count += 1
    (total / count).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(gradient([group], recipe), expected, rtol=1e-5, atol=1e-8)


def test_every_mini_batch_steps_with_its_own_denominator() -> None:
    """AGG-10: three demonstrations in windows of two: two optimizer steps, the last partial, none dropped."""
    model = given.model()
    demos = [t for g in some_groups(n=1, size=3) for t in g.trajectories]
    per_demo = {}
    for t in demos:
        (micro,) = pack([build(t)], Packing())
        logp = log_probs(Policy(model), micro, temperature=False)
        per_demo[t.id] = (-float(logp.double().sum()), logp.numel())
    learner = Learner(model, GRPO, replace(PLAIN, learning_rate=0.0))
    losses = learner.imitate(demos, mini_batch=2)
    assert len(losses) == 2
    sums = list(per_demo.values())
    possible = [sum(s for s, _ in part) / sum(n for _, n in part) for part in (sums[:2], sums[1:], sums[::2])]
    single = [s / n for s, n in sums]
    assert any(losses[0] == pytest.approx(p, rel=1e-5) for p in possible)
    assert any(losses[1] == pytest.approx(p, rel=1e-5) for p in single)


def test_the_loss_of_a_mini_batch_is_that_of_a_step_on_its_groups_alone() -> None:
    """Token mean over each window's own tokens, although advantages were made from the whole batch."""
    groups = some_groups(n=2)
    config = replace(PLAIN, learning_rate=0.0)
    alone = [Learner(given.model(), CISPO, config).update([g], version=0) for g in groups]
    both = Learner(given.model(), CISPO, replace(config, mini_batches=2)).update(groups, version=0)
    expected = sum(r.metrics["loss/policy"] for r in alone) / 2
    assert both.metrics["loss/policy"] == pytest.approx(expected, rel=1e-5)
    assert abs(alone[0].metrics["loss/policy"] - alone[1].metrics["loss/policy"]) > 1e-3


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_trajectories_that_are_not_computed_stay_in_the_denominator(mini_batches: int) -> None:
    """Baseline 1: members of reward 1 have advantage 0. Their tokens count, computed or not."""
    recipe = replace(CISPO, advantage=choose("constant_baseline", baseline=1.0))
    config = replace(PLAIN, learning_rate=0.0, mini_batches=mini_batches)
    skipped, computed = (
        Learner(given.model(), recipe, replace(config, skip_zero_advantage=skip)).update(
            some_groups(n=1, size=6), version=0
        )
        for skip in (True, False)
    )
    assert skipped.metrics["batch/row_tokens"] < computed.metrics["batch/row_tokens"]
    sums = [r.metrics["loss/policy"] * r.taken for r in (skipped, computed)]
    assert sums[0] == pytest.approx(sums[1], rel=1e-5)
    assert abs(sums[0]) > 1e-3


def test_no_split_changes_the_gradient_of_imitation() -> None:
    demos = [t for g in some_groups(n=1) for t in g.trajectories]
    moved = []
    for budget in (1, 100, 10_000):
        model = given.model(dtype=torch.float64)
        before = torch.cat(weights(model)[0].unbind())
        learner = Learner(model, CISPO, replace(PLAIN, packing=Packing(token_budget=budget)))
        learner.imitate(demos, mini_batch=100, schedule="constant")
        moved.append(torch.cat(weights(model)[0].unbind()) - before)
    for other in moved[1:]:
        torch.testing.assert_close(other, moved[0], rtol=1e-7, atol=1e-10)


def test_mini_batches_and_epochs_take_their_optimizer_steps_and_cover_everything() -> None:
    groups = some_groups(n=5)
    learner = Learner(given.model(), GRPO, LearnerConfig(mini_batches=2, epochs=3, max_mismatch=None))
    report = learner.update(groups, version=0)
    assert report.taken == report.step == learner.config.optimizer_steps(1) == 6
    tokens = sum(build(t).n_tokens for g in groups for t in g.trajectories)
    assert report.metrics["batch/row_tokens"] == 3 * tokens


def test_zero_advantages_are_not_computed_and_change_no_gradient() -> None:
    groups = some_groups(n=2)
    same = [given.group([given.chain(random.Random(i), id=f"z{i}", group="z", reward=1.0) for i in range(3)])]
    skipped = gradient([*groups, *same])
    computed = gradient([*groups, *same], config=replace(PLAIN, skip_zero_advantage=False))
    torch.testing.assert_close(skipped, computed, rtol=1e-7, atol=1e-10)
    learner = Learner(given.model(), GRPO, PLAIN)
    before = weights(learner.policy.model)
    report = learner.update(same, version=0)
    assert report.nothing is not None
    assert "every advantage is 0" in report.nothing
    assert report.taken == 0
    assert unchanged(learner.policy.model, before), "no evidence, no step, not even by momentum"


# --------------------------------------------------------------------------------------------- what enters


def test_ungraded_members_change_no_number() -> None:
    (group,) = some_groups(n=1)
    lost = [
        given.chain(random.Random(9), id="lost", group="g0", reward=None),
        given.trajectory([], id="never", group="g0", reward=None),
    ]
    with_lost = given.group([*group.trajectories, *lost])
    torch.testing.assert_close(gradient([with_lost]), gradient([group]), rtol=1e-9, atol=1e-12)


def test_groups_are_those_of_the_records() -> None:
    """TRJ-02: four repeats of one task are one group of four: rewards [1, 0, 1, 0] give ±0.5."""
    rewards = [1.0, 0.0, 1.0, 0.0]
    members = [given.chain(random.Random(i), id=f"t{i}", group="g", reward=r) for i, r in enumerate(rewards)]
    learner = Learner(given.model(), replace(GRPO, advantage=choose("group_centred")), PLAIN)
    report = learner.update([given.group(members)], version=0, expected_group_size=4)
    assert report.metrics["groups/size_4"] == 1.0
    assert report.metrics["advantage/abs_max"] == 0.5
    with pytest.raises(EvidenceError, match="sizes"):
        learner.update([given.group(members[:3])], version=0, expected_group_size=4)


def test_a_stale_token_leaves_numerator_and_denominator_and_stays_as_context() -> None:
    """ASY-10: versions [3, 3, 4, 5], trainer 5, bound 1: mask [0, 0, 1, 1], a token mean over 2 tokens."""
    old = given.call("a", [1, 2], [3, 4, 5, 6], versions=[3, 3, 4, 5])
    other = given.call("b", [1, 2], [7], versions=[5])
    group = given.group(
        [given.trajectory([old], id="x", reward=1.0), given.trajectory([other], id="y", reward=0.0)]
    )
    batch = gather([group], version=5, max_lag=1)
    assert batch.columns.valid_N is not None
    assert batch.columns.valid_N.tolist() == [False, False, True, True, True]
    assert batch.facts["tokens/withheld_stale"] == 2
    assert batch.facts["trajectories/partly_stale"] == 1
    report = Learner(given.model(), CISPO, replace(PLAIN, max_lag=1)).update([group], version=5)
    assert report.metrics["tokens/kept"] == 3


def test_a_trajectory_of_stale_tokens_only_feeds_its_groups_baseline() -> None:
    """ASY-10, second half; LEARNER section 6."""
    stale = given.trajectory([given.call("a", [1], [2], versions=[0])], id="stale", reward=1.0)
    fresh = given.trajectory([given.call("b", [1], [3], versions=[5])], id="fresh", reward=0.0)
    recipe = replace(CISPO, advantage=choose("group_centred"))
    report = Learner(given.model(), recipe, replace(PLAIN, max_lag=1)).update(
        [given.group([stale, fresh])], version=5
    )
    assert report.metrics["trajectories/stale"] == 1
    assert report.metrics["trajectories/trained"] == 1
    assert report.metrics["advantage/mean"] == -0.5, "the stale reward of 1 is in the mean"


def test_admission_is_by_the_oldest_token_and_has_no_off_by_one() -> None:
    """ASY-02."""
    rollouts = [[10], [9, 10], [8], [10, 10]]
    assert [admits(r, trained=10, bound=1) for r in rollouts] == [True, True, False, True]
    assert [admits(r, trained=10, bound=0) for r in rollouts] == [True, False, False, True]
    with pytest.raises(EvidenceError, match="version 11, the learner is at 10"):
        admits([11], trained=10, bound=1)


def test_lags_are_measured_when_the_step_is_made() -> None:
    """ASY-08."""
    lag = lag_of(submitted=5, tokens=[5, 6], completed=6, trained=8)
    assert (lag.submit, lag.oldest, lag.newest, lag.queued) == (3, 3, 2, 2)


def test_a_column_that_does_not_exist_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'greedy_reward_S'"):
        Learner(given.model(), CISPO, PLAIN).update(
            some_groups(), version=0, extra={"greedy_rewards_S": torch.zeros(12)}
        )


def test_a_token_from_the_future_is_an_error() -> None:
    group = given.group([given.trajectory([given.call("a", [1], [2], versions=[7])])])
    with pytest.raises(EvidenceError, match="version 7, the learner is at 6"):
        gather([group], version=6)


def test_a_trajectory_is_trained_once_per_step() -> None:
    (group,) = some_groups(n=1)
    with pytest.raises(EvidenceError, match="in the step twice"):
        gather([group, group], version=0)


def test_a_graded_trajectory_that_can_not_be_trained_is_an_error() -> None:
    demo = given.trajectory([given.call("a", [1], [2], log_probs=None, kind=None, versions=[])])
    with pytest.raises(EvidenceError, match=r"no_log_prob \(1 tokens\)"):
        gather([given.group([demo])], version=0)


def test_an_attempt_without_a_call_is_counted_and_changes_no_number() -> None:
    """An agent that gave up before it asked, or a task that does not fit: graded, and nobody's doing."""
    groups = some_groups()
    unasked = [
        replace(given.trajectory([], id=f"x{k}", group=f"g{k}", reward=float(k % 2)), index=9)
        for k in range(3)
    ]
    wider = [given.group([*g.trajectories, one]) for g, one in zip(groups, unasked, strict=True)]
    assert torch.equal(gradient(wider), gradient(groups))
    report = Learner(given.model(), GRPO, PLAIN).update(wider, version=0)
    assert report.metrics["trajectories/without_calls"] == 3
    assert report.metrics["trajectories/ungraded"] == 3
    alone = Learner(given.model(), GRPO, PLAIN).update([given.group(unasked[:1])], version=0)
    assert (alone.taken, alone.refused) == (0, ())
    assert alone.nothing is not None


@pytest.mark.parametrize("ids", [[3, 4], [given.VOCAB + 1, 4]])
def test_a_trajectory_whose_tokens_an_engine_all_got_wrong_only_feeds_its_groups_baseline(
    ids: list[int],
) -> None:
    """LGP-06, LGP-11: -inf at every token, or an id that the tokenizer does not have; the others train."""
    known = None if ids[0] < given.VOCAB else -1.0
    spoiled = given.trajectory([given.call("a", [1, 2], ids, log_probs=[known] * 2)], id="a", reward=0.0)
    good = given.trajectory([given.call("b", [1, 2], [5, 6])], id="b", reward=1.0)
    made = Learner(
        given.model(), replace(CISPO, advantage=choose("group_centred")), PLAIN, vocab_size=given.VOCAB
    )
    if ids[0] > given.VOCAB:
        made.model_rows = given.VOCAB + 2  # a padded head: the engine can sample what the tokenizer lacks
    batch = gather([given.group([spoiled, good])], version=0, vocab_size=given.VOCAB)
    assert batch.columns.valid_N is not None
    assert batch.columns.valid_N.tolist() == [False, False, True, True]
    report = made.update([given.group([spoiled, good])], version=0)
    assert (report.taken, report.metrics["tokens/kept"]) == (1, 2)
    assert report.metrics["trajectories/all_tokens_excluded"] == 1
    assert report.metrics["advantage/mean"] == 0.5, "its zero is in the mean of the group"


def test_unknown_log_probs_stay_out_of_the_loss() -> None:
    """MSK-08: what is NaN at a token outside of the loss poisons nothing."""
    calls = [given.call("a", [1, 2], [3, 4], log_probs=[-1.0, None]), given.call("b", [1, 2], [5, 6])]
    group = given.group([given.trajectory([c], id=c.id, reward=float(i)) for i, c in enumerate(calls)])
    report = Learner(given.model(), CISPO, PLAIN).update([group], version=0)
    assert report.taken == 1
    assert report.metrics["tokens/kept"] == 3
    assert all(math.isfinite(v) for v in report.metrics.values())


# ------------------------------------------------------------------------------------------------ refusals


def test_evidence_that_disagrees_with_the_learner_is_refused_and_nothing_moves() -> None:
    """LGP-05: an engine that reports 0.0 for tokens it did not score."""
    groups = [
        given.group(
            [
                given.trajectory(
                    [given.call(f"{i}", [1, 2, 3], list(range(4, 16)), log_probs=[0.0] * 12)],
                    id=str(i),
                    reward=float(i),
                )
                for i in range(2)
            ]
        )
    ]
    learner = Learner(given.model(), CISPO, LearnerConfig(mini_batches=2, epochs=2))
    before = weights(learner.policy.model)
    report = learner.update(groups, version=0)
    assert report.taken == 0
    assert len(report.refused) == 4, "no later mini-batch of untrusted evidence trains either"
    assert "Sampler and learner disagree" in report.refused[0]
    assert "are exactly 0" in report.refused[0]
    assert unchanged(learner.policy.model, before)


def test_evidence_sampled_from_the_weights_themselves_passes_the_gate() -> None:
    model = given.model()
    group = on_policy_group(model, random.Random(0), size=4)
    report = Learner(model, CISPO, LearnerConfig()).update([group], version=0)
    assert report.taken == 1
    assert report.metrics["mismatch/on_policy_abs_max"] < 1e-5
    assert report.metrics["ratio/raw"] == pytest.approx(1.0, abs=1e-5)


def test_a_loss_that_is_not_finite_changes_nothing_and_says_why() -> None:
    learner = Learner(given.model(), CISPO, PLAIN)
    with torch.no_grad():
        learner.policy.model.lm_head.weight[0, 0] = math.nan
    before = weights(learner.policy.model)
    report = learner.update(some_groups(), version=0)
    assert report.taken == 0
    assert "not finite" in report.refused[0]
    assert learner.optimizer_step == 0
    assert all(
        torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        for a, b in zip(learner.policy.model.parameters(), before, strict=True)
    )


def test_a_gradient_that_is_not_finite_changes_nothing_and_says_why() -> None:
    learner = Learner(given.model(), CISPO, PLAIN)
    learner.policy.model.model.norm.weight.register_hook(lambda g: g * math.inf)
    before = weights(learner.policy.model)
    report = learner.update(some_groups(), version=0)
    assert report.refused == ("The gradient is not finite.",)
    assert unchanged(learner.policy.model, before)


def test_an_id_the_model_can_not_embed_is_refused() -> None:
    group = given.group([given.trajectory([given.call("a", [1], [given.VOCAB])])])
    with pytest.raises(EvidenceError, match="no embedding"):
        Learner(given.model(), CISPO).update([group], version=0)


def test_a_frozen_model_that_can_not_speak_of_every_token_is_refused_at_the_start() -> None:
    small = given.model()
    small.resize_token_embeddings(given.VOCAB - 8)
    with pytest.raises(ConfigError, match=r"teacher has 32 output rows, the policy 40"):
        Learner(given.model(), recipes.get("opd"), PLAIN, teacher=small)
    large = given.model()
    large.resize_token_embeddings(given.VOCAB + 8)
    Learner(given.model(), recipes.get("opd"), PLAIN, teacher=large)
    with pytest.raises(ConfigError, match="whole distributions"):
        Learner(given.model(), recipes.get("opd-full"), PLAIN, teacher=large)
    with pytest.raises(ConfigError, match="reference has 32"):
        Learner(given.model(), recipes.get("grpo"), PLAIN, reference=small)


@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
def test_the_divergence_from_a_teacher_is_of_the_kind_that_the_recipe_says(kind: str) -> None:
    recipe = recipes.compose({"recipe": "opd-full", "teacher.divergence.kind": kind})
    model, teacher = given.model(dtype=torch.float64), given.model(seed=3, dtype=torch.float64)
    one = given.trajectory([given.call("a", [1, 2, 3], [4, 5, 6])])
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
    with torch.no_grad():
        ours, theirs = (m(input_ids=ids).logits[0, 2:5] for m in (model, teacher))
    expected = distributions.divergence(ours, theirs, kind=kind).mean()  # type: ignore[arg-type]
    report = Learner(model, recipe, PLAIN, teacher=teacher).update([given.group([one])], version=0)
    assert report.metrics["teacher/divergence"] == pytest.approx(float(expected), rel=1e-9)
    hdpo = recipes.get("hdpo").teacher[0]
    assert hdpo.numbers["kind"] == "jsd", "as its equation says"


def test_a_kind_of_divergence_that_is_none_is_refused() -> None:
    recipe = recipes.compose({"recipe": "hdpo", "teacher.divergence.kind": "jds"})
    with pytest.raises(ConfigError, match="Did you mean 'jsd'"):
        Learner(given.model(), recipe, PLAIN, teacher=given.model())


def test_a_recipe_that_reads_values_of_others_has_no_critic_of_its_own() -> None:
    made = Learner(given.model(), recipes.get("spo"), PLAIN)
    assert (made.critic, made.value_head) == (None, None)
    with pytest.raises(EvidenceError, match="values_N"):
        made.update(some_groups(), version=0)


def test_the_coefficient_of_ppo_penalty_moves_by_itself() -> None:
    """arXiv:1707.06347 §4: halved below target / 1.5, doubled above 1.5 target, unmoved while nothing is."""
    recipe = recipes.get("ppo-penalty")
    assert recipe.bands == {"penalty/kl_old": (pytest.approx(0.01 / 1.5), pytest.approx(0.015))}
    groups = given_by_the_policy()
    still = Learner(given.model(), recipe, replace(PLAIN, learning_rate=0.0))
    assert still.update(groups, version=0).metrics["coefficient/penalty/kl_old"] == 1.0
    far = Learner(given.model(), recipe, LearnerConfig(learning_rate=0.05, max_mismatch=None, epochs=3))
    report = far.update(groups, version=0)
    assert report.metrics["penalty/kl_old"] > 0.015
    assert far.coefficients == {"penalty/kl_old": 2.0}
    near = Learner(given.model(), recipe, LearnerConfig(learning_rate=1e-5, max_mismatch=None, epochs=3))
    assert 1e-8 < near.update(groups, version=0).metrics["penalty/kl_old"] < 0.01 / 1.5
    assert near.coefficients == {"penalty/kl_old": 0.5}


def given_by_the_policy() -> list[Group]:
    """Groups whose recorded log-probs are those of the policy itself."""
    policy = Policy(given.model())
    made = []
    for group in some_groups():
        members = []
        for one in group.trajectories:
            (micro,) = pack([build(one)], Packing(token_budget=10_000))
            known = log_probs(policy, micro).tolist()
            calls = []
            for call in one.calls:
                n = len(call.generation_token_ids)
                calls.append(replace(call, generation_log_probs=tuple(known[:n])))
                known = known[n:]
            members.append(replace(one, calls=tuple(calls)))
        made.append(given.group(members))
    return made


def test_an_update_that_is_skipped_is_counted_and_moves_nothing() -> None:
    made = Learner(given.model(), CISPO, PLAIN)
    report = made.skip("nothing there")
    assert (report.nothing, report.taken, made.updates, made.optimizer_step) == ("nothing there", 0, 1, 0)


def test_a_recipe_that_needs_a_model_is_refused_without_it() -> None:
    with pytest.raises(ConfigError, match="needs a reference model"):
        Learner(given.model(), recipes.get("grpo"))


def test_narrow_master_weights_are_refused_and_moments_are_float32() -> None:
    """MDL-02."""
    with pytest.raises(ConfigError, match="rounded away"):
        Learner(given.model(dtype=torch.bfloat16), CISPO)
    learner = Learner(given.model(), CISPO, replace(PLAIN, compute_dtype="bfloat16"))
    report = learner.update(some_groups(), version=0)
    assert report.taken == 1
    states = learner.optimizer.state.values()
    assert {s[k].dtype for s in states for k in ("exp_avg", "exp_avg_sq")} == {torch.float32}
    assert {p.dtype for p in learner.policy.parameters()} == {torch.float32}


def test_a_thousand_small_steps_move_a_weight_of_one_to_zero() -> None:
    """MDL-02: 1000 steps of -1e-3 on w = 1.0 in float32 end at 0; in bfloat16 none of them is seen."""
    ends = {}
    for dtype in (torch.float32, torch.bfloat16):
        w = torch.ones((), dtype=dtype)
        for _ in range(1000):
            w -= 1e-3
        ends[dtype] = float(w)
    assert abs(ends[torch.float32]) < 1e-4
    assert ends[torch.bfloat16] == 1.0


# -------------------------------------------------------------------------------------- schedule, reference


def test_the_schedule_counts_optimizer_steps() -> None:
    """RES-05: 100 batches of 4 mini-batches, linear to 0: the factor at optimizer step 100 is 0.75."""
    total = LearnerConfig(mini_batches=4).optimizer_steps(100)
    assert rate_factor(100, schedule="linear", total_steps=total) == 0.75
    assert rate_factor(400, schedule="linear", total_steps=total) == 0.0
    assert rate_factor(0, schedule="cosine", total_steps=8) == 1.0
    assert rate_factor(4, schedule="cosine", total_steps=8) == pytest.approx(0.5)
    assert [rate_factor(s, schedule="constant", warmup_steps=4) for s in (0, 3, 4)] == [0.25, 1.0, 1.0]
    with pytest.raises(ConfigError, match="no end"):
        LearnerConfig(schedule="linear")


def test_adam_follows_the_known_path() -> None:
    """RES-04: lr 0.1, gradients [1, 1, -1]: x is -0.2 after two steps and -0.226199 after three."""
    x = torch.nn.Parameter(torch.zeros(1))
    module = torch.nn.Module()
    module.x = x
    optimizer = adam([module], rate=0.1)
    path = []
    for g in (1.0, 1.0, -1.0):
        x.grad = torch.tensor([g])
        optimizer.step()
        path.append(x.item())
    assert path[1] == pytest.approx(-0.2, abs=1e-6)
    assert path[2] == pytest.approx(-0.226199, abs=1e-6)


def test_the_kl_to_a_reference_is_zero_at_the_reference_and_adapts() -> None:
    recipe = recipes.get("grpo")
    config = replace(PLAIN, learning_rate=0.0, adaptive={"penalty/kl_k3": (0.1, 0.2)})
    learner = Learner(given.model(), recipe, config, reference=given.model())
    report = learner.update(some_groups(), version=0)
    assert report.metrics["penalty/kl_k3"] == pytest.approx(0.0, abs=1e-9)
    assert learner.coefficients == {"penalty/kl_k3": 0.02}, "below the band: halved"
    other = Learner(given.model(), recipe, config, reference=given.model(seed=1))
    assert other.update(some_groups(), version=0).metrics["penalty/kl_k3"] > 0.2
    assert other.coefficients == {"penalty/kl_k3": 0.08}, "above the band: doubled"


def test_the_full_kl_and_the_proximal_policy_are_supplied() -> None:
    recipe = replace(CISPO, penalty=(choose("kl_full", coefficient=0.1),), old="proximal")
    learner = Learner(given.model(), recipe, PLAIN, reference=given.model(seed=1))
    report = learner.update(some_groups(), version=0)
    assert report.taken == 1
    assert report.metrics["penalty/kl_full"] > 0
    assert report.metrics["ratio/raw"] == pytest.approx(1.0, abs=1e-5), "the proximal policy is the learner"


# --------------------------------------------------------------------------------------------- it learns


def on_policy_group(model: Any, rng: random.Random, *, size: int, prompt: Sequence[int] = (1, 2, 3)) -> Group:
    """Sampled token by token from the model; reward: share of even ids."""
    members: list[Trajectory] = []
    for i in range(size):
        ids, log_probs_ = list(prompt), []
        for _ in range(6):
            with torch.no_grad():
                log_p = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0, -1], -1)
            token = rng.choices(range(given.VOCAB), weights=log_p.exp().tolist())[0]
            ids.append(token)
            log_probs_.append(float(log_p[token]))
        made = given.call(f"{i}", list(prompt), ids[3:], log_probs=log_probs_)
        reward = sum(t % 2 == 0 for t in ids[3:]) / 6
        members.append(given.trajectory([made], id=f"m{rng.random()}", reward=reward))
    return given.group(members)


def test_the_reward_of_sampled_tokens_rises() -> None:
    torch.manual_seed(0)
    rng = random.Random(0)
    model = given.model()
    learner = Learner(model, CISPO, LearnerConfig(learning_rate=5e-3))
    rewards = []
    for _ in range(14):
        group = on_policy_group(model, rng, size=12)
        rewards.append(sum(t.reward or 0 for t in group.trajectories) / 12)
        assert not learner.update([group], version=0).refused
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2


def test_imitation_learns_demonstrations_without_log_probs_and_reports_progress() -> None:
    rng = random.Random(0)
    demos = [
        given.trajectory(
            [
                given.call(
                    f"{i}", [1, 2, rng.randrange(10)], [5, 6, 7, 8], log_probs=None, kind=None, versions=[]
                )
            ],
            id=str(i),
        )
        for i in range(8)
    ]
    seen = []
    learner = Learner(given.model(), CISPO)
    losses = learner.imitate(demos, epochs=15, mini_batch=4, learning_rate=1e-2, progress=seen.append)
    assert len(losses) == len(seen) == 30
    assert losses[-1] < 0.1 < losses[0]
    assert seen[-1].accuracy > 0.9
    assert seen[-1].step == seen[-1].steps == 30
    assert learner.optimizer_step == 0
    assert not learner.optimizer.state, "the moments of imitation are its own"


def test_a_demonstration_that_ended_before_its_first_call_is_left_out() -> None:
    some = [given.chain(random.Random(1), id="a"), given.trajectory([], id="b", reward=None)]
    losses = Learner(given.model(), CISPO, PLAIN).imitate(some)
    assert losses == Learner(given.model(), CISPO, PLAIN).imitate(some[:1])


def test_imitation_leaves_calls_with_phantom_ids_out() -> None:
    good = given.call("a", [1, 2], [3, 4])
    bad = given.call("b", [1, 2, 3, 4, 5], [6, 39], parent=good, parent_prompt=[1, 2])
    learner = Learner(given.model(), CISPO, replace(PLAIN, learning_rate=0.0), vocab_size=39)
    whole, only = (learner.imitate([given.trajectory(calls)])[0] for calls in ([good, bad], [good]))
    assert whole == pytest.approx(only, rel=1e-6)


def test_the_report_says_where_the_time_went() -> None:
    report = Learner(given.model(), CISPO, PLAIN).update(some_groups(), version=0)
    parts = [report.metrics[f"time/{k}_s"] for k in ("data", "columns", "forward", "backward", "optimizer")]
    assert sum(parts) == pytest.approx(report.metrics["time/total_s"])
    assert report.metrics["batch/tokens_per_s"] > 0
    assert report.metrics["batch/padding_share"] == 0.0


# ----------------------------------------------------------------------------------------------- critic


PPO = recipes.get("ppo")


def test_first_values_are_the_mean_return() -> None:
    for recipe in (PPO, replace(PPO, value=choose("hl_gauss", bins=51))):
        for kind in ("separate", "shared"):
            learner = Learner(given.model(), recipe, replace(PLAIN, learning_rate=0.0, critic=kind))
            groups = some_groups(n=1, size=3)  # rewards 0, 1, 0
            (micro,) = pack([build(t) for t in groups[0].trajectories], Packing(token_budget=10_000))
            learner.update(groups, version=0)
            values = learner._pass_values(micro)["values_N"]
            torch.testing.assert_close(values, torch.full_like(values, 1 / 3), rtol=0, atol=2e-2)


def test_the_value_of_an_action_after_an_observation_has_seen_it_and_no_earlier_one_has() -> None:
    """V_i is read in the state in which a_i was chosen."""
    learner = Learner(given.model(), PPO, PLAIN)
    assert learner.critic is not None
    torch.nn.init.normal_(learner.critic.head.linear.weight)

    def values(observation: list[int]) -> torch.Tensor:
        a = given.call("a", [1, 2], [3, 4])
        prompt = [1, 2, 3, 4, *observation]
        b = given.call("b", prompt, [5, 6], parent=a, parent_prompt=[1, 2])
        (micro,) = pack([build(given.trajectory([a, b]))], Packing())
        with torch.no_grad():
            return learner._pass_values(micro)["values_N"]

    one, other = values([7, 8]), values([9, 10])
    assert torch.equal(one[:2], other[:2])
    assert (one[2:] - other[2:]).abs().min() > 1e-4


def test_the_value_of_an_action_has_not_seen_the_action() -> None:
    learner = Learner(given.model(), PPO, PLAIN)
    assert learner.critic is not None
    torch.nn.init.normal_(learner.critic.head.linear.weight)
    found = []
    for first in (3, 30):
        (micro,) = pack([build(given.trajectory([given.call("a", [1, 2], [first, 4, 5])]))], Packing())
        with torch.no_grad():
            found.append(learner._pass_values(micro))
    one, other = found
    assert torch.equal(one["values_N"][:1], other["values_N"][:1])
    assert (one["values_N"][1:] - other["values_N"][1:]).abs().min() > 1e-4
    assert (one["bootstrap_S"] - one["values_N"][-1:]).abs().min() > 1e-4, "the end is after the last action"


def test_a_truncated_trajectory_bootstraps_from_its_end_state_and_a_finished_one_does_not() -> None:
    """One action, V = mean reward everywhere at first: truncated return is r + V(end), terminated is r."""
    recipe = replace(PPO, advantage=choose("gae_tokens", gamma=1.0, lambda_policy=1.0, whiten=False))
    for termination, expected in ((Termination.MAX_TURNS, 0.5), (Termination.FINISHED, 0.0)):
        members = [
            given.trajectory(
                [given.call(f"{i}", [1, 2], [3 + i])], id=str(i), reward=r, termination=termination
            )
            for i, r in enumerate([0.0, 1.0])
        ]
        learner = Learner(given.model(), recipe, replace(PLAIN, learning_rate=0.0))
        report = learner.update([given.group(members)], version=0)
        assert report.metrics["advantage/mean"] == pytest.approx(expected, abs=1e-6)


def test_the_critic_learns_takes_its_steps_and_leaves_the_policy_alone() -> None:
    recipe = replace(PPO, critic_steps=3, value=choose("value_mse"))
    learner = Learner(given.model(), recipe, LearnerConfig(learning_rate=1e-2, max_mismatch=None))
    before = weights(learner.policy.model)
    groups = some_groups(n=2)
    reports = [learner.update(groups, version=0, train_policy=False) for _ in range(12)]
    assert unchanged(learner.policy.model, before)
    assert learner.optimizer_step == 0
    assert learner.critic_optimizer is not None
    steps = {int(s["step"]) for s in learner.critic_optimizer.state.values()}
    assert steps == {36}
    assert reports[-1].metrics["critic/explained_variance"] > 0.5
    assert reports[0].metrics["critic/explained_variance"] == pytest.approx(0.0, abs=1e-9)
    assert 0.0 <= reports[-1].metrics["critic/calibration_error"] < 0.5


def test_frozen_attention_does_not_move() -> None:
    recipe = replace(PPO, critic_freezes_attention=True)
    learner = Learner(given.model(), recipe, LearnerConfig(learning_rate=1e-2, max_mismatch=None))
    assert learner.critic is not None
    before = {n: p.detach().clone() for n, p in learner.critic.named_parameters()}
    for _ in range(2):
        learner.update(some_groups(), version=0)
    moved = {n for n, p in learner.critic.named_parameters() if not torch.equal(p, before[n])}
    assert not any("attn" in n for n in moved)
    assert any("mlp" in n for n in moved)
