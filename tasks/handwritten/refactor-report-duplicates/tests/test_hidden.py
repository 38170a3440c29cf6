import ast
import os

import report

SALES = [
    {"city": "Oslo", "month": "2024-01", "product": "tea", "year": 2024, "amount": 500},
    {"city": "Ii", "month": "2024-01", "product": "oil", "year": 999, "amount": -600},
]


def tree():
    with open(os.path.abspath(report.__file__)) as file:
        text = file.read()
    return text, ast.parse(text)


def test_any_key():
    assert report.table(SALES, "year") == "year\n2024   500\n999   -600\ntotal -100"


def test_negative_amounts():
    assert report.by_city(SALES) == "city\nIi    -600\nOslo   500\ntotal -100"
    assert report.by_city([]) == "city\ntotal 0"


def test_three_thin_functions():
    _, module = tree()
    functions = {n.name: n for n in module.body if isinstance(n, ast.FunctionDef)}
    for name in ("by_city", "by_month", "by_product"):
        body = [n for n in functions[name].body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
        assert len(body) == 1 and isinstance(body[0], ast.Return), name
        called = [n.func.id for n in ast.walk(body[0]) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
        assert called == ["table"], name


def test_shorter():
    text, _ = tree()
    assert len(text.splitlines()) < 40, "the module is still long"


def test_sales_are_not_changed():
    before = [dict(sale) for sale in SALES]
    report.by_month(SALES)
    assert SALES == before
