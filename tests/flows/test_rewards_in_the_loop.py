"""A reward function of a person's own in the loop: it fails, is repaired, changes, and is counted."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flows.iteration import begin, iterate, position_after
from storage.backends.root import Root, open_root
from storage.digest import bytes_digest
from storage.errors import InputError, StageFailed
from storage.manifest import Manifest, find, need
from storage.parts import read_table
from storage.schema import EVALUATION, REWARD
from tasks.stages.names import Stage
from tasks.stages.scored import scored_by
from tests.small.config import HELD_OUT, PROMPTS, SAMPLES, small_config
from tests.small.here import WorkersHere, context_here

TOTAL = PROMPTS * SAMPLES
ALWAYS = "def score(record, response, sample):\n    return {'base': 0.5, 'more': sample.sample_id}\n"
HALF = "def score(record, response, sample):\n    return float('nan') if sample.sample_id else 1.0\n"
ONE_HALF = "def score(record, response, sample):\n    return 0.5 if sample.sample_id else 1.0\n"
FIRST = """
asked = 0

def score(record, response):
    global asked
    asked += 1
    if asked == 1:
        raise ValueError('not this one')
    return 0.25
"""
RUN = "small"


class Person:
    """Starts a run, edits the reward, and starts it again."""

    def __init__(self, folder: Path) -> None:
        self.root: Root = open_root(str(folder / "root"))
        self.file = folder / "my_reward.py"
        self.said: list[str] = []
        self.calls: list[str] = []
        self._folder, self._starts = folder, 0

    def start(self, text: str | None, last: int = 1, *settings: str) -> None:
        if text is not None:
            self.file.write_text(text)
        given = [f"reward.function={self.file}:score", "evaluate.every=0", f"run.iterations={last}", *settings]
        config = small_config(given)
        self._starts += 1
        workers = WorkersHere(config)
        scratch = self._folder / f"scratch-{self._starts}"
        with context_here(self.root, config, scratch, RUN, workers=workers, say=self.said.append) as context:
            try:
                position = begin(context)
                for iteration in range(1, last + 1):
                    if find(self.root, RUN, iteration, Stage.WEIGHT_SYNC) is None:
                        position = iterate(context, iteration, position)
                    else:
                        position = position_after(context, iteration)
            finally:
                self.calls = workers.calls

    def rewards(self, iteration: int) -> Manifest:
        return need(self.root, RUN, iteration, Stage.REWARD)

    def column(self, name: str, iteration: int = 1) -> list[Any]:
        return read_table(self.root, self.rewards(iteration), REWARD, [name])[name].to_pylist()


@pytest.fixture
def person(tmp_path) -> Person:
    return Person(tmp_path)


def test_a_function_that_fails_too_often_is_repaired_and_the_run_goes_on(person: Person):
    with pytest.raises(StageFailed) as failed:
        person.start(HALF)
    words = str(failed.value)
    assert "reward of iteration 1: 3 of 6 responses, tried so far of 12, have no score (0 errors, 3 not finite" in words
    assert f"reward.max_failures = 0.1 allows 1 of {TOTAL}. For example" in words
    assert words.count("  prompt '") == 3
    assert "non_finite: returned nan, which is not finite as float32" in words
    assert find(person.root, RUN, 1, Stage.REWARD) is None
    assert [key for key in person.root.keys(RUN) if "rewards.arrow" in key or "rewards-" in key] == []
    rollout = need(person.root, RUN, 1, Stage.ROLLOUT)
    person.start(ONE_HALF)
    assert "generate" not in person.calls
    assert person.rewards(1).inputs["rollout"] == rollout.digest
    assert person.rewards(1).facts["reward_source"] == {"my_reward.py:score": bytes_digest(ONE_HALF.encode())}
    assert person.column("reward") == [1.0, 0.5] * PROMPTS
    assert need(person.root, RUN, 1, Stage.TRAIN).inputs["reward"] == person.rewards(1).digest


def test_the_limit_may_change_and_begins_no_other_run(person: Person):
    with pytest.raises(StageFailed, match=r"reward\.max_failures = 0\.1 allows"):
        person.start(HALF)
    with pytest.raises(StageFailed, match=r"reward\.max_failures = 0\.49 allows 5"):
        person.start(None, 1, "reward.max_failures=0.49")
    person.start(None, 1, "reward.max_failures=0.5")
    assert person.column("reward") == [1.0, None] * PROMPTS
    assert person.column("reason") == [None, "non_finite"] * PROMPTS
    metrics = person.rewards(1).metrics
    counts = {name: metrics[name] for name in ("reward_mean", "errors", "timeouts", "non_finite", "unscored")}
    assert counts == {"reward_mean": 1, "errors": 0, "timeouts": 0, "non_finite": PROMPTS, "unscored": PROMPTS}


def test_nothing_is_trained_on_when_nothing_has_a_score(person: Person):
    with pytest.raises(StageFailed, match=rf"{TOTAL} of {TOTAL} responses have no score"):
        person.start("def score(record, response):\n    pass\n", 1, "reward.max_failures=1.0")


def test_a_few_failures_are_counted_and_never_a_score(person: Person):
    person.start(FIRST)
    assert person.column("reward") == [None, *[0.25] * (TOTAL - 1)]
    assert person.column("status") == ["error", *["ok"] * (TOTAL - 1)]
    assert person.column("detail")[:2] == ["ValueError: not this one (my_reward.py, line 8)", ""]
    assert person.rewards(1).metrics["unscored"] == 1


def test_components_are_columns_and_figures(person: Person):
    person.start(ALWAYS, 1, "reward.weights.more=2")
    assert [dict(row) for row in person.column("components")] == [
        {"base": 0.5, "more": float(sample)} for _ in range(PROMPTS) for sample in range(SAMPLES)
    ]
    assert person.column("reward") == [0.5, 2.5] * PROMPTS
    metrics = person.rewards(1).metrics
    assert (metrics["reward/base"], metrics["reward/more"]) == (0.5, 0.5)


@pytest.mark.slow
def test_a_changed_function_applies_to_what_is_not_scored_yet_and_is_said(person: Person):
    person.start(ONE_HALF)
    first = person.rewards(1)
    person.start(None, 2)
    assert person.said == []
    assert person.rewards(2).facts == first.facts
    person.start(ALWAYS, 3)
    assert person.rewards(1) == first
    old, new = (bytes_digest(text.encode()) for text in (ONE_HALF, ALWAYS))
    later = person.rewards(3).facts
    assert later["reward_source"] == {"my_reward.py:score": new}
    assert later["reward_source_replaced"] == {"my_reward.py:score": old}
    assert later["scored_by"] != first.facts["scored_by"]
    (said,) = person.said
    assert f"my_reward.py:score has changed ({old[:12]} -> {new[:12]}): it applies from iteration 3" in said
    person.start(None, 4)
    assert "reward_source_replaced" not in person.rewards(4).facts
    assert len(person.said) == 1


@pytest.mark.slow
def test_an_answer_without_a_score_is_not_a_wrong_answer(person: Person):
    more = ("evaluate.every=1", "reward.max_failures=0.5")
    person.start(FIRST, 1, *more)
    found = need(person.root, RUN, 1, Stage.EVALUATE)
    table = read_table(person.root, found, EVALUATION)
    assert table["reward"].to_pylist() == [None, *[0.25] * (HELD_OUT - 1)]
    assert table["detail"][0].as_py().startswith("ValueError: not this one")
    assert (found.metrics["reward_mean"], found.metrics["errors"], found.metrics["prompts"]) == (0.25, 1, HELD_OUT)
    assert "pass_rate" not in found.metrics
    assert found.facts.keys() == {"reward_source", "scored_by", "asked"}
    assert np.isfinite([one for one in found.metrics.values() if one is not None]).all()
    with pytest.raises(StageFailed, match="evaluate of iteration 2: 1 of 2 responses have no score"):
        person.start(None, 2, "evaluate.every=2", "reward.max_failures=0.1")


PARTS = (
    "def score(record, response):\n    return {'right': float(response == '7'), 'format': 0.5 + 0.1 * len(response)}\n"
)


@pytest.mark.slow
def test_consolation_is_a_mean_reward_and_no_pass_rate(person: Person):
    person.start(PARTS, 1, "evaluate.every=1", "evaluate.pass=right >= 1")
    found = need(person.root, RUN, 1, Stage.EVALUATE)
    rows = read_table(person.root, found, EVALUATION)["components"].to_pylist()
    assert found.metrics["pass_rate"] == np.mean([dict(row)["right"] for row in rows])
    assert found.metrics["reward_mean"] == pytest.approx(np.mean([sum(dict(row).values()) for row in rows]))
    assert found.metrics["reward_mean"] > found.metrics["pass_rate"] + 0.4
    assert found.facts["pass"] == "right >= 1"


@pytest.mark.slow
def test_a_condition_may_be_corrected_and_begins_no_other_run(person: Person):
    with pytest.raises(InputError, match=r"evaluate\.pass = 'rigth >= 1' names rigth, .* are format, right"):
        person.start(PARTS, 1, "evaluate.every=1", "evaluate.pass=rigth >= 1")
    person.start(PARTS, 1, "evaluate.every=1", "evaluate.pass=right >= 1")
    assert "pass_rate" in need(person.root, RUN, 1, Stage.EVALUATE).metrics


@pytest.mark.parametrize("setting", ["reward.arguments.more=2", "reward.weights.right=2"])
def test_what_changes_the_values_is_another_reward(setting: str):
    def by(*settings: str) -> str:
        return scored_by(small_config(["reward.function=a.b:score", *settings]).reward, {"a.b:score": "1"})

    assert by(setting) != by()
    assert by("reward.deadline_s=9", "reward.processes=2", "reward.max_failures=0.2") == by()
