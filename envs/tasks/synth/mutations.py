"""Python source to the small bugs that could be made in it, each an edit of one span of bytes.

`propose` walks the syntax tree and yields `Mutation`s; nothing is printed back from the tree, so that a
mutant differs from its original in exactly the span and keeps every space and comment elsewhere. Positions
are byte offsets. Not touched: docstrings, annotations, decorators, f-strings, assertions, messages of
exceptions and warnings, `__main__` and `TYPE_CHECKING` blocks: bugs there are either invisible or no fun.

The kinds follow what people and studies of mutation testing call first-order mutants; `multi_bug` and
`multi_file` are made by putting several together (see `factory`). Whether a mutant is worth anything is for
the tests to say.
"""

from __future__ import annotations

import ast
import io
import random
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

KINDS = MappingProxyType(
    {
        "operator": "an arithmetic or bit operator is another one",
        "comparison": "a comparison is turned round",
        "boundary": "< and <=, > and >= are mixed up",
        "off_by_one": "an integer is one too large or too small",
        "boolean": "and and or are mixed up",
        "negation": "a condition is negated, or its not is lost",
        "wrong_variable": "another variable of the function is used",
        "wrong_function": "a function with the opposite meaning is called",
        "dropped_branch": "an if, elif or else is gone",
        "dropped_statement": "a statement is gone",
        "swapped_arguments": "two neighbouring arguments have changed places",
        "removed_return": "a value is computed and not returned",
        "removed_await": "an await is lost",
        "exception_swallowed": "an exception is not raised, or its handler does nothing",
        "exception_type": "another exception is caught",
        "default": "the default of a parameter is another one",
        "constant": "True and False are mixed up",
        "loop": "break and continue are mixed up",
        "string": "a string has another character, or lacks one",
        "regex": "a regular expression matches something else",
        "multi_bug": "several bugs in one file",
        "multi_file": "bugs in several files",
    }
)
"""Every kind with what is wrong then."""
COMPOSED = ("multi_bug", "multi_file")

