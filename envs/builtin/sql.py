"""`sql`: questions about a SQLite database, answered by a query that is judged by what it returns.

The policy's connection can only read: an authorizer allows SELECT and pure functions and nothing else, and a
budget of virtual-machine steps (not seconds, so that it is the same every time) ends endless queries. The
query that is handed in is run on the database it was written against and on another of the same schema with
other rows: a constant in place of a query does not match there. Execution match as in Spider (arXiv
1809.08887): rows as a multiset, in order only where the question asks for an order.
"""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from envs.environment import Grade, Problem, Refused, Step, environment, tool

MAX_STEPS = 5_000_000
"""Virtual-machine instructions of one query."""
STEPS_PER_CHECK = 10_000
MAX_ROWS = 200
SHOWN_ROWS = 20
MAX_VALUE_BYTES = 100_000

SCHEMA = """\
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL, city TEXT NOT NULL);
CREATE TABLE products (
  id INTEGER PRIMARY KEY, name TEXT NOT NULL, kind TEXT NOT NULL, price INTEGER NOT NULL);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer INTEGER NOT NULL REFERENCES customers(id),
  product INTEGER NOT NULL REFERENCES products(id), amount INTEGER NOT NULL, year INTEGER NOT NULL);
"""
_CITIES = ("Arden", "Brill", "Corby", "Delph", "Eccles", "Fowey")
_KINDS = ("book", "lamp", "rope", "tent", "tool")
_NAMES = (
    "Ana",
    "Ben",
    "Cid",
    "Dot",
    "Eve",
    "Fay",
    "Gus",
    "Hob",
    "Ivy",
    "Jan",
    "Kim",
    "Lev",
    "Mia",
    "Ned",
    "Oz",
)
_YEARS = (2021, 2022, 2023, 2024)
_IMPURE = frozenset(
    [
        "random",
        "randomblob",
        "date",
        "time",
        "datetime",
        "julianday",
        "strftime",
        "unixepoch",
        "timediff",
        "current_date",
        "current_time",
        "current_timestamp",
        "load_extension",
    ]
)
_ALLOWED = frozenset(
    (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
)

Rows = list[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the query that answers it, and whether the order of rows matters."""

    text: str
    sql: str
    ordered: bool = False


def database(seed: str) -> sqlite3.Connection:
    """A new database in memory that can only be read from now on."""
    rng = random.Random(seed)
    # A tool may run in another thread than `reset`; never in two at once.
    made = sqlite3.connect(":memory:", check_same_thread=False)
    made.executescript(SCHEMA)
    customers = [(i, name, rng.choice(_CITIES)) for i, name in enumerate(_NAMES, 1)]
    products = [
        (i, f"{rng.choice(_KINDS)}-{i}", rng.choice(_KINDS), rng.randint(2, 90)) for i in range(1, 13)
    ]
    orders = [
        (i, rng.randint(1, len(customers)), rng.randint(1, 12), rng.randint(1, 9), rng.choice(_YEARS))
        for i in range(1, 121)
    ]
    made.executemany("INSERT INTO customers VALUES (?, ?, ?)", customers)
    made.executemany("INSERT INTO products VALUES (?, ?, ?, ?)", products)
    made.executemany("INSERT INTO orders VALUES (?, ?, ?, ?, ?)", orders)
    made.commit()
    guard(made)
    return made


def guard(connection: sqlite3.Connection) -> None:
    """From now on the connection can only read, and only so much."""
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    connection.execute("PRAGMA query_only = ON")
    connection.set_authorizer(_authorize)


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    pure = action != sqlite3.SQLITE_FUNCTION or (second or "").lower() not in _IMPURE
    return sqlite3.SQLITE_OK if action in _ALLOWED and pure else sqlite3.SQLITE_DENY


@contextmanager
def _budget(connection: sqlite3.Connection) -> Iterator[None]:
    left = MAX_STEPS // STEPS_PER_CHECK

    def check() -> int:
        nonlocal left
        left -= 1
        return left < 0

    connection.set_progress_handler(check, STEPS_PER_CHECK)
    try:
        yield
    finally:
        connection.set_progress_handler(None, 0)


def run(connection: sqlite3.Connection, sql: str) -> tuple[list[str], Rows]:
    """Column names and at most `MAX_ROWS` rows. `Refused` says what SQLite said."""
    try:
        with _budget(connection), closing(connection.cursor()) as cursor:
            cursor.execute(sql)
            if cursor.description is None:
                raise Refused("That is not a SELECT statement.")
            return [column[0] for column in cursor.description], cursor.fetchmany(MAX_ROWS + 1)
    except sqlite3.OperationalError as error:
        if "interrupted" in str(error):
            raise Refused("The query takes too long.") from None
        raise Refused(f"SQL error: {error}") from None
    except (sqlite3.Error, sqlite3.Warning, ValueError, UnicodeError) as error:
        raise Refused(f"SQL error: {error}") from None


def match(wanted: Rows, given: Rows, *, ordered: bool) -> bool:
    """Whether two results are the same, numbers to nine digits."""

    def cells(rows: Rows) -> list[tuple[Any, ...]]:
        return [tuple(float(f"{v:.9g}") if isinstance(v, float | int) else v for v in row) for row in rows]

    a, b = cells(wanted), cells(given)
    return a == b if ordered else Counter(a) == Counter(b)


def question(rng: random.Random) -> Question:
    """One of the shapes, filled."""
    city, kind, year, since = (rng.choice(c) for c in (_CITIES, _KINDS, _YEARS, _YEARS[:3]))
    count, price = rng.randint(2, 6), rng.randint(10, 60)
    joined = "orders o JOIN customers c ON c.id = o.customer JOIN products p ON p.id = o.product"
    return rng.choice(
        (
            Question(
                f"How many orders did customers in {city} make in {year}?",
                "SELECT count(*) FROM orders o JOIN customers c ON c.id = o.customer"
                f" WHERE c.city = '{city}' AND o.year = {year}",
            ),
            Question(
                f"What was the total value (amount times price) of orders of kind {kind} in {year}?",
                "SELECT coalesce(sum(o.amount * p.price), 0) FROM orders o"
                f" JOIN products p ON p.id = o.product WHERE p.kind = '{kind}' AND o.year = {year}",
            ),
            Question(
                f"Which customers ordered a product dearer than {price} in {year}? Names, each once.",
                f"SELECT DISTINCT c.name FROM {joined} WHERE p.price > {price} AND o.year = {year}",
            ),
            Question(
                f"List the {count} customers with the largest amount ordered up to {year}, largest first"
                " and then by name: name and total.",
                "SELECT c.name, sum(o.amount) AS total FROM orders o JOIN customers c ON c.id = o.customer"
                f" WHERE o.year <= {year} GROUP BY c.id ORDER BY total DESC, c.name LIMIT {count}",
                ordered=True,
            ),
            Question(
                f"For each city, how many orders of kind {kind} were made since {since}? City and number,"
                " only cities with any.",
                f"SELECT c.city, count(*) FROM {joined} WHERE p.kind = '{kind}' AND o.year >= {since}"
                " GROUP BY c.city",
            ),
        )
    )


@environment("sql")
class Sql:
    """Answer a question with one SQL query on a read-only database."""

    def __init__(self) -> None:
        self.done = False
        self._problem: Problem | None = None
        self._connection: sqlite3.Connection | None = None
        self._given: str | None = None

    @staticmethod
    def problem(seed: int) -> Problem:
        """A question whose answer is not the same on the other database."""
        rng = random.Random(f"sql/{seed}")
        while True:
            asked = question(rng)
            rows = f"sql/{seed}/{rng.random()}"
            with closing(database(rows)) as one, closing(database(f"{rows}/other")) as other:
                a, b = run(one, asked.sql)[1], run(other, asked.sql)[1]
            if a and not match(a, b, ordered=asked.ordered):
                break
        return Problem(
            instruction=f"{asked.text} Submit the SQL query that answers it (SQLite).",
            data={"sql": asked.sql, "ordered": asked.ordered, "rows": rows},
            gold=(
                Step(tool="schema"),
                Step(tool="query", arguments={"sql": asked.sql}),
                Step(tool="submit", arguments={"sql": asked.sql}),
            ),
            secrets=(asked.sql,),
        )

    def reset(self, problem: Problem) -> None:
        """Make the database."""
        self._problem = problem
        self._connection = database(problem.data["rows"])

    @tool
    def schema(self) -> str:
        """Show the tables and their columns."""
        return SCHEMA.strip()

    @tool(timeout_owner="policy")
    def query(self, sql: str) -> str:
        """Run a SELECT statement and show its rows.

        sql: one statement
        """
        assert self._connection is not None
        names, rows = run(self._connection, sql)
        lines = [" | ".join(names)]
        lines += [" | ".join(str(value) for value in row) for row in rows[:SHOWN_ROWS]]
        if len(rows) > SHOWN_ROWS:
            lines.append(
                f"({'more than ' if len(rows) > MAX_ROWS else ''}{min(len(rows), MAX_ROWS)} rows in all)"
            )
        return "\n".join(lines)

    @tool
    def submit(self, sql: str) -> str:
        """Hand in the query.

        sql: the SELECT statement that answers the question
        """
        self._given = sql
        self.done = True
        return "Submitted."

    def grade(self) -> Grade:
        """Execution match on both databases."""
        assert self._problem is not None
        seen = self._matches(self._problem.data["rows"])
        unseen = self._matches(f"{self._problem.data['rows']}/other")
        return Grade(
            reward=float(seen and unseen),
            components={"match": float(seen), "match_other_rows": float(unseen)},
            facts={"sql": None if self._given is None else self._given[:500]},
        )

    def _matches(self, rows: str) -> bool:
        assert self._problem is not None
        if self._given is None:
            return False
        with closing(database(rows)) as connection:
            wanted = run(connection, self._problem.data["sql"])[1]
            try:
                given = run(connection, self._given)[1]
            except Refused:
                return False
        return match(wanted, given, ordered=self._problem.data["ordered"])

    def close(self) -> None:
        """Close the database."""
        if self._connection is not None:
            self._connection.close()
