import itertools

import pyarrow as pa
import pytest

from tasks.stages.rollout import rollout_metrics, sample_seed


def test_every_sample_of_a_run_has_a_seed_of_its_own():
    places = list(itertools.product((0, 1), range(200), range(8)))
    seeds = [sample_seed(*place) for place in places]
    assert len(set(seeds)) == len(places)
    assert all(0 <= seed < 2**62 for seed in seeds)


def test_a_seed_depends_on_the_place_alone():
    # pinned: a change would make resumed rollouts differ from the ones lost
    assert sample_seed(0, 1, 2) == 301716173892200729


def test_metrics_of_a_table():
    table = pa.table({"response_tokens": [[1, 2], [3], []], "finish_reason": ["stop", "length", "stop"]})
    metrics = rollout_metrics(table, seconds=2.0)
    assert metrics["tokens"] == 3
    assert metrics["tokens_per_second"] == 1.5
    assert metrics["response_length"] == 1
    assert metrics["truncated"] == pytest.approx(1 / 3)
