"""Reading the pickles in a saved state without running the code they name.

A pickle names functions and calls them while it is read. torch's `.metadata` is one, each object beside the tensors is
one, and so is the `common.pt` of older checkpoints. All of them are read here with the few classes that states hold;
whatever else they name is refused before it is looked up. megatron-core reads them without such a limit, so
`check_pickles` checks a folder first.
"""

import io
import pickle
import re
import struct
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import torch
from numpy._core import multiarray
from torch.distributed.checkpoint.filesystem import _StorageInfo  # pyright: ignore[reportPrivateUsage]
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from storage import layout
from storage.errors import ForeignCode, StorageError

METADATA_FILE = ".metadata"
COMMON_FILE = "common.pt"
_MODULE_STATE = "_extra_state"  # Transformer Engine unpickles what such an entry holds, if it holds anything

_METADATA = "torch.distributed.checkpoint.metadata"
_METADATA_CLASSES = {
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),  # states of earlier versions name their folder
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}

_OBJECT_CLASSES = [  # besides what torch itself allows: the state of numpy's generator, and streams
    (multiarray._reconstruct, "numpy._core.multiarray._reconstruct"),  # pyright: ignore[reportAttributeAccessIssue]
    (np.ndarray, "numpy.ndarray"),
    (np.dtype, "numpy.dtype"),
    (np.dtypes.UInt32DType, "numpy.dtypes.UInt32DType"),
    (io.BytesIO, "_io.BytesIO"),
]

_REFUSED = re.compile(r"GLOBAL (\S+)")  # by torch's restricted unpickler
_UNREADABLE = (
    OSError, EOFError, RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError, struct.error,
    pickle.UnpicklingError,
)  # fmt: skip
# what an unpickler raises for bytes that are not a whole pickle


def check_pickles(folder: Path) -> None:
    """Read every pickle in the folder of a state; files missing from it are skipped.

    Raises:
        ForeignCode: one names a class or function that states do not hold.
        StorageError: one cannot be read.
    """
    metadata = read_metadata(folder)
    for index, place in metadata.storage_data.items():
        is_tensor = isinstance(metadata.state_dict_metadata.get(index.fqn), TensorStorageMetadata)
        if not is_tensor and (folder / place.relative_path).exists():  # torch itself reads tensors restricted
            read_entry(folder, index, place)
    if (folder / COMMON_FILE).exists():
        _load(folder / COMMON_FILE, "it")


def read_metadata(folder: Path) -> Metadata:
    """The `.metadata` of a state: what it holds, and where in which file of the folder each item is.

    Raises:
        ForeignCode, StorageError: as `check_pickles`.
    """
    path = folder / METADATA_FILE
    try:
        metadata = _MetadataUnpickler(path).load()
        flaw = _flaw(metadata)
    except _UNREADABLE as error:
        raise StorageError(f"no readable train state at {folder}: {error}; load it again from the store") from error
    if flaw is not None:
        raise StorageError(f"no readable train state at {folder}: {METADATA_FILE} {flaw}; load it again from the store")
    return metadata


def read_entry(folder: Path, index: MetadataIndex, place: _StorageInfo) -> Any:
    """A tensor or object of a state.

    Raises:
        ForeignCode, StorageError: as `check_pickles`.
    """
    path = folder / place.relative_path
    value = _load(path, index.fqn, place.offset, place.length)
    if _MODULE_STATE in index.fqn and not is_empty(value):
        _refuse(path, index.fqn, "a pickled state of a Transformer Engine module")
    return value


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, path: Path) -> None:
        super().__init__(io.BytesIO(path.read_bytes()))
        self._path = path

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) not in _METADATA_CLASSES:
            _refuse(self._path, "it", f"{module_name}.{global_name}")
        return super().find_class(module_name, global_name)


def _load(path: Path, what: str, offset: int = 0, length: int = -1) -> Any:
    # the same container parser as without `weights_only`, so megatron-core reads the pickle that is checked here
    try:
        with path.open("rb") as file:
            file.seek(offset)
            content = io.BytesIO(file.read(length))
        with torch.serialization.safe_globals(_OBJECT_CLASSES):
            return torch.load(content, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        if isinstance(error, pickle.UnpicklingError) and (found := _REFUSED.search(str(error))):
            _refuse(path, what, found.group(1))
        raise StorageError(f"{what} cannot be read from {path}: {error}; load it again from the store") from error


def _refuse(path: Path, what: str, name: str) -> NoReturn:
    raise ForeignCode(
        f"{path} is not read: {what} names {name}, which no train state holds and which could run any code here. "
        "Use a state from a store that you trust"
    )


def _flaw(metadata: object) -> str | None:
    """What is wrong with metadata that could be unpickled; None if nothing is."""
    if type(metadata) is not Metadata:
        return f"holds a {type(metadata).__name__}"
    for name, entry in cast(dict[Any, Any], metadata.state_dict_metadata).items():
        if type(name) is not str or type(entry) not in (TensorStorageMetadata, BytesStorageMetadata):
            return f"describes {name!r} as a {type(entry).__name__}"
    for index, place in cast(dict[Any, Any], metadata.storage_data).items():
        if type(index) is not MetadataIndex or type(index.fqn) is not str or type(place) is not _StorageInfo:
            return f"places {index!r} in {place!r}"
        if type(place.relative_path) is not str or "/" in place.relative_path or layout.name_flaw(place.relative_path):
            return f"places {index.fqn!r} in {place.relative_path!r}, which is not a file of its folder"
        if any(type(number) is not int or number < 0 for number in (place.offset, place.length)):
            return f"places {index.fqn!r} at offset {place.offset!r} with length {place.length!r}"
        if place.transform_descriptors:
            return f"describes {index.fqn!r} as transformed by {place.transform_descriptors!r}"
    return None


def is_empty(value: object) -> bool:
    """Whether what a module adds to a state says nothing: None, or streams, tensors and lists without content."""
    if isinstance(value, list | tuple):
        return all(map(is_empty, value))
    if isinstance(value, torch.Tensor):
        return value.numel() == 0
    return value is None or (isinstance(value, io.BytesIO) and not value.getvalue())
