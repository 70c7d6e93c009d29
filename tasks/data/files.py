"""Records of prompt sources: files in some forms on any fsspec filesystem, and data sets of the hub.

Records are read one after another, so a large source never is in memory as a whole, unless it is one JSON array.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec

from storage.digest import file_digest, value_digest
from storage.errors import InputError
from storage.ownership.scratch import scratch
from tasks.config.credentials import referenced
from tasks.config.data import DataSource
from tasks.config.environment import resolve, without_secrets
from tasks.data import forms, hub
from tasks.data.forms import LeftOut, Read
from tasks.data.values import is_encodable, without_nulls

if TYPE_CHECKING:
    from datasets import Dataset

_FORMS = "JSONL, JSON, CSV or Parquet"


@dataclass(frozen=True)
class Opened:
    """A source that can be read."""

    digest: str
    """Identity of its content."""
    records: Callable[[], Iterator[Read]]
    """Its records, from the first; raises InputError where one cannot be read."""


@contextmanager
def opened(source: DataSource, download: bool = False) -> Iterator[Opened]:
    """A source, with its files on this machine while the block lasts.

    Args:
        source: its `source` may be a reference (`env:NAME`).
        download: whether a data set of the hub may be downloaded.

    Raises:
        InputError: it does not exist or cannot be read.
    """
    address = str(resolve(source.source, "the URL of a dataset"))
    form = source.format or forms.form_of(path_of(address))
    if hub.is_dataset(address) and form is None and not Path(address).exists():
        rows = hub.rows(source, address, download)
        whole = hub.digest(one.values for one in _of_hub(source, rows))
        yield Opened(whole, lambda: _columns(source, _of_hub(source, rows)))
        return
    with scratch() as folder:
        files = fetched(source.source, address, folder)
        digests = [file_digest(file)[0] for file in files]
        whole = digests[0] if len(digests) == 1 else value_digest(digests)
        yield Opened(whole, lambda: _records(source, form, files))


def state(source: DataSource) -> str:
    """Identity of a source without reading it: it changes with its files, as far as their filesystem tells."""
    with suppress(InputError), reading(source.source):
        address = str(resolve(source.source, "the URL of a dataset"))
        fs, path = _filesystem(address)
        return value_digest([address, *(fs.ukey(one) for one in _matching(fs, path))])
    return value_digest([source.source])


def name_of(source: DataSource) -> str:
    """Prefix of the ids of a source's prompts; by default the end of its address without suffix."""
    if source.name is not None:
        return source.name
    address = referenced(source.source) or hub.without_revision(source.source)
    parts = [part for part in path_of(address).split("/") if part and "*" not in part and "[" not in part]
    return parts[-1].partition(".")[0] or parts[-1] if parts else address


@contextmanager
def reading(shown: str, form: str = "") -> Iterator[None]:
    """Make an InputError of whatever goes wrong in a block that reads a source."""
    try:
        yield
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(_missing(shown)) from None
    except Exception as error:  # noqa: BLE001 - whatever filesystems, codecs and Arrow raise about what is foreign to us
        reason = without_secrets(str(error)) or type(error).__name__
        raise InputError(f"dataset {shown} cannot be read{form}: {reason}. Correct it, or its format") from None


def fetched(shown: str, address: str, folder: Path) -> list[Path]:
    """The local files of an address; those of another machine are copied into `folder`."""
    with reading(shown):
        fs, path = _filesystem(address)
        names = _matching(fs, path)
        if not names:
            raise InputError(_missing(shown))
        odd = next((name for name in names if not is_encodable(name)), None)
        if odd is not None:
            raise InputError(f"the name of the file {odd!r} is not UTF-8, so no record can hold it: rename the file")
        if any(fs.isdir(name) for name in names):
            raise InputError(
                f"dataset {shown} is a folder: name its files by a pattern, such as {shown.rstrip('/')}/*.jsonl"
            )
        if "file" in fs.protocol:
            return [Path(name) for name in names]
        return [_copied(fs, name, folder / f"{number:05d}-{_plain(name)}") for number, name in enumerate(names)]


def _missing(shown: str) -> str:
    both = " (no such file, and no data set of the hub: that needs org/name and a split)" if "/" in shown else ""
    return f"dataset {shown} does not exist{both}: give the path or URL of a {_FORMS} file, or a pattern that fits some"


def _filesystem(address: str) -> tuple[Any, str]:
    """The filesystem of an address, and its path there. A `::` in the name of a local file is no chain of URLs."""
    if "://" in address:
        return fsspec.core.url_to_fs(address)
    return fsspec.filesystem("file"), str(Path(address).expanduser().absolute())


def _matching(fs: Any, path: str) -> list[str]:
    """The files of a path or pattern, in the order of their names. In http addresses `?` and `[` have other uses."""
    if "http" in fs.protocol or not any(sign in path for sign in "*?[") or fs.exists(path):
        return [path] if fs.exists(path) else []
    return sorted(str(name) for name in fs.glob(path))


def _copied(fs: Any, name: str, place: Path) -> Path:
    fs.get_file(name, str(place))
    return place


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", path_of(name).rpartition("/")[2])[-80:]


def path_of(address: str) -> str:
    """An address without query and fragment if it is a URL; in other names `?` and `#` are letters."""
    return re.sub(r"[?#].*", "", address) if address.startswith(("http://", "https://")) else address


def _records(source: DataSource, form: str | None, files: list[Path]) -> Iterator[Read]:
    left_out = LeftOut(source.leave_out or ())
    for file in files:
        shown = source.source + (f", {file.name!r}," if len(files) > 1 else "")
        kind = source.format or forms.form_of(file.name) or form or "jsonl"
        with reading(shown, f" as {kind}"):
            found = forms.read(file, kind, f"dataset {shown.rstrip(',')}", left_out)
            yield from _columns(source, found) if kind == "parquet" else found
    left_out.check(f"dataset {source.source}")


def _of_hub(source: DataSource, rows: "Dataset") -> Iterator[Read]:
    where, left_out = f"dataset {source.source}", LeftOut(source.leave_out or ())
    with reading(source.source):
        yield from _columns(source, forms.of_tables(hub.tables(rows), where, left_out))
    left_out.check(where)


def _columns(source: DataSource, found: Iterable[Read]) -> Iterator[Read]:
    """Records of columns, without the nulls that only fill them in messages."""
    messages = (source.prompt_field, source.answer_field, source.tools_field)
    for place, values in found:
        yield Read(place, {name: without_nulls(one) if name in messages else one for name, one in values.items()})
