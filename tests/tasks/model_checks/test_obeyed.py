"""The trainer computes what transformers computes for each value of config.json that passes the checks."""

import json
import math

import numpy as np
import pytest

from tasks.model_checks.keys import KEYS, ROPE
from tasks.model_checks.obedience import check_keys
from tests.trainer_core.models import FAMILIES, SHARED, hugging_face_logprobs, random_sequences
from tests.trainer_core.ranks import run_ranks
from trainer_core.config import OptimizerConfig, RankSpec, TrainerConfig
from trainer_core.start import start_trainer

SETTINGS = TrainerConfig(optimizer=OptimizerConfig(learning_rate=0.0), max_length=64)
BASES = {
    "LlamaForCausalLM": FAMILIES["llama"][1],
    "MistralForCausalLM": {**FAMILIES["llama"][1], "sliding_window": None},
    "Qwen2ForCausalLM": {"num_key_value_heads": 2},
    "Qwen3ForCausalLM": FAMILIES["qwen3"][1],
    "Qwen3MoeForCausalLM": FAMILIES["qwen3-moe"][1],
    "DeepseekV3ForCausalLM": {
        **FAMILIES["deepseek-v3"][1], "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    },
}  # fmt: skip
INERT = {
    "attention_dropout": 0.5, "use_cache": False, "initializer_range": 0.5, "pretraining_tp": 2,
    "torch_dtype": "float16", "router_aux_loss_coef": 0.5, "aux_loss_alpha": 0.5, "seq_aux": False,
    "output_router_logits": True, "ep_size": 4, "max_length": 3, "temperature": 0.1, "is_decoder": True,
    "pad_token_id": 7, "chunk_size_feed_forward": 4,
}  # fmt: skip
"""Keys without effect, with other values than usual."""


def base(architecture):
    kind = KEYS[architecture]["model_type"].tried[0]
    return {
        **SHARED,
        "architectures": [architecture],
        "model_type": kind,
        "num_hidden_layers": 2,
        **BASES[architecture],
    }


def tried(keys, number):
    """The value of each key with this number; of keys with fewer values, the last."""
    return {key: one.tried[min(number, len(one.tried) - 1)] for key, one in keys.items() if one.tried}


def variants(architecture):
    """Configurations in which each value that is tried occurs, and positions as model cards have them."""
    keys, plain = KEYS[architecture], base(architecture)
    for number in range(max(len(one.tried) for one in keys.values())):
        document = {**plain, **tried(keys, number), **(INERT if number == 0 else {})}
        yield document | ({"num_key_value_heads": 8} if "kv_lora_rank" in keys else {})
    for kind, known in ROPE[architecture].items():
        if kind != "default":
            yield {**plain, "rope_parameters": {"rope_type": kind, **tried(known, 0)}}
            rope = tried(known, 1)
            yield {**plain, "rope_theta": rope.pop("rope_theta"), "rope_scaling": {"type": kind, **rope}}
    if "yarn" in ROPE[architecture]:
        card = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
        yield {**plain, "rope_theta": 1e6, "rope_scaling": card}
    if architecture == "Qwen3ForCausalLM":
        usual = {"factor": 2, "attention_factor": 0.1 * math.log(2) + 1}
        yield {**plain, "rope_parameters": {"rope_type": "yarn", **usual}}


def scored_by_both(rank, world_size, store, folder, documents):
    """Log-probabilities of a random model of each config.json, by transformers and by the trainer, and the keys of the
    file that transformers stores again."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    found = []
    for number, document in enumerate(documents):
        place = folder / str(number)
        place.mkdir()
        config_file = place / "config.json"
        config_file.write_text(json.dumps(document))
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(place)
        config.initializer_range = 0.02  # says how training begins; larger weights amplify the last bits of fp32
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for tensor in (*model.parameters(), *(one for name, one in model.named_buffers() if "e_score" in name)):
                tensor.add_(torch.randn_like(tensor) * 0.1)
        model.save_pretrained(place)
        again = json.loads(config_file.read_text())
        config_file.write_text(json.dumps(document))
        theirs = hugging_face_logprobs(rank, world_size, store, str(place), random_sequences(), 1.0)
        trainer = start_trainer(str(place), SETTINGS, RankSpec(rank=0, world_size=1, store=f"{store}-{number}"))
        trainer.import_model()
        found.append((theirs, trainer.logprobs(random_sequences()), again))
        trainer.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("architecture", KEYS)
def test_a_value_that_passes_is_obeyed(architecture, tmp_path):
    documents = list(variants(architecture))
    for document in documents:
        check_keys(document, architecture, (), "the model")
    (found,) = run_ranks(1, scored_by_both, tmp_path, documents)
    for document, (theirs, ours, again) in zip(documents, found, strict=True):
        check_keys(again, architecture, (), "what transformers has stored")
        expected = np.concatenate(theirs)
        np.testing.assert_allclose(np.concatenate(ours), expected, rtol=1e-5, atol=5e-6, err_msg=json.dumps(document))
