"""The small workers that a configuration asks for."""

from tasks.config.run import RunConfig
from tests.small.adapters import AdaptedTrainer, LiveEngine
from tests.small.routes import RoutedEngine
from tests.small.workers import SmallEngine, SmallTrainer
from trainer_core.config import TrainerConfig


def trainer_of(config: TrainerConfig) -> type[SmallTrainer]:
    return SmallTrainer if config.lora is None else AdaptedTrainer


def engine_of(config: RunConfig) -> type[SmallEngine]:
    if config.engine.adapter == "live":
        return LiveEngine
    return RoutedEngine if config.train.experts.replay else SmallEngine
