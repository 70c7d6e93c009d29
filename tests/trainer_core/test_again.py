"""A process that is a rank again, after another rank of its group has died, computes what a fresh one does."""

import os
import signal

import pytest

from tests.trainer_core.models import random_samples
from tests.trainer_core.ranks import run_ranks
from trainer_core.config import OptimizerConfig, ParallelConfig, PolicyConfig, RankSpec, TrainerConfig
from trainer_core.start import start_trainer

CONFIG = TrainerConfig(
    parallel=ParallelConfig(pipeline=2),
    optimizer=OptimizerConfig(learning_rate=1e-3),
    policy=PolicyConfig(),
    micro_batch_size=4,
    max_length=64,
)


def trained_again(rank, world_size, store, model_dir, folder):
    """Identities of the first rank's state after an update: of fresh ranks, and again after the other one was killed
    and replaced by a new process."""

    def started(name):
        return start_trainer(model_dir, CONFIG, RankSpec(rank=rank, world_size=world_size, store=f"{store}-{name}"))

    undisturbed = None
    child = os.fork() if rank else None
    if child:
        os.waitpid(child, 0)
    else:
        trainer = started("first")
        trainer.import_model()
        trainer.save(folder)
        trainer.train_policy(random_samples(), 1.0)
        undisturbed = trainer.state_identity()
        if rank:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError):
            trainer.train_policy(random_samples(), 1.0)
        del trainer
    again = started("again")
    again.load(folder)
    again.train_policy(random_samples(), 1.0)
    repeated = again.state_identity()
    again.close()
    return undisturbed, repeated


def test_a_survivor_trains_the_same_bits(model_dir, tmp_path):
    (undisturbed, repeated), (_, others) = run_ranks(2, trained_again, model_dir, tmp_path, timeout=300)
    assert undisturbed == repeated == others
