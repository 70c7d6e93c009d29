"""A config.json with a key or a value that is not obeyed is refused, with the key and the setting that lets it pass."""

import json

import pytest

from storage.errors import InputError
from tasks.config.model import GeneratedModel
from tasks.data.generated import model_config
from tasks.model_checks.architectures import WITHOUT_TRANSFORMER_ENGINE, check_architecture
from tasks.model_checks.keys import KEYS, ROPE, WITHOUT_EFFECT
from tasks.model_checks.obedience import check_keys
from tests.tasks.model_checks.test_obeyed import base

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA, MISTRAL, QWEN2, QWEN3 = "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
EXPERTS, LATENT = "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"
REFUSED = [
    (QWEN3, {"hidden_act": "gelu"}, "hidden_act", 'hidden_act = "gelu" in config.json is not supported'),
    (MISTRAL, {"hidden_act": "gelu"}, "hidden_act", 'only "silu"'),
    (QWEN3, {"attention_bias": True}, "attention_bias", "only false"),
    (QWEN3, {"attention_bias": 0}, "attention_bias", "attention_bias = 0"),
    (LLAMA, {"mlp_bias": True}, "mlp_bias", "mlp_bias = true"),
    (QWEN3, {"use_sliding_window": True}, "use_sliding_window", "only false"),
    (QWEN3, {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types", '"full_attention" for each layer'),
    (LLAMA, {"sliding_window": 8}, "sliding_window", "only null"),
    (MISTRAL, {"layer_types": ["full_attention"] * 2}, "layer_types", "is not known for MistralForCausalLM"),
    (QWEN2, {"head_dim": 32}, "head_dim", "only hidden_size / num_attention_heads"),
    (QWEN3, {"head_dim": None}, "head_dim", "head_dim = null"),
    (QWEN3, {"num_key_value_heads": "2"}, "num_key_value_heads", 'num_key_value_heads = "2"'),
    (LLAMA, {"logit_scale": 2.0}, "logit_scale", "only 1.0"),
    (QWEN3, {"final_logit_softcapping": 30.0}, "final_logit_softcapping", "is not known for Qwen3ForCausalLM"),
    (QWEN3, {"atention_bias": True}, "atention_bias", "did you mean attention_bias"),
    (QWEN3, {"partial_rotary_factor": 0.5}, "partial_rotary_factor", "only 1.0"),
    (QWEN3, {"rms_norm_eps": 0}, "rms_norm_eps", "a number above 0"),
    (LATENT, {"rms_norm_eps": 1e-5}, "rms_norm_eps", "only 1e-06"),
    (EXPERTS, {"mlp_only_layers": [1]}, "mlp_only_layers", "only [] or null"),
    (EXPERTS, {"decoder_sparse_step": 2}, "decoder_sparse_step", "only 1"),
    (EXPERTS, {"num_experts_per_tok": 1, "norm_topk_prob": True}, "num_experts_per_tok", "or 1 with norm_topk_prob"),
    (EXPERTS, {"shared_expert_intermediate_size": 32}, "shared_expert_intermediate_size", "is not known"),
    (EXPERTS, {"model_type": "qwen3"}, "model_type", 'only "qwen3_moe"'),
    (LATENT, {"norm_topk_prob": False}, "norm_topk_prob", "only true"),
    (LATENT, {"rope_interleave": False}, "rope_interleave", "only true"),
    (LATENT, {"scoring_func": "softmax"}, "scoring_func", 'only "sigmoid"'),
    (LATENT, {"topk_method": "greedy"}, "topk_method", 'only "noaux_tc"'),
    (LATENT, {"moe_layer_freq": 2}, "moe_layer_freq", "only 1"),
    (LATENT, {"num_key_value_heads": 2}, "num_key_value_heads", "only the value of num_attention_heads"),
    (LATENT, {"tie_word_embeddings": True}, "tie_word_embeddings", "only false"),
    (LATENT, {"num_experts_per_tok": 1}, "num_experts_per_tok", "at least 2"),
    (QWEN3, {"rope_scaling": {"type": "longrope"}}, "rope_scaling.type", '"longrope" in config.json is not supported'),
    (QWEN3, {"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_scaling.type", 'only "default" or "yarn"'),
    (MISTRAL, {"rope_parameters": YARN}, "rope_parameters.rope_type", "for MistralForCausalLM"),
    (QWEN2, {"rope_parameters": {**YARN, "rope_type": "linear"}}, "rope_parameters.rope_type", "for Qwen2ForCausalLM"),
    (QWEN3, {"rope_parameters": {**YARN, "type": "default"}}, "rope_parameters.type", "differ"),
    (QWEN3, {"rope_parameters": {**YARN, "attention_factor": 1.5}}, "rope_parameters.attention_factor", "1.5"),
    (QWEN3, {"rope_scaling": {**YARN, "attn_factor": 1.5}}, "rope_scaling.attn_factor", "mean rope_scaling.attention"),
    (QWEN3, {"rope_parameters": {**YARN, "mscale": 0.7}}, "rope_parameters.mscale", "only null"),
    (QWEN3, {"rope_parameters": {**YARN, "factor": "4"}}, "rope_parameters.factor", 'factor = "4"'),
    (QWEN3, {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.factor", "is not in config.json"),
    (QWEN3, {"rope_parameters": {"full_attention": YARN}}, "rope_parameters.full_attention", "is not known"),
    (QWEN3, {"rope_parameters": "yarn"}, "rope_parameters", "is not a table"),
    (QWEN3, {"rope_parameters": {"rope_type": None}}, "rope_parameters.rope_type", "= null in config.json"),
    (QWEN3, {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": YARN}, "rope_scaling", "different things"),
    (QWEN3, {"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 1e4}, "rope_theta", "differ"),
    (LLAMA, {"rope_scaling": {**YARN, "rope_type": "llama3", "low_freq_factor": 2.0, "high_freq_factor": 4.0}},
     "rope_scaling.low_freq_factor", "low_freq_factor = 2.0"),
    (LATENT, {"rope_scaling": {**YARN, "mscale": 0.7}}, "rope_scaling.mscale", "with mscale_all_dim"),
    (LATENT, {"rope_scaling": {**YARN, "attention_factor": 1.0}}, "rope_scaling.attention_factor", "only null"),
    (LATENT, {"rope_scaling": {**YARN, "truncate": False}}, "rope_scaling.truncate", "only true"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "changes", "key", "words"),
    REFUSED,
    ids=[f"{one[0][:-11]}-{json.dumps(one[1])}" for one in REFUSED],
)
def test_a_value_that_is_not_obeyed_is_refused_unless_it_is_let_pass(architecture, changes, key, words):
    document = {**base(architecture), **changes}
    with pytest.raises(InputError) as caught:
        check_keys(document, architecture, (), "here")
    assert words in str(caught.value)
    (advice,) = str(caught.value).splitlines()
    accepted = json.loads(advice.partition("model.accept = ")[2])
    assert key in accepted
    check_keys(document, architecture, accepted, "here")


@pytest.mark.parametrize(
    ("architecture", "key"),
    [
        (LATENT, "scoring_func"),
        (LATENT, "topk_method"),
        (LATENT, "num_nextn_predict_layers"),
        (LATENT, "num_key_value_heads"),
        (QWEN3, "head_dim"),
        (MISTRAL, "num_key_value_heads"),
        (EXPERTS, "model_type"),
    ],
)
def test_a_key_whose_absence_means_something_else_has_to_be_there(architecture, key):
    document = base(architecture)
    document.pop(key)
    with pytest.raises(InputError, match=f"{key} is not in config.json, and .* then"):
        check_keys(document, architecture, (), "here")


def test_a_newer_name_of_a_key_counts_too():
    document = base(LATENT)
    document["num_mtp_layers"] = document.pop("num_nextn_predict_layers")
    check_keys(document, LATENT, (), "here")


def test_transformers_stores_the_number_of_experts_by_a_newer_name():
    for architecture, older in ((EXPERTS, "num_experts"), (LATENT, "n_routed_experts")):
        document = base(architecture)
        document["num_local_experts"] = document[older]
        check_keys(document, architecture, (), "here")
        document.pop(older)
        check_keys(document, architecture, (), "here")
        with pytest.raises(InputError, match=r"num_local_experts = 9 in config.json"):
            check_keys({**base(architecture), "num_local_experts": 9}, architecture, (), "here")


def test_what_is_let_pass_without_need_is_refused():
    with pytest.raises(InputError, match=r"model.accept names hidden_act, which has no effect"):
        check_keys(base(QWEN3), QWEN3, ("hidden_act",), "here")


def test_an_architecture_without_a_table_has_to_be_let_pass():
    facts = {"architectures": ["Gemma2ForCausalLM"], "whatever": 1}
    with pytest.raises(InputError, match=r'model.accept = \["architectures"\]'):
        check_architecture(facts, "cuda", (), "here")
    check_architecture(facts, "cuda", ("architectures",), "here")


def test_a_generated_model_passes():
    check_keys(model_config(GeneratedModel()), QWEN3, (), "here")


def test_the_table_has_every_architecture_that_is_tried():
    assert KEYS.keys() == ROPE.keys() == WITHOUT_TRANSFORMER_ENGINE
    assert all(WITHOUT_EFFECT.isdisjoint(keys) for keys in KEYS.values())
    kinds = [keys for tables in ROPE.values() for keys in tables.values()]
    rows = [(key, one) for keys in (*KEYS.values(), *kinds) for key, one in keys.items()]
    derived = {"head_dim", "qk_head_dim", "num_local_experts", "num_key_value_heads"}
    assert {key for key, one in rows if not one.tried} <= derived
