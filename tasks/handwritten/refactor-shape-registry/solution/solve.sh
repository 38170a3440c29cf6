#!/bin/bash
set -eu
cat > shapes.py <<'PY'
"""Areas and outlines of simple shapes."""

_SHAPES = {}


def register(kind, area, outline):
    """Say how the area and the outline of a kind of shape are computed."""
    _SHAPES[kind] = (area, outline)


def _functions(shape):
    kind = shape["kind"]
    if kind not in _SHAPES:
        raise ValueError(f"unknown shape: {kind}")
    return _SHAPES[kind]


def area(shape):
    """The area of a shape."""
    return _functions(shape)[0](shape)


def outline(shape):
    """The length of the outline of a shape."""
    return _functions(shape)[1](shape)


register("square", lambda s: s["side"] * s["side"], lambda s: 4 * s["side"])
register("rectangle", lambda s: s["width"] * s["height"], lambda s: 2 * (s["width"] + s["height"]))
register("triangle", lambda s: s["base"] * s["height"] / 2, lambda s: s["base"] + s["left"] + s["right"])
PY
