"""Comparison of the settings with the live parts: a setting that did not take effect stops the trainer.

A row names a setting and reads it from the modules, buffers and optimizers that were built. Megatron's configuration
objects are compared as well, but they hold requests, not effects."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
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
Effective = dict[str, Value]  # settings that took effect, by name, in plain JSON types

_TE_ATTENTION = {"deterministic", "qkv_format"}  # what Transformer Engine's attention holds
_TENSORWISE: dict[str, Value] = {  # Transformer Engine's recipe of that name
    "recipe": "Float8CurrentScaling", "fp8_format": "HYBRID", "use_power_2_scales": False, "backward_override": None,
}  # fmt: skip
_VARIABLES = {  # those of the environment, by what they change in it
    "backward_override": "NVTE_BACKWARD_OVERRIDE", "use_power_2_scales": "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
}  # fmt: skip
_FUSED = ("fuse_wgrad_accumulation", "gradient_accumulation_fusion")  # Transformer Engine's name and Megatron's


@dataclass(frozen=True)
class Built:
    """Live parts of a model on this rank."""

    chunks: Sequence[DistributedDataParallel]  # modules in their gradient buffers
    layers: int  # layers of the whole model

    @property
    def modules(self) -> list[torch.nn.Module]:
        return [module for chunk in self.chunks for module in chunk.module.modules()]

    @property
    def outputs(self) -> list[torch.nn.Module]:
        """Output layer; empty on ranks that do not have it."""
        named = (pair for chunk in self.chunks for pair in chunk.named_modules())
        return [module for name, module in named if name.rpartition(".")[2] == "output_layer"]

    @property
    def linears(self) -> list[torch.nn.Module]:
        outputs = self.outputs
        return [one for one in self.modules if one not in outputs and not vars(one).keys().isdisjoint(_FUSED)]


@dataclass(frozen=True)
class Setting[Config, Live]:
    """A setting: the wanted value, and the values that the live parts hold."""

    name: str
    held: Callable[[Live], set[Value]]  # different values of all parts that have the setting
    wanted: Callable[[Config], Value] | None = None  # by default the key of the configuration that the name spells
    everywhere: bool = True  # each rank has such a part

    def value(self, config: Config) -> Value:
        read = self.wanted or attrgetter(self.name.removeprefix("optimizer."))
        return read(config)


def _of_experts(
    name: str, read: Callable[[Any], Value], wanted: Callable[[TrainerConfig], Value] | None = None
) -> Setting[TrainerConfig, Built]:
    return Setting(name, lambda live: {read(one) for one in _experts(live)}, wanted, everywhere=False)


MODEL: tuple[Setting[TrainerConfig, Built], ...] = (
    Setting("parallel.tensor", lambda live: _tensor_ranks(live)),
    Setting("parallel.pipeline", lambda live: {block.pg_collection.pp.size() for block in _of(live, TransformerBlock)}),
    Setting(
        "parallel.virtual_pipeline",
        lambda live: {len(live.chunks)},
        lambda config: config.parallel.virtual_pipeline or 1,
    ),
    Setting(
        "parallel.data times context",
        lambda live: {buffer.data_parallel_world_size for buffer in _buffers(live)},
        lambda config: config.parallel.replicas,
    ),
    Setting("parallel.context", lambda live: {_context(module) for module in _of(live, Attention)}),
    Setting("precision", lambda live: {_precision(one.dtype) for one in _weights(live)}),
    Setting("fp8", lambda live: {_fp8(block.config) for block in _of(live, TransformerBlock)}),
    Setting(
        "precision of gradients",
        lambda live: {_precision(one.main_grad.dtype) for one in _weights(live)},  # pyright: ignore[reportAttributeAccessIssue]
        lambda _: "fp32",
    ),
    Setting("parallel.sequence", lambda live: _values(_linears(live), "sequence_parallel")),
    Setting("hidden_dropout", lambda live: _values(_of(live, TransformerLayer), "hidden_dropout"), lambda _: 0.0),
    Setting("distributed optimizer", lambda live: _of_groups(live, "use_distributed_optimizer"), lambda _: True),
    Setting(
        "division of gradients by replicas",
        lambda live: {buffer.gradient_scaling_factor for buffer in _buffers(live)},
        lambda _: 1.0,
    ),
    Setting("megatron.overlap_grad_reduce", lambda live: _of_groups(live, "overlap_grad_reduce")),
    Setting(
        "megatron.overlap_param_gather",
        lambda live: {set(one.remove_forward_pre_hook_handles) == set(one.module.modules()) for one in live.chunks},
    ),
    Setting("megatron.recompute", lambda live: _recomputed(live)),
    Setting("megatron.attention", lambda live: _attention(live)),
    Setting("megatron.gradient_accumulation_fusion", lambda live: _values(live.linears, *_FUSED)),
    Setting(
        "megatron.output_gradient_accumulation_fusion", lambda live: _values(live.outputs, *_FUSED), everywhere=False
    ),
    _of_experts("parallel.expert", lambda one: one.ep_group.size()),
    Setting(
        "parallel.expert_tensor",
        lambda live: _tensor_ranks(live, of_experts=True),
        lambda config: config.parallel.expert_tensor or config.parallel.tensor,
        everywhere=False,
    ),
    _of_experts(
        "experts: dispatcher", lambda one: type(one.token_dispatcher).__name__, lambda _: "MoEAlltoAllTokenDispatcher"
    ),
    _of_experts("experts.auxiliary_loss", lambda one: one.config.moe_aux_loss_coeff),
    _of_experts("experts.bias_update_rate", lambda one: one.config.moe_router_bias_update_rate),
    _of_experts("experts.replay", lambda one: one.router.router_replay is not None),
)


def _of_parameters(
    name: str, read: Callable[[dict[str, Any]], Value], has: Callable[[dict[str, Any]], object] = bool
) -> Setting[OptimizerConfig, Sequence[Any]]:
    """A setting of the groups of parameters of the innermost optimizers; norms and biases have no weight decay."""
    return Setting(
        f"optimizer.{name}",
        lambda parts: {read(group) for part in parts for group in part.optimizer.param_groups if has(group)},
        everywhere=False,
    )


OPTIMIZER: tuple[Setting[OptimizerConfig, Sequence[Any]], ...] = (
    _of_parameters("learning_rate", lambda group: group["max_lr"]),
    _of_parameters("min_learning_rate", lambda group: group["min_lr"]),
    _of_parameters("beta1", lambda group: group["betas"][0]),
    _of_parameters("beta2", lambda group: group["betas"][1]),
    _of_parameters("eps", lambda group: group["eps"]),
    _of_parameters("weight_decay", lambda group: group["weight_decay"], lambda group: group["wd_mult"]),
    Setting("optimizer.clip_grad", lambda parts: {one.config.clip_grad for one in parts}),
    Setting(
        "distributed optimizer", lambda parts: {isinstance(one, DistributedOptimizer) for one in parts}, lambda _: True
    ),
)


def read_back[Config, Live](
    rows: Iterable[Setting[Config, Live]], config: Config, live: Live, everywhere: bool = True
) -> Effective:
    """Settings of the live parts, without those that no part of this rank has. Raises InputError if one differs, or is
    in no part although each rank has such a part; a model without gradients lacks some, and is not `everywhere`."""
    found: Effective = {}
    for row in rows:
        held, wanted = row.held(live), row.value(config)
        if held or (row.everywhere and everywhere):
            compare(row.name, wanted, next(iter(held)) if len(held) == 1 else sorted(held, key=repr))
            found[row.name] = wanted
    return found


def read_layers(parallel: ParallelConfig, live: Built) -> Effective:
    """Number of layers that this rank holds. Raises InputError: it differs from its share of the model's."""
    blocks = _of(live, TransformerBlock)
    stages, rank = stage_layers(parallel, live.layers), blocks[0].pg_collection.pp.rank()
    held = sum(len(block.layers) for block in blocks)
    compare("layers of this rank", stages[rank] if stages else None, held)
    return {"layers of this rank": held}


