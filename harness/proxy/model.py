"""The model of one session as its clients see it: an `Ask` to an `Answer`, every reply a recorded call.

Everything is sampled by `Attempt.draw`: within the attempt's budgets, from exact ids, recorded or refused. A
client's temperature and the like are wishes: a policy that is trained is sampled as the run says, and what
was not obeyed is counted. What no sampler could do without changing the distribution is refused.

`turns` are the calls with what was made of them: the tool calls that the client was sent, and the results it
sent back.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2

from agentrl.errors import BoundaryError, EvidenceError, ModelError
from agentrl.types import (
    Action,
    FinishReason,
    JsonScalar,
    ModelCall,
    Observation,
    SamplingParams,
    Termination,
    Turn,
)
from harness import stops
from harness.attempt import Attempt, OutOfBudget
from harness.prompt import Message
from harness.proxy.exchange import Answer, Ask, Choice, FinishedBy, Refusal, TokenFact, ToolCall
from harness.proxy.lines import REASONING_END, Lines, Place, resampled
from harness.recorder import view_hash
from harness.transcript import Ids

MAX_CHOICES = 16
"""Replies to one request (`n`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How a session's clients are served."""

    obey: bool = False
    """Sample as the client wishes (temperature, top_p, top_k, seed). For evaluation: with anything but
    top_p 1 and top_k off the calls are recorded and can not be trained on."""
    split_reasoning: bool = False
    """Send what stands before `</think>` apart from the content, as servers with a reasoning parser do."""
    end_on_fault: bool = True
    """What the policy server gets wrong ends the session, since the attempt is no evidence then. False for
    sessions that are no attempts: only the one request fails."""


class ProxiedModel:
    """One attempt's model behind wire formats. `over` is set when nothing more will be answered."""

    def __init__(self, attempt: Attempt, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self.over = asyncio.Event()
        self.ended_by: OutOfBudget | BoundaryError | EvidenceError | None = None
        self.context_full = False
        """Whether the last request did not fit; a client may shorten its history and go on."""
        self._attempt = attempt
        self._lines = Lines(attempt.chat)
        self._serial = itertools.count()
        self._asked = 0
        self._calls: dict[str, tuple[Action, ...]] = {}
        self._results: dict[str, str] = {}
        """Tool-call id to the result that came back first."""
        self._refused: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    @property
    def name(self) -> str:
        return self._attempt.model

    async def ask(self, ask: Ask) -> Answer:
        """Answer one request.

        Raises:
            Refusal: it can not be answered, with the cause; counted.
        """
        try:
            return await self._answer(ask)
        except Refusal as refusal:
            self.note_refused(refusal)
            raise

    def note_refused(self, refusal: Refusal) -> None:
        """Count a request that got no reply; those that never became an `Ask` are the door's to report."""
        self._refused[refusal.code] += 1

    def count_tokens(self, ask: Ask) -> int:
        """Length of the prompt that this request would have."""
        return len(self._place(ask).prompt.token_ids)

    async def _answer(self, ask: Ask) -> Answer:
        if self.ended_by is not None:
            raise _over(self.ended_by)
        if ask.n > MAX_CHOICES:
            raise Refusal(f"'n' is at most {MAX_CHOICES}.", param="n")
        if self._asked + ask.n > self._attempt.limits.max_turns:
            raise self._end(OutOfBudget(Termination.MAX_TURNS))
        place = self._place(ask)
        self._note_results(ask.messages)
        self._asked += ask.n
        number = next(self._serial)
        choices: list[Choice | None] = [None] * ask.n

        async def one(index: int) -> None:
            prompt = place.prompt if index == 0 else resampled(place.prompt)
            call = await self._attempt.draw(
                prompt,
                view=view_hash(ask.messages or ({"prompt": place.text},), ask.tools),
                sampling=self._params(ask, index),
                stops=ask.stops,
            )
            choices[index], message, shown = self._read(ask, call)
            self._lines.record(place, prompt, call, message, shown)

        try:
            async with asyncio.TaskGroup() as group:
                for index in range(ask.n):
                    group.create_task(one(index))
        except BaseExceptionGroup as several:
            self._asked -= ask.n
            raise self._refusal(several.exceptions[0]) from several
        self.context_full = False
        self._counts["drift"] += place.drift
        for what in ask.unenforced:
            self._counts[f"unenforced_{what}"] += 1
        if not self.rules.obey:
            self._counts["overridden"] += _differs(ask, self._attempt.sampling)
        return Answer(
            ask=ask,
            serial=f"{self._attempt.id}-{number}",
            created=int(time.time()),
            prompt_tokens=len(place.prompt.token_ids),
            choices=tuple(choice for choice in choices if choice is not None),
        )

    def _place(self, ask: Ask) -> Place:
        try:
            return self._lines.place(ask)
        except jinja2.TemplateError as error:
            raise Refusal(
                f"The model's chat template refuses these messages: {error}.", code="template"
            ) from error
        except EvidenceError as error:
            raise Refusal(str(error), code="unrenderable") from error

    def _params(self, ask: Ask, index: int) -> SamplingParams:
        base = self._attempt.sampling
        limit = min(base.max_tokens, ask.max_tokens or base.max_tokens)
        if not self.rules.obey:
            return replace(base, max_tokens=limit)
        wish = ask.wishes
        seed = base.seed if wish.seed is None else wish.seed
        return replace(
            base,
            max_tokens=limit,
            temperature=base.temperature if wish.temperature is None else wish.temperature,
            top_p=wish.top_p or base.top_p,
            top_k=base.top_k if wish.top_k is None else max(0, wish.top_k),  # -1 is off, too
            seed=None if seed is None else seed + index,  # one seed would make equal choices
        )

    # ------------------------------------------------------------------------------------------------ reading

    def _read(self, ask: Ask, call: ModelCall) -> tuple[Choice, Message, Message]:
        """A recorded call as the client sees it, as it was sampled, and as it will come back."""
        chat = self._attempt.chat
        ids = call.generation_token_ids
        cut = (
            stops.find(ids, ask.stops, chat.decode)
            if call.finish_reason is FinishReason.STOP_STRING
            else None
        )
        text = cut.text if cut is not None else chat.decode(_without_end(ids, chat.stop_token_ids))
        message, parsed = chat.reply(ids, turn=len(self._calls))
        actions: tuple[Action, ...] = parsed if ask.tools and cut is None else ()
        if any(action.error is not None for action in actions):
            actions = ()  # A plain server sends what it can not read as text.
        self._calls[call.id] = actions
        content = str(message["outside"]) if actions else text
        reasoning = ""
        if self.rules.split_reasoning and REASONING_END in content:
            before, _, content = content.partition(REASONING_END)
            reasoning = before.removeprefix("<think>").strip("\n")
            content = content.lstrip("\n")
        calls = tuple(
            ToolCall(id=action.id, name=action.tool, arguments=_json(action.arguments)) for action in actions
        )
        finished: FinishedBy = "stop_string" if cut is not None else "tool_calls" if calls else "stop"
        if call.finish_reason is FinishReason.LENGTH:
            finished = "length"
        choice = Choice(
            call=call,
            text=content,
            reasoning=reasoning,
            tool_calls=calls,
            finished_by=finished,
            stop=None if cut is None else cut.stop,
            tokens=self._tokens(call) if ask.log_probs else (),
        )
        return choice, message, shown(choice)

    def _tokens(self, call: ModelCall) -> tuple[TokenFact, ...]:
        known = call.generation_log_probs or (None,) * len(call.generation_token_ids)
        texts = [self._attempt.chat.decode((i,)) for i in call.generation_token_ids]
        return tuple(
            TokenFact(text=text, bytes=tuple(text.encode()), log_prob=p)
            for text, p in zip(texts, known, strict=True)
        )

    def _note_results(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if message["role"] == "tool":
                self._results.setdefault(message["tool_call_id"], str(message["content"]))

    def turns(self) -> tuple[Turn, ...]:
        """Every answered call in sampled order, with the results that came back."""
        turns = []
        for call_id, actions in self._calls.items():
            seen: list[Observation] = []
            for action in actions:
                if action.id not in self._results:
                    break
                seen.append(Observation(action_id=action.id, text=self._results[action.id]))
            turns.append(Turn(call_id=call_id, actions=actions, observations=tuple(seen)))
        return tuple(turns)

    def facts(self) -> dict[str, JsonScalar]:
        """Counts for the fidelity report: what was refused and why, and what was not as the client wished."""
        facts: dict[str, JsonScalar] = {f"refused_{code}": n for code, n in sorted(self._refused.items())}
        facts |= {name: n for name, n in sorted(self._counts.items()) if n}
        return facts

    # ------------------------------------------------------------------------------------------------- ending

    def _refusal(self, error: BaseException) -> BaseException:
        match error:
            case OutOfBudget(termination=Termination.CONTEXT_FULL):
                return self._too_long()
            case ModelError() if error.code == "context":
                return self._too_long()
            case OutOfBudget():
                return self._end(error)
            case ModelError() if not self.rules.end_on_fault:
                return Refusal(
                    str(error), status=503, kind="api_error", code=error.code, retry=error.retryable
                )
            case BoundaryError() | EvidenceError():
                return self._end(error)
            case _:
                return error

    def _too_long(self) -> Refusal:
        self.context_full = True
        return Refusal(
            "This conversation and its answer do not fit the model's context of at most"
            f" {self._attempt.context} tokens. Shorten the messages.",
            code="context_length_exceeded",
            param="messages",
        )

    def _end(self, error: OutOfBudget | BoundaryError | EvidenceError) -> Refusal:
        if self.ended_by is None:
            self.ended_by = error
        self.over.set()
        return _over(error)


def _over(error: OutOfBudget | BoundaryError | EvidenceError) -> Refusal:
    """Nothing more is answered. No client library tries that again by itself."""
    if isinstance(error, OutOfBudget):
        return Refusal(
            f"The attempt is over: {error.termination}. Stop here; what was done is graded.",
            status=403,
            kind="permission_error",
            code=f"budget_{error.termination}",
        )
    return Refusal(
        f"The attempt is over, by no fault of its agent: {error}",
        status=500,
        kind="api_error",
        code=error.code if isinstance(error, BoundaryError) else "evidence",
    )


def _differs(ask: Ask, params: SamplingParams) -> bool:
    """Whether the client wished for another distribution than is sampled."""
    wish = ask.wishes
    return (
        wish.temperature not in (None, params.temperature)
        or wish.top_p not in (None, params.top_p)
        or wish.top_k not in (None, params.top_k)
    )


def _without_end(ids: Ids, ends: Sequence[int]) -> Ids:
    last = len(ids)
    while last and ids[last - 1] in ends:
        last -= 1
    return ids[:last]


def _json(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def shown(choice: Choice) -> Message:
    """A reply in the form in which a client's history brings it back."""
    message: dict[str, Any] = {"role": "assistant", "content": choice.text}
    if choice.reasoning:
        message["reasoning"] = choice.reasoning
    if choice.tool_calls:
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in choice.tool_calls
        ]
    return message
