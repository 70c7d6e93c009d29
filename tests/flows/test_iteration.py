"""The order of the stages, and that a continued run does only what is missing. The stages do nothing but commit."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from prefect import flow
from rich.console import Console

from flows.progress import Progress
from flows.run import advance, next_iteration
from storage.errors import WorkerLost
from storage.ids import Stage
from storage.manifest import Manifest, need
from storage.root import Root
from tasks import stages
from tasks.config import RunConfig
from tasks.context import RunContext
from tasks.stage import StageOutput, StageResult
from tasks.stages import StageTask

Done = list[tuple[int, Stage, bool]]
SENTENCE = {
    "prepare": Stage.PREPARE,
    "warm_up": Stage.TRAIN,
    "rollout": Stage.ROLLOUT,
    "reward": Stage.REWARD,
    "train": Stage.TRAIN,
    "weight_sync": Stage.WEIGHT_SYNC,
    "evaluate": Stage.EVALUATE,
}
FULL = [Stage.ROLLOUT, Stage.REWARD, Stage.TRAIN, Stage.WEIGHT_SYNC, Stage.EVALUATE]
BEGIN = [Stage.PREPARE, Stage.TRAIN, Stage.WEIGHT_SYNC, Stage.EVALUATE]


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Done:
    """Which stages ran, as (iteration, stage, reused)."""
    calls: Done = []

    def committing(stage: Stage) -> Callable[..., StageResult]:
        def body(context: RunContext, iteration: int, *inputs: Manifest) -> StageResult:
            named = {f"{item.stage}-{item.iteration}": item for item in inputs}
            result = context.stage(iteration, stage, named, lambda _writer: StageOutput())
            calls.append((iteration, stage, result.reused))
            return result

        return body

    for name, stage in SENTENCE.items():
        monkeypatch.setattr(stages, name, StageTask(stage, committing(stage)))
    return calls


@pytest.fixture
def context(root: Root, config: RunConfig, tmp_path: Path) -> RunContext:
    return RunContext("a", root, config, fleet=cast("Any", None), scratch=tmp_path)


def drive(context: RunContext, iterations: int) -> None:
    """Do what is missing up to `iterations`, in a real flow run."""
    section = context.config.run.model_copy(update={"iterations": iterations})
    config = context.config.model_copy(update={"run": section})
    asked = replace(context, config=config)

    @flow(name="test", persist_result=False)
    def body() -> None:
        first = next_iteration(asked.root, asked.run, asked.config)
        if first <= iterations:
            with Progress(asked.run, iterations, Console(file=io.StringIO())) as progress:
                advance(asked, progress, first)

    body()


def test_a_new_run_does_every_stage_in_order(prefect_api: str, context: RunContext, done: Done):
    drive(context, 2)
    expected = [(0, stage, False) for stage in BEGIN] + [(n, stage, False) for n in (1, 2) for stage in FULL]
    assert done == expected


def test_every_stage_is_made_from_the_manifests_before_it(prefect_api: str, context: RunContext, done: Done):
    drive(context, 2)
    inputs = {stage: set(need(context.root, "a", 2, stage).inputs) for stage in FULL}
    assert inputs == {
        Stage.ROLLOUT: {"prepare-0", "weight-sync-1"},
        Stage.REWARD: {"prepare-0", "rollout-2"},
        Stage.TRAIN: {"prepare-0", "rollout-2", "reward-2", "train-1"},
        Stage.WEIGHT_SYNC: {"prepare-0", "train-2"},
        Stage.EVALUATE: {"prepare-0", "weight-sync-2"},
    }


def test_a_complete_run_does_nothing_more(prefect_api: str, context: RunContext, done: Done):
    drive(context, 2)
    done.clear()
    drive(context, 2)
    assert done == []


def test_a_run_is_prolonged_without_a_look_at_what_is_finished(prefect_api: str, context: RunContext, done: Done):
    drive(context, 2)
    done.clear()
    drive(context, 3)
    assert done == [(3, stage, False) for stage in FULL]


def test_an_interrupted_iteration_goes_on_at_its_first_missing_stage(
    prefect_api: str, context: RunContext, done: Done, monkeypatch: pytest.MonkeyPatch
):
    train = stages.train

    def die(_context: RunContext, _iteration: int, *_inputs: Manifest) -> StageResult:
        raise WorkerLost("a trainer rank died")

    drive(context, 1)
    monkeypatch.setattr(stages, "train", StageTask(Stage.TRAIN, die))
    with pytest.raises(WorkerLost, match="a trainer rank died"):
        drive(context, 2)
    monkeypatch.setattr(stages, "train", train)
    done.clear()
    drive(context, 2)
    assert done == [(2, stage, stage in (Stage.ROLLOUT, Stage.REWARD)) for stage in FULL]
