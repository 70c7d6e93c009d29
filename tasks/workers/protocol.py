"""What stages ask of the processes that compute, whoever runs them: Ray, or the small workers of the fault tests."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainer_core.config import TrainerConfig

if TYPE_CHECKING:
    from tasks.workers.engines import EngineHandle
    from tasks.workers.trainers import TrainerGroup


class Pending[R](Protocol):
    """A call that was sent and whose results were not asked for yet."""

    def wait(self, deadline_s: float) -> R:
        """The results.

        Raises:
            WorkerLost: a member died, failed by an error that is none of ours, or did not answer within the deadline;
                the group is ended.
            RatchetError: what all members raised.
        """
        ...


class Group(Protocol):
    """Processes that work in step: every call goes to all of them, and they are dead as soon as one of them is."""

    def submit(self, method: str, *arguments: Any, **options: Any) -> Pending[list[Any]]:
        """Call a method on every member with the same arguments, without waiting; one result a member.

        Raises:
            WorkerLost: the group has ended.
        """
        ...

    def alive(self) -> bool:
        """Whether no member is known to be dead. A group with a dead member is ended."""
        ...

    def processes(self) -> list[int]:
        """Process ids of the members."""
        ...

    def end(self) -> None:
        """End the members' processes."""
        ...


class Workers(Protocol):
    """The trainer ranks and engines of one run, started when first needed and replaced when they have died."""

    def warm(self, model_dir: Path, config: TrainerConfig) -> None:
        """Start whatever is not there, all at once, without waiting."""
        ...

    def trainers(self, model_dir: Path, config: TrainerConfig) -> "TrainerGroup":
        """The run's trainer ranks. A group that is new or was restarted holds no weights; ask its identity.

        Raises:
            WorkerLost: what they run under has died since it was started.
        """
        ...

    def engines(self, model_dir: Path) -> list["EngineHandle"]:
        """The run's engines. One that is new or was restarted holds the weights in `model_dir`; ask its identity.

        Raises:
            WorkerLost: what they run under has died since it was started.
        """
        ...

    def processes(self) -> dict[str, int]:
        """Process ids of what was started: `trainer-RANK`, `engine-NUMBER`, `node`."""
        ...
