"""Models that cannot be trained or served: one message before the start, exit code 2, nothing heavy imported."""

import numpy as np
import pytest

from storage import layout, records
from storage.backends.root import open_root
from tests.bad_input import models
from tests.storage.runs import DOCUMENT, make_run

CONFIG = """\
[model]
source = "model"
[data.generate]
[rollout]
max_tokens = 4
[train]
max_length = 32
[train.optimizer]
learning_rate = 1e-3
[engine]
max_model_len = 32
[device]
kind = "cpu"
"""

FOLDERS = {
    "no weights": (models.only_pickles, ["holds no safetensors files, only pytorch_model.bin", "convert"]),
    "no config": (models.without("config.json"), ["has no config.json", "give a Hugging Face directory"]),
    "config no JSON": (models.text("config.json", "{"), ["config.json is not JSON", "restore it"]),
    "config no object": (models.text("config.json", "[]"), ["config.json holds a list"]),
    "no architecture": (models.config(architectures=None), ["config.json names no architectures"]),
    "unknown architecture": (
        models.config(architectures=["GPT2LMHeadModel"]),
        ["GPT2LMHeadModel is not supported", "LlamaForCausalLM"],
    ),
    "needs a GPU": (
        models.config(architectures=["Gemma2ForCausalLM"]),
        ["Gemma2ForCausalLM needs Transformer Engine", "on CPU use one of"],
    ),
    "further tokens predicted": (
        models.config(architectures=["DeepseekV3ForCausalLM"], num_nextn_predict_layers=1),
        ["num_nextn_predict_layers = 1 in config.json", "Set it to 0"],
    ),
    "remote code": (models.config(auto_map={"AutoModel": "x.Y"}), ["auto_map in config.json", "is not run"]),
    "remote code of the tokenizer": (
        models.text("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["x.Y", null]}}'),
        ["auto_map in tokenizer_config.json"],
    ),
    "quantized": (models.config(quantization_config={"quant_method": "fp8"}), ["is quantized", "bf16 or fp32"]),
    "quantized tensor": (
        models.tensor("model.norm.weight", np.ones(64, dtype=np.int8)),
        ["model.norm.weight in model.safetensors is of type I8"],
    ),
    "file missing": (
        models.without("model-00001-of-00002.safetensors"),
        ["lacks model-00001-of-00002.safetensors, which model.safetensors.index.json names (1 of 2 files"],
    ),
    "file cut off": (models.cut, ["model-00002-of-00002.safetensors has", "its header describes", "copy it again"]),
    "no safetensors": (models.no_header, ["model-00002-of-00002.safetensors is not a safetensors file"]),
    "header damaged": (models.broken_header, ["the header of model-00001-of-00002.safetensors is damaged"]),
    "index of more": (models.index_with_more, ["index.json names model.layers.7.mlp.up_proj.weight"]),
    "index no index": (models.text("model.safetensors.index.json", "{}"), ["has no weight_map"]),
    "tensor missing": (
        models.tensor("model.layers.1.mlp.up_proj.weight", None),
        ["lack model.layers.1.mlp.up_proj.weight, which config.json asks for"],
    ),
    "output layer missing": (models.tensor("lm_head.weight", None), ["lack lm_head.weight"]),
    "other vocabulary": (
        models.config(vocab_size=64),
        ["model.embed_tokens.weight has the shape [32, 64], but config.json describes [64, 64]"],
    ),
    "fewer layers": (
        models.config(num_hidden_layers=1),
        ["hold model.layers.1.", "which config.json does not describe"],
    ),
    "more layers": (models.config(num_hidden_layers=3), ["lack model.layers.2."]),
    "other heads": (
        models.config(num_key_value_heads=2),
        ["model.layers.0.self_attn.k_proj.weight has the shape [32, 64]", "describes [64, 64]"],
    ),
    "heads and groups": (
        models.config(num_key_value_heads=4),
        ["num_attention_heads = 2", "not a multiple of num_key_value_heads = 4"],
    ),
    "no number": (
        models.config(hidden_size="64"),
        ['hidden_size = "64" in config.json is not supported', "a whole number"],
    ),
    "rope": (
        models.config(rope_scaling={"rope_type": "longrope"}, rope_parameters=None),
        [
            'rope_scaling.rope_type = "longrope"',
            'only "default" or "yarn"',
            'model.accept = ["rope_scaling.rope_type"]',
        ],
    ),
    "a key that is not known": (
        models.config(final_logit_softcapping=30.0),
        ["final_logit_softcapping = 30.0 in config.json is not known for Qwen3ForCausalLM", "model.accept = ["],
    ),
    "another activation": (models.config(hidden_act="gelu"), ['hidden_act = "gelu"', 'only "silu"']),
    "bias": (models.config(attention_bias=True), ["attention_bias = true in config.json is not supported"]),
    "rope of experts": (
        models.config(architectures=["Qwen3MoeForCausalLM"], rope_scaling={"rope_type": "linear"}),
        ['rope_scaling.rope_type = "linear"', "Qwen3MoeForCausalLM"],
    ),
    "bias of experts": (
        models.config(architectures=["Qwen3MoeForCausalLM"], attention_bias=True),
        ["attention_bias = true", "Qwen3MoeForCausalLM"],
    ),
    "bias of latent attention": (
        models.config(architectures=["DeepseekV3ForCausalLM"], attention_bias=True),
        ["attention_bias = true", "DeepseekV3ForCausalLM"],
    ),
    "dense layers among experts": (
        models.config(architectures=["Qwen3MoeForCausalLM"], mlp_only_layers=[0]),
        ["mlp_only_layers = [0] in config.json is not supported"],
    ),
    "dense layers between experts": (
        models.config(architectures=["Qwen3MoeForCausalLM"], decoder_sparse_step=2),
        ["decoder_sparse_step = 2 in config.json is not supported"],
    ),
    "window": (
        models.config(sliding_window=16, use_sliding_window=True),
        ["use_sliding_window = true in config.json is not supported", "only false"],
    ),
    "context": (models.config(max_position_embeddings=16), ["= 32 is longer than the model's context of 16 tokens"]),
}

SETTINGS = {
    "layers": (
        ["train.parallel.pipeline=3"],
        ["layers (2) cannot be divided by train.parallel.pipeline = 3", "[1, 2]"],
    ),
    "key-value heads": (["train.parallel.tensor=2"], ["key-value heads (1)", "train.parallel.tensor = 2"]),
    "virtual stages": (
        ["train.parallel.pipeline=2", "train.parallel.virtual_pipeline=2"],
        ["layers of a rank (1) cannot be divided by train.parallel.virtual_pipeline = 2"],
    ),
    "uneven stages": (
        ["train.parallel.pipeline=2", "train.parallel.layers_first_stage=2"],
        ["layers (2) cannot be divided by", "train.parallel.layers_first_stage = 2: choose one of [1]"],
    ),
    "experts of a dense model": (
        ["train.parallel.data=2", "train.parallel.expert=2"],
        ["the model's experts (none) cannot be divided by train.parallel.expert = 2"],
    ),
    "cards": (
        ["device.kind=cuda", "train.parallel.data=2"],
        ["tp1 pp1 dp2 under [train.parallel] needs 2 GPUs", "1 are visible"],
    ),
    "cards of an engine": (
        ["device.kind=cuda", "engine.tensor=2"],
        ["engine.tensor is 2, but 1 GPUs are visible"],
    ),
    "experts that are not there": (
        ["train.experts.auxiliary_loss=0.1"],
        ["train.experts.auxiliary_loss has no effect with a model without experts"],
    ),
    "routes of a dense model": (
        ["train.experts.replay=true"],
        ["train.experts.replay has no effect with a model without experts"],
    ),
    "routes of responses in flight": (
        ["train.experts.replay=true", "rollout.ahead=1", "rollout.updates=in-flight"],
        [
            "train.experts.replay = true needs the experts of every sampled token",
            'with rollout.updates = "in-flight": leave that out',
        ],
    ),
    "a target of LoRA": (
        ["train.lora.rank=4", "train.lora.targets=['q_proj','kv_b_proj']"],
        ['train.lora.targets has "kv_b_proj", not a matrix', "use names of self_attn.q_proj"],
    ),
    "no target of LoRA": (
        ["train.lora.rank=4", "train.lora.targets=[]"],
        ["train.lora.targets", "an empty target names no matrix"],
    ),
    "dropout of LoRA": (["train.lora.rank=4", "train.lora.dropout=0.1"], ["train.lora.dropout"]),
    "fused gradients of LoRA": (
        ["train.lora.rank=4", "train.megatron.gradient_accumulation_fusion=true"],
        ["with lora weights have no gradients", "leave megatron.gradient_accumulation_fusion out"],
    ),
    "values without a critic": (
        ["train.policy.advantage.type=gae"],
        ['policy.advantage.type = "gae" needs the values of a critic', "add the table critic"],
    ),
    "a critic of adapters": (
        ["train.critic.learning_rate=1e-4", "train.policy.advantage.type=gae", "train.lora.rank=4"],
        ["a critic trains all its weights", "leave critic or lora out"],
    ),
    "a key let pass without need": (["model.accept=['hidden_act']"], ["model.accept names hidden_act", "leave it out"]),
    "heads of an engine": (["engine.tensor=4"], ["attention heads", "(2) cannot be divided by engine.tensor = 4"]),
    "fp8 on CPU": (
        ["engine.quantization=fp8", "engine.precision=bf16"],
        ['engine.quantization = "fp8" takes a card with FP8 units', "computes on CPU: leave it out"],
    ),
    "fp8 of fp32": (
        ["engine.quantization=fp8"],
        ['quantization = "fp8" is computed beside bf16', 'set engine.precision = "bf16"'],
    ),
    "fp8 training on CPU": (
        ["train.fp8=tensorwise", "train.precision=bf16"],
        ['train.fp8 = "tensorwise" takes a card with FP8 units', "computes on CPU: leave it out"],
    ),
    "fp8 training of fp32": (
        ["train.fp8=tensorwise"],
        ['fp8 = "tensorwise" does not go with precision = "fp32": set it to "bf16"'],
    ),
    "fp8 training of adapters": (
        ["train.fp8=tensorwise", "train.precision=bf16", "train.lora.rank=4"],
        ["does not go with lora, with which it has not been run: leave one of them out"],
    ),
    "fp8 training of a divided model": (
        ["train.fp8=tensorwise", "train.precision=bf16", "train.parallel.tensor=2"],
        ["does not go with parallel.tensor, parallel.context or parallel.expert above 1", "set them to 1"],
    ),
    "fp8 training with a history of scales": (["train.fp8=delayed"], ["train.fp8", "'tensorwise'"]),
    "a live adapter of nothing": (
        ["engine.adapter=live"],
        ["engine.adapter has no effect with train.lora not given"],
    ),
    "a live adapter beside fp8": (
        ["engine.adapter=live", "train.lora.rank=4", "engine.precision=bf16", "engine.quantization=fp8"],
        ['adapter = "live" adds adapters to whole weights', "leave engine.quantization out"],
    ),
    "a live adapter on a card that is to be deterministic": (
        ["engine.adapter=live", "train.lora.rank=4", "device.kind=cuda", "device.deterministic=true"],
        ['engine.adapter = "live" is not deterministic on cards', 'set engine.adapter = "merged"'],
    ),
    "a live adapter of rank 600": (
        ["engine.adapter=live", "train.lora.rank=600"],
        ["serves adapters of rank 512 at most, and train.lora.rank is 600", 'set engine.adapter = "merged"'],
    ),
    "another quantization": (["engine.quantization=int4"], ["engine.quantization", "'fp8'"]),
    "head size": (
        ["model={generate={hidden=64,heads=4,head_dim=16}}"],
        ["model.generate has heads of 16 (head_dim)", "[32, 64,"],
    ),
    "neither folder nor hub": (
        ["model.source=models/llama@v2"],
        ["there is no folder models/llama@v2", "no model models/llama@v2", "model.download = true"],
    ),
    "hub URL": (["model.source=hf://org/other"], ["has no model org/other@main", "model.download = true"]),
    "hub URL of another form": (["model.source=hf://org"], ["hf://org is not of the form hf://org/name"]),
    "no folder": (["model.source=./elsewhere"], ["./elsewhere does not exist", "give a Hugging Face directory"]),
    "unknown protocol": (["model.source=gopher://host/model"], ["gopher://host/model cannot be read"]),
    "no variable": (["model.source=env:RATCHET_NO_MODEL"], ["RATCHET_NO_MODEL is not set"]),
    "literal token": (["model.token=hf_abc"], ["model.token: it would be stored", "env:NAME"]),
}


@pytest.fixture
def folder(tmp_path):
    models.make(tmp_path / "model")
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path


def refused(command, folder, arguments, words, **environment):
    outcome = command(arguments, folder, **environment)
    assert outcome.code == 2, outcome.said
    assert all(word in outcome.said.replace("\n", " ") for word in words), outcome.said
    assert outcome.imported == []
    assert "/tmp/ratchet-" not in outcome.said
    assert not any(path.is_file() for path in (folder / "runs").rglob("*"))


@pytest.mark.slow
@pytest.mark.parametrize(("change", "words"), FOLDERS.values(), ids=FOLDERS)
def test_a_model_that_cannot_be_used(command, folder, change, words):
    change(folder / "model")
    refused(command, folder, ["run", "run.toml", "--run=new"], words)


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "words"), SETTINGS.values(), ids=SETTINGS)
def test_settings_that_do_not_fit_the_model(command, folder, settings, words):
    given = [f"--set={setting}" for setting in settings]
    home = str(folder / "home")
    refused(command, folder, ["run", "run.toml", "--run=new", *given], words, CUDA_VISIBLE_DEVICES="0", HF_HOME=home)


