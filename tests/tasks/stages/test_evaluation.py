"""An evaluation of stored weights: repeatable, continued after an interruption, and no part of the run's chain."""

from pathlib import Path
from typing import Any

import pytest

from flows.views.evaluations import evaluation_lines, evaluations
from storage.backends.root import Root, open_root
from storage.errors import InputError, WorkerLost
from storage.manifest import need
from storage.parts import read_table
from storage.schema import EVALUATION_SAMPLES
from storage.upkeep.catalog import names
from tasks.config.evaluation import EvaluationSettings
from tasks.config.run import RunConfig
from tasks.stages.evaluation import evaluation
from tasks.stages.names import Stage
from tests.small.config import HELD_OUT, small_config
from tests.small.driving import RUN, driver
from tests.small.here import WorkersHere, context_here
from tests.small.workers import SmallEngine

ASKED = EvaluationSettings(samples=3, prompts_per_part=1)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    folder = tmp_path_factory.mktemp("evaluated")
    root = open_root(str(folder / "runs"))
    driver(root, small_config(), folder / "scratch").drive()
    return root


def evaluate(
    root: Root,
    scratch: Path,
    iteration: int,
    settings: EvaluationSettings = ASKED,
    config: RunConfig | None = None,
    **more: Any,
) -> Any:
    with context_here(root, config or small_config(), scratch, RUN, **more) as context:
        return evaluation(context, iteration, settings).manifest


def test_the_same_evaluation_is_one(root: Root, tmp_path: Path):
    """It gives the same answers on another root, too; a second request answers nothing again."""
    chain = [need(root, RUN, 2, stage).digest for stage in (Stage.TRAIN, Stage.WEIGHT_SYNC, Stage.EVALUATE)]
    made = evaluate(root, tmp_path / "one", 1)
    idle = WorkersHere(small_config())
    assert evaluate(root, tmp_path / "two", 1, workers=idle) == made
    assert idle.calls == []
    table = read_table(root, made, EVALUATION_SAMPLES)
    assert table.num_rows == HELD_OUT * (1 + ASKED.samples)
    assert len({*table["seed"].to_pylist()}) == HELD_OUT * ASKED.samples + 1
    assert made.metrics["greedy/errors"] == 0
    assert [need(root, RUN, 2, stage).digest for stage in (Stage.TRAIN, Stage.WEIGHT_SYNC, Stage.EVALUATE)] == chain


def test_what_decides_the_answers_makes_another_evaluation(root: Root, tmp_path: Path):
    other = ASKED.model_copy(update={"temperature": 0.5})
    made = [evaluate(root, tmp_path / str(n), n, how) for n, how in ((1, ASKED), (2, ASKED), (2, other))]
    assert len({(one.iteration, one.stage) for one in made}) == 3
    found = {one.manifest: one for one in evaluations(root, RUN)}
    first, second, third = (found[one.digest] for one in made)
    assert (first.before, second.before, third.before) == (None, 1, None)
    now, then = (one.figures["sampled/reward"] or 0.0 for one in (second, first))
    assert second.change["sampled/reward"] == now - then != 0


def test_evaluations_by_two_rewards_are_not_compared(root: Root, tmp_path: Path):
    """Their change would be that of the function; the one before that is alike is compared."""
    asked = ASKED.model_copy(update={"seed": 3})
    other = small_config(["reward.function=exact_match"])
    made = [
        evaluate(root, tmp_path / "0", 0, asked),
        evaluate(root, tmp_path / "1", 1, asked, config=other),
        evaluate(root, tmp_path / "2", 2, asked),
    ]
    found = {one.manifest: one for one in evaluations(root, RUN)}
    first, second, third = (found[one.digest] for one in made)
    assert (first.before, second.before, third.before) == (None, None, 0)
    assert (first.apart, second.apart, third.apart) == (None, 0, 1)
    assert second.change == {}
    assert "not compared with iteration 0, which another reward function has scored" in evaluation_lines(second)[0]
    assert third.change.keys() == third.figures.keys()


