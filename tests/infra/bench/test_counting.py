"""The learning task with long responses: its answers, its reward and its files."""

import random
import sys

import pytest

from infra.bench.counting import HELD_OUT, MOST, Task, leading, main, tasks, uncarried
from tasks.checks import check_content
from tasks.config.document import load_config
from tasks.rewards.sample import Sample

SAMPLE = Sample("train-0", 0, 1, "stop", (1,))


def test_a_task_is_written_with_the_ones_first():
    task = Task(47, 38, 200)
    assert (task.prompt, task.answer) == ("740+830<002:", "580,321,161,991")


@pytest.mark.parametrize(("one", "other", "wrong"), [(47, 38, 75), (41, 38, 79), (19, 9, 20)])
def test_an_example_that_forgets_to_carry_still_counts_up(one, other, wrong):
    assert uncarried(one, other) == wrong


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("580,321,161,991", 1.0),
        ("580,321,160,991", 0.5),
        ("580,321", 0.5),
        ("580,321,161,991,372", 0.8),
        ("", 0.0),
    ],
)
def test_the_reward_is_the_share_of_terms_before_the_first_wrong_one(response, reward):
    assert leading({"answer": Task(47, 38, 200).answer}, response, SAMPLE) == reward


def test_each_number_has_three_digits_and_solutions_count_below_the_limit():
    rng = random.Random(0)
    for task in tasks(rng, HELD_OUT, MOST):
        said = task.solution(rng).split(",")
        assert {len(term) for term in [*task.answer.split(","), *said]} == {3}
        assert max(int(term[::-1]) for term in said) < task.limit <= 999
        assert len(said) <= MOST


@pytest.mark.slow
def test_the_files_are_a_run_that_could_start(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["counting", str(tmp_path), "--small"])
    main()
    config = load_config(str(tmp_path / "counting.toml"), ["train.precision=fp32", "engine.precision=fp32"])
    check_content(config)
