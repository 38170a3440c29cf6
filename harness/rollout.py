"""One attempt at one task: from a task to a finished `Trajectory`, whatever happens on the way.

Every end is one of the closed reasons of `Termination`. Who is to blame is read off the exception that
crossed a boundary, never off text. A budget that ends (also the wall clock) leaves the partial state to be
graded; a fault that is not the policy's leaves a verdict without a reward. The session is always closed,
also on cancellation, which passes through and leaves no trajectory.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from agentrl.errors import BoundaryError, ConfigError, EvidenceError, SandboxError
from agentrl.inference.sampler import Sampler
from agentrl.types import (
    Fault,
    JsonScalar,
    SamplingParams,
    Task,
    Termination,
    Trajectory,
    Turn,
    Verdict,
)
from envs import grading
from envs.evidence import Admission, fault_of
from envs.sandbox.contract import Backend, time_multiplier
from envs.session import Session
from harness.agent import Agent, ToolAgent
from harness.attempt import Attempt, OutOfBudget, Seconds, SessionLike, slower_by
from harness.chat import ChatFormat
from harness.prompt import SYSTEM_PROMPT
from harness.recorder import Recorder

OPEN_DEADLINE_S = 600.0
"""Image preparation and sandbox creation together, queueing included."""
FINALIZE_GRACE_S = 600.0
"""What finalizing may take beyond twice the grader's own limit (it may verify twice)."""
CLOSE_DEADLINE_S = 60.0

_ENDED_BY = {"policy": Termination.FINISHED, "budget": Termination.WALL_CLOCK}
"""How an attempt ended whose fault is scored: the policy did it to itself, or time ran out inside a boundary.
The fault stays in the verdict."""

UNJUDGED = Fault(
    owner="task",
    code="not_admitted",
    phase="verify",
    retryable=False,
    message="Not judged: the task was not admitted, so nothing can be earned on it.",
)
log = logging.getLogger(__name__)
T = TypeVar("T")


class OpenSession(Protocol):
    """`Session.open`, or anything that makes sessions."""

    def __call__(
        self,
        task: Task,
        backend: Backend,
        *,
        session_id: str,
        signing_key: bytes,
        admission: Admission | None,
    ) -> Awaitable[SessionLike]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """How attempts are made; the same for all members of a group."""

    sampling: SamplingParams = SamplingParams()  # noqa: RUF009  (frozen)
    """`max_tokens` bounds one call; stop tokens of the chat format are added."""
    max_context: int | None = None
    """Tokens that the model holds; None when the task's limit is the only one."""
    sample_deadline_s: float = 600.0
    system_prompt: str = SYSTEM_PROMPT
    require_log_probs: bool = True
    """Refuse a model without log-probs. False for a scripted demonstrator."""


async def run_one(
    task: Task,
    *,
    sampler: Sampler,
    chat: ChatFormat,
    backend: Backend,
    group_id: str,
    index: int,
    signing_key: bytes,
    admission: Admission | None = None,
    agent: Agent | None = None,
    settings: RolloutSettings | None = None,
    attempt: int = 1,
    open_session: OpenSession = Session.open,
    judge: bool = True,
) -> Trajectory:
    """Make one attempt and return everything it left behind.

    Args:
        task: what to do.
        sampler: the policy; its version at the start is noted as `submitted_version`.
        chat: the tokenizer's chat format.
        backend: where the sandbox comes from.
        group_id: id of the group, unique in a run.
        index: member number in the group.
        signing_key: signs the verdict.
        admission: proof that the task can be graded; without it there is no reward.
        agent: default `ToolAgent()`.
        settings: default `RolloutSettings()`.
        attempt: number of the try of this member, from 1; part of the trajectory's id.
        open_session: how a session is made.
        judge: False for an attempt on which nothing can be earned: no verifier is run, and the verdict says
            that the task was not admitted.

    Raises:
        ConfigError: the user's mistake; it would end every attempt alike.
        asyncio.CancelledError: passed through after the session was closed.
    """
    agent = agent or ToolAgent()
    settings = settings or RolloutSettings()
    trajectory_id = f"{group_id}.{index}.{attempt}"
    recorder = Recorder(vocab_size=chat.vocab_size, require_log_probs=settings.require_log_probs)
    seconds = Seconds()
    turns: list[Turn] = []
    notes: dict[str, JsonScalar] = {}
    started_at = time.time()
    submitted_version = sampler.policy_version
    session: SessionLike | None = None
    fault: Fault | None = None
    termination = Termination.FAULT
    try:
        try:
            with _timed(seconds, "open"):
                session = await _within(
                    open_session(
                        task,
                        backend,
                        session_id=trajectory_id,
                        signing_key=signing_key,
                        admission=admission,
                    ),
                    time_multiplier(backend) * OPEN_DEADLINE_S,
                    "open",
                )
            one = Attempt(
                task,
                session,
                id=trajectory_id,
                sampler=sampler,
                chat=chat,
                recorder=recorder,
                sampling=_sampling(settings.sampling, chat),
                context=min(task.limits.max_context, settings.max_context or task.limits.max_context),
                sample_deadline_s=settings.sample_deadline_s,
                system_prompt=settings.system_prompt,
                seconds=seconds,
            )
            turns, notes = one.turns, one.notes
            termination = await agent.run(one)
        except OutOfBudget as spent:
            termination = spent.termination
        except ConfigError:
            raise
        except Exception as error:  # the boundary of an attempt: classified and recorded
            fault = _fault(error, trajectory_id)
            termination = _ENDED_BY.get(fault.owner, Termination.FAULT)
        if fault is None and not judge:
            fault = UNJUDGED
        with _timed(seconds, "finalize"):
            verdict = await _verdict(
                task, backend, session, termination, fault, signing_key, trajectory_id=trajectory_id
            )
    finally:
        if session is not None:
            await _close(session, trajectory_id)
    finished_at = max(started_at, time.time())
    metadata: dict[str, JsonScalar] = {
        "attempt": attempt,
        "submitted_version": submitted_version,
        "generated_tokens": recorder.generated_tokens,
        "seconds_open": round(seconds.open, 4),
        "seconds_model": round(seconds.model, 4),
        "seconds_tools": round(seconds.tools, 4),
        "seconds_queue": round(seconds.queue, 4),
        "seconds_finalize": round(seconds.finalize, 4),
        **notes,
    }
    return Trajectory(
        id=trajectory_id,
        task_id=task.id,
        task_revision=task.revision,
        group_id=group_id,
        index=index,
        harness=agent.name,
        split=task.split,
        calls=recorder.calls,
        turns=tuple(turns),
        termination=termination,
        verdict=verdict,
        started_at=started_at,
        finished_at=finished_at,
        metadata=metadata,
    )


