"""Comparing saved states: what is equal, what is reported, and that a single bit is found."""

import dataclasses
import io
import json
import math
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

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


def edit(folder, index, change):
    """Change one stored tensor or object; its new version is at the end of its file."""
    metadata = read_metadata(folder)
    place = metadata.storage_data[index]
    path = Path(folder, place.relative_path)
    content = path.read_bytes()
    value = torch.load(io.BytesIO(content[place.offset : place.offset + place.length]), weights_only=False)
    changed = io.BytesIO()
    torch.save(change(value), changed)
    path.write_bytes(content + changed.getvalue())
    metadata.storage_data[index] = dataclasses.replace(place, offset=len(content), length=len(changed.getvalue()))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def read_metadata(folder):
    return pickle.loads(Path(folder, ".metadata").read_bytes())


def put(index, number):
    def change(tensor):
        tensor[index] = number
        return tensor

    return change


def names_of(comparison):
    return [line.split(": ")[0] for line in comparison.differences]


@pytest.mark.parametrize("layout", LAYOUTS)
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


@pytest.mark.parametrize(("name", "offset", "index"), [(QKV, (2, 0, 0), (0, 3, 7)), (MOMENT, (0, 0), (9, 5))])
def test_a_changed_number_is_shown_in_full(trained, name, offset, index):
    original, copy = trained
    edit(copy, MetadataIndex(name, offset), put(index, 0.1))
    (line,) = compare_states(original, copy).differences
    at = tuple(begin + step for begin, step in zip(offset, index, strict=True))
    assert line.startswith(f"{name}: 1 of ")
    assert f"elements differ, first at {at}: " in line
    assert line.endswith(f" against {torch.tensor(0.1).item()!r}")  # 0.10000000149011612


def test_bits_decide_not_values(trained, tmp_path):
    original, copy = trained
    place = MetadataIndex(MOMENT, (0, 0))
    shutil.copytree(original, tmp_path / "other")
    for number, other, lines in [(0.0, -0.0, 1), (math.nan, math.nan, 0), (math.nan, -math.nan, 1)]:
        edit(copy, place, put((1, 2), number))
        edit(tmp_path / "other", place, put((1, 2), other))
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


def test_what_one_state_lacks_is_named(trained):
    original, copy = trained
    metadata = read_metadata(copy)
    del metadata.state_dict_metadata[QKV]
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    (copy / "generators-0.json").unlink()
    for sides in [(original, copy), (copy, original)]:
        assert compare_states(*sides).differences == tuple(f"{name}: only in {original}" for name in (QKV, "rng/0"))


@pytest.mark.parametrize("lost", [".metadata", "trainer.json", "__0_0.distcp", "optimizer.__0_0.distcp"])
def test_a_state_that_is_not_whole_is_refused(trained, lost):
    original, copy = trained
    (copy / lost).unlink()
    with pytest.raises(StorageError, match=str(copy)):
        compare_states(original, copy)
    if lost != "trainer.json":
        (copy / lost).write_bytes((original / lost).read_bytes()[:300])
        with pytest.raises(StorageError, match=str(copy)):
            compare_states(original, copy)


def test_importing_it_costs_nothing():
    code = (
        "import sys; from trainer_core.state import comparison, facts; assert not {'torch', 'numpy'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
