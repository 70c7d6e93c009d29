"""Asking for a finished stage to be done again, as the command line and the deployment do."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from flows.driving import rerun
from flows.preflight import check_start
from storage.backends.root import Root
from storage.errors import InputError
from storage.revisions import Rerun
from storage.upkeep.catalog import require_run
from storage.upkeep.redoing import Wanted
from tasks.config.document import apply_overrides, parse_config, with_functions
from tasks.config.identity import split_changes, unchangeable, with_settings
from tasks.config.run import RunConfig
from tasks.config.stored import stored_config
from tasks.stages.names import WORKFLOW, Stage


@dataclass(frozen=True)
class Request:
    """A request to repeat a stage."""

    iteration: int
    stage: Stage
    reason: str
    asked_by: str
    cascade: bool = True
    new_seeds: bool = False
    settings: Sequence[str] = ()
    """Settings, each as section.key=value: those that decide results apply from this stage on."""
    identity: str | None = None
    """Identity of the request: asked again under it, nothing is done twice."""


def person() -> str:
    """Name of the requester in records: user and host of this process."""
    return f"{psutil.Process().username()}@{socket.gethostname()}"


def ask_again(root: Root, run: str, request: Request) -> tuple[Rerun, RunConfig]:
    """Record the request, unless it is recorded, and tell with which configuration the run goes on.

    Raises:
        InputError: the stage cannot be done again, or not with these settings.
        LeaseHeld: another process drives the run.
    """
    require_run(root, run)
    if not request.reason.strip():
        raise InputError("a reason is missing: say why the stage is done again; it is recorded with the result")
    before = stored_config(root, run)
    if before.retrain is not None:
        raise InputError(f"run {run} trains on stored samples, and its stages are not done again: start a new retrain")
    document = before.model_dump(mode="json")
    apply_overrides(document, request.settings)
    after = parse_config(with_functions(document, None), f"of run {run} with the given settings")
    settings, runtime = split_changes(before.model_dump(mode="json"), after.model_dump(mode="json"))
    if settings and not WORKFLOW.leads_on(request.stage):
        raise InputError(f"nothing is made from {request.stage}: it cannot be done again with {', '.join(settings)}")
    _check_settings(request, list(unchangeable(settings, (request.stage, *WORKFLOW.behind[request.stage]))))
    check_start(run, root, before)
    wanted = Wanted(
        iteration=request.iteration,
        stage=request.stage,
        reason=request.reason,
        asked_by=request.asked_by,
        cascade=request.cascade,
        new_seeds=request.new_seeds,
        settings=settings,
        request=request.identity,
    )
    asked = rerun(root, run, wanted)
    return asked, going_on(before, {**runtime, "run.iterations": asked.until}, run)


def going_on(config: RunConfig, settings: dict[str, object], run: str) -> RunConfig:
    """The configuration with runtime settings replaced."""
    document = with_settings(config.model_dump(mode="json"), settings)  # pyright: ignore[reportArgumentType]
    return parse_config(document, f"of run {run}")


def _check_settings(request: Request, fixed: Sequence[str]) -> None:
    if fixed:
        raise InputError(
            f"{', '.join(fixed)} cannot change when {request.stage} of iteration {request.iteration} is done again: "
            "what comes before it was made under the old value. Do an earlier stage again, or fork the run"
        )
