"""Configuration of a trainer. Imports no torch, so that it can be checked before anything heavy starts."""

import operator
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from storage.errors import InputError
from trainer_core.effects import no_effect
from trainer_core.frozen import Frozen
from trainer_core.lora import LoraConfig
from trainer_core.marks import RUNTIME, decides
from trainer_core.objectives.objective_config import PolicyConfig
from trainer_core.optimizer_config import CriticConfig, OptimizerConfig

Recompute = Literal["none", "attention", "layers"]
Attention = Literal["auto", "flash", "fused", "unfused"]
Precision = Literal["fp32", "bf16"]
Device = Literal["cpu", "cuda"]


class ParallelConfig(Frozen):
    """Layout of the model over ranks. A runtime setting: it may change between two iterations of a run."""

    tensor: int = Field(default=1, ge=1)
    """Ranks over which each weight matrix is split (TP)."""
    pipeline: int = Field(default=1, ge=1)
    """Ranks over which the layers are split (PP)."""
    data: int = Field(default=1, ge=1)
    """Replicas, each of which takes a share of the batch (DP)."""
    context: int = Field(default=1, ge=1)
    """Ranks over which each sequence is divided (CP), for sequences that are too long for one."""

    virtual_pipeline: int | None = Field(default=None, ge=2)
    """Parts in which each rank of a pipeline holds its layers, which shortens its idle time (VPP); by default one."""
    layers_first_stage: int | None = Field(default=None, ge=1)
    """Layers of the first rank of `pipeline`, which also has the embedding; by default as many as the others."""
    layers_last_stage: int | None = Field(default=None, ge=1)
    """Layers of the last rank of `pipeline`, which also has the output layer; by default as many as the others."""

    sequence: bool = False
    """Divide the positions between the ranks of `tensor` (SP) between their matrices. Models with experts need it."""
    expert: int = Field(default=1, ge=1)
    """Ranks over which the experts of a layer are divided (EP); taken from those of `tensor`, `context` and `data`."""
    expert_tensor: int | None = Field(default=None, ge=1)
    """Ranks over which the matrices of an expert are split (ETP); by default as many as `tensor`."""

    @model_validator(mode="after")
    def _divisions_fit_the_ranks(self) -> "ParallelConfig":
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence = true divides positions between the ranks of tensor, but tensor is 1")
        shards = self.expert * (self.expert_tensor or self.tensor)
        if self.tensor * self.replicas % shards:
            raise ValueError(
                f"expert {self.expert} times expert_tensor {self.expert_tensor or self.tensor} is {shards}, which does "
                f"not divide the {self.tensor * self.replicas} ranks of tensor, context and data"
            )
        for name in ("virtual_pipeline", "layers_first_stage", "layers_last_stage"):
            if (value := dict(self)[name]) is not None and self.pipeline == 1:
                raise ValueError(f"{name} {value} needs a pipeline of at least 2 ranks")
        return self

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.replicas

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights, share their optimizer state, and add up their gradients."""
        return self.context * self.data

    @property
    def ranks(self) -> "ParallelConfig":
        """The layout of the ranks alone, however they divide layers, sequences, positions and experts."""
        return ParallelConfig(tensor=self.tensor, pipeline=self.pipeline, data=self.replicas)

    @property
    def rounds(self) -> int:
        """The number of micro-batches of a pass is a multiple of this (megatron-core's interleaved schedule)."""
        return self.pipeline if self.virtual_pipeline else 1

    def __str__(self) -> str:
        virtual = f" vpp{self.virtual_pipeline}" if self.virtual_pipeline else ""
        context = f" cp{self.context}" if self.context > 1 else ""
        experts = f" ep{self.expert}" if self.expert > 1 else ""
        if self.expert_tensor is not None:
            experts += f" etp{self.expert_tensor}"
        if self.layers_first_stage or self.layers_last_stage:
            virtual += f" with {self.layers_first_stage or 'even'}..{self.layers_last_stage or 'even'} layers"
        return f"tp{self.tensor}{' sp' * self.sequence} pp{self.pipeline}{virtual}{context} dp{self.data}{experts}"


FP8_POSITIONS = 16
"""Divides each dimension of a multiplication in FP8, also the positions of a micro-batch, over which the backward pass
sums (Transformer Engine's `assert_dim_for_fp8_exec`)."""


class MegatronConfig(Frozen):
    """Megatron's settings of a step. No result depends on them. One that does not take effect stops the trainer."""

    overlap_grad_reduce: bool = False
    """Reduce gradients over data-parallel ranks while the backward pass computes further ones."""
    overlap_param_gather: bool = False
    """Gather updated weights from data-parallel ranks during the next forward pass, instead of after the update."""
    recompute: Recompute = "none"
    """Activations that the backward pass computes again instead of keeping them: none, attention's, whole layers'."""
    attention: Attention = "auto"
    """Attention kernels of Transformer Engine that may be used; without it there is no choice."""
    gradient_accumulation_fusion: bool | None = None
    """Linear layers add weight gradients to the gradient buffers themselves. Needs Transformer Engine, with which it is
    the default, or Apex."""
    output_gradient_accumulation_fusion: bool = False
    """The same for the output layer, which is Megatron's own and needs Apex."""
    cuda_graphs: bool | None = None
    """Launch each micro-batch of a pass as one CUDA graph where that is seen to take less time: small models compute
    faster than a host launches kernels. They are filled up to one shape. Needs Transformer Engine and a dense model
    that is not divided over ranks (`data` replicas may be several), without recomputation, overlap or
    `device.deterministic`; there it is the default."""


class ExpertsConfig(Frozen):
    """Training of the routers of a mixture of experts beside the objective; megatron-bridge would switch both on."""

    auxiliary_loss: float = Field(default=0.0, ge=0)
    """Coefficient of the auxiliary loss that balances the load of experts. It is taken within each micro-batch: with it
    `train.parallel` and `micro_batch_*` change results."""
    bias_update_rate: float = Field(default=0.0, ge=0)
    """Step by which each update moves the bias with which a router prefers experts with less load."""
    replay: Annotated[bool, decides("rollout", "train")] = Field(default=False, exclude_if=operator.not_)
    """Give each token the experts by which the engine sampled it (routing replay, R3), instead of those that the
    trainer's routers would choose: they differ where two experts are almost equally likely."""


class MemoryConfig(Frozen):
    """Device memory that the trainer frees while the engines sample, until it needs it. No result depends on it."""

    offload_parameters: bool = False
    """Keep the weights in page-locked host memory meanwhile, frozen ones too."""
    drop_gradients: bool = False
    """Free the gradient buffers, which hold nothing between two updates."""
    offload_optimizer: bool = False
    """Keep moments, and fp32 main weights where they are not the weights themselves, in page-locked host memory."""

    @property
    def in_use(self) -> bool:
        return self.offload_parameters or self.drop_gradients or self.offload_optimizer


class TrainerConfig(Frozen):
    """Everything a trainer rank needs to know besides its place and its model."""

    parallel: Annotated[ParallelConfig, RUNTIME] = ParallelConfig()
    """Layout of the ranks."""
    optimizer: OptimizerConfig
    """Optimizer of the policy phase."""
    policy: Annotated[PolicyConfig, decides("select", "train")] = PolicyConfig()
    """Objective of the policy phase."""
    megatron: Annotated[MegatronConfig, RUNTIME] = MegatronConfig()
    """Megatron's settings of a step."""
    memory: Annotated[MemoryConfig, RUNTIME] = MemoryConfig()
    """Device memory that the trainer frees while the engines sample."""
    experts: ExpertsConfig = ExpertsConfig()
    """Settings of a model with experts."""
    # a run without it does not have the key in its meaning
    lora: Annotated[LoraConfig | None, decides("prepare", "train")] = Field(default=None, exclude_if=operator.not_)
    """Train low-rank adapters beside frozen weights (LoRA) instead of the weights."""
    critic: CriticConfig | None = Field(default=None, exclude_if=operator.not_)
    """Model that estimates the return of each token, for `policy.advantage.type = "gae"` (PPO)."""
    micro_batch_tokens: Annotated[int, RUNTIME] = Field(default=8192, ge=1)
    """Most tokens per rank in one micro-batch; a sequence of which a rank holds more goes alone. With
    `parallel.context` each rank holds its part of every sequence, so that a micro-batch has as many times more."""
    micro_batch_size: Annotated[int | None, RUNTIME] = Field(default=None, ge=1)
    """Most sequences per DP rank in one micro-batch; if not given, as many as fit."""
    precision: Precision = "fp32"
    """Type of weights and activations; bf16 keeps fp32 main weights, moments and gradients."""
    fp8: Literal["tensorwise"] | None = Field(default=None, exclude_if=operator.not_)
    """`tensorwise`: linear layers of the blocks multiply FP8 numbers; each tensor gets its scale anew, from its largest
    magnitude (Transformer Engine's current scaling). Weights, moments and gradients stay as with bf16, which it needs.
    Recipes that keep a history of scales are not offered: it would be part of the train state."""
    max_length: Annotated[int, decides("select", "train")] = Field(ge=2)
    """Longest sequence, prompt and response together, in tokens."""
    seed: int = 0
    """Seeds the ranks' random generators and the shuffling of mini-batches; in a run `run.seed` takes its place."""

    @property
    def of_teacher(self) -> "TrainerConfig":
        """The same for a teacher beside the policy: what concerns updates alone is not its, nor FP8."""
        megatron = MegatronConfig(attention=self.megatron.attention, gradient_accumulation_fusion=False)
        return self.model_copy(update={"lora": None, "fp8": None, "experts": ExpertsConfig(), "megatron": megatron})

    @model_validator(mode="after")
    def _frozen_weights_have_no_gradients(self) -> "TrainerConfig":
        megatron = self.megatron
        if self.lora and (megatron.gradient_accumulation_fusion or megatron.output_gradient_accumulation_fusion):
            raise ValueError("with lora weights have no gradients: leave megatron.gradient_accumulation_fusion out")
        return self

    @model_validator(mode="after")
    def _fp8_is_computed_beside_bf16(self) -> "TrainerConfig":
        parallel = self.parallel
        refused = {
            f'precision = "{self.precision}": set it to "bf16"': self.precision != "bf16",
            "lora, with which it has not been run: leave one of them out": self.lora is not None,
            "a critic, with which it has not been run: leave one of them out": self.critic is not None,
            "parallel.tensor, parallel.context or parallel.expert above 1, with which it has not been run: set them to "
            "1": max(parallel.tensor, parallel.context, parallel.expert) > 1,
        }
        if self.fp8 and (found := next((why for why, holds in refused.items() if holds), None)):
            raise ValueError(f'fp8 = "{self.fp8}" does not go with {found}')
        return self

    @model_validator(mode="after")
    def _a_critic_is_of_use(self) -> "TrainerConfig":
        table = "loss" if self.policy.loss.trains_critic else "advantage"
        kind = f'policy.{table}.type = "{dict(self.policy)[table].type}"'
        if self.policy.needs_values and self.critic is None:
            raise ValueError(f"{kind} needs the values of a critic: add the table critic, or choose another type")
        if self.critic is not None and not self.policy.needs_values:
            repair = 'set policy.advantage.type = "gae", with a loss and rewards that use it, or "reward_model" as loss'
            raise ValueError(f"critic has no effect with {kind}: leave the table out, or {repair}")
        if self.critic is not None and self.policy.loss.trains_critic and (found := self.critic.of_returns):
            raise ValueError(f"critic.{found} has no effect with {kind}: leave it out")
        if self.policy.loss.trains_critic and (given := self.experts.model_dump(exclude_defaults=True)):
            name = next(iter(given))
            default = type(self.experts).model_fields[name].default
            raise ValueError(no_effect(f"experts.{name}", f"with {kind}, whose model has routers of its own", default))
        if self.critic is not None and self.lora is not None:
            raise ValueError("a critic trains all its weights, which lora is to save: leave critic or lora out")
        return self


class RankSpec(Frozen):
    """The place of one trainer process in its group."""

    rank: int = Field(ge=0)
    """Global rank."""
    world_size: int = Field(ge=1)
    """Number of ranks; the product of the layout."""
    local_rank: int = Field(default=0, ge=0)
    """Index of this rank's device on its host."""
    store: str
    """URL of the rendezvous, the same for all ranks. A path is that of a file in a folder that they all see, which must
    not exist yet."""
    device: Device = "cpu"
    """Kind of device to train on."""
    deterministic: bool = False
    """On CUDA, use only kernels whose results do not depend on timing; on CPU all kernels are like that."""
    timeout_seconds: int = Field(default=600, ge=1)
    """Longest wait for the other ranks in a collective."""

    @property
    def chooses_kernels(self) -> bool:
        """True if torch and Megatron must be told to be deterministic. On CPU that would change the order of sums."""
        return self.deterministic and self.device == "cuda"


def stage_layers(parallel: ParallelConfig, layers: int) -> list[int] | None:
    """Layers of each rank of the pipeline, or None if `layers` cannot be divided as asked."""
    first, last = parallel.layers_first_stage, parallel.layers_last_stage
    given = (first or 0) + (last or 0)
    others = parallel.pipeline - (first is not None) - (last is not None)
    each, rest = divmod(layers - given, others) if others else (1, layers - given)
    if each < 1 or rest:
        return None
    found = [each] * parallel.pipeline
    if first is not None:
        found[0] = first
    if last is not None:
        found[-1] = last
    return found


def check_stages(parallel: ParallelConfig, layers: int) -> None:
    """Refuse a division of the model's `layers` over the pipeline that is not possible. Raises InputError, which
    names the numbers that fit."""
    stages = stage_layers(parallel, layers)
    if stages is None:
        keys = {"layers_first_stage", "layers_last_stage", "pipeline"}
        asked = {name: value for name, value in parallel.model_dump(include=keys).items() if value is not None}
        key = [*asked][-1]  # in the order of the fields
        fitting = [n for n in range(1, layers + 1) if stage_layers(parallel.model_copy(update={key: n}), layers)]
        named = " and ".join(f"train.parallel.{name} = {value}" for name, value in asked.items())
        advice = f"choose one of {fitting} for train.parallel.{key}" if fitting else "give the first stage fewer layers"
        raise InputError(f"the model's layers ({layers}) cannot be divided by {named}: {advice}")
    virtual = parallel.virtual_pipeline or 1
    for stage in {number for number in stages if number % virtual}:
        fitting = [n for n in range(2, stage + 1) if all(number % n == 0 for number in stages)]
        raise InputError(
            f"the model's layers of a rank ({stage}) cannot be divided by train.parallel.virtual_pipeline = {virtual}: "
            f"{f'choose one of {fitting}, or ' if fitting else ''}leave it out"
        )


CLASSIFIER, CAUSAL = "ForSequenceClassification", "ForCausalLM"
"""Ends of the names of architectures: a model with a row for each label, and the same one with an output layer."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # names of one number in config.json


def check_layout(parallel: ParallelConfig, model: Mapping[str, Any]) -> None:
    """Refuse a layout that Megatron would refuse, or that would leave ranks without work. `model` is the content of the
    model's config.json. Raises InputError, which names the key, the model's size and the numbers that fit."""
    heads = int(model["num_attention_heads"])
    check_predictions(model, "the model")
    check_stages(parallel, int(model["num_hidden_layers"]))
    divisors = {
        "attention heads": heads,
        "key-value heads": int(model.get("num_key_value_heads") or heads),
        "intermediate size": int(model["intermediate_size"]),
    }
    for what, amount in divisors.items():
        if amount % parallel.tensor:
            fitting = [number for number in range(1, min(amount, 64) + 1) if amount % number == 0]
            fact = f"the model's {what} ({amount}) cannot be divided by train.parallel.tensor = {parallel.tensor}"
            raise InputError(f"{fact}: choose one of {fitting}")
    check_experts(parallel, experts_of(model))


def check_predictions(model: Mapping[str, Any], where: str) -> None:
    """Refuse a model with layers that predict further tokens: nothing trains them, so engines would get stale ones.
    `model` is the content of its config.json, `where` its name in messages. Raises InputError with the number of such
    layers."""
    if model.get("num_nextn_predict_layers"):
        raise InputError(
            f"{where}: num_nextn_predict_layers = {model['num_nextn_predict_layers']} in config.json: layers that "
            "predict further tokens are not trained. Set it to 0 and leave their weights out"
        )


def is_classifier(model: Mapping[str, Any]) -> bool:
    """True if config.json is that of a sequence classifier: layers of a language model, and a row for each label."""
    named = model.get("architectures")
    return isinstance(named, list) and bool(named) and str(named[0]).endswith(CLASSIFIER)


def decoder_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json that differ in the language model with the layers of a sequence classifier; none for
    other models."""
    named = model["architectures"][0].removesuffix(CLASSIFIER) if is_classifier(model) else ""
    return {"architectures": [f"{named}{CAUSAL}"]} if named else {}


def experts_of(model: Mapping[str, Any]) -> int:
    """Experts of a layer, by the content of config.json; 0 if all layers are dense."""
    return next((int(model[name]) for name in _EXPERTS if model.get(name)), 0)


def check_experts(parallel: ParallelConfig, experts: int) -> None:
    """Refuse a layout that does not fit the `experts` of a layer, 0 if all layers are dense. Raises InputError."""
    if experts and parallel.tensor > 1 and not parallel.sequence:
        raise InputError(
            f"the model has experts, and train.parallel.tensor is {parallel.tensor}: set train.parallel.sequence = "
            "true, without which every tensor-parallel rank would route every token"
        )
    if parallel.expert > 1 and (not experts or experts % parallel.expert):
        fact = f"the model's experts ({experts or 'none'}) cannot be divided"
        raise InputError(f"{fact} by train.parallel.expert = {parallel.expert}")


def attention_of(config: MegatronConfig, transformer_engine: bool, deterministic: bool) -> Attention:
    """The kernels that may be used where the configuration leaves it open; `deterministic` ones do not depend on
    timing."""
    # cuDNN's deterministic backward pass over segments asks for far more memory than there is: 512 GiB for 256
    # segments of some 20 positions on an H100
    return "unfused" if deterministic and transformer_engine and config.attention == "auto" else config.attention


def check_context(config: TrainerConfig, transformer_engine: bool, deterministic: bool) -> None:
    """Refuse context parallelism where Transformer Engine has no kernel for it. Raises InputError."""
    if config.parallel.context == 1 or not transformer_engine:
        return
    if config.precision != "bf16":
        raise InputError(
            f"train.parallel.context is {config.parallel.context} and train.precision {config.precision!r}, but "
            'Transformer Engine divides sequences in bf16 alone: set train.precision = "bf16" or the other to 1'
        )
    if attention_of(config.megatron, transformer_engine, deterministic) == "unfused":
        chosen = config.megatron.attention == "unfused"
        raise InputError(
            f"train.parallel.context is {config.parallel.context}, which Transformer Engine's unfused attention cannot "
            f"compute, and {'train.megatron.attention' if chosen else 'device.deterministic'} asks for that one: set "
            f"train.parallel.context = 1, or {'choose another' if chosen else 'device.deterministic = false'}"
        )
