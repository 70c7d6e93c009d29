"""Transformer layers made of megatron-core's own modules, used where Transformer Engine is absent.

Parameters have the names that Transformer Engine's fused modules give them (`linear_qkv.layer_norm_weight`), because
megatron-bridge's parameter mappings are written for them.
"""

from typing import Any, cast

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from trainer_core.platform.local_attention import (
    LocalDotProductAttention,
    LocalLatentAttention,
    LocalSelfAttention,
)


def rms_norm(config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
    """A root-mean-square norm of the trailing dimension, built as `ModuleSpec` builds Transformer Engine's."""
    norm = torch.nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype, device=_device(config))
    norm.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
    return norm


class LocalLayerNormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm and column-parallel linear in one module, as `TELayerNormColumnParallelLinear`.

    megatron-bridge recognises the kind of a module by this part of its class name.
    """

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

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Weight and bias are split over tensor ranks along their first axis; the norm is replicated."""
        state = self.state_dict(prefix="", keep_vars=True)
        groups: dict[str, Any] = {
            "tp_group": self.tp_group,
            "dp_cp_group": metadata["dp_cp_group"] if metadata else None,
        }
        split_axes = {"weight": 0, "bias": 0}
        return make_sharded_tensors_for_checkpoint(state, prefix, split_axes, sharded_offsets, **groups)


class _Backend(LocalSpecProvider):
    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return LocalLayerNormColumnParallelLinear


def local_layer_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Spec of a decoder block for `GPTModelProvider.transformer_layer_spec`.

    Norms are root mean squares; attention is that of Qwen3 and Llama or multi-latent (DeepSeek-V3); feed-forward layers
    are dense, or mixtures of experts with Megatron's own router and dispatcher.
    """
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    return TransformerBlockSubmodules(
        layer_specs=[_layer(config, has_experts(config, layer)) for layer in layers], layer_norm=rms_norm
    )


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
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=attention, self_attn_bda=add, mlp=mlp, mlp_bda=add, **norms
        ),
    )


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
