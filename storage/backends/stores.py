"""From the URL of a root to its backend.

The part before `://` names the backend: ours by their schemes, an entry point of the group `ratchet.stores`, or a class
as `file.py:CLASS` or `package.module:CLASS`. A class is called with the whole URL.
"""

import os
import pkgutil
import traceback
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

from storage.backends.backend import Backend
from storage.backends.local import LocalFiles
from storage.backends.objects import ObjectStore
from storage.errors import InputError, RatchetError

GROUP = "ratchet.stores"
OURS: dict[str, Callable[..., Backend]] = {
    "file": LocalFiles, "local": LocalFiles, "s3": ObjectStore, "s3a": ObjectStore,
}  # fmt: skip
"""Our backends, by scheme."""
_GIVE = "Give a folder, s3://bucket/prefix, or file.py:CLASS://PLACE with a backend of your own"


def open_store(url: str, options: dict[str, Any] | None = None) -> tuple[str, Backend]:
    """The absolute URL of a root, and its backend, with `options` of its client. Raises InputError if there is none."""
    url = absolute_url(url)
    scheme, _, place = url.partition("://")
    if not place.strip("/") and scheme != "file":
        raise InputError(f"storage root {url!r} names no place in the store. {_GIVE}")
    if scheme in OURS:
        return url, OURS[scheme](url, options)
    kind = _called(url, lambda: _found(scheme, url))
    made = _called(url, lambda: kind(url))
    if not isinstance(made, Backend):
        raise InputError(f"storage root {url!r}: {type(made).__name__} is no subclass of storage.backends.Backend")
    return url, made


def absolute_url(url: str) -> str:
    """The URL that the root at `url` has from whatever folder; a relative path is one of the working directory."""
    scheme, there, place = url.partition("://")
    if not there or scheme in ("file", "local"):
        return f"file://{os.path.abspath(place if there else url)}"
    file, colon, name = scheme.rpartition(":")
    return f"{os.path.abspath(file)}:{name}://{place}" if colon and file.endswith(".py") else url.rstrip("/")


def _found(scheme: str, url: str) -> Any:
    place, _, name = scheme.rpartition(":")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise InputError(f"storage root {url!r}: there is no file {place}. {_GIVE}")
        spec = spec_from_loader(f"ratchet_store_{Path(place).stem}", SourceFileLoader(Path(place).stem, place))
        assert spec is not None
        module = module_from_spec(spec)
        exec(compile(Path(place).read_bytes(), place, "exec"), vars(module))
        if name not in vars(module):
            raise InputError(f"storage root {url!r}: {place} has no {name!r}. {_GIVE}")
        return vars(module)[name]
    if place:
        return pkgutil.resolve_name(scheme)
    points = {point.name: point for point in entry_points(group=GROUP)}
    if scheme not in points:
        known = ", ".join(sorted({*OURS, *points}))
        raise InputError(f"storage root {url!r}: no backend is called {scheme!r}, only {known}. {_GIVE}")
    return points[scheme].load()


def _called(url: str, call: Callable[[], Any]) -> Any:
    """The result of the user's code; what it raises, with its line."""
    try:
        return call()
    except RatchetError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename}, line {frame.lineno}"
        raise InputError(f"storage root {url!r}: {type(error).__name__} in {where}: {error}. {_GIVE}") from error
