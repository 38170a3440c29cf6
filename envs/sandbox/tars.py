"""The bytes of a tar from somebody else, read forwards and no further than was allowed.

`tarfile` believes a header that says of itself how long it is, and asks for all of it in one piece:
`Forwards` stands between, and refuses. It never goes back, so an archive can not point into itself.
"""

from __future__ import annotations

import errno
import gzip
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, cast

HEADER_BYTES = 16 * 1024 * 1024
"""Of what a tar says beside its files: headers, long names, padding."""
UNREADABLE = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    gzip.BadGzipFile,
    EOFError,
    RuntimeError,  # nested too deeply, encrypted after all, a method that is not known
    ValueError,
    OverflowError,
    IndexError,
    KeyError,
    struct.error,
)
"""What the standard library says of archives that are none, or are damaged."""
OF_THE_MACHINE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE, errno.EACCES}
)
"""Why a file could not be written though nothing is wrong with the archive."""
_CHUNK = 1 << 20


class Forwards:
    """A file object for `tarfile.open(mode="r:")`."""

    def __init__(
        self, source: Any, *, allowed: int, refuse: Callable[[], Exception], skips: bool = False
    ) -> None:
        """`allowed`: bytes that may be read until `allow` is called again. `refuse` makes the error for
        more. `skips`: the source is a plain file, in which what is passed over need not be read."""
        self._source = source
        self._refuse = refuse
        self._left = allowed
        self._at = 0
        self._skips = skips

    def allow(self, size: int) -> None:
        """From here on so many bytes may be read."""
        self._left = size

    def tell(self) -> int:
        return self._at

    def seek(self, at: int) -> None:
        if at < self._at:
            raise tarfile.ReadError("it points back into itself")
        if self._skips:
            self._source.seek(at)
            self._at = at
            return
        while self._at < at:
            if not self.read(min(at - self._at, _CHUNK)):
                break

    def members(self) -> Iterator[tarfile.TarInfo]:
        """One after the other. `HEADER_BYTES` are allowed for each header; what may be read of a file is the
        caller's to allow."""
        with tarfile.open(fileobj=cast(IO[bytes], self), mode="r:") as archive:
            while True:
                archive.members = []  # type: ignore[attr-defined]  # it would keep them all
                self.allow(HEADER_BYTES)
                if (member := archive.next()) is None:
                    return
                yield member

    def read(self, size: int) -> bytes:
        if size > HEADER_BYTES or size > self._left:
            raise self._refuse()
        pieces = []
        while size > 0 and (piece := self._source.read(size)):
            pieces.append(piece)
            size -= len(piece)
            self._at += len(piece)
            self._left -= len(piece)
        return b"".join(pieces)
