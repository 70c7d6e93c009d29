"""Causal attention within the segments of a flat batch, by torch's scaled_dot_product_attention.

Used where Transformer Engine, which has kernels for that, is absent. Context-parallel ranks gather keys and values of
the whole sequences, and each attends with its own queries.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from numpy.typing import NDArray

from trainer_core.context_parallel import Context


@dataclass(kw_only=True)
class LocalSegments(PackedSeqParams):
    """The segments of a flat batch, prepared once for all layers. `cp_group` is the ranks that divide them, if any."""

    positions: torch.Tensor
    """(T,) int64, place of each position in its segment."""
    order: torch.Tensor
    """(T,) int64, the positions by length of their segment: segments of equal length are attended to together."""
    inverse: torch.Tensor
    """(T,) int64, undoes `order`."""
    blocks: tuple[tuple[int, int], ...]
    """(segments, length) of each block of equal lengths, in that order."""
    gathered: torch.Tensor | None = None
    """(T * ranks,) int64, where the positions of whole segments, in the order of the blocks, are among those of all
    context-parallel ranks; None if there is one rank."""
    visible: tuple[torch.Tensor, ...] = ()
    """Masks of blocks, (length, length * ranks) bool: positions to which this rank's attend. Empty with one rank."""


def local_segments(
    lengths: NDArray[np.int64], positions: torch.Tensor, context: Context, group: dist.ProcessGroup | None
) -> LocalSegments:
    """Segments as the local layers read them.

    Args:
        lengths: (S,) positions of each that this rank holds; they sum to T.
        positions: (T,) int64 on the model's device, place of each in its segment, from 0.
        context: which share of each segment this rank holds.
        group: the ranks that hold the others, if there are any.
    """
    order = np.argsort(np.repeat(lengths, lengths), kind="stable")
    found, counts = np.unique(lengths[lengths > 0], return_counts=True)
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    permutations = torch.from_numpy(np.stack((order, inverse))).to(positions.device)  # (2, T)
    longest = int(lengths.max()) * context.ranks
    ends = np.concatenate(([0], np.cumsum(lengths) * context.ranks)).astype(np.int32)  # (S + 1,), of whole segments
    ends = torch.from_numpy(ends).to(positions.device)
    several = context.ranks > 1
    return LocalSegments(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        positions=positions,
        order=permutations[0],
        inverse=permutations[1],
        blocks=tuple(zip(counts.tolist(), found.tolist(), strict=True)),
        cp_group=cast(Any, group),
        gathered=torch.from_numpy(_gathered(lengths, context)).to(positions.device) if several else None,
        visible=tuple(_visible(length, context).to(positions.device) for length in found) if several else (),
    )


def _gathered(lengths: NDArray[np.int64], context: Context) -> NDArray[np.int64]:
    """(T * ranks,) `LocalSegments.gathered`, of which ranks have T positions each, one rank after another."""
    starts, order = np.cumsum(lengths) - lengths, np.argsort(lengths, kind="stable")
    whole = lengths[order] * context.ranks
    segment = np.repeat(order, whole)
    positions = np.arange(whole.sum()) - np.repeat(np.cumsum(whole) - whole, whole)
    rank, place = context.holders(positions, lengths[segment])
    return rank * lengths.sum() + starts[segment] + place


def _visible(length: int, context: Context) -> torch.Tensor:
    """(length, length * ranks) bool, the positions of a segment to which the `length` of this rank attend."""
    own = context.positions(np.arange(length), np.full(length, length))
    return torch.from_numpy(own[:, None] >= np.arange(length * context.ranks)[None])


class LocalSelfAttention(SelfAttention):
    """megatron-core's self-attention, in which positions count from the beginning of each segment."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        *args: Any,
        rotary_pos_emb: torch.Tensor,
        packed_seq_params: LocalSegments | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(T, 1, H) -> (T, 1, H); `rotary_pos_emb` (L, 1, 1, D) holds the angles of the first L places of a segment.

        Every position brings its own angles. With the format "thd" megatron-core would rotate one segment after
        another. Without segments each row of (S, B, H) is one.
        """
        if packed_seq_params is not None:
            rotary_pos_emb = rotary_pos_emb[packed_seq_params.positions]  # (T, 1, 1, D)
            packed_seq_params = replace(packed_seq_params, qkv_format="sbhd")
        return super().forward(
            hidden_states,
            attention_mask,
            *args,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
            **kwargs,
        )


