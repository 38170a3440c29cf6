"""Rows of a data set (JSON lines, a JSON list, or Parquet) to checked records and back.

A package keeps what it has no place for in `[metadata.source]` of its `task.toml`: scalars as TOML values
under `row`, anything else (null, lists, tables) as JSON text under `json`, and the order of columns, so that
the row can be written again equal to what was read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, nearest
from envs.tasks.formats.files import error

SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True, slots=True)
class Row:
    """One row, and where it stands."""

    where: str
    values: Mapping[str, Any]

    def wrong(self, key: str, what: str, fix: str) -> Exception:
        """The error that names this row, the key and the fix."""
        return error(self.where, key, what, fix)

    def text(self, key: str) -> str:
        """A column that must be text."""
        if key not in self.values:
            raise self.wrong(key, "is missing", f"Add it. The row has: {', '.join(self.values)}.")
        value = self.values[key]
        if not isinstance(value, str):
            raise self.wrong(key, f"is {type(value).__name__}, not text", "Write text.")
        return value

    def names(self, key: str) -> tuple[str, ...]:
        """A list of test names, or the JSON text of one: data sets hold either."""
        value = self.values.get(key)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as wrong:
                raise self.wrong(key, f"is not JSON: {wrong}", "Write a JSON list of test names.") from wrong
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            what = "is missing" if key not in self.values else "is no list of texts"
            raise self.wrong(key, what, "Write a list of test names, or its JSON text.")
        return tuple(value)

    def instance(self, key: str = "instance_id") -> str:
        """The column that names the task."""
        name = self.text(key)
        if (
            not name
            or not all(c.isalnum() or c in "._-" for c in name)
            or not name.isascii()
            or name[0] == "."
        ):
            raise self.wrong(key, f"'{name}' is no name", "Use letters, digits, '.', '_' and '-'.")
        return name


def read(src: Path) -> tuple[Row, ...]:
    """Rows of a file, or of all such files in a folder, sorted. `TaskError` names file, line and key."""
    if src.is_dir():
        files = sorted(file for file in src.iterdir() if file.suffix in SUFFIXES)
        if not files:
            raise error(src, "folder", "holds no rows", f"Give a file that ends in {', '.join(SUFFIXES)}.")
    elif src.is_file():
        files = [src]
    else:
        siblings = [p.name for p in src.parent.iterdir()] if src.parent.is_dir() else []
        raise error(src, "file", "is missing", nearest(src.name, siblings))
    found = tuple(row for file in files for row in _rows(file))
    if not found:
        raise error(src, "rows", "there are none", "Give a file with at least one row.")
    return found


def _rows(file: Path) -> list[Row]:
    if file.suffix == ".parquet":
        values = _parquet().read_table(file).to_pylist()
        return [Row(f"{file}: row {number}", value) for number, value in enumerate(values, 1)]
    if file.suffix not in SUFFIXES:
        raise error(file, "suffix", f"'{file.suffix}' is not known", f"Known: {', '.join(SUFFIXES)}.")
    text = file.read_text(encoding="utf-8")
    found = []
    if file.suffix == ".json":
        try:
            values = json.loads(text)
        except ValueError as wrong:
            raise error(file, "syntax", str(wrong), "Correct the JSON there.") from wrong
        if not isinstance(values, list):
            raise error(file, "document", "is no list", "Write a JSON list of rows.")
        found = [(f"{file}: row {number}", value) for number, value in enumerate(values, 1)]
    else:
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            try:
                found.append((f"{file}:{number}", json.loads(line)))
            except ValueError as wrong:
                raise error(f"{file}:{number}", "syntax", str(wrong), "Write one JSON row a line.") from wrong
    for where, value in found:
        if not isinstance(value, dict):
            raise error(where, "row", f"is {type(value).__name__}, no table", "Write a JSON object.")
    return [Row(where, value) for where, value in found]


def write(out: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as the suffix of `out` says; JSON lines for a folder (`rows.jsonl` in it)."""
    values = [dict(row) for row in rows]
    if not out.suffix:
        out.mkdir(parents=True, exist_ok=True)
        out = out / "rows.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists():
        raise error(out, "file", "exists", "Give a new file.")
    if out.suffix == ".parquet":
        parquet = _parquet()
        parquet.write_table(import_module("pyarrow").Table.from_pylist(values), out)
    elif out.suffix == ".json":
        out.write_text(json.dumps(values, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    elif out.suffix == ".jsonl":
        lines = (json.dumps(value, ensure_ascii=False) + "\n" for value in values)
        out.write_text("".join(lines), encoding="utf-8")
    else:
        raise error(out, "suffix", f"'{out.suffix}' is not known", f"Known: {', '.join(SUFFIXES)}.")


def _parquet() -> Any:
    try:
        return import_module("pyarrow.parquet")
    except ModuleNotFoundError as missing:
        raise ConfigError(
            "Parquet files need pyarrow.", fix="pip install 'agentrl[parquet]', or give JSON lines."
        ) from missing


# ----------------------------------------------------------------------------------- what a package remembers


def held(format_name: str, row: Row, elsewhere: Sequence[str]) -> dict[str, Any]:
    """The `[metadata.source]` table: every column that the package does not hold `elsewhere`."""
    plain: dict[str, Any] = {}
    coded: dict[str, str] = {}
    for key, value in row.values.items():
        if key in elsewhere:
            continue
        finite = not isinstance(value, float) or math.isfinite(value)
        if isinstance(value, str | bool | int | float) and finite:
            plain[key] = value
        else:
            coded[key] = json.dumps(value, ensure_ascii=False)
    return {"format": format_name, "columns": list(row.values), "row": plain, "json": coded}


def restored(source: Mapping[str, Any], elsewhere: Mapping[str, Any]) -> dict[str, Any]:
    """The row again: columns in their order, from the table and from what the package holds elsewhere."""
    known = {key: json.loads(value) for key, value in source.get("json", {}).items()}
    known = {**known, **source.get("row", {}), **elsewhere}
    return {key: known[key] for key in source["columns"] if key in known}
