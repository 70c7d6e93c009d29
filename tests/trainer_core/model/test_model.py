import json
from pathlib import Path

import pytest

from storage.errors import InputError
from tests.trainer_core.ranks import run_ranks
from trainer_core.config import OptimizerConfig, ParallelConfig, RankSpec, TrainerConfig
from trainer_core.start import start_trainer

OPTIMIZER = OptimizerConfig(learning_rate=1e-3)


def refusal(rank, world_size, store, model_dir, parallel):
    with pytest.raises(InputError) as caught:
        start_trainer(
            model_dir,
            TrainerConfig(parallel=parallel, optimizer=OPTIMIZER, max_length=64),
            RankSpec(rank=rank, world_size=world_size, store=store),
        )
    return str(caught.value)


def edited(model_dir, folder, **changes):
    """A copy of the model's configuration with other values."""
    config = json.loads(Path(model_dir, "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return str(folder)


def test_a_directory_without_model_is_refused(tmp_path):
    (message,) = run_ranks(1, refusal, str(tmp_path), ParallelConfig())
    assert str(tmp_path) in message


def test_a_configuration_that_is_not_json_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    (message,) = run_ranks(1, refusal, str(tmp_path), ParallelConfig())
    assert "config.json is not JSON" in message


def test_an_architecture_unknown_to_the_bridge_is_refused(model_dir, tmp_path):
    unknown = edited(model_dir, tmp_path, architectures=["BertForMaskedLM"], model_type="bert")
    (message,) = run_ranks(1, refusal, unknown, ParallelConfig())
    assert "megatron-bridge cannot read the model" in message


def test_every_rank_refuses_an_impossible_layout(model_dir, tmp_path):
    three_layers = edited(model_dir, tmp_path, num_hidden_layers=3)
    messages = run_ranks(2, refusal, three_layers, ParallelConfig(pipeline=2))
    assert all("layers (3)" in message for message in messages)


def test_the_number_of_ranks_must_be_that_of_the_layout(model_dir):
    (message,) = run_ranks(1, refusal, model_dir, ParallelConfig(data=2))
    assert "tp1 pp1 dp2" in message
