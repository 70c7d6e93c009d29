"""Asking for a finished stage to be done again, as the command line and the deployment do."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace

import psutil
from pydantic import JsonValue

from flows.driving import rerun
from flows.preflight import check_start
from storage.backends.root import Root
from storage.errors import InputError
from storage.revisions import Rerun
from storage.upkeep.catalog import require_run
from storage.upkeep.redoing import Wanted
from tasks.config.document import parse_config
from tasks.config.identity import split_changes, unchangeable, with_settings
from tasks.config.run import RunConfig
from tasks.config.stored import changed_config, stored_config
from tasks.stages.names import WORKFLOW, Stage


def person() -> str:
    """Name of the requester in records: user and host of this process."""
    return f"{psutil.Process().username()}@{socket.gethostname()}"


def ask_again(root: Root, run: str, wanted: Wanted, given: Sequence[str] = ()) -> tuple[Rerun, RunConfig]:
    """Record that a stage is to be repeated, unless that is recorded; return the configuration that the run has then.
    Of the settings in `given`, `section.key=value`, those that decide results apply from this stage on. Raises
    InputError if the stage cannot be repeated so, LeaseHeld if another process drives the run."""
    require_run(root, run)
    if not wanted.reason.strip():
        raise InputError("a reason is missing: say why the stage is done again; it is recorded with the result")
    before = stored_config(root, run)
    if before.retrain is not None:
        raise InputError(f"run {run} trains on stored samples, and its stages are not done again: start a new retrain")
    after = changed_config(before, run, given)
    settings, runtime = split_changes(before.model_dump(mode="json"), after.model_dump(mode="json"))
    _check_settings(before, wanted, settings)
    check_start(run, root, before)
    asked = rerun(root, run, replace(wanted, settings=settings, ahead=after.rollout.ahead))
    return asked, going_on(before, {**runtime, "run.iterations": asked.until}, run)


def going_on(config: RunConfig, settings: dict[str, object], run: str) -> RunConfig:
    """The configuration with runtime settings replaced."""
    document = with_settings(config.model_dump(mode="json"), settings)  # pyright: ignore[reportArgumentType]
    return parse_config(document, f"of run {run}")


def _check_settings(config: RunConfig, wanted: Wanted, settings: Mapping[str, JsonValue]) -> None:
    stage = Stage(wanted.stage)
    if settings and not WORKFLOW.leads_on(stage):
        raise InputError(f"nothing is made from {stage}: it cannot be done again with {', '.join(settings)}")
    if fixed := list(unchangeable(config, settings, (stage, *WORKFLOW.behind[stage]))):
        fact = f"{', '.join(fixed)} cannot change when {stage} of iteration {wanted.iteration} is done again"
        why = "what comes before it was made under the old value"
        raise InputError(f"{fact}: {why}. Do an earlier stage again, or fork the run")
