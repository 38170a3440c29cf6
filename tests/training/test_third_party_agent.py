"""A run whose agent is somebody else's program: sampled through the proxy, recorded, graded, trained on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from agentrl import config as configuration
from agentrl.learner import samples
from agentrl.store.store import Store
from agentrl.training import loop
from agentrl.training.events import Silent
from agentrl.types import Termination

MINI = os.environ.get("AGENTRL_TEST_MINI", "")


@pytest.mark.parametrize(
    ("agent", "context", "rollout"),
    [
        pytest.param("shell-loop", 1024, {}, id="shell-loop"),
        pytest.param(
            "mini-swe-agent",
            4096,
            {"agent_folder": MINI},
            id="mini-swe-agent",
            marks=pytest.mark.skipif(
                not MINI,
                reason="AGENTRL_TEST_MINI names no folder of `pip install --target FOLDER mini-swe-agent`",
            ),
        ),
    ],
)
def test_a_run_trains_on_what_a_third_party_agent_sampled(
    agent: str, context: int, rollout: dict[str, Any], tmp_path: Path
) -> None:
    updates, size = 2, 2
    run = configuration.parse(
        {
            "run": {"name": "theirs", "dir": str(tmp_path / "run"), "threads": 1},
            "tasks": {"train": 1, "heldout": 1},
            "sandbox": {"backend": "plain"},
            "policy": {"small": {"hidden_size": 128, "heads": 2, "context": context}},
            "rollout": {"agent": agent, "groups": 1, "group_size": size, "max_tokens": 8, **rollout},
            "train": {
                "recipe": "reinforce",
                "updates": updates,
                "learning_rate": 1e-3,
                # What an untrained policy does earns nothing: this alone moves it.
                "overrides": {"penalty": {"entropy_bonus": {"coefficient": 0.1}}},
            },
        }
    )
    noted = Silent()
    done = loop.run(run, listener=noted)
    assert done.faults == 0
    with Store.open(done.store) as store:
        versions = store.policy_versions(done.run_id)
        made = list(store.iter_trajectories(done.run_id, phase="train"))
        assert store.verify(done.run_id).ok
    assert [v.number for v in versions] == list(range(updates + 1))
    assert len({v.content_hash for v in versions}) == updates + 1, "every update moved the weights"
    assert len(made) == updates * size
    for trajectory in made:
        assert trajectory.harness.partition("/")[0] == agent
        assert trajectory.termination is Termination.FINISHED
        assert trajectory.reward == 0.0
        rows = samples.build(trajectory)
        assert rows.n_actions == sum(len(call.generation_token_ids) for call in trajectory.calls)
        assert rows.valid_N.all()
    sampled = [{v for c in t.calls for v in c.versions_T()} for t in made]
    assert sorted(v for one in sampled for v in one) == [n for n in range(updates) for _ in range(size)]
    for numbers in noted.numbers:
        assert numbers["trajectories/trained"] == size
        assert numbers["tokens/excluded"] == 0
        assert numbers["mismatch/abs_max"] < 1e-4, "the learner finds what the sampler recorded"
