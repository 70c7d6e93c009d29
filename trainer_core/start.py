"""Start of a trainer rank: the platform first, then everything that imports Megatron. Imports neither itself."""

import gc
from typing import TYPE_CHECKING

from trainer_core.collector import paused
from trainer_core.config import Device, RankSpec, TrainerConfig

if TYPE_CHECKING:
    from trainer_core.trainer import Trainer


def start_trainer(model_dir: str, config: TrainerConfig, rank: RankSpec) -> "Trainer":
    """Bring Megatron up on `rank.device`, meet the other ranks and build the model without weights. A process that was
    a rank before, of a group that has ended, leaves that first. Raises InputError if the model is missing or does not
    fit the layout, or the device is not available."""
    with paused():
        from trainer_core.platform.platform import prepare, use_deterministic_kernels

        platform = prepare(rank.device, rank.local_rank)
        if rank.chooses_kernels:
            use_deterministic_kernels()

        from trainer_core.model.mesh import leave_ended
        from trainer_core.trainer import Trainer  # imports Megatron, which needs the platform prepared

    if leave_ended():
        gc.unfreeze()
        gc.collect()  # the model of that time
    trainer = Trainer(model_dir, config, rank, platform)
    gc.collect()
    # until `close`: a collection would look at a million objects of the libraries, for half a second, also in an update
    gc.freeze()
    return trainer


def import_trainer(device: Device) -> None:
    """Import what `start_trainer` needs, and choose no card."""
    with paused():
        from trainer_core.platform.platform import import_for

        import_for(device)
        import trainer_core.trainer  # noqa: F401
