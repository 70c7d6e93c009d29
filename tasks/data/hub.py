"""The Hugging Face hub: ids of models and data sets, the files that a run takes, and the hub's cache on this machine.
Processes of a run stay offline (`tasks/config/environment.py`). The network is used only for a download that the
configuration asks for. The hub's libraries are imported where they are used: they take half a second."""

import functools
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from storage.errors import InputError
from tasks.config.data import DataSource
from tasks.config.environment import without_secrets

if TYPE_CHECKING:
    from datasets import Dataset

TEXT_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "vocab.json", "vocab.txt", "merges.txt",
    "tokenizer.model", "spiece.model",
)  # fmt: skip
"""Files of a Hugging Face directory that a run takes: all but the weights."""
INDEX = "model.safetensors.index.json"  # table of the file of each tensor, if there are several files
_SCHEME = "hf://"
_ID = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w.-]+(/[\w.-]+)*))?(?P<folder>)")
_URL = re.compile(r"hf://(models/)?(?P<name>[\w-][\w.-]*/[\w.-]+)(@(?P<revision>[^/]+))?(/(?P<folder>.+?))?/?")
_DATASET = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


@dataclass(frozen=True)
class HubId:
    """A model of the hub: `org/name`, its branch, tag or commit, and a folder inside the repository."""

    name: str
    revision: str | None = None  # `main` if not given
    folder: str = ""

    def __str__(self) -> str:
        return f"{self.name}@{self.revision or 'main'}"


def is_weights(name: str) -> bool:
    """True if a file holds weights, or their index."""
    return name.endswith((".safetensors", ".safetensors.index.json"))


def is_hub_id(source: str) -> bool:
    """True if a source that is not an existing folder can be a model of the hub."""
    return (_URL if source.startswith(_SCHEME) else _ID).fullmatch(source) is not None


def hub_id(source: str) -> HubId:
    """The parts of `org/name[@revision]` or `hf://org/name[@revision][/folder]`. Raises InputError: it is neither."""
    if (found := (_URL if source.startswith(_SCHEME) else _ID).fullmatch(source)) is None:
        raise InputError(f"model.source {source} is not of the form hf://org/name[@revision][/folder]: correct it")
    revision = found["revision"]
    return HubId(found["name"], revision and revision.replace("%2F", "/"), found["folder"] or "")


def cached(model: HubId) -> Path | None:
    """The folder of the hub's cache that holds a model; None if it is not there. Nothing is fetched."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(model.name, revision=model.revision, local_files_only=True), model.folder)
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return folder if folder.is_dir() else None


@functools.cache  # checked, tokenized with and prepared from: once is enough
def fetch(model: HubId, token: str | None) -> Path:
    """Bring the files that a run takes of a model into the hub's cache. Raises InputError, with the hub's reason."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    before = f"{model.folder}/" if model.folder else ""
    patterns = [before + pattern for pattern in (*TEXT_FILES, "*.safetensors", INDEX)]
    try:
        with _access(download=True):
            wanted = {"allow_patterns": patterns, "ignore_patterns": "consolidated*"}
            found = snapshot_download(model.name, revision=model.revision, token=token, **wanted)
    except (HfHubHTTPError, OSError, ValueError) as error:
        fact = f"model.source {model} cannot be fetched from the hub: {_said(error)}. Check the name and the network"
        raise InputError(f'{fact}; for a model behind a gate set model.token = "env:NAME" and export NAME') from None
    return Path(found, model.folder)


def is_dataset(address: str) -> bool:
    """True if an address has the form of a data set's id: `org/name` or `org/name@revision`."""
    return _DATASET.fullmatch(address) is not None


def rows(source: DataSource, address: str, download: bool) -> "Dataset":
    """The rows of a split, in Arrow files of the cache that are mapped into memory. Raises InputError: no split is
    named, or the data set is not in the cache and cannot be downloaded."""
    import datasets  # a second, as it imports pandas

    if source.split is None:
        fact = f"dataset {source.source} does not exist as a file, and as a data set of the hub it needs a split"
        raise InputError(f'{fact}: give the path of a file, or a table with the split, such as split = "train"')
    name, _, revision = address.partition("@")
    try:
        with _access(download), _quiet():
            found = datasets.load_dataset(name, source.subset, split=source.split, revision=revision or None)
    except Exception as error:  # noqa: BLE001 - whatever the library, its builders and the network raise
        more = "" if download else "; it is only looked for in the cache: set data.download = true to download it"
        fact = f"dataset {source.source} does not exist as a file, and split {source.split} of the hub's data set"
        raise InputError(f"{fact} cannot be had ({_said(error)}){more}") from None
    return found  # pyright: ignore[reportReturnType] - a split was named


@contextmanager
def _access(download: bool) -> Iterator[None]:
    """Let the hub's library use the network, or keep it offline, while the block lasts."""
    from huggingface_hub import constants

    with ExitStack() as after:
        after.callback(setattr, constants, "HF_HUB_OFFLINE", constants.HF_HUB_OFFLINE)
        constants.HF_HUB_OFFLINE = not download
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep `datasets` silent and of one mind with the hub's library about the network, while the block lasts."""
    import datasets
    from datasets import config
    from huggingface_hub import constants

    with ExitStack() as after:
        after.callback(setattr, config, "HF_HUB_OFFLINE", config.HF_HUB_OFFLINE)
        after.callback(datasets.logging.set_verbosity, datasets.logging.get_verbosity())
        if datasets.is_progress_bar_enabled():
            after.callback(datasets.enable_progress_bars)
        datasets.disable_progress_bars()
        datasets.logging.set_verbosity_error()
        config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE
        yield


def _said(error: Exception) -> str:
    lines = without_secrets(str(error)).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
