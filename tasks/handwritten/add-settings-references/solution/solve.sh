#!/bin/bash
set -eu
python3 - <<'PY'
text = open("settings.py").read()
text = text.replace('"""A settings file to a dict."""\n', '''"""A settings file to a dict."""

import re

_REFERENCE = re.compile(r"\\$\\$|\\$\\{([^}]*)\\}")


def _resolve(key, raw, done, active):
    if key in active:
        raise ValueError(f"{key} refers to itself")
    if key not in done:

        def value(match):
            return "$" if match[1] is None else _resolve(match[1], raw, done, {*active, key})

        done[key] = _REFERENCE.sub(value, raw[key])
    return done[key]
''')
text = text.replace("    return values\n", "    done = {}\n    return {key: _resolve(key, values, done, set()) for key in values}\n")
open("settings.py", "w").write(text)
PY
