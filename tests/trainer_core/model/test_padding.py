"""A vocabulary that tensor-parallel ranks cannot divide is padded with zeros that only the model sees."""

import numpy as np
import pytest

from storage.errors import RatchetError
from tests.trainer_core.models import ODD_VOCABULARY, random_samples, random_sequences, read_export
from tests.trainer_core.oracle import export
from tests.trainer_core.ranks import run_trainers
from trainer_core.config import OptimizerConfig, ParallelConfig, TrainerConfig
from trainer_core.state.comparison import compare_states

OPTIMIZER = OptimizerConfig(learning_rate=1e-3, weight_decay=0.1)
LAYOUTS = {
    "single": ParallelConfig(),
    "tp2": ParallelConfig(tensor=2),
    "pp2-tp2": ParallelConfig(tensor=2, pipeline=2),
}


def configuration(layout):
    return TrainerConfig(parallel=LAYOUTS[layout], optimizer=OPTIMIZER, max_length=64)


def train(trainer, folder):
    trainer.import_model()
    export(trainer, f"{folder}/imported")
    logprobs = trainer.logprobs(random_sequences(1))
    metrics = [trainer.train_policy(random_samples(seed), 1.0) for seed in (1, 2)]
    export(trainer, f"{folder}/trained")
    return trainer.save(f"{folder}/state").identity, logprobs, metrics


def move(trainer, folder, target):
    loaded = trainer.load(f"{folder}/state")
    export(trainer, f"{folder}/{target}")
    trainer.save(f"{folder}/{target}-state")
    trainer.train_policy(random_samples(3), 1.0)
    trainer.save(f"{folder}/{target}-next")  # refused if the padding were trained
    return loaded.identity


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["tied", "untied"])
def test_padding_changes_neither_results_nor_states(odd_model_dirs, tmp_path, tied):
    original, found = read_export(odd_model_dirs[tied]), {}
    for layout in ("single", "pp2-tp2"):
        folder = tmp_path / layout
        found[layout] = run_trainers(odd_model_dirs[tied], configuration(layout), train, str(folder))[0]
        imported = read_export(folder / "imported")
        assert imported.keys() == original.keys()
        assert all(np.array_equal(imported[name], original[name]) for name in original)
        assert {len(tensor) for name, tensor in imported.items() if "embed" in name or "head" in name} == {
            ODD_VOCABULARY
        }
    (_, expected, metrics), (_, logprobs, padded) = found["single"], found["pp2-tp2"]
    for one, other in zip(expected, logprobs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    assert padded[0] == pytest.approx(metrics[0], abs=1e-4, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), [("tp2", "single"), ("single", "tp2")])
def test_a_padded_state_moves_bit_by_bit(odd_model_dirs, tmp_path, source, target):
    (identity, _, _), *_ = run_trainers(odd_model_dirs[True], configuration(source), train, str(tmp_path))
    for moved in run_trainers(odd_model_dirs[True], configuration(target), move, str(tmp_path), target):
        assert moved.differences(identity, generators=False) == []
    left, right = read_export(tmp_path / target), read_export(tmp_path / "trained")
    assert all(left[name].tobytes() == right[name].tobytes() for name in right)
    compared = compare_states(tmp_path / "state", tmp_path / f"{target}-state")
    assert [line for line in compared.differences if not line.startswith(("rng/", "trainer.json"))] == []
    assert compared.weights > 5


def spoil(trainer, folder):
    """The error of a save after something has trained the padding."""
    trainer.import_model()
    trainer.train_policy(random_samples(1), 1.0)
    embedding = trainer._model.modules[0].embedding.word_embeddings.weight
    if trainer._mesh.rank == 1:  # holds the last rows
        embedding.data[-1, 0] = 1e-30
    with pytest.raises(RatchetError) as caught:
        trainer.save(folder)
    if trainer._mesh.rank == 1:
        embedding.data[-1, 0] = 0
    trainer.save(folder)
    return str(caught.value)


def test_padding_that_is_not_zero_is_refused(odd_model_dirs, tmp_path):
    for message in run_trainers(odd_model_dirs[True], configuration("tp2"), spoil, str(tmp_path)):
        assert "belong to no token" in message
