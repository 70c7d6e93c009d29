"""Starting the trainer ranks as Ray actors."""

import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from storage.errors import InputError
from storage.ownership.scratch import new_folder
from tasks.config.environment import Settings, trainer_environment
from tasks.workers.actors import TOKEN_CHARACTERS, WorkerGroup, fresh_names, group_name, spawn
from trainer_core.config import Device, RankSpec, TrainerConfig
from trainer_core.protocol import TrainerProtocol
from trainer_core.start import start_trainer

_MEETING = "ratchet-rendezvous"


class RankActors(WorkerGroup):
    """The actors of trainer ranks, or of an engine, and the folder of their rendezvous."""

    def __init__(self, labels: Sequence[str], actors: Sequence[Any], meeting_place: Path | None = None) -> None:
        super().__init__(labels, actors)
        self._meeting_place = meeting_place

    @classmethod
    def found(cls, name: str, labels: Sequence[str], actors: Sequence[Any]) -> Self:
        """A group that an earlier flow process has started, with the folder where its ranks met."""
        return cls(labels, actors, rendezvous(name))

    def end(self) -> None:
        super().end()
        if self._meeting_place is not None:
            shutil.rmtree(self._meeting_place, ignore_errors=True)


def start_trainers(
    prefix: str,
    model_dir: str,
    config: TrainerConfig,
    device: Device,
    settings: Settings,
    deadline_s: float,
    deterministic: bool = False,
    start: Callable[[str, TrainerConfig, RankSpec], TrainerProtocol] = start_trainer,
) -> RankActors:
    """Start the ranks of the layout without waiting for them. They meet at a file, so that no port is opened. They have
    `deadline_s` to start; `deterministic` restricts them to kernels whose results do not depend on timing, and `start`
    makes a rank in its process. Raises InputError: there are fewer cards than ranks."""
    world_size = config.parallel.world_size
    if device == "cuda" and world_size > len(settings.gpus):
        raise InputError(
            f"the layout {config.parallel} needs {world_size} GPUs, one per rank, but {len(settings.gpus)} are "
            "visible; choose a smaller layout under [train.parallel]"
        )
    environment = trainer_environment(device, settings.gpus, settings.local, deterministic)
    names = fresh_names(prefix, world_size)
    meeting_place = meet(names, settings)
    actors = spawn(names, [environment] * world_size, detached=not settings.local)
    group = RankActors(rank_labels(world_size), actors, meeting_place)
    ranks = rank_specs(world_size, meeting_place / "store", device, deterministic)
    group.start(start, [(model_dir, config, rank) for rank in ranks], deadline_s)
    return group


def meet(names: Sequence[str], settings: Settings) -> Path:
    """A new folder where the processes of a group meet, given the names of its actors."""
    # detached ones outlive this process, and so must the folder
    folder = new_folder() if settings.local else rendezvous(group_name(names[0]))
    folder.mkdir(mode=0o700, exist_ok=settings.local)
    return folder


def rendezvous(group: str) -> Path:
    """Folder in which the detached ranks of a group meet; its name contains theirs, to be removed with them."""
    run, token = group.partition("/")[0], group.rpartition("/")[2]
    return Path(tempfile.gettempdir(), f"{_MEETING}-{run}-{token}")


def forget_rendezvous(run: str) -> list[Path]:
    """Remove the folders where groups of a run met; returns them."""
    name = re.compile(rf"{_MEETING}-{re.escape(run)}-[0-9a-f]{{{TOKEN_CHARACTERS}}}")
    found = [path for path in Path(tempfile.gettempdir()).glob(f"{_MEETING}-*") if name.fullmatch(path.name)]
    for path in found:
        shutil.rmtree(path, ignore_errors=True)
    return found


def rank_specs(world_size: int, store: Path, device: Device, deterministic: bool) -> list[RankSpec]:
    """The places of the ranks of one host, which meet at the file `store`."""
    common = {"world_size": world_size, "store": str(store), "device": device, "deterministic": deterministic}
    return [RankSpec.model_validate({"rank": rank, "local_rank": rank, **common}) for rank in range(world_size)]


def rank_labels(world_size: int) -> list[str]:
    """Names of ranks in messages."""
    return [f"trainer rank {rank} of {world_size}" for rank in range(world_size)]
