#!/bin/bash
set -eu
cat > durations.py <<'PY'
"""Durations as text."""

import re

SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_TEXT = re.compile(r"(?:([0-9]+)d)?(?:([0-9]+)h)?(?:([0-9]+)m)?(?:([0-9]+)s)?")


def parse(text):
    """Seconds of a duration such as `1h30m`."""
    match = _TEXT.fullmatch(text)
    if not text or match is None:
        raise ValueError(f"not a duration: {text!r}")
    return sum(int(number or 0) * size for number, size in zip(match.groups(), SECONDS.values()))


def show(seconds):
    """The shortest text for a number of seconds."""
    if seconds < 0:
        raise ValueError("a duration is not negative")
    parts = []
    for unit, size in SECONDS.items():
        count, seconds = divmod(seconds, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"
PY
