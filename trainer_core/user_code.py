"""Functions of the user's: named in a configuration, found without being imported, loaded, and digested.

A name is `file.py:function`, `package.module:function`, or an entry point. Light to import: scoring processes do so
before they fork."""

import ast
import functools
import importlib
import inspect
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import xxhash

from storage.errors import InputError

_PROJECT = Path(__file__).resolve().parents[1]
_FILE_MODULE = "ratchet_user_file"
_OURS = {"flows", "tasks", "trainer_core", "storage", "ratchet"}
_INSTALLED = {"site-packages", "dist-packages"}
_LIBRARY = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib")}


@dataclass(frozen=True)
class UserFunction:
    """The place of a function (or class) that a configuration names."""

    name: str  # as records name it: `my_reward.py:score`, `package.module:function`, or the name of an entry point
    place: str  # module, or path of a file
    attribute: str  # name of the function there
    text: str | None = None
    """Content of the file: all processes of a stage run the same, whatever happens to the file meanwhile."""

    def load(self) -> "Loaded":
        """Import it into this process. Raises whatever the user's module raises, and AttributeError."""
        before = set(sys.modules)
        module = importlib.import_module(self.place) if self.text is None else _executed(self.place, self.text)
        if self.attribute not in vars(module):
            raise AttributeError(f"{Path(self.place).name} has no {self.attribute!r}")
        function = vars(module)[self.attribute]
        code = inspect.unwrap(function) if callable(function) else function
        file = code.__code__.co_filename if isinstance(code, types.FunctionType) else inspect.getfile(module)
        return Loaded(function, _digest(self, Path(file), before))


@dataclass(frozen=True)
class Loaded:
    function: Any  # the attribute, which may be something else than a function
    digest: str
    """Of its file and of the user's own files that its import has read: not of installed packages, not of ours."""


def find_function(name: str, key: str, group: str) -> UserFunction:
    """The place of the function called `name`, by the setting `key` or in a `group` of entry points. Nothing is
    imported, and a module is not looked for. Raises InputError: there is no such entry point or file, or no function is
    named."""
    if (parts := in_a_file(name)) is not None:
        return UserFunction(without_folder(name), parts[0], _attribute(name, parts[1], key), _text(name, parts[0], key))
    if name.endswith(".py"):
        raise InputError(f"{key} {name!r} names no function in the file: give {Path(name).name}:FUNCTION")
    module, _, attribute = (name if ":" in name else _entry_point(name, key, group)).partition(":")
    if module == "__main__":
        fact = f"{key} {name!r} is of a script or a notebook, and other processes call it"
        raise InputError(f"{fact}: write it to a file, and give file.py:FUNCTION")
    return UserFunction(name, module, _attribute(name, attribute, key))


def in_a_file(name: str) -> tuple[str, str] | None:
    """File and function, if `name` is of the form `file.py:function`."""
    file, colon, function = name.rpartition(":")
    return (file, function) if colon and file.endswith(".py") else None


def without_folder(name: str) -> str:
    """`name` as it counts for a run's identity: wherever its file is, it is the same function."""
    parts = in_a_file(name)
    return name if parts is None else f"{Path(parts[0]).name}:{parts[1]}"


def located_function(name: str, folder: Path | None, key: str) -> str:
    """`name` with an absolute path if it names a file: in the `folder` of the configuration, else in the working
    directory. `key` is that of the setting. Raises InputError: there is no such file, or the two folders have different
    ones."""
    parts = in_a_file(name)
    if parts is None:
        return name
    file, function = Path(parts[0]).expanduser(), parts[1]
    if "://" in parts[0]:
        raise InputError(f"{key} {name!r} is at a URL: copy the file and give its local path")
    if file.is_absolute():
        return f"{file}:{function}"
    places = list(dict.fromkeys(place.absolute() for place in ([] if folder is None else [folder]) + [Path()]))
    found = list(dict.fromkeys(place / file for place in places if (place / file).is_file()))
    if not found:
        looked = " or ".join(str(place) for place in places)
        raise InputError(f"{key} {name!r}: there is no file {file} in {looked}. Give the path of the file")
    if any(other.read_bytes() != found[0].read_bytes() for other in found[1:]):
        fact = f"{key} {name!r}: {found[0]} and {found[1]} are different files"
        raise InputError(f"{fact}. Remove or rename one of them, or give the path of the one that is meant")
    return f"{found[0]}:{function}"


