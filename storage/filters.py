"""Conditions over the columns of a table, written as text: `reward > 0 and weight_version >= 12`.

The text is parsed here and becomes an Arrow expression; no part of it is ever evaluated as code.

    condition  = either {"or" either};  either = negated {"and" negated};  negated = ["not"] negated | comparison
    comparison = sum {("==" | "=" | "!=" | "<>" | "<" | "<=" | ">" | ">=") sum
                     | ["not"] "in" "(" literal {"," literal} ")" | "is" ["not"] "null"}
    sum        = product {("+" | "-") product};  product = factor {("*" | "/") factor}
    factor     = "-" factor | number | 'text' | "true" | "false" | column | column.key | length(column)
                 | "(" condition ")"

A map whose keys may be written as if they were columns, as in `right >= 1` for `components.right >= 1`, can be named.

A comparison with null is neither true nor false, as in SQL: such a row is kept only by `is null`."""

import difflib
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from storage.errors import InputError

Kind = Literal["number", "text", "truth", "list", "map"]

_TOKEN = re.compile(
    r"""\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
    |(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    |(?P<name>[A-Za-z_]\w*)
    |(?P<sign><=|>=|==|!=|<>|[<>=()+\-*/,.])
    |(?P<end>\Z))""",
    re.VERBOSE,
)
_WORDS = {"and", "or", "not", "in", "is", "null", "true", "false"}
_COMPARISONS: dict[str, Callable[[pc.Expression, pc.Expression], pc.Expression]] = {
    "==": operator.eq, "=": operator.eq, "!=": operator.ne, "<>": operator.ne, "<": operator.lt, "<=": operator.le,
    ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_ARITHMETIC = {"+": pc.add, "-": pc.subtract, "*": pc.multiply, "/": pc.divide}  # pyright: ignore[reportAttributeAccessIssue] - made at import
_JOINS = {"or": operator.or_, "and": operator.and_}
_POWERS = {"or": 1, "and": 2, **dict.fromkeys([*_COMPARISONS, "is", "not", "in"], 4), "+": 5, "-": 5, "*": 6, "/": 6}
_NOT = 3  # binding power of `not` before a condition, among those of the operators
_DEEPEST = 100
_SHOWN = 200  # characters of a filter in a message
_LONGEST = 20_000  # characters; Arrow walks an expression recursively


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    place: int


@dataclass(frozen=True)
class _Value:
    expression: pc.Expression
    kind: Kind
    place: int
    type: pa.DataType | None = None  # type of the column, if it is one and nothing else
    literal: int | float | str | bool | None = None  # the value, if it is a literal


@dataclass(frozen=True)
class Condition:
    expression: pc.Expression  # for `pyarrow.Table.filter`
    keys: frozenset[str]  # the keys of maps that it names
    columns: frozenset[str]  # the columns that it names


def parse_filter(text: str, schema: pa.Schema) -> pc.Expression:
    """The condition `text` over columns of `schema`, as an expression: see `parse_condition`."""
    return parse_condition(text, schema).expression


def parse_condition(text: str, schema: pa.Schema, keys: str | None = None) -> Condition:
    """The condition `text` over columns of `schema`. Numbers that are compared with a float32 column are rounded to
    float32 first, as the column's own values were. Arithmetic is that of float64. The keys of the column `keys` of
    `schema` may be written as columns. Raises InputError with the position (from 1), what is there, and what to write
    instead."""
    if len(text) > _LONGEST:
        raise InputError(f"the filter has {len(text)} characters, and {_LONGEST} is the limit: select in several runs")
    parser = _Parser(text, schema, keys)
    return Condition(parser.whole(), frozenset(parser.keys), frozenset(parser.columns))


class _Parser:
    def __init__(self, text: str, schema: pa.Schema, open_map: str | None) -> None:
        self._text, self._schema, self._open_map = text, schema, open_map
        self.keys: set[str] = set()
        self.columns: set[str] = set()
        self._tokens = list(self._cut())
        self._next, self._depth = 0, 0

    def whole(self) -> pc.Expression:
        found = self._truth(self._expression())
        if self._token.kind != "end":
            self._fail(self._token, "the condition should end here, or go on with 'and' or 'or'")
        return found

    def _cut(self) -> list[_Token]:
        tokens, place = [], 0
        while not tokens or tokens[-1].kind != "end":
            found = _TOKEN.match(self._text, place)
            if found is None:
                place += len(self._text[place:]) - len(self._text[place:].lstrip())
                rest = self._text[place : place + 12]
                hint = "close the quotation mark" if rest[:1] in "'\"" else "write texts in quotation marks"
                self._fail(_Token("sign", rest, place), hint)
            kind = found.lastgroup or "end"
            tokens.append(_Token(kind, found[kind], found.start(kind)))
            place = found.end()
        return tokens

    @property
    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _take(self) -> _Token:
        token = self._token
        self._next += token.kind != "end"
        return token

    def _takes(self, *texts: str) -> bool:
        """Take the next token if it is one of these signs or words."""
        found = self._token.text.lower() in texts
        if found:
            self._take()
        return found

    def _expect(self, sign: str, why: str) -> None:
        if not self._takes(sign):
            self._fail(self._token, f"{sign!r} is missing: {why}")

    def _expression(self, least: int = 0) -> _Value:
        """All that operators join which bind more tightly than `least`, from left to right."""
        left = self._negated()
        while _POWERS.get(self._token.text.lower(), 0) > least:
            left = self._joined(left, self._take())
        return left

    def _negated(self) -> _Value:
        place = self._token.place
        if not self._takes("not"):
            return self._factor()
        with self._deeper():
            return _Value(~self._truth(self._expression(_NOT)), "truth", place)

    def _joined(self, left: _Value, sign: _Token) -> _Value:
        word = sign.text.lower()
        if word in _JOINS:
            both = self._truth(left), self._truth(self._expression(_POWERS[word]))
            return _Value(_JOINS[word](*both), "truth", left.place)
        if word in _ARITHMETIC:
            numbers = self._number(left), self._number(self._expression(_POWERS[word]))
            return _Value(_ARITHMETIC[word](*numbers), "number", left.place)
        if word in _COMPARISONS:
            return self._compared(left, sign, self._expression(_POWERS[word]))
        if word == "is":
            negated = self._takes("not")
            self._expect("null", "write 'is null' or 'is not null'")
            found = left.expression.is_null()
        else:
            if negated := word == "not":
                self._expect("in", "'not' between two values belongs to 'in'")
            found = self._among(left)
        return _Value(~found if negated else found, "truth", left.place)

    def _compared(self, left: _Value, sign: _Token, right: _Value) -> _Value:
        if left.kind != right.kind or left.kind in ("list", "map"):
            compound = {"list": "write length(column)", "map": "write column.key"}
            repair = compound.get(left.kind) or compound.get(right.kind) or "compare values of the same kind"
            self._fail(sign, f"it compares a {left.kind} with a {right.kind}: {repair}")
        return _Value(_COMPARISONS[sign.text](*_alike(left, right)), "truth", left.place)

    def _among(self, left: _Value) -> pc.Expression:
        self._expect("(", "the values after 'in' are in parentheses, as in ('stop', 'length')")
        values = [self._member(left)]
        while self._takes(","):
            values.append(self._member(left))
        self._expect(")", "it closes the values after 'in'")
        return _any([mine == theirs for mine, theirs in (_alike(left, value) for value in values)])

    def _member(self, left: _Value) -> _Value:
        value = self._factor()
        if value.literal is None or value.kind != left.kind:
            there = self._text[value.place :].split(",")[0].strip()
            self._fail(_Token("sign", there, value.place), f"each value after 'in' must be a {left.kind}")
        return value

    def _number(self, value: _Value) -> pc.Expression:
        if value.kind != "number":
            repair = "write length(column)" if value.kind in ("list", "map") else "calculate with numbers only"
            self._fail(self._at(value), f"it is a {value.kind}: {repair}")
        return value.expression.cast(pa.float64(), safe=False)

    def _truth(self, value: _Value) -> pc.Expression:
        if value.kind != "truth":
            self._fail(
                self._at(value), f"it is a {value.kind}, which is neither true nor false: compare it with something"
            )
        return value.expression

    def _factor(self) -> _Value:
        token = self._take()
        if token.kind == "number":
            return self._literal(int(token.text) if token.text.isdigit() else float(token.text), "number", token)
        if token.kind == "text":
            return self._literal(re.sub(r"\\(.)", r"\1", token.text[1:-1]), "text", token)
        if token.kind == "name":
            return self._named(token)
        if token.text == "-":
            with self._deeper():
                value = self._factor()
                if value.kind == "number" and isinstance(value.literal, int | float):
                    return self._literal(-value.literal, "number", token)
                return _Value(pc.negate(self._number(value)), "number", token.place)  # pyright: ignore[reportAttributeAccessIssue]
        if token.text == "(":
            with self._deeper():
                found = self._expression()
            self._expect(")", f"it ends what begins at position {token.place + 1}")
            return found
        return self._fail(token, f"a column or a value is missing here; columns are {', '.join(self._schema.names)}")

    def _literal(self, value: int | float | str | bool, kind: Kind, token: _Token) -> _Value:
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            self._fail(token, "it does not fit into 64 bits")
        return _Value(pc.scalar(value), kind, token.place, literal=value)

    def _named(self, token: _Token) -> _Value:
        word = token.text.lower()
        if word in ("true", "false"):
            return self._literal(word == "true", "truth", token)
        if word == "null":
            self._fail(token, "nothing equals null: write 'column is null'")
        if word == "length" and self._takes("("):
            return self._length(token)
        if word in _WORDS:
            self._fail(token, "a column or a value is missing before it")
        if self._open_map is not None and token.text not in self._schema.names:
            self.columns.add(self._open_map)
            return self._keyed(pc.field(self._open_map), token.text, token)
        column = self._column(token)
        if not self._takes("."):
            return column
        key = self._take()
        if column.kind != "map" or key.kind not in ("name", "text"):
            self._fail(key, f"only a map has keys, and {token.text!r} is a {column.kind}")
        return self._keyed(column.expression, key.text if key.kind == "name" else key.text[1:-1], token)

    def _keyed(self, column: pc.Expression, name: str, token: _Token) -> _Value:
        self.keys.add(name)
        found = pc.map_lookup(column, pa.scalar(name), "first")  # pyright: ignore[reportAttributeAccessIssue]
        return _Value(found, "number", token.place, pa.float32())

    def _length(self, token: _Token) -> _Value:
        column = self._column(self._take())
        if column.kind != "list":
            self._fail(token, f"only a list has a length, and this is a {column.kind}")
        self._expect(")", "it ends length(")
        return _Value(pc.list_value_length(column.expression), "number", token.place)  # pyright: ignore[reportAttributeAccessIssue]

    def _column(self, token: _Token) -> _Value:
        if token.kind != "name" or token.text not in self._schema.names:
            near = difflib.get_close_matches(token.text, self._schema.names, n=1, cutoff=0.5)
            known = f"did you mean {near[0]!r}?" if near else f"columns are {', '.join(self._schema.names)}"
            self._fail(token, f"there is no such column; {known}")
        kind = self._schema.field(token.text).type
        self.columns.add(token.text)
        return _Value(pc.field(token.text), _kind_of(kind), token.place, kind)

    def _at(self, value: _Value) -> _Token:
        return _Token("sign", self._text[value.place : value.place + 20].strip(), value.place)

    @contextmanager
    def _deeper(self) -> Iterator[None]:
        self._depth += 1
        if self._depth > _DEEPEST:
            self._fail(self._token, f"more than {_DEEPEST} conditions are inside each other: write it flatter")
        yield
        self._depth -= 1

    def _fail(self, token: _Token, why: str) -> NoReturn:
        there = repr(token.text) if token.text else "its end"
        text = self._text if len(self._text) <= _SHOWN else f"{self._text[:_SHOWN]}..."
        raise InputError(f"filter {text!r}, position {token.place + 1}, at {there}: {why}")


def _alike(left: _Value, right: _Value) -> tuple[pc.Expression, pc.Expression]:
    """Both sides of a comparison, a literal rounded as the values of the column on the other side were."""
    for column, other in ((left, right), (right, left)):
        if column.type == pa.float32() and isinstance(other.literal, int | float):
            rounded = pc.scalar(pa.scalar(other.literal, pa.float32()))
            return (left.expression, rounded) if column is left else (rounded, right.expression)
    return left.expression, right.expression


def _any(conditions: Sequence[pc.Expression]) -> pc.Expression:
    """True if one of them is true, as a tree of little depth."""
    if len(conditions) == 1:
        return conditions[0]
    half = len(conditions) // 2
    return _any(conditions[:half]) | _any(conditions[half:])


def _kind_of(kind: pa.DataType) -> Kind:
    if pa.types.is_map(kind):
        return "map"
    if pa.types.is_list(kind):
        return "list"
    if pa.types.is_boolean(kind):
        return "truth"
    return "text" if pa.types.is_string(kind) else "number"
