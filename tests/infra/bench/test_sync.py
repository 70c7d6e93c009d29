"""The bench of the weight sync: its measurements, and that its round does what a run does."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from infra.bench.hollow import hollow_model
from infra.bench.latent import LatentModel
from infra.bench.sync import bench_sync
from infra.bench.sync_cases import SYNC_CASES
from storage.errors import InputError
from tasks.data.generated import generate_model
from trainer_core.config import check_stages

KEYS = {"seconds", "stock_seconds", "kept_plan_seconds", "probe_s", "bytes", "unverified_pause_s", "sample_difference"}


@pytest.mark.full
@pytest.mark.parametrize(("case", "transport"), [("cpu-tied", "collective"), ("cpu-experts", "auto")])
def test_an_update_takes_one_exchange_and_no_collective_of_objects(case, transport):
    options = ["--json", f"--case={case}", "--pairs=3", f"--transport={transport}"]
    done = subprocess.run(
        [sys.executable, "-m", "flows", "bench", "sync", *options],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["object_collectives"] == 0
    assert found["stock_object_collectives"] > 100
    assert max(found["probe_difference"], found["sample_difference"]) < 1e-4
    assert found["metadata_exchanges"] == 1
    assert found["seconds"] < found["stock_seconds"]
    assert all(found[key] > 0 for key in KEYS)
    assert found["verify_share"] < 1  # a tiny model moves little memory, perhaps less than other work does
    assert found["transport"] == ("collective" if transport == "collective" else "memory")
    assert 0 < found["link_share"] == pytest.approx(found["send_gb_per_s"] / found["link_gb_per_s"])
    assert found["steps"].keys() >= {"plan", "prepare", "send", "verify", "commit"}


def test_no_measurement_is_refused():
    with pytest.raises(InputError, match="0 rounds measure nothing"):
        bench_sync("cpu", 0)


@pytest.mark.parametrize("case", SYNC_CASES.values(), ids=SYNC_CASES)
def test_the_layers_of_each_case_can_be_divided_over_its_stages(case):
    check_stages(case.parallel, case.model.layers)


def test_the_shapes_of_a_model_with_experts_are_those_of_transformers():
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    spec = SYNC_CASES["cpu-experts"].model
    assert isinstance(spec, LatentModel)
    config = transformers.DeepseekV3Config.from_dict(spec.config())
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(config)
    biases = spec.experts * (spec.layers - 1)
    ours = sum(math.prod(shape) for _, shape in spec.shapes())
    assert ours - biases == sum(parameter.numel() for parameter in model.parameters())
    found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert {name: shape for name, shape in spec.shapes() if name in found}.items() <= found.items()
    assert len({name for name, _ in spec.shapes()} - found.keys()) == (spec.layers - 1) * spec.experts * 3


@pytest.mark.parametrize(("precision", "size"), [("fp32", 4), ("bf16", 2)])
def test_a_hollow_model_has_the_names_and_shapes_of_a_generated_one(tmp_path, precision, size):
    spec = SYNC_CASES["cpu"].model
    hollow, whole = tmp_path / "hollow", tmp_path / "whole"
    hollow.mkdir()
    whole.mkdir()
    nbytes = hollow_model(hollow, spec, precision)
    generate_model(whole, spec, seed=0)
    expected = load_file(whole / "model.safetensors")
    assert nbytes == size * sum(values.size for values in expected.values())
    config = json.loads((hollow / "config.json").read_text())
    assert config["dtype"] == {"fp32": "float32", "bf16": "bfloat16"}[precision]
    if precision == "fp32":
        found = load_file(hollow / "model.safetensors")
        assert {name: values.shape for name, values in found.items()} == {
            name: values.shape for name, values in expected.items()
        }
        assert not any(np.any(values) for values in found.values())