def source_digest(function: UserFunction) -> str:
    """Digest of its file and of the files beside it that it imports, directly or through others; imports nothing. Of a
    module these are the files of its package. Raises InputError: there is no such module, or a file cannot be read."""
    package = function.place.partition(".")[0] if function.text is None else None
    first = Path(function.place) if package is None else _module_file(function)
    folder = first.parents[function.place.count(".") + (first.name == "__init__.py")] if package else first.parent
    texts: dict[Path, bytes] = {}
    pending = [first]
    while pending:
        file = pending.pop()
        if file not in texts:
            given = function.text if file == first else None
            texts[file] = file.read_bytes() if given is None else given.encode()
            pending += _imports(texts[file], file, folder, package)
    digests = [xxhash.xxh3_128_hexdigest(text) for _, text in sorted(texts.items())]
    return digests[0] if len(digests) == 1 else xxhash.xxh3_128_hexdigest("".join(digests).encode())


def _module_file(function: UserFunction) -> Path:
    path = None
    for depth in range(function.place.count(".") + 1):
        name = ".".join(function.place.split(".")[: depth + 1])
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.origin is None:
            raise InputError(f"{function.name!r}: there is no module {name}. Install it, or give file.py:FUNCTION")
        path, origin = spec.submodule_search_locations, Path(spec.origin)
    return origin


def _imports(text: bytes, file: Path, folder: Path, package: str | None) -> Iterator[Path]:
    """Files below `folder` that a file imports; only those of the package if one is given."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError):
        return  # its import reports it
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _beside(folder, alias.name, package)
        elif isinstance(node, ast.ImportFrom):
            above = file.parents[node.level - 1] if node.level else folder
            for alias in node.names:
                name = f"{node.module}.{alias.name}" if node.module else alias.name
                yield from _beside(above, name, None if node.level else package)


def _beside(folder: Path, name: str, package: str | None) -> Iterator[Path]:
    parts = name.split(".")
    if parts[0] in _OURS or package not in (None, parts[0]):
        return
    for depth in range(len(parts)):
        place = folder.joinpath(*parts[: depth + 1])
        yield from (file for file in (place.with_name(f"{place.name}.py"), place / "__init__.py") if file.is_file())


def _attribute(name: str, attribute: str, key: str) -> str:
    if not attribute.isidentifier():
        raise InputError(f"{key} {name!r}: {attribute!r} is not the name of a function. Give file.py:FUNCTION")
    return attribute


def _text(name: str, file: str, key: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{key} {name!r}: {file} cannot be read ({error}). Give the path of a Python file") from None


def _entry_point(name: str, key: str, group: str) -> str:
    known = _entry_points(group)
    if name not in known:
        fact = f"{key} {name!r} is unknown: installed are {', '.join(sorted(known)) or 'none'}"
        raise InputError(f"{fact}; or give file.py:function or package.module:function")
    return known[name]


@functools.cache  # listing those of all installed packages takes 0.3 s
def _entry_points(group: str) -> Mapping[str, str]:
    """Those that are installed, and our own even where the project is on PYTHONPATH but not installed."""
    import tomllib
    from importlib.metadata import entry_points  # 40 ms, which scoring processes and hosts of environments do without

    project = _PROJECT / "pyproject.toml"
    own = tomllib.loads(project.read_text())["project"]["entry-points"].get(group, {}) if project.exists() else {}
    return own | {point.name: point.value for point in entry_points(group=group)}


def _executed(place: str, text: str) -> types.ModuleType:
    """The module of a file, from its text: a cache of compiled code would miss an edit within one second."""
    stem = Path(place).stem
    module = types.ModuleType(_FILE_MODULE if stem in sys.modules else stem)
    module.__file__ = place
    sys.modules[module.__name__] = module  # dataclasses and pickle look for it
    sys.path.insert(0, str(Path(place).parent))
    exec(compile(text, place, "exec"), vars(module))
    return module


def _digest(target: UserFunction, file: Path, before: Set[str]) -> str:
    own, text = (file, file.read_bytes()) if target.text is None else (Path(target.place), target.text.encode())
    read = [text, *(one.read_bytes() for one in _imported(before, own))]
    # storage.digest would import pyarrow, whose threads forbid a fork
    digests = [xxhash.xxh3_128_hexdigest(one) for one in read]
    return digests[0] if len(digests) == 1 else xxhash.xxh3_128_hexdigest("".join(digests).encode())


def _imported(before: Set[str], own: Path) -> list[Path]:
    """The other files of the user's own that the import of a function has read."""
    new = {name: one for name, one in sys.modules.items() if name not in before and isinstance(one, types.ModuleType)}
    theirs = [vars(one).get("__file__") for name, one in new.items() if name.partition(".")[0] not in _OURS]
    files = {Path(place) for place in theirs if isinstance(place, str)}
    return sorted(one for one in files - {own} if one.is_file() and not _is_installed(one))


def _is_installed(file: Path) -> bool:
    return bool(_INSTALLED & set(file.parts)) or any(file.is_relative_to(place) for place in _LIBRARY)
