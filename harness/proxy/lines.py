"""How a request finds what was recorded before it.

The client sends whole conversations. Each is compared, message by message, with the conversations that were
answered: the longest recorded beginning that ends in a recorded reply is extended by the rendered tokens of
what is new, and so the ids are exactly what was seen and sampled. Recorded replies are recognised by what the
client was sent, read as meaning (arguments as JSON values, outer spaces aside): it may write them
differently, the ids stay those that were sampled, and that is counted as drift.

Everything else starts a branch with a reason of the closed set `BranchReason`:

    reasoning_dropped  the client sent replies back without their reasoning
    template           the chat template itself rewrites earlier text
    resampled          the same conversation again, or a further choice of one request
    truncation         messages were left out
    compaction         several messages were replaced by fewer
    history_edited     a message, or the list of tools, was changed
    sub_agent          another conversation: it shares no user message with any before

A token is never lost by a branch: what was sampled stays recorded, and is trained once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.types import BranchReason, ModelCall
from harness.chat import ChatFormat
from harness.prompt import Message, in_words
from harness.proxy.exchange import Ask
from harness.transcript import Ids, Prompt, common_prefix

REASONING_END = "</think>"
Keys = tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reply:
    """A recorded reply and the conversation that led to it."""

    call: ModelCall
    prompt: Prompt
    message: Message
    """As it was sampled: what history is rendered from."""
    shown: Message
    """As the client was sent it."""
    keys: Keys
    """Of every message up to and including this one."""
    tools: bytes
    replies: tuple[tuple[int, Reply], ...]
    """Recorded replies before this one, by position."""

    @property
    def ids(self) -> Ids:
        return self.prompt.token_ids + self.call.generation_token_ids

    def at(self) -> tuple[tuple[int, Reply], ...]:
        """Recorded replies by position, this one included."""
        return (*self.replies, (len(self.keys) - 1, self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a request stands: its prompt, and what it continues."""

    prompt: Prompt
    keys: Keys = ()
    tools: bytes = b""
    replies: tuple[tuple[int, Reply], ...] = ()
    drift: bool = False
    """The client wrote recorded replies differently; the recorded ids were used."""
    text: str = ""
    """Of a raw prompt."""


