"""Data sets of the Hugging Face hub, by `datasets`: from its cache, and downloaded only if that is asked for."""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa
import xxhash

from storage.errors import InputError
from tasks.config.data import DataSource
from tasks.config.environment import without_secrets
from tasks.data.forms import ARROW_ROWS, Record

if TYPE_CHECKING:
    from datasets import Dataset

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def is_id(address: str) -> bool:
    """Whether an address has the form of an id: `org/name` or `org/name@revision`."""
    return _ID.fullmatch(address) is not None


def without_revision(address: str) -> str:
    """`org/name` of an id; any other address as it is."""
    return address.partition("@")[0] if is_id(address) else address


def rows(source: DataSource, address: str, download: bool) -> "Dataset":
    """The rows of a split, in Arrow files of the cache that are mapped into memory.

    Raises:
        InputError: no split is named, or the data set is not in the cache and cannot be downloaded.
    """
    import datasets  # a second, as it imports pandas

    if source.split is None:
        raise InputError(
            f"dataset {source.source} does not exist as a file, and as a data set of the hub it needs a split: give "
            'the path of a file, or a table with the split, such as split = "train"'
        )
    name, _, revision = address.partition("@")
    try:
        with _access(download), _quiet():
            found = datasets.load_dataset(name, source.subset, split=source.split, revision=revision or None)
    except Exception as error:  # noqa: BLE001 - whatever the library, its builders and the network raise
        more = "" if download else "; it is only looked for in the cache: set data.download = true to download it"
        raise InputError(
            f"dataset {source.source} does not exist as a file, and split {source.split} of the hub's data set cannot "
            f"be had ({_first_line(error)}){more}"
        ) from None
    return found  # pyright: ignore[reportReturnType] - a split was named


def tables(found: "Dataset") -> Iterator[pa.Table]:
    """The rows as they are stored, some at a time: pictures and sounds are not decoded."""
    yield from found.with_format("arrow").iter(ARROW_ROWS)  # pyright: ignore[reportReturnType] - tables, by the format


def digest(records: Iterable[Record]) -> str:
    """Identity of the rows' content, whatever files they come from."""
    state = xxhash.xxh3_128()
    for row in records:
        state.update(json.dumps(row, sort_keys=True).encode())
    return state.hexdigest()


@contextmanager
def _access(download: bool) -> Iterator[None]:
    """Let the libraries of the hub use the network, or keep them from it, while the block lasts."""
    from datasets import config
    from huggingface_hub import constants

    before = config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = not download
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


@contextmanager
def _quiet() -> Iterator[None]:
    import datasets

    shown = datasets.is_progress_bar_enabled()
    level = datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if shown:
            datasets.enable_progress_bars()


def _first_line(error: Exception) -> str:
    lines = without_secrets(str(error)).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
