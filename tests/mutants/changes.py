"""Careless changes to Python and C++ sources: the slips that a review overlooks."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "+"}
# Calls that return their first argument, or the object of the method, with another dtype, layout or autograd history.
_CONVERSIONS = {"as_index", "cast", "clone", "contiguous", "coalesce", "detach", "float", "long", "to", "type_as"}
_TWINS = {"max": "min", "min": "max", "any": "all", "all": "any"}

_CPP = [
    ("a bound moved", r"(?<=[\w\])] )<(?= [\w(])", "<="),
    ("a bound moved", r"(?<=[\w\])] )>(?= [\w(])", ">="),
    ("a bound moved", r" <= ", " < "),
    ("a bound moved", r" >= ", " > "),
    ("a comparison turned round", r" == ", " != "),
    ("a comparison turned round", r" != ", " == "),
    ("a connective replaced", r" && ", " || "),
    ("a connective replaced", r" \|\| ", " && "),
    ("one dropped", r" [+-] 1\b(?!\.)", ""),
    ("an extremum replaced", r"\bstd::max\b", "std::min"),
    ("an extremum replaced", r"\bstd::min\b", "std::max"),
    ("a flag turned round", r"\btrue\b", "false"),
    ("a flag turned round", r"\bfalse\b", "true"),
    ("a sign turned round", r"(?<=[\w\])]) \+ (?=[a-z])", " - "),
    ("a sign turned round", r"(?<=[\w\])]) - (?=[a-z])", " + "),
    ("a sum not added up", r" \+= ", " = "),
]


@dataclass(frozen=True)
class Change:
    """One careless change to a file.

    Attributes:
        file: relative to the root of the project.
        line: the first line that changes, from 1.
        kind: what was done, in words.
        begin, end: offsets of the text that is replaced.
        text: what takes its place.
        before: the line as it was, without its indentation.
    """

    file: str
    line: int
    kind: str
    begin: int
    end: int
    text: str
    before: str

    def applied(self, source: str) -> str:
        """The changed source."""
        return source[: self.begin] + self.text + source[self.end :]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kind}: {self.before}"


def picked(text: str, read: Callable[[str], str]) -> list[Change]:
    """The changes that a file of changes lists.

    An entry begins with ``FILE:LINE: KIND``. Lines that begin with ``- `` are the text that is replaced, and lines that
    begin with ``+ `` what takes its place. Where the text occurs several times, the occurrence nearest to the line is
    meant. Lines that begin with ``#`` are comments.

    Args:
        text: the file's contents.
        read: gives the source of a file.

    Raises:
        ValueError: if a text does not occur in its file.
    """
    found = []
    for entry in re.split(r"^(?=[^-+#\s])", text, flags=re.MULTILINE)[1:]:
        head, *rest = entry.splitlines()
        file, line, kind = re.fullmatch(r"([^:]+):(\d+): (.+)", head).groups()
        old, new = ("\n".join(row[2:] for row in rest if row.startswith(sign)) for sign in "-+")
        source = read(file)
        places = [match.start() for match in re.finditer(re.escape(old), source)]
        if not old or not places:
            raise ValueError(f"{file} must have the text that an entry replaces, and has no {old!r}")
        begin = min(places, key=lambda place: abs(source.count("\n", 0, place) + 1 - int(line)))
        at = source.count("\n", 0, begin) + 1
        found.append(Change(file, at, kind, begin, begin + len(old), new, source.splitlines()[at - 1].strip()))
    return found


def changes_to(file: str, source: str) -> list[Change]:
    """All changes to a source that this module knows, in the order of their lines."""
    found = _python(source) if file.endswith(".py") else _cpp(source)
    lines = source.splitlines()
    made = []
    for kind, begin, end, text in found:
        line = source.count("\n", 0, begin) + 1
        made.append(Change(file, line, kind, begin, end, text, lines[line - 1].strip()))
    return sorted(set(made), key=lambda change: (change.begin, change.end, change.text))


def _cpp(source: str) -> Iterator[tuple[str, int, int, str]]:
    offset = 0
    for line in source.splitlines(keepends=True):
        code = line.split("//")[0]
        if not code.lstrip().startswith(("#", "template", "static_assert", "using", "*")) and '"' not in code:
            for kind, pattern, text in _CPP:
                for match in re.finditer(pattern, code):
                    yield kind, offset + match.start(), offset + match.end(), text
        offset += len(line)


class _Source:
    """Offsets of the nodes of a syntax tree."""

    def __init__(self, source: str):
        self.source = source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.lines = source.splitlines(keepends=True)

    def begin(self, node: ast.AST) -> int:
        return self._offset(node.lineno, node.col_offset)

    def end(self, node: ast.AST) -> int:
        return self._offset(node.end_lineno, node.end_col_offset)

    def text(self, node: ast.AST) -> str:
        return self.source[self.begin(node) : self.end(node)]

    def _offset(self, line: int, column: int) -> int:  # columns count bytes of UTF-8
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())


def _python(source: str) -> Iterator[tuple[str, int, int, str]]:
    at = _Source(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            yield from _of_comparison(at, node)
        elif isinstance(node, ast.BoolOp):
            for value in node.values:
                others = [at.text(v) for v in node.values if v is not value]
                joined = f" {'and' if isinstance(node.op, ast.And) else 'or'} ".join(others)
                yield "a condition dropped", at.begin(node), at.end(node), joined
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield "a negation dropped", at.begin(node), at.end(node), f"({at.text(node.operand)})"
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            text = str(not node.value) if isinstance(node.value, bool) else str(node.value + 1)
            yield "a constant changed", at.begin(node), at.end(node), text
        elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC and not isinstance(node.left, ast.Constant):
            text = f"({at.text(node.left)}) {_ARITHMETIC[type(node.op)]} ({at.text(node.right)})"
            yield "arithmetic changed", at.begin(node), at.end(node), text
        elif isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load) and len(node.elts) > 2:
            for part in node.elts:
                others = ", ".join(at.text(p) for p in node.elts if p is not part)
                yield "a field dropped", at.begin(node), at.end(node), f"({others})"
        elif isinstance(node, ast.If) and not node.orelse and _leaves(node.body):
            yield "an early return dropped", at.begin(node.test), at.end(node.test), "False"
        elif isinstance(node, ast.Call):
            yield from _of_call(at, node)


def _leaves(body: list[ast.stmt]) -> bool:
    return len(body) == 1 and isinstance(body[0], (ast.Return, ast.Raise, ast.Continue))


def _of_comparison(at: _Source, node: ast.Compare) -> Iterator[tuple[str, int, int, str]]:
    left = node.left
    for op, right in zip(node.ops, node.comparators, strict=True):
        kind = "a bound moved" if isinstance(op, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)) else "a comparison turned round"
        yield kind, at.end(left), at.begin(right), f" {_COMPARISONS[type(op)]} "
        left = right


def _of_call(at: _Source, node: ast.Call) -> Iterator[tuple[str, int, int, str]]:
    function = node.func
    name = getattr(function, "attr", getattr(function, "id", None))
    if name in _CONVERSIONS:
        inner = function.value if isinstance(function, ast.Attribute) else next(iter(node.args), None)
        if inner is not None:
            yield "a conversion dropped", at.begin(node), at.end(node), at.text(inner)
    if isinstance(function, ast.Name) and name in _TWINS:
        yield "a function replaced by its twin", at.begin(function), at.end(function), _TWINS[name]
    for keyword in node.keywords:
        if keyword.arg is None:
            continue
        others = [at.text(a) for a in node.args] + [at.text(k) for k in node.keywords if k is not keyword]
        yield "an argument dropped", at.begin(node), at.end(node), f"{at.text(function)}({', '.join(others)})"
