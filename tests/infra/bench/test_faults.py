"""The bench of failures: seconds from a kill to the next gradient or token, by step, and a whole run of it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from infra.bench.faults import STEPS, Faults, check_engine, plan_of, recoveries_of, settings_of, steps_of
from infra.bench.faults_engine import order_kill, stored_tokens
from infra.bench.faults_marks import Mark, Plan
from infra.bench.loop import default_tables
from storage.backends.root import Root, open_root
from storage.errors import InputError, StageFailed
from storage.kill_points import Point, observed
from storage.unfinished import Grown, IncrementRecord, keep_increment
from tasks.config.document import completed
from tasks.config.run import RunConfig
from tasks.engine.protocol import Begun

PIECE = "loop/manifests/000002/rollout.r0.pieces/000000-000001-0123456789abcdef.json"


def marks_of(*named: tuple[str, float]) -> list[Mark]:
    return [Mark(what=what, at=at) for what, at in named]


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return open_root(str(tmp_path / "runs"))


def config_of(order: Faults, *settings: str) -> RunConfig:
    changes = settings_of("apart", order, "cpu", settings)
    return completed(default_tables(order.case), changes, None, "the bench")


def grown(row: int, first: int, count: int) -> Grown:
    return Grown(row, first, np.arange(count, dtype=np.int32), np.zeros(count, np.float32))


def test_a_step_ends_with_the_last_rank_and_a_gradient_before_the_death_is_noticed_does_not_count():
    marks = marks_of(("gradient", 9.0), ("killed", 10.0), ("gradient", 10.1), ("noticed", 11.0), ("asked", 12.5),
             ("process", 12.6), ("process", 15.0), ("imported", 12.7), ("imported", 21.0), ("met", 22.0), ("met", 22.5),
             ("built", 23.0), ("loaded", 24.0), ("gradient", 26.0), ("gradient", 26.5), ("noticed", 99.0))  # fmt: skip
    found = steps_of(marks, 10.0)
    assert list(found) == list(STEPS["rank"])
    assert list(found.values()) == pytest.approx([1.0, 1.5, 2.5, 6.0, 1.5, 0.5, 1.0, 2.0])


def test_the_steps_of_an_engine_end_with_its_first_token():
    marks = marks_of(("token", 9.0), ("killed", 10.0), ("noticed", 10.2), ("asked", 11.2), ("process", 13.0),
                     ("imported", 20.0), ("built", 21.0), ("loaded", 21.5), ("token", 22.0), ("token", 23.0),
                     ("loaded", 30.0))  # fmt: skip
    (found,) = recoveries_of(marks, Plan(kill="engine", at=(2,)))
    assert list(found) == list(STEPS["engine"])
    assert list(found.values()) == pytest.approx([0.2, 1.0, 1.8, 7.0, 1.0, 0.5, 0.5])


def test_a_run_without_a_planned_kill_is_no_measurement():
    with pytest.raises(StageFailed, match=r"0 of 2 kills were made: .* raise --seconds"):
        recoveries_of(marks_of(("token", 9.0)), Plan(kill="engine", at=(2, 4)))


@pytest.mark.parametrize(
    ("device", "kill", "waiting"),
    [("cpu", "rank", 1), ("cuda", "rank", 3), ("cpu", "engine", 1), ("cuda", "engine", 1)],
)
def test_on_cards_a_process_waits_for_each_rank_because_all_of_them_end_with_one(device, kill, waiting):
    order = Faults(iterations=2, every=2, seconds=0, kill=kill, ranks=3)
    assert f"workers.standby={waiting}" in settings_of("standby", order, device, ())
    assert not any("standby" in one for one in settings_of("apart", order, device, ()))


def test_an_engine_waits_before_its_steps_and_not_in_the_reward():
    order = Faults(iterations=5, every=2, seconds=28, kill="engine")
    config = config_of(order)
    assert plan_of(order, config) == Plan(kill="engine", at=(2, 4), pause_s=0.5)
    assert config.reward.arguments == {"seconds": 0}
    assert plan_of(Faults(iterations=5, every=2, seconds=28), config) == Plan(kill="rank", at=(1, 3))


@pytest.mark.parametrize(
    ("every", "settings", "said"),
    [
        (1, (), r"--every 1 --kill engine: .*; give 2 or more"),
        (2, ("engine.count=2",), r"engine.count = 2: .*; set it to 1"),
        (2, ("rollout.increments.tokens=56",), r"rollout.increments.tokens = 56: .* 56 tokens .*; make it smaller"),
    ],
)
def test_what_leaves_no_kill_amid_a_rollout_is_refused(every, settings, said):
    order = Faults(iterations=2, every=every, seconds=0, kill="engine")
    check_engine(Faults(iterations=2, every=2, seconds=0, kill="engine"), config_of(order))
    with pytest.raises(InputError, match=said):
        check_engine(order, config_of(order, *settings))


def test_an_engine_dies_after_an_increment_of_a_planned_iteration_is_stored(root: Root, tmp_path: Path):
    plan = Plan(kill="engine", at=(2,))
    with observed(lambda point, key: order_kill(tmp_path, plan, point, key)):
        keep_increment(root, PIECE.replace("000002", "000001"), 0, IncrementRecord.of([grown(0, 0, 7)], 0))
        assert not list(tmp_path.glob("stored-*"))
        keep_increment(root, PIECE, 0, IncrementRecord.of([grown(0, 0, 7)], 1))
    order_kill(tmp_path, plan, Point.PARTS_DONE, PIECE)
    assert {one.name: one.read_text() for one in tmp_path.glob("stored-*")} == {"stored-2": PIECE}


def test_stored_tokens_that_an_engine_is_not_told_are_sampled_again(root: Root):
    assert stored_tokens(root, PIECE, ()) == (0, 0)
    keep_increment(root, PIECE, 0, IncrementRecord.of([grown(0, 0, 7), grown(2, 0, 5)], 1))
    keep_increment(root, PIECE, 1, IncrementRecord.of([grown(0, 7, 7)], 1))
    told = [Begun(np.arange(count, dtype=np.int32), np.zeros(count, np.float32)) for count in (14, 0, 3)]
    assert stored_tokens(root, PIECE, told) == (19, 2)
    assert stored_tokens(root, PIECE, ()) == (19, 19)


def _run(*options: str) -> dict[str, dict[str, int | None]]:
    command = [sys.executable, "-m", "flows", "bench", "faults", "--json", "--iterations=2", "--every=2", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])["sides"]


@pytest.mark.full
def test_runs_with_failures_end_in_the_bits_of_the_undisturbed_one():
    assert {name: (one["kills"], one["starts"], one["differences"]) for name, one in _run().items()} == {
        "undisturbed": (0, 1, None),
        "everything": (1, 2, 0),
        "apart": (1, 1, 0),
        "standby": (1, 1, 0),
    }


@pytest.mark.full
def test_a_rollout_goes_on_with_the_stored_tokens_of_a_killed_engine():
    sides = _run("--kill=engine", "--seconds=5", "--side=apart", "--side=standby")
    assert list(sides) == ["undisturbed", "apart", "standby"]
    for one in (sides["apart"], sides["standby"]):
        assert (one["kills"], one["starts"], one["differences"], one["sampled_again"]) == (1, 1, 0, 0)
        assert one["stored"]
