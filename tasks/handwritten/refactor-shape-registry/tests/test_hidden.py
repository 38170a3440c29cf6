import ast
import os

import shapes


def test_new_kinds():
    shapes.register("dot", lambda s: 0, lambda s: 0)
    assert shapes.area({"kind": "dot"}) == 0
    shapes.register("dot", lambda s: s["n"], lambda s: -s["n"])
    assert shapes.area({"kind": "dot", "n": 4}) == 4
    assert shapes.outline({"kind": "dot", "n": 4}) == -4


def test_triangle():
    triangle = {"kind": "triangle", "base": 3, "height": 4, "left": 4, "right": 5}
    assert shapes.area(triangle) == 6.0
    assert shapes.outline(triangle) == 12


def test_missing_kind_is_a_key_error():
    for function in (shapes.area, shapes.outline):
        try:
            function({"side": 1})
        except KeyError as error:
            assert error.args == ("kind",)
            continue
        assert False, "no KeyError"


def test_a_missing_measure_is_still_a_key_error():
    try:
        shapes.area({"kind": "square"})
    except KeyError as error:
        assert error.args == ("side",)
        return
    assert False, "no KeyError"


def test_no_branches_are_left():
    path = os.path.abspath(shapes.__file__)
    with open(path) as file:
        tree = ast.parse(file.read())
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    for name in ("area", "outline"):
        kinds = {type(n).__name__ for n in ast.walk(functions[name])}
        assert not kinds & {"If", "IfExp", "Match"}, f"{name} still branches"
