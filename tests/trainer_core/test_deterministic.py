"""A rank that is asked to be deterministic tells torch and Megatron so; on CPU the numbers are the same ones."""

from tests.trainer_core.models import random_samples, read_export
from tests.trainer_core.ranks import run_ranks
from trainer_core.config import OptimizerConfig, RankSpec, TrainerConfig
from trainer_core.trainer import Trainer

CONFIG = TrainerConfig(optimizer=OptimizerConfig(learning_rate=1e-3), max_length=64)


def train(rank, world_size, store, model_dir, folder, deterministic):
    """Metrics and weights of an iteration, and what torch and Megatron were told."""
    import torch

    spec = RankSpec(rank=rank, world_size=world_size, store=store, deterministic=deterministic)
    trainer = Trainer(model_dir, CONFIG, spec)
    trainer.import_model()
    metrics = trainer.train_policy(random_samples(1), 1.0)
    trainer.export(folder)
    told = {
        "torch": torch.are_deterministic_algorithms_enabled(),
        "torch only warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn": torch.backends.cudnn.deterministic,
        "Megatron": trainer._learner._model.config.deterministic_mode,
    }
    trainer.close()
    return metrics, told


def test_a_rank_passes_it_on_and_on_cpu_it_changes_nothing(model_dir, tmp_path):
    (metrics, told), *_ = run_ranks(1, train, model_dir, str(tmp_path / "asked"), True)
    assert told == {"torch": True, "torch only warns": False, "cudnn": True, "Megatron": True}
    (other_metrics, told), *_ = run_ranks(1, train, model_dir, str(tmp_path / "not asked"), False)
    assert not any(told.values())
    assert metrics == other_metrics
    weights, others = read_export(tmp_path / "asked"), read_export(tmp_path / "not asked")
    assert weights.keys() == others.keys()
    assert [name for name in weights if weights[name].tobytes() != others[name].tobytes()] == []
