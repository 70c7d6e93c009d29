import re
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from storage.errors import StorageUnavailable
from tests.trainer_core.models import random_examples, random_sequences, read_export
from tests.trainer_core.ranks import run_ranks, run_trainers
from trainer_core.config import OptimizerConfig, ParallelConfig, TrainerConfig

PAIR = TrainerConfig(
    parallel=ParallelConfig(pipeline=2),
    optimizer=OptimizerConfig(learning_rate=1e-2),
    micro_batch_size=8,
    max_length=64,
)
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def export_in_small_files(trainer, folder):
    from trainer_core.weights import export

    export._FILE_BYTES = 1 << 17  # about as large as a layer of the model
    trainer.import_model()
    return trainer.export(folder)


def test_a_layer_is_never_divided_between_files(model_dir, tmp_path):
    records = run_trainers(model_dir, PAIR, export_in_small_files, str(tmp_path))[0]
    files = {record.name: record.file for record in records}
    assert len(set(files.values())) > 2
    for path in tmp_path.iterdir():
        with safe_open(path, framework="numpy") as stored:
            assert {name for name, file in files.items() if file == path.name} == set(stored.keys())
    for layer in range(4):
        own = {file for name, file in files.items() if f".layers.{layer}." in name}
        assert len(own) == 1
    original, exported = read_export(model_dir), read_export(tmp_path)
    assert all(np.array_equal(original[name], exported[name]) for name in original)


def test_parts_of_a_fused_parameter_stand_together(model_dir, tmp_path):
    records = run_trainers(model_dir, PAIR, export_in_small_files, str(tmp_path))[0]
    modules = [re.sub(r".*layers\.\d+\.\w+\.(\w+)\.weight", r"\1", record.name) for record in records]
    for fused in FUSED:
        firsts = [place for place, module in enumerate(modules) if module == fused[0]]
        assert len(firsts) == 4
        assert all(tuple(modules[place : place + len(fused)]) == fused for place in firsts)


def check_digests(rank, world_size, store, folder, records):
    from safetensors.torch import load_file

    from trainer_core.weights.digest import tensor_digest

    files = {record.file: load_file(f"{folder}/{record.file}") for record in records}
    return [record.name for record in records if tensor_digest(files[record.file][record.name]) != record.digest]


def test_records_hold_the_digests_of_what_was_written(model_dir, tmp_path):
    records = run_trainers(model_dir, PAIR, export_in_small_files, str(tmp_path))[0]
    assert run_ranks(1, check_digests, str(tmp_path), records) == [[]]


def export_twice(trainer, folder):
    trainer.import_model()
    first = trainer.export(f"{folder}/first")
    trainer.train_supervised(random_examples(), 1, 8)
    return first, trainer.export(f"{folder}/second"), trainer.logprobs(random_sequences())


def import_and_score(trainer):
    trainer.import_model()
    return trainer.logprobs(random_sequences())


@pytest.fixture
def exported_model(model_dir, tmp_path):
    """A Hugging Face directory made of the second export, and what its trainer scored."""
    first, second, logprobs = run_trainers(model_dir, PAIR, export_twice, str(tmp_path))[0]
    (tmp_path / "second" / "config.json").write_text(Path(model_dir, "config.json").read_text())
    return first, second, logprobs, str(tmp_path / "second")


def test_a_second_export_holds_the_weights_of_now(exported_model):
    first, second, logprobs, directory = exported_model
    assert [record.name for record in first] == [record.name for record in second]
    assert all(left.digest != right.digest for left, right in zip(first, second, strict=True))
    again = run_trainers(directory, PAIR, import_and_score)[0]
    assert all(np.array_equal(left, right) for left, right in zip(logprobs, again, strict=True))


def export_to_a_file(trainer, path):
    trainer.import_model()
    refused = False
    try:
        trainer.export(f"{path}/below")
    except StorageUnavailable as error:
        refused = path in str(error)
    return refused, trainer.logprobs(random_sequences())[0]


def test_a_folder_that_cannot_be_written_stops_rank_0_alone(model_dir, tmp_path):
    (tmp_path / "file").write_text("in the way")
    ranks = run_trainers(model_dir, PAIR, export_to_a_file, str(tmp_path / "file"))
    assert [refused for refused, _ in ranks] == [True, False]
    # the ranks are still in step
    assert np.array_equal(ranks[0][1], ranks[1][1])
