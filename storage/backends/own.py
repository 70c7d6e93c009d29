"""A store of the user's own: its class is found by name, made, and compared with `Backend`."""

import inspect
import pkgutil
import sys
from collections.abc import Callable, Collection
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from storage.backends.backend import Backend
from storage.errors import InputError, RatchetError, user_line
from storage.functions import mismatch

GIVE = "Give a folder, s3://bucket/prefix, or file.py:CLASS://PLACE with a backend of your own"
_GROUP = "ratchet.stores"


def own_backend(scheme: str, url: str, ours: Collection[str]) -> Backend:
    """The backend of the class that the scheme of a root's URL names; `ours` are the schemes of built-in backends.
    Raises InputError: there is no such class, it cannot be imported or made, or its methods have another form."""
    kind = _called(url, lambda: _found(scheme, url, ours))
    made = _called(url, lambda: kind(url))
    if not isinstance(made, Backend):
        raise InputError(f"storage root {url!r}: {type(made).__name__} is not a subclass of storage.backends.Backend")
    for name, method in vars(Backend).items():
        found = inspect.getattr_static(made, name)
        if name[0] == "_" or not inspect.isfunction(found) or found is method:
            continue
        wanted = inspect.signature(method).parameters
        if (head := mismatch(found, *wanted, may_yield=True)) is not None:
            place = f"{Path(found.__code__.co_filename).name}, line {found.__code__.co_firstlineno}"
            fact = f"storage root {url!r}: {type(made).__name__} has {head} ({place})"
            raise InputError(f"{fact}: expected `def {name}({', '.join(wanted)})`")
    return made


def _found(scheme: str, url: str, ours: Collection[str]) -> Any:
    place, _, name = scheme.rpartition(":")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise InputError(f"storage root {url!r}: there is no file {place}. {GIVE}")
        module = ModuleType(f"ratchet_store_{Path(place).stem}")
        module.__file__ = place
        sys.modules[module.__name__] = module  # dataclasses and pickle look for it
        if (folder := str(Path(place).parent)) not in sys.path:
            sys.path.append(folder)  # for the files beside it, which hide no other module
        exec(compile(Path(place).read_bytes(), place, "exec"), vars(module))
        if name not in vars(module):
            raise InputError(f"storage root {url!r}: {place} has no {name!r}. {GIVE}")
        return vars(module)[name]
    if place:
        return pkgutil.resolve_name(scheme)
    points = {point.name: point for point in entry_points(group=_GROUP)}
    if scheme not in points:
        known = ", ".join(sorted({*ours, *points}))
        raise InputError(f"storage root {url!r}: no backend is called {scheme!r}, only {known}. {GIVE}")
    return points[scheme].load()


def _called(url: str, call: Callable[[], Any]) -> Any:
    """The result of the user's code; what it raises, with its line."""
    try:
        return call()
    except RatchetError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"storage root {url!r}: {type(error).__name__}: {error}{user_line(error)}. {GIVE}") from error
