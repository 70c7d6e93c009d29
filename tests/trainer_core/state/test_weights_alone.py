"""The optimizer's tensors have their own files, which a reference does not need."""

import shutil

import numpy as np
import pytest
from safetensors import safe_open

from tests.trainer_core.models import random_samples, read_export
from tests.trainer_core.oracle import export
from tests.trainer_core.ranks import run_trainers
from trainer_core.config import OptimizerConfig, ParallelConfig, TrainerConfig
from trainer_core.state.facts import needed_for_weights

pytestmark = pytest.mark.slow

LAYOUTS = {
    "single": ParallelConfig(),
    "pp2": ParallelConfig(pipeline=2),
    "tp2": ParallelConfig(tensor=2),
    "dp2": ParallelConfig(data=2),
}


def configuration(layout):
    return TrainerConfig(parallel=LAYOUTS[layout], optimizer=OptimizerConfig(learning_rate=1e-3), max_length=64)


def save(trainer, folder):
    trainer.import_model()
    trainer.train_policy(random_samples(1), 1.0)
    saved = trainer.save(f"{folder}/whole")
    export(trainer, f"{folder}/exported")
    return saved


@pytest.fixture(scope="module")
def saved(model_dir, tmp_path_factory):
    """Folders by layout, each computed once: the `whole` state, and its `weights` alone."""
    done = {}

    def saved_once(layout):
        if layout not in done:
            folder = tmp_path_factory.mktemp(layout)
            ranks = run_trainers(model_dir, configuration(layout), save, str(folder))
            (folder / "weights").mkdir()
            for name in filter(needed_for_weights, files_of(folder / "whole")):
                shutil.copy(folder / "whole" / name, folder / "weights")
            done[layout] = folder, ranks
        return done[layout]

    return saved_once


def tensors_by_file(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found[path.name] = {key.rpartition("@")[0] for key in file.keys()}  # noqa: SIM118 - no dictionary
    return found


def files_of(folder):
    return {path.name: path.stat().st_size for path in folder.iterdir() if not path.name.endswith(".mapped")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_hold_the_optimizer_or_everything_else(saved, layout):
    folder, ranks = saved(layout)
    found = tensors_by_file(folder / "whole")
    for file, names in found.items():
        assert {name.startswith("optimizer.") for name in names} == {not needed_for_weights(file)}
    assert {needed_for_weights(file) for file in found} == {True, False}
    # each rank names the files that it has written, and together they name all files
    assert sorted(name for rank in ranks for name in rank.names) == sorted(files_of(folder / "whole"))
    for rank, saved in enumerate(ranks):
        written = {name for name in saved.names if name.endswith(".safetensors")}
        assert written == {f"weights.{rank}.safetensors", f"optimizer.{rank}.safetensors"}


def test_the_weights_are_a_third_of_the_bytes(saved):
    folder, _ = saved("single")
    sizes = files_of(folder / "whole")
    assert sum(size for name, size in sizes.items() if needed_for_weights(name)) < 0.4 * sum(sizes.values())


def take_weights(trainer, folder, source):
    """A reference's log-probabilities of some sequences."""
    samples = random_samples(3)
    trainer.import_model()
    trainer.load_reference(f"{folder}/{source}", "reference")
    own = trainer.logprobs([samples.tokens[:12]])[0]
    with trainer._reference.in_place():
        reference = trainer.logprobs([samples.tokens[:12]])[0]
        export(trainer, f"{folder}/{source}-taken")
    return own, reference


SOURCES = ("whole", "weights")


def take_all_weights(trainer, folder):
    return [take_weights(trainer, folder, source) for source in SOURCES]


@pytest.mark.parametrize(("source", "target"), [("pp2", "pp2"), ("pp2", "dp2"), ("dp2", "tp2"), ("tp2", "single")])
def test_weights_are_taken_without_the_files_of_the_optimizer(model_dir, saved, source, target):
    folder, _ = saved(source)
    ranks = run_trainers(model_dir, configuration(target), take_all_weights, str(folder))
    for found in ranks:
        for own, reference in found:
            assert reference.tobytes() == found[0][1].tobytes()
            assert np.abs(reference - own).max() > 1e-4
    exported = read_export(folder / "exported")
    for name in SOURCES:
        taken = read_export(folder / f"{name}-taken")
        assert {key: value.tobytes() for key, value in taken.items()} == {
            key: value.tobytes() for key, value in exported.items()
        }
