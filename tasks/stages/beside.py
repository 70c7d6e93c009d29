"""Rollouts beside a training: in a thread of their own, which ends with the training or after it."""

import contextvars
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Self

from storage import meter
from storage.errors import StageFailed
from storage.write_behind import Answer
from tasks.stages.context import RunContext

LINGER_S = 10.0  # longest wait for the thread when the training has failed or was interrupted


class Beside[T]:
    """Work on engines, in a thread, beside a block that uses the trainer ranks. The block begins once the first rollout
    of the work samples, or the work has ended: until then it may need the ranks itself, to bring weights into the
    engines. It ends when the work has, with its error if there is one; if the block fails, the work is stopped."""

    def __init__(self, context: RunContext, work: Callable[[RunContext], T]) -> None:
        self._begun, self._stopped = threading.Event(), threading.Event()
        # the stage of the block is the one that people see
        own = replace(context, announce=lambda *_: None, beside=True, sampling=self._begun.set, go_on=self._check)
        self._work, self._ended = lambda: work(own), Future[None]()

    def result(self) -> T:
        """Value that the work returned, once the block has ended."""
        return self._result

    def __enter__(self) -> Self:
        # a daemon: a call that an interrupt leaves behind does not keep the process alive
        body = contextvars.copy_context().run
        threading.Thread(target=body, args=(self._perform,), name="beside", daemon=True).start()
        with self._stopping():
            self._begun.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            with self._stopping():
                self._ended.result()
        else:
            self._stop()

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """Stop the work if the wait in this block is interrupted."""
        try:
            yield
        except BaseException:
            self._stop()
            raise

    def _stop(self) -> None:
        self._stopped.set()
        wait([self._ended], LINGER_S)

    def _perform(self) -> None:
        try:
            with Answer(self._ended), meter.separate():
                self._result = self._work()
        finally:
            self._begun.set()

    def _check(self) -> None:
        if self._stopped.is_set():
            raise StageFailed("the training beside this rollout has ended with an error, which says what to do")
