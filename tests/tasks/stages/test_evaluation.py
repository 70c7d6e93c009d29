"""An evaluation of stored weights: repeatable, continued after an interruption, and no part of the run's chain."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest

from flows.views.evaluations import evaluation_lines, evaluations
from storage import layout
from storage.backends.root import Root, open_root
from storage.errors import InputError, StageFailed, WorkerLost
from storage.manifest import need
from storage.ownership.lease import hold
from storage.parts import read_table
from storage.schema import EVALUATION_SAMPLES
from storage.upkeep.catalog import names
from storage.upkeep.removal import forget, remove
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
    """The evaluation gives the same answers on another root, too; a second request samples nothing again."""
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


def test_answers_are_drawn_as_asked_for_and_end_as_those_of_the_run(root: Root, tmp_path: Path):
    """Tokens from 3 on are digits; the small engine draws the first `top_k` of them, and one alone with `min_p`."""
    for settings, most in (({"top_k": 2}, 2), ({"min_p": 0.5}, 1), ({}, 10)):
        asked = ASKED.model_copy(update={"seed": 5, **settings})
        config = small_config(['rollout.stop=["0"]'])
        table = read_table(root, evaluate(root, tmp_path, 1, asked, config=config), EVALUATION_SAMPLES)
        drawn = table.filter(pc.invert(table["greedy"]))["response_tokens"].to_pylist()
        assert max(len(set(one) - {1}) for one in drawn) <= most
        assert max(max(one) for one in drawn) <= (4 if most == 2 else 12)
        assert all(3 not in one[:-1] for one in table["response_tokens"].to_pylist())
    assert max(len(set(one)) for one in drawn) > 3


def test_evaluations_by_two_rewards_are_not_compared(root: Root, tmp_path: Path):
    """The change would be that of the function; the comparison uses the last earlier evaluation of the same kind."""
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


class Asking(SmallEngine):
    """An engine that calls a function before it answers for the last time."""

    calls = 0
    before_the_last: Callable[[], object]

    def generate(self, *given: Any) -> Any:
        type(self).calls += 1
        if type(self).calls == 2 * HELD_OUT:  # greedy answers and samples of each part
            type(self).before_the_last()
        return super().generate(*given)


def asking(before_the_last: Callable[[], object]) -> WorkersHere:
    return WorkersHere(
        small_config(), engine=type("Now", (Asking,), {"before_the_last": staticmethod(before_the_last)})
    )


def stopped() -> None:
    raise WorkerLost("the engine died")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that a scoring process can import; its name does not change with its content."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "evaluated_package.py"


def scored_by(package: Path, number: int) -> RunConfig:
    # another size each: Python's cache cannot tell apart two of one size within a second
    package.write_text(f"def score(record, response):\n    return {number}.0\n{'#' * number}")
    return small_config([f"reward.function={package.stem}:score"])


@pytest.mark.slow
def test_an_interruption_is_not_seen_in_an_evaluation(root: Root, tmp_path: Path, package: Path):
    """Scores of two versions of a function never mix: those of another version are another evaluation."""
    asked = ASKED.model_copy(update={"seed": 8})
    shutil.copytree(root.folder, tmp_path / "twin")
    twin = open_root(str(tmp_path / "twin"))
    config = scored_by(package, 1)
    whole = evaluate(root, tmp_path / "whole", 1, asked, config=config)
    with pytest.raises(WorkerLost):
        evaluate(twin, tmp_path / "first", 1, asked, config=config, workers=asking(stopped))
    continued = evaluate(twin, tmp_path / "second", 1, asked, config=config)
    assert (continued.digest, continued.stage) == (whole.digest, whole.stage)
    assert list(continued.facts["reward_source"]) == ["evaluated_package:score"]
    scored_by(package, 2)
    other = evaluate(root, tmp_path / "other", 1, asked, config=config)
    assert other.stage != whole.stage
    assert set(read_table(root, other, EVALUATION_SAMPLES)["reward"].to_pylist()) == {2.0}


@pytest.mark.slow
def test_a_function_that_changes_in_an_evaluation_is_refused(root: Root, tmp_path: Path, package: Path):
    asked, config = ASKED.model_copy(update={"seed": 9}), scored_by(package, 1)
    before = names(root, RUN).manifests
    workers = asking(lambda: scored_by(package, 2))
    with pytest.raises(StageFailed, match="evaluated_package:score has changed while it scored"):
        evaluate(root, tmp_path / "first", 1, asked, config=config, workers=workers)
    assert names(root, RUN).manifests == before
    made = evaluate(root, tmp_path / "second", 1, asked, config=config)
    assert set(read_table(root, made, EVALUATION_SAMPLES)["reward"].to_pylist()) == {2.0}


UNASKED = ASKED.model_copy(update={"seed": 10})
"""An evaluation that no other test has requested."""


@pytest.fixture
def own(root: Root, tmp_path: Path) -> Root:
    """A copy of the root."""
    shutil.copytree(root.folder, tmp_path / "own")
    return open_root(str(tmp_path / "own"))


def removed(root: Root) -> None:
    with hold(root, RUN, "test") as lease:
        remove(root, RUN, lease)
    forget(root, RUN)


def replaced(root: Root) -> None:
    removed(root)
    driver(root, small_config(["run.seed=5"]), Path(f"{root.folder}-scratch"), run=RUN).drive()


@pytest.mark.slow
@pytest.mark.parametrize(("change", "words"), [(removed, "no run 'small'"), (replaced, "it was made from prepare")])
def test_an_evaluation_of_a_removed_run_is_not_stored(own: Root, tmp_path: Path, change, words):
    with pytest.raises(InputError, match=words):
        evaluate(own, tmp_path / "scratch", 2, UNASKED, workers=asking(lambda: change(own)))
    assert not [key for key in names(own, RUN).manifests if "evaluation-" in key]


def test_a_removal_that_begins_at_the_commit_leaves_no_evaluation(own: Root, tmp_path: Path):
    """The removal lists the keys before the manifest exists; the record exists by then."""

    @dataclass(frozen=True)
    class Removing(Root):
        def put_if_absent(self, key: str, data: Any, durable: bool = True) -> bool:
            if layout.is_manifest(key):
                removed(own)
            return super().put_if_absent(key, data, durable)

    removing = Removing(own.url, own.backend)
    with pytest.raises(InputError, match="no run 'small'"):
        evaluate(removing, tmp_path / "scratch", 2, UNASKED)
    assert names(own, RUN).manifests == ()


@pytest.mark.slow
def test_a_live_run_is_not_disturbed(tmp_path: Path):
    """Evaluations of an iteration change nothing that the run reads when it continues."""
    root = open_root(str(tmp_path / "runs"))
    driver(root, small_config(["run.iterations=1"]), tmp_path / "one").drive()
    evaluate(root, tmp_path / "evaluation", 1)
    again = driver(root, small_config(), tmp_path / "two")
    again.drive()
    assert {iteration for iteration, _, reused in again.done if not reused} == {2}
    assert sum("/evaluation-" in key for key in names(root, RUN).manifests) == 1
