"""The trainer ranks: one process each, behind typed calls that go to all of them and wait at most until a deadline."""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from tasks.config.run import WorkersSection
from tasks.workers.group import Group, GroupHandle, Pending
from trainer_core.batches.sequences import Samples, SupervisedExamples
from trainer_core.config import MemoryConfig, OptimizerConfig
from trainer_core.protocol import Generators, LoadedState, Planned, SavedFiles, Sent, TrainerProtocol
from trainer_core.weights.channel import Channel


class TrainerGroup(GroupHandle):
    """All trainer ranks. Every call goes to every rank and raises what `Trainer` raises, or WorkerLost."""

    def __init__(self, group: Group, deadlines: WorkersSection, replaces: bool = False) -> None:
        """`replaces`: these ranks take the place of others that this process had started."""
        super().__init__(group, deadlines)
        self.began = time.time() if replaces else psutil.Process().create_time()
        """Since when these ranks are waited for, in seconds since the epoch: the first since this process exists."""

    def identity(self) -> str | None:
        """Identity of the committed state that all ranks hold; None if they hold none, or different ones."""
        return _common(self._results(self.submit(TrainerProtocol.identity)))

    def adopt(self, identity: str) -> None:
        """See `TrainerProtocol.adopt`."""
        self._results(self.submit(TrainerProtocol.adopt, identity))

    def reference(self) -> str | None:
        """Identity of the reference that all ranks hold, or None."""
        return _common(self._results(self.submit(TrainerProtocol.reference)))

    def generators(self) -> Generators:
        """See `TrainerProtocol.generators`."""
        return self._first(self.submit(TrainerProtocol.generators))

    def import_model(self) -> None:
        """See `TrainerProtocol.import_model`."""
        self._results(self.submit(TrainerProtocol.import_model))

    def load(self, directory: Path) -> LoadedState:
        """See `TrainerProtocol.load`."""
        return self._first(self.submit(TrainerProtocol.load, str(directory)))

    def save(self, directory: Path) -> SavedFiles:
        """See `TrainerProtocol.save`; the names of all ranks' files, sorted."""
        ranks = self._results(self.submit(TrainerProtocol.save, str(directory)))
        return SavedFiles(tuple(sorted({name for rank in ranks for name in rank.names})), ranks[0].identity)

    def train_policy(self, samples: Samples, temperature: float, reference: bool) -> dict[str, float]:
        """See `TrainerProtocol.train_policy`."""
        return self._first(self.submit(TrainerProtocol.train_policy, samples, temperature, reference))

    def train_supervised(
        self, examples: SupervisedExamples, steps: int, batch_size: int, optimizer: OptimizerConfig
    ) -> dict[str, float]:
        """See `TrainerProtocol.train_supervised`."""
        return self._first(self.submit(TrainerProtocol.train_supervised, examples, steps, batch_size, optimizer))

    def logprobs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """See `TrainerProtocol.logprobs`."""
        return self._first(self.submit(TrainerProtocol.logprobs, sequences))

    def load_reference(self, directory: Path, identity: str) -> None:
        """See `TrainerProtocol.load_reference`."""
        self._results(self.submit(TrainerProtocol.load_reference, str(directory), identity))

    def plan_weights(self, version: int, arena_bytes: int) -> list[Planned]:
        """See `TrainerProtocol.plan_weights`; every rank's answer."""
        return self._results(self.submit(TrainerProtocol.plan_weights, version, arena_bytes))

    def begin_sending(self, digest: str, channel: Channel, stored: Path | None = None) -> Pending[list[Sent]]:
        """Begin `TrainerProtocol.send_weights`; does not wait."""
        folder = None if stored is None else str(stored)
        return self.submit(TrainerProtocol.send_weights, digest, channel, folder)

    def sent(self, sending: Pending[list[Sent]]) -> list[Sent]:
        """Every rank's answer to what was begun."""
        return self._results(sending)

    def release(self, memory: MemoryConfig) -> int:
        """See `TrainerProtocol.release`; the bytes of all ranks together."""
        return sum(self._results(self.submit(TrainerProtocol.release, memory)))

    def resume(self) -> None:
        """See `TrainerProtocol.resume`."""
        self._results(self.submit(TrainerProtocol.resume))

    def _first[R](self, pending: Pending[list[R]]) -> R:
        return self._results(pending)[0]


def _common[R](values: Sequence[R]) -> R | None:
    return values[0] if len(set(values)) == 1 else None
