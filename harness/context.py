"""What an agent does when its history outgrows the context: a plug-in that rewrites a conversation before a
call.

A policy is asked before every call of the built-in agent. When the next prompt is longer than its limit it
replaces messages (`Conversation.rewrite`), so that the next call is a branch of the last one with the
reason in the tree. Nothing that was sampled is lost or trained twice: the rows before the branch stay as
they are. Which tokens of the old sequence a branch left out is a fact of the two sequences; `replaced`
computes it.

The first messages (system prompt and instruction) are always kept. Another policy is another object with the
same two members.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from types import MappingProxyType

from agentrl.errors import ConfigError, nearest
from agentrl.types import BranchReason, Trajectory, Turn
from harness.agent import ContextPolicy
from harness.attempt import Attempt, Conversation
from harness.prompt import Message

SHARE = 0.75
"""Of the context, when no limit is given."""
LOW_WATER = 0.6
"""A window is cut down to this share of its limit, so that not every further call is a branch."""
REWRITES = "context_rewrites"
"""Name of the count in a trajectory's metadata."""


class Whole:
    """Never rewrites: a full context ends the attempt as `context_full`."""

    name = "none"

    async def fit(self, attempt: Attempt, conversation: Conversation) -> None:
        return


class Window:
    """Forgets the oldest turns (a reply with its observations), never the first messages or the last turn.

    Args:
        tokens: longest prompt; None: `SHARE` of the context.
    """

    name = "window"

    def __init__(self, tokens: int | None = None) -> None:
        self._tokens = tokens

    async def fit(self, attempt: Attempt, conversation: Conversation) -> None:
        limit = _limit(attempt, self._tokens)
        if _length(attempt, conversation) <= limit:
            return
        head, turns = parts(conversation.messages)
        kept = list(turns)
        while len(kept) > 1:
            kept.pop(0)
            if _rendered(attempt, conversation, [*head, *_flat(kept)]) <= LOW_WATER * limit:
                break
        if len(kept) < len(turns):
            _rewrite(attempt, conversation, [*head, *_flat(kept)], BranchReason.TRUNCATION)


class ShortObservations:
    """Cuts the middle out of old observations; replies stay whole.

    Args:
        tokens: longest prompt; None: `SHARE` of the context.
        keep_turns: newest turns that are left alone.
        characters: what an old observation keeps, half from each end.
    """

    name = "observations"

    def __init__(self, tokens: int | None = None, *, keep_turns: int = 2, characters: int = 200) -> None:
        self._tokens = tokens
        self._keep_turns = keep_turns
        self._characters = characters

    async def fit(self, attempt: Attempt, conversation: Conversation) -> None:
        if _length(attempt, conversation) <= _limit(attempt, self._tokens):
            return
        head, turns = parts(conversation.messages)
        old = len(turns) - self._keep_turns
        short = [
            [self._short(m) if m["role"] != "assistant" else m for m in turn] if number < old else turn
            for number, turn in enumerate(turns)
        ]
        messages = [*head, *_flat(short)]
        if messages != conversation.messages:
            _rewrite(attempt, conversation, messages, BranchReason.TRUNCATION)

    def _short(self, message: Message) -> Message:
        text, half = message["content"], self._characters // 2
        left_out = len(text) - 2 * half
        note = f"\n[{left_out} characters left out]\n"
        if left_out <= len(note) or "characters left out]" in text:
            return message
        return {**message, "content": text[:half] + note + text[-half:]}


