"""Where torch writes one tensor after another into one file."""

from typing import IO

from storage.backends.local import write_in_chunks


class OpenStream:
    """A stream that stays open: others append to it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def write(self, data: memoryview) -> int:
        """Write all of `data`; a large tensor in chunks."""
        write_in_chunks(self._stream, data)
        return len(data)

    def flush(self) -> None:
        """The stream is flushed when it ends."""

    def close(self) -> None:
        """The opener closes the stream."""
