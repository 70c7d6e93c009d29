"""The figures of an evaluation, against a count of all choices."""

import itertools

import pyarrow as pa
import pytest

from storage.schema import EVALUATION_SAMPLES
from tasks.rewards.passing import passing
from tasks.stages.evaluation import figures, ladder, pass_at_k


@pytest.mark.parametrize(("answers", "passing"), [(5, 0), (5, 2), (6, 3), (4, 4), (1, 1)])
def test_pass_at_k_is_the_share_of_choices_with_a_passing_answer(answers: int, passing: int):
    for k in range(1, answers + 1):
        chosen = list(itertools.combinations(range(answers), k))
        share = sum(min(choice) < passing for choice in chosen) / len(chosen)
        assert pass_at_k(answers, passing, k) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize(("answers", "passing", "k"), [(3, 4, 1), (3, 1, 0), (3, 1, 4), (3, -1, 1)])
def test_pass_at_k_of_too_few_answers_is_refused(answers: int, passing: int, k: int):
    with pytest.raises(ValueError, match="is not defined"):
        pass_at_k(answers, passing, k)


def test_many_answers_do_not_overflow():
    assert pass_at_k(4096, 1, 2048) == pytest.approx(0.5)


def test_which_k_are_reported():
    assert [ladder(samples) for samples in (0, 1, 6, 8)] == [[], [1], [1, 2, 4, 6], [1, 2, 4, 8]]


def answers(rows: list[tuple[str, str, bool, float | None, str | None]]) -> pa.Table:
    """Table of (prompt, source, greedy, reward, reason)."""
    return pa.Table.from_pylist(
        [
            {
                "run": "a", "iteration": 1, "prompt_id": prompt, "source": source, "greedy": greedy, "sample_id": 0,
                "seed": 0, "response_tokens": [1], "finish_reason": "stop", "reward": reward,
                "status": "ok" if reason is None else "timeout" if reason == "timeout" else "error",
                "detail": "", "reason": reason, "components": None,
            }
            for prompt, source, greedy, reward, reason in rows
        ],
        schema=EVALUATION_SAMPLES,
    )  # fmt: skip


def test_what_has_no_score_is_counted_apart():
    table = answers(
        [
            ("x/1", "x", True, 1.0, None), ("y/1", "y", True, None, "exception"), ("y/2", "y", True, 0.0, None),
            *[("x/1", "x", False, reward, None) for reward in (1.0, 0.0, 0.0, 0.5)],
            ("y/1", "y", False, 1.0, None), ("y/1", "y", False, None, "timeout"),
            ("y/1", "y", False, None, "timeout"), ("y/1", "y", False, None, "non_finite"),
        ]
    )  # fmt: skip
    found = figures(table, 4, passing(table, "reward >= 1"))
    assert found["prompts"] == 3
    assert (found["greedy/pass@1"], found["greedy/errors"], found["greedy/timeouts"]) == (0.5, 1, 0)
    assert (found["greedy/x/reward"], found["greedy/y/reward"], found["sampled/y/reward"]) == (1.0, 0.0, 1.0)
    assert (found["sampled/errors"], found["sampled/timeouts"]) == (1, 2)
    # x/1 passes once in four, y/1 once in its one scored answer, which is too few for pass@2
    assert found["sampled/pass@1"] == pytest.approx((0.25 + 1.0) / 2)
    assert found["sampled/pass@2"] == pytest.approx(0.5)
    assert found["sampled/pass@4"] == 1.0
