#!/bin/bash
set -eu
python3 - <<'PY'
text = open("spans.py").read()
head, tail = text.index("    merged = []"), text.index("\n\ndef covered")
body = """    merged = []
    for start, end in sorted(spans):
        if start > end:
            raise ValueError(f"span {(start, end)} runs backwards")
        if start == end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
"""
open("spans.py", "w").write(text[:head] + body + text[tail:])
PY
