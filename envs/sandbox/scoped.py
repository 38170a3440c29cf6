"""Where a path leads when a folder stands for `/`: links inside it never lead out of it.

For trees that somebody else made, in which nobody writes meanwhile (an image that is being unpacked, a root
that is being put together). Standard library only: the zygote needs it.
"""

from __future__ import annotations

import errno
import os

MAX_LINKS = 40
"""As the kernel's own limit."""


def inside(root: str, path: str, *, follow: bool = True) -> str:
    """The real path below `root` that a process whose root it is would come to; what is missing is taken as
    it is written. `follow`: also through a link at the very end. Raises `OSError` ELOOP."""
    todo = [part for part in reversed(path.split("/")) if part not in ("", ".")]
    at: list[str] = []
    links = 0
    while todo:
        part = todo.pop()
        if part == "..":
            del at[-1:]
            continue
        here = "/".join((root, *at, part))
        if (todo or follow) and os.path.islink(here):
            links += 1
            if links > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            target = os.readlink(here)
            if target.startswith("/"):
                at = []
            todo += [part for part in reversed(target.split("/")) if part not in ("", ".")]
            continue
        at.append(part)
    return "/".join((root, *at))
