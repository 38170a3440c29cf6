"""One line of CSV to its fields."""


def split(line):
    """Fields of `line`, which has no line break."""
    return [field.strip('"') for field in line.split(",")]
