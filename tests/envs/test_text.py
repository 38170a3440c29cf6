"""The model's view of raw output."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.sandbox.contract import HEAD_BYTES, TAIL_BYTES, StreamCapture
from envs.text import clean, model_view, stream_view


def capture(raw: bytes) -> StreamCapture:
    head, rest = raw[:HEAD_BYTES], raw[HEAD_BYTES:]
    return StreamCapture(
        bytes_total=len(raw),
        head=head,
        tail=rest[-TAIL_BYTES:] if rest else b"",
        truncated=len(rest) > TAIL_BYTES,
        sha256=hashlib.sha256(raw).hexdigest(),
    )


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"\x1b[31mred\x1b[0m", b"red"),
        (b"\x1b]0;title\x07text", b"text"),
        (b"\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", b"link"),
        (b"10%\r50%\r100%\ndone", b"100%\ndone"),
        (b"a\r\nb\r\n", b"a\nb\n"),
        (b"a\0b", b"ab"),
        (b"ab\x08c", b"ac"),
        (b"tab\there\n", b"tab\there\n"),
        (b"\x1b(B\x1b[?25lx", b"x"),
    ],
)
def test_terminal_control_becomes_what_a_screen_shows(raw: bytes, shown: bytes) -> None:
    assert clean(raw) == shown


def test_bytes_that_are_not_utf8_are_escaped() -> None:
    assert model_view(b"\xff\xc3\xa9", 100) == ("\\xffé", 0)


def test_long_output_keeps_head_and_tail_and_says_the_rest() -> None:
    assert model_view(b"a" * 10 + b"b" * 80 + b"c" * 10, 20) == (
        "a" * 10 + "\n… 80 bytes omitted …\n" + "c" * 10,
        80,
    )


def test_a_cut_never_splits_a_character() -> None:
    text, omitted = model_view("é".encode() * 50, 11)
    assert text == "éé\n… 90 bytes omitted …\nééé"
    assert omitted == 90


def test_what_the_capture_dropped_counts_as_omitted() -> None:
    raw = b"x" * (HEAD_BYTES + TAIL_BYTES + 1000)
    text, omitted = stream_view(capture(raw), capture(b"end"), limit=100)
    assert omitted == len(raw) + len(b"end") + 1 - 100  # one line break joins the streams
    assert text.startswith("x" * 50 + "\n… ")
    assert text.endswith("x\nend")


def test_streams_follow_each_other_on_their_own_lines() -> None:
    assert stream_view(capture(b"out"), capture(b"err"), limit=100) == ("out\nerr", 0)
    assert stream_view(capture(b"out\n"), capture(b"err\n"), limit=100) == ("out\nerr\n", 0)
    assert stream_view(capture(b""), capture(b"err"), limit=100) == ("err", 0)


@given(st.binary(max_size=400), st.integers(8, 100))
def test_any_bytes_become_text_within_the_limit(raw: bytes, limit: int) -> None:
    text, omitted = model_view(raw, limit)
    text.encode()
    note = len(f"\n… {omitted} bytes omitted …\n".encode()) if omitted else 0
    assert len(text.encode()) - note <= limit
    assert "\x1b" not in text
    assert "\0" not in text
    assert "\r" not in text
