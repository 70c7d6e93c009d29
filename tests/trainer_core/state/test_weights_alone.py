"""The optimizer's tensors have their own files, which a reference does not need."""

import pickle
import shutil

import numpy as np
import pytest

from tests.trainer_core.models import random_samples, read_export
from tests.trainer_core.oracle import export
from tests.trainer_core.ranks import run_trainers
from trainer_core.config import OptimizerConfig, ParallelConfig, TrainerConfig
from trainer_core.state.comparison import compare_states
from trainer_core.state.facts import needed_for_weights

pytestmark = pytest.mark.slow

LAYOUTS = {
    "single": ParallelConfig(),
    "pp2": ParallelConfig(pipeline=2),
    "tp2": ParallelConfig(tensor=2),
    "dp2": ParallelConfig(data=2),
}


MADE = ("apart", "before", "together")


def configuration(layout):
    return TrainerConfig(parallel=LAYOUTS[layout], optimizer=OptimizerConfig(learning_rate=1e-3), max_length=64)


def save_apart_and_together(trainer, folder):
    """The same state as it is saved now, and as earlier versions saved it: in two files per rank, or in one."""
    from tests.trainer_core.state.earlier import save_as_before

    trainer.import_model()
    trainer.train_policy(random_samples(1), 1.0)
    saved = trainer.save(f"{folder}/apart")
    save_as_before(trainer, f"{folder}/before")
    save_as_before(trainer, f"{folder}/together", apart=False)
    export(trainer, f"{folder}/exported")
    return saved


@pytest.fixture(scope="module")
def saved(model_dir, tmp_path_factory):
    """By layout, each computed once: a folder with the state `apart`, `together`, and the `weights` of the former."""
    done = {}

    def save(layout):
        if layout not in done:
            folder = tmp_path_factory.mktemp(layout)
            ranks = run_trainers(model_dir, configuration(layout), save_apart_and_together, str(folder))
            (folder / "weights").mkdir()
            for name in filter(needed_for_weights, files_of(folder / "apart")):
                shutil.copy(folder / "apart" / name, folder / "weights")
            done[layout] = folder, ranks
        return done[layout]

    return save


def tensors_by_file(folder):
    found = {}
    for index, place in pickle.loads((folder / ".metadata").read_bytes()).storage_data.items():
        found.setdefault(place.relative_path, set()).add(index.fqn)
    return found


def files_of(folder):
    return {path.name: path.stat().st_size for path in folder.iterdir() if not path.name.endswith(".mapped")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_hold_the_optimizer_or_everything_else(saved, layout):
    folder, ranks = saved(layout)
    found = tensors_by_file(folder / "apart")
    for file, names in found.items():
        assert {name.startswith("optimizer.") for name in names} == {not needed_for_weights(file)}
    assert {needed_for_weights(file) for file in found} == {True, False}
    assert all(needed_for_weights(file) for file in tensors_by_file(folder / "together"))
    # each rank names what it has written, and together they name everything
    assert sorted(name for rank in ranks for name in rank.names) == sorted(files_of(folder / "apart"))
    for rank, saved in enumerate(ranks):
        written = {name for name in saved.names if name.endswith(".distcp")}
        assert {name.removeprefix("optimizer.").split("_")[2] for name in written} == {str(rank)}


def test_the_weights_are_a_third_of_the_bytes(saved):
    folder, _ = saved("single")
    sizes = files_of(folder / "apart")
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


SOURCES = ("apart", "weights", "before", "together")


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


def go_on(trainer, folder, source):
    loaded = trainer.load(f"{folder}/{source}")
    trainer.save(f"{folder}/{source}-again")
    return loaded, trainer.train_policy(random_samples(2), 1.0)


@pytest.mark.parametrize("layout", ["single", "pp2", "dp2"])
def test_a_state_of_an_earlier_version_goes_on_as_the_same_state(model_dir, saved, layout):
    folder, ranks = saved(layout)
    found = [run_trainers(model_dir, configuration(layout), go_on, str(folder), name) for name in MADE]
    assert found[0] == found[1] == found[2]
    assert found[0][0][0].identity == ranks[0].identity
    for name in MADE:
        assert compare_states(folder / f"{name}-again", folder / "apart").differences == ()


@pytest.mark.parametrize(("source", "target"), [("pp2", "tp2"), ("tp2", "dp2")])
def test_a_state_of_an_earlier_version_loads_under_another_layout(model_dir, saved, source, target):
    folder, ranks = saved(source)
    found = [run_trainers(model_dir, configuration(target), go_on, str(folder), name) for name in MADE]
    assert found[0] == found[1] == found[2]
    assert found[0][0][0].identity.tensors == ranks[0].identity.tensors
