"""Starting the trainer ranks as Ray actors."""

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import ray.util

from storage.errors import InputError
from storage.ownership.scratch import new_folder
from tasks.config.environment import Settings, trainer_environment, use_interface_of
from tasks.workers import meeting
from tasks.workers.actors import WorkerGroup, fresh_names, group_name, placed
from trainer_core.config import Device, RankSpec, TrainerConfig
from trainer_core.protocol import TrainerProtocol
from trainer_core.start import start_trainer

Start = Callable[[str, TrainerConfig, RankSpec], TrainerProtocol]


class RankActors(WorkerGroup):
    """The actors of trainer ranks, or of an engine, and what they have met in: a folder of this host, or, under the
    name of their group, a cluster."""

    def __init__(
        self, labels: Sequence[str], actors: Sequence[Any], meeting_place: Path | None = None, name: str | None = None
    ) -> None:
        super().__init__(labels, actors)
        self._meeting_place, self._name = meeting_place, name

    @classmethod
    def found(cls, name: str, labels: Sequence[str], actors: Sequence[Any]) -> Self:
        """A group that an earlier flow process has started on a cluster."""
        return cls(labels, actors, name=name)

    def end(self, spared: Collection[int] = ()) -> None:
        super().end(spared)
        if self._meeting_place is not None:
            shutil.rmtree(self._meeting_place, ignore_errors=True)
        if self._name is not None:
            meeting.forget(self._name)


def start_trainers(
    prefix: str,
    model_dir: str,
    config: TrainerConfig,
    device: Device,
    settings: Settings,
    deadline_s: float,
    deterministic: bool = False,
    start: Start = start_trainer,
    seats: Sequence[Mapping[str, Any]] = (),
    there: Mapping[int, Any] = MappingProxyType({}),
) -> RankActors:
    """Start the ranks of the layout without waiting for them. They meet at a file of this host, or on a cluster by
    Ray, so that no port is opened for that. They have `deadline_s` to start; `deterministic` restricts them to kernels
    whose results do not depend on timing, and `start` makes a rank in its process. `seats` are Ray's options of each
    rank. Actors that are `there` already take the places of ranks, each at the end of what it does. Raises InputError:
    there are fewer cards than ranks."""
    world_size = config.parallel.world_size
    if device == "cuda" and settings.local and world_size > len(settings.gpus):
        raise InputError(
            f"the layout {config.parallel} needs {world_size} GPUs, one per rank, but {len(settings.gpus)} are "
            "visible; choose a smaller layout under [train.parallel]"
        )
    environment = trainer_environment(device, settings.gpus, settings.local, deterministic)
    names = fresh_names(prefix, world_size)
    actors = placed(names, environment, not settings.local, seats, there)
    if settings.local:
        group = RankActors(rank_labels(world_size), actors, folder := new_folder())
        store = str(folder / "store")
    else:
        group = RankActors.found(group_name(names[0]), rank_labels(world_size), actors)
        store, start = meeting.meeting(group_name(names[0])), partial(_on_its_host, start)
    group.keeps = device == "cpu"  # NCCL's calls do not end when another rank has died
    ranks = rank_specs(world_size, store, device, deterministic, settings.local)
    group.start(start, [(model_dir, config, rank) for rank in ranks], deadline_s)
    return group


def _on_its_host(start: Start, model_dir: str, config: TrainerConfig, rank: RankSpec) -> TrainerProtocol:
    """Start a rank where others may be on other hosts."""
    use_interface_of(ray.util.get_node_ip_address())
    meeting.enable()
    return start(model_dir, config, rank)


def rank_specs(world_size: int, store: str, device: Device, deterministic: bool, local: bool = True) -> list[RankSpec]:
    """The places of the ranks, which meet at `store`. Where Ray chooses the cards, each sees one."""
    common = {"world_size": world_size, "store": store, "device": device, "deterministic": deterministic}
    return [
        RankSpec.model_validate({"rank": rank, "local_rank": rank if local else 0, **common})
        for rank in range(world_size)
    ]


def rank_labels(world_size: int) -> list[str]:
    """Names of ranks in messages."""
    return [f"trainer rank {rank} of {world_size}" for rank in range(world_size)]
