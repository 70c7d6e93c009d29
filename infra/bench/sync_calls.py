"""Calls of the sync bench to trainer ranks and engine beyond those of a run. Imports no torch or vLLM."""

from typing import Protocol

from infra.bench.sync_engine import StockTensors, SyncEngine
from tasks.workers.interface import EngineHandle, Pending, TrainerGroup
from trainer_core.weights.channel import Channel
from trainer_core.weights.plan import WeightPlan


class SyncRankProtocol(Protocol):
    """One trainer rank of the bench, beyond `TrainerProtocol`."""

    def draw(self, seed: int) -> None:
        """Draw new weights: matrices around 0, vectors, which are norms, around 1."""
        ...

    def keep_plan(self, keep: bool) -> None:
        """Let `plan_weights` return its last plan from now on, for that version; or let it plan again."""
        ...

    def look(self, seen: bool) -> None:
        """Compute digests from now on, or none."""
        ...

    def object_collectives(self) -> int:
        """Collectives of Python objects since the last call."""
        ...

    def card_bytes(self) -> int:
        """Memory of the rank's card in use, by all processes; 0 on CPU."""
        ...

    def arena_bytes(self) -> int:
        """Size of the arenas of the last plan."""
        ...

    def show_arenas(self, channel: Channel, plan: WeightPlan) -> None:
        """Let engines open arenas of this rank, filled with anything."""
        ...

    def stock_files(self, directory: str) -> None:
        """Export by megatron-bridge with fresh tasks; rank 0 writes safetensors."""
        ...

    def stock_handles(self, directory: str, workers: int) -> None:
        """Export by megatron-bridge with fresh tasks into vLLM's own transfer of CUDA IPC handles; returns when the
        engine has loaded them. `workers` of the engine share cards with the first ranks.

        Raises:
            WorkerLost: the engine does not report that.
        """
        ...

    def stock_tensors(self) -> StockTensors:
        """Names, types and shapes of the tensors of `stock_broadcast`, found by exporting once."""
        ...

    def stock_meet(self, port: int, workers: int) -> None:
        """Form the NCCL group of rank 0 and the engine's workers, as vLLM's own transfer does it."""
        ...

    def stock_broadcast(self) -> None:
        """Export by megatron-bridge with fresh tasks into vLLM's own packed broadcasts from rank 0."""
        ...


class SyncGroup(TrainerGroup, SyncRankProtocol, forwards=SyncRankProtocol):
    """The trainer ranks of the bench."""

    def object_collectives(self) -> int:
        """Sum over all ranks."""
        return sum(self.results(self.submit(SyncRankProtocol.object_collectives)))

    def card_bytes(self) -> int:
        """Sum over the cards of all ranks."""
        return sum(self.results(self.submit(SyncRankProtocol.card_bytes)))


class SyncEngineHandle(EngineHandle):
    """The engine of the bench."""

    def _answer[R](self, pending: Pending[list[R]]) -> R:
        return self.results(pending)[0]

    def stock_files(self, directory: str) -> None:
        """See `SyncEngine.stock_files`."""
        self._answer(self.submit(SyncEngine.stock_files, directory))

    def stock_handles(self, directory: str) -> None:
        """See `SyncEngine.stock_handles`."""
        self._answer(self.submit(SyncEngine.stock_handles, directory))

    def stock_meet(self, port: int, workers: int) -> None:
        """See `SyncEngine.stock_meet`."""
        self._answer(self.submit(SyncEngine.stock_meet, port, workers))

    def stock_broadcast(self, tensors: StockTensors) -> None:
        """See `SyncEngine.stock_broadcast`."""
        self._answer(self.submit(SyncEngine.stock_broadcast, tensors))

    def look(self, seen: bool) -> None:
        """See `SyncEngine.look`."""
        self._answer(self.submit(SyncEngine.look, seen))

    def card_bytes(self) -> int:
        """See `SyncEngine.card_bytes`."""
        return self._answer(self.submit(SyncEngine.card_bytes))

    def copy_seconds(self, channel: Channel, plan: WeightPlan) -> list[float]:
        """See `SyncEngine.copy_seconds`."""
        return self._answer(self.submit(SyncEngine.copy_seconds, channel, plan))
