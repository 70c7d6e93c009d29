"""Responses of a rollout that go on after a kill, with small workers and alone."""

import itertools

import numpy as np
import pytest

from storage import layout
from storage.backends.root import open_root
from storage.kill_points import Point
from storage.manifest import need
from storage.parts import read_table
from storage.schema import ROLLOUT
from storage.unfinished import Grown, IncrementRecord, keep_increment
from tasks.engine.protocol import NOTHING, Begun, Increment
from tasks.stages.names import Stage
from tasks.stages.samples import Growth
from tests.small.config import PROMPTS, SAMPLES, small_config
from tests.small.driving import RUN, Killed, driver, killing
from tests.small.here import WorkersHere
from tests.small.workers import SmallEngine


class Noting(SmallEngine):
    """Notes with how many tokens the batches of each name were begun last."""

    def enqueue(self, number, prompts, seeds, sampling, begun=(), every=None, name=""):
        super().enqueue(number, prompts, seeds, sampling, begun, every, name)
        self.begun = {**vars(self).get("begun", {}), name: sum(len(one.tokens) for one in begun)}


def increment(row, first, *tokens):
    return Increment(0, row, first, Begun(np.array(tokens, np.int32), -np.array(tokens, np.float32)), 3)


def key(piece):
    return layout.piece_key(RUN, 1, Stage.ROLLOUT, 0, piece)


def texts(begun):
    return [(one.tokens.tolist(), one.logprobs.tolist()) for one in begun]


def test_what_is_kept_is_where_the_next_process_goes_on(tmp_path):
    root, a, b = open_root(str(tmp_path)), key("a"), key("b")
    first = Growth(root, [a, b])
    assert texts(first.begun(0, [NOTHING] * 2)) == [([], []), ([], [])]
    first.keep(0, [increment(0, 0, 5, 6), increment(1, 0, 7)])
    first.keep(1, [increment(0, 0, 9)])
    second = Growth(root, [b, a])
    assert texts(second.begun(1, [NOTHING] * 2)) == [([5, 6], [-5, -6]), ([7], [-7])]
    second.keep(1, [increment(1, 1, 8)])
    third = Growth(root, [a, b])
    assert texts(third.begun(0, [NOTHING] * 2)) == [([5, 6], [-5, -6]), ([7, 8], [-7, -8])]
    assert texts(third.begun(1, [NOTHING])) == [([9], [-9])]


def test_tokens_that_two_processes_have_stored_count_once(tmp_path):
    root = open_root(str(tmp_path))
    for number, (first, token) in enumerate([(0, 5), (0, 6), (1, 7), (1, 8), (3, 9)]):
        grown = Grown(0, first, np.array([token], np.int32), np.zeros(1, np.float32))
        keep_increment(root, key("a"), number, IncrementRecord.of([grown], 3))
    assert [tokens for tokens, _ in texts(Growth(root, [key("a")]).begun(0, [NOTHING]))] == [[5, 7]]


@pytest.mark.parametrize(
    ("tokens", "after"),
    [
        ((2, 3), 1),
        ((3, 1), 0),
        pytest.param((2, 3), 0, marks=pytest.mark.slow),
        pytest.param((3, 1), 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_setting_may_change_between_a_kill_in_a_response_and_the_restart(tmp_path, tokens, after):
    rows = []
    for name, killed in (("whole", False), ("killed", True)):
        root = open_root(str(tmp_path / name))
        configs = [small_config(["run.iterations=1", f"rollout.increments.tokens={one}"]) for one in tokens]
        if killed:
            with pytest.raises(Killed):
                at = killing(Stage.ROLLOUT, 1, Point.MID_RESPONSE, after)
                driver(root, configs[0], tmp_path / "first", at=at).drive()
        driver(root, configs[1], tmp_path / f"second-{name}").drive()
        rows.append(read_table(root, need(root, RUN, 1, Stage.ROLLOUT), ROLLOUT))
    assert rows[0].equals(rows[1])
    assert max(map(len, itertools.chain(rows[0]["response_tokens"].to_pylist()))) > max(tokens)


@pytest.mark.parametrize("between", ["nothing", "update"])
def test_a_driver_that_takes_over_a_live_engine_goes_on_from_all_that_it_has_sampled(tmp_path, between):
    root, config = open_root(str(tmp_path / "root")), small_config(["run.iterations=1", "rollout.increments.tokens=2"])
    workers = WorkersHere(config, engine=Noting)
    with pytest.raises(Killed):
        driver(root, config, tmp_path, workers=workers, at=killing(Stage.ROLLOUT, 1, Point.MID_RESPONSE)).drive()
    (engine,) = workers.engines(tmp_path)[0]._group.members
    piece = engine._queued[0][-1]
    told = sum(len(one.tokens) for one in Growth(root, [piece]).begun(0, [NOTHING] * PROMPTS * SAMPLES))
    if between == "update":
        engine._left = engine.drop()  # as an update does
    driver(root, config, tmp_path, workers=workers).drive()
    assert engine.begun[piece] > told > 0
    undisturbed = open_root(str(tmp_path / "undisturbed"))
    driver(undisturbed, config, tmp_path).drive()
    whole, gone_on = (read_table(one, need(one, RUN, 1, Stage.ROLLOUT), ROLLOUT) for one in (undisturbed, root))
    assert gone_on.equals(whole)
