"""The built-in environments: what each promises beside what the conformance kit checks."""

from __future__ import annotations

import asyncio
import math
import random
from contextlib import closing
from pathlib import Path

import pytest
from env_sessions import attempt
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from envs import registry
from envs.builtin import calculator, search, simulated, sql
from envs.conformance import check, check_packages
from envs.environment import Refused, Step, ToolEnvironment, of_class
from envs.sandbox.plain import PlainBackend

TOOL_ENVIRONMENTS = (
    "attempt-verify-revise",
    "attempt-verify-revise?scheme=pag&base=search",
    "calculator",
    "search",
    "simulated-search",
    "sql",
    "user",
)


def tool_environment(name: str) -> ToolEnvironment:
    found = registry.get(name)
    assert isinstance(found, ToolEnvironment)
    return found


@pytest.mark.parametrize("name", TOOL_ENVIRONMENTS)
def test_every_tool_environment_passes_the_conformance_kit(name: str) -> None:
    failed = [row for row in asyncio.run(check(tool_environment(name), seeds=3)) if not row.passed]
    assert not failed


def test_python_tasks_pass_the_conformance_kit_in_sandboxes(tmp_path: Path) -> None:
    found = registry.get("python")
    assert not isinstance(found, ToolEnvironment)

    async def run() -> list[str]:
        backend = PlainBackend(tmp_path / "state")
        try:
            rows = await check_packages(found, backend, tmp_path / "tasks", seeds=2)
        finally:
            await backend.close()
        return [row.seen for row in rows if not row.passed]

    assert asyncio.run(run()) == []


# ------------------------------------------------------------------------------------------------- calculator


@given(
    st.recursive(
        st.integers(0, 99).map(str),
        lambda e: st.tuples(e, st.sampled_from("+-*"), e).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        max_leaves=8,
    )
)
@settings(max_examples=60, deadline=None)
def test_arithmetic_is_what_python_says(expression: str) -> None:
    assert calculator.evaluate(expression) == eval(expression)


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "1 +",
        "__import__('os')",
        "a",
        "1.5",
        "True",
        "1 / 2",
        "2 ** -1",
        "9 ** 9 ** 9",
        "1 // 0",
        "(" * 300,
        "f'{1}'",
    ],
)
def test_anything_but_small_integers_is_refused(bad: str) -> None:
    with pytest.raises(Refused):
        calculator.evaluate(bad)


# ----------------------------------------------------------------------------------------------------- search


def test_bm25_is_the_formula_worked_by_hand() -> None:
    pages = [search.Document("a", "red fox"), search.Document("b", "red red hen sat")]
    index = search.Index(pages)
    # N = 2, "fox" in one: idf = ln(1 + 1.5/1.5) = ln 2; lengths 3 and 5, mean 4
    damp = 1.2 * (1 - 0.75 + 0.75 * 3 / 4)
    assert index.score(["fox"], 0) == pytest.approx(math.log(2) * 2.2 / (1 + damp))
    assert index.score(["fox"], 1) == 0.0
    assert [d.title for d in index.search("red", 2)] == ["b", "a"]


def test_both_steps_of_a_question_are_found_in_the_first_results() -> None:
    environment = tool_environment("search")
    for seed in range(20):
        problem = environment.problem(seed)
        seen, verdict = attempt(environment, problem.gold, seed)
        assert problem.data["answer"] in seen[1].text
        assert verdict.reward == 1.0


# -------------------------------------------------------------------------------------------------------- sql


@pytest.mark.parametrize(
    "bad",
    [
        "DELETE FROM orders",
        "UPDATE orders SET amount = 0",
        "CREATE TABLE t (a)",
        "ATTACH DATABASE '/etc/passwd' AS x",
        "PRAGMA query_only = OFF",
        "SELECT load_extension('x')",
        "SELECT random()",
        "SELECT date('now')",
        "SELECT 1; SELECT 2",
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n",
        "nonsense",
    ],
)
def test_a_query_can_only_read_and_only_for_a_while(bad: str) -> None:
    with closing(sql.database("rows")) as connection:
        before = sql.run(connection, "SELECT count(*), sum(amount) FROM orders")
        with pytest.raises(Refused):
            sql.run(connection, bad)
        assert sql.run(connection, "SELECT count(*), sum(amount) FROM orders") == before