def test_a_model_of_the_hub_is_found_in_its_cache(command, folder):
    snapshot = models.in_hub_cache(folder / "home", "org/name", "v1")
    (snapshot / "model-00001-of-00002.safetensors").unlink()
    home = {"HF_HOME": str(folder / "home")}
    for source in ("org/name@v1", "hf://org/name@v1"):
        given = ["run", "run.toml", "--run=new", f"--set=model.source={source}"]
        refused(command, folder, given, [f"model.source {source} lacks model-00001-of-00002"], **home)
    given = ["run", "run.toml", "--run=new", "--set=model.source=org/name"]
    refused(command, folder, given, ["there is no folder org/name, and the hub", "no model org/name@main"], **home)
    models.make(folder / "org" / "name")
    models.cut(folder / "org" / "name")
    refused(command, folder, given, ["org/name: model-00002-of-00002.safetensors has"], **home)


def test_what_the_hub_refuses(command, folder):
    given = [f"--set={one}" for one in ("model.source=org/name", "model.download=true", "model.token=env:OUR_TOKEN")]
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(folder / "home"), "OUR_TOKEN": "hf_s3cret"}
    words = ["model.source org/name@main cannot be fetched from the hub", "model.token"]
    refused(command, folder, ["run", "run.toml", "--run=new", *given], words, **nowhere)


