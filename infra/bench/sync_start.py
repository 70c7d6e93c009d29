"""How a trainer rank of the sync bench starts. Imports neither torch nor Megatron."""

from typing import TYPE_CHECKING

from trainer_core.config import RankSpec, TrainerConfig

if TYPE_CHECKING:
    from infra.bench.sync_rank import SyncRank


def start_sync_rank(model_dir: str, config: TrainerConfig, rank: RankSpec) -> "SyncRank":
    """As `start_trainer`."""
    from trainer_core.platform.platform import prepare

    platform = prepare(rank.device, rank.local_rank)
    from infra.bench.sync_rank import SyncRank  # imports Megatron, which needs the platform prepared

    return SyncRank(model_dir, config, rank, platform)
