"""Methods that need no row of their own: each as an algorithm section of a run file, and what else it takes.

A method is here when it is a recipe with other choices, or when what is new in it happens before the learner:
which tasks are sampled and how often, how a trajectory is produced, what grades it. The learner then sees
ordinary evidence, and the section says which recipe trains on it. `agentrl recipes` prints the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Where = Literal["recipe", "plan", "rollout", "environment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One method without a recipe of its own."""

    name: str
    where: Where
    """Where the method lives: in the choices of a recipe, in which tasks are attempted and how often (plan),
    in how a trajectory is made (rollout), in what answers and grades the agent (environment)."""
    section: Mapping[str, object] = field(default_factory=dict)
    """What a run file's `train.recipe` and `train.overrides` say, as `recipes.compose` takes it."""
    how: str
    """One sentence: what stands for the method's idea."""


METHODS: tuple[Method, ...] = (
    Method(
        name="Monte-Carlo actor-critic",
        where="recipe",
        section={"recipe": "actor-critic", "advantage": {"operator": "gae_tokens", "lambda_policy": 1.0}},
        how="lambda = 1 makes GAE the return minus the value",
    ),
    Method(
        name="dual-clip PPO",
        where="recipe",
        section={"recipe": "ppo", "surrogate.dual": 3.0},
        how="a number of ppo_clip",
    ),
    Method(
        name="RLHF with the KL in the loss, entropy bonus",
        where="recipe",
        section={"recipe": "ppo", "penalty": {"kl_k2": {"coefficient": 0.02}, "entropy_bonus": True}},
        how="penalty terms; KL in reward and loss at once is refused",
    ),
    Method(
        name="distributional critic (HL-Gauss)",
        where="recipe",
        section={"recipe": "vapo", "value": {"operator": "hl_gauss", "bins": 101}},
        how="a classification head over bins, same targets",
    ),
    Method(
        name="on-policy distillation by JSD",
        where="recipe",
        section={"recipe": "opd-full", "teacher": {"divergence": {"kind": "jsd"}}},
        how="the whole-vocabulary divergence of another kind; `forward` is the forward KL",
    ),
    Method(
        name="process reward model",
        where="environment",
        section={"recipe": "grpo", "token_reward": "turn_rewards", "advantage": "turn_returns"},
        how="the scorer's step rewards are turn rewards, returned to their turn",
    ),
    Method(
        name="outcome reward model, ReTool, ARTIST, WebRL, UI-R1",
        where="environment",
        section={"recipe": "grpo"},
        how="the grader's scalar, whoever computes it",
    ),
    Method(
        name="ZeroSearch, Simia, AWM, MUA-RL",
        where="environment",
        section={"recipe": "grpo"},
        how="simulated search, feedback, worlds and users are environments; their tokens are observations",
    ),
    Method(
        name="S2R, PAG",
        where="environment",
        section={"recipe": "mt-grpo"},
        how="attempt, verification and revision are turns; the verification's reward is its turn's",
    ),
    Method(
        name="PivoARL, PivotRL, prefix replay",
        where="rollout",
        section={"recipe": "grpo"},
        how="the kept prefix is the prompt of the new suffix: only what is sampled anew trains",
    ),
    Method(
        name="TreeRL",
        where="rollout",
        section={"recipe": "treerpo"},
        how="branches are calls with a common parent; node values from the leaves below",
    ),
    Method(
        name="AgentRL cross-policy sampling",
        where="rollout",
        section={"recipe": "grpo-decoupled"},
        how="each token keeps the log-prob of the policy that sampled it; the correction is truncated",
    ),
    Method(
        name="WebAgent-R1, CompactionRL",
        where="rollout",
        section={"recipe": "ppo"},
        how="a compaction is a branch with its reason; GAE goes on with the next action token after it",
    ),
    Method(
        name="MAGRPO",
        where="rollout",
        section={"recipe": "dr-grpo"},
        how="a group per task and role; the shared reward is every role's",
    ),
    Method(
        name="ARPO",
        where="plan",
        section={"recipe": "repo"},
        how="select.failure_to_replace names the failure of an all-fail group that a stored success replaces",
    ),
    Method(
        name="ExGRPO",
        where="plan",
        section={"recipe": "repo"},
        how="stored trajectories, chosen by success and entropy, enter groups with their own log-probs",
    ),
    Method(
        name="GRESO, Prompt Replay, adaptive allocation, CuSearch",
        where="plan",
        section={"recipe": "dapo"},
        how="which tasks are attempted and how often; what comes back without spread is dropped and counted",
    ),
    Method(
        name="ThinkPrune",
        where="plan",
        section={"recipe": "grpo", "penalty": "none"},
        how="rollout.max_tokens is tightened from run to run; what exceeds it is truncated and fails",
    ),
)
"""All of them, by where they live."""
