"""Time spent on storage is counted once, however many threads spend it."""

import threading
import time

from storage import meter
from storage.ids import Stage
from storage.parts import PartWriter


def test_overlapping_blocks_count_once():
    begun = meter.seconds()
    clock = time.perf_counter()

    def work():
        with meter.measured(), meter.measured():
            time.sleep(0.1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.1 <= meter.seconds() - begun <= time.perf_counter() - clock


def test_what_lies_between_is_not_counted():
    begun = meter.seconds()
    with meter.measured():
        pass
    time.sleep(0.2)
    assert meter.seconds() - begun < 0.1


def test_a_block_in_progress_counts_so_far():
    begun = meter.seconds()
    with meter.measured():
        time.sleep(0.05)
        assert meter.seconds() - begun >= 0.05


def test_storing_counts(root):
    begun = meter.seconds()
    PartWriter(root, "run", 1, Stage.ROLLOUT).write_bytes("part", b"content")
    spent = meter.seconds() - begun
    assert spent > 0
    root.exists("nothing")
    assert meter.seconds() - begun > spent
