"""A stored critic as a folder that another run's critic begins with: its values, bit for bit."""

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from storage.backends.root import open_root
from storage.errors import InputError
from tasks.config.model import ModelSection
from tasks.config.others import KEYS
from tasks.data.models import find_model, open_model
from tasks.export.export import export
from tasks.export.order import ExportFolder, choose
from tasks.model_checks.fitness import classifier_facts
from tests.tasks.export.exported import make_model, store_run
from tests.trainer_core.models import random_samples
from tests.trainer_core.phases.test_critic_source import make_classifier
from tests.trainer_core.ranks import run_ranks, run_trainers
from trainer_core.config import OptimizerConfig, ParallelConfig, PolicyConfig, TrainerConfig
from trainer_core.optimizer_config import CriticConfig

GAE = {"advantage": {"type": "gae"}}
CRITIC = {"learning_rate": 1e-2}
SAMPLES = random_samples(3)
SOURCE = {"hidden_size": 96, "vocab_size": 100, "max_position_embeddings": 64}  # of another size than the policy


def settings(source=None, **more):
    critic = CriticConfig(**CRITIC, eps=1e-2, source=source)
    return TrainerConfig(
        optimizer=OptimizerConfig(learning_rate=1e-3), max_length=64,
        policy=PolicyConfig.model_validate(GAE), critic=critic, **more,
    )  # fmt: skip


def learn(trainer, folder):
    """Values after an iteration, and the constant in them; saves the state."""
    trainer.import_model()
    trainer.train_policy(SAMPLES, 1.0)
    trainer.save(Path(folder, "state"))
    (head,) = [one for one in trainer._critic.model.modules[-1].modules() if type(one).__name__ == "ValueHead"]
    return trainer._critic.values(SAMPLES), head.bias.item()


def first_values(trainer):
    trainer.import_model()
    return trainer._critic.values(SAMPLES)


def exported(folder: Path, config: TrainerConfig):
    """Values of a critic that has learnt, and the folder that it was exported to."""
    ((values, constant),) = run_trainers(str(folder / "model"), config, learn, str(folder))
    assert constant != 0
    url = f"file://{folder}/runs"
    source = config.critic.source
    store_run(url, folder, [], policy=GAE, critic={**CRITIC, **({} if source is None else {"source": source})})
    with pytest.raises(InputError, match="names a stored state, not a folder") as refused:
        find_model(ModelSection(source=f"{url}//run@1"), KEYS["critic"])
    assert run_ranks(1, carried_out, str(refused.value), str(folder / "out")) == [0]
    return values, str(folder / "out")


def carried_out(rank, world_size, store, refusal, to):
    """Exit code of the command that a refusal gives."""
    from flows.cli.app import execute

    program, *words = shlex.split(refusal.split("`")[1].replace("FOLDER", to))
    assert program == "ratchet"
    return execute(words)


@pytest.mark.slow
def test_another_critic_begins_with_the_values_of_a_stored_one(tmp_path):
    run_ranks(1, make_model, str(tmp_path / "model"), "Qwen3", True)
    values, folder = exported(tmp_path, settings())
    (found,) = run_trainers(str(tmp_path / "model"), settings(folder), first_values)
    np.testing.assert_array_equal(found, values)
    assert np.ptp(values) > 1e-3
    assert "run, iteration 1, critic" in Path(folder, "README.md").read_text()
    section = ModelSection(source=folder)
    classifier_facts(open_model(section), "cpu", (), constant=True)
    with pytest.raises(InputError, match=r"score.bias, which vLLM adds and transformers does not"):
        classifier_facts(open_model(section), "cpu", ())


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_also_of_another_family_and_on_another_layout(tmp_path, precision):
    run_ranks(1, make_model, str(tmp_path / "model"), "Qwen3", True)
    run_ranks(1, make_classifier, str(tmp_path), "llama", SOURCE)
    for path in (tmp_path / "model").glob("token*"):
        shutil.copy(path, tmp_path / "classifier")
    values, folder = exported(tmp_path, settings(str(tmp_path / "classifier"), precision=precision))
    config = json.loads(Path(folder, "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["hidden_size"] == SOURCE["hidden_size"]
    moved = settings(folder, precision=precision, parallel=ParallelConfig(pipeline=2))
    found = run_trainers(str(tmp_path / "model"), moved, first_values)[-1]
    np.testing.assert_array_equal(found, values)


def test_a_state_without_a_critic_is_refused(tmp_path):
    for name in ("model", "state"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    store_run(f"file://{tmp_path}/runs", tmp_path, [])
    root, out = open_root(f"file://{tmp_path}/runs"), ExportFolder.new(str(tmp_path / "out"))
    with pytest.raises(InputError, match=r"iteration 0 of run 'run' has no critic .*: leave --critic out"):
        export(root, choose(root, "run@0"), out, None, critic=True)
