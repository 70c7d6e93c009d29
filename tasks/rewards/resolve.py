"""From the name of a reward to its function."""

import functools
import importlib
import tomllib
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, cast

from storage.errors import InputError
from tasks.config.code_version import PROJECT_ROOT
from tasks.config.environment import resolve

GROUP = "ratchet.rewards"

Reward = Callable[[Mapping[str, Any], str], float]


def resolve_reward(name: str, arguments: Mapping[str, Any]) -> Reward:
    """The function called `name` (an entry point's name or `package.module:function`), with `arguments` bound.

    An argument `env:NAME` is replaced by that variable of this process's environment.

    Raises:
        InputError: there is no such entry point, the module or function cannot be imported, or a variable is not set.
    """
    target = name if ":" in name else _entry_point(name)
    module, _, attribute = target.partition(":")
    try:
        function: Any = vars(importlib.import_module(module))[attribute]
    except ImportError as error:
        raise InputError(
            f"reward.function {name!r} cannot be imported: {error}. Give an installed entry point of {GROUP} or "
            "package.module:function, with the package on PYTHONPATH"
        ) from error
    except KeyError:
        raise InputError(f"reward.function {name!r}: module {module} has no {attribute!r}") from None
    if not callable(function):
        raise InputError(f"reward.function {name!r} is a {type(function).__name__}, not a function")
    values = {key: resolve(value, f"reward.arguments.{key}") for key, value in arguments.items()}
    return cast(Reward, functools.partial(function, **values))


def _entry_point(name: str) -> str:
    known = _own_entry_points() | {point.name: point.value for point in entry_points(group=GROUP)}
    if name not in known:
        raise InputError(
            f"reward.function {name!r} is unknown: installed are {', '.join(sorted(known))}; "
            "or give package.module:function"
        )
    return known[name]


def _own_entry_points() -> dict[str, str]:
    """Our own, even where the project is on PYTHONPATH but not installed."""
    project = PROJECT_ROOT / "pyproject.toml"
    if not project.exists():
        return {}
    return tomllib.loads(project.read_text())["project"]["entry-points"][GROUP]
