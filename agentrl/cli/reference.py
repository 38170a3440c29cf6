"""`recipes`, `config`: the tables of the code, which the README repeats."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

import agentrl.config
from agentrl.cli import output
from agentrl.config import RunConfig, key_table, load

if TYPE_CHECKING:
    from agentrl.algo.recipes import Recipe

NEEDS = ("critic", "reference", "teacher")


def recipes(name: str | None, *, as_json: bool) -> None:
    """All rows, or one with every axis."""
    from agentrl.algo.methods import METHODS
    from agentrl.algo.recipes import RECIPES, get

    if name is None:
        rows = [_recipe_facts(recipe) for recipe in RECIPES.values()]
        methods = [
            {"name": m.name, "where": m.where, "section": dict(m.section), "how": m.how} for m in METHODS
        ]
        if as_json:
            output.emit({"recipes": rows, "methods": methods})
            return
        output.table(
            ("name", "arXiv", "equation", "choices", "needs", "columns", "differs from the paper in"),
            [(name, arxiv or "–", *rest) for name, _, arxiv, *rest in recipe_table()],
        )
        output.say()
        output.table(
            ("without a row of their own", "where", "in a run file", "what stands for the idea"),
            [(m["name"], m["where"], json.dumps(m["section"]), m["how"]) for m in methods],
        )
        return
    facts = _recipe_facts(get(name))
    if as_json:
        output.emit(facts)
        return
    output.say(f"[bold]{escape(facts['name'])}[/]  {escape(facts['paper'])}{_arxiv(facts['arxiv'])}")
    output.say(f"  {escape(facts['equation'])}")
    output.say(f"  [dim]differs from the paper:[/] {escape(facts['differs'])}")
    output.say(f"  [dim]needs:[/] {', '.join(facts['needs']) or 'nothing beside the trajectories'}")
    output.say()
    output.table(
        ("axis", "choice", "numbers", "what it does"),
        [
            (axis, choice["operator"], _numbers(choice), choice["equation"])
            for axis, chosen in facts["axes"].items()
            for choice in chosen
        ],
    )
    output.say()
    output.say(f'Use it: train.recipe = "{facts["name"]}", and change a choice under \\[train.overrides].')


def recipe_table() -> list[tuple[str, ...]]:
    """Every recipe as `agentrl recipes` lists it, for generated docs: name, source, arXiv id, equation,
    choices, needs, columns, difference from the paper."""
    from agentrl.algo.recipes import RECIPES

    rows = [_recipe_facts(recipe) for recipe in RECIPES.values()]
    return [
        (
            r["name"],
            r["paper"],
            r["arxiv"] or "",
            r["equation"],
            _choices(r),
            ", ".join(r["needs"]),
            ", ".join(r["columns"]),
            r["differs"],
        )
        for r in rows
    ]


def _recipe_facts(recipe: Recipe) -> dict[str, Any]:
    axes: dict[str, list[dict[str, Any]]] = {}
    for axis, operator, choice in recipe.operators():
        unset = [name for name in operator.required if choice.numbers.get(name) is None]
        numbers = {**operator.defaults, **choice.numbers}
        row = {"operator": operator.name, "numbers": numbers, "unset": unset, "equation": operator.equation}
        axes.setdefault(axis, []).append(row)
    return {
        "name": recipe.name,
        "paper": recipe.paper,
        "arxiv": recipe.arxiv,
        "equation": recipe.equation,
        "differs": recipe.differs,
        "needs": [*(need for need in NEEDS if getattr(recipe, f"needs_{need}")), *_given_by_hand(recipe)],
        "columns": sorted(recipe.columns),
        "axes": axes,
        "old": recipe.old,
        "max_lag": recipe.max_lag,
        "group_size": recipe.group_size,
    }


def _given_by_hand(recipe: Recipe) -> list[str]:
    """Columns that no run fills by itself."""
    from agentrl.algo.recipes import RUN_COLUMNS

    made = {*RUN_COLUMNS, "lag_N", "ref_logp_N", "teacher_logp_N"}
    if recipe.needs_critic:
        made |= {"values_N", "bootstrap_S"}
    return sorted(f"{column} (extra=)" for column in recipe.columns - made)


def _choices(facts: Mapping[str, Any]) -> str:
    """The axes that say something, in the order of the batch."""
    chosen = [
        f"{axis}: {', '.join(c['operator'] for c in choices)}" for axis, choices in facts["axes"].items()
    ]
    return "; ".join(chosen)


def _numbers(choice: Mapping[str, Any]) -> str:
    given = [f"{name}={value}" for name, value in choice["numbers"].items() if name not in choice["unset"]]
    return ", ".join([*given, *(f"{name} must be set" for name in choice["unset"])])


def _arxiv(number: str | None) -> str:
    return "" if number is None else f" [dim](arXiv {number})[/]"


def config(run_file: Path | None, overrides: Sequence[str], *, as_json: bool) -> None:
    """The page of all keys, or a run file as it will be used."""
    if run_file is None and not overrides:
        rows = keys()
        if as_json:
            output.emit(
                {"keys": [dict(zip(("key", "type", "default", "about"), row, strict=True)) for row in rows]}
            )
            return
        output.table(("key", "type", "default", "what it is"), rows)
        return
    resolved = load(run_file, overrides) if run_file is not None else agentrl.config.parse({}, overrides)
    if as_json:
        output.emit(
            {"hash": resolved.hash, "folder": resolved.run.folder, **resolved.model_dump(mode="json")}
        )
        return
    usual = _flat(RunConfig().model_dump(mode="json"))
    rows_changed = [
        (key, json.dumps(value, ensure_ascii=False), "" if usual.get(key) == value else output.good("set"))
        for key, value in _flat(resolved.model_dump(mode="json")).items()
    ]
    output.table(("key", "value", ""), rows_changed)
    what = "the overrides" if run_file is None else str(run_file)
    output.say(escape(f"{what}: valid; the run lives in {resolved.run.folder}"))


def keys() -> list[tuple[str, str, str, str]]:
    """Key, type, default and meaning of everything that a run file may say."""
    about = _about()
    return [(key, _type(kind), _default(default), about.get(key, "")) for key, default, kind in key_table()]


def _type(annotation: str) -> str:
    """An annotation as a person reads it: `int`, `"light" | "full"`, `float or none`."""
    optional = re.fullmatch(r"Optional\[(.*)\]", annotation)
    if optional:
        return f"{_type(optional[1])} or none"
    literal = re.fullmatch(r"Literal\[(.*)\]", annotation)
    if literal:
        return " | ".join(word.strip().replace("'", '"') for word in literal[1].split(","))
    bare = re.sub(r"<class '([\w.]+)'>", r"\1", annotation)
    bare = re.sub(r"Annotated\[(\w+), .*?\](?=$| \|)", r"\1", bare)
    return re.sub(r"dict\[.*\]", "table", bare).replace(" | None", " or none").replace("str", "text")


def _default(text: str) -> str:
    return {"None": "none", "True": "true", "False": "false"}.get(text, text.replace("'", '"'))


def _about() -> dict[str, str]:
    """The sentence under each key in the source of the configuration page."""
    classes = {
        n.name: n for n in ast.parse(inspect.getsource(agentrl.config)).body if isinstance(n, ast.ClassDef)
    }
    found: dict[str, str] = {}

    def walk(name: str, prefix: str) -> None:
        body = classes[name].body
        for node, after in zip(body, [*body[1:], None], strict=True):
            if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
                continue
            key = f"{prefix}{node.target.id}"
            if isinstance(node.annotation, ast.Name) and node.annotation.id in classes:
                walk(node.annotation.id, f"{key}.")
            elif isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                found[key] = " ".join(str(after.value.value).split())

    walk(RunConfig.__name__, "")
    return found


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, Mapping) and value
            else {f"{prefix}{key}": value}
        )
    return flat