_OPERATORS = {
    "+": "-", "-": "+", "*": "+", "/": "*", "//": "/", "%": "*", "**": "*", "<<": ">>", ">>": "<<",
    "&": "|", "|": "&", "^": "&", "@": "*",
    "+=": "-=", "-=": "+=", "*=": "+=", "/=": "*=", "//=": "/=", "%=": "*=", "**=": "*=", "<<=": ">>=",
    ">>=": "<<=", "&=": "|=", "|=": "&=", "^=": "&=",
}  # fmt: skip
_TURNED = {
    "==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">",
    "is": "is not", "is not": "is", "in": "not in", "not in": "in",
}  # fmt: skip
_BOUNDARY = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
_OPPOSITES = dict(
    pair
    for a, b in (
        ("min", "max"),
        ("any", "all"),
        ("startswith", "endswith"),
        ("lstrip", "rstrip"),
        ("upper", "lower"),
        ("isupper", "islower"),
        ("floor", "ceil"),
        ("keys", "values"),
        ("split", "rsplit"),
        ("find", "rfind"),
        ("index", "rindex"),
        ("partition", "rpartition"),
        ("ljust", "rjust"),
        ("append", "appendleft"),
        ("popleft", "pop"),
        ("bisect_left", "bisect_right"),
        ("sorted", "list"),
        ("hasattr", "callable"),
        ("isdigit", "isalpha"),
        ("match", "search"),
    )
    for pair in ((a, b), (b, a))
) | {"list": "sorted", "pop": "popleft", "append": "appendleft"}
_ONE_WAY = frozenset({"list", "pop", "append", "callable", "index", "rindex", "appendleft"})
"""Names that are not replaced themselves: their opposite exists only for some types, or changes nothing."""
_EXCEPTIONS = {
    "KeyError": "IndexError",
    "IndexError": "KeyError",
    "ValueError": "KeyError",
    "TypeError": "ValueError",
    "AttributeError": "KeyError",
    "StopIteration": "IndexError",
    "ImportError": "KeyError",
    "OSError": "ValueError",
    "Exception": "KeyError",
}
_REGEX_EDITS = (
    (r"\d", r"\w"),
    (r"\w", r"\d"),
    (r"\s", r"\S"),
    ("+", "*"),
    ("*", "+"),
    ("?", ""),
    ("^", ""),
    ("$", ""),
    ("a-z", "a-y"),
    ("0-9", "1-9"),
    ("|", ""),
)
_LARGEST_OFF_BY_ONE = 1000
_SILENT_CALLS = frozenset(
    {"warn", "debug", "info", "warning", "error", "exception", "log", "print", "overload"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Bytes `start:end` of a file, which are `old`, become `new`."""

    path: str
    start: int
    old: str
    new: str

    @property
    def end(self) -> int:
        return self.start + len(self.old.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One bug: an edit, and which lines of the original a test must execute to have a chance to see it."""

    kind: str
    edit: Edit
    where: str
    """Qualified name of the function or class, or `<module>`."""
    line: int
    """First line of the edit, from 1."""
    watch: tuple[int, int]
    """Lines, both ends included. `(0, 0)`: any line of the file, because the change acts on import."""


def apply(source: bytes, edits: Sequence[Edit]) -> bytes:
    """The source with edits of one file made. `ValueError` when they overlap or do not fit the source."""
    ordered = sorted(edits, key=lambda e: e.start)
    if any(a.end > b.start for a, b in pairwise(ordered)):
        raise ValueError("two edits overlap")
    for edit in reversed(ordered):
        if source[edit.start : edit.end] != edit.old.encode():
            raise ValueError(f"{edit.path}: there is no {edit.old!r} at byte {edit.start}")
        source = source[: edit.start] + edit.new.encode() + source[edit.end :]
    return source


def inverse(edits: Sequence[Edit]) -> tuple[Edit, ...]:
    """The edits that turn the changed file back: the fix."""
    shift, back = 0, []
    for edit in sorted(edits, key=lambda e: e.start):
        back.append(Edit(path=edit.path, start=edit.start + shift, old=edit.new, new=edit.old))
        shift += len(edit.new.encode()) - len(edit.old.encode())
    return tuple(back)


def holds(source: bytes, edits: Sequence[Edit]) -> bool:
    """Whether the changed source still parses, and to another tree."""
    try:
        changed = ast.parse(apply(source, edits))
    except (SyntaxError, ValueError):
        return False
    return ast.dump(changed) != ast.dump(ast.parse(source))


def propose(path: str, source: bytes, rng: random.Random) -> list[Mutation]:
    """Every mutation of a file, in the order of the source; `rng` chooses among equals (which variable).

    Empty for a file that is not UTF-8, does not parse, or has carriage returns.
    """
    try:
        text = source.decode("utf-8")
        tree = ast.parse(source)
    except (UnicodeDecodeError, SyntaxError, ValueError):
        return []
    if "\r" in text or text.startswith("\ufeff") or "\f" in text:
        return []
    return list(_Walk(path, source, rng).module(tree))


class _Walk:
    """One file. `_spots` is the statement that is being looked at, innermost last."""

    def __init__(self, path: str, source: bytes, rng: random.Random) -> None:
        self._path = path
        self._source = source
        self._rng = rng
        self._starts = [0]
        for line in source.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)
        self._names: list[str] = []
        self._functions: list[ast.FunctionDef | ast.AsyncFunctionDef] = []
        self._watch: tuple[int, int] = (0, 0)

    # -- spans

    def _at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def _span(self, node: ast.AST) -> tuple[int, int]:
        start = self._at(node.lineno, node.col_offset)  # type: ignore[attr-defined]
        return start, self._at(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def _text(self, start: int, end: int) -> str:
        return self._source[start:end].decode()

    def _make(
        self, kind: str, start: int, end: int, new: str, *, watch: tuple[int, int] | None = None
    ) -> Iterator[Mutation]:
        old = self._text(start, end)
        if old == new:
            return
        yield Mutation(
            kind=kind,
            edit=Edit(path=self._path, start=start, old=old, new=new),
            where=".".join(self._names) or "<module>",
            line=self._source.count(b"\n", 0, start) + 1,
            watch=(watch or self._watch) if self._functions else (0, 0),
        )

    def _token(self, start: int, end: int, wanted: frozenset[str] | set[str]) -> tuple[int, int, str] | None:
        """The one token of `wanted` between two nodes (`not in` and `is not` count as one)."""
        gap = self._text(start, end)
        found: list[tuple[int, int, str]] = []
        lines = gap.split("\n")
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line.encode()) + 1)
        try:
            tokens = list(tokenize.generate_tokens(io.StringIO(f"({gap})").readline))
        except (tokenize.TokenError, IndentationError, SyntaxError):
            tokens = []
        if not tokens:  # unbalanced parentheses: look at words and signs only
            for match in re.finditer(r"#[^\n]*|\w+|[^\w\s()\[\]{}\"']+", gap):
                if match[0] in wanted:
                    begin = len(gap[: match.start()].encode())
                    found.append((start + begin, start + begin + len(match[0].encode()), match[0]))
        for token in tokens:
            if token.string in wanted and token.type in (tokenize.OP, tokenize.NAME):
                row, column = token.start
                before = lines[row - 1][: column - (1 if row == 1 else 0)]
                begin = start + starts[row - 1] + len(before.encode())
                found.append((begin, begin + len(token.string.encode()), token.string))
        return found[0] if len(found) == 1 else None

    # -- statements

    def module(self, tree: ast.Module) -> Iterator[Mutation]:
        yield from self._block(tree.body)

    def _block(self, body: Sequence[ast.stmt]) -> Iterator[Mutation]:
        for index, node in enumerate(body):
            docstring = (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            )
            if not docstring:
                yield from self._statement(node, alone=len(body) == 1, first=index == 0)

    def _statement(self, node: ast.stmt, *, alone: bool, first: bool) -> Iterator[Mutation]:
        outer, self._watch = self._watch, (node.lineno, self._header_end(node))
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from self._function(node)
            case ast.ClassDef():
                self._names.append(node.name)
                held, self._functions = self._functions, []
                yield from self._block(node.body)
                self._functions = held
                self._names.pop()
            case ast.If() if _guard(node):
                pass
            case ast.Assert() | ast.Import() | ast.ImportFrom() | ast.Global() | ast.Nonlocal():
                pass
            case _:
                yield from self._plain(node, alone=alone)
        self._watch = outer

    def _header_end(self, node: ast.stmt) -> int:
        body = getattr(node, "body", None)
        if isinstance(body, list) and body:
            first: int = body[0].lineno
            return max(node.lineno, first - 1)
        return node.end_lineno or node.lineno

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Mutation]:
        if any(getattr(d, "id", getattr(d, "attr", "")) == "overload" for d in node.decorator_list):
            return
        self._names.append(node.name)
        self._functions.append(node)
        watch = (node.body[0].lineno, node.end_lineno or node.lineno)
        for default in (*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)):
            yield from self._default(default, watch)
        yield from self._block(node.body)
        self._functions.pop()
        self._names.pop()

    def _default(self, node: ast.expr, watch: tuple[int, int]) -> Iterator[Mutation]:
        if not isinstance(node, ast.Constant):
            return
        start, end = self._span(node)
        value = node.value
        if isinstance(value, bool):
            yield from self._make("default", start, end, str(not value), watch=watch)
        elif isinstance(value, int):
            yield from self._make("default", start, end, str(value + 1), watch=watch)
        elif isinstance(value, str):
            for new in self._other_string(self._text(start, end)):
                yield from self._make("default", start, end, new, watch=watch)

    def _plain(self, node: ast.stmt, *, alone: bool) -> Iterator[Mutation]:
        start, end = self._span(node)
        whole = (node.lineno, node.end_lineno or node.lineno)
        inside = bool(self._functions)
        if inside:
            match node:
                case ast.Return(value=ast.expr() as value):
                    if not isinstance(value, ast.Constant | ast.Name):
                        yield from self._without("removed_return", start, "return")
                case ast.Raise():
                    yield from self._make("exception_swallowed", start, end, "pass")
                case ast.Break():
                    yield from self._make("loop", start, end, "continue")
                case ast.Continue():
                    yield from self._make("loop", start, end, "break")
                case ast.Expr(value=ast.Call() as call) if not alone and _called(call) not in _SILENT_CALLS:
                    yield from self._drop("dropped_statement", node, whole)
                case ast.AugAssign() if not alone:
                    yield from self._drop("dropped_statement", node, whole)
                case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) if not alone:
                    yield from self._drop("dropped_statement", node, whole)
                case ast.If():
                    yield from self._branches(node, alone=alone)
                case ast.Try():
                    yield from self._handlers(node)
                case _:
                    pass
            if isinstance(node, ast.If | ast.While):
                yield from self._condition(node.test)
        if isinstance(node, ast.AugAssign):
            yield from self._operator(node.target, node.value)
        if isinstance(node, ast.Raise):
            return
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                yield from self._expression(node.value)
            return
        if not inside and _is_dunder(node):
            return
        for part in _own_expressions(node):
            yield from self._expression(part)
        for field in ("body", "orelse", "finalbody"):
            yield from self._block(getattr(node, field, ()))
        for handler in getattr(node, "handlers", ()):
            yield from self._block(handler.body)
        for case in getattr(node, "cases", ()):
            yield from self._block(case.body)

    def _drop(self, kind: str, node: ast.stmt, watch: tuple[int, int]) -> Iterator[Mutation]:
        """The whole lines of a statement that has them to itself."""
        start, end = self._span(node)
        first = self._starts[node.lineno - 1]
        last = self._starts[node.end_lineno or node.lineno]
        behind = self._text(end, last).strip()
        if self._text(first, start).strip() or (behind and not behind.startswith("#")):
            return
        yield from self._make(kind, first, last, "", watch=watch)

    def _branches(self, node: ast.If, *, alone: bool) -> Iterator[Mutation]:
        start, _ = self._span(node)
        is_elif = self._source[start : start + 4] == b"elif"
        if is_elif:
            first, last = self._starts[node.lineno - 1], self._starts[node.body[-1].end_lineno or 0]
            yield from self._make("dropped_branch", first, last, "")
        elif not node.orelse and not alone:
            yield from self._drop("dropped_branch", node, (node.lineno, self._watch[1]))
        if node.orelse and not (isinstance(node.orelse[0], ast.If) and self._elif(node.orelse[0])):
            before, after = self._span(node.body[-1])[1], self._span(node.orelse[0])[0]
            token = self._token(before, after, {"else"})
            end_line = node.orelse[-1].end_lineno or 0
            if token is not None:
                line = self._source.count(b"\n", 0, token[0])
                watch = (node.orelse[0].lineno, end_line)
                if not self._text(self._starts[line], token[0]).strip():
                    yield from self._make(
                        "dropped_branch", self._starts[line], self._starts[end_line], "", watch=watch
                    )

    def _elif(self, node: ast.If) -> bool:
        start = self._span(node)[0]
        return self._source[start : start + 4] == b"elif"

    def _handlers(self, node: ast.Try) -> Iterator[Mutation]:
        for handler in node.handlers:
            start, end = self._span(handler.body[0])[0], self._span(handler.body[-1])[1]
            watch = (handler.lineno, handler.end_lineno or handler.lineno)
            if not isinstance(handler.body[0], ast.Pass | ast.Raise) and len(handler.body) == 1:
                yield from self._make("exception_swallowed", start, end, "pass", watch=watch)
            kind = handler.type
            if isinstance(kind, ast.Name) and kind.id in _EXCEPTIONS:
                yield from self._make("exception_type", *self._span(kind), _EXCEPTIONS[kind.id], watch=watch)

    def _without(self, kind: str, start: int, word: str) -> Iterator[Mutation]:
        """A leading word and the blanks behind it are lost."""
        end = start + len(word)
        while self._source[end : end + 1] == b" ":
            end += 1
        yield from self._make(kind, start, end, "")

    def _condition(self, test: ast.expr) -> Iterator[Mutation]:
        start, end = self._span(test)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yield from self._without("negation", start, "not")
        elif isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
            yield from self._make("negation", start, end, f"not {self._text(start, end)}")

    # -- expressions

    def _expression(self, node: ast.AST) -> Iterator[Mutation]:
        """This one and everything in it."""
        if isinstance(node, ast.JoinedStr):
            return
        if isinstance(node, ast.Call) and _called(node) in _SILENT_CALLS:
            return
        match node:
            case ast.BinOp():
                yield from self._operator(node.left, node.right)
            case ast.Compare(ops=[_], comparators=[right]):
                yield from self._compare(node.left, right)
            case ast.BoolOp():
                yield from self._boolean(node)
            case ast.Await():
                yield from self._without("removed_await", self._span(node)[0], "await")
            case ast.Constant():
                yield from self._constant(node)
            case ast.Call():
                yield from self._call(node)
            case ast.Name(ctx=ast.Load()):
                yield from self._variable(node)
            case _:
                pass
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr | ast.keyword | ast.comprehension):
                skip = isinstance(node, ast.Call) and child is node.func and isinstance(child, ast.Name)
                if isinstance(node, ast.Call) and _called(node) in _REGEX_CALLS and child in node.args[:1]:
                    yield from self._regex(child)
                elif not skip:
                    yield from self._expression(child)

    def _operator(self, left: ast.AST, right: ast.AST) -> Iterator[Mutation]:
        if any(isinstance(n, ast.JoinedStr) or _is_text(n) for n in (left, right)):
            return
        token = self._token(self._span(left)[1], self._span(right)[0], frozenset(_OPERATORS))
        if token is not None:
            yield from self._make("operator", token[0], token[1], _OPERATORS[token[2]])

    def _compare(self, left: ast.expr, right: ast.expr) -> Iterator[Mutation]:
        start, end = self._span(left)[1], self._span(right)[0]
        gap = self._text(start, end)
        match = re.fullmatch(r"([\s)]*)(==|!=|<=|>=|<|>|is\s+not|not\s+in|is|in)([\s(]*)", gap)
        if match is None:
            return
        sign = " ".join(match[2].split())
        at = start + len(match[1].encode())
        until = at + len(match[2].encode())
        yield from self._make("comparison", at, until, _TURNED[sign])
        if sign in _BOUNDARY:
            yield from self._make("boundary", at, until, _BOUNDARY[sign])

    def _boolean(self, node: ast.BoolOp) -> Iterator[Mutation]:
        word = "and" if isinstance(node.op, ast.And) else "or"
        if len(node.values) == 2:
            left, right = node.values
            token = self._token(self._span(left)[1], self._span(right)[0], {word})
            if token is not None:
                yield from self._make("boolean", token[0], token[1], "or" if word == "and" else "and")

    def _constant(self, node: ast.Constant) -> Iterator[Mutation]:
        start, end = self._span(node)
        old = self._text(start, end)
        value = node.value
        if isinstance(value, bool):
            yield from self._make("constant", start, end, str(not value))
        elif isinstance(value, int):
            if value <= _LARGEST_OFF_BY_ONE and old.isdecimal():
                larger = value < 1 or self._rng.random() < 0.5
                yield from self._make("off_by_one", start, end, str(value + 1 if larger else value - 1))
        elif isinstance(value, str) and value:
            if _like_regex(value):
                yield from self._regex(node)
            else:
                for new in self._other_string(old):
                    yield from self._make("string", start, end, new)

    def _other_string(self, old: str) -> Iterator[str]:
        """One other literal, or none: prefixes, quotes and escapes stay as they are."""
        match = re.fullmatch(r"([rRbBuU]*)('''|\"\"\"|'|\")(.*)\2", old, re.DOTALL)
        if match is None or "\\" in match[3] or "\n" in match[3]:
            return
        prefix, quote, body = match[1], match[2], match[3]
        if len(body) == 0:
            other = " "
        elif len(body) == 1 and body.isalpha():
            other = body.swapcase()
        elif len(body) == 1:
            other = {"-": "_", "_": "-", " ": "", ",": ";", ".": ",", ":": ";", "/": "|"}.get(body, " ")
        else:
            other = body[:-1]
        yield f"{prefix}{quote}{other}{quote}"

    def _regex(self, node: ast.AST) -> Iterator[Mutation]:
        if not _is_text(node):
            return
        start, end = self._span(node)
        old = self._text(start, end)
        found = [
            (at.start(), before, after)
            for before, after in _REGEX_EDITS
            for at in re.finditer(re.escape(before), old)
            if at.start() > 1 and old[at.start() - 1] != "\\" and old[at.start() - 1] != "("
        ]
        for at, before, after in self._rng.sample(found, min(2, len(found))):
            new = old[:at] + after + old[at + len(before) :]
            begin = start + len(old[:at].encode())
            try:
                re.compile(ast.literal_eval(new))
            except (re.error, SyntaxError, ValueError):
                continue
            yield from self._make("regex", begin, begin + len(before.encode()), after)

    def _call(self, node: ast.Call) -> Iterator[Mutation]:
        for left, right in pairwise(node.args):
            if isinstance(left, ast.Starred) or isinstance(right, ast.Starred):
                continue
            (a, b), (c, d) = self._span(left), self._span(right)
            first, gap, second = self._text(a, b), self._text(b, c), self._text(c, d)
            if first != second:
                yield from self._make("swapped_arguments", a, d, second + gap + first)
        name = _called(node)
        if name in _OPPOSITES and name not in _ONE_WAY:
            _, end = self._span(node.func)
            yield from self._make("wrong_function", end - len(name.encode()), end, _OPPOSITES[name])

    def _variable(self, node: ast.Name) -> Iterator[Mutation]:
        if not self._functions:
            return
        function = self._functions[-1]
        known = _locals(function, before=node.lineno)
        others = sorted(known - {node.id, "self", "cls"})
        if node.id in known - {"self", "cls"} and others:
            yield from self._make("wrong_variable", *self._span(node), self._rng.choice(others))


