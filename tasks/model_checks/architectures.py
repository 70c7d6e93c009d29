"""Supported architectures, sizes and divisions of models, as data: registries import slowly. A test compares."""

from collections.abc import Mapping, Sequence
from typing import Any

from storage.errors import InputError
from tasks.model_checks.obedience import check_keys
from trainer_core.config import Device, check_predictions

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes with kernels in vLLM's attention on CPU."""

_NUMBERS = (
    "num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip

KNOWN_TO_BOTH = frozenset(
    {
        "BailingMoeV2ForCausalLM", "DeciLMForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM",
        "DeepseekV4ForCausalLM", "Ernie4_5_MoeForCausalLM", "Exaone4ForCausalLM", "ExaoneMoEForCausalLM",
        "FalconH1ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma4ForCausalLM", "GemmaForCausalLM",
        "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM", "GptOssForCausalLM", "HYV3ForCausalLM",
        "LlamaForCausalLM", "MiMoForCausalLM", "MiMoV2FlashForCausalLM", "MiniMaxM2ForCausalLM", "MistralForCausalLM",
        "NemotronForCausalLM", "NemotronHForCausalLM", "OlmoeForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "SarvamMLAForCausalLM", "SarvamMoEForCausalLM",
        "Step3p5ForCausalLM",
    }
)  # fmt: skip
"""Text models that megatron-bridge and vLLM both have, in the versions of pyproject.toml."""
LLAMA_LIKE = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Dense decoders among them, with RMSNorm and a gated MLP."""
WITHOUT_TRANSFORMER_ENGINE = LLAMA_LIKE | {"Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"}
"""Architectures that can be built without Transformer Engine, and so on CPU."""
NOT_FULL_ATTENTION = frozenset(
    {
        "DeepseekV4ForCausalLM", "Exaone4ForCausalLM", "ExaoneMoEForCausalLM", "FalconH1ForCausalLM",
        "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma4ForCausalLM", "GlmMoeDsaForCausalLM", "GptOssForCausalLM",
        "MiMoV2FlashForCausalLM", "NemotronHForCausalLM", "Qwen3NextForCausalLM", "Step3p5ForCausalLM",
    }
)  # fmt: skip
"""Architectures with layers that see the past through a window, in part, or as a state. Transformer Engine's exchange
of keys between ranks supports none of these."""
_WINDOW_OF_MISTRAL = 4096  # default of transformers for a Mistral


def check_numbers(facts: Mapping[str, Any], where: str) -> None:
    """Raises InputError, naming the key: config.json lacks a size, or its sizes contradict each other."""
    for key in _NUMBERS:
        value = facts.get(key)
        if not isinstance(value, int) or value < 1:
            raise InputError(f"{where}: {key} in config.json is {value!r}, but a positive number is needed: correct it")
    heads = facts["num_attention_heads"]
    groups = int(facts.get("num_key_value_heads") or heads)
    if heads % groups:
        fact = f"{where}: num_attention_heads = {heads} in config.json is not a multiple of num_key_value_heads"
        raise InputError(f"{fact} = {groups}: correct it")
    # transformers refuses such a Llama even with a head_dim
    needed = facts.get("head_dim") is None or "LlamaForCausalLM" in facts.get("architectures", ())
    if needed and facts["hidden_size"] % heads:
        raise InputError(
            f"{where}: hidden_size = {facts['hidden_size']} in config.json is not a multiple of num_attention_heads = "
            f"{heads}: correct it"
        )


def check_head_size(facts: Mapping[str, Any], device: Device, where: str) -> None:
    """Refuse a head size that the engine cannot compute. Raises InputError: naming the size and those that work."""
    if facts.get("kv_lora_rank"):  # multi-latent attention: the engine's kernels see a query
        size = int(facts["qk_nope_head_dim"]) + int(facts["qk_rope_head_dim"])
    else:
        size = int(facts.get("head_dim") or facts["hidden_size"] // facts["num_attention_heads"])
    if device == "cpu" and size not in CPU_HEAD_SIZES:
        fact = f"{where} has heads of {size} (head_dim), for which vLLM has no attention on CPU"
        raise InputError(f"{fact}: use a model with one of {list(CPU_HEAD_SIZES)}, or a GPU")


def architecture_of(facts: Mapping[str, Any], where: str) -> str:
    """Architecture that config.json names. Raises InputError: it names none."""
    named = facts.get("architectures")
    if not isinstance(named, list) or not named or not isinstance(named[0], str):
        fact = f"{where}: config.json names no architectures"
        raise InputError(f"{fact}: take the config.json that belongs to the weights")
    return named[0]


def check_architecture(facts: Mapping[str, Any], device: Device, accepted: Sequence[str], where: str) -> None:
    """Refuse a model that trainer or engine cannot compute on `device`. `facts` is the content of config.json, of which
    the keys `accepted` pass without a check; `where` is the model's name in messages. Raises InputError: its code is
    its own, its weights are quantized, or its architecture or a key is not supported."""
    if facts.get("auto_map"):
        raise InputError(
            f"{where} brings code of its own (auto_map in config.json), which is not run: use a model whose "
            "architecture transformers has, or remove auto_map if transformers has this one too"
        )
    if facts.get("quantization_config"):
        raise InputError(f"{where} is quantized (quantization_config in config.json): use the model in bf16 or fp32")
    if (name := architecture_of(facts, where)) not in KNOWN_TO_BOTH:
        fact = f"{where}: the architecture {name} is not supported: megatron-bridge and vLLM must both have it"
        raise InputError(f"{fact}. Use one of {', '.join(sorted(WITHOUT_TRANSFORMER_ENGINE))}")
    if device == "cpu" and name not in WITHOUT_TRANSFORMER_ENGINE:
        raise InputError(
            f"{where}: the architecture {name} needs Transformer Engine, which needs a GPU; on CPU use one of "
            f"{', '.join(sorted(WITHOUT_TRANSFORMER_ENGINE))}"
        )
    check_predictions(facts, where)
    check_keys(facts, name, accepted, where)


def check_export(facts: Mapping[str, Any], key: str, where: str) -> None:
    """Refuse a setting `key` that needs weights which storage alone can convert. Raises InputError."""
    if (name := architecture_of(facts, where)) not in WITHOUT_TRANSFORMER_ENGINE:
        known = ", ".join(sorted(WITHOUT_TRANSFORMER_ENGINE))
        raise InputError(f"{where}: {key} does not know the architecture {name}: leave it out, or use one of {known}")


def check_full_attention(facts: Mapping[str, Any], where: str) -> None:
    """Raises InputError, naming the model's attention: Transformer Engine cannot divide its sequences."""
    name, window = architecture_of(facts, where), _window(facts, where)
    if name in NOT_FULL_ATTENTION or window is not None:
        kind = f"a sliding window of {window} tokens" if window is not None else "layers without full attention"
        fact = f"train.parallel.context is above 1, but {where} ({name}) has {kind}"
        raise InputError(f"{fact}, and sequences are divided for full attention alone: set train.parallel.context = 1")


def check_window(facts: Mapping[str, Any], max_length: int, where: str) -> None:
    """Raises InputError: sequences are longer than a sliding window, which the trainer's attention does not have."""
    if (window := _window(facts, where)) is not None and max_length > window:
        raise InputError(
            f"train.max_length = {max_length} is longer than the sliding window of {window} tokens in config.json of "
            f"{where}, which the trainer does not compute: lower train.max_length to {window}"
        )


def _window(facts: Mapping[str, Any], where: str) -> int | None:
    """Sliding window of the model, in tokens."""
    mistral = architecture_of(facts, where) == "MistralForCausalLM"
    window = facts.get("sliding_window", _WINDOW_OF_MISTRAL if mistral else None)
    used = facts.get("use_sliding_window", mistral)
    return window if used and isinstance(window, int) else None
