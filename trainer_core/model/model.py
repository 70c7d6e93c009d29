"""A Megatron model built from a Hugging Face directory, distributed over the ranks."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams

from storage.errors import InputError
from trainer_core.config import MegatronConfig, Recompute, TrainerConfig, check_layout
from trainer_core.model.effective import check_effective, check_overlap, check_recompute
from trainer_core.platform.local_spec import local_layer_spec
from trainer_core.platform.platform import Platform, quietly

# Vocabulary rows are padded to a multiple of this at every tensor-parallel size, so that a state fits every layout.
_VOCABULARY_MULTIPLE = 128

_RECOMPUTE: dict[Recompute, dict[str, Any]] = {
    "none": {"recompute_granularity": None},
    "attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "layers": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}

_FUSIONS_OF_TRANSFORMER_ENGINE = (
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "persist_layer_norm",
    "apply_rope_fusion",
    "cross_entropy_loss_fusion",
)


@dataclass(frozen=True)
class Model:
    """This rank's part of the model, wrapped for data-parallel gradients."""

    bridge: AutoBridge
    """Maps Hugging Face names to Megatron's."""
    chunks: tuple[DistributedDataParallel, ...]
    """The modules to run, each with the buffers in which its gradients are accumulated: one, or with virtual pipeline
    stages one for each, in the order of their layers."""
    config: GPTModelProvider
    """Megatron's model configuration, shared by all modules."""
    vocab_size: int
    """Rows of the vocabulary without padding."""
    dtype: torch.dtype
    """Type of the weights and of what pipeline stages exchange."""
    transformer_engine: bool
    """Whether layers are built from Transformer Engine's modules."""

    def forward(
        self,
        module: torch.nn.Module,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        packing: PackedSeqParams,
        predicting: torch.Tensor,
    ) -> torch.Tensor:
        """Run this rank's part of the model over one flat batch.

        Args:
            module: the model, as a schedule gives it.
            tokens: (1, T) int64.
            positions: (1, T) int64, place of each token in its segment.
            packing: where segments begin and end.
            predicting: (R,) int64, the positions whose logits are needed.

        Returns:
            On the last pipeline stage logits (R, V/tp) in the model's own precision; before it hidden states (T, 1, H).
        """
        # the wrapper of a model in low precision would copy all logits to float32
        own_precision = {} if self.dtype == torch.float32 else {"fp32_output": False}
        return module(
            tokens,
            positions,
            None,  # the attention masks by segments
            packed_seq_params=packing,
            output_processor=_predicted_logits,
            output_processor_context=predicting,
            **own_precision,
        )

    @contextlib.contextmanager
    def weights(self) -> Iterator[None]:
        """Everything but Megatron's own passes reads and writes weights and buffers in here. Collective.

        With `overlap_param_gather` a replica holds only its own share of the last update until the next forward pass;
        here the rest is gathered first, and nothing is gathered while the block lasts.
        """
        overlapped = [chunk for chunk in self.chunks if chunk.ddp_config.overlap_param_gather]
        for chunk in overlapped:
            chunk.disable_forward_pre_hook(param_sync=True)
        try:
            yield
        finally:
            for chunk in overlapped:
                chunk.enable_forward_pre_hook()

    def zero_gradients(self) -> None:
        """Begin a pass: no gradients, and none reduced yet."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def sources[B](self, batches: Sequence[B]) -> Iterator[B] | list[Iterator[B]]:
        """The micro-batches of a pass as a schedule takes them: each chunk goes through all of them."""
        return iter(batches) if len(self.chunks) == 1 else [iter(batches) for _ in self.chunks]

    def tensors(self) -> list[torch.Tensor]:
        """All parameters and buffers of this rank, in one order; use them inside `weights`."""
        # the wrapper's `buffers` are those of gradients
        return [tensor for module in self.modules for tensor in (*module.parameters(), *module.buffers())]

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The modules below the gradient wrappers."""
        return [chunk.module for chunk in self.chunks]


def _predicted_logits(
    *,
    hidden_states: torch.Tensor,
    output_layer: torch.nn.Module,
    output_weight: torch.Tensor | None,
    scale_logits: Callable[[torch.Tensor], torch.Tensor],
    context: torch.Tensor,
    **_: object,
) -> torch.Tensor:
    """What megatron-core calls instead of its own output step: (T, 1, H) -> (R, V/tp), without the other positions."""
    logits, _ = output_layer(hidden_states.index_select(0, context), weight=output_weight)  # (R, 1, V/tp)
    return scale_logits(logits).squeeze(1)


def read_model_config(model_dir: str) -> dict[str, Any]:
    """Content of the model's config.json.

    Raises:
        InputError: if the directory holds no such file, or it is not JSON.
    """
    path = Path(model_dir, "config.json")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"no model at {model_dir}: {error}; give a Hugging Face directory") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not JSON: {error}") from error


