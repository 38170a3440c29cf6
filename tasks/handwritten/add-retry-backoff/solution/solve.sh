#!/bin/bash
set -eu
cat > retrying.py <<'PY'
"""Call a function again when it fails."""

import time


def retry(function, attempts=3, first_s=0.1, factor=2.0, longest_s=5.0, errors=(Exception,), pause=time.sleep):
    """The first result of `function`, called at most `attempts` times with growing pauses between."""
    if attempts < 1:
        raise ValueError("attempts must be at least 1")
    for attempt in range(attempts):
        try:
            return function()
        except errors:
            if attempt == attempts - 1:
                raise
        pause(min(first_s * factor**attempt, longest_s))
PY
