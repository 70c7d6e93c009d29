"""Work on storage that goes on behind the stages: in order, and not at all once something in it has failed."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from storage import meter
from storage.errors import RatchetError

logger = logging.getLogger(__name__)


class Outbox:
    """Does jobs one after another in a thread of its own.

    A train state is stored here, then its manifest is published, then the manifests of what was made from it meanwhile.
    The order is the promise: nothing is published before everything that was added earlier. After a failure nothing
    that follows is done.

    As a context manager it waits for the jobs at the end.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outbox")
        self._last: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.settle()
        except RatchetError as failure:
            if error is None:
                raise
            logger.warning("what was still to be stored was not: %s", failure)
        finally:
            self._thread.shutdown(cancel_futures=True)

    @property
    def idle(self) -> bool:
        """Whether every job is done. Raises what the first that failed raised."""
        if self._last is None or not self._last.done():
            return self._last is None
        self._last.result()
        return True

    def add(self, job: Callable[[], object]) -> None:
        """Do `job` after everything that was added before; raises as `idle`."""
        before = None if self.idle else self._last
        self._last = self._thread.submit(_after, before, job)

    @meter.measured()  # whoever waits here waits for storage
    def settle(self) -> None:
        """Wait until every job is done; raises as `idle`."""
        if self._last is not None:
            self._last.result()


def _after(before: Future[None] | None, job: Callable[[], object]) -> None:
    if before is not None:
        before.result()  # its failure is ours
    with meter.separate():
        job()
