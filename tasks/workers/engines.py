"""An engine as the stages use it: in another process, behind typed calls that wait at most until a deadline."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tasks.engine.protocol import Collected, EngineProtocol, TokenIds, ValuesProtocol
from tasks.workers.group import GroupHandle


class EngineHandle(GroupHandle, EngineProtocol, forwards=EngineProtocol):
    """An engine in another process. Every method waits for it and raises what `Engine` raises, or WorkerLost."""

    def collect(self, wait_s: float) -> Collected:
        """`EngineProtocol.collect`; an engine that does not finish a step in time has failed."""
        (collected,) = self.submit(EngineProtocol.collect, wait_s).wait(self.deadlines.step_deadline_s)
        return collected

    def values(self, sequences: Sequence[TokenIds]) -> NDArray[np.float32]:
        """`ValuesProtocol.values`, of an engine whose model is a classifier; it has no other method."""
        return self.results(self.submit(ValuesProtocol.values, sequences))[0]
