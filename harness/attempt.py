"""What an agent is given: a model to ask and an environment to act in, recorded and held to the budgets.

An `Attempt` is one try at one task. `ask` samples the next reply and makes it evidence; `act` performs
actions and notes the turn. Both raise `OutOfBudget` when a limit is reached, which an agent need not catch.
Whatever an agent does with messages (sub-agents, compaction), every call goes through here, so nothing is
sampled unrecorded.

It does not decide what to say or when to stop: that is the agent's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from agentrl.errors import ModelError, SandboxError
from agentrl.inference.sampler import Sampler, SampleRequest
from agentrl.types import (
    Action,
    BranchReason,
    Fault,
    FinishReason,
    JsonScalar,
    Limits,
    ModelCall,
    Observation,
    SamplingParams,
    Task,
    Termination,
    Turn,
    Verdict,
)
from envs.evidence import paced
from harness.chat import ChatFormat
from harness.prompt import Message
from harness.recorder import Recorder, view_hash
from harness.stops import sample as sample_until
from harness.transcript import Ids, Prompt, Transcript

ANSWER_GRACE_S = 300.0
"""How much longer than a command's own limit an action may take before the environment counts as silent. The
session has shorter deadlines of its own; this one is for a session that has none."""


class SessionLike(Protocol):
    """What the harness needs of `envs.session.Session`."""

    tools: list[dict[str, Any]]
    submitted: bool

    async def call(self, action: Action) -> Observation: ...

    async def finalize(self, *, termination: Termination, fault: Fault | None) -> Verdict: ...

    async def close(self) -> None: ...


@runtime_checkable
class SlowerSession(Protocol):
    """A session that says how many times longer everything may take in it. Optional beside `SessionLike`."""

    time_multiplier: float


def slower_by(session: SessionLike | None) -> float:
    """How many times longer than the task says everything may take in a session: see
    `envs.sandbox.contract.Slower`."""
    return session.time_multiplier if isinstance(session, SlowerSession) else 1.0


class OutOfBudget(Exception):
    """A limit of the task was reached; the state so far is graded."""

    def __init__(self, termination: Termination) -> None:
        super().__init__(str(termination))
        self.termination = termination


def remaining_tokens(*, max_new: int, generated: int, context: int, occupied: int) -> int:
    """How many tokens may still be asked for: `min(max_new - generated, context - occupied)`, never negative.

    `generated` counts the whole trajectory, `occupied` the prompt of the coming call (earlier generations
    included). Worked example: 24 and 10, context 40, prompt 8 + 10 = 18: 14.
    """
    return max(0, min(max_new - generated, context - occupied))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One recorded generation, read."""

    call: ModelCall
    message: Message
    actions: tuple[Action, ...]


@dataclass(slots=True)
class Seconds:
    """Where the time of an attempt went."""

    open: float = 0.0
    model: float = 0.0
    tools: float = 0.0
    queue: float = 0.0
    finalize: float = 0.0


class Conversation:
    """One line of messages and its exact ids. Made by `Attempt.conversation`."""

    def __init__(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, reason: BranchReason | None
    ) -> None:
        self.messages: list[Message] = list(messages)
        self.tools = list(tools)
        self.transcript = Transcript(reason=reason)
        self._answered = 0
        self._generated: Ids = ()
        self._rewritten: BranchReason | None = None

    def add(self, *messages: Message) -> None:
        """Append messages to be seen by the next call."""
        self.messages.extend(messages)

    def rewrite(self, messages: Sequence[Message], reason: BranchReason) -> None:
        """Replace the history (compaction, truncation, an edit). The next call is a branch with this
        reason."""
        self.messages = list(messages)
        self._rewritten = reason

    def next_prompt(self, chat: ChatFormat) -> Prompt:
        """The prompt of the next call: appended where possible, a branch with its reason otherwise."""
        if self.transcript.call_id is None:
            return self.transcript.start(chat.prompt(self.messages, self.tools))
        if self._rewritten is not None:
            return self.transcript.branch(chat.prompt(self.messages, self.tools), self._rewritten)
        history, new = self.messages[: self._answered], self.messages[self._answered :]
        following = chat.continuation(history, self._generated, new, self.tools)
        if following.prompt is not None:
            return self.transcript.branch(following.prompt, following.reason or BranchReason.TEMPLATE)
        return self.transcript.extend(following.delta or ())

    def answered(self, prompt: Prompt, call: ModelCall, message: Message) -> None:
        """Note the recorded reply to `prompt`."""
        self.transcript.commit(prompt, call)
        self.messages.append(message)
        self._answered = len(self.messages)
        self._generated = call.generation_token_ids
        self._rewritten = None


