"""The clock of a store, by which the ages of objects are measured."""

import uuid
from datetime import UTC, datetime

from storage import layout
from storage.backends.root import CHECK_SECONDS, Root
from storage.errors import StorageUnavailable


def seconds_ahead(root: Root) -> float:
    """Seconds by which the store's clock is ahead of this machine's, negative if it is behind; 0 if that is not known.

    Cleaning compares the ages of objects, which are times of the store, with this machine's clock.

    Raises:
        StorageUnavailable: the root cannot be written.
    """
    key, probed = layout.probe_key(uuid.uuid4().hex), root.existing().patient(CHECK_SECONDS)
    before = datetime.now(UTC)
    probed.put_if_absent(key, b"ratchet")
    written = probed.info(key)
    after = datetime.now(UTC)
    probed.remove(key)
    if written is None:
        raise StorageUnavailable(f"{root.url}/{key} was written, and is not there: find out who removes objects")
    if written.modified < before:
        return (written.modified - before).total_seconds()
    return max((written.modified - after).total_seconds(), 0.0)
