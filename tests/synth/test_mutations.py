"""Bugs by edits of one span: each kind worked by hand, and what holds for all of them."""

from __future__ import annotations

import ast
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.tasks.synth.mutations import COMPOSED, KINDS, Edit, Mutation, apply, holds, inverse, propose

# kind, source, what one mutant of that kind looks like
WORKED = [
    ("operator", "def f(a, b):\n    return a  +  b\n", "def f(a, b):\n    return a  -  b\n"),
    ("operator", "def f(a):\n    a //= 2\n    return a\n", "def f(a):\n    a /= 2\n    return a\n"),
    ("comparison", "def f(a, b):\n    return a not  in b\n", "def f(a, b):\n    return a in b\n"),
    (
        "comparison",
        "def f(a, b):\n    return (a) == (b)  # same\n",
        "def f(a, b):\n    return (a) != (b)  # same\n",
    ),
    ("boundary", "def f(a):\n    return a <= 3\n", "def f(a):\n    return a < 3\n"),
    ("off_by_one", "def f(a):\n    return a[0:]\n", "def f(a):\n    return a[1:]\n"),
    (
        "boolean",
        "def f(a, b):\n    return (a and\n            b)\n",
        "def f(a, b):\n    return (a or\n            b)\n",
    ),
    (
        "negation",
        "def f(a):\n    if not(a):\n        return 1\n",
        "def f(a):\n    if (a):\n        return 1\n",
    ),
    (
        "negation",
        "def f(a):\n    while a.b:\n        a = 1\n",
        "def f(a):\n    while not a.b:\n        a = 1\n",
    ),
    ("wrong_variable", "def f(a, b):\n    return [a]\n", "def f(a, b):\n    return [b]\n"),
    ("wrong_function", "def f(a):\n    return min(a)\n", "def f(a):\n    return max(a)\n"),
    (
        "dropped_branch",
        "def f(a):\n    if a:  # odd\n        return 1\n    return 2\n",
        "def f(a):\n    return 2\n",
    ),
    (
        "dropped_branch",
        "def f(a):\n    if a:\n        b = 1\n    elif a is None:\n        b = 2\n    else:\n        b = 3\n"
        "    return b\n",
        "def f(a):\n    if a:\n        b = 1\n    else:\n        b = 3\n    return b\n",
    ),
    (
        "dropped_branch",
        "def f(a):\n    if a:\n        b = 1\n    else:  # else\n        b = 3\n    return b\n",
        "def f(a):\n    if a:\n        b = 1\n    return b\n",
    ),
    ("dropped_statement", "def f(a):\n    a.sort()  # order\n    return a\n", "def f(a):\n    return a\n"),
    ("swapped_arguments", "def f(a, b):\n    return g(a , (b))\n", "def f(a, b):\n    return g(b , (a))\n"),
    ("removed_return", "def f(a):\n    return  a + 1\n", "def f(a):\n    a + 1\n"),
    ("removed_await", "async def f(a):\n    return await a.b\n", "async def f(a):\n    return a.b\n"),
    (
        "exception_swallowed",
        "def f(a):\n    if a:\n        raise ValueError(\n            'no')\n",
        "def f(a):\n    if a:\n        pass\n",
    ),
    (
        "exception_swallowed",
        "def f(a):\n    try:\n        a()\n    except KeyError:\n        return 1\n",
        "def f(a):\n    try:\n        a()\n    except KeyError:\n        pass\n",
    ),
    (
        "exception_type",
        "def f(a):\n    try:\n        a()\n    except KeyError:\n        return 1\n",
        "def f(a):\n    try:\n        a()\n    except IndexError:\n        return 1\n",
    ),
    ("default", "def f(a, *, b=True):\n    return a\n", "def f(a, *, b=False):\n    return a\n"),
    ("default", "def f(a='x-'):\n    return a\n", "def f(a='x'):\n    return a\n"),
    ("constant", "def f():\n    return False\n", "def f():\n    return True\n"),
    ("loop", "def f(a):\n    for b in a:\n        break\n", "def f(a):\n    for b in a:\n        continue\n"),
    ("string", "def f(a):\n    return a + 'é, '\n", "def f(a):\n    return a + 'é,'\n"),
    ("string", "def f(a):\n    return a + '-'\n", "def f(a):\n    return a + '_'\n"),
    ("regex", "import re\nX = re.compile(r'é\\d+')\n", "import re\nX = re.compile(r'é\\w+')\n"),
]


