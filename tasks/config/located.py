"""Local files that a configuration names: searched beside it, else in the working directory."""

import glob
from pathlib import Path

from tasks.config.credentials import referenced


def folder_of(configuration: str) -> Path | None:
    """The local folder of a configuration file; None if it is at a URL."""
    return None if "://" in configuration else Path(configuration).absolute().parent


def located(name: str, folder: Path | None) -> str:
    """`name` as an absolute path if it names local files, by path or by pattern; else as it is.

    So a run is the same from whatever folder it is started. Files beside the configuration come before those in the
    working directory; what exists in neither may be a URL, a reference (`env:NAME`) or an id of the hub.
    """
    if "://" in name or referenced(name) is not None:
        return name
    places = (
        [Path(name).expanduser()] if folder is None else [folder / Path(name).expanduser(), Path(name).expanduser()]
    )
    found = next((place for place in places if _is_there(place)), None)
    return name if found is None else str(found.absolute())


def _is_there(place: Path) -> bool:
    try:
        return place.exists() or bool(glob.glob(str(place), recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
    except OSError:  # a name that is too long, or a folder that must not be read
        return False
