"""Flat batches on the device, in the form of the model's input."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray

from trainer_core.batches.flat import FlatBatch
from trainer_core.batches.sequences import Vector
from trainer_core.model.mesh import Mesh
from trainer_core.objectives.tokens import Segments
from trainer_core.platform.local_layers import local_segments

_LENGTH_STEP = 128  # longest segments are rounded up to this, so that few different ones reach the kernels


@dataclass(frozen=True)
class MicroBatch:
    """One flat batch on this rank's device: S segments, T positions, R response tokens."""

    host: FlatBatch  # the batch in host memory
    tokens: torch.Tensor  # (1, T) int64
    positions: torch.Tensor  # (1, T) int64, position of each token in its segment
    packing: PackedSeqParams  # boundaries of segments, for the attention
    filling: torch.Tensor | None
    """(1, T) bool, padding that experts and their router must not count; None if there is none. Context-parallel ranks
    always have one, because with it routers exchange more."""
    predicting: torch.Tensor  # (R,) int64, positions that predict response tokens
    targets: torch.Tensor  # (R,) int64, the response tokens
    segments: Segments  # sequence of each response token
    weights: torch.Tensor  # (S,) float32, weight of each sequence in the loss; 0 for one that does not count
    count: torch.Tensor  # () int32, response tokens that count
    values: Mapping[str, torch.Tensor]  # further (R,) or (R, k) values that the loss needs, by name
    routes: torch.Tensor | None = None
    """(T, layers * k) int16, the experts of each position by layer that has some, or `OWN`; None: routers choose."""


def place(
    batches: Sequence[FlatBatch], weights: Vector, values: Mapping[str, NDArray], mesh: Mesh, transformer_engine: bool
) -> list[MicroBatch]:
    """Copy all batches of a pass to the device, each array at once and from pinned memory. `weights` are those of (N,)
    sequences, which the batches' rows name, `values` those of all response tokens."""

    def move(arrays: list[NDArray]) -> tuple[torch.Tensor, ...]:
        joined = torch.from_numpy(np.concatenate(arrays))
        if mesh.device.type == "cuda":
            joined = joined.pin_memory()
        return joined.to(mesh.device, non_blocking=True).split([len(array) for array in arrays])

    ranks, group = mesh.context.ranks, mesh.context_group
    longest = max(int(batch.lengths.max()) for batch in batches)
    # of whole sequences, filled up
    ends = move([np.concatenate(([0], np.cumsum(batch.lengths) * ranks)).astype(np.int32) for batch in batches])
    places = move([batch.positions for batch in batches])
    packings = [
        _thd(end, longest, ranks) if transformer_engine else local_segments(batch.lengths, own, mesh.context, group)
        for batch, end, own in zip(batches, ends, places, strict=True)
    ]
    columns = {
        "tokens": move([batch.tokens for batch in batches]),
        "positions": places,
        "filling": move([batch.filling for batch in batches]),
        "predicting": move([batch.predicting for batch in batches]),
        "targets": move([batch.targets for batch in batches]),
        "lengths": move([batch.response_lengths for batch in batches]),
        "weights": move([_chosen(weights, batch.rows) for batch in batches]),
        "count": move([np.array([batch.response_tokens], dtype=np.int32) for batch in batches]),
    }
    moved = {name: move([_chosen(array, batch.responses) for batch in batches]) for name, array in values.items()}
    return [
        _placed(batch, packing, _nth(columns, number), _nth(moved, number), group)
        for number, (batch, packing) in enumerate(zip(batches, packings, strict=True))
    ]


def _nth(columns: Mapping[str, tuple[torch.Tensor, ...]], number: int) -> dict[str, torch.Tensor]:
    return {name: parts[number] for name, parts in columns.items()}


def _placed(
    host: FlatBatch,
    packing: PackedSeqParams,
    own: Mapping[str, torch.Tensor],
    values: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup | None,
) -> MicroBatch:
    return MicroBatch(
        host=host,
        tokens=own["tokens"].unsqueeze(0),
        positions=own["positions"].unsqueeze(0),
        packing=packing,
        filling=own["filling"].unsqueeze(0) if host.filling.any() or group is not None else None,
        predicting=own["predicting"],
        targets=own["targets"],
        segments=Segments(own["lengths"], group),
        weights=own["weights"],
        count=own["count"].squeeze(0),
        values=values,
    )


def _chosen(values: NDArray, places: NDArray[np.int64]) -> NDArray:
    """Values at these places, 0 where the place is -1."""
    chosen = np.zeros((len(places), *values.shape[1:]), dtype=values.dtype)
    chosen[places >= 0] = values[places[places >= 0]]
    return chosen


def _thd(ends: torch.Tensor, longest: int, ranks: int) -> PackedSeqParams:
    """Packing for Transformer Engine; with context-parallel `ranks` the ends are those of whole sequences. The padding
    of a sequence comes last in it, so that no other position attends to it: it counts as part of it."""
    rounded = -(-longest // _LENGTH_STEP) * _LENGTH_STEP * ranks
    padded: dict[str, Any] = {}
    if ranks > 1:
        padded = {"cu_seqlens_q_padded": ends, "cu_seqlens_kv_padded": ends, "pad_between_seqs": False}
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=rounded, max_seqlen_kv=rounded, **padded
    )
