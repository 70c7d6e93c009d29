"""An exported model with experts is the one that was trained, as transformers reads it."""

import json
import struct

import numpy as np
import pytest

from tests.tasks.export.exported import export_run, save_state, settings, store_run
from tests.trainer_core.models import hugging_face_logprobs, make_family, random_samples, random_sequences
from tests.trainer_core.oracle import export
from tests.trainer_core.ranks import run_ranks, run_trainers
from trainer_core.config import ExpertsConfig, ParallelConfig

EP2 = ParallelConfig(data=2, expert=2)
CASES = [
    pytest.param("qwen3-moe", "fp32", EP2, id="qwen3-moe", marks=pytest.mark.full),  # CI divides it by tensor too
    pytest.param("deepseek-v3", "fp32", ParallelConfig(pipeline=2), id="deepseek-v3"),
    pytest.param("deepseek-v3", "bf16", EP2, id="deepseek-v3-bf16"),
    pytest.param(
        "qwen3-moe", "fp32", ParallelConfig(tensor=2, sequence=True, data=2, expert=2), id="qwen3-moe-tp2",
    ),
    pytest.param(
        "deepseek-v3-without-q-lora", "fp32", ParallelConfig(tensor=2, sequence=True), id="without-q-lora",
    ),
]  # fmt: skip


def step_score_and_save(trainer, folder):
    """Save and export after an update, and score with the trainer itself."""
    trainer.import_model()
    trainer.train_policy(random_samples(), 1.0)
    trainer.save(f"{folder}/state")
    records = export(trainer, f"{folder}/engine")
    return records, trainer.logprobs(random_sequences(), 1.0)


def tensors_of(folder):
    """Type, shape and bytes of each tensor, by name."""
    found = {}
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        begin = 8 + struct.unpack("<Q", data[:8])[0]
        for name, entry in json.loads(data[8:begin]).items():
            if name != "__metadata__":
                first, last = (begin + offset for offset in entry["data_offsets"])
                found[name] = entry["dtype"], entry["shape"], data[first:last]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("family", "precision", "parallel"), CASES)
def test_transformers_computes_what_the_trainer_does(tmp_path, family, precision, parallel):
    model, url = str(tmp_path / "model"), f"file://{tmp_path}/runs"
    run_ranks(1, make_family, model, family)
    experts = ExpertsConfig(bias_update_rate=0.01 if "deepseek" in family else 0.0)
    given = settings(precision, parallel).model_copy(update={"experts": experts})
    records, expected = run_trainers(model, given, step_score_and_save, str(tmp_path))[0]
    store_run(url, tmp_path, records)

    (made,) = run_ranks(1, export_run, url, "run", str(tmp_path / "out"))
    before, served, exported = (tensors_of(tmp_path / name) for name in ("model", "engine", "out"))
    assert before.keys() == served.keys() == exported.keys()
    assert made.tensors == len(exported)
    assert exported == served
    assert any(exported[name] != before[name] for name in before if ".experts." in name)
    if precision == "fp32":
        (found,) = run_ranks(1, hugging_face_logprobs, str(tmp_path / "out"), random_sequences(), 1.0)
        for ours, theirs in zip(expected, found, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=5e-6)


@pytest.mark.slow
def test_the_biases_of_routers_are_exact_in_any_precision(tmp_path):
    url = f"file://{tmp_path}/runs"
    run_ranks(1, make_family, str(tmp_path / "model"), "deepseek-v3")
    records = run_trainers(str(tmp_path / "model"), settings("fp32", ParallelConfig()), save_state, str(tmp_path))[0]
    store_run(url, tmp_path, records)
    run_ranks(1, export_run, url, "run", str(tmp_path / "out"), "bf16")
    served, exported = (tensors_of(tmp_path / name) for name in ("engine", "out"))
    exact = {name for name, (dtype, *_) in exported.items() if dtype == "F32"}
    assert exact == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3)}
    assert all(exported[name] == served[name] for name in exact)
