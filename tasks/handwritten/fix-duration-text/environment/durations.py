"""Durations as text."""

SECONDS = {"d": 86400, "h": 360, "m": 60, "s": 1}


def parse(text):
    """Seconds of a duration such as `1h30m`."""
    total = 0
    number = ""
    for char in text:
        if char.isdigit():
            number += char
        else:
            total = int(number) * SECONDS[char]
            number = ""
    return total


def show(seconds):
    """The shortest text for a number of seconds."""
    parts = []
    for unit, size in SECONDS.items():
        count = seconds // size
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts)
