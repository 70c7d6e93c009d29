"""What a run has done, from storage alone: imports no torch, Ray, vLLM or Prefect."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from flows.views.changes import Changes, apart_lines
from flows.views.history import PLOT, IterationRecord, evaluation_due, seconds_per_iteration
from flows.views.newest import read_newest
from flows.views.retrained import last_iteration, wanted_stages
from flows.views.troubles import run_troubles
from storage import layout
from storage.backends.root import Root
from storage.ids import check_run_name
from storage.revisions import read_revisions
from storage.upkeep.redoing import unfinished
from tasks.config.run import RunConfig
from tasks.config.stored import read_config
from tasks.stages.names import Stage


class StageStatus(BaseModel):
    """One stage of the iteration in progress."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: Stage
    done: bool


class RunStatus(BaseModel):
    """A run as its storage shows it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    """Id of the run."""
    root: str
    """Storage root."""
    iterations: int
    """RL iterations that are complete."""
    asked: int
    """RL iterations that the run was started with, or that it has, if a continuation has asked for more."""
    complete: bool
    """Whether everything that was asked for at the start is done."""
    revision: int = 0
    """The head: the revision that all of this is about. It rises when a finished stage is done again."""
    redoing: str | None = None
    """The finished stage that is being done again, if that is not finished."""
    current: int | None
    """The first iteration that is not complete; None if all are."""
    stages: tuple[StageStatus, ...]
    """The stages of `current`."""
    changes: Changes
    """Mean reward, held-out mean reward and held-out pass rate, from the first value to the last that compare."""
    seconds_per_iteration: float | None
    """Median duration of the iterations in `history` after the second."""
    warnings: tuple[str, ...]
    """Why the run may not learn, as far as `history` shows, and what is not compared; a line each."""
    report: str | None
    """URL of the plot, once there is one."""
    history: tuple[IterationRecord, ...]
    """The iterations that have begun: all, or of a long run the newest."""


def read_status(root: Root, run: str, whole: bool = False) -> RunStatus:
    """Read what a run has done and what comes next; of a long run only its first figures and its newest iterations.

    Args:
        whole: read every iteration, however many there are.

    Raises:
        InputError: there is no such run.
    """
    revisions = read_revisions(root, check_run_name(run))
    config = read_config(root, run, revisions).config
    begun = unfinished(root, run, revisions)
    # a continued run may have more iterations than it was started with
    found = read_newest(root, run, config, revisions, whole)
    going_on, key = found.first <= found.last, layout.report_key(run, PLOT)
    return RunStatus(
        run=run,
        root=root.url,
        iterations=max(found.first - 1, 0),
        asked=max(found.first - 1, last_iteration(root, run, config)),
        complete=not going_on,
        revision=revisions.head,
        redoing=None if begun is None else f"{begun}, as revision {begun.revision} ({begun.reason})",
        current=found.first if going_on else None,
        stages=_stages(found.records, found.first, found.last, config) if going_on else (),
        changes=found.changes,
        seconds_per_iteration=seconds_per_iteration(found.records),
        warnings=(
            *run_troubles([(one.iteration, one.troubles) for one in found.records if Stage.ROLLOUT in one.done]),
            *apart_lines(found.changes),
        ),
        report=f"{root.url}/{key}" if root.exists(key) else None,
        history=found.records,
    )


def _stages(
    history: Sequence[IterationRecord], iteration: int, last: int, config: RunConfig
) -> tuple[StageStatus, ...]:
    done, every = next((one.done for one in history if one.iteration == iteration), ()), config.evaluate.every
    stages = wanted_stages(config, iteration)
    wanted = [stage for stage in stages if stage != Stage.EVALUATE or evaluation_due(iteration, last, every)]
    return tuple(StageStatus(stage=stage, done=stage in done) for stage in wanted)
