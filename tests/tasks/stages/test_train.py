"""Report of the training stage on the time to its first gradient."""

import time

import psutil
import pytest

from storage.backends.root import open_root
from storage.manifest import need
from tasks.stages.names import Stage
from tests.small.config import small_config
from tests.small.driving import RUN, driver


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["true", "false"])
def test_engines_give_their_memory_away_before_anything_is_trained(tmp_path, asked):
    root = open_root(str(tmp_path / "runs"))
    config = small_config(["run.iterations=1", "warmup.steps=1", f"engine.sleep={asked}"])
    run = driver(root, config, tmp_path)
    run.drive()
    calls = [
        call for call in run.workers.calls if call in ("sleep", "train_policy", "train_supervised", "prepare_update")
    ]
    sync = ["prepare_update"] * config.engine.count
    rest = ["sleep"] * config.engine.count if asked == "true" else []
    assert calls == [*rest, "train_supervised", *sync, *rest, "train_policy", *sync]


@pytest.mark.slow
@pytest.mark.parametrize("replaced", [True, False], ids=["ranks replaced in this process", "ranks of this process"])
def test_the_time_to_the_first_gradient_begins_with_the_ranks_that_compute_it(tmp_path, replaced):
    root = open_root(str(tmp_path / "runs"))
    first = driver(root, small_config(["run.iterations=1"]), tmp_path)
    first.drive()
    metrics = need(root, RUN, 1, Stage.TRAIN).metrics
    assert "process_to_gradient_s" not in metrics  # these ranks have loaded no state
    begun = time.time()
    workers = first.workers
    if replaced:
        workers.trainers(tmp_path, small_config().train).end()
    else:
        workers = type(workers)(small_config())
    driver(root, small_config(["run.iterations=2"]), tmp_path, workers=workers).drive()
    found = need(root, RUN, 2, Stage.TRAIN).metrics["process_to_gradient_s"]
    assert (found < time.time() - begun) is replaced
    assert replaced or found > begun - psutil.Process().create_time()
