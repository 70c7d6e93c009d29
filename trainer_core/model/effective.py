"""What was asked for and what the live parts do: a setting that did not take effect stops the trainer.

One table for the model, its gradient buffers and the optimizer. A row says what is wanted and how to ask the modules,
buffers and optimizers that were built; Megatron's configuration objects are compared as well, but they say only what
was asked of Megatron.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from storage.errors import InputError
from trainer_core.config import OptimizerConfig, ParallelConfig, TrainerConfig, stage_layers

Value = str | int | float | bool | None
Effective = dict[str, Value]
"""Settings that took effect, by name, in plain JSON types."""

_TE_ATTENTION = {"deterministic", "qkv_format"}  # what Transformer Engine's attention holds
_FUSED = ("fuse_wgrad_accumulation", "gradient_accumulation_fusion")  # Transformer Engine's name and Megatron's


@dataclass(frozen=True)
class Built:
    """The live parts of a model on this rank."""

    chunks: Sequence[DistributedDataParallel]
    """Modules in their gradient buffers."""
    layers: int
    """Of the whole model."""

    @property
    def modules(self) -> list[torch.nn.Module]:
        """All modules, without the wrappers of the chunks."""
        return [module for chunk in self.chunks for module in chunk.module.modules()]

    @property
    def outputs(self) -> list[torch.nn.Module]:
        """The output layer; on ranks that do not have it, none."""
        named = (pair for chunk in self.chunks for pair in chunk.named_modules())
        return [module for name, module in named if name.rpartition(".")[2] == "output_layer"]

    @property
    def linears(self) -> list[torch.nn.Module]:
        """Linear layers but the output layer."""
        outputs = self.outputs
        return [one for one in self.modules if one not in outputs and not vars(one).keys().isdisjoint(_FUSED)]


@dataclass(frozen=True)
class Row[Config, Live]:
    """A setting: what is wanted, and what the live parts hold."""

    name: str
    wanted: Callable[[Config], Value]
    held: Callable[[Live], set[Value]]
    """The different values of all parts that have the setting."""
    everywhere: bool = True
    """Whether each rank has such a part."""


MODEL: tuple[Row[TrainerConfig, Built], ...] = (
    Row("parallel.tensor", lambda config: config.parallel.tensor, lambda live: _tensor_ranks(live)),
    Row("parallel.pipeline", lambda config: config.parallel.pipeline, lambda live: _stages(live)),
    Row("parallel.virtual_pipeline", lambda config: config.parallel.virtual_pipeline or 1, lambda live: _chunks(live)),
    Row("parallel.data times context", lambda config: config.parallel.replicas, lambda live: _replicas(live)),
    Row("parallel.context", lambda config: config.parallel.context, lambda live: _context(live)),
    Row("precision", lambda config: config.precision, lambda live: {_precision(one.dtype) for one in _weights(live)}),
    Row("precision of gradients", lambda _: "fp32", lambda live: {_precision(one) for one in _gradients(live)}),
    Row(
        "parallel.sequence",
        lambda config: config.parallel.sequence,
        lambda live: _values(_linears(live), "sequence_parallel"),
    ),
    Row("hidden_dropout", lambda _: 0.0, lambda live: _values(_of(live, TransformerLayer), "hidden_dropout")),
    Row("distributed optimizer", lambda _: True, lambda live: _of_groups(live, "use_distributed_optimizer")),
    Row("division of gradients by replicas", lambda _: 1.0, lambda live: _divisions(live)),
    Row(
        "megatron.overlap_grad_reduce",
        lambda config: config.megatron.overlap_grad_reduce,
        lambda live: _of_groups(live, "overlap_grad_reduce"),
    ),
    Row(
        "megatron.overlap_param_gather",
        lambda config: config.megatron.overlap_param_gather,
        lambda live: {set(one.remove_forward_pre_hook_handles) == set(one.module.modules()) for one in live.chunks},
    ),
    Row("megatron.recompute", lambda config: config.megatron.recompute, lambda live: _recomputed(live)),
    Row("megatron.attention", lambda config: config.megatron.attention, lambda live: _attention(live)),
    Row(
        "megatron.gradient_accumulation_fusion",
        lambda config: config.megatron.gradient_accumulation_fusion,
        lambda live: _values(live.linears, *_FUSED),
    ),
    Row(
        "megatron.output_gradient_accumulation_fusion",
        lambda config: config.megatron.output_gradient_accumulation_fusion,
        lambda live: _values(live.outputs, *_FUSED),
        everywhere=False,
    ),
    Row(
        "parallel.expert",
        lambda config: config.parallel.expert,
        lambda live: {one.ep_group.size() for one in _experts(live)},
        everywhere=False,
    ),
    Row(
        "parallel.expert_tensor",
        lambda config: config.parallel.expert_tensor or config.parallel.tensor,
        lambda live: _tensor_ranks(live, of_experts=True),
        everywhere=False,
    ),
    Row("experts: dispatcher", lambda _: "MoEAlltoAllTokenDispatcher", lambda live: _dispatchers(live), False),
    Row(
        "experts.auxiliary_loss",
        lambda config: config.experts.auxiliary_loss,
        lambda live: {one.config.moe_aux_loss_coeff for one in _experts(live)},
        everywhere=False,
    ),
    Row(
        "experts.bias_update_rate",
        lambda config: config.experts.bias_update_rate,
        lambda live: {one.config.moe_router_bias_update_rate for one in _experts(live)},
        everywhere=False,
    ),
)

OPTIMIZER: tuple[Row[OptimizerConfig, Sequence[Any]], ...] = (
    Row("optimizer.learning_rate", lambda config: config.learning_rate, lambda parts: _groups(parts, "max_lr"), False),
    Row(
        "optimizer.min_learning_rate",
        lambda config: config.min_learning_rate,
        lambda parts: _groups(parts, "min_lr"),
        False,
    ),
    Row(
        "optimizer.beta1",
        lambda config: config.beta1,
        lambda parts: {one["betas"][0] for one in _all_groups(parts)},
        False,
    ),
    Row(
        "optimizer.beta2",
        lambda config: config.beta2,
        lambda parts: {one["betas"][1] for one in _all_groups(parts)},
        False,
    ),
    Row("optimizer.eps", lambda config: config.eps, lambda parts: _groups(parts, "eps"), False),
    Row("optimizer.weight_decay", lambda config: config.weight_decay, lambda parts: _decays(parts), everywhere=False),
    Row("optimizer.clip_grad", lambda config: config.clip_grad, lambda parts: {one.config.clip_grad for one in parts}),
    Row(
        "distributed optimizer", lambda _: True, lambda parts: {isinstance(one, DistributedOptimizer) for one in parts}
    ),
)


def read_back[Config, Live](rows: Iterable[Row[Config, Live]], config: Config, live: Live) -> Effective:
    """What the live parts hold of each setting; a setting that no part of this rank has is left out.

    Raises:
        InputError: it differs from what is wanted.
    """
    found: Effective = {}
    for row in rows:
        held, wanted = row.held(live), row.wanted(config)
        if held or row.everywhere:
            compare(row.name, wanted, next(iter(held)) if len(held) == 1 else sorted(held, key=repr))
            found[row.name] = wanted
    return found


def read_layers(parallel: ParallelConfig, live: Built) -> Effective:
    """How many layers this rank holds.

    Raises:
        InputError: it differs from its share of the model's.
    """
    blocks = _of(live, TransformerBlock)
    stages, rank = stage_layers(parallel, live.layers), cast(Any, blocks[0].pg_collection).pp.rank()
    held = sum(len(block.layers) for block in blocks)
    compare("layers of this rank", stages[rank] if stages else None, held)
    return {"layers of this rank": held}


def check_effective(provider: TransformerConfig, wanted: dict[str, Any]) -> None:
    """Compare Megatron's model configuration, which modules share, with the settings; building a model may change it.

    Raises:
        InputError: if a field differs.
    """
    for name, value in wanted.items():
        compare(name, value, vars(provider)[name])


def compare(name: str, wanted: object, held: object) -> None:
    """Refuse a setting that did not take effect.

    Raises:
        InputError: naming both values.
    """
    if held != wanted:
        raise InputError(f"{name} is to be {wanted!r}, but Megatron runs with {held!r}: choose what this model can do")


def _values(modules: Iterable[torch.nn.Module], *names: str) -> set[Value]:
    found = set()
    for module in modules:
        own = vars(module)
        found |= {own[name] for name in names if name in own}
    return found


def _of[M: torch.nn.Module](live: Built, kind: type[M]) -> list[M]:
    return [module for module in live.modules if isinstance(module, kind)]


def _weights(live: Built) -> list[torch.nn.Parameter]:
    return [parameter for chunk in live.chunks for parameter in chunk.parameters() if parameter.requires_grad]


def _gradients(live: Built) -> set[torch.dtype]:
    return {parameter.main_grad.dtype for parameter in _weights(live)}  # pyright: ignore[reportAttributeAccessIssue]


def _precision(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(dtype, str(dtype))


def _tensor_ranks(live: Built, of_experts: bool = False) -> set[Value]:
    """Ranks over which the linear layers of the blocks, or those of their experts, are split."""
    return {_ranks_of(vars(one)) for one in _linears(live, of_experts)}


def _ranks_of(own: dict[str, Any]) -> int:
    # Transformer Engine's experts say 1 where Megatron exchanges their tokens; Megatron keeps their group beside that
    if "_tp_group" in own:
        return own["_tp_group"].size()
    return own["tp_size"] if "tp_size" in own else own["tp_group"].size()


def _linears(live: Built, of_experts: bool = False) -> list[torch.nn.Module]:
    """Linear layers that tensor-parallel ranks divide; Transformer Engine repeats those that make latents on each."""
    experts = {id(module) for layer in _experts(live) for module in layer.experts.modules()}
    return [one for one in live.linears if (id(one) in experts) == of_experts and not _is_repeated(one)]


def _is_repeated(linear: torch.nn.Module) -> bool:
    divided = [vars(one).get("tensor_model_parallel") for one in linear.parameters(recurse=False)]
    return bool(divided) and all(one is False for one in divided)


def _stages(live: Built) -> set[Value]:
    return {cast(Any, block.pg_collection).pp.size() for block in _of(live, TransformerBlock)}


def _context(live: Built) -> set[Value]:
    """Ranks over which the attention goes."""
    found = set()
    for module in _of(live, Attention):
        core = vars(module.core_attention)
        # Transformer Engine's holds its group, or none if there is one rank
        group = core["cp_group"] if _TE_ATTENTION & core.keys() else cast(Any, module.pg_collection).cp
        found.add(group.size() if group is not None else 1)
    return found


def _chunks(live: Built) -> set[Value]:
    return {len(live.chunks)}


def _buffers(live: Built) -> list[Any]:
    """What gradients are accumulated in; `buffers` of the wrapper is not torch's method of that name."""
    return [buffer for chunk in live.chunks for buffer in cast(list[Any], chunk.buffers)]


