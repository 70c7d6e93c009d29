"""From the name of a reward to where its function is. Nothing of the user's is imported here."""

import functools
import importlib
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from storage.errors import InputError
from tasks.config.code_version import PROJECT_ROOT
from tasks.config.credentials import referenced
from tasks.config.environment import resolve
from tasks.config.functions import in_a_file, without_folder

GROUP = "ratchet.rewards"

VERSIONS: Mapping[str, int] = {
    "tasks.rewards.match:exact_match": 2,
    "tasks.rewards.match:characters": 2,
    "tasks.rewards.match:regex": 2,
    "tasks.rewards.math:math_verify": 2,
}
"""Our own functions. A change that makes one score differently raises its version."""

_GRADED = {"tasks.rewards.match:characters"}
_CANNOT_HANG = {"tasks.rewards.match:exact_match", "tasks.rewards.match:characters"}


@dataclass(frozen=True)
class Target:
    """Where a function is."""

    name: str
    """As records name it: `my_reward.py:score`, `package.module:function`, or the name of an entry point."""
    place: str
    """Module, or path of a file."""
    attribute: str
    """Name of the function there."""
    text: str | None = None
    """Content of the file: all processes of a stage run the same, whatever happens to the file meanwhile."""

    @property
    def version(self) -> int | None:
        """Of one of our own functions; None for others."""
        return VERSIONS.get(f"{self.place}:{self.attribute}")

    @property
    def graded(self) -> bool:
        """Whether it is known to give more than 0 and 1."""
        return f"{self.place}:{self.attribute}" in _GRADED

    @property
    def needs_process(self) -> bool:
        """Whether it must not run in the calling process: it may hang, crash or change that process."""
        return f"{self.place}:{self.attribute}" not in _CANNOT_HANG


def find_reward(name: str, key: str = "reward.function") -> Target:
    """Where the function called `name` is.

    Raises:
        InputError: there is no such entry point or file, or no function is named. A module is not looked for.
    """
    if (parts := in_a_file(name)) is not None:
        return Target(without_folder(name), parts[0], _attribute(name, parts[1], key), _text(name, parts[0], key))
    if name.endswith(".py"):
        raise InputError(f"{key} {name!r} names no function in the file: give {Path(name).name}:FUNCTION")
    module, _, attribute = (name if ":" in name else _entry_point(name, key)).partition(":")
    return Target(name, module, _attribute(name, attribute, key))


def own_function(target: Target) -> Callable[..., Any]:
    """One of our own functions, imported."""
    return vars(importlib.import_module(target.place))[target.attribute]


def values_of(arguments: Mapping[str, Any], key: str = "reward.arguments") -> dict[str, Any]:
    """The arguments with each `env:NAME` replaced by that variable of this process's environment.

    Raises:
        InputError: a variable is not set.
    """
    return {name: resolve(value, f"{key}.{name}") for name, value in arguments.items()}


def variables_of(arguments: JsonValue) -> Iterator[str]:
    """The variables of the environment that arguments refer to."""
    if isinstance(arguments, dict):
        for value in arguments.values():
            yield from variables_of(value)
    elif isinstance(arguments, list):
        for value in arguments:
            yield from variables_of(value)
    elif (variable := referenced(arguments)) is not None:
        yield variable


def _attribute(name: str, attribute: str, key: str) -> str:
    if not attribute.isidentifier():
        raise InputError(f"{key} {name!r}: {attribute!r} is not the name of a function. Give file.py:FUNCTION")
    return attribute


def _text(name: str, file: str, key: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{key} {name!r}: {file} cannot be read ({error}). Give the path of a Python file") from None


def _entry_point(name: str, key: str) -> str:
    known = _own_entry_points() | {point.name: point.value for point in entry_points(group=GROUP)}
    if name not in known:
        raise InputError(
            f"{key} {name!r} is unknown: installed are {', '.join(sorted(known))}; "
            "or give file.py:function or package.module:function"
        )
    return known[name]


@functools.cache
def _own_entry_points() -> dict[str, str]:
    """Our own, even where the project is on PYTHONPATH but not installed."""
    project = PROJECT_ROOT / "pyproject.toml"
    if not project.exists():
        return {}
    return tomllib.loads(project.read_text())["project"]["entry-points"][GROUP]
