"""The protocol that stages require of the processes that compute: Ray's, or the small workers of the fault tests."""

from pathlib import Path
from typing import Protocol

from tasks.workers.engines import EngineHandle
from tasks.workers.placement import Placement
from tasks.workers.trainers import TrainerGroup
from trainer_core.config import TrainerConfig


class Workers(Protocol):
    """The trainer ranks and engines of one run, started when first needed and replaced when they have died."""

    def expect(self) -> None:
        """Begin with what starts need beside their arguments, without waiting: all will be asked for soon."""

    def warm(self, model_dir: Path, config: TrainerConfig) -> None:
        """Start whatever is missing, all at once, without waiting."""

    def trainers(self, model_dir: Path, config: TrainerConfig) -> TrainerGroup:
        """The run's trainer ranks. A group that is new or was restarted holds no weights; check its identity. Raises
        WorkerLost: what they run under has died since it was started."""
        ...

    def engines(self, model_dir: Path) -> list[EngineHandle]:
        """The run's engines. One that is new or was restarted holds the weights in `model_dir`; check its identity.
        Raises WorkerLost: what they run under has died since it was started."""
        ...

    def judge(self, model_dir: Path) -> EngineHandle:
        """The engine of `[engines.judge]`, which serves the model in `model_dir`; one that has died is replaced. Raises
        as `engines`."""
        ...

    def placement(self) -> Placement:
        """The cards of ranks and engines. Raises InputError: not on this machine."""
        ...

    def processes(self) -> dict[str, int]:
        """Process ids of what was started: `trainer-RANK`, `engine-NUMBER`, `node`."""
        ...
