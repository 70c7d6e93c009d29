"""Configuration of LoRA adapters, and the modules of a model that may have some. Imports no torch."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import Field, field_validator

from storage.errors import InputError
from trainer_core.frozen import Frozen

LIVE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM's layers have places; an adapter of another one gets the next, filled up with zeros."""

_PEFT = "base_model.model."
_DENSE = ("gate_proj", "up_proj", "down_proj")


class LoraConfig(Frozen):
    """Low-rank adapters, which are trained beside the model's frozen weights. Exports get the sum, and engines
    by `engine.adapter`."""

    rank: int = Field(ge=1)
    """Rank of the product that is added to a matrix. Any rank fits every layout."""
    alpha: float = Field(default=32.0, gt=0)
    """The product is multiplied by `alpha / rank`."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", *_DENSE)
    """Matrices that get an adapter, by their names in Hugging Face's model: the last part, or several with dots, as
    `shared_experts.up_proj`. Those of routed experts cannot have one."""

    @field_validator("targets")
    @classmethod
    def _some(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        if not targets or "" in targets:
            raise ValueError("an empty target names no matrix: name some, or leave targets out")
        return targets


def factor_name(module: str, kind: str) -> str:
    """Name that peft gives to the factor `A` or `B` of a module, which has its Hugging Face name."""
    return f"{_PEFT}{module}.lora_{kind}.weight"


def module_of(factor: str) -> str:
    """The module of a factor that `factor_name` has named."""
    return factor.removeprefix(_PEFT).rpartition(".lora_")[0]


def is_target(name: str, targets: Iterable[str]) -> bool:
    """True if a module's name is a target, or ends with one after a dot."""
    return any(f".{name}".endswith(f".{target}") for target in targets)


def check_targets(config: LoraConfig | None, model: Mapping[str, Any], experts: int) -> None:
    """Refuse targets that are not matrices of the model, whose config.json is `model`, or are those of its `experts`.
    Without adapters nothing is checked. Raises InputError."""
    possible = [*_of_attention(model), *_of_layers(model, experts)]
    routed = [f"mlp.experts.{name}" for name in _DENSE] if experts else []
    for target in config.targets if config else ():
        given = f"train.lora.targets has {json.dumps(target)}"
        if any(is_target(name, [target]) for name in routed):
            raise InputError(
                f"{given}, which is also a matrix of routed experts, and those cannot have adapters: use names of "
                f"{', '.join(possible)}"
            )
        if not any(is_target(name, [target]) for name in possible):
            raise InputError(f"{given}, not a matrix of the model's layers: use names of {', '.join(possible)}")


def _of_attention(model: Mapping[str, Any]) -> list[str]:
    if not model.get("kv_lora_rank"):
        return [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    queries = ("q_a_proj", "q_b_proj") if model.get("q_lora_rank") else ("q_proj",)
    return [f"self_attn.{name}" for name in (*queries, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")]


def _of_layers(model: Mapping[str, Any], experts: int) -> list[str]:
    dense = not experts or bool(model.get("first_k_dense_replace"))
    shared = bool(experts and model.get("n_shared_experts"))
    prefixes = [*["mlp"] * dense, *["mlp.shared_experts"] * shared]
    return [f"{prefix}.{name}" for prefix in prefixes for name in _DENSE]
