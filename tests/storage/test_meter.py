"""Time spent on storage is counted once, however many threads spend it."""

import threading
import time
from contextvars import copy_context

from storage import meter
from storage.manifest import commit
from storage.parallel import each
from storage.parts import PartWriter, materialize
from storage.write_behind import WriteBehind
from tasks.stages.names import Stage
from tests.storage.tables import manifest


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
    begun, clock = meter.seconds(), time.perf_counter()
    with meter.measured():
        pass
    block = time.perf_counter() - clock
    time.sleep(0.2)
    assert meter.seconds() - begun <= block


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


def test_what_is_counted_apart_is_not_counted_here():
    begun = meter.seconds()
    with meter.separate() as own:
        with meter.measured():
            time.sleep(0.05)
        assert meter.seconds() == own.seconds() >= 0.05
    assert meter.seconds() == begun


def test_a_block_that_ends_elsewhere_counts_where_it_began():
    begun = meter.seconds()
    with meter.measured(), meter.separate() as own:
        time.sleep(0.05)
    assert own.seconds() == 0
    assert meter.seconds() - begun >= 0.05


def test_threads_count_for_who_started_them():
    def work(_):
        with meter.measured():
            time.sleep(0.05)

    begun = meter.seconds()
    with meter.separate() as own:
        each(work, range(8), 4)
    assert meter.seconds() == begun
    assert own.seconds() >= 0.1


def test_storing_many_files_apart_counts_apart(root, tmp_path):
    names = [f"{number}.distcp" for number in range(6)]
    for name in names:
        (tmp_path / name).write_text(name)
    begun = meter.seconds()
    with meter.separate() as own:
        parts = PartWriter(root, "run", 1, Stage.TRAIN).write_files(tmp_path, names)
        materialize(root, commit(root, manifest(Stage.TRAIN, parts=parts)), tmp_path / "back")
    assert own.seconds() > 0
    assert meter.seconds() == begun


def test_waiting_for_what_goes_on_behind_the_work_counts():
    here, begun, deadline = copy_context(), meter.seconds(), time.monotonic() + 60

    def upload():
        while here.run(meter.seconds) - begun < 0.05 and time.monotonic() < deadline:
            time.sleep(0.01)

    with WriteBehind() as outbox:
        outbox.add(upload)
        outbox.settle()
        assert meter.seconds() - begun >= 0.05
