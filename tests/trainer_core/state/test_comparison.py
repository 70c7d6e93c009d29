"""Comparing saved states: equality, reported differences, and that a single bit is found."""

import json
import math
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from storage.errors import StorageError
from tests.trainer_core.models import VOCABULARY, random_samples
from tests.trainer_core.ranks import run_trainers
from trainer_core.config import OptimizerConfig, ParallelConfig, TrainerConfig
from trainer_core.state.comparison import compare_states

pytestmark = pytest.mark.slow

LAYOUTS = {
    "single": ParallelConfig(),
    "dp2": ParallelConfig(data=2),
    "tp2": ParallelConfig(tensor=2),
    "pp2": ParallelConfig(pipeline=2),
}
QKV = "decoder.layers.self_attention.linear_qkv.weight"
MOMENT = "optimizer.state.exp_avg.embedding.word_embeddings.weight"


def import_save_train_save(trainer, folder):
    trainer.import_model()
    trainer.save(f"{folder}/imported")
    trainer.train_policy(random_samples(1), 1.0)
    trainer.save(f"{folder}/trained")


@pytest.fixture(scope="module")
def saved(model_dir, tmp_path_factory):
    """Folder with the states `imported` and `trained` of a layout; another `run` computes them again."""
    done = {}

    def save(layout, run=0):
        if (layout, run) not in done:
            folder = tmp_path_factory.mktemp(layout)
            config = TrainerConfig(
                parallel=LAYOUTS[layout], optimizer=OptimizerConfig(learning_rate=1e-3), max_length=64
            )
            run_trainers(model_dir, config, import_save_train_save, str(folder))
            done[layout, run] = folder
        return done[layout, run]

    return save


@pytest.fixture
def trained(saved, tmp_path):
    """A trained state, and a copy of it to be changed."""
    original = saved("single") / "trained"
    shutil.copytree(original, tmp_path / "copy")
    return original, tmp_path / "copy"


