"""Configuration of a trainer. Imports no torch, so that it can be checked before anything heavy starts."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from storage.errors import InputError
from trainer_core.frozen import Frozen
from trainer_core.policy import PolicyConfig

Recompute = Literal["none", "attention", "layers"]
Precision = Literal["fp32", "bf16"]
Device = Literal["cpu", "cuda"]


class ParallelConfig(Frozen):
    """How the model is distributed over ranks. A runtime setting: it may change between two iterations of a run."""

    tensor: int = Field(default=1, ge=1)
    """Ranks over which each weight matrix is split (TP)."""
    pipeline: int = Field(default=1, ge=1)
    """Ranks over which the layers are split (PP)."""
    data: int = Field(default=1, ge=1)
    """Replicas, each of which takes a share of the batch (DP)."""

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        return f"tp{self.tensor} pp{self.pipeline} dp{self.data}"


class OptimizerConfig(Frozen):
    """AdamW and its learning-rate schedule; one step of the schedule is one optimizer update."""

    learning_rate: float = Field(ge=0)
    """Peak learning rate, reached at the end of the warm-up."""
    min_learning_rate: float = Field(default=0.0, ge=0)
    """Learning rate at and after `decay_steps`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises linearly from 0."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning-rate decay after the warm-up."""
    decay_steps: int = Field(default=1_000_000, ge=1)
    """Updates, warm-up included, until the decay ends."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of matrices; norms and biases are not decayed."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 disables clipping."""

    @model_validator(mode="after")
    def _schedule_is_possible(self) -> "OptimizerConfig":
        if self.warmup_steps >= self.decay_steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} must be below decay_steps {self.decay_steps}")
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(f"min_learning_rate {self.min_learning_rate} is above learning_rate {self.learning_rate}")
        return self


class MegatronConfig(Frozen):
    """How Megatron runs a step. No result depends on it. What does not take effect stops the trainer at its start."""

    overlap_grad_reduce: bool = False
    """Reduce gradients over data-parallel ranks while the backward pass computes further ones."""
    overlap_param_gather: bool = False
    """Gather updated weights from data-parallel ranks during the next forward pass, instead of after the update."""
    recompute: Recompute = "none"
    """Activations that the backward pass computes again instead of keeping them: none, attention's, whole layers'."""


class TrainerConfig(Frozen):
    """Everything a trainer rank needs to know besides its place and its model."""

    parallel: ParallelConfig = ParallelConfig()
    """Layout of the ranks."""
    optimizer: OptimizerConfig
    """Optimizer of the policy phase."""
    policy: PolicyConfig = PolicyConfig()
    """Objective of the policy phase."""
    megatron: MegatronConfig = MegatronConfig()
    """How Megatron runs a step."""
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Most tokens per DP rank in one micro-batch; a sequence that is longer goes alone."""
    micro_batch_size: int | None = Field(default=None, ge=1)
    """Most sequences per DP rank in one micro-batch; if not given, as many as fit."""
    precision: Precision = "fp32"
    """Type of weights and activations; bf16 keeps fp32 main weights, moments and gradients."""
    max_length: int = Field(ge=2)
    """Longest sequence, prompt and response together, in tokens."""
    seed: int = 0
    """Seeds the ranks' random generators and the shuffling of mini-batches; in a run `run.seed` takes its place."""


class RankSpec(Frozen):
    """The place of one trainer process in its group."""

    rank: int = Field(ge=0)
    """Global rank."""
    world_size: int = Field(ge=1)
    """Number of ranks; the product of the layout."""
    local_rank: int = Field(default=0, ge=0)
    """Index of this rank's device on its host."""
    store: str
    """Path of the rendezvous file, the same for all ranks, in a folder they all see; the file must not exist yet."""
    device: Device = "cpu"
    """Kind of device to train on."""
    deterministic: bool = False
    """On CUDA, use only kernels whose results do not depend on timing; on CPU all kernels are like that."""
    timeout_seconds: int = Field(default=600, ge=1)
    """Longest wait for the other ranks in a collective."""

    @property
    def chooses_kernels(self) -> bool:
        """Whether torch and Megatron must be told to be deterministic. On CPU that would change the order of sums."""
        return self.deterministic and self.device == "cuda"


def check_layout(parallel: ParallelConfig, model: Mapping[str, Any]) -> None:
    """Refuse a layout that does not fit the model.

    `model` is the content of the model's config.json (Hugging Face names). Raises InputError.
    """
    heads = int(model["num_attention_heads"])
    divisors = {
        ("layers", "pipeline"): (int(model["num_hidden_layers"]), parallel.pipeline),
        ("attention heads", "tensor"): (heads, parallel.tensor),
        ("key-value heads", "tensor"): (int(model.get("num_key_value_heads") or heads), parallel.tensor),
        ("intermediate size", "tensor"): (int(model["intermediate_size"]), parallel.tensor),
    }
    for (what, field), (amount, ranks) in divisors.items():
        if amount % ranks:
            raise InputError(
                f"the model's {what} ({amount}) cannot be divided by parallel.{field} = {ranks}; "
                f"choose one of {[n for n in range(1, amount + 1) if amount % n == 0]} for parallel.{field}"
            )