def mutants(source: str, kind: str) -> list[tuple[Mutation, str]]:
    raw = source.encode()
    return [
        (m, apply(raw, [m.edit]).decode())
        for seed in range(8)
        for m in propose("x.py", raw, random.Random(seed))
        if m.kind == kind
    ]


@pytest.mark.parametrize(
    ("kind", "before", "after"), WORKED, ids=[f"{k}-{i}" for i, (k, _, _) in enumerate(WORKED)]
)
def test_a_bug_of_each_kind_is_made_as_worked_out_by_hand(kind: str, before: str, after: str) -> None:
    assert after in [text for _, text in mutants(before, kind)]


def test_every_kind_is_worked_out() -> None:
    assert {kind for kind, _, _ in WORKED} == set(KINDS) - set(COMPOSED)
    assert len(KINDS) >= 12


LEFT_ALONE = '''\
"""Doc 1."""
from __future__ import annotations
import sys
from typing import TYPE_CHECKING
__version__ = "1.2"
if TYPE_CHECKING:
    import x
def f(a: "list[1]" = None) -> "int":
    """Doc 2."""
    assert a == 1, "no 3"
    raise KeyError(f"no {a + 1} 4")
'''


def test_what_no_test_sees_is_left_alone() -> None:
    kinds = {m.kind for m in propose("x.py", LEFT_ALONE.encode(), random.Random(1))}
    assert kinds == {"exception_swallowed"}


@pytest.mark.parametrize("raw", [b"def f(:\n", b"x = 1\r\n", "\ufeffx = 1\n".encode(), b"x = '\xff'\n"])
def test_a_file_that_cannot_be_edited_by_bytes_is_left_alone(raw: bytes) -> None:
    assert propose("x.py", raw, random.Random(1)) == []


def test_a_test_must_execute_the_changed_lines_or_for_a_module_any() -> None:
    source = b"X = 3\n\n\ndef f(a=1):\n    b = (a\n         + X)\n    return b\n"
    watch = {m.kind: m.watch for m in propose("x.py", source, random.Random(1))}
    assert watch["off_by_one"] == (0, 0)
    assert watch["operator"] == (5, 6)
    assert watch["default"] == (5, 7)


SOURCE = (
    "\n".join(before for _, before, _ in WORKED).replace("import re\n", "")
    + '\n\nclass C:\n    limit = 7\n\n    def m(self, é, n=2):\n        """Ünï."""\n'
    + '        if é < n and not self.limit:\n            return "ü" + é[1:]\n        return n ** 2  # ß\n'
).encode()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_a_mutant_differs_in_exactly_the_span_and_the_fix_restores_every_byte(
    seed: int, data: st.DataObject
) -> None:
    mutation = data.draw(st.sampled_from(propose("x.py", SOURCE, random.Random(seed))))
    edit = mutation.edit
    assert holds(SOURCE, [edit])
    changed = apply(SOURCE, [edit])
    ast.parse(changed)
    assert SOURCE[edit.start : edit.end] == edit.old.encode()
    assert changed[: edit.start] == SOURCE[: edit.start]
    assert changed[edit.start + len(edit.new.encode()) :] == SOURCE[edit.end :]
    assert apply(changed, inverse([edit])) == SOURCE


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_several_bugs_are_undone_together(seed: int, data: st.DataObject) -> None:
    found = propose("x.py", SOURCE, random.Random(seed))
    first, second = (data.draw(st.sampled_from(found)).edit for _ in "ab")
    if first.end <= second.start or second.end <= first.start:
        both = [first, second]
        if first.start != second.start:
            assert apply(apply(SOURCE, both), inverse(both)) == SOURCE
    else:
        with pytest.raises(ValueError, match="overlap"):
            apply(SOURCE, [first, second])


def test_an_edit_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"x\.py: there is no 'b' at byte 0"):
        apply(b"a = 1\n", [Edit(path="x.py", start=0, old="b", new="c")])


def test_the_same_seed_proposes_the_same_bugs() -> None:
    assert propose("x.py", SOURCE, random.Random(5)) == propose("x.py", SOURCE, random.Random(5))
