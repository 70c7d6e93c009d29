"""Deployment `train`: continue a run to a number of iterations, started by a schedule, a person or a program."""

import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled, Completed, Failed
from pydantic import Field, WithJsonSchema

from flows.deployments.crashes import LIMIT, too_many_crashes
from flows.deployments.explaining import failed
from flows.deployments.lines import log_console
from flows.deployments.stopping import Stopped, stoppable
from flows.run import perform
from flows.views.history import synced_iterations
from flows.views.progress import Progress
from flows.views.retrained import last_iteration
from storage import layout
from storage.backends.root import open_root
from storage.errors import InputError, LeaseHeld, LeaseLost, RatchetError
from storage.ids import check_run_name
from storage.ownership.stopping import ASKED_FOR
from tasks.config.code_version import code_version
from tasks.config.document import apply_overrides, config_of_tables, load_config, merged, parse_config, without_blanks
from tasks.config.environment import without_secrets
from tasks.config.form import section_form
from tasks.config.run import RunConfig
from tasks.config.stored import stored_config

_LOOK_S = 5.0
_LIMIT = 1 << 20  # iterations of a run, for a search that halves

Count = Annotated[int, Field(ge=0)]
Minutes = Annotated[float, Field(ge=0)]
Table = dict[str, Any]
Tables = dict[str, Table]
"""Settings by section, as the form gives them."""


def named() -> str:
    """Name of a flow run in the UI."""
    given: dict[str, Any] = flow_run.get_parameters()
    return f"{given['run']} {'+' if given.get('more') else 'to '}{given.get('more') or given.get('iterations')}"


@flow(name="train", flow_run_name=named, persist_result=False, validate_parameters=True)
def train(
    run: str,
    root: str,
    iterations: Count | None = None,
    more: Count | None = None,
    config: str | None = None,
    settings: list[str] = [],  # noqa: B006 - never changed; Prefect shows a default in its form
    patience_minutes: Minutes = 10.0,
    model: Annotated[Table, WithJsonSchema(section_form("model"))] = {},  # noqa: B006
    data: Annotated[Table, WithJsonSchema(section_form("data"))] = {},  # noqa: B006
    rollout: Annotated[Table, WithJsonSchema(section_form("rollout"))] = {},  # noqa: B006
    reward: Annotated[Table, WithJsonSchema(section_form("reward"))] = {},  # noqa: B006
    train: Annotated[Table, WithJsonSchema(section_form("train"))] = {},  # noqa: B006
    evaluate: Annotated[Table, WithJsonSchema(section_form("evaluate"))] = {},  # noqa: B006
    engine: Annotated[Table, WithJsonSchema(section_form("engine"))] = {},  # noqa: B006
    storage: Annotated[Table, WithJsonSchema(section_form("storage"))] = {},  # noqa: B006
) -> State[Any]:
    """Continue a run of Ratchet to a number of iterations, or start it.

    What is committed is never done again, so Retry continues where the run ended. While another process drives the run,
    this flow run waits, and then ends as Cancelled. A new run takes what is not given here from the configuration file;
    without a file it needs at least a model, data, and in `train` the longest sequence and the learning rate.

    Args:
        run: Id of the run. A new one is started, an existing one is continued.
        root: Storage root: an absolute path, file:///absolute/path or s3://bucket/prefix.
        iterations: Continue until the run has this many iterations in all. Give either this or `more`.
        more: Continue for this many iterations from where the run is when the flow run begins, which is what a schedule
            wants. A Retry does not add to them.
        config: Absolute path or URL of the TOML file that describes the run. Not needed to continue a run, which then
            keeps the configuration that it was recorded with.
        settings: Settings that replace those of the configuration, each as section.key=value: any key of the reference,
            also those that have no field below.
        patience_minutes: How long to wait for another process that drives this run. After that the flow run ends as
            Cancelled and names that process.
        model: The model of a new run.
        data: The prompts of a new run.
        rollout: What is sampled in an iteration.
        reward: How responses are scored.
        train: Optimizer, policy, layout and limits of the trainer.
        evaluate: Answers to held-out prompts.
        engine: The rollout engines.
        storage: How long train states are kept.
    """
    sections: Tables = {
        "model": model, "data": data, "rollout": rollout, "reward": reward,
        "train": train, "evaluate": evaluate, "engine": engine, "storage": storage,
    }  # fmt: skip
    logger, deadline = get_run_logger(), time.monotonic() + 60 * patience_minutes
    try:
        last = target(run, root, iterations, more)
        report = functools.partial(begin, run, root, configured(run, root, last, config, settings, sections))
        return waiting(run, report, deadline, logger.info)
    except RatchetError as error:
        return failed(error, run, root)


