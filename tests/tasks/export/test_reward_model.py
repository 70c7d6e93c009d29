"""A reward model as a Hugging Face classifier, to which transformers gives the values of the trainer."""

import json
from pathlib import Path

import numpy as np
import pytest

from storage.backends.root import open_root
from storage.errors import InputError
from tasks.data.hub import INDEX
from tasks.export.export import export
from tasks.export.order import ExportFolder, choose
from tests.tasks.export.exported import export_run, make_model, store_run
from tests.trainer_core.models import random_samples
from tests.trainer_core.ranks import run_ranks, run_trainers
from trainer_core.config import OptimizerConfig, ParallelConfig, PolicyConfig, TrainerConfig
from trainer_core.optimizer_config import CriticConfig

LOSS = {"type": "reward_model", "pairs": "all"}
SAMPLES = random_samples(3)
KINDS = {"Qwen3 tied": ("Qwen3", True, ParallelConfig(tensor=2)), "Llama": ("Llama", False, ParallelConfig(pipeline=2))}


def settings(parallel):
    return TrainerConfig(
        parallel=parallel, optimizer=OptimizerConfig(learning_rate=1e-3), max_length=64,
        policy=PolicyConfig.model_validate({"loss": LOSS}), critic=CriticConfig(learning_rate=1e-2, eps=1e-2),
    )  # fmt: skip


def learn(trainer, folder):
    """One iteration of a reward model; the values of its samples without the constant."""
    trainer.import_model()
    trainer.train_policy(SAMPLES, 1.0)
    heads = [one for one in trainer._critic.model.modules[-1].modules() if type(one).__name__ == "ValueHead"]
    found = trainer._critic.scores(SAMPLES, np.arange(len(SAMPLES)))
    trainer.save(Path(folder, "state"))
    return found - heads[0].bias.item() if heads else None


def values_of(rank, world_size, store, directory):
    """Values that transformers' own class gives to each sample, read from the folder alone."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model, flaws = AutoModelForSequenceClassification.from_pretrained(directory, output_loading_info=True)
    assert not any(flaws.values()), flaws
    assert (model.config.num_labels, model.config.problem_type) == (1, "regression")
    ends = np.cumsum(SAMPLES.lengths)
    rows = [SAMPLES.tokens[end - length : end] for end, length in zip(ends, SAMPLES.lengths, strict=True)]
    with torch.no_grad():
        return np.array([model(torch.from_numpy(row.astype(np.int64))[None]).logits[0, 0] for row in rows])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_gives_the_values_of_the_trainer(tmp_path, kind):
    family, tied, parallel = KINDS[kind]
    run_ranks(1, make_model, str(tmp_path / "model"), family, tied)
    learnt = run_trainers(str(tmp_path / "model"), settings(parallel), learn, str(tmp_path))
    wanted = learnt[-1]  # of the rank with the output layer
    store_run(f"file://{tmp_path}/runs", tmp_path, [], policy={"loss": LOSS}, critic={"learning_rate": 1e-2})
    (made,) = run_ranks(1, export_run, f"file://{tmp_path}/runs", "run", str(tmp_path / "out"))
    index, config = (json.loads((tmp_path / "out" / name).read_text()) for name in (INDEX, "config.json"))
    assert "score.weight" in index["weight_map"]
    assert config["architectures"] == [f"{family}ForSequenceClassification"]
    assert "served" not in (tmp_path / "out/README.md").read_text()
    (found,) = run_ranks(1, values_of, made.folder)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    assert np.ptp(wanted) > 1e-2


def test_a_state_without_a_reward_model_is_refused(tmp_path):
    for name in ("model", "state"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    store_run(f"file://{tmp_path}/runs", tmp_path, [], policy={"loss": LOSS}, critic={"learning_rate": 1e-2})
    root, out = open_root(f"file://{tmp_path}/runs"), ExportFolder.new(str(tmp_path / "out"))
    with pytest.raises(InputError, match=r"iteration 0 of run 'run' is what its reward model begins with, .* a later"):
        export(root, choose(root, "run@0"), out, None)
    assert not (tmp_path / "out").exists()
