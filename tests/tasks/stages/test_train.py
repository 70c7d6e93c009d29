"""Report of the training stage on the time to its first gradient."""

import time

import numpy as np
import psutil
import pytest

from storage.backends.root import open_root
from storage.manifest import need
from storage.parts import read_parts, read_table
from storage.schema import ROLLOUT, TRAINER
from storage.upkeep.verify import verify
from tasks.stages.names import Stage
from tasks.stages.views import TRAINER_TABLE
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


def test_the_trainers_log_probabilities_of_each_token_are_stored_beside_the_state(tmp_path):
    """The trainer of this test gives those of the engine and a quarter; a sample without a score is not trained on."""
    (tmp_path / "half.py").write_text("def score(record, response, sample):\n    return 1 / (1 - sample.sample_id)\n")
    reward = [f"reward.function={tmp_path / 'half.py'}:score", "reward.max_failures=0.5"]
    root = open_root(str(tmp_path / "runs"))
    driver(root, small_config(["run.iterations=3", "storage.save_every=2", *reward]), tmp_path).drive()
    assert need(root, RUN, 1, Stage.TRAIN).parts == ()  # its state is not stored
    for iteration in (2, 3):
        samples = read_table(root, need(root, RUN, iteration, Stage.ROLLOUT), ROLLOUT)
        table = read_parts(root, [need(root, RUN, iteration, Stage.TRAIN).part(TRAINER_TABLE)], TRAINER)
        assert table.select(["prompt_id", "sample_id"]).equals(samples.select(["prompt_id", "sample_id"]))
        engine = samples["logprobs"].to_pylist()
        expected = [
            None if sample else [float(np.float32(value) + np.float32(0.25)) for value in own]
            for own, sample in zip(engine, samples["sample_id"].to_pylist(), strict=True)
        ]
        assert table["logprobs"].to_pylist() == expected
    assert verify(root, RUN).sound
