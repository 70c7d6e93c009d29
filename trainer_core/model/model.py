"""A Megatron model built from a Hugging Face directory, distributed over the ranks."""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion.utils import unwrap_model
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import get_attr_wrapped_model

from storage.errors import InputError, NumericsError, RatchetError
from trainer_core.config import (
    MegatronConfig,
    MemoryConfig,
    TrainerConfig,
    attention_of,
    check_context,
    check_layout,
    decoder_of,
    experts_of,
)
from trainer_core.lora import check_targets
from trainer_core.model.adapters import Adapters, adapt
from trainer_core.model.effective import MODEL, Built, Effective, check_effective, check_fp8, read_back, read_layers
from trainer_core.model.memory import Residence
from trainer_core.model.micro_batch import MicroBatch
from trainer_core.model.routers import Balance, Replay, prepare_routers
from trainer_core.model.settings import buffer_settings, dtype_of, model_settings, provider_settings, uses_graphs
from trainer_core.model.values import end_with_values, heads_aside
from trainer_core.platform.platform import Platform, quietly
from trainer_core.progress import told

Access = Literal["readable", "writable"]
Kind = Literal["policy", "frozen", "critic"]
_SETTINGS: dict[Kind, dict[str, Any]] = {
    "policy": {}, "frozen": {}, "critic": {"share_embeddings_and_output_weights": False},
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """This rank's part of the model, wrapped for data-parallel gradients."""

    bridge: AutoBridge  # maps Hugging Face names to Megatron's
    chunks: tuple[DistributedDataParallel, ...]
    """The modules to run, each with the buffers in which its gradients are accumulated: one, or with virtual pipeline
    stages one for each, in the order of their layers."""
    config: GPTModelProvider  # Megatron's model configuration, shared by all modules
    vocab_size: int  # rows of the vocabulary without padding
    vocabulary: frozenset[str]
    """Hugging Face names of the weights that have a row for each token, and are padded with rows of zeros."""
    dtype: torch.dtype  # type of the weights and of what pipeline stages exchange
    transformer_engine: bool  # layers are built from Transformer Engine's modules
    effective: Effective  # settings as read from the live modules and buffers
    graphs: bool  # micro-batches of one shape may be launched as one CUDA graph each
    residence: Residence  # place of parameters, gradients and optimizer state
    balance: Balance | None  # auxiliary loss of routers, if they have one
    replay: Replay | None  # what gives routers the experts of the engine, if they are to have them
    adapters: Adapters  # what is trained if the weights are frozen

    def forward(self, module: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
        """Run this rank's part of the model over one flat batch of T positions, R of which predict a response token.
        Returns on the last pipeline stage logits (R, V/tp) in the model's own precision; before it hidden states (T, 1,
        H), or this rank's share of the positions."""
        if self.replay is not None:
            self.replay.begin(module, batch.routes)
        filling = batch.filling
        if filling is not None and self.config.sequence_parallel and not get_attr_wrapped_model(module, "pre_process"):
            # behind the first stage of a pipeline, of this rank's positions alone
            group = cast(dist.ProcessGroup, parallel_state.get_tensor_model_parallel_group())
            filling = filling.chunk(group.size(), dim=1)[group.rank()]  # (1, T) -> (1, T / tp)
        # the wrapper of a model in low precision would copy all logits to float32
        own_precision = {} if self.dtype == torch.float32 else {"fp32_output": False}
        return module(
            batch.tokens,
            batch.positions,
            None,  # the attention masks by segments
            packed_seq_params=batch.packing,
            padding_mask=filling,
            output_processor=_gathered_logits if self.config.sequence_parallel else _predicted_logits,
            output_processor_context=batch.predicting,
            **own_precision,
        )

    @contextlib.contextmanager
    def weights(self, access: Access) -> Iterator[None]:
        """Block in which all code but Megatron's own passes reads and writes weights and buffers. Collective. With
        `overlap_param_gather` a replica holds only its own share of the last update until the next forward pass: the
        block gathers the rest first, and nothing is gathered inside it. The biases of routers, with which Megatron
        computes in float32, are float32 here, also if a cast of the whole module has changed them. Offloaded weights
        come back. Raises RatchetError: weights or buffers were changed where they may only be read."""
        self.residence.resume("parameters")
        overlapped = [chunk for chunk in self.chunks if chunk.ddp_config.overlap_param_gather]
        for chunk in overlapped:
            chunk.disable_forward_pre_hook(param_sync=True)
        if self.dtype != torch.float32 and self.config.num_moe_experts:
            for part in (part for chunk in self.modules for part in chunk.modules()):
                if isinstance(part, TopKRouter):
                    part._maintain_float32_expert_bias()
        before = self._versions()
        try:
            yield
        finally:
            for chunk in overlapped:
                chunk.enable_forward_pre_hook()
        if access == "readable" and self._versions() != before:
            raise RatchetError(
                "weights or buffers were changed by what may only read them, so the model is not the one that was "
                "trained: start again from the last state, and report this"
            )

    def release(self, wanted: MemoryConfig) -> int:
        """Free device memory until it is needed again; returns the bytes. Collective; raises as `Residence.release`."""
        gathering = wanted.offload_parameters and self.residence.has_parameters
        with self.weights("readable") if gathering else contextlib.nullcontext():
            return self.residence.release(wanted)

    @contextlib.contextmanager
    def buffers_kept_on_failure(self) -> Iterator[None]:
        """Restore the buffers if the block raises NumericsError: passes change some, such as the biases of routers."""
        buffers = [buffer for module in self.modules for buffer in module.buffers()]
        before = [buffer.clone() for buffer in buffers]
        try:
            yield
        except NumericsError:
            self.residence.accumulating = False  # these gradients are never used
            with torch.no_grad():
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)
            raise

    def _versions(self) -> list[int]:
        """torch's counts of in-place changes of each tensor."""
        return [tensor._version for tensor in self.tensors()]

    @contextlib.contextmanager
    def unreduced(self) -> Iterator[None]:
        """Block in which passes leave sums over micro-batches, neither divided by tokens nor reduced over replicas."""
        reduction, self.config.finalize_model_grads_func = self.config.finalize_model_grads_func, None
        try:
            yield
        finally:
            self.config.finalize_model_grads_func = reduction

    def check_numbers(self) -> None:
        """Compare the numbers that a pass has multiplied with `train.fp8`. Raises InputError, which names the layer."""
        if self.config.fp8:
            check_fp8(Built(self.chunks, self.config.num_layers))

    def reduce(self, tokens: torch.Tensor) -> None:
        """Divide and reduce the gradients of a pass in `unreduced`, over this replica's () `tokens`. Collective."""
        finalize_model_grads(list(self.chunks), tokens)

    def zero_gradients(self) -> None:
        """Begin a pass that accumulates gradients, with empty buffers."""
        self.residence.resume("gradients")
        self.residence.accumulating = True
        if self.replay is not None:
            self.replay.forget()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def sources[B](self, batches: Sequence[B]) -> Iterator[B] | list[Iterator[B]]:
        """Micro-batches of a pass as a schedule takes them: each chunk goes through all; the first reports progress."""
        first = told(batches, "micro-batches")
        return first if len(self.chunks) == 1 else [first, *(iter(batches) for _ in self.chunks[1:])]

    def is_frozen(self, tensor: torch.Tensor) -> bool:
        """True for a weight that adapters leave as the model came: it is not part of a state."""
        return bool(self.adapters) and isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad

    def tensors(self) -> list[torch.Tensor]:
        """All parameters and buffers of this rank, in one order; use them inside `weights`."""
        # the wrapper's `buffers` are those of gradients
        own = [
            tensor
            for module in self.modules
            for part in module.modules()
            for held in (part._parameters, part._buffers)
            if held
            for tensor in held.values()
        ]
        return list({id(tensor): tensor for tensor in own if tensor is not None}.values())

    @property
    def modules(self) -> list[torch.nn.Module]:
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
    """Output step in place of megatron-core's own: (T, 1, H) -> (R, V/tp), of the predicting positions alone."""
    logits, _ = output_layer(hidden_states.index_select(0, context), weight=output_weight)  # (R, 1, V/tp)
    return scale_logits(logits).squeeze(1)


def _gathered_logits(*, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
    """Output step where tensor-parallel ranks hold a share of the positions each: (T/tp, 1, H)."""
    # the output layer sums the gradient over ranks, so each takes its share of it
    whole = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)  # (T, 1, H)
    return _predicted_logits(hidden_states=whole, **given)


def read_model_config(model_dir: str) -> dict[str, Any]:
    """Content of the model's config.json. Raises InputError: the directory holds no such file, or it is not JSON."""
    path = Path(model_dir, "config.json")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"no model at {model_dir}: {error}; give a Hugging Face directory") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not JSON: {error}") from error


