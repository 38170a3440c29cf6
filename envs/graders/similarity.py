"""How close a patch is to the oracle's, as in SWE-RL (arXiv 2502.18449, section 2).

There the reward of a well-formed answer is `difflib.SequenceMatcher(predicted, oracle).ratio()` of the two
patches as text, and -1 for an answer in a wrong format. Here the predicted patch is the workspace diff, which
always has the right format; an attempt that changed nothing is 0. Both are reduced to file names, hunk marks
and lines, so that index lines, positions and timestamps count for nothing. It is a dense hint, not a proof:
it does not decide, unless the task says so.
"""

from __future__ import annotations

import asyncio
import difflib
import re
from collections.abc import Iterable

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from envs.graders.contract import Attempt, Graded
from envs.sandbox.contract import FileChange

MAX_CHARS = 50_000
"""Of each patch; what is longer is compared up to here, and the facts say so. The comparison is quadratic."""


def normalized(patch: str) -> str:
    """Only the lines that say what changes where."""
    kept = []
    for line in patch.splitlines():
        if re.match(
            r"(diff --git|index |new file mode|deleted file mode|old mode|new mode|similarity)", line
        ):
            continue
        if line.startswith(("--- ", "+++ ")):
            line = re.sub(r"^(---|\+\+\+) (?:[ab]/)?([^\t]*).*", r"\1 \2", line)
        elif line.startswith("@@"):
            line = "@@"
        kept.append(line)
    return "\n".join(kept)


def unified(changes: Iterable[FileChange], attempt: Attempt) -> str:
    """The workspace diff as a patch. Files that are not text, links and folders are left out."""
    parts: list[str] = []
    for change in sorted(changes, key=lambda each: each.path):
        if change.kind not in ("file", "deleted"):
            continue
        before = _lines(attempt.original(change.path))
        after = _lines(change.content if change.kind == "file" else None)
        if before is None or after is None or before == after:
            continue
        old = change.path if attempt.original(change.path) is not None else "/dev/null"
        new = change.path if change.kind == "file" else "/dev/null"
        parts += difflib.unified_diff(before, after, old, new, lineterm="")
    return "\n".join(parts)


def _lines(raw: bytes | None) -> list[str] | None:
    """Lines of a text file; none for a file that is not there, None for one that is not text."""
    if raw is None:
        return []
    try:
        return raw.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        return None


def similarity(predicted: str, oracle: str) -> float:
    """`SequenceMatcher.ratio()` of two normalized patches; 0 when nothing was changed."""
    if not predicted.strip():
        return 0.0
    return difflib.SequenceMatcher(
        None, normalized(predicted)[:MAX_CHARS], normalized(oracle)[:MAX_CHARS], autojunk=False
    ).ratio()


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class PatchSimilarity:
    """The similarity of the workspace diff to `solution/<oracle>`."""

    oracle: str = "gold.patch"
    decides: bool = False

    async def grade(self, attempt: Attempt) -> Graded:
        oracle = attempt.solution(self.oracle).decode("utf-8", "replace")
        predicted = unified(attempt.changes, attempt)
        ratio = await asyncio.to_thread(similarity, predicted, oracle)
        cut = max(len(normalized(predicted)), len(normalized(oracle))) > MAX_CHARS
        return Graded(value=ratio, facts={"patch_chars": len(predicted), "cut": cut})
