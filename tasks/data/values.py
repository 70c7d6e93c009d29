"""Values of records, whatever file they are from: those of JSON, and which of them are texts. Imports nothing heavy."""

import json
import math
import reprlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from storage.errors import InputError

_PLAIN = (str, int, float, bool, type(None), list, dict)
_short = reprlib.Repr(maxstring=80, maxother=80, maxlong=80, maxlist=8, maxdict=8)


def parsed(text: str) -> Any:
    """A JSON document without what JSON does not have, or what could be read in two ways. Raises ValueError: it is
    none, is nested too deeply, has NaN or Infinity, or one key twice in an object."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("nested too deeply") from None


@dataclass(frozen=True)
class Keyed[T]:
    """An argument of a function with a cache, which knows it by its identity alone."""

    identity: str
    value: T = field(compare=False)


def json_object(content: bytes, name: str) -> dict[str, Any]:
    """The content of a model's file. Raises InputError: it is not a JSON object; `name` is the file's."""
    try:
        found = json.loads(content)
    except ValueError as error:
        raise InputError(f"{name} is not JSON ({error}): restore it from where the model came") from None
    if not isinstance(found, dict):
        raise InputError(f"{name} holds a {type(found).__name__}, not an object: restore it")
    return found


class Flaw(NamedTuple):
    """Something that no record can hold."""

    place: str  # place in the value, such as `.answer[2]`
    fact: str


def flaw(value: object) -> Flaw | None:
    """The first thing in a value that JSON cannot hold, or UTF-8; None if there is none."""
    if (kind := type(value)) is dict:
        return _flaw_of_dict(value)  # pyright: ignore[reportArgumentType] - it is one
    if kind is list:
        each = ((place, flaw(one)) for place, one in enumerate(value))  # pyright: ignore[reportArgumentType]
        return next((Flaw(f"[{place}]{one.place}", one.fact) for place, one in each if one is not None), None)
    if kind is float and not math.isfinite(value):  # pyright: ignore[reportArgumentType]
        return Flaw("", f"is {value}, which is not a number")
    if kind is str and not is_encodable(value):  # pyright: ignore[reportArgumentType]
        return Flaw("", f"is {shown(value)}, which has half of a surrogate pair")
    return None if kind in _PLAIN else Flaw("", f"is a {kind.__name__} ({shown(value)})")


def text_of(value: object) -> str | None:
    """A text as it is, and an integer by its digits. None of all else, of which there is no one text: 0.50, true."""
    if isinstance(value, str):
        return value
    return str(value) if type(value) is int else None


def is_blank(text: str) -> bool:
    """True if nothing in a text is visible: it is empty, or white space and characters of no width."""
    return not any(one.isprintable() and not one.isspace() for one in text)


def shown(value: object) -> str:
    return _short.repr(value)


def without_nulls(value: Any) -> Any:
    """A value without those keys of its tables that are null: a column of Parquet has every key in every row."""
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def _flaw_of_dict(value: Mapping[object, object]) -> Flaw | None:
    for key, one in value.items():
        if not isinstance(key, str) or not is_encodable(key):
            return Flaw("", f"has the key {shown(key)}, which is not a text")
        if (found := flaw(one)) is not None:
            return Flaw(f".{key}{found.place}", found.fact)
    return None


def is_encodable(text: str) -> bool:
    """True if UTF-8 can hold a text: it has no half of a surrogate pair."""
    if text.isascii():
        return True
    try:
        return bool(text.encode())
    except UnicodeEncodeError:
        return False


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {name!r} occurs twice")
    return found


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON: write null")