def read_weights(model: Model) -> None:
    """Read the weights of the model's Hugging Face directory. A critic has the values of a sequence classifier, or else
    0. Collective."""
    given = cast(Any, model.bridge.hf_pretrained).state
    with model.weights("writable"), quietly(), heads_aside(model.modules, given):
        model.bridge.load_hf_weights(list(model.chunks))  # pyright: ignore[reportArgumentType]


def build_model(
    model_dir: str, config: TrainerConfig, platform: Platform, deterministic: bool, kind: Kind = "policy"
) -> Model:
    """Build the model; its weights are set later. Collective. `deterministic` makes Megatron choose kernels whose
    results do not depend on timing. A `frozen` model has no gradients, and a `critic` gives a number for each position
    instead of logits. Raises InputError: there is no model, its architecture is not supported, or it does not fit the
    layout."""
    hf_config = read_model_config(model_dir)
    check_layout(config.parallel, hf_config)
    check_context(config, platform.transformer_engine, deterministic)
    check_targets(config.lora, hf_config, experts_of(hf_config))
    config = _decided(config, platform, deterministic)
    with quietly():
        bridge = _bridge(model_dir, **(decoder_of(hf_config) if kind == "critic" else {}))
        provider = bridge.to_megatron_provider(load_weights=False)
        wanted = model_settings(config, platform, deterministic)
        rope = vars(bridge.hf_pretrained.config).get("rope_parameters") or {}
        wanted |= provider_settings(provider, rope, config.experts) | _SETTINGS[kind]
        _configure(provider, wanted)
        with _refusals():
            on_cpu = provider.use_cpu_initialization
            modules = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=on_cpu)
        adapters = _adapted(modules, bridge, provider, config, kind)
    chunks = _wrap(provider, modules, config.megatron)
    built = Built(chunks, provider.num_layers)
    fuse_accumulation(built, config.megatron)
    for layer in cast(list[Any], built.outputs) if config.parallel.sequence else []:
        # predicting positions are known by places in the whole batch, so it is gathered
        layer.sequence_parallel, layer.allreduce_dgrad = False, True
    check_effective(provider, wanted)
    return Model(
        bridge=bridge,
        chunks=chunks,
        config=provider,
        vocab_size=int(hf_config["vocab_size"]),
        vocabulary=_vocabulary(bridge),
        dtype=dtype_of(config),
        transformer_engine=platform.transformer_engine,
        replay=Replay(chunks, provider) if config.experts.replay else None,  # read back as one of the settings
        effective=read_back(MODEL, config, built, everywhere=kind != "frozen") | read_layers(config.parallel, built),
        graphs=uses_graphs(config, platform, deterministic, has_experts=bool(provider.num_moe_experts)),
        residence=Residence(chunks, platform.device),
        balance=prepare_routers(built.modules, balanced=config.experts.auxiliary_loss > 0),
        adapters=adapters,
    )


