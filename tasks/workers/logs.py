"""Lines that the processes of a run print: each trainer rank and engine with its name, at a limited rate.

Ray collects the output of the processes that this driver has started, on every host, and hands it to one thread here.
Processes that an earlier driver left on a cluster belong to that driver's job: their lines stay in Ray's own logs."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

from tasks.config.environment import without_secrets
from trainer_core.progress import understood

BURST, PER_S = 100, 5.0
"""Lines of one process at once, and lines a second after that; further lines are counted and left out."""

_OURS, _RAYS = "ratchet", "ray_print_logs"
_LONGEST = 1000
_HARMLESS = re.compile(
    r"No CUDA runtime is found, using CUDA_HOME"  # torch, where there is no card
    r"|Warning: NUMA binding: "  # vLLM on CPU
    r"|^Loading safetensors checkpoint shards: "  # its progress bar
    r"|^\[Gloo\] Rank \d+ is connected to "
)  # lines of libraries that do not concern a user
_STYLES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

Say = Callable[[str], object]
Counted = Callable[[int, int, str, str], object]  # takes progress: the number done, the total, the unit, and a note

_TELLS = "trainer-0"


def silence_terminal() -> None:
    """Stop Ray from printing what it collects; call it after `ray.init`."""
    dispatcher.remove_handler(_RAYS)


@contextmanager
def heard(say: Say, counted: Counted) -> Iterator[None]:
    """Pass the lines of all processes to `say`, and the first trainer rank's progress to `counted`, in Ray's thread."""
    dispatcher.add_handler(_OURS, Lines(say, counted))
    try:
        yield
    finally:
        dispatcher.remove_handler(_OURS)


class Lines:
    """Takes batches of lines as Ray gives them: a mapping with `lines`, and `actor_name` if an actor printed them."""

    def __init__(self, say: Say, counted: Counted, clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._counted, self._clock = say, counted, clock
        self._budgets: dict[str, _Budget] = {}

    def __call__(self, batch: Mapping[str, Any]) -> None:
        """Say each line that is within the limit of its process."""
        if not (name := batch.get("actor_name")):
            return  # Ray's own processes
        budget = self._budgets.setdefault(name, _Budget(self._clock()))
        for text in (_STYLES.sub("", line).rstrip().rpartition("\r")[2] for line in batch["lines"]):
            if (told := understood(text)) is not None and name == _TELLS:
                self._counted(*told)
            if text and told is None and not _HARMLESS.search(text) and budget.spend(self._clock()):
                if budget.left_out:
                    self._say(f"[{name}] ... {budget.left_out} lines left out")
                    budget.left_out = 0
                self._say(without_secrets(f"[{name}] {text[:_LONGEST]}"))


class _Budget:
    """Number of lines of a process that may still be shown."""

    def __init__(self, now: float) -> None:
        self._left, self._at = float(BURST), now
        self.left_out = 0

    def spend(self, now: float) -> bool:
        self._left, self._at = min(BURST, self._left + PER_S * (now - self._at)), now
        if self._left < 1:
            self.left_out += 1
            return False
        self._left -= 1
        return True
