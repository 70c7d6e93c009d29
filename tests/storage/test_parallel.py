"""Work in threads keeps the order and the caller's context."""

import threading
import time
from contextvars import ContextVar

import pytest

from storage.parallel import each

name: ContextVar[str] = ContextVar("name", default="nobody")


def test_results_come_in_order_from_the_context_of_the_caller():
    token = name.set("caller")
    try:
        assert each(lambda number: (number, name.get()), range(20), 4) == [(number, "caller") for number in range(20)]
    finally:
        name.reset(token)


def test_one_thread_is_the_caller_s_own():
    assert each(lambda _: threading.get_ident(), range(3), 1) == [threading.get_ident()] * 3


@pytest.mark.slow
def test_the_first_failure_is_raised_and_ends_the_rest():
    begun = []

    def fail(number):
        begun.append(number)
        time.sleep(0.001 * (number > 0))
        raise ValueError(f"number {number}")

    with pytest.raises(ValueError, match="number 0"):
        each(fail, range(1000), 2)
    assert len(begun) < 1000
