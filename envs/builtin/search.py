"""`search`: questions of two steps over a local corpus, answered by searching (BM25).

The corpus is a small made-up world, generated from one fixed seed: nobody can know its facts, so an answer
was found or guessed. What a search returns is an observation, so its tokens are never trained on (arXiv
2503.09516, retrieved-token masking, here by construction).
"""

from __future__ import annotations

import functools
import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from envs.environment import Grade, Problem, Refused, Step, environment, tool

WORLD_SEED = "world/1"
PEOPLE, COMPANIES, TOWNS = 300, 120, 60
K1, B = 1.2, 0.75
"""BM25's saturation and length normalization (Robertson and Zaragoza, 2009)."""
MAX_RESULTS = 5

_FIRST = (
    "Ada",
    "Bo",
    "Cleo",
    "Dov",
    "Ede",
    "Finn",
    "Gia",
    "Hal",
    "Ines",
    "Jun",
    "Kit",
    "Lio",
    "Mara",
    "Nils",
)
_SYLLABLES = (
    "bar",
    "dor",
    "fen",
    "gal",
    "hol",
    "kes",
    "lun",
    "mar",
    "nor",
    "pel",
    "quin",
    "ros",
    "sol",
    "tam",
)
_ENDS = ("by", "dale", "ford", "ham", "mere", "stead", "ton", "wick")
_TRADES = ("boats", "clocks", "glass", "kites", "lamps", "maps", "paper", "ropes", "tiles", "wool")


@dataclass(frozen=True, slots=True)
class Document:
    """A page: its title and one paragraph."""

    title: str
    text: str


def words(text: str) -> list[str]:
    """Lower-case words and numbers."""
    return re.findall(r"[a-z0-9]+", text.lower())


