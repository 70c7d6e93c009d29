"""An engine as the stages use it: in another process, behind typed calls that wait at most until a deadline."""

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tasks.config.run import WorkersSection
from tasks.engine.protocol import EngineIdentity, EngineProtocol, Sampling, SyncReceipt, TokenIds
from tasks.workers.group import Group, Pending
from trainer_core.weights.records import TensorRecord


class EngineHandle:
    """An engine in another process. Every method waits for it and raises what `Engine` raises, or WorkerLost."""

    def __init__(self, group: Group, deadlines: WorkersSection) -> None:
        self._group, self._deadlines = group, deadlines

    def submit[**P, R](
        self, method: Callable[Concatenate[Any, P], R], *arguments: P.args, **options: P.kwargs
    ) -> Pending[list[R]]:
        """Begin a call of a method of `EngineProtocol`; the resulting list has one entry."""
        return cast(Pending[list[R]], self._group.submit(method.__name__, *arguments, **options))

    def alive(self) -> bool:
        """Whether the process is not known to be dead."""
        return self._group.alive()

    def end(self) -> None:
        """End the process."""
        self._group.end()

    def processes(self) -> list[int]:
        """The process id, as `Group.processes`."""
        return self._group.processes()

    def identity(self) -> EngineIdentity:
        """See `EngineProtocol.identity`."""
        return self._result(self.submit(EngineProtocol.identity))

    def generate(self, prompts: Sequence[TokenIds], seeds: Sequence[int], sampling: Sampling) -> pa.RecordBatch:
        """See `EngineProtocol.generate`."""
        return self._result(self.submit(EngineProtocol.generate, prompts, seeds, sampling))

    def score(self, sequences: Sequence[TokenIds]) -> list[NDArray[np.float32]]:
        """See `EngineProtocol.score`."""
        return self._result(self.submit(EngineProtocol.score, sequences))

    def receive(self, directory: str, version: int, records: Sequence[TensorRecord]) -> SyncReceipt:
        """See `EngineProtocol.receive`."""
        return self._result(self.submit(EngineProtocol.receive, directory, version, records))

    def _result[R](self, pending: Pending[list[R]]) -> R:
        (result,) = pending.wait(self._deadlines.call_deadline_s)
        return result
