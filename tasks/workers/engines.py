"""An engine as the stages use it: in another process, behind typed calls that wait at most until a deadline."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tasks.engine.protocol import (
    Arrived,
    Collected,
    EngineIdentity,
    EngineProtocol,
    InFlight,
    Sampling,
    TokenIds,
)
from tasks.workers.group import GroupHandle, Pending
from trainer_core.weights.channel import Channel


class EngineHandle(GroupHandle):
    """An engine in another process. Every method waits for it and raises what `Engine` raises, or WorkerLost."""

    def identity(self) -> EngineIdentity:
        """See `EngineProtocol.identity`."""
        return self._result(self.submit(EngineProtocol.identity))

    def generate(self, prompts: Sequence[TokenIds], seeds: Sequence[int], sampling: Sampling) -> pa.RecordBatch:
        """See `EngineProtocol.generate`."""
        return self._result(self.submit(EngineProtocol.generate, prompts, seeds, sampling))

    def enqueue(self, number: int, prompts: Sequence[TokenIds], seeds: Sequence[int], sampling: Sampling) -> None:
        """See `EngineProtocol.enqueue`."""
        self._result(self.submit(EngineProtocol.enqueue, number, prompts, seeds, sampling))

    def collect(self, wait_s: float) -> Collected:
        """See `EngineProtocol.collect`. An engine that does not finish a step in time has failed."""
        (collected,) = self.submit(EngineProtocol.collect, wait_s).wait(self.deadlines.step_deadline_s)
        return collected

    def drop(self) -> None:
        """See `EngineProtocol.drop`."""
        self._result(self.submit(EngineProtocol.drop))

    def score(self, sequences: Sequence[TokenIds]) -> list[NDArray[np.float32]]:
        """See `EngineProtocol.score`."""
        return self._result(self.submit(EngineProtocol.score, sequences))

    def survey_model(self) -> None:
        """See `EngineProtocol.survey_model`."""
        self._result(self.submit(EngineProtocol.survey_model))

    def prepare_update(self, plan: str, digest: str, channel: Channel, first_receiver: int, in_flight: InFlight) -> str:
        """See `EngineProtocol.prepare_update`."""
        return self._result(
            self.submit(EngineProtocol.prepare_update, plan, digest, channel, first_receiver, in_flight)
        )

    def receive_update(self) -> Arrived:
        """See `EngineProtocol.receive_update`."""
        return self._result(self.submit(EngineProtocol.receive_update))

    def commit_update(self, version: int, weights_digest: str) -> EngineIdentity:
        """See `EngineProtocol.commit_update`."""
        return self._result(self.submit(EngineProtocol.commit_update, version, weights_digest))

    def abort_update(self, reason: str) -> bool:
        """See `EngineProtocol.abort_update`."""
        return self._result(self.submit(EngineProtocol.abort_update, reason))

    def refuse(self, reason: str) -> None:
        """See `EngineProtocol.refuse`."""
        self._result(self.submit(EngineProtocol.refuse, reason))

    def held(self) -> dict[str, str]:
        """See `EngineProtocol.held`."""
        return self._result(self.submit(EngineProtocol.held))

    def sleep(self) -> bool:
        """See `EngineProtocol.sleep`."""
        return self._result(self.submit(EngineProtocol.sleep))

    def wake(self) -> None:
        """See `EngineProtocol.wake`."""
        self._result(self.submit(EngineProtocol.wake))

    def _result[R](self, pending: Pending[list[R]]) -> R:
        (result,) = self._results(pending)
        return result
