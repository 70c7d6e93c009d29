"""Work beside the run: a failure in it is reported once, and the remaining work is done."""

import time

from flows.views.reports import Lane


def test_a_job_that_fails_is_said_once_and_the_next_are_tried():
    said: list[str] = []
    done: list[int] = []
    lane = Lane("name", said.append)
    for number in (1, 0, 2, 0):
        lane.add(lambda number=number: done.append(2 // number))
    lane.finish(time.monotonic() + 60)
    assert done == [2, 1]
    (text,) = said
    assert text.startswith(
        "name: ZeroDivisionError: integer division or modulo by zero (test_lane.py, line 13). The run"
    )