def check_fp8(live: Built) -> None:
    """Compare the numbers that each linear layer of the blocks has multiplied in its last pass with `tensorwise`.
    Raises InputError, which names the layer: it computed in higher precision, or by another recipe."""
    linears = {id(one) for one in live.linears}
    for name, module in (pair for chunk in live.chunks for pair in chunk.module.named_modules()):
        if id(module) in linears and (odd := _odd_numbers(vars(module))):
            shown = ", ".join(f"{one} {held!r} in place of {_TENSORWISE[one]!r}" for one, held in odd.items())
            unset = [variable for one, variable in _VARIABLES.items() if one in odd]
            repair = f"unset {', '.join(unset)}" if unset else "use the pinned Transformer Engine and megatron-core"
            fact = f'train.fp8 = "tensorwise", but {name.removeprefix("module.")} computed with {shown}'
            raise InputError(f"{fact}: {repair}, or leave train.fp8 out")


def _odd_numbers(own: dict[str, Any]) -> dict[str, Value]:
    """Differences to `tensorwise` in what Transformer Engine keeps of a layer's last forward pass, which decides about
    its backward pass too."""
    if not own.get("fp8"):
        return {"recipe": "none: higher precision"}
    recipe = own["fp8_meta"]["recipe"]
    held = {**vars(recipe), "recipe": type(recipe).__name__, "fp8_format": recipe.fp8_format.name}
    return {name: held[name] for name, wanted in _TENSORWISE.items() if held[name] != wanted}


