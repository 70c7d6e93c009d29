"""Settings without effect are refused in every section by one rule: a table says what leaves a setting without."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel


@dataclass(frozen=True)
class Unused[C: BaseModel]:
    """A setting, and when it has no effect."""

    setting: str  # its key below the section; between tables there are dots
    without: Callable[[C], str | None]
    """The reason in the configuration why it has no effect, in words; None if it has one."""


def without_effect[C: BaseModel](config: C, table: Iterable[Unused[C]], prefix: str = "") -> list[str]:
    """One message for each setting of a section that the table names and that differs from its default without effect.
    Keys follow `prefix` in messages."""
    found = dict[str, str]()
    for row in table:
        owner, name = _owner(config, row.setting.split("."))
        if owner is None or row.setting in found:
            continue
        default = type(owner).model_fields[name].default
        if vars(owner)[name] != default and (why := row.without(config)) is not None:
            found[row.setting] = no_effect(prefix + row.setting, f"with {why}", default)
    return list(found.values())


def no_effect(key: str, why: str, default: Any = None, given: Any = None) -> str:
    """The message about a setting without effect, with the reason `why`, as in "with loss.type = ..."; `given` is its
    value."""
    shown = key if given is None else f"{key} = {json.dumps(given)}"
    return f"{shown} has no effect {why}: leave it out{_or_default(key, default)}"


def _owner(config: BaseModel, path: Sequence[str]) -> tuple[BaseModel | None, str]:
    """The table that holds the last key of the path; None if this configuration's has no such key."""
    owner: Any = config
    for name in path[:-1]:
        owner = vars(owner).get(name)
        if owner is None:
            return None, path[-1]
    return (owner if path[-1] in type(owner).model_fields else None), path[-1]


def _or_default(name: str, default: Any) -> str:
    """Second repair, for a setting that a stored configuration has: its default."""
    if default is None:
        return ""
    if isinstance(default, BaseModel):
        kind = default.model_dump()
        if "type" not in kind:
            return ""
        name, default = f"{name}.type", kind["type"]
    if isinstance(default, tuple | dict | str) and not default:
        return ""
    return f", or give it its default, {name} = {json.dumps(default)}"
