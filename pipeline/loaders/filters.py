"""Expressions that choose episodes, over the columns of the episodes table: a small part of Python, never evaluated as such.

``task == 'pick' and success``, ``num_steps >= 50 and source in ('a', 'b')``, ``not (rate_hz < 10 or 'left' in views)``.

Names are columns of ``episodes`` (``docs/training.md``), ``task`` (any of the episode's instructions), ``num_steps``, and the keys of
``details``, where readers put what their format says of an episode, such as ``success``. What an episode does not say is None: it
equals nothing but None, and is less or greater than nothing.
"""

import ast
import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool

from pipeline.loaders.reader import DatasetReader
from schemas.errors import UsageError

MAX_LENGTH = 2_000
"""Characters of an expression; Python's own parser recurses."""

_Row = Mapping[str, Any]
_Test = Callable[[_Row], Any]


def _equal(left: Any, right: Any) -> bool:
    """Compare; a list of texts, such as an episode's instructions, equals each of them."""
    if isinstance(left, list):
        return right in left
    return right.__contains__(left) if isinstance(right, list) else bool(left == right)


def _ordered(compare: Callable[[Any, Any], bool], left: Any, right: Any) -> bool:
    if left is None or right is None:
        return False
    try:
        return compare(left, right)
    except TypeError:
        raise UsageError(f"expected two numbers or two texts to compare, found {left!r} and {right!r}") from None


def _contains(container: Any, value: Any) -> bool:
    if container is None:
        return False
    if not isinstance(container, list | tuple | str) or (isinstance(container, str) and not isinstance(value, str)):
        raise UsageError(f"expected a list or a text behind `in`, found {container!r}; correct the filter")
    return any(item in container for item in value) if isinstance(value, list) else value in container


_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: _equal,
    ast.NotEq: lambda left, right: not _equal(left, right),
    ast.Lt: lambda left, right: _ordered(operator.lt, left, right),
    ast.LtE: lambda left, right: _ordered(operator.le, left, right),
    ast.Gt: lambda left, right: _ordered(operator.gt, left, right),
    ast.GtE: lambda left, right: _ordered(operator.ge, left, right),
    ast.In: lambda left, right: _contains(right, left),
    ast.NotIn: lambda left, right: not _contains(right, left),
}


@dataclass(frozen=True)
class Filter:
    """An expression, parsed.

    Raises
    ------
    UsageError
        Not an expression of this grammar; the message says which part.
    """

    text: str
    names: set[str] = field(init=False, default_factory=set)
    """What the expression asks of an episode."""
    _test: _Test = field(init=False)

    def __post_init__(self) -> None:
        if len(self.text) > MAX_LENGTH:
            raise UsageError(
                f"expected a filter of at most {MAX_LENGTH} characters, found {len(self.text)}; shorten it"
            )
        try:
            tree = ast.parse(self.text.strip(), mode="eval")
            object.__setattr__(self, "_test", self._compile(tree.body))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise UsageError(
                f"expected a filter such as \"task == 'pick' and success\", found {self.text!r} ({error}); correct it"
            ) from None

    def episodes(self, reader: DatasetReader) -> Bool[np.ndarray, " episode"]:
        """Return which episodes of a dataset satisfy it."""
        rows = _rows(reader, self.names)
        return np.fromiter((bool(self._test(row)) for row in rows), np.bool_, len(rows))

    def _compile(self, node: ast.expr) -> _Test:
        match node:
            case ast.BoolOp(op=ast.And(), values=values):
                tests = [self._compile(value) for value in values]
                return lambda row: all(test(row) for test in tests)
            case ast.BoolOp(values=values):
                tests = [self._compile(value) for value in values]
                return lambda row: any(test(row) for test in tests)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                test = self._compile(operand)
                return lambda row: not test(row)
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
                compare, first, second = _COMPARE[type(op)], self._compile(left), self._compile(right)
                return lambda row: compare(first(row), second(row))
            case ast.Name(id=name):
                self.names.add(name)
                return operator.itemgetter(name)
            case _:
                value = _literal(node)
                return lambda row: value


def _literal(node: ast.expr) -> Any:
    """Return a string, number, True, False, None, or a tuple of them."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return tuple(_literal(element) for element in elements)
    raise UsageError(
        f"expected names, values, comparisons, `and`, `or`, `not` and `in`, found {ast.unparse(node)!r}; correct the filter"
    )


def _rows(reader: DatasetReader, names: set[str]) -> list[dict[str, Any]]:
    """Return what each episode says under ``names``."""
    table = reader.table("episodes")
    columns = {name: table[name].to_pylist() for name in names & set(table.column_names)}
    columns["task"] = table["instructions"].to_pylist()
    columns["num_steps"] = np.subtract(table["stop"].to_numpy(), table["start"].to_numpy()).tolist()
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    others = names - columns.keys()
    if not others:
        return rows
    details = [json.loads(text or "{}") for text in table["details"].to_pylist()]
    known = set().union(*details)
    if not others <= known:
        raise UsageError(
            f"expected names among {sorted({*table.column_names, *columns, *known})}, found {sorted(others - known)}; "
            "correct the filter"
        )
    return [{**{name: said.get(name) for name in others}, **row} for row, said in zip(rows, details, strict=True)]