EXPORTS = {
    "no run": (["run", "--to=out"], ["there is no run 'run'"]),
    "no iteration yet": (["there", "--to=out"], ["'there' has no complete iteration yet"]),
    "no number": (["full@last", "--to=out"], ["'full@last' is not of the form RUN, RUN@ITERATION or RUN@best"]),
    "another iteration": (["full@7", "--to=out"], ["iteration 7 of run 'full' is not there; those of [0, 1] are"]),
    "nothing evaluated": (["full@best", "--to=out"], ["no evaluation of an iteration whose state is kept ([0, 1])"]),
    "a folder that is not empty": (["full", "--to=model"], ["model is not empty: it holds config.json"]),
    "a file": (["full", "--to=run.toml"], ["run.toml cannot be used: it is a file"]),
    "credentials": (["full", "--to=s3://key:s3cret@bucket/out"], ["has credentials in its URL", "env:NAME"]),
    "unknown protocol": (["full", "--to=gopher://host/out"], ["gopher://host/out cannot be used"]),
    "precision": (["full", "--to=out", "--precision=fp8"], ["fp8", "fp32", "bf16"]),
}


@pytest.mark.parametrize(("arguments", "words"), EXPORTS.values(), ids=EXPORTS)
def test_an_export_that_cannot_be_made(command, folder, arguments, words):
    root = open_root(str(folder / "runs"))
    make_run(root, "full", 1)
    records.publish(root, layout.run_config_key("there"), DOCUMENT)
    outcome = command(["export", *arguments], folder)
    assert outcome.code == 2, outcome.said
    assert all(word in outcome.said.replace("\n", " ") for word in words), outcome.said
    assert "s3cret" not in outcome.said
    assert outcome.imported == []
    assert not (folder / "out").exists()
