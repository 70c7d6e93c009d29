"""Deployment `retrain`: a new run on stored samples, started by a schedule, a person or a program."""

import functools
import time
from datetime import UTC, datetime
from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from pydantic import Field

from flows.deployments.explaining import failed
from flows.deployments.train import Minutes, begin, is_absolute, waiting
from storage.backends.root import open_root
from storage.errors import InputError, RatchetError
from storage.ids import check_run_name
from tasks.config.retrain import place_of
from tasks.config.run import RunConfig
from tasks.retraining import begin_retraining, retrain_config, since_of, start_of

Positive = Annotated[int, Field(ge=1)]


def named() -> str:
    """Name of a flow run in the UI."""
    return run_name(flow_run.get_parameters()["run"], scheduled())


@flow(name="retrain", flow_run_name=named, persist_result=False, validate_parameters=True)
def retrain(
    run: str,
    root: str,
    start: str | None = None,
    select: list[str] = [],  # noqa: B006 - never changed; Prefect shows a default in its form
    where: str = "",
    newer_than: str | None = None,
    since: str | None = None,
    limit: Positive | None = None,
    deduplicate: bool = False,
    rescore: bool = False,
    samples: Positive | None = None,
    epochs: Positive = 1,
    config: str | None = None,
    settings: list[str] = [],  # noqa: B006
    patience_minutes: Minutes = 10.0,
) -> State[Any]:
    """Train a new run of Ratchet on stored samples. No engine is started, and no prompt is sampled.

    What is committed is never done again, so Retry continues where the run ended.

    Args:
        run: Id of the new run. `{date}` and `{time}` in it become those of the scheduled start, in UTC, so that each
            flow run of a schedule begins a run of its own.
        root: Storage root of the new run: an absolute path, file:///absolute/path or s3://bucket/prefix.
        start: The state to begin with, as RUN@ITERATION; RUN alone is the newest that it has kept. Of another root as
            ROOT//RUN@ITERATION.
        select: Whose samples, each as RUN or RUN@FROM-TO, of another root as ROOT//RUN@FROM-TO.
        where: Condition over columns of samples and scores, such as reward > 0 and weight_version >= 12.
        newer_than: Only samples of the last 90m, 24h, 7d or 2w before the scheduled start. It is replaced by `since`
            when the flow run begins, so that a Retry selects the same.
        since: Only samples that were made at this time or later, such as 2026-11-22T03:00:00+00:00.
        limit: Most samples.
        deduplicate: Take samples with equal tokens once.
        rescore: Score the samples again first, with the reward of the configuration. Old scores stay.
        samples: Samples of an iteration; 256 if not given.
        epochs: Passes over the selection.
        config: Absolute path or URL of a TOML file with the settings that differ from those of the run to begin from.
        settings: Settings that replace both, each as section.key=value.
        patience_minutes: How long to wait for another process that drives this run.
    """
    logger, deadline = get_run_logger(), time.monotonic() + 60 * patience_minutes
    name = run
    given = {
        "start": start,
        "select": select or None,
        "where": where or None,
        "since": since,
        "limit": limit,
        "deduplicate": deduplicate or None,
        "rescore": rescore or None,
        "samples": samples,
        "epochs": epochs,
    }
    try:
        name = run_name(run, scheduled())
        given |= fixed(name, root, start, since, newer_than)
        resolved = configured(name, root, given, config, settings)
        return waiting(name, functools.partial(begin, name, root, resolved), deadline, logger.info)
    except RatchetError as error:
        return failed(error, name, root)


def scheduled() -> datetime:
    """When this attempt was to start."""
    # Prefect gives a subclass whose arithmetic loses the time zone
    return datetime.fromtimestamp(flow_run.get_scheduled_start_time().timestamp(), UTC)


def run_name(run: str, moment: datetime) -> str:
    """The id of the run: `{date}` and `{time}` are replaced by those of `moment`.

    Raises:
        InputError: it cannot be an id.
    """
    return check_run_name(run.replace("{date}", f"{moment:%Y%m%d}").replace("{time}", f"{moment:%H%M%S}"))


def fixed(run: str, root: str, start: str | None, since: str | None, newer_than: str | None) -> dict[str, str]:
    """What is relative to now, as it is for good: kept with the flow run, so that a Retry has the same.

    Raises:
        InputError: the run to start from has no state, both times are given, or a path is relative.
    """
    _check_absolute([("root", root), *([("a root", place_of(start).root)] if start else [])])
    if since is not None and newer_than is not None:
        raise InputError("give either since (a time) or newer_than (an age)")
    store, found = open_root(root), dict[str, str]()
    if start is not None:
        found["start"] = start_of(store, run, start)
    if newer_than is not None:
        found["since"] = since_of(store, run, newer_than, scheduled())
    given, identity = flow_run.get_parameters(), flow_run.get_id()
    kept = {**given, **found, "run": run, "newer_than": None}
    if identity is not None and kept != given:
        with get_client(sync_client=True) as client:
            client.request("PATCH", "/flow_runs/{id}", path_params={"id": identity}, json={"parameters": kept})
    return found


def configured(run: str, root: str, given: dict[str, Any], config: str | None, settings: list[str]) -> RunConfig:
    """The configuration of the run, which exists afterwards.

    Raises:
        InputError: it cannot be used, or a path is relative.
    """
    others = [("a root", place_of(text).root) for text in given["select"] or ()]
    _check_absolute([("root", root), ("config", config), *others])
    store = open_root(root)
    table = {key: value for key, value in given.items() if value is not None}
    resolved = retrain_config(store, run, table, config, settings)
    begin_retraining(store, run, resolved)
    return resolved


def _check_absolute(places: list[tuple[str, str | None]]) -> None:
    for what, place in places:
        if place is not None and not is_absolute(place):
            raise InputError(
                f"{what} is {place!r}: give an absolute path or a URL, because a Retry may start elsewhere"
            )
