"""Deployment `rerun-stage`: do a finished stage of a run again, and what was made from it."""

import functools
import time
from typing import Any, Literal

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed

from flows.deployments.attempt import Asked, attempt
from flows.deployments.train import Count, Minutes, drive, waiting
from flows.redoing import Request, ask_again
from storage.backends.root import open_root
from storage.ids import check_run_name
from storage.revisions import read_revisions
from tasks.stages.names import Stage

Again = Literal["rollout", "reward", "train", "weight-sync", "evaluate"]
"""Stages that can be done again."""


def named() -> str:
    """Name of a flow run in the UI."""
    given: dict[str, Any] = flow_run.get_parameters()
    return f"{given['run']}@{given['iteration']}:{given['stage']} again"


@flow(name="rerun-stage", flow_run_name=named, persist_result=False, validate_parameters=True)
def rerun_stage(
    run: str,
    root: str,
    iteration: Count,
    stage: Again,
    reason: str,
    cascade: bool = True,
    new_seeds: bool = False,
    settings: list[str] = [],  # noqa: B006 - never changed; Prefect shows a default in its form
    patience_minutes: Minutes = 10.0,
) -> State[Any]:
    """Do a finished stage of a run again. What was done first stays readable, and can be chosen again.

    Retry continues the same rerun: nothing is done twice.

    Args:
        run: Id of the run.
        root: Storage root: an absolute path, file:///absolute/path or s3://bucket/prefix.
        iteration: Iteration of the stage.
        stage: Which stage. Of iteration 0 only weight-sync and evaluate: what the run began with stays.
        reason: Why; it is recorded with the result.
        cascade: Make the result part of the run, and do again what was made from the first, up to the iteration that
            the run has. Without it, the result lies beside the run until deployment `choose` makes it the head.
        new_seeds: Sample with other seeds than the first time, if the stage is a rollout.
        settings: Settings that apply from this stage on, each as section.key=value.
        patience_minutes: How long to wait for another process that drives this run. After that the flow run ends as
            Cancelled and names that process.
    """
    deadline, say = time.monotonic() + 60 * patience_minutes, get_run_logger().info
    then = "and what was made from it" if cascade else "beside what was made first"
    will = f"do {stage} of iteration {iteration} of run {run} again, {then}: {reason}"

    def work() -> State[Any]:
        request = Request(iteration, Stage(stage), reason, _who(), cascade, new_seeds, settings, flow_run.get_id())
        return waiting(check_run_name(run), functools.partial(begin, run, root, request), deadline, say)

    return attempt(Asked(run, root, will, "continues the same rerun from what is stored"), work)


def begin(run: str, root: str, request: Request) -> State[Any]:
    """Record the request, do what it asks for, and say what became of it.

    Raises:
        RatchetError: whatever stops the run.
    """
    asked, config = ask_again(open_root(root), run, request)
    drive(run, root, config, one_stage=not asked.cascade)
    chosen = {choice.revision for choice in read_revisions(open_root(root), run).choices}
    if asked.cascade and asked.revision not in chosen:
        return Cancelled(message=f"run {run}: doing {asked} again as revision {asked.revision} was withdrawn")
    head = (
        "is the head"
        if asked.cascade
        else f"is beside the head: deployment `choose` with revision {asked.revision}, "
        f"or `ratchet choose {run} {asked.revision}`, makes it so"
    )
    return Completed(message=f"run {run}: {asked} was done again; revision {asked.revision} {head}")


def _who() -> str:
    return f"flow run {flow_run.get_name()}" if flow_run.get_id() else "a flow run"
