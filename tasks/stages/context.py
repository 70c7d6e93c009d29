"""What a run works with: where it is stored, what it is made from, who computes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from storage.backends.root import Root
from storage.manifest import Fence
from storage.write_behind import Outbox
from tasks.config.run import RunConfig
from tasks.stages.names import Stage
from tasks.stages.views import Performed, View
from tasks.workers.interface import Workers


class Outcome(Protocol):
    """What came of a stage: a Prefect state, or what was done in place."""

    def result(self) -> View:
        """The view of the stage's manifest, or what the stage raised."""
        ...


Performer = Callable[[int, Callable[[], Performed], tuple[View, ...]], Outcome]
"""Does the work of a stage where it can be seen, given the iteration, the work and the inputs that it is made from."""


def directly(_stage: Stage) -> Performer:
    """Do a stage in place, seen by nobody."""
    return lambda _iteration, work, _inputs: work()


def unannounced(_iteration: int, _stage: Stage) -> None:
    """Tell nobody which stage begins."""


@dataclass(frozen=True)
class RunContext:
    """Handed to every stage beside the manifests. It holds no result of a stage."""

    run: str
    root: Root
    config: RunConfig
    config_digest: str
    """Identity of the configuration under which the run was recorded; every manifest of the run carries it."""
    workers: Workers
    scratch: Path
    """Local folder for files that are on their way."""
    fence: Fence | None = None
    """The lease under which this process drives the run; a commit without it is refused."""
    outbox: Outbox = field(default_factory=Outbox)
    """What is stored and published behind the stages."""
    performer: Callable[[Stage], Performer] = directly
    """How a stage is done: as a Prefect task in a flow, else directly."""
    announce: Callable[[int, Stage], None] = unannounced
    """Is told of each stage before it is done."""