def build_model(model_dir: str, config: TrainerConfig, platform: Platform, deterministic: bool) -> Model:
    """Build the model; its weights are set later. Collective.

    `deterministic` makes Megatron choose kernels whose results do not depend on timing.

    Raises:
        InputError: if there is no model, its architecture is not supported, or it does not fit the layout.
    """
    hf_config = read_model_config(model_dir)
    check_layout(config.parallel, hf_config)
    with quietly():
        bridge = _bridge(model_dir)
        provider = bridge.to_megatron_provider(load_weights=False)
        wanted = _settings(config, platform, deterministic) | _of_experts(provider)
        _configure(provider, wanted)
        chunks = provider.provide_distributed_model(
            wrap_with_ddp=False, use_cpu_initialization=provider.use_cpu_initialization
        )
    wrapped = _wrap(provider, chunks, config.megatron)
    check_effective(provider, wanted)
    for chunk in wrapped:
        check_overlap(chunk, config.megatron)
        check_recompute(chunk, config.megatron)
    vocab_size = int(hf_config["vocab_size"])
    return Model(bridge, wrapped, provider, vocab_size, _dtype(config), platform.transformer_engine)


def _bridge(model_dir: str) -> AutoBridge:
    try:
        return AutoBridge.from_hf_pretrained(model_dir)
    except ValueError as error:
        raise InputError(f"megatron-bridge cannot read the model at {model_dir}: {error}") from error


def _dtype(config: TrainerConfig) -> torch.dtype:
    return torch.bfloat16 if config.precision == "bf16" else torch.float32


def _settings(config: TrainerConfig, platform: Platform, deterministic: bool) -> dict[str, Any]:
    """Every field of Megatron's model configuration that this trainer sets."""
    dtype = _dtype(config)
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": config.parallel.tensor,
        "pipeline_model_parallel_size": config.parallel.pipeline,
        "virtual_pipeline_model_parallel_size": config.parallel.virtual_pipeline,
        # between two ranks that are each other's next and previous, batched exchanges of the two directions are mixed up
        "batch_p2p_comm": config.parallel.virtual_pipeline is None,
        "overlap_p2p_comm": config.parallel.virtual_pipeline is not None,
        "sequence_parallel": False,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": False,
        "seq_length": config.max_length,
        "variable_seq_lengths": config.parallel.pipeline > 1,  # flat batches differ in length
        "make_vocab_size_divisible_by": max(1, _VOCABULARY_MULTIPLE // config.parallel.tensor),
        "moe_token_dispatcher_type": "alltoall",  # with experts; no other takes batches that differ in length
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        # even with Transformer Engine the output layer is Megatron's own, and its fusion needs Apex
        "gradient_accumulation_fusion": False,
        "perform_initialization": False,  # weights are always imported or loaded
        "use_cpu_initialization": platform.device.type == "cpu",
        # the sum over tokens is divided once, by Megatron, by the tokens of the whole batch
        "calculate_per_token_loss": True,
        "deterministic_mode": deterministic,
    }
    settings |= _RECOMPUTE[config.megatron.recompute]
    if deterministic:
        settings["cross_entropy_loss_fusion"] = False  # has no deterministic form
    if platform.transformer_engine:
        settings["apply_rope_fusion"] = True  # without it each segment is rotated on its own, and the host waits for it
    else:
        settings |= dict.fromkeys(_FUSIONS_OF_TRANSFORMER_ENGINE, False)
        settings |= {"cross_entropy_fusion_impl": "native", "transformer_layer_spec": local_layer_spec}
    return settings


def _of_experts(provider: GPTModelProvider) -> dict[str, Any]:
    """What megatron-bridge switches on without being asked, for models with experts: it stays off."""
    if not provider.num_moe_experts:
        return {}
    return {"moe_aux_loss_coeff": 0.0, "moe_router_bias_update_rate": 0.0}


def _configure(provider: GPTModelProvider, wanted: dict[str, Any]) -> None:
    """Apply the settings; refuse a result that differs, because `finalize` may silently override them."""
    if provider.num_moe_experts and "transformer_layer_spec" in wanted:
        raise InputError(
            "the model has experts, whose layers need Transformer Engine; install it, or use a dense model"
        )
    for name, value in wanted.items():
        if name not in type(provider).__dataclass_fields__:
            raise InputError(f"Megatron's model configuration has no field {name}; use the pinned megatron-core")
        setattr(provider, name, value)
    try:
        provider.finalize()
    except (ValueError, AssertionError) as error:  # what the checks before the start did not foresee
        raise InputError(
            f"Megatron refuses the model, its layout or its settings: {error}. Change [train.parallel] or "
            "[train.megatron]"
        ) from error
    check_effective(provider, wanted)


def _wrap(
    provider: GPTModelProvider, modules: Sequence[torch.nn.Module], config: MegatronConfig
) -> tuple[DistributedDataParallel, ...]:
    """Give the modules gradient buffers, and the schedules their end-of-batch callbacks; done once per process."""
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
        check_for_nan_in_grad=False,  # the trainer checks loss and norm itself and raises a typed error
    )
    chunks = tuple(DistributedDataParallel(provider, settings, module) for module in modules)
    provider.finalize_model_grads_func = finalize_model_grads
    if config.overlap_grad_reduce:  # only the last micro-batch of a pass starts the reduction
        functions = [chunk.no_sync for chunk in chunks]
        provider.no_sync_func = functions if len(functions) > 1 else functions[0]  # what each schedule takes
    return chunks
