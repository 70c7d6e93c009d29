"""Torch and Megatron are set to be deterministic on a GPU; on CPU they are, and the numbers stay the same."""

import subprocess
import sys

import pytest

from tests.trainer_core.models import random_samples, read_export
from tests.trainer_core.oracle import export
from tests.trainer_core.ranks import run_ranks
from trainer_core.config import OptimizerConfig, RankSpec, TrainerConfig
from trainer_core.start import start_trainer

pytestmark = pytest.mark.slow

CONFIG = TrainerConfig(optimizer=OptimizerConfig(learning_rate=1e-3), max_length=64, micro_batch_size=64)
TOLD = """
import torch
from trainer_core.platform.platform import use_deterministic_kernels
assert not torch.are_deterministic_algorithms_enabled()
use_deterministic_kernels()
assert torch.are_deterministic_algorithms_enabled()
assert not torch.is_deterministic_algorithms_warn_only_enabled()
assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
"""


def test_torch_is_held_to_it():
    done = subprocess.run([sys.executable, "-c", TOLD], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("device", "deterministic", "told"),
    [("cuda", True, True), ("cuda", False, False), ("cpu", True, False), ("cpu", False, False)],
)
def test_only_on_a_gpu_have_kernels_to_be_chosen(device, deterministic, told):
    spec = RankSpec(rank=0, world_size=1, store="x", device=device, deterministic=deterministic)
    assert spec.chooses_kernels is told


def settings_of_megatron(rank, world_size, store):
    import torch

    from trainer_core.model.settings import model_settings
    from trainer_core.platform.platform import Platform

    platform = Platform(torch.device("cuda"), "nccl", transformer_engine=True)
    return {deterministic: model_settings(CONFIG, platform, deterministic) for deterministic in (True, False)}


def test_megatron_is_told():
    (settings,) = run_ranks(1, settings_of_megatron)
    assert settings[True] == {**settings[False], "deterministic_mode": True, "cross_entropy_loss_fusion": False}
    assert not settings[False]["deterministic_mode"]


def train(rank, world_size, store, model_dir, folder, deterministic):
    """Metrics of an iteration; its weights are in `folder`."""
    spec = RankSpec(rank=rank, world_size=world_size, store=store, deterministic=deterministic)
    trainer = start_trainer(model_dir, CONFIG, spec)
    trainer.import_model()
    metrics = trainer.train_policy(random_samples(1, groups=64, per_group=8), 1.0)
    export(trainer, folder)
    trainer.close()
    return metrics


def test_on_cpu_it_changes_nothing(model_dir, tmp_path):
    """Megatron's deterministic embedding adds up its gradient in another order, which shows with this many tokens."""
    folders = {deterministic: str(tmp_path / str(deterministic)) for deterministic in (True, False)}
    metrics = [run_ranks(1, train, model_dir, folder, asked) for asked, folder in folders.items()]
    assert metrics[0] == metrics[1]
    weights, others = (read_export(folder) for folder in folders.values())
    assert weights.keys() == others.keys()
    assert [name for name in weights if weights[name].tobytes() != others[name].tobytes()] == []