class Lines:
    """All conversations of one session. Not thread-safe; nothing waits in here."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._by_keys: dict[tuple[bytes, bytes], Reply] = {}
        """By tools and the chain of keys up to a reply."""
        self._asked: dict[tuple[bytes, bytes], Place] = {}
        self._recorded: list[Reply] = []
        self._by_key: dict[bytes, Reply] = {}
        """By the key of the reply alone."""
        self._raw: list[tuple[str, Ids, str]] = []
        """Raw prompts with their replies: text, ids, call id."""

    # ------------------------------------------------------------------------------------- to the next prompt

    def place(self, ask: Ask) -> Place:
        """The prompt of a request. Raises `jinja2.TemplateError` when the template refuses the messages."""
        if ask.prompt is not None:
            return self._raw_place(ask.prompt)
        keys = tuple(key(message) for message in ask.messages)
        tools = _digest(list(ask.tools))
        chains = _chains(keys)
        again = self._asked.get((tools, chains[-1]))
        if again is not None:
            return replace(again, prompt=resampled(again.prompt), drift=False)
        before = self._longest(tools, chains)
        return self._extended(ask, keys, tools, before) if before else self._branched(ask, keys, tools)

    def _longest(self, tools: bytes, chains: Sequence[bytes]) -> Reply | None:
        for chain in reversed(chains[:-1]):
            found = self._by_keys.get((tools, chain))
            if found is not None:
                return found
        return None

    def _extended(self, ask: Ask, keys: Keys, tools: bytes, before: Reply) -> Place:
        """Append what is new to the longest recorded beginning."""
        count = len(before.keys)
        replaced = self._replaced(keys, count)
        if replaced is None and self._dropped_reasoning(ask.messages, before):
            return self._from_text(ask, keys, tools, before, BranchReason.REASONING_DROPPED)
        history = self._history(ask, before)
        new = self._presented(ask, self._as_sampled(ask.messages, keys)[count:])
        following = self._chat.continuation(
            history, before.call.generation_token_ids, new, ask.tools if self._chat.renders_tools else ()
        )
        if following.prompt is not None:
            prompt = _branch(before, following.prompt, following.reason or BranchReason.TEMPLATE)
        else:
            delta = following.delta or ()
            prompt = Prompt(
                token_ids=before.ids + delta,
                parent_id=before.call.id,
                keep=len(before.ids),
                delta=delta,
                reason=replaced,
            )
        drift = any(ask.messages[at] != reply.shown for at, reply in before.at())
        return Place(prompt=prompt, keys=keys, tools=tools, replies=before.at(), drift=drift)

    def _replaced(self, keys: Keys, count: int) -> BranchReason | None:
        """Why the conversation leaves what was recorded after its first `count` messages; None when it only
        adds to it."""
        if not any(_is_reply(k) for k in keys[count:]):
            return None
        longer = [r for r in self._recorded if len(r.keys) > count and r.keys[:count] == keys[:count]]
        if not longer:
            return None
        return _why(keys, max(longer, key=lambda r: _shared(r.keys, keys)).keys)

    def _dropped_reasoning(self, messages: Sequence[Message], before: Reply) -> bool:
        return any(
            reply.shown.get("reasoning") and not messages[at].get("reasoning") for at, reply in before.at()
        )

    def _branched(self, ask: Ask, keys: Keys, tools: bytes) -> Place:
        """A first conversation, another one, or one that does not begin as anything recorded."""
        users = [at for at, message in enumerate(ask.messages) if message["role"] == "user"]
        head = (users[0] if users else 0) + 1
        related = [r for r in self._recorded if r.keys[:head] == keys[:head]]
        if not related:
            reason = BranchReason.SUB_AGENT if self._recorded else None
            return self._from_text(ask, keys, tools, None, reason)
        nearest = max(reversed(related), key=lambda r: _shared(r.keys, keys))
        reason = _why(keys, nearest.keys) if nearest.tools == tools else BranchReason.HISTORY_EDITED
        return self._from_text(ask, keys, tools, nearest, reason)

    def _from_text(
        self, ask: Ask, keys: Keys, tools: bytes, parent: Reply | None, reason: BranchReason | None
    ) -> Place:
        """Render the whole conversation anew. Replies that the client kept are rendered as they were
        sampled."""
        messages = list(ask.messages) if parent is None else self._as_sampled(ask.messages, keys)
        ids = self._chat.prompt(
            self._presented(ask, messages, whole=True), ask.tools if self._chat.renders_tools else ()
        )
        if parent is None:
            prompt = Prompt(token_ids=ids, parent_id=None, keep=0, delta=ids, reason=reason)
        else:
            prompt = _branch(parent, ids, reason or BranchReason.HISTORY_EDITED)
        replies = () if parent is None else tuple(self._known(keys))
        return Place(prompt=prompt, keys=keys, tools=tools, replies=replies)

    def _known(self, keys: Keys) -> list[tuple[int, Reply]]:
        """Which messages are recorded replies, wherever they were recorded."""
        return [(at, self._by_key[k]) for at, k in enumerate(keys) if k in self._by_key]

    def _as_sampled(self, messages: Sequence[Message], keys: Keys) -> list[Message]:
        """Messages with recorded replies as they were sampled, less reasoning that the client left out."""
        out = list(messages)
        for at, reply in self._known(keys):
            dropped = reply.shown.get("reasoning") and not messages[at].get("reasoning")
            out[at] = _without_reasoning(reply.message) if dropped else reply.message
        return out

    def _history(self, ask: Ask, before: Reply) -> list[Message]:
        """The recorded beginning as messages, replies as they were sampled."""
        messages = list(ask.messages[: len(before.keys)])
        for at, reply in before.at():
            messages[at] = reply.message
        return self._presented(ask, messages, whole=True)

    # ------------------------------------------------------------------------------------------- raw prompts

    def _raw_place(self, prompt: str | Ids) -> Place:
        """A raw prompt: continued from the longest recorded one that it begins with."""
        if isinstance(prompt, str):
            known = [(ids, call) for text, ids, call in self._raw if prompt.startswith(text)]
            longest = max(known, key=lambda pair: len(pair[0]), default=None)
            if longest is None:
                ids = self._chat.encode_text(prompt, middle=False)
            else:
                rest = prompt[len(next(t for t, i, c in self._raw if c == longest[1])) :]
                more = self._chat.encode_text(rest, middle=True) if rest else ()
                if more[:1] == longest[0][-1:] and more[0] in self._chat.stop_token_ids:
                    more = more[1:]  # The end marker of a template that the client writes was sampled.
                ids = longest[0] + more
            text = prompt
        else:
            ids, text = prompt, self._chat.decode(prompt)
            known = [(i, call) for _, i, call in self._raw if prompt[: len(i)] == i]
            longest = max(known, key=lambda pair: len(pair[0]), default=None)
        if longest is not None:
            keep = len(longest[0])
            made = Prompt(token_ids=ids, parent_id=longest[1], keep=keep, delta=ids[keep:], reason=None)
        else:
            reason = BranchReason.SUB_AGENT if self._raw or self._recorded else None
            made = Prompt(token_ids=ids, parent_id=None, keep=0, delta=ids, reason=reason)
        return Place(prompt=made, text=text)

    # ---------------------------------------------------------------------------------------------- recording

    def record(self, place: Place, prompt: Prompt, call: ModelCall, message: Message, shown: Message) -> None:
        """Remember a reply, so that what continues it finds it. The last of equal replies is found."""
        if not place.keys:
            ids = prompt.token_ids + call.generation_token_ids
            self._raw.append((place.text + str(shown["content"]), ids, call.id))
            return
        keys = (*place.keys, key(shown))
        reply = Reply(
            call=call,
            prompt=prompt,
            message={**message, "sampled": True},
            shown=shown,
            keys=keys,
            tools=place.tools,
            replies=place.replies,
        )
        chains = _chains(keys)
        self._recorded.append(reply)
        self._by_key[keys[-1]] = reply
        self._by_keys[(place.tools, chains[-1])] = reply
        self._asked.setdefault((place.tools, chains[-2]), place)

    # -------------------------------------------------------------------------------- to templates

    def _presented(self, ask: Ask, messages: Sequence[Message], *, whole: bool = False) -> list[Message]:
        """Messages as this template can show them: tools, results and a system prompt in words where it has
        no place for them."""
        chat = self._chat
        names = {c["id"]: c["function"]["name"] for m in ask.messages for c in m.get("tool_calls", ())}
        out: list[dict[str, Any]] = []
        for message in messages:
            role = message["role"]
            if role == "tool" and not chat.renders_tool_role:
                text = f"<tool_response>\n{message['content']}\n</tool_response>"
                if out and out[-1].get("results"):
                    out[-1]["content"] += f"\n{text}"
                else:
                    out.append({"role": "user", "content": text, "results": True})
            elif role == "tool":
                name = names.get(message["tool_call_id"], "tool")
                out.append({**message, "name": name})
            elif role == "assistant" and "sampled" not in message:
                out.append(self._foreign(message))
            else:
                out.append({k: v for k, v in message.items() if k != "sampled"})
        if whole and ask.tools and not chat.renders_tools:
            words = in_words(ask.tools)
            if out[0]["role"] == "system":
                out[0] = {**out[0], "content": f"{out[0]['content']}\n{words}".lstrip("\n")}
            else:
                out.insert(0, {"role": "system", "content": words})
        if whole and out[0]["role"] == "system" and not chat.renders_system:
            system = out.pop(0)["content"]
            if out and out[0]["role"] == "user":
                out[0] = {**out[0], "content": f"{system}\n\n{out[0]['content']}"}
            else:
                out.insert(0, {"role": "user", "content": system})
        return [{k: v for k, v in m.items() if k != "results"} for m in out]

    def _foreign(self, message: Message) -> dict[str, Any]:
        """A reply that was not sampled here."""
        content = message["content"]
        if message.get("reasoning"):
            content = f"<think>\n{message['reasoning']}\n{REASONING_END}\n\n{content}"
        calls = message.get("tool_calls", ())
        if calls and self._chat.renders_tool_calls:
            return {"role": "assistant", "content": content, "tool_calls": list(calls)}
        if calls:
            spelled = [self._chat.tool_format.written(*_name_and_arguments(call)) for call in calls]
            content = "\n".join([*([content] if content else []), *spelled])
        return {"role": "assistant", "content": content}


# ---------------------------------------------------------------------------------------------------- keys


def key(message: Message) -> bytes:
    """What a message is recognised by: its meaning, not its spelling. A reply's reasoning is no part of it
    (whether it was kept is looked at apart)."""
    if message["role"] != "assistant":
        return _digest({k: message.get(k) for k in ("role", "content", "tool_call_id")})
    calls = [
        [call["id"], name, arguments]
        for call in message.get("tool_calls", ())
        for name, arguments in (_name_and_arguments(call),)
    ]
    return b"A" + _digest([message["content"].strip(), calls])


def _is_reply(one: bytes) -> bool:
    return one[:1] == b"A" and len(one) == 17


def _name_and_arguments(call: Mapping[str, Any]) -> tuple[str, Any]:
    return call["function"]["name"], json.loads(call["function"]["arguments"])


def _digest(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _chains(keys: Keys) -> list[bytes]:
    """A digest of every beginning of a conversation."""
    chains, last = [], b""
    for one in keys:
        last = hashlib.blake2b(last + one, digest_size=16).digest()
        chains.append(last)
    return chains


def _shared(a: Keys, b: Keys) -> int:
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


def _why(keys: Keys, recorded: Keys) -> BranchReason:
    """What was done to a recorded conversation to get this one."""
    at = _shared(keys, recorded)
    new, old = keys[at:], recorded[at:]
    if not new or new[0] in old:
        return BranchReason.TRUNCATION
    if _is_reply(new[0]):
        return BranchReason.HISTORY_EDITED
    inserted = next((i for i, one in enumerate(new) if one in old), len(new))
    replaced = old.index(new[inserted]) if inserted < len(new) else len(old)
    return BranchReason.COMPACTION if replaced > inserted else BranchReason.HISTORY_EDITED


def resampled(prompt: Prompt) -> Prompt:
    """The same prompt once more: a further sample after the same tokens."""
    return replace(prompt, reason=prompt.reason or BranchReason.RESAMPLED)


def _branch(parent: Reply, ids: Ids, reason: BranchReason) -> Prompt:
    keep = common_prefix(parent.ids, ids)
    exact = keep == len(parent.ids)
    return Prompt(
        token_ids=ids,
        parent_id=parent.call.id,
        keep=keep,
        delta=ids[keep:],
        reason=None if exact else reason,
    )


def _without_reasoning(message: Message) -> Message:
    """A sampled reply as if it had been given without its reasoning."""
    text = str(message["content"])
    kept = text.rpartition(REASONING_END)[2].lstrip("\n")
    return {**message, "content": kept, **({"outside": kept} if "outside" in message else {})}
