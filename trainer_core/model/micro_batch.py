"""Flat batches on the device, as the model takes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray

from trainer_core.batches.flat import FlatBatch
from trainer_core.batches.sequences import Vector
from trainer_core.model.segments import Segments
from trainer_core.platform.local_attention import local_segments

_LENGTH_STEP = 128  # longest segments are rounded up to this, so that few different ones reach the kernels


@dataclass(frozen=True)
class MicroBatch:
    """One flat batch on this rank's device: S segments, T positions, R response tokens."""

    host: FlatBatch
    """The same in host memory."""
    tokens: torch.Tensor
    """(1, T) int64."""
    positions: torch.Tensor
    """(1, T) int64, place of each token in its segment."""
    packing: PackedSeqParams
    """Where segments begin and end, for the attention."""
    filling: torch.Tensor | None
    """(1, T) bool, positions that experts and their router must not count; None if there are none."""
    predicting: torch.Tensor
    """(R,) int64, positions that predict response tokens."""
    targets: torch.Tensor
    """(R,) int64, the response tokens."""
    segments: Segments
    """Which sequence each response token belongs to."""
    weights: torch.Tensor
    """(S,) float32, weight of each sequence in the loss; 0 for one that does not count."""
    count: torch.Tensor
    """() int32, response tokens that count."""
    values: Mapping[str, torch.Tensor]
    """Further (R,) float32 values that the loss needs, by name."""


def place(
    batches: Sequence[FlatBatch],
    weights: Vector,
    values: Mapping[str, Vector],
    device: torch.device,
    transformer_engine: bool,
) -> list[MicroBatch]:
    """Copy all batches of a pass to the device, each array at once and from pinned memory.

    Args:
        batches: what to copy.
        weights: (N,) of the sequences that the batches' rows name.
        values: (response tokens of all sequences,) each.
        device: where to.
        transformer_engine: whether its attention kernels are used.
    """

    def move(arrays: list[NDArray]) -> tuple[torch.Tensor, ...]:
        joined = torch.from_numpy(np.concatenate(arrays))
        if device.type == "cuda":
            joined = joined.pin_memory()
        return joined.to(device, non_blocking=True).split([len(array) for array in arrays])

    longest = max(int(batch.lengths.max()) for batch in batches)
    ends = move([np.concatenate(([0], np.cumsum(batch.lengths))).astype(np.int32) for batch in batches])
    places = move([batch.positions for batch in batches])
    packings = [
        _thd(end, longest) if transformer_engine else local_segments(batch.lengths, own)
        for batch, end, own in zip(batches, ends, places, strict=True)
    ]
    moved = {name: move([_chosen(array, batch.responses) for batch in batches]) for name, array in values.items()}
    columns = zip(
        batches,
        move([batch.tokens for batch in batches]),
        places,
        packings,
        move([batch.filling for batch in batches]),
        move([batch.predicting for batch in batches]),
        move([batch.targets for batch in batches]),
        move([batch.response_lengths for batch in batches]),
        move([_chosen(weights, batch.rows) for batch in batches]),
        move([np.array([batch.response_tokens], dtype=np.int32) for batch in batches]),
        strict=True,
    )
    return [
        MicroBatch(
            host=host,
            tokens=tokens.unsqueeze(0),
            positions=own.unsqueeze(0),
            packing=packing,
            filling=filling.unsqueeze(0) if (host.rows < 0).any() else None,
            predicting=predicting,
            targets=targets,
            segments=Segments(lengths),
            weights=weight,
            count=count.squeeze(0),
            values={name: parts[number] for name, parts in moved.items()},
        )
        for number, (host, tokens, own, packing, filling, predicting, targets, lengths, weight, count) in (
            enumerate(columns)
        )
    ]


def _chosen(values: Vector, places: NDArray[np.int64]) -> Vector:
    """The values at these places, 0 where the place is -1."""
    chosen = np.zeros(len(places), dtype=np.float32)
    chosen[places >= 0] = values[places[places >= 0]]
    return chosen


def _thd(ends: torch.Tensor, longest: int) -> PackedSeqParams:
    rounded = -(-longest // _LENGTH_STEP) * _LENGTH_STEP
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=rounded, max_seqlen_kv=rounded
    )
