"""Start of a trainer rank of the sync bench. Imports neither torch nor Megatron."""

from typing import TYPE_CHECKING

from trainer_core.config import RankSpec, TrainerConfig

if TYPE_CHECKING:
    from infra.bench.sync_rank import SyncRank


def start_sync_rank(model_dir: str, config: TrainerConfig, rank: RankSpec) -> "SyncRank":
    """Start the rank in this process, as `start_trainer` starts the product's."""
    from trainer_core.platform.platform import prepare

    platform = prepare(rank.device, rank.local_rank)
    from infra.bench.sync_rank import SyncRank  # imports Megatron, which needs the platform prepared

    return SyncRank(model_dir, config, rank, platform)