class Index:
    """BM25 over documents, title included. The same corpus and query give the same order."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = tuple(documents)
        self._counts = [Counter(words(f"{d.title} {d.text}")) for d in documents]
        self._lengths = [count.total() for count in self._counts]
        self._mean = sum(self._lengths) / len(self._lengths)
        self._holding: Mapping[str, list[int]] = self._postings()

    def _postings(self) -> dict[str, list[int]]:
        postings: dict[str, list[int]] = {}
        for number, count in enumerate(self._counts):
            for word in count:
                postings.setdefault(word, []).append(number)
        return postings

    def idf(self, word: str) -> float:
        """ln(1 + (N - n + 1/2) / (n + 1/2)) for a word in n of N documents."""
        n = len(self._holding.get(word, ()))
        return math.log(1 + (len(self.documents) - n + 0.5) / (n + 0.5))

    def score(self, query: Iterable[str], number: int) -> float:
        """BM25 of one document."""
        count, length = self._counts[number], self._lengths[number]
        damp = K1 * (1 - B + B * length / self._mean)
        return sum(self.idf(w) * count[w] * (K1 + 1) / (count[w] + damp) for w in query if count[w])

    def search(self, query: str, limit: int) -> list[Document]:
        """The best documents, at most `limit`; equal scores in the order of the corpus."""
        asked = words(query)
        found = sorted({number for word in asked for number in self._holding.get(word, ())})
        ranked = sorted(found, key=lambda number: -self.score(asked, number))
        return [self.documents[number] for number in ranked[:limit]]


@dataclass(frozen=True, slots=True)
class World:
    """Documents, and the facts that they say."""

    index: Index
    born: Mapping[str, str]
    founder: Mapping[str, str]
    seat: Mapping[str, str]
    mayor: Mapping[str, str]
    river: Mapping[str, str]


def _named(rng: random.Random, count: int, shape: int, ends: Sequence[str]) -> list[str]:
    made: dict[str, None] = {}
    while len(made) < count:
        stem = "".join(rng.choice(_SYLLABLES) for _ in range(shape))
        made[(stem + rng.choice(ends)).capitalize()] = None
    return list(made)


@functools.cache
def world() -> World:
    """The one world; made in some milliseconds."""
    rng = random.Random(WORLD_SEED)
    families = _named(rng, PEOPLE, 2, ("a", "el", "er", "ik", "o", "us"))
    people = [f"{rng.choice(_FIRST)} {family}" for family in families]
    towns = _named(rng, TOWNS, 1, _ENDS)
    companies = [f"{name} Works" for name in _named(rng, COMPANIES, 2, ("ex", "ia", "on", "um"))]
    rivers = [f"River {name}" for name in _named(rng, TOWNS, 2, ("ane", "esk", "ilt", "our"))]
    born = {person: rng.choice(towns) for person in people}
    founder = dict(zip(companies, rng.sample(people, COMPANIES), strict=True))
    seat = {company: rng.choice(towns) for company in companies}
    mayor = dict(zip(towns, rng.sample(people, TOWNS), strict=True))
    river = dict(zip(towns, rivers, strict=True))
    pages = [Document(p, f"{p} was born in {born[p]} in {rng.randint(1900, 1999)}.") for p in people]
    pages += [
        Document(
            c, f"{c} makes {rng.choice(_TRADES)}. It was founded by {founder[c]}. Its seat is {seat[c]}."
        )
        for c in companies
    ]
    pages += [Document(t, f"{t} is a town on the {river[t]}. Its mayor is {mayor[t]}.") for t in towns]
    rng.shuffle(pages)
    return World(Index(pages), born, founder, seat, mayor, river)


def _questions(w: World, rng: random.Random) -> Iterator[tuple[str, str, str, str]]:
    """(question, first query, second query, answer) without end."""
    while True:
        company, person = rng.choice(list(w.founder)), rng.choice(list(w.born))
        by = w.founder[company]
        yield rng.choice(
            (
                (f"In which town was the founder of {company} born?", f"{company} founded", by, w.born[by]),
                (
                    f"On which river is the town where {person} was born?",
                    person,
                    f"{w.born[person]} town river",
                    w.river[w.born[person]],
                ),
                (
                    f"Who is the mayor of the town where {company} has its seat?",
                    f"{company} seat",
                    f"{w.seat[company]} mayor",
                    w.mayor[w.seat[company]],
                ),
            )
        )


def normal(answer: str) -> str:
    """An answer without case, punctuation and articles, as exact match compares it (arXiv 1606.05250)."""
    return " ".join(word for word in words(answer) if word not in ("a", "an", "the"))


@environment("search")
class Search:
    """Answer a question about an unknown world by searching its pages."""

    def __init__(self) -> None:
        self.done = False
        self._answer = ""
        self._given = ""
        self._searches = 0

    @staticmethod
    def problem(seed: int) -> Problem:
        """A question that needs two pages."""
        question, first, second, answer = next(_questions(world(), random.Random(f"search/{seed}")))
        return Problem(
            instruction=question,
            data={"answer": answer},
            gold=(
                Step(tool="search", arguments={"query": first}),
                Step(tool="search", arguments={"query": second}),
                Step(tool="submit", arguments={"answer": answer}),
            ),
            secrets=(answer,),
        )

    def reset(self, problem: Problem) -> None:
        """Note the right answer."""
        self._answer = problem.data["answer"]

    @tool
    def search(self, query: str, limit: int = 3) -> str:
        """Find pages.

        query: words that the page should contain
        limit: how many pages to show, at most 5
        """
        if not words(query):
            raise Refused("The query has no words.")
        self._searches += 1
        found = world().index.search(query, max(1, min(limit, MAX_RESULTS)))
        return "\n".join(f"[{page.title}] {page.text}" for page in found) or "No page has these words."

    @tool
    def submit(self, answer: str) -> str:
        """Hand in the answer.

        answer: a name, nothing else
        """
        self._given = answer
        self.done = True
        return "Submitted."

    def grade(self) -> Grade:
        """Exact match after normalization."""
        right = normal(self._given) == normal(self._answer)
        return Grade(
            reward=float(right),
            components={"exact_match": float(right)},
            facts={"given": self._given[:200], "searches": self._searches},
        )
