"""Keys of config.json by architecture: values that trainer and engine obey, and keys without effect.

Data: it was compared once with the sources of megatron-bridge, vLLM and transformers in the versions of pyproject.toml.
A test computes log-probabilities with each value of `tried`."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Table = Mapping[str, Any]  # a config.json, or a table within it


@dataclass(frozen=True)
class Obeyed:
    """A key that decides what a model computes."""

    words: str  # values that trainer and engine compute with, for display
    holds: Callable[[Any, Table], bool]  # True for a value, in its table, that is one of them
    tried: tuple[Any, ...] = ()  # values that a test compares with transformers
    absent: str | None = None  # consequence of leaving the key out, if it cannot be left out


def only(*values: Any, absent: str | None = None) -> Obeyed:
    """Only these values."""
    words = " or ".join(json.dumps(value) for value in values)
    return Obeyed(words, lambda value, _: any(_same(value, one) for one in values), values, absent)


def whole(*tried: Any, least: int = 1, absent: str | None = None) -> Obeyed:
    """Whole numbers from `least` on, and null if it is tried."""
    words = f"a whole number of at least {least}{' or null' * (None in tried)}"

    def holds(value: Any, _: Table) -> bool:
        return None in tried if value is None else type(value) is int and value >= least

    return Obeyed(words, holds, tried, absent)


def number(*tried: Any, least: float = 0.0, absent: str | None = None) -> Obeyed:
    """Finite numbers from `least` on, except 0."""
    return Obeyed(f"a number above 0, at least {least:g}", lambda value, _: _is_number(value, least), tried, absent)


def same_as(other: str, absent: str | None = None) -> Obeyed:
    """Value of another key, or null, which stands for it."""
    return Obeyed(f"the value of {other}", lambda value, table: value in (None, table.get(other)), (), absent)


def alias_of(other: str) -> Obeyed:
    """Newer name of another whole number, which may be missing."""
    return Obeyed(
        f"a whole number, that of {other} if that is given",
        lambda value, table: type(value) is int and value >= 1 and value == table.get(other, value),
    )


def _same(value: Any, one: Any) -> bool:
    flags = isinstance(value, bool) or isinstance(one, bool)
    return value is one if flags else value == one


def _is_number(value: Any, least: float) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0 and value >= least


def _all_full(value: Any, table: Table) -> bool:
    return value is None or value == ["full_attention"] * int(table.get("num_hidden_layers") or 0)


def _divides_hidden(value: Any, table: Table) -> bool:
    hidden, heads = table.get("hidden_size"), table.get("num_attention_heads")
    return type(hidden) is type(heads) is type(value) is int and value * heads == hidden


def _usual_attention(value: Any, rope: Table) -> bool:
    factor: Any = rope.get("factor")
    if value is None or not (_is_number(value, 0) and _is_number(factor, 1.0)):
        return value is None
    return math.isclose(value, 0.1 * math.log(factor) + 1, rel_tol=1e-6)


def _with_the_other(other: str) -> Callable[[Any, Table], bool]:
    return lambda value, rope: _is_number(value, 0) and _is_number(rope.get(other), 0)


WITHOUT_EFFECT = frozenset(
    {
        # names and versions
        "_commit_hash", "_name_or_path", "architectures", "auto_map", "name_or_path", "tokenizer_class",
        "transformers.js_config", "transformers_version", "unsloth_fixed", "unsloth_version",
        # storage and execution, which are configured elsewhere
        "_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "dtype", "ep_size",
        "gradient_checkpointing", "pretraining_tp", "torch_dtype", "torchscript", "use_bfloat16", "use_cache",
        # training: no expert is dropped or drawn again, and [train.experts] says what trains routers
        "attention_dropout", "aux_loss_alpha", "initializer_range", "output_router_logits", "router_aux_loss_coef",
        "seq_aux",
        # tokens and sampling: prompts, [rollout] and [evaluate] decide
        "begin_suppress_tokens", "bos_token_id", "bad_words_ids", "cls_token_id", "decoder_start_token_id",
        "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id",
        "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "length_penalty",
        "max_length", "min_length", "model_max_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
        "num_return_sequences", "output_scores", "pad_token_id", "prefix", "remove_invalid_values",
        "repetition_penalty", "return_dict_in_generate", "sep_token_id", "suppress_tokens", "temperature", "top_k",
        "top_p", "typical_p", "unk_token_id",
        # other uses of transformers' class
        "chunk_size_feed_forward", "cross_attention_hidden_size", "finetuning_task", "id2label", "is_decoder",
        "label2id", "num_labels", "output_attentions", "output_hidden_states", "problem_type", "return_dict",
        "task_specific_params", "tf_legacy_loss", "tie_encoder_decoder",
    }
)  # fmt: skip
"""Keys of every architecture that change no log-probability."""

_EVERYWHERE: Mapping[str, Obeyed] = {
    "vocab_size": whole(101), "hidden_size": whole(128), "intermediate_size": whole(96),
    "num_hidden_layers": whole(3), "num_attention_heads": whole(8), "max_position_embeddings": whole(256),
    "rms_norm_eps": number(1e-2, 1e-5), "tie_word_embeddings": only(True, False), "hidden_act": only("silu"),
    "attention_bias": only(False), "mlp_bias": only(False), "rope_theta": number(1e6, 500.0),
    "partial_rotary_factor": only(1.0), "logit_scale": only(1.0), "is_causal": only(True),
    "is_encoder_decoder": only(False), "add_cross_attention": only(False), "pruned_heads": only({}, None),
    "quantization_config": only(None),
}  # fmt: skip
_ALL_FULL = Obeyed('"full_attention" for each layer', _all_full, (None,))
_NO_WINDOW: Mapping[str, Obeyed] = {"sliding_window": only(None), "layer_types": _ALL_FULL}
_WINDOW_UNUSED: Mapping[str, Obeyed] = {
    "use_sliding_window": only(False),
    "sliding_window": Obeyed("any, because use_sliding_window is false", lambda *_: True, (8, None)),
    "max_window_layers": Obeyed("any, because use_sliding_window is false", lambda *_: True, (0, 1)),
    "layer_types": _ALL_FULL,
    "use_mrope": only(False),
}


def _heads(default: int, *tried: Any) -> Obeyed:
    return whole(*tried, absent=f"transformers then has {default}")


_LATENT: Mapping[str, Obeyed] = {
    "model_type": only("deepseek_v3", absent="transformers then knows no class for it"),
    "tie_word_embeddings": only(False),
    # transformers' norms of latents have 1e-6 whatever this says
    "rms_norm_eps": only(1e-6),
    "num_key_value_heads": same_as("num_attention_heads", absent="transformers then has 128"),
    "head_dim": same_as("qk_rope_head_dim"),
    "qk_head_dim": Obeyed(
        "the sum of qk_nope_head_dim and qk_rope_head_dim",
        lambda value, table: value == table.get("qk_nope_head_dim", 0) + table.get("qk_rope_head_dim", 0),
    ),
    "q_lora_rank": whole(24, None), "kv_lora_rank": whole(16), "qk_rope_head_dim": whole(8),
    "qk_nope_head_dim": whole(16), "v_head_dim": whole(12), "rope_interleave": only(True),
    "first_k_dense_replace": whole(0, 1, 2, least=0), "n_routed_experts": whole(8),
    "num_local_experts": alias_of("n_routed_experts"), "n_shared_experts": whole(2),
    "num_experts_per_tok": whole(3, least=2), "moe_intermediate_size": whole(48), "moe_layer_freq": only(1),
    "n_group": whole(2, 1), "topk_group": whole(2, 1), "routed_scaling_factor": number(0.5, 1.0),
    "norm_topk_prob": only(True), "scoring_func": only("sigmoid", absent='vLLM then computes "softmax"'),
    "topk_method": only("noaux_tc", absent="vLLM then leaves the routers' biases out"),
    "num_nextn_predict_layers": only(0), "num_mtp_layers": only(0),
}  # fmt: skip
_QWEN: Mapping[str, Obeyed] = {**_EVERYWHERE, **_WINDOW_UNUSED}

KEYS: Mapping[str, Mapping[str, Obeyed]] = {
    "LlamaForCausalLM": {
        **_EVERYWHERE,
        **_NO_WINDOW,
        "model_type": only("llama", absent="transformers then knows no class for it"),
        "num_key_value_heads": whole(1, None),
        "head_dim": whole(32, None),
    },
    # without layer_types, with which transformers takes it for a Ministral
    "MistralForCausalLM": {
        **_EVERYWHERE,
        "model_type": only("mistral", absent="transformers then knows no class for it"),
        "num_key_value_heads": _heads(8, 1),
        "head_dim": whole(32, None),
        "sliding_window": whole(64, None),
    },
    "Qwen2ForCausalLM": {
        **_QWEN,
        "model_type": only("qwen2", absent="transformers then knows no class for it"),
        # queries, keys and values have biases whatever this says
        "attention_bias": only(True, False),
        "num_key_value_heads": _heads(32, 1, None),
        # vLLM does not read it
        "head_dim": Obeyed("hidden_size / num_attention_heads", _divides_hidden),
    },
    "Qwen3ForCausalLM": {
        **_QWEN,
        "model_type": only("qwen3", absent="transformers then knows no class for it"),
        "num_key_value_heads": _heads(32, 1, None),
        "head_dim": whole(32, absent="transformers then has 128"),
    },
    "Qwen3MoeForCausalLM": {
        **_QWEN,
        "model_type": only("qwen3_moe", absent="transformers then knows no class for it"),
        "num_key_value_heads": _heads(4, 1),
        "head_dim": whole(32),
        "num_experts": whole(8),
        "num_local_experts": alias_of("num_experts"),
        "num_experts_per_tok": Obeyed(
            "a whole number of at least 2, or 1 with norm_topk_prob = false",
            lambda value, table: type(value) is int and value >= 1 + bool(table.get("norm_topk_prob")),
            (3, 2),
        ),
        "moe_intermediate_size": whole(48),
        "norm_topk_prob": only(False, True),
        "decoder_sparse_step": only(1),
        "mlp_only_layers": only([], None),
    },
    "DeepseekV3ForCausalLM": {**_EVERYWHERE, **_NO_WINDOW, **_LATENT},
}  # obeyed keys of config.json, by architecture that can be built without Transformer Engine

_FACTOR = number(4.0, 1.5, least=1.0, absent="it is the scaling")
_OF_EVERY_ROPE: Mapping[str, Obeyed] = {"rope_theta": number(1e6, 500.0), "partial_rotary_factor": only(1.0)}
_YARN: Mapping[str, Obeyed] = {
    "factor": _FACTOR, "original_max_position_embeddings": whole(16, 32), "beta_fast": number(4, 32),
    "beta_slow": number(2, 1), "truncate": only(False, True),
    # vLLM reads neither: its factor of cosine and sine depends on `factor` alone
    "attention_factor": Obeyed(
        "null or 0.1 ln(factor) + 1, which vLLM and Megatron compute with", _usual_attention, (None,)
    ),
    "mscale": only(None), "mscale_all_dim": only(None),
}  # fmt: skip
_LLAMA3: Mapping[str, Obeyed] = {
    "factor": number(8.0, 32, least=1.0, absent="it is the scaling"),
    "low_freq_factor": only(1.0, absent="transformers asks for it"),
    "high_freq_factor": only(4.0, absent="transformers asks for it"),
    "original_max_position_embeddings": only(8192, absent="transformers then has max_position_embeddings"),
}  # fmt: skip
_LATENT_YARN: Mapping[str, Obeyed] = {
    **_YARN,
    "truncate": only(True),
    "attention_factor": only(None),
    "mscale": Obeyed("a number above 0 with mscale_all_dim", _with_the_other("mscale_all_dim"), (0.7, 1.0)),
    "mscale_all_dim": Obeyed("a number above 0 with mscale", _with_the_other("mscale"), (0.3, 1.0)),
}
ROPE: Mapping[str, Mapping[str, Mapping[str, Obeyed]]] = {
    architecture: {kind: {**_OF_EVERY_ROPE, **keys} for kind, keys in kinds.items()}
    for architecture, kinds in {
        "LlamaForCausalLM": {"default": {}, "linear": {"factor": _FACTOR}, "llama3": _LLAMA3, "yarn": _YARN},
        "MistralForCausalLM": {"default": {}},
        "Qwen2ForCausalLM": {"default": {}, "yarn": _YARN},
        "Qwen3ForCausalLM": {"default": {}, "yarn": _YARN},
        "Qwen3MoeForCausalLM": {"default": {}, "yarn": _YARN},
        "DeepseekV3ForCausalLM": {"default": {}, "yarn": _LATENT_YARN},
    }.items()
}  # obeyed keys of `rope_parameters` (or `rope_scaling`, its older name), by architecture and `rope_type` (or `type`)
