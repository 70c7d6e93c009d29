"""The same state gives the same bytes, whichever process saves it and wherever.

pickle writes an object that it has seen before as a reference. Which of two equal strings are one object depends on
where they came from, so a state that was loaded and saved again would have other bytes than before.
"""

import dataclasses
import io
import pickle
import sys
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

METADATA_FILE = ".metadata"


def unshared(value: Any) -> Any:
    """A copy of nested dictionaries, lists and tuples in which equal strings are one object and containers never are.

    Everything else (tensors, numbers, Megatron's sharded objects) is kept as it is.
    """
    if type(value) is dict:
        return {unshared(key): unshared(item) for key, item in value.items()}
    if type(value) is list:
        return [unshared(item) for item in value]
    if type(value) is tuple:
        return tuple(unshared(item) for item in value)
    return sys.intern(value) if type(value) is str else value


def write_metadata(directory: str, metadata: Metadata, places: dict[MetadataIndex, Any]) -> None:
    """Write a checkpoint's `.metadata` without what is not part of the state: folder, random id, order of arrival.

    Like torch's FileSystemWriter.finish; the file is written after all others.

    Args:
        places: where each item has been written.
    """
    kept = dataclasses.replace(
        metadata,
        state_dict_metadata=dict(sorted(metadata.state_dict_metadata.items())),
        storage_data=dict(sorted(places.items(), key=lambda entry: _place(entry[0]))),
        storage_meta=None,
        version=CURRENT_DCP_VERSION,
    )
    Path(directory, METADATA_FILE).write_bytes(_without_references(kept))


def _place(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    return index.fqn, tuple(index.offset or ())


def _without_references(value: object) -> bytes:
    """Pickled so that every object in it is written in full, and is a separate object when read back."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=4)
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue()
