"""Settings of Megatron's model configuration and gradient buffers that this trainer chooses."""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.enums import AttnBackend

from storage.errors import InputError
from trainer_core.config import ExpertsConfig, MegatronConfig, Precision, Recompute, TrainerConfig
from trainer_core.platform.local_layers import local_layer_spec
from trainer_core.platform.platform import Platform

_DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}

_RECOMPUTE: dict[Recompute, dict[str, Any]] = {
    "none": {"recompute_granularity": None},
    "attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "layers": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}

_FUSIONS_OF_TRANSFORMER_ENGINE = (
    "bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "persist_layer_norm", "apply_rope_fusion",
    "cross_entropy_loss_fusion", "moe_grouped_gemm", "moe_permute_fusion", "moe_shared_expert_overlap",
)  # fmt: skip


def dtype_of(config: TrainerConfig) -> torch.dtype:
    return _DTYPES[config.precision]


def model_settings(config: TrainerConfig, platform: Platform, deterministic: bool) -> dict[str, Any]:
    """Fields of Megatron's model configuration that this trainer sets for every model."""
    dtype = dtype_of(config)
    settings: dict[str, Any] = {
        "sequence_parallel": config.parallel.sequence,
        "context_parallel_size": config.parallel.context,
        "expert_model_parallel_size": config.parallel.expert,
        "expert_tensor_parallel_size": config.parallel.expert_tensor or config.parallel.tensor,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": False,
        "seq_length": config.max_length,
        "should_pad_vocab": True,
        "make_vocab_size_divisible_by": 1,  # by tensor-parallel ranks alone: what fits is not padded
        "moe_token_dispatcher_type": "alltoall",  # with experts; no other takes batches that differ in length
        "attention_backend": AttnBackend[config.megatron.attention],
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "gradient_accumulation_fusion": False,  # set for each module after the model is built
        "perform_initialization": False,  # weights are always imported or loaded
        "use_cpu_initialization": platform.device.type == "cpu",
        # the sum over tokens is divided once, by Megatron, by the tokens of the whole batch
        "calculate_per_token_loss": True,
        "deterministic_mode": deterministic,
    }
    settings |= _of_pipeline(config) | _RECOMPUTE[config.megatron.recompute]
    if config.fp8 is not None:
        # a copy of the weights in FP8 that is kept over micro-batches would be stale after an update
        settings |= {"fp8": "hybrid", "fp8_recipe": config.fp8, "disable_parameter_transpose_cache": True}
    if deterministic:
        settings["cross_entropy_loss_fusion"] = False  # has no deterministic form
    if platform.transformer_engine:
        settings["apply_rope_fusion"] = True  # without it each segment is rotated on its own, and the host waits for it
    else:
        settings |= dict.fromkeys(_FUSIONS_OF_TRANSFORMER_ENGINE, False)
        settings |= {
            "transformer_impl": "local",
            "cross_entropy_fusion_impl": "native",
            "transformer_layer_spec": local_layer_spec,
        }
    return settings


def _of_pipeline(config: TrainerConfig) -> dict[str, Any]:
    virtual = config.parallel.virtual_pipeline
    return {
        "tensor_model_parallel_size": config.parallel.tensor,
        "pipeline_model_parallel_size": config.parallel.pipeline,
        "virtual_pipeline_model_parallel_size": virtual,
        "num_layers_in_first_pipeline_stage": config.parallel.layers_first_stage,
        "num_layers_in_last_pipeline_stage": config.parallel.layers_last_stage,
        "variable_seq_lengths": config.parallel.pipeline > 1,  # flat batches differ in length
        # of two ranks each is the next and the previous of the other: batched exchanges of both directions get mixed up
        "batch_p2p_comm": virtual is None,
        "overlap_p2p_comm": virtual is not None,
    }


def provider_settings(provider: GPTModelProvider, rope: Mapping[str, Any], config: ExpertsConfig) -> dict[str, Any]:
    """Further fields, which depend on the model, and which megatron-bridge leaves open or sets unasked. `rope` are the
    parameters of its positions, as transformers reads them. Raises InputError: the model has no experts, but
    [train.experts] is set."""
    settings: dict[str, Any] = {}
    if provider.position_embedding_type == "yarn":  # with the defaults of transformers
        settings["yarn_beta_fast"] = rope.get("beta_fast") or 32
        settings["yarn_beta_slow"] = rope.get("beta_slow") or 1
        settings["yarn_correction_range_round_to_int"] = rope.get("truncate", True)
    if provider.num_moe_experts:
        settings["moe_aux_loss_coeff"] = config.auxiliary_loss
        settings["moe_router_bias_update_rate"] = config.bias_update_rate
        if config.replay:
            settings["moe_router_fusion"] = False  # it would choose and weigh experts in one kernel
    elif config != ExpertsConfig():
        raise InputError(f"the model has no experts, but [train.experts] is {config}: leave that section out")
    return settings


def buffer_settings(config: MegatronConfig) -> DistributedDataParallelConfig:
    """Settings of gradient buffers: storage, reduction, division between data-parallel ranks."""
    return DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
        check_for_nan_in_grad=False,  # the trainer checks loss and norm itself and raises a typed error
    )


def uses_graphs(config: TrainerConfig, platform: Platform, deterministic: bool, has_experts: bool) -> bool:
    """True if micro-batches may be recorded as CUDA graphs. Raises InputError if wanted graphs are prevented."""
    megatron = config.megatron
    in_the_way = {
        "the model runs without Transformer Engine": not platform.transformer_engine,
        "device.deterministic": deterministic,
        "its experts are dispatched by the host": has_experts,
        f"the layout {config.parallel}": config.parallel.world_size > config.parallel.data,
        f"train.megatron.recompute = {megatron.recompute!r}": megatron.recompute != "none",
        "train.megatron.overlap_grad_reduce": megatron.overlap_grad_reduce,
        "train.megatron.overlap_param_gather": megatron.overlap_param_gather,
        "train.lora": config.lora is not None,
        "train.fp8": config.fp8 is not None,
        "train.policy.loss is code of your own": config.policy.loss.runs_user_code,
    }
    reasons = [reason for reason, applies in in_the_way.items() if applies]
    if megatron.cuda_graphs and reasons:
        fact = "train.megatron.cuda_graphs = true, but micro-batches cannot be recorded"
        raise InputError(f"{fact}: {', '.join(reasons)}")
    return megatron.cuda_graphs is not False and not reasons
