"""Models by hub id: what `org/name[@revision]` and `hf://` mean, and where the hub's cache holds them.

The hub is contacted only by `fetch`, in a process of its own: this one stays offline.
"""

import functools
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from storage.errors import InputError
from tasks.config.environment import downloading_environment, without_secrets

_SCHEME = "hf://"
_ID = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w.-]+(/[\w.-]+)*))?")
_URL = re.compile(r"hf://(models/)?(?P<name>[\w-][\w.-]*/[\w.-]+)(@(?P<revision>[^/]+))?(/(?P<folder>.+?))?/?")


@dataclass(frozen=True)
class HubId:
    """A model of the hub."""

    name: str
    """`org/name`."""
    revision: str | None = None
    """Branch, tag or commit; `main` if not given."""
    folder: str = ""
    """Folder inside the repository."""

    def __str__(self) -> str:
        return f"{self.name}@{self.revision or constants.DEFAULT_REVISION}"


def is_hub_id(source: str) -> bool:
    """Whether a source that is no existing folder can be a model of the hub."""
    return (_URL if source.startswith(_SCHEME) else _ID).fullmatch(source) is not None


def hub_id(source: str) -> HubId:
    """The parts of `org/name[@revision]` or `hf://org/name[@revision][/folder]`.

    Raises:
        InputError: it is neither.
    """
    found = (_URL if source.startswith(_SCHEME) else _ID).fullmatch(source)
    if found is None:
        raise InputError(f"model.source {source} is not of the form hf://org/name[@revision][/folder]: correct it")
    revision = found["revision"]
    folder = found["folder"] or "" if source.startswith(_SCHEME) else ""
    return HubId(found["name"], None if revision is None else revision.replace("%2F", "/"), folder)


def cached(model: HubId) -> Path | None:
    """The folder of the hub's cache that holds a model; None if it is not there. Nothing is fetched."""
    try:
        found = snapshot_download(model.name, revision=model.revision, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    folder = Path(found, model.folder)
    return folder if folder.is_dir() else None


def cache_folder() -> str:
    """Where the hub's cache is."""
    return constants.HF_HUB_CACHE


@functools.cache  # checked, tokenized with and prepared from: once is enough
def fetch(model: HubId, token: str | None) -> Path:
    """Bring a model into the hub's cache.

    Raises:
        InputError: it cannot be had, with the hub's reason.
    """
    command = [sys.executable, "-m", "tasks.data.download", model.name, model.revision or "", model.folder]
    done = subprocess.run(command, env=downloading_environment(token), stdout=subprocess.PIPE, check=False)
    answer = json.loads(done.stdout) if done.stdout else {"error": f"the download ended with code {done.returncode}"}
    if "error" in answer:
        raise InputError(
            f"model.source {model} cannot be fetched from the hub: {without_secrets(answer['error'])}. Check the name "
            'and the network; for a model behind a gate set model.token = "env:NAME" and export NAME'
        )
    return Path(answer["folder"])
