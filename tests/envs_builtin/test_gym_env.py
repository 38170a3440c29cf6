"""A tool environment as a Gymnasium environment."""

from __future__ import annotations

import json

import pytest
from env_sessions import Plain
from gymnasium.utils.env_checker import check_env

from agentrl.errors import SandboxError
from envs import registry
from envs.adapters.gym_env import ToolEnv
from envs.environment import Step, ToolEnvironment, of_class


def written(step: Step) -> str:
    return json.dumps({"name": step.tool, "arguments": dict(step.arguments)})


@pytest.mark.parametrize("name", ["calculator", "search"])
@pytest.mark.filterwarnings("ignore")
def test_gymnasiums_own_checker_accepts_it(name: str) -> None:
    found = registry.get(name)
    assert isinstance(found, ToolEnvironment)
    made = ToolEnv(found)
    check_env(made, skip_render_check=True)
    made.close()


def test_the_solution_earns_the_reward_and_terminates() -> None:
    found = registry.get("calculator")
    assert isinstance(found, ToolEnvironment)
    made = ToolEnv(found)
    first, info = made.reset(seed=5)
    assert first == found.problem(5).instruction
    assert "calculate" in info["tools"]
    compute, submit = found.problem(5).gold
    seen, reward, terminated, truncated, _ = made.step(written(compute))
    assert (seen, reward, terminated, truncated) == (str(found.problem(5).data["answer"]), 0.0, False, False)
    _, reward, terminated, truncated, info = made.step(written(submit))
    assert (reward, terminated, truncated, info["components"]) == (1.0, True, False, {"right": 1.0})
    made.close()


def test_the_limit_of_turns_truncates_and_nonsense_is_an_observation() -> None:
    made = ToolEnv(of_class(Plain).with_limits(max_turns=2))
    made.reset(seed=1)
    seen, *_, info = made.step("nonsense")
    assert info["is_error"]
    assert seen.startswith("Nothing was run")
    _, reward, terminated, truncated, _ = made.step("[]")
    assert (reward, terminated, truncated) == (0.0, False, True)
    made.close()


def test_a_fault_of_the_environment_is_raised_and_not_a_reward() -> None:
    made = ToolEnv(of_class(Plain))
    made.reset(seed=1)
    with pytest.raises(SandboxError, match="KeyError"):
        made.step(written(Step(tool="crash")))
    made.close()
