"""What was asked for and what the live model does: a setting that did not take effect stops the trainer."""

from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig

from storage.errors import InputError
from trainer_core.config import MegatronConfig


def check_effective(provider: TransformerConfig, wanted: dict[str, Any]) -> None:
    """Compare Megatron's model configuration, which modules share, with the settings; building a model may change it.

    Raises:
        InputError: if a field differs.
    """
    for name, value in wanted.items():
        _compare(name, value, vars(provider)[name])


def check_overlap(ddp: DistributedDataParallel, config: MegatronConfig) -> None:
    """Compare what the gradient buffers and the modules' hooks do with the settings.

    Raises:
        InputError: if one differs.
    """
    reduced = {group.ddp_config.overlap_grad_reduce for group in ddp.bucket_groups}
    _compare("overlap_grad_reduce", {config.overlap_grad_reduce}, reduced)
    hooked = set(ddp.remove_forward_pre_hook_handles) == set(ddp.module.modules())
    _compare("overlap_param_gather", config.overlap_param_gather, hooked)


def check_recompute(ddp: DistributedDataParallel, config: MegatronConfig) -> None:
    """Compare what the live blocks and attentions recompute with the settings.

    Raises:
        InputError: if one differs.
    """
    modules = list(ddp.modules())
    layers = {block.config.recompute_granularity == "full" for block in modules if isinstance(block, TransformerBlock)}
    attention = {module.checkpoint_core_attention for module in modules if isinstance(module, Attention)}
    _compare("recompute of layers", {config.recompute == "layers"}, layers)
    _compare("recompute of attention", {config.recompute == "attention"}, attention)


def _compare(name: str, wanted: object, held: object) -> None:
    if held != wanted:
        raise InputError(f"{name} is to be {wanted!r}, but Megatron runs with {held!r}: choose what this model can do")
