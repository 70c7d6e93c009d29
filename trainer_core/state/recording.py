"""What torch.save writes for a tensor of some type and shape, apart from its elements: they may be filled in later."""

import functools
from dataclasses import dataclass

import torch
from torch.serialization import get_crc32_options, set_crc32_options

_RECORD = b"archive/data/0"  # the elements are the second thing that is written after this name: padding comes first
_GAP = 2


@dataclass(frozen=True)
class Frame:
    """The bytes around the elements of a tensor in a file of torch.save."""

    head: bytes
    """Everything before the elements; a multiple of 64 bytes."""
    tail: bytes
    """Everything after them."""


@functools.lru_cache(maxsize=4096)  # a model has few shapes
def frame(dtype: torch.dtype, shape: tuple[int, ...]) -> Frame:
    """The frame of a contiguous tensor of at least one element. Without torch's checksum, which depends on them."""
    recorder, checksums = _Recorder(), get_crc32_options()
    set_crc32_options(False)
    try:
        torch.save(torch.empty(shape, dtype=dtype), recorder)  # pyright: ignore[reportArgumentType]
    finally:
        set_crc32_options(checksums)
    return Frame(b"".join(recorder.before), b"".join(recorder.after))


class _Recorder:
    """Keeps what is written, except for the elements, which are not even read."""

    def __init__(self) -> None:
        self.before: list[bytes] = []
        self.after: list[bytes] = []
        self._since: int | None = None

    def write(self, data: bytes | memoryview) -> int:
        self._since = None if self._since is None else self._since + 1
        if self._since is None or self._since < _GAP:
            self.before.append(bytes(data))
            self._since = 0 if self.before[-1] == _RECORD else self._since
        elif self._since > _GAP:
            self.after.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Nothing is buffered."""
