"""Objects that a trainer's process hides from the garbage collector, and those that it does not."""

import gc
import weakref

from tests.trainer_core.ranks import run_ranks
from trainer_core.config import OptimizerConfig, RankSpec, TrainerConfig
from trainer_core.start import start_trainer

PLAIN = TrainerConfig(optimizer=OptimizerConfig(learning_rate=1e-2), micro_batch_size=8, max_length=64)


class Loop:
    """A cycle that only the collector can free."""

    def __init__(self):
        self.own = self


def started_twice(rank, world_size, store, model_dir):
    inherited = weakref.ref(Loop())
    gc.freeze()  # ranks of tests are forked from such a process
    trainer = start_trainer(model_dir, PLAIN, RankSpec(rank=rank, world_size=world_size, store=store))
    watched = gc.get_freeze_count(), len(gc.get_objects()), inherited() is not None
    first = weakref.ref(trainer._model.chunks[0])
    trainer.close()
    del trainer
    again = start_trainer(model_dir, PLAIN, RankSpec(rank=rank, world_size=world_size, store=f"{store}-again"))
    kept = first() is not None
    again.close()
    return watched, kept


def test_collections_do_not_look_at_what_stays(model_dir):
    (frozen, looked_at, left_alone), kept = run_ranks(1, started_twice, model_dir)[0]
    assert frozen > 10 * looked_at
    assert left_alone
    assert not kept
