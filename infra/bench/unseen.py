"""Weight updates without digests, to measure the cost of digests. Imports torch."""

from collections.abc import Mapping, Sequence

import torch

from trainer_core.weights import digest


class Unseen(digest.PreparedDigests):
    """Digests of nothing, which are equal on both sides."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._count = len(tensors)

    def begin(self) -> digest.BegunDigests:
        """Compute nothing."""
        return _nothing(self._count)


class UnseenBuckets(digest.PlannedDigests):
    """Compute nothing for buckets that come later."""

    def __init__(self, buckets: Mapping[int, Sequence[digest.Outline]], device: torch.device) -> None:
        self._counts = {number: len(own) for number, own in buckets.items()}

    def begin(self, number: int, buffer: torch.Tensor) -> None:
        """Compute nothing."""

    def begun(self) -> dict[int, digest.BegunDigests]:
        """Return nothing for each."""
        return {number: _nothing(count) for number, count in self._counts.items()}


def _nothing(count: int) -> digest.BegunDigests:
    return digest.BegunDigests([""] * count, lambda: [0] * count)


_SEEN = digest.PreparedDigests, digest.PlannedDigests


def look(seen: bool) -> None:
    """Compute digests in this process from now on of the weights that it sends, receives and finds, or none."""
    found = _SEEN if seen else (Unseen, UnseenBuckets)
    digest.__dict__["PreparedDigests"], digest.__dict__["PlannedDigests"] = found
