"""Megatron's distributed AdamW with its learning-rate schedule, and an update that refuses non-finite gradients."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from storage.errors import NumericsError
from trainer_core.config import OptimizerConfig
from trainer_core.model.effective import OPTIMIZER, read_back
from trainer_core.model.model import Model


class Optimizer:
    """Moments and schedule of one phase of training; each phase has its own."""

    def __init__(self, model: Model, config: OptimizerConfig, key: str = "train.optimizer") -> None:
        """Begin with the live weights; `key` names the table of the configuration in messages. Collective."""
        self.config, self._residence, self._key = config, model.residence, key
        self._residence.resume("parameters")  # of which main weights are copies
        settings = _megatron_config(config, model.dtype)
        self.megatron = get_megatron_optimizer(settings, list(model.chunks), use_gloo_process_groups=False)
        self.schedule = _schedule(self.megatron, config)
        model.config.grad_scale_func = self.megatron.scale_loss
        self.effective = read_back(OPTIMIZER, config, self.parts)  # settings as read from the live optimizers
        self._residence.serve(self._tensors)
        self._residence.accumulating = False  # gradients of an earlier pass are for no update of this optimizer

    @property
    def parts(self) -> list[Any]:
        """Megatron's distributed optimizers, each with its own parameters: usually one, two with experts."""
        return vars(self.megatron).get("chained_optimizers", [self.megatron])

    @property
    def updates(self) -> int:
        return self.schedule.num_steps

    @property
    def learning_rate(self) -> float:
        return float(self.megatron.param_groups[0]["lr"]) if self.updates else 0.0

    @property
    def remedy(self) -> str:
        """Repair of an update whose numbers are not finite."""
        return f"lower {self._key}.learning_rate ({self.config.learning_rate}) or look at the samples of this iteration"

    def update(self) -> float:
        """Apply the gradients in the model's buffers; returns their global norm before clipping. Collective. Raises
        NumericsError: the norm is not finite; weights and moments are then unchanged."""
        self._residence.resume()
        self._residence.accumulating = False
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        if not math.isfinite(norm):
            raise NumericsError(
                f"the gradient norm is {norm} at update {self.updates + 1}; the update was not applied: {self.remedy}"
            )
        self.schedule.step(1)
        self.megatron.step()
        return norm

    def allocate(self) -> None:
        """Create the moments before the first update, as saving and loading expect, or bring them back."""
        self._residence.resume("optimizer")
        for part in self.parts:
            if not part.optimizer.state:
                part.init_state_fn(part.optimizer, part.config)
            if isinstance(part.optimizer, torch.optim.AdamW):
                for state in part.optimizer.state.values():
                    state.setdefault("step", torch.tensor(0.0))

    def resume(self, updates: int) -> None:
        """Set the schedule and Adam's counters of a fresh optimizer as after `updates`. torch's AdamW counts per
        parameter, in place, so that each has its own counter; Transformer Engine's counts per group."""
        self.schedule.step(updates)
        for part in self.parts:
            if isinstance(part.optimizer, torch.optim.AdamW):
                for state in part.optimizer.state.values():
                    state["step"] = torch.tensor(float(updates))
            elif updates:
                for group in part.optimizer.param_groups:
                    group["step"] = updates

    def _tensors(self) -> Iterator[torch.Tensor]:
        for part in self.parts:
            for group in part.optimizer.param_groups:
                yield from group["params"]
            for state in part.optimizer.state.values():
                yield from (values for name, values in state.items() if name != "step" and torch.is_tensor(values))


def _megatron_config(config: OptimizerConfig, dtype: torch.dtype) -> MegatronOptimizerConfig:
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.learning_rate,
        min_lr=config.min_learning_rate,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )


def _schedule(optimizer: MegatronOptimizer, config: OptimizerConfig) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.learning_rate,
        min_lr=config.min_learning_rate,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=config.decay_steps,
        lr_decay_style=config.decay,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=config.decay_steps,
        wd_incr_style="constant",
    )
