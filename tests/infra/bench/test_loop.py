"""The bench of the loop: its figures from recorded times, without a run."""

import pytest

from infra.bench.cases import CASES, LAYOUTS
from infra.bench.loop import (
    Timed,
    default_tables,
    figures,
    layout_settings,
    left_out_of,
    mean_of,
    windows,
)
from tasks.checks import check_content
from tasks.config.document import completed
from tasks.stages.names import Stage

RATE = {"tokens_per_second": 100.0}


def timed(stage: Stage, iteration: int, begin: float, end: float, **metrics: float) -> Timed:
    return Timed(iteration=iteration, stage=stage, begin=begin, end=end, metrics=dict(metrics))


def turns(iteration: int, begin: float) -> list[Timed]:
    """An iteration of 20 s in which rollout and training take turns."""
    return [
        timed(
            Stage.ROLLOUT, iteration, begin + 0.5, begin + 10.5, storage_seconds=3, tokens=900, tokens_per_second=100
        ),
        timed(Stage.REWARD, iteration, begin + 11, begin + 12, storage_seconds=0.25),
        timed(Stage.TRAIN, iteration, begin + 12, begin + 18, storage_seconds=0.5, save_seconds=1),
        timed(Stage.WEIGHT_SYNC, iteration, begin + 18.5, begin + 20),
    ]


def beside(iteration: int, begin: float) -> list[Timed]:
    """An iteration of 12 s whose training of 8 s has the next rollout, of 9 s, beside it."""
    return [
        timed(Stage.REWARD, iteration, begin + 0.5, begin + 1),
        timed(Stage.TRAIN, iteration, begin + 1, begin + 9, save_seconds=2),
        timed(
            Stage.ROLLOUT, iteration + 1, begin + 1, begin + 10, storage_seconds=4, tokens=850, tokens_per_second=100
        ),
        timed(Stage.WEIGHT_SYNC, iteration, begin + 10.5, begin + 12),
    ]


def test_shares_of_an_iteration_in_turns_add_up():
    found = figures(0, 20, turns(2, 0))
    assert found.rollout_s == 9  # a second of storing after the sampling; two more were beside it
    assert (found.reward_s, found.train_s, found.sync_s, found.durability_s) == (0.75, 4.5, 1.5, 2.75)
    assert found.orchestration_s == 1.5
    assert found.side_by_side_s == 0
    assert sum(found.shares.values()) == pytest.approx(1)
    assert found.overhead == pytest.approx((1.5 + 2.75 + 1.5) / 20)
    assert (found.idle_engines, found.idle_trainer) == (pytest.approx(8.5 / 20), pytest.approx(12.5 / 20))
    assert (found.bound_s, found.of_bound) == (10.5, pytest.approx(20 / 10.5))


def test_storing_beside_the_longer_stage_is_hidden_and_the_bound_takes_the_longer_one():
    found = figures(0, 12, beside(2, 0))
    assert (found.rollout_s, found.train_s, found.side_by_side_s) == (8.5, 6, 8)
    assert found.durability_s == 0.5  # that of the rollout; the state is saved beside it
    assert found.orchestration_s == 1
    assert (found.idle_engines, found.idle_trainer) == (pytest.approx(1.5 / 12), pytest.approx(2.5 / 12))
    assert (found.bound_s, found.of_bound) == (10, 1.2)


def test_only_iterations_count_whose_beginning_is_known_and_beside_which_a_rollout_was_sampled():
    stages = [timed(Stage.WEIGHT_SYNC, 0, -3, 0), *beside(1, 0), *beside(2, 12), *beside(3, 24)]
    last = [one for one in stages if not (one.stage == Stage.ROLLOUT and one.iteration == 4)]
    assert [window[:2] for window in windows(last)] == [(12, 24)]
    both = windows([timed(Stage.WEIGHT_SYNC, 0, -3, 0), *turns(1, 0), *turns(2, 20), *turns(3, 40)])
    assert [window[:2] for window in both] == [(20, 40), (40, 60)]
    assert mean_of([figures(*window) for window in both]) == figures(*both[0])


@pytest.mark.parametrize("cards", [0, 1, 2, 8])
@pytest.mark.parametrize("name", ["tiny", "0.75b"])
def test_each_layout_is_a_configuration_or_is_left_out(name, cards):
    run = [layout for layout in LAYOUTS if left_out_of(layout, cards) is None]
    assert len(run) == {0: 2, 1: 1}.get(cards, 3)
    for layout in run:
        config = completed(default_tables(name), layout_settings(layout, cards), None, "the test")
        assert config.rollout.ahead == (layout == "ahead")
        used = config.train.parallel.world_size + config.engine.count
        assert used == (2 if cards < 2 else 2 * cards if layout == "shared" else cards)


@pytest.mark.parametrize("name", ["tiny", "0.75b"])
def test_stop_tokens_give_a_mean_of_a_quarter_of_the_longest(name):
    section = completed(default_tables(name), (), None, "the test").rollout
    assert section.stop_tokens is not None
    mean = CASES[name].model.vocabulary / len(section.stop_tokens)
    assert mean == pytest.approx(section.max_tokens / 4, rel=0.02)


@pytest.mark.slow
def test_the_default_on_cpu_passes_the_checks_of_a_run():
    check_content(completed(default_tables("tiny"), layout_settings("ahead", 0), None, "the test"))
