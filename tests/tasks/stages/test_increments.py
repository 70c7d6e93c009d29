"""Responses of a rollout that go on after a kill, with small workers and alone."""

import itertools

import numpy as np
import pytest

from storage.backends.root import open_root
from storage.kill_points import Point
from storage.manifest import need
from storage.parts import PartWriter, read_table
from storage.schema import ROLLOUT
from storage.unfinished import Grown, IncrementRecord, keep_increment
from tasks.engine.protocol import Begun, Increment
from tasks.stages.increments import Growth
from tasks.stages.names import Stage
from tests.small.config import small_config
from tests.small.driving import RUN, Killed, driver, killing


def increment(row, first, *tokens):
    return Increment(0, row, first, Begun(np.array(tokens, np.int32), -np.array(tokens, np.float32)), 3)


def texts(begun):
    return [(one.tokens.tolist(), one.logprobs.tolist()) for one in begun]


def test_what_is_kept_is_where_the_next_process_goes_on(tmp_path):
    writer = PartWriter(open_root(str(tmp_path)), "run", 1, Stage.ROLLOUT)
    first = Growth(writer, ["a", "b"])
    assert texts(first.begun(0, 2)) == [([], []), ([], [])]
    first.keep(0, [increment(0, 0, 5, 6), increment(1, 0, 7)])
    first.keep(1, [increment(0, 0, 9)])
    second = Growth(writer, ["b", "a"])
    assert texts(second.begun(1, 2)) == [([5, 6], [-5, -6]), ([7], [-7])]
    second.keep(1, [increment(1, 1, 8)])
    third = Growth(writer, ["a", "b"])
    assert texts(third.begun(0, 2)) == [([5, 6], [-5, -6]), ([7, 8], [-7, -8])]
    assert texts(third.begun(1, 1)) == [([9], [-9])]


def test_tokens_that_two_processes_have_stored_count_once(tmp_path):
    writer = PartWriter(open_root(str(tmp_path)), "run", 1, Stage.ROLLOUT)
    for number, (first, token) in enumerate([(0, 5), (0, 6), (1, 7), (1, 8), (3, 9)]):
        grown = Grown(0, first, np.array([token], np.int32), np.zeros(1, np.float32))
        keep_increment(writer, "a", number, IncrementRecord.of([grown], 3))
    assert [tokens for tokens, _ in texts(Growth(writer, ["a"]).begun(0, 1))] == [[5, 7]]


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("tokens", [(2, 3), (3, 1)], ids=str)
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
