"""Areas and outlines of simple shapes."""


def area(shape):
    """The area of a shape."""
    if shape["kind"] == "square":
        return shape["side"] * shape["side"]
    elif shape["kind"] == "rectangle":
        return shape["width"] * shape["height"]
    elif shape["kind"] == "triangle":
        return shape["base"] * shape["height"] / 2
    else:
        raise ValueError(f"unknown shape: {shape['kind']}")


def outline(shape):
    """The length of the outline of a shape."""
    if shape["kind"] == "square":
        return 4 * shape["side"]
    elif shape["kind"] == "rectangle":
        return 2 * (shape["width"] + shape["height"])
    elif shape["kind"] == "triangle":
        return shape["base"] + shape["left"] + shape["right"]
    else:
        raise ValueError(f"unknown shape: {shape['kind']}")
