"""The tables of the README, generated from the code between markers.

    python -m agentrl.cli.docs --check      is the README fresh?
    python -m agentrl.cli.docs --write      make it so

A block begins with `<!-- generated: NAME -->` and ends with `<!-- end -->`; what is between is replaced.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from agentrl.cli.app import app
from agentrl.cli.reference import keys, recipe_table

README = Path("README.md")
_BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def verbs() -> list[tuple[str, str]]:
    """Every verb with its arguments, and the first sentence of its help."""
    return [
        (f"agentrl {name}{_arguments(command)}", _sentence(command.help or "")) for name, command in leaves()
    ]


def leaves() -> Iterator[tuple[str, Any]]:
    """`(words, click command)` of everything that can be typed, in order."""

    def walk(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        below: Mapping[str, Any] | None = getattr(command, "commands", None)
        if below is None:
            yield " ".join(words), command
            return
        for name, sub in below.items():
            yield from walk(sub, (*words, name))

    yield from walk(typer.main.get_command(app), ())


def fresh(text: str) -> str:
    """The README's text with all blocks made again. `KeyError` for a block that nobody generates."""
    return _BLOCK.sub(lambda found: f"{found[1]}{_BLOCKS[found[2]]()}{found[3]}", text)


def _arguments(command: Any) -> str:
    shown = []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            name = (parameter.metavar or parameter.name).upper()
            shown.append(name if parameter.required else f"[{name}]")
    return "".join(f" {word}" for word in shown).replace(".TOML", ".toml")


def _sentence(help: str) -> str:
    paragraph = " ".join(help.split("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".") + "."


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _verb_table() -> str:
    return _table(("verb", "what it does"), [(_code(verb), about) for verb, about in verbs()])


def _key_table() -> str:
    rows = [(_code(key), _code(kind), _code(default), about) for key, kind, default, about in keys()]
    return _table(("key", "type", "default", "what it is"), rows)


def _recipe_table() -> str:
    columns = (
        "recipe",
        "from",
        "arXiv",
        "equation",
        "choices",
        "needs",
        "columns",
        "differs from the paper in",
    )
    rows = [
        (_code(name), paper, arxiv, _code(equation), *rest)
        for name, paper, arxiv, equation, *rest in recipe_table()
    ]
    return _table(columns, rows)


_BLOCKS: Mapping[str, Callable[[], str]] = {
    "verbs": _verb_table,
    "keys": _key_table,
    "recipes": _recipe_table,
}


def main(arguments: Sequence[str]) -> int:
    """0: fresh (or written); 1: stale; 2: wrong arguments."""
    if list(arguments) not in (["--check"], ["--write"]) or not README.is_file():
        sys.stderr.write("Run it beside README.md: python -m agentrl.cli.docs --check | --write\n")
        return 2
    before = README.read_text(encoding="utf-8")
    after = fresh(before)
    if arguments[0] == "--write":
        README.write_text(after, encoding="utf-8")
        return 0
    if before != after:
        sys.stderr.write("README.md is stale. Run: python -m agentrl.cli.docs --write\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
