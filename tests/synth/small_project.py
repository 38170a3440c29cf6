"""A small project of two modules with tests of every sort, and a pytest to run them that needs no index."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

CORE = '''\
"""Prices."""

from .money import rounded


def total(prices, tax=0.2):
    """The sum with tax."""
    if not prices:
        raise ValueError("nothing to pay")
    return rounded(sum(prices) * (1 + tax))


def cheapest(prices, count=1):
    """The lowest prices, in order."""
    found = sorted(prices)
    return found[:count]
'''
MONEY = """\
def rounded(amount, places=2):
    scale = 10 ** places
    whole = int(amount * scale + 0.5)  # halves go up
    return whole / scale


def parts(amount):
    units = int(amount)
    return units, round((amount - units) * 100)
"""
TESTS = """\
import unittest

import pytest

from shop import core, money


@pytest.fixture
def prices():
    return [3, 1, 2]


@pytest.mark.parametrize(("amount", "wanted"), [(1.006, 1.01), (2.0, 2.0)])
def test_rounded(amount, wanted):
    assert money.rounded(amount) == wanted


def test_cheapest(prices):
    assert core.cheapest(prices) == [1]
    assert core.cheapest(prices, 2) == [1, 2]


class TestTotal(unittest.TestCase):
    def test_tax(self):
        self.assertEqual(core.total([1, 2]), 3.6)

    def test_nothing(self):
        with self.assertRaises(ValueError):
            core.total([])


def test_parts():
    assert money.parts(2.25) == (2, 25)


@pytest.mark.skip
def test_later():
    assert False
"""
PYPROJECT = """\
[project]
name = "Shop.Demo"
version = "1.5"
description = "Prices and money."
license = "MIT"
"""


def lay_checkout(folder: Path) -> Path:
    """Write the project, with a history that must not leak."""
    files = {
        "pyproject.toml": PYPROJECT,
        "shop/__init__.py": "",
        "shop/core.py": CORE,
        "shop/money.py": MONEY,
        "tests/test_shop.py": TESTS,
        "tests/test_extra.py": "import nothing_like_this\n",
        ".git/HEAD": "ref: refs/heads/main\n",
        "shop/__pycache__/core.cpython-311.pyc": "x",
        "shop/core.py.orig": CORE,
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def lay_runner(folder: Path) -> Path:
    """The pytest that runs these tests, bytecode included, where the factory would install one."""
    lexers = {"__init__.py", "_mapping.py", "python.py", "diff.py", "special.py"}

    def unused(place: str, names: list[str]) -> set[str]:
        inside = Path(place).name == "lexers"
        return {n for n in names if n.endswith(".so") or (inside and n.endswith(".py") and n not in lexers)}

    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        file = importlib.import_module(name).__file__
        assert file is not None
        shutil.copytree(Path(file).parent, folder / name, ignore=unused)
        single = Path(file).parent.with_name("py.py")  # comes with pytest
        if name == "pytest" and single.is_file():
            shutil.copy2(single, folder)
    return folder