def test_a_constant_in_place_of_a_query_does_not_match() -> None:
    environment = tool_environment("sql")
    for seed in range(8):
        problem = environment.problem(seed)
        with closing(sql.database(problem.data["rows"])) as connection:
            names, rows = sql.run(connection, problem.data["sql"])
        values = ", ".join("(" + ", ".join(repr(v) for v in row) + ")" for row in rows)
        constant = Step(tool="submit", arguments={"sql": f"SELECT * FROM (VALUES {values})"})
        _, verdict = attempt(environment, [constant], seed)
        assert (verdict.reward, verdict.components["match"]) == (0.0, 1.0), names


def test_rows_match_as_a_multiset_unless_an_order_was_asked_for() -> None:
    one, two = [(1, "a"), (2, "b")], [(2.0, "b"), (1, "a")]
    assert sql.match(one, two, ordered=False)
    assert not sql.match(one, two, ordered=True)
    assert not sql.match(one, [*one, one[0]], ordered=False)


# ------------------------------------------------------------------------------------ attempt, verify, revise

RIGHT, WRONG = True, False


@pytest.mark.parametrize(
    ("scheme", "first", "judged", "revised", "reward"),
    [
        ("score", RIGHT, True, None, 1.0),
        ("score", WRONG, False, RIGHT, 1.5),
        ("score", RIGHT, False, WRONG, -0.5),
        ("score", WRONG, True, None, 0.0),
        ("s2r", RIGHT, True, None, 1.5),
        ("s2r", WRONG, False, RIGHT, 1.5),
        ("s2r", WRONG, True, None, -0.5),
        ("pag", RIGHT, True, None, 1.5),
        ("pag", WRONG, False, RIGHT, 1.5),
        ("pag", WRONG, False, WRONG, 0.5),
    ],
)
def test_the_rewards_are_those_of_the_schemes(
    scheme: str, first: bool, judged: bool, revised: bool | None, reward: float
) -> None:
    environment = tool_environment(f"attempt-verify-revise?scheme={scheme}")
    answer = environment.problem(3).data["answer"]

    def given_(right: bool) -> dict[str, int]:
        return {"answer": answer if right else answer + 1}

    steps = [
        Step(tool="attempt", arguments=given_(first)),
        Step(tool="verify", arguments={"correct": judged}),
        Step(tool="finish") if revised is None else Step(tool="revise", arguments=given_(revised)),
    ]
    _, verdict = attempt(environment, steps, 3)
    assert verdict.reward == reward


def test_pag_revises_only_what_was_judged_wrong() -> None:
    environment = tool_environment("attempt-verify-revise?scheme=pag")
    steps = [
        Step(tool="attempt", arguments={"answer": 1}),
        Step(tool="verify", arguments={"correct": True}),
        Step(tool="revise", arguments={"answer": 2}),
    ]
    seen, _ = attempt(environment, steps)
    assert seen[2].is_error


# ----------------------------------------------------------------------------------------------- someone else


def test_another_speaker_is_heard_and_never_decides_the_reward() -> None:
    async def liar(persona: str, said: object) -> str:
        return f"I do not know. {random.random()}"

    environment = of_class(simulated.User).with_options(speaker=liar)
    problem = environment.problem(1)
    seen, verdict = attempt(environment, problem.gold, 1)
    assert seen[0].text.startswith("I do not know.")
    assert verdict.reward == 1.0
    assert next(e for e in verdict.evidence if e.key == "E7_fresh_verifier").facts["by"] == "state"


# --------------------------------------------------------------------------------------------------- registry


def test_an_unknown_name_or_option_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'calculator'"):
        registry.get("calculater")
    with pytest.raises(ConfigError, match="no option bass"):
        registry.get("attempt-verify-revise?bass=sql")
    with pytest.raises(ConfigError, match="Did you mean 'pag'"):
        tool_environment("attempt-verify-revise?scheme=pga").make()
