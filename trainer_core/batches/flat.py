"""Flat batches: sequences one after another, without padding between them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trainer_core.batches.sequences import Sequences
from trainer_core.context_parallel import WHOLE, Context

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class FlatBatch:
    """S segments of T positions in all, R of which predict a response token. Position s predicts token s + 1. With
    context-parallel ranks these are the positions of one of them."""

    rows: Indices  # (S,) number of each segment's sequence; -1 for padding, which counts nowhere
    lengths: Indices  # (S,) positions of each segment; they sum to T
    response_lengths: Indices  # (S,) positions of each segment that predict a response token; they sum to R
    tokens: Indices  # (T,) inputs
    positions: Indices  # (T,) place of each input in its segment
    filling: NDArray[np.bool_]  # (T,) True for padding, which counts nowhere
    predicting: Indices  # (R,) positions that predict a response token, ascending
    targets: Indices  # (R,) tokens that they predict
    responses: Indices
    """(R,) place of each predicted token among the response tokens of all sequences; -1 in an empty batch."""

    @property
    def response_tokens(self) -> int:
        """Predicted tokens that count."""
        return int(np.count_nonzero(self.responses >= 0))


_EMPTY = FlatBatch(
    rows=np.array([-1]), lengths=np.array([1]), response_lengths=np.array([1]), tokens=np.array([0]),
    positions=np.array([0]), filling=np.array([True]), predicting=np.array([0]), targets=np.array([0]),
    responses=np.array([-1]),
)  # fmt: skip


def flatten(sequences: Sequences, rows: Indices, multiple: int = 1, context: Context = WHOLE) -> FlatBatch:
    """Batch of these rows, in their order, padded to a multiple of that many positions. Without rows it is one position
    that counts nowhere: every data-parallel rank runs the same number of batches. `context` selects the share of a
    rank; all shares have the same number of positions."""
    whole = _flattened(sequences, rows) if len(rows) else _EMPTY
    if context.ranks == 1:
        return _filled_up(whole, -len(whole.tokens) % multiple)
    missing = -int(context.held(whole.lengths).sum()) % math.lcm(2, multiple)
    return _divided(_filled_up(whole, missing * context.ranks), context)


def alike(batches: Sequence[FlatBatch]) -> list[FlatBatch]:
    """Pad batches to one shape, with equal numbers of segments, positions and predicting positions."""
    shapes = [(len(batch.rows), len(batch.tokens), len(batch.targets)) for batch in batches]
    if len(set(shapes)) == 1:
        return list(batches)
    segments, positions, predicting = (max(sizes) for sizes in zip(*shapes, strict=True))
    return [_filled_up_to(batch, segments + 1, positions, predicting) for batch in batches]


def _filled_up_to(batch: FlatBatch, segments: int, positions: int, predicting: int) -> FlatBatch:
    """One added segment takes the missing positions and predictions; the others are empty."""
    batch, missing = _filled_up(batch, positions - len(batch.tokens), always=True), predicting - len(batch.targets)
    empty, zeros = np.zeros(segments - len(batch.rows), dtype=np.int64), np.zeros(missing, dtype=np.int64)
    responses = np.append(batch.response_lengths, empty)
    responses[len(batch.rows) - 1] = missing
    return replace(
        batch,
        rows=np.append(batch.rows, empty - 1),
        lengths=np.append(batch.lengths, empty),
        response_lengths=responses,
        predicting=np.append(batch.predicting, zeros + positions - 1),
        targets=np.append(batch.targets, zeros),
        responses=np.append(batch.responses, zeros - 1),
    )


def _divided(batch: FlatBatch, context: Context) -> FlatBatch:
    lengths = context.held(batch.lengths)  # (S,), sum to T of this rank
    positions = context.positions(_ranges(np.zeros_like(lengths), lengths), np.repeat(lengths, lengths))
    real = positions < np.repeat(batch.lengths, lengths)
    source = (positions + np.repeat(_starts(batch.lengths), lengths))[real]  # among the positions of the whole batch
    held = np.full(len(batch.tokens), -1)
    held[source] = np.flatnonzero(real)
    predicting = held[batch.predicting]
    own = predicting >= 0
    tokens, filling = np.zeros_like(positions), np.ones_like(real)
    tokens[real], filling[real] = batch.tokens[source], batch.filling[source]
    segments = np.repeat(np.arange(len(lengths)), batch.response_lengths)  # of each predicted token
    return FlatBatch(
        rows=batch.rows,
        lengths=lengths,
        response_lengths=np.bincount(segments[own], minlength=len(lengths)),
        tokens=tokens,
        positions=positions,
        filling=filling,
        predicting=predicting[own],
        targets=batch.targets[own],
        responses=batch.responses[own],
    )


def _filled_up(batch: FlatBatch, missing: int, always: bool = False) -> FlatBatch:
    """A segment more takes the missing positions; it is `always` there, or only if some are missing."""
    if not (missing or always):
        return batch
    return replace(
        batch,
        rows=np.append(batch.rows, -1),
        lengths=np.append(batch.lengths, missing),
        response_lengths=np.append(batch.response_lengths, 0),
        tokens=np.append(batch.tokens, np.zeros(missing, dtype=np.int64)),
        positions=np.append(batch.positions, np.arange(missing)),
        filling=np.append(batch.filling, np.ones(missing, dtype=np.bool_)),
    )


def _flattened(sequences: Sequences, rows: Indices) -> FlatBatch:
    positions, responses = sequences.positions[rows], sequences.response_lengths[rows]
    prompts = sequences.prompt_lengths[rows]
    first = _starts(sequences.lengths)[rows]  # of each sequence among all tokens
    places = _ranges(_starts(sequences.response_lengths)[rows], responses)  # (R,) among all response tokens
    skipped = _skipped(sequences.gaps, places, responses)
    return FlatBatch(
        rows=rows,
        lengths=positions,
        response_lengths=responses,
        tokens=sequences.tokens[_ranges(first, positions)].astype(np.int64),
        positions=_ranges(np.zeros_like(positions), positions),
        filling=np.zeros(positions.sum(), dtype=np.bool_),
        predicting=_ranges(_starts(positions) + prompts - 1, responses) + skipped,
        targets=sequences.tokens[_ranges(first + prompts, responses) + skipped].astype(np.int64),
        responses=places,
    )


def _skipped(gaps: Indices | None, places: Indices, responses: Indices) -> Indices:
    """Tokens that do not count between the prompt and each response token, (R,)."""
    if gaps is None:
        return np.zeros_like(places)
    total = np.append(0, np.cumsum(gaps[places]))
    return total[1:] - np.repeat(total[_starts(responses)], responses)


def _starts(lengths: Indices) -> Indices:
    """First places of stretches that lie one after another."""
    return np.cumsum(lengths) - lengths


def _ranges(starts: Indices, lengths: Indices) -> Indices:
    """Numbers start, start + 1, ... of each stretch, one stretch after another."""
    return np.repeat(starts - _starts(lengths), lengths) + np.arange(lengths.sum())
