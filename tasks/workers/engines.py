"""An engine as the stages use it: in another process, behind typed calls that wait at most until a deadline."""

import re
from collections.abc import Iterator, Sequence

import numpy as np
import psutil
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


def inside(process: int, place: int, tensor: int) -> Iterator[tuple[str, int]]:
    """Process ids of what the engine at that place has started: its scheduler `core-PLACE`, if that is apart, and the
    workers of a `tensor` above 1, `worker-NUMBER`, counted over all engines.
    """
    try:
        titles = {one.pid: " ".join(one.cmdline()) for one in psutil.Process(process).children(recursive=True)}
    except psutil.Error:  # it has just ended
        return
    for started, title in titles.items():
        if "VLLM::EngineCore" in title:
            yield f"core-{place}", started
        elif found := re.search(r"VLLM::Worker_TP(\d+)", title):
            yield f"worker-{place * tensor + int(found[1])}", started
