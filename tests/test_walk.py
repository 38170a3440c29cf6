"""The single path of data, called in order: the eight files that a newcomer reads to know the system."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import torch

from agentrl.algo import recipes
from agentrl.inference.local import LocalSampler
from agentrl.learner import publish, small
from agentrl.learner.step import Learner, LearnerConfig
from agentrl.store.store import Store
from agentrl.types import Group, SamplingParams, Termination, Trajectory, token_hash
from envs.admission import admit
from envs.sandbox.plain import PlainBackend
from envs.session import Session
from envs.tasks import swe_mini
from envs.tasks.package import load_task
from harness import group
from harness.chat import ChatFormat
from harness.group import GroupRequest
from harness.rollout import RolloutSettings, run_one

KEY = b"a key of this test"


def test_a_task_becomes_evidence_and_evidence_becomes_a_published_policy(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = swe_mini.generate(tmp_path / "tasks", train=1, heldout=0, seed=5)[0]
    task = load_task(folder)
    task = replace(task, limits=replace(task.limits, max_turns=3, max_tokens=48))
    tokenizer = small.build_tokenizer([task.instruction], vocabulary=400)
    model = small.build_model(
        vocabulary=len(tokenizer), hidden_size=128, layers=2, heads=2, head_dim=64, context=1024, seed=5
    )
    recipe = recipes.compose({"penalty": []}, base="rloo")
    learner = Learner(model, recipe, LearnerConfig(learning_rate=1e-3), vocab_size=len(tokenizer))
    first = publish.publish(learner.policy, tmp_path / "versions", parent=None, step=0, tokenizer=tokenizer)

    async def attempts() -> Group:
        backend = PlainBackend(tmp_path / "sandboxes")
        chat = ChatFormat(tokenizer)
        sampler = LocalSampler(
            publish.load_published(first),
            stop_token_ids=chat.stop_token_ids,
            name="small",
            version=first.number,
            max_context=1000,
            seed=5,
        )
        try:
            admission = await admit(task, backend, light=True)
            assert admission.valid, admission.reasons

            async def make(task_, group_id, index, attempt):
                return await run_one(
                    task_,
                    sampler=sampler,
                    chat=chat,
                    backend=backend,
                    group_id=group_id,
                    index=index,
                    attempt=attempt,
                    signing_key=KEY,
                    admission=admission,
                    settings=RolloutSettings(sampling=SamplingParams(max_tokens=16)),
                    open_session=Session.open,
                )

            outcome = await group.run(GroupRequest(id="walk", task=task, size=2), make)
            assert outcome.faulted == ()
            return outcome.group
        finally:
            await sampler.close()
            await backend.close()

    made = asyncio.run(attempts())
    for trajectory in made.trajectories:
        assert trajectory.termination is not Termination.FAULT
        assert trajectory.reward == 0.0, "sixteen random tokens repair nothing"
        for call in trajectory.calls:
            assert token_hash(trajectory.prompt_ids(call.id)) == call.prompt_hash
            assert set(call.versions_T()) == {first.number}

    with Store.open(tmp_path / "store.db") as store:
        run = store.begin_run("walk", config={}, algo=recipe.name, seed=5)
        store.publish(run.id, first)
        store.add_group(run.id, made)
        assert tuple(store.iter_trajectories(run.id)) == made.trajectories

        rewarded = _with_rewards(made, (1.0, 0.0))
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        report = learner.update([rewarded], version=first.number)
        assert report.taken == 1
        assert report.refused == ()
        assert any(not torch.equal(before[name], p) for name, p in model.named_parameters())

        second = publish.publish(
            learner.policy, tmp_path / "versions", parent=first, step=learner.optimizer_step
        )
        assert second.number == first.number + 1
        ids = [t.id for t in made.trajectories]
        assert store.record_update(run.id, 1, ids, second, report.metrics)
        assert store.unconsumed(run.id) == ()
        assert store.verify(run.id, key=KEY).ok


def _with_rewards(made: Group, rewards: tuple[float, ...]) -> Group:
    """The same group as if its members had earned these rewards, so that there is something to learn."""
    members: list[Trajectory] = [
        replace(t, verdict=replace(t.verdict, reward=reward))
        for t, reward in zip(made.trajectories, rewards, strict=True)
    ]
    return replace(made, trajectories=tuple(members))