class Attempt:
    """One try: recorded, within budgets. `context` is the smaller of the task's limit and the model's."""

    def __init__(
        self,
        task: Task,
        session: SessionLike,
        *,
        id: str,
        sampler: Sampler,
        chat: ChatFormat,
        recorder: Recorder,
        sampling: SamplingParams,
        context: int,
        sample_deadline_s: float,
        system_prompt: str,
        seconds: Seconds,
    ) -> None:
        self.task = task
        self.session = session
        self.id = id
        self.chat = chat
        self.system_prompt = system_prompt
        self.turns: list[Turn] = []
        self.notes: dict[str, JsonScalar] = {}
        """Counts that an agent leaves in the trajectory's metadata."""
        self._sampler = sampler
        self._recorder = recorder
        self._sampling = sampling
        self._context = context
        self._sample_deadline_s = sample_deadline_s
        self._seconds = seconds
        self._started = time.monotonic()
        self._asked = 0

    @property
    def limits(self) -> Limits:
        """The task's, where the session is."""
        return paced(self.task.limits, slower_by(self.session))

    @property
    def model(self) -> str:
        return self._sampler.model

    @property
    def sampling(self) -> SamplingParams:
        """How replies are sampled unless `draw` is told otherwise."""
        return self._sampling

    @property
    def context(self) -> int:
        """Tokens that a prompt and its reply may have together."""
        return self._context

    @property
    def left_s(self) -> float:
        """Seconds of the wall clock that are left; time spent in queues is not charged."""
        return self.limits.wall_s - (time.monotonic() - self._started - self._seconds.queue)

    def conversation(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reason: BranchReason | None = None,
    ) -> Conversation:
        """A line of messages; the session's tools by default. `reason` for any but the first: a sub-agent."""
        return Conversation(messages, self.session.tools if tools is None else tools, reason=reason)

    async def ask(self, conversation: Conversation, *, max_tokens: int | None = None) -> Reply:
        """Sample the next reply of a conversation, of at most `max_tokens`, and record it.

        Raises:
            OutOfBudget: turns, tokens, context or wall clock are used up, before or by this reply.
            ModelError: what came back is not evidence, or nothing came.
        """
        if len(self.turns) >= self.limits.max_turns:
            raise OutOfBudget(Termination.MAX_TURNS)
        prompt = conversation.next_prompt(self.chat)
        room = self._room(len(prompt.token_ids))
        most = self._sampling.max_tokens if max_tokens is None else max_tokens
        call = await self.draw(
            prompt,
            view=view_hash(conversation.messages, conversation.tools),
            sampling=replace(self._sampling, max_tokens=min(self._sampling.max_tokens, most)),
        )
        generated = len(call.generation_token_ids)
        cut = call.finish_reason is FinishReason.LENGTH
        message, actions = self.chat.reply(call.generation_token_ids, turn=len(self.turns), cut=cut)
        conversation.answered(prompt, call, message)
        if cut and (generated == room or generated < call.sampling.max_tokens):
            # A budget ended it, or the engine's own context did: what is cut is not acted on.
            self.turns.append(Turn(call_id=call.id, actions=actions, observations=()))
            self._room(len(conversation.transcript))
            raise OutOfBudget(Termination.CONTEXT_FULL)
        return Reply(call=call, message=message, actions=actions)

    async def draw(
        self,
        prompt: Prompt,
        *,
        view: str,
        sampling: SamplingParams | None = None,
        stops: Sequence[str] = (),
    ) -> ModelCall:
        """Sample after a prompt and record the call: the one place where anything is sampled.

        Args:
            prompt: exact ids and what they extend.
            view: `view_hash` of the messages and tools behind them.
            sampling: default that of the attempt; `max_tokens` is lowered to what the budgets leave.
            stops: stop strings.

        Raises:
            OutOfBudget: tokens, context or wall clock leave no room for it.
            ModelError: what came back is not evidence, or nothing came.
        """
        params = sampling or self._sampling
        room = self._room(len(prompt.token_ids))
        request = SampleRequest(
            id=f"{self.id}.c{self._asked}",
            session=self.id,
            prompt_token_ids=prompt.token_ids,
            params=replace(params, max_tokens=min(params.max_tokens, room)),
            deadline_s=min(self._sample_deadline_s, self.left_s),
        )
        self._asked += 1
        started = time.monotonic()
        try:
            async with asyncio.timeout(request.deadline_s + ANSWER_GRACE_S):
                result = await sample_until(self._sampler, request, stops, self.chat.decode)
        except ModelError as error:
            if error.code == "deadline" and self.left_s <= 0:
                raise OutOfBudget(Termination.WALL_CLOCK) from error
            if error.code == "context" and self._asked > 1:
                raise OutOfBudget(Termination.CONTEXT_FULL) from error
            raise
        except TimeoutError as error:
            raise ModelError(
                f"waiting for {self._sampler.model} since {request.deadline_s + ANSWER_GRACE_S:.0f} s:"
                " its own deadline did not fire.",
                fix="Look for a blocked event loop or a sampler that ignores deadline_s.",
                code="deadline",
                phase="sample",
            ) from error
        finally:
            self._seconds.model += time.monotonic() - started
        call = self._recorder.record(prompt, request, result, view=view)
        if call.finish_reason is FinishReason.ABORT:
            raise ModelError(
                f"{request.id}: the engine aborted the generation.",
                fix="Look for a weight update that aborts requests.",
                code="aborted",
                phase="sample",
            )
        return call

    def _room(self, occupied: int) -> int:
        """Tokens that may be asked for; raises when there are none."""
        if self.left_s <= 0:
            raise OutOfBudget(Termination.WALL_CLOCK)
        room = remaining_tokens(
            max_new=self.limits.max_tokens,
            generated=self._recorder.generated_tokens,
            context=self._context,
            occupied=occupied,
        )
        if room == 0:
            spent = self._recorder.generated_tokens >= self.limits.max_tokens
            raise OutOfBudget(Termination.MAX_TOKENS if spent else Termination.CONTEXT_FULL)
        return room

    async def act(self, reply: Reply) -> tuple[Observation, ...]:
        """Perform the actions of a reply one after the other and note the turn.

        A malformed action is answered with what was wrong and nothing is run. Raises what the session raises
        (`BoundaryError`); the turn then holds the observations so far.
        """
        seen: list[Observation] = []
        try:
            for action in reply.actions:
                if action.error is not None:
                    seen.append(Observation(action_id=action.id, text=action.error, is_error=True))
                    continue
                seen.append(await self._perform(action))
        finally:
            self.turns.append(Turn(call_id=reply.call.id, actions=reply.actions, observations=tuple(seen)))
        return tuple(seen)

    async def _perform(self, action: Action) -> Observation:
        started = time.monotonic()
        limit_s = self.limits.exec_timeout_s + ANSWER_GRACE_S
        try:
            async with asyncio.timeout(limit_s):
                observation = await self.session.call(action)
        except TimeoutError as error:
            raise SandboxError(
                f"waiting for {action.tool} since {limit_s:.0f} s: the session did not answer.",
                fix="Look at the backend's health.",
                code="no_answer",
                phase="exec",
            ) from error
        finally:
            self._seconds.tools += time.monotonic() - started
        self._seconds.queue += (observation.queue_ms or 0.0) / 1000
        return observation
