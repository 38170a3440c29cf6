"""Token ids and log-probs to binary columns and back, bit by bit.

Ids are int32 little-endian. Log-probs are float32 little-endian, and only the known ones: a bitmap says which
tokens they belong to, so there is no placeholder (no 0.0, no NaN) that could leak into a loss. A value that
float32 would change (no engine reports one) is kept whole in float64 and the width says so. Every column is
one zstd frame with a checksum; its size is checked against the expected one before it is unpacked, so a
forged header allocates nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import zstandard

from agentrl.errors import EvidenceError

LEVEL = 1
"""zstd level: ids and log-probs are near random, so higher levels cost time and save nothing (3 saves < 1
%)."""
MAX_BODY_BYTES = 256 * 1024 * 1024
"""Largest unpacked JSON body that is believed."""

_local = threading.local()  # zstd contexts are not safe to share between threads


def compress(raw: bytes) -> bytes:
    """One zstd frame with content size and checksum."""
    compressor: zstandard.ZstdCompressor | None = getattr(_local, "compressor", None)
    if compressor is None:
        compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True, write_content_size=True)
        _local.compressor = compressor
    return compressor.compress(raw)


def decompress(frame: bytes, *, size: int | None = None) -> bytes:
    """Unpack a frame that must hold `size` bytes (None: at most `MAX_BODY_BYTES`).

    Raises:
        EvidenceError: not a frame, a wrong size, or a checksum that does not match.
    """
    decompressor: zstandard.ZstdDecompressor | None = getattr(_local, "decompressor", None)
    if decompressor is None:
        decompressor = zstandard.ZstdDecompressor()
        _local.decompressor = decompressor
    try:
        said = zstandard.get_frame_parameters(frame).content_size
        if (size is not None and said != size) or said > MAX_BODY_BYTES:
            raise EvidenceError(f"a stored column says {said} bytes where {size or 'fewer'} are expected")
        raw = decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise EvidenceError(f"a stored column can not be unpacked: {error}") from error
    return raw


def ids_to_bytes(ids: Sequence[int]) -> bytes:
    """int32 little-endian.

    Raises:
        EvidenceError: an id does not fit 31 bits.
    """
    try:
        return np.asarray(ids, dtype="<i4").tobytes() if ids else b""
    except OverflowError as error:
        raise EvidenceError(f"a token id does not fit 31 bits: {max(ids)}") from error


def ids_from_bytes(raw: bytes) -> tuple[int, ...]:
    """Back to Python ints."""
    return tuple(np.frombuffer(raw, dtype="<i4").tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class LogProbColumns:
    """The three columns of a call's log-probs; all None when the call has none.

    Worked example: (-0.5, None, -2.0) has `values` = float32 (-0.5, -2.0), `valid` = 0b101, `width` = 4.
    """

    values: bytes | None
    valid: bytes | None
    width: int | None


def pack_log_probs(log_probs: tuple[float | None, ...] | None) -> LogProbColumns:
    """To columns, uncompressed."""
    if log_probs is None:
        return LogProbColumns(values=None, valid=None, width=None)
    known = log_probs
    valid = None
    if None in log_probs:
        mask = np.fromiter((p is not None for p in log_probs), dtype=np.bool_, count=len(log_probs))
        valid = np.packbits(mask, bitorder="little").tobytes()
        known = tuple(p for p in log_probs if p is not None)
    wide = np.asarray(known, dtype="<f8")
    if not np.isfinite(wide).all():
        raise EvidenceError("a log-prob is not finite: record it as null at that token")
    with np.errstate(over="ignore", under="ignore"):
        narrow = wide.astype("<f4")
    if (narrow == wide).all():
        return LogProbColumns(values=narrow.tobytes(), valid=valid, width=4)
    return LogProbColumns(values=wide.tobytes(), valid=valid, width=8)


def unpack_log_probs(columns: LogProbColumns, n: int) -> tuple[float | None, ...] | None:
    """Back to one entry per token, None where unknown.

    Raises:
        EvidenceError: the columns contradict each other or `n`.
    """
    if columns.values is None:
        return None
    if columns.width not in (4, 8) or len(columns.values) % columns.width:
        raise EvidenceError(f"log-probs of {columns.width} bytes each in a column of {len(columns.values)}")
    known = np.frombuffer(columns.values, dtype=f"<f{columns.width}").astype(np.float64).tolist()
    if columns.valid is None:
        if len(known) != n:
            raise EvidenceError(f"{len(known)} log-probs for {n} tokens")
        return tuple(known)
    bits = np.unpackbits(np.frombuffer(columns.valid, dtype=np.uint8), bitorder="little")
    if len(bits) != (n + 7) // 8 * 8 or bits[n:].any() or int(bits.sum()) != len(known):
        raise EvidenceError(
            f"a bitmap of {int(bits.sum())} known log-probs for {len(known)} values, {n} tokens"
        )
    values = iter(known)
    return tuple(next(values) if bit else None for bit in bits[:n].tolist())
