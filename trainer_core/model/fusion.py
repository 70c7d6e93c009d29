"""Fused accumulation of weight gradients: the backward pass adds them to the gradient buffers itself.

Megatron has one setting for all its linear layers. Transformer Engine's layers have their own kernel; the output layer,
which is always Megatron's, needs that of Apex. So each kind has its own setting here, set after the modules are built.
"""

import torch
from megatron.core.tensor_parallel import layers

from storage.errors import InputError
from trainer_core.config import MegatronConfig
from trainer_core.model.effective import Built

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
