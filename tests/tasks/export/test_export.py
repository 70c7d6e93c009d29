"""An exported folder is the model that was served, as transformers reads it."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from storage.backends.root import open_root
from storage.manifest import need
from tasks.stages.names import Stage
from tests.tasks.export.exported import (
    KINDS,
    export_refused,
    export_run,
    export_watched,
    logits_of,
    make_model,
    save_state,
    settings,
    store_run,
)
from tests.trainer_core.ranks import run_ranks, run_trainers
from trainer_core.config import ParallelConfig

ONE = pytest.mark.parametrize("stored", ["Llama"], indirect=True)  # checks that do not depend on the kind of model


BY_HAND = {"Mistral": pytest.mark.full}  # its layers are those of Llama


@pytest.fixture(scope="module", params=[pytest.param(kind, marks=BY_HAND.get(kind, [])) for kind in KINDS])
def stored(request, tmp_path_factory):
    """A stored run, its precision, and the folder of the tensors that the trainer sent to engines."""
    kind, precision, parallel, tied = KINDS[request.param]
    folder = tmp_path_factory.mktemp("stored")
    run_ranks(1, make_model, str(folder / "model"), kind, tied)
    records = run_trainers(str(folder / "model"), settings(precision, parallel), save_state, str(folder))[0]
    url = f"file://{folder}/runs"
    store_run(url, folder, records)
    return url, precision, folder


@pytest.mark.slow
def test_transformers_loads_what_was_served(stored, tmp_path):
    url, precision, folder = stored
    (made,) = run_ranks(1, export_run, url, "run", str(tmp_path / "out"))
    assert (made.run, made.iteration, made.precision) == ("run", 1, precision)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert made.tensors == len(index["weight_map"])
    (ours,) = run_ranks(1, logits_of, str(tmp_path / "out"))
    (theirs,) = run_ranks(1, logits_of, str(tmp_path / "out"), str(folder / "engine"))
    assert np.array_equal(ours[0], theirs[0])
    assert ours[1:] == ({"fp32": "torch.float32", "bf16": "torch.bfloat16"}[precision], "w5", 2)


@pytest.mark.slow
def test_the_other_precision(stored, tmp_path):
    url, precision, folder = stored
    other = "bf16" if precision == "fp32" else "fp32"
    (made,) = run_ranks(1, export_run, url, "run@best.reward", str(tmp_path / "out"), other, 1 << 30)
    assert (made.iteration, made.precision) == (0, other)
    assert sorted(path.name for path in (tmp_path / "out").glob("model*")) == ["model.safetensors"]
    (ours,), (whole,) = run_ranks(1, logits_of, str(tmp_path / "out")), run_ranks(1, logits_of, str(folder / "model"))
    assert ours[1] == f"torch.{'bfloat16' if other == 'bf16' else 'float32'}"
    assert np.allclose(ours[0], whole[0], atol=0.5)
    assert not np.array_equal(ours[0], whole[0])


@ONE
def test_the_card_names_run_and_digests(stored, tmp_path):
    url, _, folder = stored
    (made,) = run_ranks(1, export_run, url, "run@0", str(tmp_path / "out"))
    card = (tmp_path / "out" / "README.md").read_text()
    root = open_root(url)
    for fact in (made.weights_digest, need(root, "run", 0, Stage.TRAIN).digest, "| held-out mean reward | 0.2500 |"):
        assert fact in card
    for part in need(root, "run", 0, Stage.PREPARE).parts:
        assert part.digest in card
    assert 'tags: ["ratchet", "grpo"]' in card
    assert str(folder) not in card
    assert not Path(tmp_path / "out" / ".unfinished-export").exists()


@ONE
def test_weights_that_were_not_served_are_no_model(stored, tmp_path):
    url, _, folder = stored
    store_run(url, folder, [], run="other", digest_of=lambda _: "of other weights")
    (said,) = run_ranks(1, export_refused, url, "other", str(tmp_path / "out"))
    assert "but of other weights were served" in said
    assert not (tmp_path / "out" / "config.json").exists()
    assert (tmp_path / "out" / ".unfinished-export").exists()


@pytest.mark.slow
def test_memory_grows_by_a_few_layers_of_many(tmp_path):
    shape = {"num_hidden_layers": 24, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    run_ranks(1, functools.partial(make_model, **shape), str(tmp_path / "model"), "Llama", False)
    layout = settings("fp32", ParallelConfig())
    records = run_trainers(str(tmp_path / "model"), layout, save_state, str(tmp_path))[0]
    store_run(f"file://{tmp_path}/runs", tmp_path, records)
    ((size, growth),) = run_ranks(1, export_watched, f"file://{tmp_path}/runs", str(tmp_path / "out"))
    assert growth < size / 2