def _decided(config: TrainerConfig, platform: Platform, deterministic: bool) -> TrainerConfig:
    decided: dict[str, Any] = {"attention": attention_of(config.megatron, platform.transformer_engine, deterministic)}
    if config.megatron.gradient_accumulation_fusion is None:
        decided["gradient_accumulation_fusion"] = platform.transformer_engine and config.lora is None
    return config.model_copy(update={"megatron": config.megatron.model_copy(update=decided)})


def _adapted(
    modules: list[Any], bridge: AutoBridge, provider: GPTModelProvider, config: TrainerConfig, kind: Kind
) -> Adapters:
    """Give the model what its kind has in place of Megatron's own, and freeze it under adapters, if it has some."""
    for module in modules if kind == "frozen" else []:
        module.requires_grad_(False)
    if kind == "critic":
        end_with_values(modules, provider.hidden_size)
    if config.lora is None:
        return {}
    for module in unwrap_model(modules):
        if config.megatron.recompute == "layers" and "embedding" in module._modules:
            # recomputed layers have gradients only if their input has one
            module.embedding.register_forward_hook(lambda _module, _given, hidden: hidden.requires_grad_())
    return adapt(modules, bridge._model_bridge.mapping_registry(), provider, config.lora)  # pyright: ignore[reportPrivateUsage]