class Summary:
    """Has the policy itself sum up what happened, then goes on from the summary.

    The summary is a call like any other: sampled from the policy, recorded, trained, and the parent of the
    branch that follows it.

    Args:
        tokens: longest prompt; None: `SHARE` of the context. Leave room above it for the summary.
        summary_tokens: longest summary.
    """

    name = "summary"
    REQUEST = (
        "The context is nearly full. Sum up for yourself what you found out, what you changed and what"
        " is left to do. Your summary replaces everything after the task. Do not call a tool now."
    )
    INTRODUCTION = "[Summary of the work so far]"

    def __init__(self, tokens: int | None = None, *, summary_tokens: int = 512) -> None:
        self._tokens = tokens
        self._summary_tokens = summary_tokens

    async def fit(self, attempt: Attempt, conversation: Conversation) -> None:
        head, turns = parts(conversation.messages)
        if not turns or _length(attempt, conversation) <= _limit(attempt, self._tokens):
            return
        last = conversation.messages[-1]
        if last["role"] == "user":  # some templates refuse two user messages in a row
            conversation.messages[-1] = {**last, "content": f"{last['content']}\n\n{self.REQUEST}"}
        else:
            conversation.add({"role": "user", "content": self.REQUEST})
        reply = await attempt.ask(conversation, max_tokens=self._summary_tokens)
        attempt.turns.append(Turn(call_id=reply.call.id, actions=(), observations=()))
        said = str(reply.message["content"]).rpartition("</think>")[2].strip()
        task = head[-1]["content"].partition(f"\n\n{self.INTRODUCTION}\n")[0]
        with_summary = {**head[-1], "content": f"{task}\n\n{self.INTRODUCTION}\n{said}"}
        _rewrite(attempt, conversation, [*head[:-1], with_summary], BranchReason.COMPACTION)


POLICIES: Mapping[str, Callable[[int | None], ContextPolicy]] = MappingProxyType(
    {
        "none": lambda tokens: Whole(),
        "window": lambda tokens: Window(tokens),
        "observations": lambda tokens: ShortObservations(tokens),
        "summary": lambda tokens: Summary(tokens),
    }
)
"""Context policies by name, made with their limit in tokens (None: a share of the context)."""


def get(name: str, tokens: int | None = None) -> ContextPolicy:
    """A policy by name. Raises `ConfigError` naming the nearest."""
    if name not in POLICIES:
        raise ConfigError(f"Unknown context policy '{name}'.", fix=nearest(name, POLICIES))
    return POLICIES[name](tokens)


def parts(messages: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    """The messages before the first reply, and the turns after them: each a reply with what followed it."""
    starts = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    ends = [*starts, len(messages)][1:]
    head = list(messages[: starts[0]] if starts else messages)
    return head, [list(messages[a:b]) for a, b in zip(starts, ends, strict=True)]


@dataclass(frozen=True, slots=True)
class Replaced:
    """Tokens `start` to `end` of the parent's prompt and generation (none: something was put between); in
    their place the branch has its own tokens `new_start` to `new_end` (none: equal)."""

    start: int
    end: int
    new_start: int
    new_end: int


def replaced(trajectory: Trajectory, call_id: str) -> tuple[Replaced, ...]:
    """Which token spans of its parent a call left out or changed; empty for a call that extends its parent.

    What a branch appends after everything it kept is new, not a replacement. Example: parent (1, 2, 3, 4,
    5, 6), branch (1, 2, 9, 5, 6, 7): tokens 2 to 4 were replaced by 2 to 3.
    """
    call = trajectory.call(call_id)
    if call.parent_id is None:
        return ()
    parent = trajectory.call(call.parent_id)
    old = trajectory.prompt_ids(parent.id) + parent.generation_token_ids
    new = trajectory.prompt_ids(call_id)
    keep = call.prompt_keep
    matcher = SequenceMatcher(None, old[keep:], new[keep:], autojunk=False)
    return tuple(
        Replaced(start=a + keep, end=b + keep, new_start=c + keep, new_end=d + keep)
        for tag, a, b, c, d in matcher.get_opcodes()
        if tag != "equal" and (b > a or b + keep < len(old))
    )


def _limit(attempt: Attempt, tokens: int | None) -> int:
    return tokens or int(SHARE * attempt.context)


def _length(attempt: Attempt, conversation: Conversation) -> int:
    return len(conversation.next_prompt(attempt.chat).token_ids)


def _rendered(attempt: Attempt, conversation: Conversation, messages: Sequence[Message]) -> int:
    return len(attempt.chat.prompt(messages, conversation.tools))


def _flat(turns: Sequence[Sequence[Message]]) -> list[Message]:
    return [message for turn in turns for message in turn]


def _rewrite(
    attempt: Attempt, conversation: Conversation, messages: Sequence[Message], reason: BranchReason
) -> None:
    conversation.rewrite(messages, reason)
    count = attempt.notes.get(REWRITES, 0)
    assert isinstance(count, int)
    attempt.notes[REWRITES] = count + 1
