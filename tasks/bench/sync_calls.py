"""What the driver of the sync bench asks of trainer ranks and engine beyond a run's calls. Imports no torch or vLLM."""

from typing import Protocol

from tasks.bench.sync_engine import SyncEngine
from tasks.workers.engines import EngineHandle
from tasks.workers.trainers import TrainerGroup


class SyncRankProtocol(Protocol):
    """One trainer rank of the bench, beyond `TrainerProtocol`."""

    def draw(self, seed: int) -> None:
        """Draw new weights: matrices around 0, vectors, which are norms, around 1."""
        ...

    def keep_plan(self, keep: bool) -> None:
        """Whether `plan_weights` from now on returns what it has made last, for that version."""
        ...

    def object_collectives(self) -> int:
        """Collectives of Python objects since the last call."""
        ...

    def card_bytes(self) -> int:
        """Memory of the card in use, by whatever process; 0 on CPU."""
        ...

    def stock_files(self, directory: str) -> None:
        """Export by megatron-bridge with fresh tasks; rank 0 writes safetensors."""
        ...

    def stock_handles(self, directory: str) -> None:
        """Export by megatron-bridge with fresh tasks into vLLM's own transfer of CUDA IPC handles; returns when the
        engine has loaded them.

        Raises:
            WorkerLost: the engine does not say so.
        """
        ...


class SyncGroup(TrainerGroup):
    """The trainer ranks of the bench."""

    def draw(self, seed: int) -> None:
        """See `SyncRankProtocol.draw`."""
        self._results(self.submit(SyncRankProtocol.draw, seed))

    def keep_plan(self, keep: bool) -> None:
        """See `SyncRankProtocol.keep_plan`."""
        self._results(self.submit(SyncRankProtocol.keep_plan, keep))

    def object_collectives(self) -> int:
        """Of all ranks; see `SyncRankProtocol.object_collectives`."""
        return sum(self._results(self.submit(SyncRankProtocol.object_collectives)))

    def card_bytes(self) -> int:
        """Of rank 0's card; see `SyncRankProtocol.card_bytes`."""
        return self._first(self.submit(SyncRankProtocol.card_bytes))

    def stock_files(self, directory: str) -> None:
        """See `SyncRankProtocol.stock_files`."""
        self._results(self.submit(SyncRankProtocol.stock_files, directory))

    def stock_handles(self, directory: str) -> None:
        """See `SyncRankProtocol.stock_handles`."""
        self._results(self.submit(SyncRankProtocol.stock_handles, directory))


class SyncEngineHandle(EngineHandle):
    """The engine of the bench."""

    def stock_files(self, directory: str) -> None:
        """See `SyncEngine.stock_files`."""
        self._result(self.submit(SyncEngine.stock_files, directory))

    def stock_handles(self, directory: str) -> None:
        """See `SyncEngine.stock_handles`."""
        self._result(self.submit(SyncEngine.stock_handles, directory))
