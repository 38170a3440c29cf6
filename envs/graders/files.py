"""Graders of what lies in the workdir: a file's content, or what a query of SQLite returns."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from agentrl.errors import TaskError
from envs.builtin import sql
from envs.environment import Refused
from envs.graders.contract import Attempt, Graded, parsed_json

_STRICT = ConfigDict(extra="forbid")
MAX_DATABASE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class FileEqual:
    """1 when a file of the workdir equals a file of `tests/`: by bytes, as text without trailing blanks, or
    as JSON. Links are not followed; a file that is missing is 0."""

    decides: ClassVar[bool] = True

    path: str
    expected: str
    mode: Literal["bytes", "text", "json"] = "text"

    async def grade(self, attempt: Attempt) -> Graded:
        wanted = attempt.expected(self.expected)
        given = attempt.file(self.path)
        if given is None:
            return Graded(value=0.0, facts={"found": False})
        return Graded(value=float(self._same(wanted, given)), facts={"found": True, "bytes": len(given)})

    def _same(self, wanted: bytes, given: bytes) -> bool:
        if self.mode == "bytes":
            return wanted == given
        if self.mode == "text":
            return [line.rstrip() for line in wanted.rstrip().splitlines()] == [
                line.rstrip() for line in given.rstrip().splitlines()
            ]
        right = parsed_json(wanted, f"tests/{self.expected}")
        try:
            seen: Any = json.loads(given)
        except (ValueError, RecursionError):
            return False
        # Canonical text, since 1 == True == 1.0 in Python but not in JSON.
        return json.dumps(right, sort_keys=True) == json.dumps(seen, sort_keys=True)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class SqlEqual:
    """1 when a query returns the rows that it should, as in `envs.builtin.sql`: read only, within a budget.

    With `answer` the policy's query (a file of the workdir) is run on the database `tests/<database>`, and
    must return what `query` returns there. Without it `query` is run on the policy's database (a file of the
    workdir), and must return what it returns on `tests/<reference>`.
    """

    decides: ClassVar[bool] = True

    database: str
    query: str
    answer: str = ""
    reference: str = ""
    ordered: bool = False

    async def grade(self, attempt: Attempt) -> Graded:
        if bool(self.answer) is bool(self.reference):
            raise TaskError(
                "sql-equal needs either answer or reference.",
                fix="answer: the policy writes a query; reference: it changes a database.",
                code="grader",
                phase="verify",
            )
        trusted = attempt.expected(self.reference or self.database)
        given = attempt.file(self.answer or self.database)
        if given is None or len(given) > MAX_DATABASE_BYTES:
            return Graded(value=0.0, facts={"found": given is not None})
        return await asyncio.to_thread(self._judge, trusted, given)

    def _judge(self, trusted: bytes, given: bytes) -> Graded:
        try:
            with _opened(trusted) as connection:
                wanted = sql.run(connection, self.query)[1]
        except (Refused, sqlite3.Error) as error:
            raise TaskError(
                f"sql-equal: the task's own query fails: {error}.", code="grader", phase="verify"
            ) from error
        try:
            with _opened(trusted if self.answer else given) as connection:
                text = given.decode("utf-8") if self.answer else self.query
                seen = sql.run(connection, text)[1]
        except (Refused, sqlite3.Error, UnicodeDecodeError) as error:
            return Graded(value=0.0, facts={"found": True, "error": str(error)[:200]})
        same = sql.match(wanted, seen, ordered=self.ordered)
        return Graded(value=float(same), facts={"found": True, "rows": len(seen), "wanted": len(wanted)})


@contextmanager
def _opened(raw: bytes) -> Iterator[sqlite3.Connection]:
    """A database from its bytes, in memory: nothing that it names can be reached, and it can only be read."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.deserialize(raw)
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cell_size_check = ON")
        sql.guard(connection)
        yield connection
