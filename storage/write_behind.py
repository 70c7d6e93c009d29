"""Storage work behind the stages: in order, and stopped once a job has failed."""

import contextvars
import itertools
import logging
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from queue import SimpleQueue
from types import TracebackType

from storage import meter
from storage.errors import LeaseLost, RatchetError

logger = logging.getLogger(__name__)

LINGER_SECONDS = 10.0  # limit on the time that an interrupt waits for the job in progress

_Job = tuple[Callable[[], object], Future[None]]

Again = Callable[[RatchetError, int], float | None]
"""After how many seconds a job that has raised an error in that many attempts is done again; None leaves it failed."""


class WriteBehind(AbstractContextManager["WriteBehind", None]):
    """Does jobs one after another in its own thread. A train state is stored here, then its manifest is published, then
    the manifests of what was made from it meanwhile. The order is the promise: nothing is published before everything
    that was added earlier. A job that fails is done again if `repeat` says so, while later ones wait. After its last
    failure, no later job is done. As a context manager it does all jobs before it ends, even if the block fails: what a
    stage has begun to store is worth storing. If the block is interrupted, or has lost its lease, it drops the jobs
    that have not begun and waits for the one in progress for a limited time."""

    def __init__(self, linger: float = LINGER_SECONDS) -> None:
        self._linger = linger
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Future[None] | None = None
        self._named: dict[Hashable, Future[None]] = {}
        self._adding = threading.Lock()
        self._dropped = threading.Event()
        self._again: Again = lambda _error, _attempts: None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, LeaseLost) or not isinstance(error, Exception | None):
                self._leave()
            else:
                self._finish(error)
        finally:
            self._jobs.put(None)

    @property
    def idle(self) -> bool:
        """True if every job is done. Raises the error of the first that failed."""
        if self._last is None or not self._last.done():
            return self._last is None
        self._last.result()
        return True

    def repeat(self, again: Again) -> None:
        """Ask `again` about each job that fails from now on. Such a job must be repeatable, as storing is."""
        self._again = again

    def add(self, job: Callable[[], object], name: Hashable = None) -> Future[None]:
        """Do `job` after everything that was added before; raises as `idle`. The future is done when the job is, has
        its error, or is cancelled if the job was dropped. `settle` may wait for the job by its name."""
        with self._adding:
            if self.idle and self._thread is None:
                # a daemon: an upload that an interrupt leaves behind does not keep the process alive; a job that logs
                # needs the context, where Prefect finds its server, or starts a second one
                work = contextvars.copy_context().run
                self._thread = threading.Thread(target=work, args=(self._work,), name="outbox", daemon=True)
                self._thread.start()
            self._last = added = Future[None]()
            self._named = {known: one for known, one in self._named.items() if not one.done()} | {name: added}
            self._jobs.put((job, added))
            return added

    @meter.measured()  # waiting here is waiting for storage
    def settle(self, name: Hashable = None) -> None:
        """Wait until every job is done, or those up to the job of that name if it is on its way; raises as `idle`."""
        if (last := self._last if name is None else self._named.get(name)) is not None:
            last.result()

    def _finish(self, error: Exception | None) -> None:
        try:
            failure = None if self._last is None else self._last.exception()
        except KeyboardInterrupt:
            self._leave()
            raise
        if failure is None or failure is error:
            return
        if error is None:
            raise failure
        # the block's error is raised, and tells of this one
        if isinstance(error, RatchetError):
            error.beside = f"What was still to be stored is not: {failure}"
        logger.warning("what was still in the outbox was not stored: %s", failure, exc_info=failure)

    def _leave(self) -> None:
        self._dropped.set()
        if self._last is not None and wait([self._last], self._linger).not_done:
            logger.warning("the outbox job in progress took longer than %g s; the next start repeats it", self._linger)

    def _work(self) -> None:
        failure: BaseException | None = None
        while (work := self._jobs.get()) is not None:
            job, future = work
            if self._dropped.is_set():
                future.cancel()
                future.set_running_or_notify_cancel()
            elif failure is not None:
                future.set_exception(failure)
            else:
                with Answer(future), meter.separate():
                    self._do(job)
                failure = future.exception()

    def _do(self, job: Callable[[], object]) -> None:
        for attempt in itertools.count(1):
            try:
                job()
            except RatchetError as error:
                seconds = self._again(error, attempt)
                if seconds is None or self._dropped.wait(seconds):
                    raise
            else:
                return


class Answer:
    """Hands the result or error of a block to the threads that wait for it."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(error)
        return True
