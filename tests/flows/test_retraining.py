"""Training on stored samples: the real loop and stages over small workers, from beginning to kills."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from flows.views.status import read_status
from storage.backends.root import Root, open_root
from storage.errors import InputError
from storage.kill_points import Point
from storage.manifest import Manifest, need
from storage.parts import read_parts, read_table
from storage.schema import REWARD, ROLLOUT, SELECTION
from storage.selection import read_sources
from tasks.retraining import begin_retraining, retrain_config
from tasks.stages.names import Stage
from tasks.stages.views import Selected, Trained
from tests.small.config import small_config
from tests.small.driving import RUN, Killed, driver, killing

ITERATIONS = 3
START = {"start": f"{RUN}@2", "select": [RUN], "samples": 8}


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Root:
    """A root with a run of three iterations, 12 samples each."""
    folder = tmp_path_factory.mktemp("sampled")
    root = open_root(str(folder / "runs"))
    driver(root, small_config([f"run.iterations={ITERATIONS}"]), folder / "scratch").drive()
    return root


def begun(root: Root, run: str, settings: tuple[str, ...] = (), **given: Any):
    config = retrain_config(root, run, {**START, **given}, None, settings)
    begin_retraining(root, run, config)
    return config


def retrained(root: Root, tmp_path: Path, run: str, settings: tuple[str, ...] = (), at: Any = None, **given: Any):
    config = begun(root, run, settings, **given)
    process = driver(root, config, tmp_path / run, run=run, at=at)
    process.drive()
    return process


def selection(root: Root, run: str) -> pa.Table:
    shares = Selected(need(root, run, 0, Stage.SELECT)).shares
    return read_parts(root, shares, SELECTION)


def test_a_retraining_trains_on_stored_samples_without_an_engine(sampled: Root, tmp_path: Path):
    process = retrained(sampled, tmp_path, "plain", epochs=2)
    table = selection(sampled, "plain")
    stored = pa.concat_tables(read_table(sampled, need(sampled, RUN, n, Stage.ROLLOUT), ROLLOUT) for n in (1, 2, 3))
    assert table.num_rows == stored.num_rows == 36
    keys = ["iteration", "prompt_id", "sample_id"]
    order = [(name, "ascending") for name in keys]
    assert table.select(ROLLOUT.names).sort_by(order).equals(stored.sort_by(order))
    shares = len(Selected(need(sampled, "plain", 0, Stage.SELECT)).shares)
    assert process.done == [(0, Stage.SELECT, False)] + [(n, Stage.TRAIN, False) for n in range(1, 2 * shares + 1)]
    assert not {"generate", "receive", "score"} & set(process.workers.calls)
    assert read_status(sampled, "plain").complete


def test_the_first_state_is_the_one_it_starts_from(sampled: Root):
    begun(sampled, "started")
    ours, theirs = need(sampled, "started", 0, Stage.TRAIN), need(sampled, RUN, 2, Stage.TRAIN)
    assert Trained(ours).identity == Trained(theirs).identity
    assert ours.parts == theirs.parts
    assert ours.origin is not None and ours.origin.digest == theirs.digest


@pytest.mark.parametrize("stage", [Stage.SELECT, Stage.TRAIN])
@pytest.mark.parametrize("point", [Point.STARTED, Point.MID_PART, Point.PARTS_DONE, Point.COMMITTED])
def test_a_killed_retraining_ends_in_the_same_bits(sampled: Root, tmp_path: Path, stage: Stage, point: Point):
    if not sampled.exists("whole/run.json"):
        retrained(sampled, tmp_path, "whole")
    run, iteration = f"killed-{stage}-{point}".lower(), 0 if stage == Stage.SELECT else 2
    with pytest.raises(Killed):
        retrained(sampled, tmp_path, run, at=killing(stage, iteration, point))
    retrained(sampled, tmp_path / "next", run)
    assert state(sampled, run) == state(sampled, "whole")


def state(root: Root, run: str) -> list[tuple[Any, ...]]:
    last = read_status(root, run).iterations
    found = [Trained(need(root, run, n, Stage.TRAIN)).identity for n in range(1, last + 1)]
    return [*found, [part.digest for part in need(root, run, 0, Stage.SELECT).parts]]
