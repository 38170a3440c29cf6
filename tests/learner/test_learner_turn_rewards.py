"""What a grader says of single steps reaches the turns, the learner's columns and the recipes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_given import call, trajectory, verdict

from agentrl.algo import recipes
from agentrl.algo.objective import prepare
from agentrl.errors import EvidenceError
from agentrl.learner.evidence import gather
from agentrl.types import Action, Group, Task, Termination, Trajectory, Turn
from envs.evidence import Admission
from envs.sandbox.plain import PlainBackend
from envs.session import Session
from envs.session import prepare as prepare_image
from envs.tasks import package

TESTS = "from cart import total\n\n\ndef test_total():\n    assert total(2, 3) == 5\n"
SUBMIT = ("submit", {})
FIX = ("replace_in_file", {"path": "cart.py", "old": "a - b", "new": "a + b"})
MALFORMED = ("bash", None)


def lay_task(folder: Path) -> Task:
    """A task whose graders are the tests, and at half the weight what single steps earn."""
    rules = [
        {"tool": "run_tests", "value": 0.25, "once": True},
        {"is_error": True, "value": -0.5},
    ]
    config = {
        "schema_version": "1.4",
        "task": {"name": "small/cart"},
        "environment": {"workdir": "/app", "memory_mb": 256},
        "verifier": {"timeout_sec": 20},
        "metadata": {
            "agentrl": {
                "grader": "graders",
                "fail_to_pass": ["test_cart.py::test_total"],
                "pass_to_pass": [],
                "graders": [
                    {"name": "fixed", "use": "tests"},
                    {"name": "care", "use": "process", "weight": 0.5, "options": {"rules": rules}},
                ],
            }
        },
    }
    package.write_task(
        folder,
        config=config,
        instruction="Fix total.\n",
        environment={"cart.py": "def total(a, b):\n    return a - b\n", "tests/test_cart.py": TESTS},
        tests={"test_cart.py": TESTS},
        solution="#!/bin/bash\nsed -i 's/a - b/a + b/' cart.py\n",
    )
    return package.load_task(folder)


def attempted(task: Task, id: str, *said: tuple[tuple[str, dict[str, Any] | None], ...]) -> Trajectory:
    """A real attempt, a tuple of actions per turn; its calls have two tokens each."""

    async def run() -> Trajectory:
        backend = PlainBackend()
        image = await prepare_image(task, backend)
        admission = Admission(
            task_id=task.id, revision=task.revision, image_digest=image, backend="plain", valid=True,
            mode="light", repeats=1, runtime_s=0.1, admitted_at=1.0,
        )  # fmt: skip
        turns, calls = [], []
        prompt: list[int] = []
        async with await Session.open(
            task, backend, session_id=id, signing_key=b"key", admission=admission
        ) as session:
            for number, asked in enumerate(said):
                actions, seen = [], []
                for at, (tool, arguments) in enumerate(asked):
                    error = "not JSON" if arguments is None else None
                    action = Action(id=f"{number}.{at}", tool=tool, arguments=arguments or {}, error=error)
                    actions.append(action)
                    answered = await session.call(action) if error is None else None
                    seen.append(answered or replace(seen[-1], action_id=action.id))
                parent = calls[-1] if calls else None
                whole = [*prompt, *(parent.generation_token_ids if parent else ()), 7]
                calls.append(call(f"{id}.{number}", whole, (3, 4), parent=parent, parent_prompt=prompt))
                prompt = whole
                turns.append(Turn(call_id=calls[-1].id, actions=tuple(actions), observations=tuple(seen)))
            judged = await session.finalize(termination=Termination.FINISHED, fault=None)
        await backend.close()
        return replace(trajectory(calls, id=id), turns=tuple(turns), verdict=judged)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Group:
    task = lay_task(tmp_path_factory.mktemp("turns") / "cart")
    missing = ("read_file", {"path": "nowhere.py"})
    first = attempted(task, "a", (("run_tests", {}),), (missing, MALFORMED), (FIX,), (SUBMIT,))
    second = attempted(task, "b", (("bash", {"command": "true"}),), (FIX,), (SUBMIT,))
    return Group(id="g0", task_id="suite/g0", trajectories=(first, second))


def test_what_steps_earned_stands_on_their_turns(group: Group) -> None:
    first, second = group.trajectories
    assert first.reward == 1.0 + 0.5 * (0.25 - 0.5)
    assert first.turn_rewards == (0.125, -0.25, 0.0, 0.0), "the malformed action never reached the session"
    assert (second.reward, second.turn_rewards) == (1.0, (0.0, 0.0, 0.0))


def test_turn_rewards_stand_on_the_last_token_of_their_turn_and_are_counted_once(group: Group) -> None:
    batch = gather([group], version=0, turn_rewards=True)
    assert batch.columns.reward_S.tolist() == [1.0, 1.0]
    assert batch.columns.turn_reward_N is not None
    assert batch.columns.turn_reward_N.tolist() == [0, 0.125, 0, -0.25, 0, 0, 0, 0] + [0] * 6
    assert batch.facts["turn_reward/trajectories"] == 1
    plain = gather([group], version=0)
    assert plain.columns.reward_S.tolist() == [0.875, 1.0]
    assert plain.columns.turn_reward_N is None


def test_mt_grpo_compares_the_same_turn_of_the_members(group: Group) -> None:
    recipe = recipes.get("mt-grpo")
    assert "turn_reward_N" in recipe.columns
    prepared = prepare(recipe, gather([group], version=0, turn_rewards=True).columns)
    # turn 0: 0.125 and 0 have mean 0.0625 and deviation 0.0625, so z = ±1; turn 1: -0.25 and 0, the other way
    # round; the outcomes are equal
    found = prepared.advantage_N.tolist()
    assert found[:4] == pytest.approx([1, 1, -1, -1], abs=1e-4)
    assert found[8:12] == pytest.approx([-1, -1, 1, 1], abs=1e-4)
    assert found[4:8] == found[12:] * 2 == [0.0] * 4


def test_a_process_reward_recipe_returns_every_later_step_to_a_turn(group: Group) -> None:
    recipe = recipes.get("igpo")
    prepared = prepare(recipe, gather([group], version=0, turn_rewards=True).columns)
    assert torch.isfinite(prepared.advantage_N).all()
    first_turns = prepared.advantage_N[[0, 8]]
    assert first_turns[0] < first_turns[1], "what the first earns with its tests it loses, and more, after"


def test_a_rewarded_step_that_is_in_no_turn_is_refused_by_recipes_with_turn_rewards() -> None:
    one = trajectory([call("c", [1, 2], [3, 4])])
    judged = replace(verdict(1.0), components={"step/0001": 0.5})
    group = Group(id="g0", task_id="suite/g0", trajectories=(replace(one, verdict=judged),))
    with pytest.raises(EvidenceError, match="step 1 was rewarded, and the turns hold 0 steps"):
        gather([group], version=0, turn_rewards=True)
    assert gather([group], version=0).columns.reward_S.tolist() == [1.0]
    assert gather([group], version=0).columns.components_SK is None, "a step is no component of all members"
