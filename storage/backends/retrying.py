"""Repeats calls to a store that is busy or does not answer."""

import logging
from collections.abc import Callable

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, stop_all, stop_before_delay
from tenacity import wait_random_exponential as wait_random

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 60.0
"""Limit on the time for which an operation is retried while the store is busy or does not answer."""

LARGE_ATTEMPTS = 4
"""Least number of attempts at a transfer, which may itself take longer than PATIENCE_SECONDS."""

_LONGEST_PAUSE = 5.0
_SILENT_S = 5.0  # shorter outages are not logged


def retried[T](
    call: Callable[[], T], temporary: Callable[[BaseException], bool], patience: float, attempts: int = 1
) -> T:
    """The result of `call`, retried with growing random pauses after each failure that is `temporary`.

    Args:
        patience: seconds after which it is not retried.
        attempts: least number of attempts.
    """
    for attempt in Retrying(
        retry=retry_if_exception(temporary),
        stop=stop_all(stop_after_attempt(attempts), stop_before_delay(patience)),
        wait=wait_random(multiplier=0.05, max=_LONGEST_PAUSE),
        before_sleep=_OutageSaid(patience),
        reraise=True,
    ):
        with attempt:
            return call()
    raise AssertionError("tenacity returns or raises")


class _OutageSaid:
    """Says once that an operation waits for the store."""

    def __init__(self, patience: float) -> None:
        self._patience, self._said = patience, False

    def __call__(self, state: RetryCallState) -> None:
        """Called before each pause."""
        if self._said or state.outcome is None or (state.seconds_since_start or 0.0) < _SILENT_S:
            return
        self._said = True
        cause = type(state.outcome.exception()).__name__
        logger.warning("the store does not answer (%s): waiting for it, up to %g s", cause, self._patience)
