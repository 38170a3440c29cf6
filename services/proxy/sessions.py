"""Sessions of a proxy that stands alone: somebody else's agent, in somebody else's environment, recorded.

Each session is one trajectory: opened, talked to through its own base URL and key, closed. It was graded by
nobody, so its verdict has no reward and says so; its calls are evidence all the same (of what was asked and
sampled, for imitation, for the fidelity report).
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import ConfigError
from agentrl.inference.sampler import Sampler
from agentrl.types import (
    Action,
    Fault,
    GraderSpec,
    Limits,
    Observation,
    SamplingParams,
    SandboxSpec,
    Split,
    Task,
    Termination,
    Trajectory,
    Verdict,
    content_hash,
)
from envs import grading
from harness.attempt import Attempt, Seconds
from harness.chat import ChatFormat
from harness.prompt import SYSTEM_PROMPT
from harness.proxy.door import Door
from harness.proxy.model import ProxiedModel, Rules
from harness.recorder import Recorder

NOT_GRADED = Fault(
    owner="environment",
    code="not_graded",
    phase="finalize",
    retryable=False,
    message="A session of a proxy without an environment: nobody graded what the agent did.",
)
LONG_S = 30 * 86400.0
MANY = 1 << 30


class _Nowhere:
    """The environment of a session without one."""

    def __init__(self) -> None:
        self.tools: list[dict[str, Any]] = []
        self.submitted = False

    async def call(self, action: Action) -> Observation:
        raise AssertionError("a proxied agent acts by itself")

    async def finalize(self, *, termination: Termination, fault: Fault | None) -> Verdict:
        raise AssertionError("a session of a proxy is closed, not judged")

    async def close(self) -> None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How sessions are sampled."""

    sampling: SamplingParams = SamplingParams()  # noqa: RUF009  (frozen)
    max_context: int = MANY
    sample_deadline_s: float = 600.0
    rules: Rules = Rules(end_on_fault=False)  # noqa: RUF009  (frozen)
    require_log_probs: bool = True
    signing_key: bytes = b""


@dataclass(slots=True, eq=False)
class Live:
    """An open session."""

    id: str
    name: str
    harness: str
    key: str
    door: Door
    recorder: Recorder
    started_at: float = field(default_factory=time.time)

    @property
    def calls(self) -> int:
        return len(self.recorder.calls)


class Sessions:
    """All sessions of one proxy process. `kept` is called with the trajectory of each that was closed."""

    def __init__(
        self,
        sampler: Sampler,
        chat: ChatFormat,
        settings: Settings,
        *,
        prefix: str,
        kept: Callable[[Trajectory], None] = lambda _: None,
    ) -> None:
        self.sampler = sampler
        self._chat = chat
        self._settings = settings
        self._prefix = prefix
        self._kept = kept
        self._live: dict[str, Live] = {}
        self._opened = 0

    def __len__(self) -> int:
        return len(self._live)

    def open(self, name: str, *, harness: str = "unknown") -> Live:
        """A new session. Raises `ConfigError` for a name that is none."""
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", name):
            raise ConfigError(f"'{name}' is no session name.", fix="Use letters, digits, dots and dashes.")
        settings = self._settings
        session_id = f"{self._prefix}.{self._opened}"
        self._opened += 1
        recorder = Recorder(vocab_size=self._chat.vocab_size, require_log_probs=settings.require_log_probs)
        stops = tuple(dict.fromkeys((*settings.sampling.stop_token_ids, *self._chat.stop_token_ids)))
        params = SamplingParams(
            temperature=settings.sampling.temperature,
            top_p=settings.sampling.top_p,
            top_k=settings.sampling.top_k,
            max_tokens=settings.sampling.max_tokens,
            stop_token_ids=stops,
            seed=settings.sampling.seed,
        )
        attempt = Attempt(
            _task(name),
            _Nowhere(),
            id=session_id,
            sampler=self.sampler,
            chat=self._chat,
            recorder=recorder,
            sampling=params,
            context=settings.max_context,
            sample_deadline_s=settings.sample_deadline_s,
            system_prompt=SYSTEM_PROMPT,
            seconds=Seconds(),
        )
        key = secrets.token_urlsafe(24)
        live = Live(
            id=session_id,
            name=name,
            harness=harness,
            key=key,
            door=Door(ProxiedModel(attempt, settings.rules), key=key),
            recorder=recorder,
        )
        self._live[session_id] = live
        return live

    def get(self, session_id: str) -> Live | None:
        return self._live.get(session_id)

    def close(self, session_id: str) -> Trajectory:
        """End a session and keep what it recorded. `KeyError` when there is none."""
        live = self._live.pop(session_id)
        task = _task(live.name)
        verdict = grading.unscored(NOT_GRADED, (), isolation="none")
        trajectory = Trajectory(
            id=live.id,
            task_id=task.id,
            task_revision=task.revision,
            group_id=live.id,
            index=0,
            harness=live.harness,
            split=Split.TRAIN,
            calls=live.recorder.calls,
            turns=live.door.model.turns(),
            termination=Termination.FINISHED,
            verdict=grading.sign(verdict, self._settings.signing_key),
            started_at=live.started_at,
            finished_at=max(live.started_at, time.time()),
            metadata={
                **live.door.model.facts(),
                "retries_joined": live.door.retries_joined,
                "generated_tokens": live.recorder.generated_tokens,
            },
        )
        self._kept(trajectory)
        return trajectory

    def close_all(self) -> int:
        """End every session; returns how many there were."""
        ids = list(self._live)
        for session_id in ids:
            self.close(session_id)
        return len(ids)


def _task(name: str) -> Task:
    return Task(
        id=f"proxy/{name}",
        revision=content_hash(b"proxy", name.encode()),
        path="",
        instruction="",
        sandbox=SandboxSpec(image="none"),
        tools=(),
        grader=GraderSpec(kind="environment"),
        limits=Limits(max_turns=MANY, max_tokens=MANY, max_context=MANY, wall_s=LONG_S),
    )
