"""What a bucket of tensors brings to a worker's parameters, planned before it arrives. Imports torch and vLLM."""

from collections.abc import Mapping, Sequence

import torch

from tasks.engine.landing import Place, part_of
from trainer_core.weights.packing import element_type, views
from trainer_core.weights.plan import PlannedTensor

_WORD = 8  # bytes


class PlannedCopies:
    """The copies from one bucket. Parts that lie in one piece on both sides are copied as words by one launch for all
    of them, whatever their types; only where they begin in the bucket is known of them.
    """

    def __init__(
        self, planned: Sequence[PlannedTensor], places: Mapping[str, Place], parts: Mapping[str, torch.Tensor]
    ) -> None:
        """Args:
        planned: the tensors of the bucket, by offset.
        places: where each lies, by name.
        parts: what the live parameters hold of each, as views; of the others this worker has no use.
        """
        self._cuts: list[int] = []  # words before a piece, and those of it, one piece after another
        self._into: list[torch.Tensor] = []  # the words of each, (words,) int64
        self._others: list[tuple[PlannedTensor, Place, torch.Tensor]] = []
        self._end = 0
        for tensor in planned:
            if (into := parts.get(tensor.name)) is None:
                continue
            place = places[tensor.name]
            if (piece := _piece(tensor, place, into)) is None:
                self._others.append((tensor, place, into))
                continue
            first, count = piece
            self._cuts += [first - self._end, count]
            self._into.append(into.view(-1).view(torch.int64))
            self._end = first + count

    def write(self, buffer: torch.Tensor) -> None:
        """Copy from the bucket's buffer, (bytes,) uint8, which begins at a whole word; a card is not waited for."""
        if self._into:
            words = buffer[: buffer.numel() // _WORD * _WORD].view(torch.int64)
            pieces = words.split_with_sizes([*self._cuts, words.numel() - self._end])[1::2]
            torch._foreach_copy_(self._into, list(pieces))  # pyright: ignore[reportPrivateImportUsage]
        for tensor, place, into in self._others:
            ((_, found),) = views([tensor], buffer)
            into.copy_(part_of(found, place.of))


def _piece(tensor: PlannedTensor, place: Place, into: torch.Tensor) -> tuple[int, int] | None:
    """First word in the bucket and number of words of what is held of a tensor, if it is copied as it is, in one piece
    of whole words.
    """
    size = into.element_size()
    if place.piece is None or into.dtype != element_type(tensor.dtype) or not into.is_contiguous():
        return None
    first, count = place.piece
    begin, nbytes = tensor.offset + first * size, count * size
    if begin % _WORD or nbytes % _WORD or into.storage_offset() * size % _WORD:
        return None
    return begin // _WORD, nbytes // _WORD