def begin(run: str, root: str, config: RunConfig) -> State[Any]:
    """Do what the run lacks, and say so.

    Raises:
        RatchetError: whatever stops the run.
    """
    warn_of_versions(get_run_logger())
    if too_many_crashes():
        return Failed(message=f"run {run}: its process died {LIMIT + 1} times in a row. Find out why, then press Retry")
    drive(run, root, config)
    return Completed(message=f"run {run} has {last_iteration(open_root(root), run, config)} iterations")


def drive(run: str, root: str, config: RunConfig, *, one_stage: bool = False) -> None:
    """Do what the run lacks, or only the stage that was asked to be done again, as this flow run.

    Raises:
        RatchetError: whatever stops the run; it names the stage.
    """
    with Progress(run, config.run.iterations, log_console()) as progress:
        try:
            perform(run, root, config, progress, f"{ASKED_FOR}{flow_run.get_name()}", one_stage=one_stage)
        except RatchetError as error:
            error.during = error.during or progress.stage
            raise


def waiting(run: str, work: Callable[[], State[Any]], deadline: float, say: Callable[[str], object]) -> State[Any]:
    """Do `work` as soon as no other process drives the run; Cancelled if that takes until `deadline`, or is stopped.

    A run that is taken over during the work is another's: it is not taken back.
    """
    try:
        with stoppable():
            return _waiting(work, deadline, say)
    except Stopped:
        return Cancelled(message=f"`ratchet stop {run}` ended it. What was committed is kept: press Retry to continue")


def _waiting(work: Callable[[], State[Any]], deadline: float, say: Callable[[str], object]) -> State[Any]:
    told = False
    while True:
        try:
            return work()
        except LeaseLost as fact:
            return Cancelled(message=without_secrets(str(fact)))
        except LeaseHeld as fact:
            if time.monotonic() >= deadline:
                return Cancelled(message=without_secrets(str(fact)))
            if not told:
                say(f"{without_secrets(str(fact))}. Waiting for it")
                told = True
            time.sleep(_LOOK_S)


def target(run: str, root: str, iterations: int | None, more: int | None) -> int:
    """The iteration to continue to. That of `more` is kept with the flow run, so that a Retry has the same.

    Raises:
        InputError: neither or both are given, or a path is relative.
    """
    check_run_name(run)
    if not is_absolute(root):
        raise InputError(f"root is {root!r}: give an absolute path or a URL, because a Retry may start elsewhere")
    if (iterations is None) == (more is None):
        raise InputError("give either iterations (in all) or more (from here)")
    if more is None:
        assert iterations is not None
        return iterations
    last = max(synced_iterations(open_root(root), run, _LIMIT) - 1, 0) + more
    identity = flow_run.get_id()
    if identity is not None:
        with get_client(sync_client=True) as client:
            fixed = {**flow_run.get_parameters(), "iterations": last, "more": None}
            client.request("PATCH", "/flow_runs/{id}", path_params={"id": identity}, json={"parameters": fixed})
    return last


def configured(
    run: str, root: str, iterations: int, config: str | None, settings: list[str], sections: Tables
) -> RunConfig:
    """The configuration of a run: that of a file, the recorded one, or that of the form, with settings replaced.

    Raises:
        InputError: it cannot be used, or there is none.
    """
    replaced, store = [*settings, f"run.iterations={iterations}"], open_root(root)
    if config is not None:
        if not is_absolute(config):
            raise InputError(
                f"config is {config!r}: give an absolute path or a URL, because a Retry may start elsewhere"
            )
        return load_config(config, replaced, sections)
    if any(sections.values()) and not store.exists(layout.run_config_key(run)):
        return config_of_tables(sections, replaced, f"of the new run {run}")
    document = merged(stored_config(store, run).model_dump(mode="json"), without_blanks(sections))
    apply_overrides(document, replaced)
    return parse_config(document, f"of run {run} with the given settings")


def is_absolute(place: str) -> bool:
    """Whether a path or URL means the same from every folder."""
    local = place.removeprefix("file://")
    return "://" in local or Path(local).is_absolute()


def warn_of_versions(logger: "logging.Logger | logging.LoggerAdapter[Any]") -> None:
    """Say so if the worker runs another version of Ratchet than the one that registered the deployment."""
    registered = deployment.version
    if registered and registered != code_version():
        logger.warning(
            "this worker runs Ratchet %s, the deployment was registered by %s: `ratchet up` registers it again",
            code_version(),
            registered,
        )
