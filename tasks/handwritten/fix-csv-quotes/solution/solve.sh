#!/bin/bash
set -eu
cat > csvline.py <<'PY'
"""One line of CSV to its fields."""


def split(line):
    """Fields of `line`, which has no line break."""
    fields, field, quoted, at = [], [], False, 0
    while at < len(line):
        char = line[at]
        if quoted:
            if char == '"' and line[at + 1 : at + 2] == '"':
                field.append('"')
                at += 1
            elif char == '"':
                quoted = False
            else:
                field.append(char)
        elif char == '"' and not field:
            quoted = True
        elif char == ",":
            fields.append("".join(field))
            field = []
        else:
            field.append(char)
        at += 1
    if quoted:
        raise ValueError("unclosed quote")
    return [*fields, "".join(field)]
PY
