"""Where torch writes one tensor after another into one file."""

from typing import IO

from storage.local import PIECE


class OpenStream:
    """A stream that stays open: others append to it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._write = stream.write

    def write(self, data: memoryview) -> int:
        """Write all of `data`; a large tensor in pieces."""
        if len(data) <= PIECE:
            return self._write(data)
        return sum(self._write(data[start : start + PIECE]) for start in range(0, len(data), PIECE))

    def flush(self) -> None:
        """Left to the stream's own end."""

    def close(self) -> None:
        """Left to whoever opened it."""
