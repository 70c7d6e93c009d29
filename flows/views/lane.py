"""Work for people beside the run: in its own thread, and what goes wrong in it is said once and stops nothing."""

import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

from tasks.config.code_version import PROJECT_ROOT
from tasks.config.environment import without_secrets

Say = Callable[[str], object]


class Lane:
    """Jobs one after another. A job that fails does not keep the next from being tried."""

    def __init__(self, name: str, say: Say) -> None:
        self._name, self._say = name, say
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._told = False
        # a daemon: a tracker that does not answer keeps no process alive
        self._thread = threading.Thread(target=self._work, name=f"report-{name}", daemon=True)
        self._thread.start()

    def add(self, job: Callable[[], object]) -> None:
        """Do `job` after those that were added before."""
        self._jobs.put(job)

    def mute(self) -> None:
        """Say nothing any more: what is interrupted may fail."""
        self._told = True

    def finish(self, deadline: float) -> None:
        """Wait until every job is done, or until `deadline`, a time of `time.monotonic`."""
        self._jobs.put(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._failed("it has not finished in time")

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            with _Tried(self._failed):
                job()

    def _failed(self, why: str) -> None:
        if not self._told:
            self._told = True
            self._say(without_secrets(f"{self._name}: {why}. The run goes on; later attempts are not reported"))


class _Tried:
    """A block whose error is reported, whatever it is: the code in it is that of libraries."""

    def __init__(self, failed: Callable[[str], object]) -> None:
        self._failed = failed

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None:
            first = str(error).strip().partition("\n")[0].rstrip(".")
            self._failed(f"{type(error).__name__}: {first}{_line(error)}")
        return True


def _line(error: BaseException) -> str:
    """The last line of a user's own file that led to an error, as ` (name.py, line 3)`; empty if none did."""
    installed = (str(PROJECT_ROOT), *set(sysconfig.get_paths().values()))
    lines = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(installed)]
    return f" ({Path(lines[-1].filename).name}, line {lines[-1].lineno})" if lines else ""
