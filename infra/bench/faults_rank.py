"""A trainer rank of the bench of failures: it notes when it has done what, and kills itself at planned updates."""

import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.bench.faults_marks import Plan, note
from trainer_core.config import RankSpec, TrainerConfig
from trainer_core.start import start_trainer

if TYPE_CHECKING:
    from trainer_core.trainer import Trainer

_wrapped: set[str] = set()  # a process that is a rank again, of another group, is wrapped already


def waited(records: list[object], responses: list[str], seconds: float) -> list[float]:
    """A reward that takes its time once for all samples, and is more for shorter responses."""
    time.sleep(seconds)
    return [1.0 / (1 + len(response)) for response in responses]


def timed_start(folder: Path, model_dir: str, config: TrainerConfig, rank: RankSpec) -> "Trainer":
    """`start_trainer`, with notes."""
    note(folder, "process")
    from trainer_core.platform.platform import prepare

    prepare(rank.device, rank.local_rank)
    import trainer_core.trainer as module

    note(folder, "imported")
    if not _wrapped:
        _noting(folder, "met", module, "join")
        _noting(folder, "loaded", module.Trainer, "load")
        _noting(folder, "gradient", module.Optimizer, "update", _last_rank(folder, rank))
    trainer = start_trainer(model_dir, config, rank)
    note(folder, "built")
    return trainer


def _noting(folder: Path, what: str, owner: Any, name: str, before: Callable[[Any], object] | None = None) -> None:
    """Have `owner.name` noted: when it ends, or with `before`, which is called with its object, when it begins."""
    work: Callable[..., Any] = vars(owner)[name]
    _wrapped.add(name)

    @functools.wraps(work)
    def wrapper(*given: Any, **options: Any) -> Any:
        if before is not None:
            note(folder, what)
            before(given[0])
            return work(*given, **options)
        result = work(*given, **options)
        note(folder, what)
        return result

    setattr(owner, name, wrapper)


def _last_rank(folder: Path, rank: RankSpec) -> Callable[[Any], None]:
    """Kills this process at the planned updates, each once, if it is the last rank."""

    planned = Plan.of(folder).at

    def meet(optimizer: Any) -> None:
        claim = folder / f"killed-{optimizer.updates}"
        if rank.rank == rank.world_size - 1 and optimizer.updates in planned and not claim.exists():
            claim.touch()
            note(folder, "killed")
            os.kill(os.getpid(), signal.SIGKILL)

    return meet
