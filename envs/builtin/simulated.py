"""`user` and `simulated-search`: someone else speaks, behind one interface, scripted or sampled.

A `Speaker` is told its persona and what was said and answers. The default speakers are scripts: the same
every time. `harness.speaker.SampledSpeaker` puts a model there (a simulated user as in tau-bench, arXiv
2406.12045; a simulated search engine as in ZeroSearch, arXiv 2505.04588). Since a model does not say the same
twice, both environments are judged by their `state()`: what was handed in, never what was said.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from envs.builtin import search
from envs.environment import Grade, Problem, Refused, Step, environment, tool

Speaker = Callable[[str, Sequence[tuple[str, str]]], Awaitable[str]]
"""(persona, what was said so far as pairs of `policy` or `speaker` and text) to the next thing it says."""

MAX_SAID = 12
"""Things that the policy may say before the other side leaves."""

_TOWNS = ("Arden", "Brill", "Corby", "Delph", "Eccles", "Fowey", "Gorse", "Hythe")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_SEATS = ("window", "aisle", "table")
_ASKED = {
    "destination": ("where", "destination", "town", "city", "travel to", "go to"),
    "day": ("when", "day", "date"),
    "seat": ("seat", "window", "aisle", "prefer"),
}


async def scripted_user(persona: str, said: Sequence[tuple[str, str]]) -> str:
    """A traveller who tells one wish at a time: the first that it was asked about."""
    wishes = dict(line.split(": ", 1) for line in persona.splitlines() if ": " in line)
    asked = said[-1][1].lower() if said else ""
    for wish, cues in _ASKED.items():
        if any(cue in asked for cue in cues):
            return f"The {wish} should be {wishes[wish]}."
    return "I want to book a train ticket. What do you need to know?"


async def scripted_engine(persona: str, said: Sequence[tuple[str, str]]) -> str:
    """A search engine that knows the world of `search`."""
    found = search.world().index.search(said[-1][1], 2)
    return "\n".join(f"[{page.title}] {page.text}" for page in found) or "No page has these words."


@environment("user")
class User:
    """Find out what a simulated traveller wants, and book it."""

    def __init__(self, speaker: Speaker = scripted_user) -> None:
        self.done = False
        self._speaker = speaker
        self._wishes: Mapping[str, str] = {}
        self._said: list[tuple[str, str]] = []
        self._booked: dict[str, str] | None = None

    @staticmethod
    def problem(seed: int) -> Problem:
        """A traveller's three wishes."""
        rng = random.Random(f"user/{seed}")
        wishes = {"destination": rng.choice(_TOWNS), "day": rng.choice(_DAYS), "seat": rng.choice(_SEATS)}
        asked = ("Where do you want to go?", "When do you travel?", "Which seat do you prefer?")
        return Problem(
            instruction=f"Traveller {rng.randint(100, 999)} wants a train ticket."
            " Talk to them, then book what they want.",
            data={"wishes": wishes},
            gold=(
                *(Step(tool="say", arguments={"message": message}) for message in asked),
                Step(tool="book", arguments=wishes),
            ),
            secrets=(wishes["destination"], wishes["day"]),
        )

    def reset(self, problem: Problem) -> None:
        """Note the wishes."""
        self._wishes = problem.data["wishes"]

    @tool
    async def say(self, message: str) -> str:
        """Say something to the traveller and hear the answer.

        message: what to say
        """
        if sum(who == "policy" for who, _ in self._said) >= MAX_SAID:
            raise Refused("The traveller has left.")
        persona = "You want to book a train ticket. Tell only what you are asked for.\n"
        persona += "\n".join(f"{wish}: {value}" for wish, value in self._wishes.items())
        self._said.append(("policy", message))
        answer = await self._speaker(persona, tuple(self._said))
        self._said.append(("speaker", answer))
        return answer

    @tool
    def book(self, destination: str, day: str, seat: str) -> str:
        """Book the ticket. This ends the conversation.

        destination: the town
        day: the day of the week
        seat: window, aisle or table
        """
        self._booked = {"destination": destination, "day": day, "seat": seat}
        self.done = True
        return "Booked."

    def state(self) -> dict[str, Any]:
        """What was booked, and how often the policy spoke."""
        return {"booked": self._booked, "said": len(self._said) // 2}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The opposite of `state`."""
        self._booked = state["booked"]
        self._said = [("policy", "")] * state["said"]

    def grade(self) -> Grade:
        """Every wish is a component; the reward needs all of them."""
        booked = self._booked or {}
        right = {w: float(booked.get(w, "").strip().lower() == v.lower()) for w, v in self._wishes.items()}
        return Grade(reward=min(right.values()), components=right, facts={"said": len(self._said)})


@environment("simulated-search")
class SimulatedSearch:
    """Answer a question by asking a simulated search engine."""

    def __init__(self, speaker: Speaker = scripted_engine) -> None:
        self.done = False
        self._speaker = speaker
        self._answer = ""
        self._given = ""

    @staticmethod
    def problem(seed: int) -> Problem:
        """The questions of `search`."""
        return search.Search.problem(seed)

    def reset(self, problem: Problem) -> None:
        """Note the right answer."""
        self._answer = problem.data["answer"]

    @tool
    async def search(self, query: str) -> str:
        """Find pages.

        query: words that the page should contain
        """
        persona = "You are a search engine. Answer a query with two short pages, as [title] text."
        return await self._speaker(persona, (("policy", query),))

    @tool
    def submit(self, answer: str) -> str:
        """Hand in the answer.

        answer: a name, nothing else
        """
        self._given = answer
        self.done = True
        return "Submitted."

    def state(self) -> dict[str, Any]:
        """What was handed in."""
        return {"given": self._given}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The opposite of `state`."""
        self._given = state["given"]

    def grade(self) -> Grade:
        """Exact match after normalization."""
        right = search.normal(self._given) == search.normal(self._answer)
        return Grade(reward=float(right), components={"exact_match": float(right)})