def edit(path, change):
    """Change the tensors of a file: `change` gets them by their keys."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = {key: value.clone() for key, value in load_file(path).items()}
    change(tensors)
    path.unlink()  # the copy may be mapped
    save_file(tensors, path, metadata)


def put(key, index, number):
    def change(tensors):
        tensors[key][index] = number

    return change


def names_of(comparison):
    return [line.split(": ")[0] for line in comparison.differences]


# a run that goes on from a state gives the same as one that was not interrupted: `test_checkpoint.py`, on all of these
@pytest.mark.parametrize(
    "layout", ["single", "tp2", *(pytest.param(name, marks=pytest.mark.full) for name in ("dp2", "pp2"))]
)
def test_the_same_run_gives_the_same_state(saved, layout):
    comparison = compare_states(saved(layout) / "trained", saved(layout, run=1) / "trained")
    assert comparison.differences == ()
    assert comparison.planted is None
    assert comparison.optimizer == 2 * comparison.weights == 20  # in fp32 the weights are the main weights
    assert comparison.rng == 13 * LAYOUTS[layout].world_size
    assert comparison.other > 15
    # the sizes of tests.trainer_core.models.make_model
    model = (VOCABULARY + 4 * (256 + 128 + 128 + 64 + 2)) * 64 + 4 * 2 * 16 + 64
    assert 3 * model < comparison.elements < 3 * model + 30_000 * LAYOUTS[layout].world_size


def test_every_kind_of_tensor_that_training_moved_is_named(saved):
    found = names_of(compare_states(saved("single") / "imported", saved("single") / "trained"))
    assert len([name for name in found if name.startswith(("decoder.", "embedding."))]) == 10
    assert len([name for name in found if name.startswith("optimizer.")]) == 20
    assert {"trainer.json.step", "trainer.json.optimizer_updates"} <= set(found)
    assert not [name for name in found if name.startswith("rng/")]


@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2"])
def test_states_of_other_layouts_hold_the_same_tensors(saved, layout):
    folders = saved("single") / "imported", saved(layout) / "imported"
    for comparison in (compare_states(*folders), compare_states(*reversed(folders))):
        assert (comparison.weights, comparison.optimizer, comparison.rng) == (10, 20, 13)
        assert {name.split("/")[0].split(".")[0] for name in names_of(comparison)} == {"rng", "trainer"}
    moved = compare_states(saved(layout) / "imported", saved("single") / "trained")
    assert len([name for name in names_of(moved) if name.startswith("optimizer.")]) == 20


@pytest.mark.parametrize("layout", ["single", "tp2"])
@pytest.mark.parametrize("seed", range(4))
def test_a_planted_bit_is_found_and_nothing_else(saved, layout, seed):
    folder = saved(layout) / "trained"
    comparison = compare_states(folder, folder, plant=seed)
    assert names_of(comparison) == [comparison.planted]
    assert ": 1 of " in comparison.differences[0]
    assert compare_states(folder, folder, plant=seed) == comparison


def test_seeds_plant_in_several_places(saved):
    folder = saved("single") / "trained"
    assert len({compare_states(folder, folder, plant=seed).differences for seed in range(4)}) > 1


@pytest.mark.parametrize(
    ("file", "name", "start", "index", "at"),
    [("weights.0", QKV, "2,0,0", (0, 3, 7), (2, 3, 7)), ("optimizer.0", MOMENT, "0,0", (9, 5), (9, 5))],
)
def test_a_changed_number_is_shown_in_full(trained, file, name, start, index, at):
    original, copy = trained
    edit(copy / f"{file}.safetensors", put(f"{name}@{start}", index, 0.1))
    (line,) = compare_states(original, copy).differences
    assert line.startswith(f"{name}: 1 of ")
    assert f"elements differ, first at {at}: " in line
    assert line.endswith(f" against {torch.tensor(0.1).item()!r}")  # 0.10000000149011612


def test_bits_decide_not_values(trained, tmp_path):
    original, copy = trained
    file, key = "optimizer.0.safetensors", f"{MOMENT}@0,0"
    shutil.copytree(original, tmp_path / "other")
    for number, other, lines in [(0.0, -0.0, 1), (math.nan, math.nan, 0), (math.nan, -math.nan, 1)]:
        edit(copy / file, put(key, (1, 2), number))
        edit(tmp_path / "other" / file, put(key, (1, 2), other))
        assert len(compare_states(copy, tmp_path / "other").differences) == lines
    assert (
        "nan (bits 0x7fc00000) against nan (bits 0xffc00000)" in compare_states(copy, tmp_path / "other").differences[0]
    )


@pytest.mark.parametrize(
    ("generator", "change"),
    [
        ("random[1]", lambda state: {**state, "random": [3, [1, *state["random"][1][1:]], None]}),
        ("numpy[2]", lambda state: {**state, "numpy": [*state["numpy"][:2], 7, *state["numpy"][3:]]}),
        ("torch", lambda state: {**state, "torch": state["torch"][::-1]}),
    ],
)
def test_a_changed_generator_is_named(trained, generator, change):
    original, copy = trained
    path = copy / "generators-0.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    assert names_of(compare_states(original, copy)) == [f"rng/0.{generator}"]


def without(name):
    def change(tensors):
        for key in [key for key in tensors if key.startswith(f"{name}@")]:
            del tensors[key]

    return change


def test_what_one_state_lacks_is_named(trained):
    original, copy = trained
    edit(copy / "weights.0.safetensors", without(QKV))
    for sides in [(original, copy), (copy, original)]:
        assert compare_states(*sides).differences == (f"{QKV}: only in {original}",)


@pytest.mark.parametrize(
    "lost", ["trainer.json", "generators-0.json", "weights.0.safetensors", "optimizer.0.safetensors"]
)
def test_a_state_that_is_not_whole_is_refused(trained, lost):
    original, copy = trained
    (copy / lost).unlink()
    with pytest.raises(StorageError, match=str(copy)):
        compare_states(original, copy)
    if lost != "trainer.json":
        (copy / lost).write_bytes((original / lost).read_bytes()[:300])
        with pytest.raises(StorageError, match=str(copy)):
            compare_states(original, copy)


def test_who_compares_imports_torch_only_to_compare():
    code = (
        "import sys; from trainer_core.state import facts; assert not {'torch', 'numpy'} & {*sys.modules}; "
        "from flows.proof import compare; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
