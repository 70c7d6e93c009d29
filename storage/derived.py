"""A file for people that grows with a run. Nothing is decided by reading it, and it can always be made again."""

import time

from storage.backends.root import Root
from storage.errors import NotCommitted

SECONDS = 15.0  # least time between two uploads where a file can only be replaced as a whole
_SHARE = 20.0  # an upload takes at most this fraction of the time


class GrowingFile:
    """Appended to where the store can; elsewhere kept in memory and uploaded whole, from time to time."""

    def __init__(self, root: Root, key: str, seconds: float = SECONDS) -> None:
        self._root, self._key, self._seconds = root, key, seconds
        self._whole: bytearray | None = None
        self._due, self._behind = 0.0, False

    @property
    def appends(self) -> bool:
        return self._root.backend.appends

    def read(self) -> bytes:
        """The content so far; empty if nothing was written."""
        if self._whole is not None:
            return bytes(self._whole)
        try:
            return self._root.read_bytes(self._key)
        except NotCommitted:
            return b""

    def replace(self, data: bytes) -> None:
        """Write all of it again."""
        self._whole = None if self.appends else bytearray(data)
        self._upload(data)

    def append(self, data: bytes) -> None:
        """Add to its end."""
        if self.appends:
            return self._root.append(self._key, data)
        if self._whole is None:
            self._whole = bytearray(self.read())
        self._whole += data
        self._behind = True
        if time.monotonic() >= self._due:
            self.flush()
        return None

    def flush(self) -> None:
        """Upload what was not uploaded yet."""
        if self._behind and self._whole is not None:
            self._upload(bytes(self._whole))

    def _upload(self, data: bytes) -> None:
        began = time.monotonic()
        self._root.replace(self._key, data)
        self._behind = False
        now = time.monotonic()
        self._due = now + max(self._seconds, _SHARE * (now - began))