class LocalLatentAttention(MLASelfAttention):
    """megatron-core's multi-latent attention over segments, whose gradient is right on several tensor ranks too."""

    def _resolve_qk_norm_config(self, submodules: Any) -> Any:
        """The modules to build. Queries that are projected at once have no norm; upstream wants one all the same."""
        if self.config.q_lora_rank is not None:
            return super()._resolve_qk_norm_config(submodules)
        return {
            "linear_q_proj": submodules.linear_q_proj,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "kv_layernorm": submodules.kv_layernorm,
        }

    def _qkv_down_projection(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents of queries, and of keys and values with the rotated part of keys, (T / tp, 1, R) each.

        Every rank's heads use the rotated part, so its gradient is the sum over ranks. Upstream gathers it by an
        operation whose backward pass takes this rank's columns of this rank's gradient alone. With the positions
        divided, as `check_layout` demands, it gathers the rotated part along them, and sums.
        """
        queries, combined = super()._qkv_down_projection(hidden_states)
        if combined.size(-1) == self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim:
            return queries, combined
        combined = gather_from_tensor_model_parallel_region(combined)  # (T, 1, R / tp) -> (T, 1, R)
        return queries, scatter_to_sequence_parallel_region(combined)


class LocalDotProductAttention(MegatronModule):
    """Causal core attention within segments, without dropout."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale if softmax_scale is not None else cast(int, config.kv_channels) ** -0.5

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        /,
        *,
        packed_seq_params: PackedSeqParams | None,
        **_: Any,
    ) -> torch.Tensor:
        """Query (T, 1, heads / tp, D), key and value with the key-value heads -> (T, 1, heads / tp * D).

        The axis of length 1 may be left out. Without segments each row of (S, B, heads / tp, D) is one.
        """
        if query.ndim == 3:
            parts = (tensor.unsqueeze(1) for tensor in (query, key, value))
            return self(*parts, attention_mask, packed_seq_params=packed_seq_params).squeeze(1)
        if packed_seq_params is None:
            return self._attend(*(tensor.transpose(0, 1) for tensor in (query, key, value))).transpose(0, 1)
        segments = cast(LocalSegments, packed_seq_params)
        if segments.gathered is not None:
            return self._attend_over_ranks(query, key, value, segments, segments.gathered)
        if len(segments.blocks) == 1:  # nothing to sort
            rows = (tensor.unflatten(0, segments.blocks[0]).squeeze(2) for tensor in (query, key, value))
            return self._attend(*rows).flatten(0, 1).unsqueeze(1)
        sizes = [count * length for count, length in segments.blocks]
        ordered = (tensor.squeeze(1)[segments.order].split(sizes) for tensor in (query, key, value))  # (T, heads, D)
        mixed = [
            self._attend(*(part.unflatten(0, (count, length)) for part in parts)).flatten(0, 1)
            for (count, length), *parts in zip(segments.blocks, *ordered, strict=True)
        ]
        return torch.cat(mixed)[segments.inverse].unsqueeze(1)

    def _attend_over_ranks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        segments: LocalSegments,
        gathered: torch.Tensor,
    ) -> torch.Tensor:
        """The same where ranks divide each segment: their keys and values together, this rank's queries alone."""
        both = torch.cat((key, value), -1)  # (T, 1, heads / tp, D + D of values)
        everyones = gather_from_sequence_parallel_region(both, group=segments.cp_group)  # (T * ranks, 1, ...)
        sizes = [count * length for count, length in segments.blocks]
        queries = query.squeeze(1)[segments.order].split(sizes)
        ranks = len(gathered) // len(query)
        wholes = everyones.squeeze(1)[gathered].split([size * ranks for size in sizes])
        mixed = []
        for (count, length), visible, own, whole in zip(
            segments.blocks, segments.visible, queries, wholes, strict=True
        ):
            keys, values = whole.unflatten(0, (count, length * ranks)).split((key.shape[-1], value.shape[-1]), -1)
            mixed.append(self._attend(own.unflatten(0, (count, length)), keys, values, visible=visible).flatten(0, 1))
        return torch.cat(mixed)[segments.inverse].unsqueeze(1)

    def _attend(self, *parts: torch.Tensor, visible: torch.Tensor | None = None) -> torch.Tensor:
        """Query, key and value of n sequences of equal length, (n, L, heads, D) -> (n, L, heads * D).

        With `visible`, (L, K) bool, there are K keys and values, of which it says which ones a query attends to.
        """
        query, key, value = (part.transpose(1, 2) for part in parts)  # (n, heads, L, D)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=visible,
            is_causal=visible is None,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return mixed.transpose(1, 2).flatten(2)
