"""How a configuration names a function: `file.py:function`, `package.module:function`, or as an entry point."""

from pathlib import Path

from storage.errors import InputError


def in_a_file(name: str) -> tuple[str, str] | None:
    """File and function, if `name` is of the form `file.py:function`."""
    file, colon, function = name.rpartition(":")
    return (file, function) if colon and file.endswith(".py") else None


def without_folder(name: str) -> str:
    """`name` as it counts for a run's identity: wherever its file is, it is the same function."""
    parts = in_a_file(name)
    return name if parts is None else f"{Path(parts[0]).name}:{parts[1]}"


def located_function(name: str, folder: Path | None, key: str) -> str:
    """`name` with an absolute path if it names a file: beside the configuration, else in the working directory.

    Args:
        folder: of the configuration; None if that is no local file.
        key: of the setting, for messages.

    Raises:
        InputError: there is no such file, or the two folders have different ones.
    """
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
        raise InputError(
            f"{key} {name!r}: {found[0]} and {found[1]} are different files. Remove or rename one of them, or give "
            "the path of the one that is meant"
        )
    return f"{found[0]}:{function}"