def _replicas(live: Built) -> set[Value]:
    return {buffer.data_parallel_world_size for buffer in _buffers(live)}


def _divisions(live: Built) -> set[Value]:
    return {buffer.gradient_scaling_factor for buffer in _buffers(live)}


def _of_groups(live: Built, name: str) -> set[Value]:
    """What the groups of buckets, which reduce gradients, are told."""
    return {vars(group.ddp_config)[name] for chunk in live.chunks for group in chunk.bucket_groups}


def _recomputed(live: Built) -> set[Value]:
    whole = {block.config.recompute_granularity == "full" for block in _of(live, TransformerBlock)}
    attention = {module.checkpoint_core_attention for module in _of(live, Attention)}
    names = {(True, False): "layers", (False, True): "attention", (False, False): "none"}
    return {names.get((one, other), "layers and attention") for one in whole for other in attention}


def _attention(live: Built) -> set[Value]:
    """The kernels that may be used. Without Transformer Engine there is no choice."""
    cores = [cast(Any, module.core_attention) for module in _of(live, Attention)]
    return {core.config.attention_backend.name if _TE_ATTENTION & vars(core).keys() else "auto" for core in cores}


def _experts(live: Built) -> list[Any]:
    return [module for module in live.modules if "token_dispatcher" in vars(module)]


def _dispatchers(live: Built) -> set[Value]:
    return {type(module.token_dispatcher).__name__ for module in _experts(live)}


def _all_groups(parts: Sequence[Any]) -> list[dict[str, Any]]:
    """Groups of parameters of the innermost optimizers, which take the steps."""
    return [group for part in parts for group in part.optimizer.param_groups]


def _groups(parts: Sequence[Any], name: str) -> set[Value]:
    return {group[name] for group in _all_groups(parts)}


def _decays(parts: Sequence[Any]) -> set[Value]:
    """Of the matrices: norms and biases are not decayed."""
    return {group["weight_decay"] for group in _all_groups(parts) if group["wd_mult"]}