def _bridge(model_dir: str, **named: Any) -> AutoBridge:
    """Megatron-bridge's view of the directory, with these keys of config.json replaced."""
    try:
        return AutoBridge.from_hf_pretrained(model_dir, **named)
    except ValueError as error:
        raise InputError(f"megatron-bridge cannot read the model at {model_dir}: {error}") from error


def _vocabulary(bridge: AutoBridge) -> frozenset[str]:
    registry = bridge._model_bridge.mapping_registry()  # pyright: ignore[reportPrivateUsage]
    mappings = map(registry.megatron_to_hf_lookup, ("embedding.word_embeddings.weight", "output_layer.weight"))
    return frozenset(str(mapping.hf_param) for mapping in mappings if mapping is not None)


def _configure(provider: GPTModelProvider, wanted: dict[str, Any]) -> None:
    """Apply the settings; refuse a result that differs, because `finalize` may silently override them."""
    for name, value in wanted.items():
        if name not in type(provider).__dataclass_fields__:
            raise InputError(f"Megatron's model configuration has no field {name}; use the pinned megatron-core")
        setattr(provider, name, value)
    with _refusals():
        provider.finalize()
    check_effective(provider, wanted)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Give a refusal of Megatron that no earlier check has caught the repair."""
    try:
        yield
    except (ValueError, AssertionError) as error:
        fact = f"Megatron refuses the model, its layout or its settings: {error}"
        raise InputError(f"{fact}. Change [train.parallel] or [train.megatron]") from error


def _wrap(
    provider: GPTModelProvider, modules: Iterable[torch.nn.Module], config: MegatronConfig
) -> tuple[DistributedDataParallel, ...]:
    """Wrap the modules in gradient buffers and set the callbacks of the schedules; once per process."""
    settings = buffer_settings(config)
    chunks = tuple(DistributedDataParallel(provider, settings, module) for module in modules)
    provider.finalize_model_grads_func = finalize_model_grads
    if config.overlap_grad_reduce:  # only the last micro-batch of a pass starts the reduction
        functions: Any = [chunk.no_sync for chunk in chunks]  # what the interleaved schedule takes
        provider.no_sync_func = functions if len(functions) > 1 else functions[0]
    return chunks


_OURS, _THEIRS = "gradient_accumulation_fusion", "fuse_wgrad_accumulation"


def fuse_accumulation(built: Built, config: MegatronConfig) -> None:
    """Set the fusion of linear layers as configured. Raises InputError: a layer has no kernel for it."""
    outputs = built.outputs
    for module in built.modules:
        output = module in outputs
        if config.output_gradient_accumulation_fusion if output else config.gradient_accumulation_fusion:
            _fuse(module, "output_" if output else "")


def _fuse(module: torch.nn.Module, kind: str) -> None:
    own = vars(module)
    if _THEIRS in own:
        own[_THEIRS] = True
    elif _OURS in own:
        if not layers._grad_accum_fusion_available:  # pyright: ignore[reportPrivateUsage]
            raise InputError(
                f"megatron.{kind}gradient_accumulation_fusion is to be True, but {type(module).__name__} runs with "
                "False: without Transformer Engine, and in the output layer, it needs Apex's "
                "fused_weight_gradient_mlp_cuda; install it, or leave the setting out"
            )
        own[_OURS] = True