def check_effective(provider: TransformerConfig, wanted: dict[str, Any]) -> None:
    """Compare Megatron's model configuration, which modules share, with the settings; building a model may change it.
    Raises InputError: a field differs."""
    for name, value in wanted.items():
        compare(name, value, vars(provider)[name])


def compare(name: str, wanted: object, held: object) -> None:
    """Refuse a setting that did not take effect. Raises InputError, which names both."""
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


def _fp8(config: TransformerConfig) -> str | None:
    """The recipe by which a block's linear layers compute in FP8."""
    return str(config.fp8_recipe) if config.fp8 else None


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


def _context(module: Attention) -> int:
    core = vars(module.core_attention)
    # Transformer Engine's holds its group, or none if there is one rank
    group = core["cp_group"] if _TE_ATTENTION & core.keys() else module.pg_collection.cp
    return group.size() if group is not None else 1


def _buffers(live: Built) -> list[Any]:
    """Gradient buffers; `buffers` of the wrapper is not torch's method of that name."""
    return [buffer for chunk in live.chunks for buffer in cast(list[Any], chunk.buffers)]


def _of_groups(live: Built, name: str) -> set[Value]:
    return {vars(group.ddp_config)[name] for chunk in live.chunks for group in chunk.bucket_groups}


def _recomputed(live: Built) -> set[Value]:
    whole = {block.config.recompute_granularity == "full" for block in _of(live, TransformerBlock)}
    attention = {module.checkpoint_core_attention for module in _of(live, Attention)}
    names = {(True, False): "layers", (False, True): "attention", (False, False): "none"}
    return {names.get((one, other), "layers and attention") for one in whole for other in attention}


def _attention(live: Built) -> set[Value]:
    """Permitted kernels. Without Transformer Engine there is no choice."""
    cores = [cast(Any, module.core_attention) for module in _of(live, Attention)]
    return {core.config.attention_backend.name if _TE_ATTENTION & vars(core).keys() else "auto" for core in cores}


def _experts(live: Built) -> list[Any]:
    return [module for module in live.modules if "token_dispatcher" in vars(module)]
