"""Results to a terminal, a pipe or a machine. Results go to stdout; progress and errors go to stderr.

With `--json`, stdout carries exactly one JSON object. Numbers that JSON does not have (NaN, infinite) become
null there.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

PIPE_WIDTH = 4096
"""Columns of a table that is piped: nothing is cut, so that `grep` and `cut` see whole ids."""


def out() -> Console:
    """The console of results: colours on a terminal, whole plain lines in a pipe."""
    if sys.stdout.isatty():
        return Console(file=sys.stdout, highlight=False)
    return Console(file=sys.stdout, width=PIPE_WIDTH, color_system=None, highlight=False)


def err() -> Console:
    """The console of progress and messages."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def jsonable(value: Any) -> Any:
    """Records, enums, paths and mappings as plain JSON values."""
    if is_dataclass(value) and not isinstance(value, type):
        return jsonable(asdict(value))
    if isinstance(value, Enum):
        return jsonable(value.value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


def emit(value: Mapping[str, Any]) -> None:
    """The one JSON object of `--json`."""
    sys.stdout.write(json.dumps(jsonable(value), ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, numbers: Sequence[str] = ()) -> None:
    """Print rows; columns named in `numbers` stand to the right. Tab-separated when piped."""
    if not sys.stdout.isatty():
        lines = ["\t".join(columns), *("\t".join(_one_line(cell) for cell in row) for row in rows)]
        sys.stdout.write("\n".join(lines) + "\n")
        return
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        shown.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(cell if isinstance(cell, _Styled) else escape(str(cell)) for cell in row))
    out().print(shown)


class _Styled(str):
    """Markup that is meant; everything else is escaped."""


def good(text: str) -> str:
    return _Styled(f"[green]{escape(text)}[/]") if sys.stdout.isatty() else text


def bad(text: str) -> str:
    return _Styled(f"[red]{escape(text)}[/]") if sys.stdout.isatty() else text


def middling(text: str) -> str:
    return _Styled(f"[yellow]{escape(text)}[/]") if sys.stdout.isatty() else text


def say(line: RenderableType = "") -> None:
    """A line of the result. Strings are rich markup: escape what comes from elsewhere."""
    out().print(line)


def fact(label: str, text: str, *, width: int = 0) -> None:
    """`label  text` with the label in bold; the text is shown as it is."""
    say(f"[bold]{label:{width}}[/] {escape(text)}")


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def share(value: float | None) -> str:
    """A rate as a person reads it: `0.9375` is `93.8 %`."""
    return "–" if value is None else f"{100 * value:.1f} %"


def duration(seconds: float | None) -> str:
    """`4.2 s`, `3 min 05 s`, `2 h 07 min`."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def size(bytes_: int | None) -> str:
    """`512 B`, `3.4 MiB`, `1.2 GiB`."""
    if bytes_ is None:
        return "–"
    value, units = float(bytes_), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        del units[0]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def moment(unix: float | None) -> str:
    """Local time to the second."""
    return "–" if unix is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))


def _one_line(cell: Any) -> str:
    return str(cell).replace("\t", " ").replace("\n", " ")
