"""The trainer ranks: one process each, behind typed calls that go to all of them and wait at most until a deadline."""

from collections.abc import Sequence
from pathlib import Path

from tasks.workers.group import GroupHandle
from trainer_core.config import MemoryConfig
from trainer_core.protocol import SavedFiles, TrainerProtocol


class TrainerGroup(GroupHandle, TrainerProtocol, forwards=TrainerProtocol):
    """All trainer ranks. Every call goes to every rank and raises what `Trainer` raises, or WorkerLost. It returns the
    answer of the first rank, where that of all is not said below. For `plan_weights` and `send_weights`, to which each
    rank has its own answer, use `submit` and `results`."""

    def identity(self) -> str | None:
        """Identity of the committed state that all ranks hold; None if they hold none, or different ones."""
        return _common(self.results(self.submit(TrainerProtocol.identity)))

    def reference(self) -> str | None:
        """Identity of the reference that all ranks hold, or None."""
        return _common(self.results(self.submit(TrainerProtocol.reference)))

    def save(self, directory: Path) -> SavedFiles:
        """`TrainerProtocol.save`; the names of all ranks' files, sorted."""
        ranks = self.results(self.submit(TrainerProtocol.save, directory))
        of_ranks = tuple(rank.names for rank in ranks)
        return SavedFiles(tuple(sorted({name for names in of_ranks for name in names})), ranks[0].identity, of_ranks)

    def release(self, memory: MemoryConfig) -> int:
        """`TrainerProtocol.release`; the bytes of all ranks together."""
        return sum(self.results(self.submit(TrainerProtocol.release, memory)))


def _common[R](values: Sequence[R]) -> R | None:
    return values[0] if len(set(values)) == 1 else None
