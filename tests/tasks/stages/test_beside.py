"""Work beside a block that uses the trainer ranks."""

import threading
import time

import pytest

from storage.backends.root import open_root
from storage.errors import StageFailed, StorageError
from storage.manifest import need
from tasks.stages.beside import Beside
from tasks.stages.names import Stage
from tasks.stages.served_weights import ensure_served
from tasks.stages.views import Prepared, Served
from tests.small.config import small_config
from tests.small.driving import RUN, driver
from tests.small.here import WorkersHere, context_here


@pytest.fixture
def context(tmp_path):
    config = small_config(["rollout.ahead=1", "run.iterations=1"])
    with context_here(open_root(str(tmp_path / "runs")), config, tmp_path / "scratch") as made:
        yield made


def test_the_block_begins_when_the_work_samples_and_ends_when_it_has_ended(context):
    order, go = [], threading.Event()

    def work(own):
        order.append("weights")
        own.sampling()
        go.wait()
        order.append("sampled")
        return "rollout"

    with Beside(context, work) as beside:
        order.append("training")
        go.set()
    assert order == ["weights", "training", "sampled"]
    assert beside.result() == "rollout"


def test_the_block_ends_with_the_error_of_the_work(context):
    def work(_own):
        raise StorageError("no piece can be stored")

    done = []
    with pytest.raises(StorageError, match="no piece can be stored"), Beside(context, work):
        done.append("training")
    assert done == ["training"]


def test_work_is_stopped_when_the_block_fails(context):
    ended = threading.Event()

    def work(own):
        own.sampling()
        for _ in range(500):
            time.sleep(0.01)
            try:
                own.go_on()
            except StageFailed:
                ended.set()
                raise

    with pytest.raises(StorageError, match="a rank died"), Beside(context, work):
        raise StorageError("a rank died")
    assert ended.is_set()


def test_engines_get_weights_once_nothing_else_uses_the_ranks(tmp_path):
    root, config = open_root(str(tmp_path / "runs")), small_config(["rollout.ahead=1", "run.iterations=1"])
    driver(root, config, tmp_path / "first").drive()
    workers = WorkersHere(config)
    prepared, served = Prepared(need(root, RUN, 0, Stage.PREPARE)), Served(need(root, RUN, 0, Stage.WEIGHT_SYNC))
    with context_here(root, config, tmp_path / "second", RUN, workers=workers, beside=True) as context:
        bringing = threading.Thread(target=ensure_served, args=(context, prepared, served))
        with context.turn:
            bringing.start()
            time.sleep(0.3)
            assert "send_weights" not in workers.calls
        bringing.join()
    assert "send_weights" in workers.calls
