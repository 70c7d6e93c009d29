"""Transformer layers made of megatron-core's own modules, used where Transformer Engine is absent.

Parameters have the names that Transformer Engine's fused modules give them (`linear_qkv.layer_norm_weight`), because
megatron-bridge's parameter mappings are written for them. Attention is causal within the segments of a flat batch, by
torch's scaled_dot_product_attention. Context-parallel ranks gather keys and values of the whole sequences, and each
attends with its own queries."""

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from numpy.typing import NDArray

from trainer_core.context_parallel import Context


def rms_norm(config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
    """A root-mean-square norm of the trailing dimension, built as `ModuleSpec` builds Transformer Engine's."""
    norm = torch.nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype, device=_device(config))
    norm.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
    return norm


class LocalLayerNormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm and column-parallel linear in one module, as `TELayerNormColumnParallelLinear`. megatron-bridge
    recognises the kind of a module by this part of its class name."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.eps = config.layernorm_epsilon
        ones = torch.ones(input_size, dtype=config.params_dtype, device=_device(config))
        self.layer_norm_weight = torch.nn.Parameter(ones)
        # its gradient is then a sum over the ranks that have a share of the positions
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """(S, B, H) -> (S, B, output / tp)."""
        normed = torch.nn.functional.rms_norm(input_, input_.shape[-1:], self.layer_norm_weight, self.eps)
        return super().forward(normed, *args, **kwargs)


class _Backend(LocalSpecProvider):
    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return LocalLayerNormColumnParallelLinear


def local_layer_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Spec of a decoder block for `GPTModelProvider.transformer_layer_spec`. Norms are root mean squares; attention is
    that of Qwen3 and Llama or multi-latent (DeepSeek-V3); feed-forward layers are dense, or mixtures of experts with
    Megatron's own router and dispatcher."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    specs = [_layer(config, has_experts(config, layer)) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=rms_norm)


def has_experts(config: TransformerConfig, layer: int) -> bool:
    """True if the layer with this number, from 0, is a mixture of experts; as `get_gpt_decoder_layer_specs` decides."""
    if config.num_moe_experts is None:
        return False
    frequency = config.moe_layer_freq
    return layer % frequency == 0 if isinstance(frequency, int) else frequency[layer] == 1


def _layer(config: TransformerConfig, experts: bool) -> ModuleSpec:
    add = cast(Any, get_bias_dropout_add)  # a function where the annotation has a class
    mlp = get_mlp_module_spec_for_backend(backend=_Backend(), num_experts=config.num_moe_experts if experts else None)
    # elsewhere the norm is part of the linear layer that follows it
    norms: dict[str, Any] = {"pre_mlp_layernorm": rms_norm} if experts else {}
    if config.multi_latent_attention:
        norms["input_layernorm"] = rms_norm
    attention = _latent_attention(config) if isinstance(config, MLATransformerConfig) else _attention(config)
    parts = TransformerLayerSubmodules(self_attention=attention, self_attn_bda=add, mlp=mlp, mlp_bda=add, **norms)
    return ModuleSpec(module=TransformerLayer, submodules=parts)


def _attention(config: TransformerConfig) -> ModuleSpec:
    norm = rms_norm if config.qk_layernorm else None
    return ModuleSpec(
        module=LocalSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=LocalLayerNormColumnParallelLinear,
            core_attention=LocalDotProductAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )


def _latent_attention(config: MLATransformerConfig) -> ModuleSpec:
    norm = cast(Any, rms_norm if config.qk_layernorm else IdentityOp)
    return ModuleSpec(
        module=LocalLatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_proj=RowParallelLinear,
            q_layernorm=norm if config.q_lora_rank is not None else IdentityOp,
            kv_layernorm=norm,
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ColumnParallelLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ColumnParallelLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=LocalDotProductAttention,
        ),
    )


def _device(config: TransformerConfig) -> torch.device | int | None:
    return None if config.use_cpu_initialization else torch.cuda.current_device()