_REGEX_CALLS = frozenset({"compile", "match", "search", "fullmatch", "sub", "findall", "finditer"})


def _like_regex(text: str) -> bool:
    return bool(re.search(r"\\[dwsbDWSB]|\[[^\]]+\][*+?]|\(\?[:P=!<i]|\.[*+]|\w\$$|^\^\w", text))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _called(node: ast.Call) -> str:
    """The last word of what is called."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _guard(node: ast.If) -> bool:
    names = {getattr(n, "id", getattr(n, "attr", "")) for n in ast.walk(node.test)}
    return bool(names & {"TYPE_CHECKING", "__name__", "PY2", "PY3", "version_info", "platform"})


def _is_dunder(node: ast.stmt) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(t, ast.Name) and t.id.startswith("__") for t in targets)


def _own_expressions(node: ast.stmt) -> list[ast.AST]:
    """What a statement holds that is no statement itself."""
    found: list[ast.AST] = []
    for name, value in ast.iter_fields(node):
        if name in (
            "body",
            "orelse",
            "finalbody",
            "handlers",
            "cases",
            "annotation",
            "returns",
            "type_comment",
        ):
            continue
        values = value if isinstance(value, list) else [value]
        for item in values:
            if isinstance(item, ast.withitem):
                found.append(item.context_expr)
            elif isinstance(item, ast.expr):
                found.append(item)
    return found


def _locals(function: ast.FunctionDef | ast.AsyncFunctionDef, *, before: int) -> set[str]:
    """Parameters, and variables that are assigned on an earlier line of this very function."""
    arguments = function.args
    names = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    names |= {a.arg for a in (arguments.vararg, arguments.kwarg) if a is not None}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.lineno < before:
            names.add(node.id)
    return names
