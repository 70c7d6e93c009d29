"""The stages as Prefect tasks: the thin layer that makes them visible. What a stage does is Prefect-free code.

Prefect's result cache stays off. Its key would be made from inputs that do not name the iteration, and a hit would skip
a stage silently; whether a stage is done is decided by its manifest alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Concatenate

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from storage.manifest import Manifest
from tasks.stages import evaluate as evaluate_stage
from tasks.stages import prepare as prepare_stage
from tasks.stages import reward as reward_stage
from tasks.stages import rollout as rollout_stage
from tasks.stages import train as train_stage
from tasks.stages import warm_up as warm_up_stage
from tasks.stages import weight_sync as weight_sync_stage
from tasks.stages.context import RunContext
from tasks.stages.names import Stage
from tasks.stages.stage import StageResult

REUSED = "Completed (reused)"
"""State of a task run whose stage was committed before."""

StageBody = Callable[Concatenate[RunContext, int, ...], StageResult]
"""From the context, the iteration and the manifests of the inputs to the stage's own manifest."""


class StageTask:
    """A stage that runs as a task of the current flow run and hands back its manifest."""

    def __init__(self, stage: Stage, body: StageBody) -> None:
        self.stage = stage
        self._body = body
        self._task: Task = task(
            name=stage.value,
            task_run_name=f"{stage.value}-{{iteration}}",
            cache_policy=NO_CACHE,
            persist_result=False,
        )(_perform)

    def __call__(self, context: RunContext, iteration: int, *inputs: Manifest) -> Manifest:
        """Run the stage.

        Raises:
            RatchetError: whatever the stage raises; the task run is `Failed`.
        """
        # no tags: for each tag Prefect asks the server for a concurrency slot, which costs two seconds a stage
        # the context is bound, not a parameter: Prefect would walk through it in search of futures
        work = partial(self._body, context, iteration)
        state = self._task(iteration, work, inputs, return_state=True)
        return state.result()


def _perform(iteration: int, work: Callable[..., StageResult], inputs: tuple[Manifest, ...]) -> State[Manifest]:
    result = work(*inputs)
    manifest = result.manifest
    published = ", to be published when the train state before it is stored" if result.pending else ""
    return Completed(
        name=REUSED if result.reused else "Completed",
        message=f"{manifest.stage} of iteration {iteration}: manifest {manifest.digest}, {len(manifest.parts)} parts"
        f"{published}",
        data=manifest,
    )


prepare = StageTask(Stage.PREPARE, lambda context, _iteration: prepare_stage.prepare(context))
warm_up = StageTask(Stage.TRAIN, lambda context, _iteration, prepared: warm_up_stage.warm_up(context, prepared))
rollout = StageTask(Stage.ROLLOUT, rollout_stage.rollout)
reward = StageTask(Stage.REWARD, reward_stage.reward)
train = StageTask(Stage.TRAIN, train_stage.train)
weight_sync = StageTask(Stage.WEIGHT_SYNC, weight_sync_stage.weight_sync)
evaluate = StageTask(Stage.EVALUATE, evaluate_stage.evaluate)