@dataclass(kw_only=True)
class LocalSegments(PackedSeqParams):
    """The segments of a flat batch, prepared once for all layers. `cp_group` is the ranks that divide them, if any."""

    positions: torch.Tensor  # (T,) int64, place of each position in its segment
    order: torch.Tensor
    """(T,) int64, the positions by length of their segment: segments of equal length are attended to together."""
    inverse: torch.Tensor  # (T,) int64, undoes `order`
    blocks: tuple[tuple[int, int], ...]  # (segments, length) of each block of equal lengths, in that order
    gathered: torch.Tensor
    """(T * ranks,) int64, where the positions of whole segments, in the order of the blocks, are among those of all
    context-parallel ranks; `order` if there is one rank."""
    visible: tuple[torch.Tensor | None, ...]
    """Masks of blocks, (length, length * ranks) bool: positions to which this rank's attend. None with one rank, where
    each position attends to those before it."""


def local_segments(
    lengths: NDArray[np.int64], positions: torch.Tensor, context: Context, group: dist.ProcessGroup | None
) -> LocalSegments:
    """Segments as the local layers read them: of (S,) `lengths`, which sum to T, the positions that this rank holds,
    and (T,) int64 `positions`, the place of each in its segment. `group` are the ranks that hold the other shares, if
    any."""
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
        gathered=torch.from_numpy(_gathered(lengths, context)).to(positions.device) if several else permutations[0],
        visible=tuple(_visible(length, context).to(positions.device) if several else None for length in found),
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
        self, *args: Any, rotary_pos_emb: torch.Tensor, packed_seq_params: LocalSegments | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(T, 1, H) -> (T, 1, H); `rotary_pos_emb` (L, 1, 1, D) holds the angles of the first L places of a segment.
        Every position brings its own angles. With the format "thd" megatron-core would rotate one segment after
        another. Without segments each row of (S, B, H) is one."""
        if packed_seq_params is not None:
            rotary_pos_emb = rotary_pos_emb[packed_seq_params.positions]  # (T, 1, 1, D)
            packed_seq_params = replace(packed_seq_params, qkv_format="sbhd")
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params, **kwargs)


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
        """Latents of queries, and of keys and values with the rotated part of keys, (T / tp, 1, R) each. Every rank's
        heads use the rotated part, so its gradient is the sum over ranks. Upstream gathers it by an operation whose
        backward pass takes this rank's columns of this rank's gradient alone. With the positions divided, as
        `check_layout` demands, it gathers the rotated part along them, and sums."""
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
        """Query (T, 1, heads / tp, D), key and value with the key-value heads -> (T, 1, heads / tp * D). The axis of
        length 1 may be left out. Without segments each row of (S, B, heads / tp, D) is one."""
        if query.ndim == 3:
            parts = (tensor.unsqueeze(1) for tensor in (query, key, value))
            return self(*parts, attention_mask, packed_seq_params=packed_seq_params).squeeze(1)
        if packed_seq_params is None:
            return self._attend(*(tensor.transpose(0, 1) for tensor in (query, key, value))).transpose(0, 1)
        segments = cast(LocalSegments, packed_seq_params)
        if segments.cp_group is not None:  # this rank's queries alone, and the keys and values of all ranks
            both = gather_from_sequence_parallel_region(torch.cat((key, value), -1), group=segments.cp_group)
            key, value = both.split((key.shape[-1], value.shape[-1]), -1)  # (T * ranks, 1, heads / tp, D) each
        ordered = (query.squeeze(1)[segments.order], *(part.squeeze(1)[segments.gathered] for part in (key, value)))
        sizes = [count * length for count, length in segments.blocks]
        blocks = (part.split([size * len(part) // len(query) for size in sizes]) for part in ordered)
        mixed = [
            self._attend(*(part.unflatten(0, (count, -1)) for part in parts), visible=visible).flatten(0, 1)
            for (count, _), visible, *parts in zip(segments.blocks, segments.visible, *blocks, strict=True)
        ]
        return torch.cat(mixed)[segments.inverse].unsqueeze(1)

    def _attend(self, *parts: torch.Tensor, visible: torch.Tensor | None = None) -> torch.Tensor:
        """Query, key and value of n sequences of equal length, (n, L, heads, D) -> (n, L, heads * D). With `visible`,
        (L, K) bool, there are K keys and values, of which it says which ones a query attends to."""
        query, key, value = (part.transpose(1, 2) for part in parts)  # (n, heads, L, D)
        grouped = query.shape[1] != key.shape[1]
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, is_causal=visible is None, scale=self.scale, enable_gqa=grouped
        )
        return mixed.transpose(1, 2).flatten(2)
