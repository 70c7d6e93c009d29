"""Weight updates without their digests: what those cost is the difference. Imports torch."""

from collections.abc import Sequence

import torch

from trainer_core.weights import digest


class Unseen(digest.PreparedDigests):
    """Digests of nothing, which are equal on both sides."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._count = len(tensors)

    def begin(self) -> digest.BegunDigests:
        """Compute nothing."""
        return _nothing(self._count)


class UnseenInBuffer(digest.PlannedDigests):
    """The same for a buffer that comes later."""

    def __init__(self, outlines: Sequence[digest.Outline], device: torch.device) -> None:
        self._count = len(outlines)

    def begin(self, buffer: torch.Tensor) -> digest.BegunDigests:
        """Compute nothing."""
        return _nothing(self._count)


def _nothing(count: int) -> digest.BegunDigests:
    return digest.BegunDigests([""] * count, [0] * count)


_SEEN = digest.PreparedDigests, digest.PlannedDigests


def look(seen: bool) -> None:
    """Whether this process from now on computes digests of what it sends, receives and finds."""
    found = _SEEN if seen else (Unseen, UnseenInBuffer)
    digest.__dict__["PreparedDigests"], digest.__dict__["PlannedDigests"] = found
