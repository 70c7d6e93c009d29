"""A configuration as TOML text, which reads back as what it was."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def written(document: Mapping[str, Any], path: Sequence[str] = ()) -> Iterator[str]:
    """The lines of a document of plain types: of each table first its own keys, then the tables in it.

    A key without a value is left out, as it is in a file.
    """
    given = {key: value for key, value in document.items() if value is not None}
    tables = {key: value for key, value in given.items() if isinstance(value, Mapping) and value}
    own = [f"{_key(key)} = {toml(value)}" for key, value in given.items() if key not in tables]
    if own:
        yield from [f"[{'.'.join(map(_key, path))}]", *own, ""] if path else [*own, ""]
    for key, value in tables.items():
        yield from written(value, (*path, key))


def toml(value: Any) -> str:
    """A value as TOML, on one line."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(key)} = {toml(one)}' for key, one in value.items() if one is not None)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, str):  # JSON escapes what TOML does, but for one character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value) if isinstance(value, float) else json.dumps(value)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else toml(key)