@pytest.mark.parametrize(
    ("more", "passing", "figures"),
    [([], None, False), (["reward.function=exact_match"], "reward == 1", True), ([], "reward >= 0.5", True)],
)
def test_pass_at_k_is_there_where_it_is_known_which_answers_pass(
    root: Root, tmp_path: Path, more: list[str], passing: str | None, figures: bool
):
    asked = ASKED.model_copy(update={"seed": 4, "passing": None if more else passing})
    made = evaluate(root, tmp_path / "0", 1, asked, config=small_config(more))
    assert made.facts.get("pass") == passing
    assert {"greedy/pass@1" in made.metrics, "sampled/pass@2" in made.metrics} == {figures}
    assert "greedy/reward" in made.metrics


@pytest.mark.parametrize("settings", [["evaluate.pass=reward >= 0.5"], []])
def test_the_condition_of_the_run_is_the_default(root: Root, tmp_path: Path, settings: list[str]):
    asked = ASKED.model_copy(update={"seed": 5, "passing": None if settings else "reward >= 0.5"})
    made = evaluate(root, tmp_path / "0", 1, asked, config=small_config(settings))
    assert made.facts["settings"]["passing"] == "reward >= 0.5"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"max_tokens": 126}, "held_out: prompt .* tokens, and with max_tokens of the evaluation = 126 it must fit"),
        ({"max_tokens": 5000, "table": "train"}, "train: prompt .* lower max_tokens of the evaluation or raise engine"),
        ({"passing": "right >= 1"}, "--pass = 'right >= 1' names right, which the reward does not give"),
        ({"passing": "reward >="}, "--pass: filter 'reward >=', position 10"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_starts(root: Root, tmp_path: Path, asked: Any, words: str):
    idle = WorkersHere(small_config())
    before = list(root.keys(RUN))
    with pytest.raises(InputError, match=words):
        evaluate(root, tmp_path / "0", 1, ASKED.model_copy(update=asked), workers=idle)
    assert idle.calls == []
    assert list(root.keys(RUN)) == before


def test_an_interrupted_evaluation_continues_with_the_next_part(root: Root, tmp_path: Path):
    asked = ASKED.model_copy(update={"seed": 7})

    class Dying(SmallEngine):
        calls = 0

        def generate(self, *given: Any) -> Any:
            Dying.calls += 1
            if Dying.calls == 3:  # the second prompt: each takes two calls
                raise WorkerLost("the engine died")
            return super().generate(*given)

    with pytest.raises(WorkerLost, match="the engine died"):
        evaluate(root, tmp_path / "first", 2, asked, workers=WorkersHere(small_config(), engine=Dying))
    workers = WorkersHere(small_config())
    made = evaluate(root, tmp_path / "second", 2, asked, workers=workers)
    assert workers.calls.count("generate") == 2 * (HELD_OUT - 1)
    undisturbed = evaluate(root, tmp_path / "third", 2, asked.model_copy(update={"prompts_per_part": HELD_OUT}))
    tables = [read_table(root, one, EVALUATION_SAMPLES) for one in (made, undisturbed)]
    order = [("prompt_id", "ascending"), ("greedy", "ascending"), ("sample_id", "ascending")]
    assert tables[0].sort_by(order).equals(tables[1].sort_by(order))


def test_a_live_run_is_not_disturbed(tmp_path: Path):
    """Evaluations of an iteration change nothing that the run reads when it goes on."""
    root = open_root(str(tmp_path / "runs"))
    driver(root, small_config(["run.iterations=1"]), tmp_path / "one").drive()
    evaluate(root, tmp_path / "evaluation", 1)
    again = driver(root, small_config(), tmp_path / "two")
    again.drive()
    assert {iteration for iteration, _, reused in again.done if not reused} == {2}
    assert sum("/evaluation-" in key for key in names(root, RUN).manifests) == 1