def _sampling(params: SamplingParams, chat: ChatFormat) -> SamplingParams:
    stops = tuple(dict.fromkeys((*params.stop_token_ids, *chat.stop_token_ids)))
    return replace(params, stop_token_ids=stops)


@contextmanager
def _timed(seconds: Seconds, what: str) -> Iterator[None]:
    started = time.monotonic()
    try:
        yield
    finally:
        setattr(seconds, what, time.monotonic() - started)


async def _within(waiting: Awaitable[T], deadline_s: float, phase: str) -> T:
    try:
        async with asyncio.timeout(deadline_s):
            return await waiting
    except TimeoutError as error:
        raise SandboxError(
            f"waiting for {phase} since {deadline_s:.0f} s: the session did not answer.",
            fix="Look at the backend's health.",
            code="no_answer",
            phase=phase,
        ) from error


def _fault(error: Exception, trajectory_id: str) -> Fault:
    """Whose it is. What crossed no boundary is our own mistake, and said so loudly."""
    if isinstance(error, BoundaryError):
        return fault_of(error)
    log.error("attempt %s ended by an error of our own", trajectory_id, exc_info=error)
    where = traceback.extract_tb(error.__traceback__)[-1]
    return Fault(
        owner="gateway",
        code="evidence" if isinstance(error, EvidenceError) else "internal",
        phase="run",
        retryable=False,
        message=f"{type(error).__name__}: {error}",
        evidence={"where": f"{where.name}:{where.lineno}"},
    )


async def _verdict(
    task: Task,
    backend: Backend,
    session: SessionLike | None,
    termination: Termination,
    fault: Fault | None,
    signing_key: bytes,
    *,
    trajectory_id: str,
) -> Verdict:
    """The session's verdict; without a session, or when finalizing itself fails, one without a reward."""
    if session is not None:
        try:
            return await _within(
                session.finalize(termination=termination, fault=fault),
                grading.longest_s(task, time_multiplier=slower_by(session)) + FINALIZE_GRACE_S,
                "finalize",
            )
        except Exception as error:  # the boundary of a verdict: classified and recorded
            made = _fault(error, trajectory_id)
            # What was scored before it could not be judged is not what ends the attempt without a reward.
            fault = made if fault is None or fault.scored else fault
    assert fault is not None, "an attempt without a session has the fault that prevented it"
    return grading.sign(grading.unscored(fault, (), isolation=backend.isolation), signing_key)


async def _close(session: SessionLike, trajectory_id: str) -> None:
    """Close whatever happens: a second cancellation does not interrupt it, its failure replaces no error."""
    closing = asyncio.ensure_future(session.close())
    deadline = time.monotonic() + CLOSE_DEADLINE_S
    cancelled = False
    while not closing.done() and time.monotonic() < deadline:
        try:
            await asyncio.wait({closing}, timeout=max(0.0, deadline - time.monotonic()))
        except asyncio.CancelledError:
            cancelled = True
    if not closing.done():
        closing.cancel()
        log.error("attempt %s: its session did not close within %.0f s", trajectory_id, CLOSE_DEADLINE_S)
    elif not closing.cancelled() and closing.exception() is not None:
        log.error("attempt %s: closing its session failed", trajectory_id, exc_info=closing.exception())
    if cancelled:
        raise asyncio.CancelledError
