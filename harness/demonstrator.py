"""A scripted demonstrator for one-line repairs: what a small policy is cold-started on.

It is privileged (it reads the task's own note of the wrong line and its alternatives) and deliberately
imperfect: it does not know which alternative is right and tries them in their order, changes its mind, and
mostly submits untested; only in some attempts does it check its work, and then it may give up. So imitation
teaches how to act, and leaves to reinforcement what is worth doing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

from agentrl.errors import ConfigError
from agentrl.inference.sampler import SampleRequest
from agentrl.types import Task
from harness.chat import ChatFormat

KEYS = ("file", "buggy", "alternatives")


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How the demonstrator behaves; each is a probability."""

    careful: float
    """Of checking its work in an attempt: it runs the tests after every edit (else it submits untested)."""
    give_up: float
    """Of submitting after failing tests instead of trying another alternative."""
    change_mind: float
    """Of another edit, untested, where it does not check its work."""


def tool_call(name: str, /, **arguments: str) -> str:
    """A call in Hermes form, as the demonstrator writes it."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


class Demonstrator:
    """The script of one attempt, for `ScriptedSampler`. Raises `ConfigError` for a task without the notes it
    needs."""

    def __init__(self, task: Task, habits: Habits, chat: ChatFormat, *, seed: str) -> None:
        missing = [key for key in KEYS if key not in task.metadata]
        if missing:
            raise ConfigError(
                f"Task {task.id} has no {', '.join(missing)} under [metadata.agentrl] to demonstrate from.",
                fix="Use the generated suite swe_mini, or set coldstart.demonstrations = 0.",
            )
        self._task = task
        self._habits = habits
        self._chat = chat
        self._rng = random.Random(seed)
        self._seen = ""
        self._lines = self._script()

    def __call__(self, request: SampleRequest, number: int) -> str:
        self._seen = self._chat.decode(request.prompt_token_ids[-64:])
        return next(self._lines)

    def _script(self) -> Iterator[str]:
        facts, rng = self._task.metadata, self._rng
        file, line = str(facts["file"]), str(facts["buggy"])
        lines = [str(a) for a in facts["alternatives"]]
        careful = rng.random() < self._habits.careful
        yield tool_call("read_file", path=file)
        while True:
            new = lines[(lines.index(line) + 1) % len(lines)]
            yield tool_call("replace_in_file", path=file, old=line, new=new)
            line = new
            if not careful:
                if rng.random() < self._habits.change_mind:
                    continue
                break
            yield tool_call("run_tests")
            if "PASSED" in self._seen or rng.random() < self._habits.give_up:
                break
        while True:
            yield tool_call("submit")
