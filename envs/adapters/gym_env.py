"""A tool environment as a `gymnasium.Env`: text in, text out, the verdict's reward at the end. Extra `gym`.

An action is one tool call as JSON, `{"name": …, "arguments": {…}}`; an observation is what the tool says, and
after `reset` the instruction. The reward is 0 until the attempt is over, by `done` (terminated) or by the
limit of turns (truncated). A fault that is not the policy's is raised, never a reward of 0.
"""

from __future__ import annotations

import asyncio
import json
import string
from typing import Any, SupportsFloat

import gymnasium
from gymnasium import spaces

from agentrl.errors import SandboxError
from agentrl.types import Action, Termination
from envs.environment import HELDOUT_SEEDS, ToolEnvironment
from envs.evidence import Admission
from envs.inprocess import EnvironmentSession, admit

ACTION_CHARS = 10_000
_SIGNING_KEY = b"gymnasium"
"""Verdicts are not kept here; the signature is only checked in stored runs."""


class ToolEnv(gymnasium.Env[str, str]):
    """One tool environment; each `reset(seed)` is the problem of that seed."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  (gymnasium's own)

    def __init__(self, environment: ToolEnvironment) -> None:
        self.environment = environment
        characters = frozenset(string.printable)
        self.action_space = spaces.Text(min_length=0, max_length=ACTION_CHARS, charset=characters)
        longest = 8 * environment.limits.observation_bytes
        self.observation_space = spaces.Text(min_length=0, max_length=longest, charset=characters)
        self._runner = asyncio.Runner()
        self._session: EnvironmentSession | None = None
        self._turns = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """The instruction of the problem of the seed, or of a random one. `info` has the tools.

        Raises:
            BoundaryError: the environment's own code failed, or its problem can not be graded.
        """
        super().reset(seed=seed)
        chosen = seed if seed is not None else int(self.np_random.integers(HELDOUT_SEEDS))
        self._end()
        self._session = self._runner.run(self._opened(chosen))
        self._turns = 0
        return _plain(self._session.task.instruction), {
            "seed": chosen,
            "tools": json.dumps(self._session.tools),
        }

    async def _opened(self, seed: int) -> EnvironmentSession:
        task = self.environment.task(seed)
        proof: Admission = await admit(task, self.environment, backend="gymnasium", light=True)
        return await EnvironmentSession.open(
            task, self.environment, session_id=f"gym-{seed}", signing_key=_SIGNING_KEY, admission=proof
        )

    def step(self, action: str) -> tuple[str, SupportsFloat, bool, bool, dict[str, Any]]:
        """Perform one call. `info` has the verdict's components when the attempt is over.

        Raises:
            BoundaryError: what failed was not the policy's.
        """
        session = self._session
        if session is None:
            raise gymnasium.error.ResetNeeded("Call reset first.")
        self._turns += 1
        seen = self._runner.run(session.call(_action(action, self._turns)))
        terminated = session.submitted
        truncated = not terminated and self._turns >= session.task.limits.max_turns
        info: dict[str, Any] = {"is_error": seen.is_error}
        reward = 0.0
        if terminated or truncated:
            reason = Termination.FINISHED if terminated else Termination.MAX_TURNS
            verdict = self._runner.run(session.finalize(termination=reason, fault=None))
            self._end()
            if verdict.reward is None:
                assert verdict.fault is not None
                raise SandboxError(verdict.fault.message, owner=verdict.fault.owner, code=verdict.fault.code)
            reward = verdict.reward
            info["components"] = dict(verdict.components)
        return _plain(seen.text), reward, terminated, truncated, info

    def close(self) -> None:
        """End the attempt, if one is open. Idempotent."""
        self._end()
        self._runner.close()

    def _end(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            self._runner.run(session.close())


def _action(text: str, number: int) -> Action:
    """A call from JSON; what can not be read is an action with its error."""
    id = f"t{number:04d}a000"
    try:
        call = json.loads(text)
        return Action(id=id, tool=str(call["name"]), arguments=dict(call.get("arguments", {})))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        wanted = '{"name": "tool", "arguments": {}}'
        return Action(id=id, tool="format_error", error=f"Nothing was run: write a call as {wanted}.")


def _plain(text: str) -> str:
    """Characters outside the observation space as escapes, so that every observation is in it."""
    return "".join(c if c in string.printable else c.encode("unicode_escape").decode() for c in text)
