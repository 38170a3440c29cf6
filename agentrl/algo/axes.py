"""What an operator is: one pure function, and the row that declares what it reads and which numbers it takes.

An operator's *columns* are its positional parameters: their names are looked up in the evidence of the batch
(`advantage_N`, `group_S`, ...). Its *numbers* are its keyword-only parameters; one without default must be
set by the recipe or the run file. So a new operator is one function, plus its name in the table of its axis.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from agentrl.errors import ConfigError, nearest

Number = int | float | bool | str | None | tuple[float, ...]
"""What a recipe may set: a number, a switch, a word, nothing, or a row of weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One row of an axis table."""

    name: str
    function: Callable[..., Any]
    columns: tuple[str, ...]
    """Names that must be in the evidence."""
    optional: tuple[str, ...]
    """Names that are passed when the evidence has them, else None."""
    defaults: Mapping[str, Number]
    required: tuple[str, ...]
    """Numbers that have no default."""
    kinds: Mapping[str, str]
    """What each number is, as it is annotated: `float`, `int | None`, `str`, ..."""

    @property
    def equation(self) -> str:
        """First paragraph of the function's docstring."""
        return (inspect.getdoc(self.function) or "").split("\n\n", 1)[0].replace("\n", " ")


def _kind(annotation: Any) -> str:
    """An annotation as it is written."""
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def table(*functions: Callable[..., Any]) -> Mapping[str, Operator]:
    """The operators of one axis by name (the name of the function)."""
    rows: dict[str, Operator] = {}
    for function in functions:
        parameters = inspect.signature(function).parameters.values()
        positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        numbers = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        name = function.__name__
        rows[name] = Operator(
            name=name,
            function=function,
            columns=tuple(p.name for p in positional if p.default is p.empty),
            optional=tuple(p.name for p in positional if p.default is not p.empty),
            defaults=MappingProxyType({p.name: p.default for p in numbers if p.default is not p.empty}),
            required=tuple(p.name for p in numbers if p.default is p.empty),
            kinds=MappingProxyType({p.name: _kind(p.annotation) for p in numbers}),
        )
    return MappingProxyType(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An operator by name, with the numbers that differ from its defaults."""

    operator: str
    numbers: Mapping[str, Number] = field(default_factory=lambda: MappingProxyType({}))


def choose(operator: str, **numbers: Number) -> Choice:
    """Shorthand for recipe rows: `choose("ppo_clip", low=0.2, high=0.28)`."""
    return Choice(operator=operator, numbers=MappingProxyType(dict(numbers)))


def resolve(axis: str, operators: Mapping[str, Operator], choice: Choice) -> Operator:
    """The chosen row; `ConfigError` with the nearest name for an unknown operator or number."""
    operator = operators.get(choice.operator)
    if operator is None:
        raise ConfigError(f"No {axis} operator '{choice.operator}'.", fix=nearest(choice.operator, operators))
    known = (*operator.defaults, *operator.required)
    for key in choice.numbers:
        if key not in known:
            raise ConfigError(f"{axis} '{operator.name}' has no number '{key}'.", fix=nearest(key, known))
    return operator


_KINDS: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "float": (int, float),
        "int": (int,),
        "bool": (bool,),
        "str": (str,),
        "tuple[float, ...]": (tuple,),
        "None": (type(None),),
    }
)


def check_kind(axis: str, operator: Operator, key: str, value: Number) -> None:
    """Raise `ConfigError` unless a number is what the operator takes, and finite."""
    kinds = [kind.strip() for kind in operator.kinds[key].split("|")]
    known = all(kind in _KINDS for kind in kinds)
    fits = not known or isinstance(value, tuple({t for kind in kinds for t in _KINDS[kind]}))
    if known and isinstance(value, bool) and "bool" not in kinds:
        fits = False
    several = value if isinstance(value, tuple) else (value,)
    endless = any(isinstance(one, float) and not math.isfinite(one) for one in several)
    if not fits or endless:
        raise ConfigError(
            f"{axis}.{operator.name}.{key} = {value!r} is not {' or '.join(kinds)}"
            f"{' and finite' if endless else ''}.",
            fix=f"Its default is {operator.defaults[key]!r}." if key in operator.defaults else None,
        )


def numbers_of(operator: Operator, choice: Choice) -> dict[str, Number]:
    """All numbers of a choice with defaults filled in; `ConfigError` when a required one is not set."""
    missing = [name for name in operator.required if choice.numbers.get(name) is None]
    if missing:
        raise ConfigError(
            f"Operator '{operator.name}' needs {', '.join(missing)}.",
            fix="Set it in the algorithm section of the run file.",
        )
    return {**operator.defaults, **choice.numbers}


def apply(operator: Operator, choice: Choice, evidence: Mapping[str, Any]) -> Any:
    """Call the operator with its columns out of the evidence and its numbers."""
    columns = {name: evidence[name] for name in operator.columns}
    columns |= {name: evidence.get(name) for name in operator.optional}
    return operator.function(**columns, **numbers_of(operator, choice))
