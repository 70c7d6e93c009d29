"""Contribution of a bucket of tensors to a worker's parameters, planned before it arrives. Imports torch and vLLM."""

from collections.abc import Sequence

import torch

from tasks.engine.vllm.landing import Place, part_of
from tasks.engine.vllm.survey import Survey
from trainer_core.weights.packing import element_type, views
from trainer_core.weights.plan import PlannedTensor

_WORD = 8  # bytes


class PlannedCopies:
    """The copies from one bucket. Parts that lie in one piece on both sides are copied as words by one launch for all
    of them, whatever their types; only where they begin in the bucket is known of them.
    """

    def __init__(self, planned: Sequence[PlannedTensor], survey: Survey) -> None:
        """Args:
        planned: the tensors of the bucket, by offset.
        survey: of the live model; of what it has no part of, this worker has no use.
        """
        self._cuts: list[int] = []  # words before a piece, and those of it, one piece after another
        self._into: list[torch.Tensor] = []  # the words of each, (words,) int64
        self._others: list[tuple[PlannedTensor, Place, torch.Tensor]] = []
        self._end = 0
        for tensor in planned:
            if (into := survey.parts.get(tensor.name)) is None:
                continue
            place, words = survey.places[tensor.name], survey.words.get(tensor.name)
            first = None if words is None else _first_word(tensor, place, into)
            if first is None or words is None:
                self._others.append((tensor, place, into))
                continue
            self._cuts += [first - self._end, words.numel()]
            self._into.append(words)
            self._end = first + words.numel()

    def write(self, buffer: torch.Tensor) -> None:
        """Copy from the bucket's buffer, (bytes,) uint8, which begins at a whole word; a card is not waited for."""
        if self._into:
            words = buffer[: buffer.numel() // _WORD * _WORD].view(torch.int64)
            pieces = words.split_with_sizes([*self._cuts, words.numel() - self._end])[1::2]
            torch._foreach_copy_(self._into, list(pieces))  # pyright: ignore[reportPrivateImportUsage]
        for tensor, place, into in self._others:
            ((_, found),) = views([tensor], buffer)
            into.copy_(part_of(found, place.of))


def _first_word(tensor: PlannedTensor, place: Place, into: torch.Tensor) -> int | None:
    """Offset in the bucket, in words, at which the held part of a tensor begins; None if the tensor is converted, or
    its part is not one piece of whole words there.
    """
    if place.start is None or into.dtype != element_type(tensor.dtype):
        return None
    begin = tensor.offset + place.start * into.element_size()
    return None if begin % _WORD else begin // _WORD
