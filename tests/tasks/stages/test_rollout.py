import itertools

import numpy as np
import pyarrow as pa
import pytest

from storage import records
from storage.backends.root import open_root
from storage.errors import StageFailed
from storage.kill_points import Point
from storage.manifest import find
from storage.turns import one_turn
from storage.unfinished import PieceRecord
from tasks.stages.names import Stage
from tasks.stages.samples import rollout_metrics, sample_seed
from tests.small.config import small_config
from tests.small.driving import Killed, driver, killing


def test_every_sample_of_a_run_has_a_seed_of_its_own():
    places = list(itertools.product((0, 1), range(200), range(8)))
    seeds = [sample_seed(*place) for place in places]
    assert len(set(seeds)) == len(places)
    assert all(0 <= seed < 2**62 for seed in seeds)


def test_a_seed_depends_on_the_place_alone():
    # pinned: a change would make resumed rollouts differ from the ones lost
    assert sample_seed(0, 1, 2) == 301716173892200729


def test_metrics_of_a_table():
    table = pa.table(
        {
            "sampled": [[True, False, True], [True], []],
            "turns": one_turn(np.array([3, 1, 0]), pa.array(["stop", "length", "stop"])),
            "routes": pa.array([bytes(6), bytes(2), None], pa.large_binary()),
        }
    )
    metrics = rollout_metrics(table, seconds=2.0)
    assert metrics["tokens"] == 3
    assert metrics["tokens_per_second"] == 1.5
    assert metrics["response_length"] == 1
    assert metrics["truncated"] == pytest.approx(1 / 3)
    assert metrics["routes_bytes"] == 8


def test_a_piece_that_holds_other_rows_than_were_asked_for_is_refused(tmp_path):
    root = open_root(str(tmp_path / "root"))
    first = driver(root, small_config(["run.iterations=1"]), tmp_path / "first")
    first.at = killing(Stage.ROLLOUT, 1, Point.PARTS_DONE)
    with pytest.raises(Killed):
        first.drive()
    pieces = root.keys("small/manifests/000001/rollout.r0.pieces")
    for key, piece in zip(
        pieces[:2], [records.read(root, key, PieceRecord) for key in reversed(pieces[:2])], strict=True
    ):
        root.replace(key, records.seal(piece, key))
    with pytest.raises(StageFailed, match="hold 12 samples that are not the 12 requested"):
        driver(root, small_config(["run.iterations=1"]), tmp_path / "second").drive()
    assert find(root, "small", 1, Stage.ROLLOUT) is None
