"""Raw bytes of a command to what the model is shown: one path for results, time-outs and errors alike.

Escape sequences go, rewritten lines (carriage returns) show their last state, bytes that are not UTF-8 are
escaped, and output beyond the cap keeps head and tail with the omission said. The raw bytes stay where they
were.
"""

from __future__ import annotations

import re

from envs.sandbox.contract import StreamCapture

_CSI = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")
_OSC = re.compile(rb"\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)", re.DOTALL)
_ESC = re.compile(rb"\x1b[ -/]*[0-~]?")
_CONTROL = re.compile(rb"[\x00-\x07\x0b\x0c\x0e-\x1f\x7f]")
_REWRITTEN = re.compile(rb"[^\n]*\r(?=[^\n])")


def clean(raw: bytes) -> bytes:
    """Without terminal control: what a person would see on a screen in the end."""
    if b"\x1b" in raw:
        for pattern in (_OSC, _CSI, _ESC):
            raw = pattern.sub(b"", raw)
    if b"\r" in raw:
        raw = re.sub(rb"\r+\n", b"\n", raw)
        raw = _REWRITTEN.sub(b"", raw).replace(b"\r", b"")
    while b"\x08" in raw:
        shorter = re.sub(rb"[^\n\x08]\x08", b"", raw)
        raw = shorter if shorter != raw else raw.replace(b"\x08", b"")
    return _CONTROL.sub(b"", raw)


def model_view(raw: bytes, limit: int) -> tuple[str, int]:
    """`(text, bytes omitted)` of complete output."""
    text = _text(raw)
    return _keep(text, text, 0, limit) if len(text.encode()) > limit else (text, 0)


def stream_view(*streams: StreamCapture, limit: int) -> tuple[str, int]:
    """Captured streams one after the other; what the capture itself dropped counts as omitted."""
    before, after, gap = "", "", 0
    for stream in streams:
        lost = stream.bytes_total - len(stream.head) - len(stream.tail)
        if lost <= 0:
            text = _text(stream.head + stream.tail)
            before, after = (_join(before, text), "") if gap == 0 else (before, _join(after, text))
        else:
            before = _join(before, _text(stream.head)) if gap == 0 else before
            after, gap = _text(stream.tail), gap + lost
    if gap == 0 and len(before.encode()) <= limit:
        return before, 0
    return _keep(before, after or before, gap, limit)


def _text(raw: bytes) -> str:
    return clean(raw).decode("utf-8", "backslashreplace")


def _join(first: str, second: str) -> str:
    return f"{first}\n{second}" if first and second and not first.endswith("\n") else first + second


def _keep(before: str, after: str, gap: int, limit: int) -> tuple[str, int]:
    """The beginning of `before` and the end of `after` within `limit` bytes; cuts never split a character.

    Without a gap both are the same whole text."""
    first, last = before.encode(), after.encode()
    head = first[: limit // 2].decode("utf-8", "ignore")
    tail = last[max(0, len(last) - (limit - limit // 2)) :].decode("utf-8", "ignore")
    whole = len(first) + (len(last) if gap else 0)
    omitted = gap + whole - len(head.encode()) - len(tail.encode())
    return f"{head}\n… {omitted} bytes omitted …\n{tail}", omitted
