"""Checks that a model can be divided by [train.parallel] and served on the engine's platform."""

from collections.abc import Mapping
from typing import Any

from storage.errors import InputError
from trainer_core.config import Device, ParallelConfig, check_experts, check_stages, experts_of

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes with kernels in vLLM's attention on CPU."""

_NUMBERS = (
    "num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip


def check_numbers(facts: Mapping[str, Any], where: str) -> None:
    """Refuse a config.json that lacks a size, or whose sizes contradict each other.

    Raises:
        InputError: naming the key.
    """
    for key in _NUMBERS:
        value = facts.get(key)
        if not isinstance(value, int) or value < 1:
            raise InputError(f"{where}: {key} in config.json is {value!r}, but a positive number is needed: correct it")
    heads, groups = facts["num_attention_heads"], key_value_heads(facts)
    if heads % groups:
        raise InputError(
            f"{where}: num_attention_heads = {heads} in config.json is no multiple of num_key_value_heads = {groups}: "
            "correct it"
        )
    # transformers refuses such a Llama even with a head_dim
    needed = facts.get("head_dim") is None or "LlamaForCausalLM" in facts.get("architectures", ())
    if needed and facts["hidden_size"] % heads:
        raise InputError(
            f"{where}: hidden_size = {facts['hidden_size']} in config.json is no multiple of num_attention_heads = "
            f"{heads}: correct it"
        )


def check_parallel(parallel: ParallelConfig, facts: Mapping[str, Any]) -> None:
    """Refuse a layout that Megatron would refuse, or that would leave ranks without work.

    Raises:
        InputError: naming the key, the model's size and the numbers that fit.
    """
    check_stages(parallel, facts["num_hidden_layers"])
    divisors = (
        ("attention heads", "tensor", facts["num_attention_heads"], parallel.tensor),
        ("key-value heads", "tensor", key_value_heads(facts), parallel.tensor),
        ("intermediate size", "tensor", facts["intermediate_size"], parallel.tensor),
    )
    for what, key, amount, ranks in divisors:
        if amount % ranks:
            fitting = [number for number in range(1, min(amount, 64) + 1) if amount % number == 0]
            raise InputError(
                f"the model's {what} ({amount}) cannot be divided by train.parallel.{key} = {ranks}: choose one of "
                f"{fitting}"
            )
    check_experts(parallel, experts_of(facts))


def check_head_size(facts: Mapping[str, Any], device: Device, where: str) -> None:
    """Refuse a head size that the engine cannot compute.

    Raises:
        InputError: naming the size and those that work.
    """
    size = head_size(facts)
    if device == "cpu" and size not in CPU_HEAD_SIZES:
        raise InputError(
            f"{where} has heads of {size} (head_dim), for which vLLM has no attention on CPU: use a model with one of "
            f"{list(CPU_HEAD_SIZES)}, or a GPU"
        )


def key_value_heads(facts: Mapping[str, Any]) -> int:
    """Number of heads of keys and values."""
    return int(facts.get("num_key_value_heads") or facts["num_attention_heads"])


def head_size(facts: Mapping[str, Any]) -> int:
    """Size of one head; with multi-latent attention that of a query, which the engine's kernels see."""
    if facts.get("kv_lora_rank"):
        return int(facts["qk_nope_head_dim"]) + int(facts["qk_rope_head_dim"])
    return int(facts.get("head_dim") or facts["hidden_size"] // facts["num_attention_heads"])
