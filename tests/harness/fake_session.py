"""A session without a sandbox: it answers at once, and faults where a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from agentrl.types import (
    Action,
    Evidence,
    EvidenceKey,
    Fault,
    GraderSpec,
    Limits,
    Observation,
    SandboxSpec,
    Task,
    Termination,
    Verdict,
)
from envs.evidence import Admission
from envs.sandbox.contract import Backend

KEY = b"test key"
SCHEMA = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


def task(**limits: Any) -> Task:
    return Task(
        id="suite/one",
        revision="0" * 64,
        path="",
        instruction="Fix the bug in add.",
        sandbox=SandboxSpec(image="none"),
        tools=("bash", "submit"),
        grader=GraderSpec(kind="tests"),
        limits=Limits(**limits),
    )


class FakeSession:
    """`respond` makes the observation text of an action, or raises what the environment would."""

    def __init__(self, respond: Callable[[Action], str], *, reward: float = 1.0) -> None:
        self.tools: list[dict[str, Any]] = [SCHEMA]
        self.submitted = False
        self.closed = 0
        self.ran: list[Action] = []
        self.finalized: list[Termination] = []
        self._respond = respond
        self._reward = reward

    async def call(self, action: Action) -> Observation:
        self.ran.append(action)
        await asyncio.sleep(0)
        if action.tool == "submit":
            self.submitted = True
        return Observation(action_id=action.id, text=self._respond(action))

    async def finalize(self, *, termination: Termination, fault: Fault | None) -> Verdict:
        self.finalized.append(termination)
        unscored = fault is not None and not fault.scored
        return Verdict(
            reward=None if unscored else self._reward,
            evidence=tuple(Evidence(key=key, holds=True) for key in EvidenceKey),
            fault=fault,
            grader_revision="fake/1",
            isolation="none",
        )

    async def close(self) -> None:
        self.closed += 1


class FakeSessions:
    """Opens fake sessions and keeps them: `live` must be 0 when all is over."""

    def __init__(
        self,
        respond: Callable[[Action], str] = lambda action: "ok",
        *,
        opening: Callable[[str], None] = lambda session_id: None,
        reward: float = 1.0,
    ) -> None:
        self.opened: dict[str, FakeSession] = {}
        self._respond = respond
        self._opening = opening
        self._reward = reward

    async def __call__(
        self,
        task: Task,
        backend: Backend,
        *,
        session_id: str,
        signing_key: bytes,
        admission: Admission | None,
    ) -> FakeSession:
        self._opening(session_id)
        session = FakeSession(self._respond, reward=self._reward)
        self.opened[session_id] = session
        return session

    @property
    def live(self) -> int:
        return sum(session.closed == 0 for session in self.opened.values())


class NoBackend:
    """A backend that is never asked for anything but its isolation."""

    name = "none"
    isolation = "none"
