"""An exported model is the base with its adapters, as engines were sent it and as transformers computes."""

import json
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from storage.backends.root import open_root
from storage.errors import InputError
from tasks.export.export import export_adapter
from tasks.export.order import ExportFolder, choose
from tests.tasks.export.exported import export_run, settings, store_run
from tests.trainer_core.model.test_lora import TARGETS
from tests.trainer_core.models import hugging_face_logprobs, make_family, random_samples, random_sequences
from tests.trainer_core.ranks import run_ranks, run_trainers
from tests.trainer_core.weights.syncing import sync
from trainer_core.config import ExpertsConfig, ParallelConfig
from trainer_core.lora import LoraConfig

pytestmark = pytest.mark.slow
Record = namedtuple("Record", "name digest")


def trained(trainer, folder):
    trainer.import_model()
    trainer.train_policy(random_samples(), 1.0)
    trainer.save(f"{folder}/state")
    received = sync(trainer, folder)["received"]
    return [Record(name, digest) for name, (digest, *_) in (received or {}).items()], trainer.logprobs(
        random_sequences()
    )


@pytest.mark.parametrize(
    ("family", "precision", "parallel"),
    [("qwen3", "fp32", ParallelConfig(tensor=2)), ("deepseek-v3", "bf16", ParallelConfig(pipeline=2))],
)
def test_the_sum_is_exported(tmp_path, family, precision, parallel):
    run_ranks(1, make_family, str(tmp_path / "model"), family)
    experts = {"bias_update_rate": 0.01 if "deepseek" in family else 0.0}
    lora = LoraConfig(rank=4, targets=TARGETS[family])
    more = {"experts": ExpertsConfig(**experts), "lora": lora}
    given = settings(precision, parallel).model_copy(update=more)
    records, expected = run_trainers(str(tmp_path / "model"), given, trained, str(tmp_path))[0]
    url, out, adapter = f"file://{tmp_path}/runs", str(tmp_path / "out"), str(tmp_path / "adapter")
    store_run(url, tmp_path, records, named=False, experts=experts)
    (made,) = run_ranks(1, export_run, url, "run", out)
    assert made.tensors == len(records)  # the export has compared their digests
    (alone,) = run_ranks(1, export_adapters, url, adapter)
    if "deepseek" in family:
        assert "moves the biases of routers (train.experts.bias_update_rate)" in alone
        return
    assert alone.weights_digest == made.weights_digest
    exports = (hugging_face_logprobs, out, random_sequences(), 1.0), (of_adapters, adapter)
    for found in (run_ranks(1, *one)[0] for one in exports):
        for ours, theirs in zip(expected, found, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=5e-6)


def export_adapters(rank, world_size, store, url, to):
    root = open_root(url)
    try:
        return export_adapter(root, choose(root, "run"), ExportFolder.new(to))
    except InputError as error:
        return str(error)


def of_adapters(rank, world_size, store, adapter_dir):
    """Log-probabilities of an adapter folder beside the base that it names, read as peft's documentation describes
    it."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    given = json.loads(Path(adapter_dir, "adapter_config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(given["base_model_name_or_path"], dtype=torch.float32).eval()
    factors = load_file(Path(adapter_dir, "adapter_model.safetensors"))
    for name, module in list(model.named_modules()):
        if any(f".{name}".endswith(f".{target}") for target in given["target_modules"]):
            a, b = (factors.pop(f"base_model.model.{name}.lora_{kind}.weight").float() for kind in "AB")
            scale = given["lora_alpha"] / given["r"]
            module.register_forward_hook(lambda _, x, out, a=a, b=b, scale=scale: out + scale * (x[0] @ a.T) @ b.T)
    assert not factors
    with torch.no_grad():
        tokens = [torch.from_numpy(one.astype(np.int64)) for one in random_sequences()]
        logits = [model(one[None]).logits[0, :-1].log_softmax(-1) for one in tokens]
    return [one.gather(-1, ids[1:, None])[:, 0].numpy() for one, ids in zip(logits, tokens, strict=True)]
