"""Deployment `retrain`: a new run on stored samples, started by a schedule, a person or a program."""

import functools
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import DeploymentSchedule, FlowRun, State
from prefect.runtime import flow_run

from flows.deployments.attempt import Asked, Minutes, Positive, attempt, check_places, fix, form, waiting
from flows.deployments.runs import begin, is_complete
from flows.preflight import begin_on_samples
from storage import layout
from storage.backends.root import Root, open_root
from storage.errors import InputError
from storage.ids import check_run_name
from storage.upkeep.catalog import names
from storage.upkeep.fork import Announce
from tasks.config.retrain import RetrainSection, place_of
from tasks.config.run import RunConfig
from tasks.config.stored import begun_by
from tasks.forking import retrain_config, since_of, start_of


def named() -> str:
    return expanded(flow_run.get_parameters()["run"], this_flow_run().moment)


@form("retrain", named, RetrainSection)
def retrain(
    run: str,
    root: str,
    start: str | None = None,
    select: list[str] = [],  # noqa: B006 - never changed
    where: str = "",
    newer_than: str | None = None,
    since: str | None = None,
    limit: Positive | None = None,
    deduplicate: bool = False,
    rescore: bool = False,
    samples: Positive | None = None,
    epochs: Positive | None = None,
    config: str | None = None,
    settings: list[str] = [],  # noqa: B006
    patience_minutes: Minutes = 10.0,
) -> State[Any]:
    """Train a new run of Ratchet on stored samples. No engine is started, and no prompt is sampled.

    What is committed is never done again, so Retry continues where the run ended.

    Args:
        run: Id of the new run. `{date}` and `{time}` in it become those of the scheduled start, in the time zone of the
            schedule, and if a run has that name already a number is added, so that each flow run begins a run of its
            own. Without them, a run that another flow run has begun and not finished is continued by hand.
        root: Storage root of the new run: an absolute path, file:///absolute/path or s3://bucket/prefix.
        start: The state to begin with, as RUN@ITERATION; RUN alone is the newest that it has kept. Of another root as
            ROOT//RUN@ITERATION.
        select: Whose samples, each as RUN or RUN@FROM-TO, of another root as ROOT//RUN@FROM-TO.
        newer_than: Only samples of the last 90m, 24h, 7d or 2w before the scheduled start. It is replaced by `since`
            when the flow run begins, so that a Retry selects the same.
        since: Only samples that were made at this time or later, such as 2026-11-22T03:00:00+00:00.
        samples: Samples of an iteration; 256 if not given.
        config: Absolute path or URL of a TOML file with the settings that differ from those of the run to begin from.
        settings: Settings that replace both, each as section.key=value.
    """
    deadline, say = time.monotonic() + 60 * patience_minutes, get_run_logger().info
    given = {
        "start": start, "select": select or None, "where": where or None, "since": since, "limit": limit,
        "deduplicate": deduplicate or None, "rescore": rescore or None, "samples": samples, "epochs": epochs,
    }  # fmt: skip
    here = this_flow_run()
    name = expanded(run, here.moment)

    def work() -> State[Any]:
        check_sources(start, select)
        while True:
            own = own_name(open_root(root), run, here)
            if own != name:
                say(f"run {name} is another's: this flow run has run {own}")
            found = fixed(own, root, start, since, newer_than, here.moment)
            try:
                resolved = configured(own, root, given | found, config, settings, here, say)
            except InputError:
                if name == run or is_free(open_root(root), own, here):
                    raise
                continue  # another flow run of the same moment was faster
            return waiting(own, functools.partial(begin, own, root, resolved), deadline, say)

    fresh = f"train run {name} on stored samples of {', '.join(select) or 'what it was begun with'}"
    will = f"{fresh}; dates are those of {here.moment.tzinfo}"
    return attempt(Asked(name, root, will, places={"config": config}), work)


@dataclass(frozen=True)
class Here:
    """The flow run that asks, as the server knows it."""

    identity: str | None
    moment: datetime  # its scheduled start, in the time zone of its schedule
    is_scheduled: bool = False  # True if a schedule started it


def this_flow_run() -> Here:
    # Prefect gives a subclass whose arithmetic loses the time zone
    moment = datetime.fromtimestamp(flow_run.get_scheduled_start_time().timestamp(), UTC)
    identity = flow_run.get_id()
    if identity is None:
        return Here(None, moment)
    with get_client(sync_client=True) as client:
        asked = client.read_flow_run(UUID(identity))
        schedules = [] if asked.deployment_id is None else client.read_deployment_schedules(asked.deployment_id)
    return Here(identity, moment.astimezone(zone_of(asked, schedules)), asked.auto_scheduled)


def zone_of(asked: FlowRun, schedules: Sequence[DeploymentSchedule]) -> tzinfo:
    """The time zone of the schedule that started a flow run; of one started by hand, that which all schedules have."""
    mine = None if asked.created_by is None or not asked.auto_scheduled else asked.created_by.id
    zones = {vars(one.schedule).get("timezone") for one in schedules if mine in (None, one.id)}
    name = zones.pop() if len(zones) == 1 else None
    return ZoneInfo(name) if name else UTC


def expanded(run: str, moment: datetime) -> str:
    """A name in which `{date}` and `{time}` are replaced by those of `moment`."""
    return run.replace("{date}", f"{moment:%Y%m%d}").replace("{time}", f"{moment:%H%M%S}")


def own_name(store: Root, run: str, here: Here) -> str:
    """The id of the run that this flow run begins, or goes on with. Raises InputError if it cannot be an id, or a
    schedule has started this flow run for a run that is not its own."""
    first = check_run_name(expanded(run, here.moment))
    if first != run:
        every = itertools.chain([first], (f"{first}-{number}" for number in itertools.count(2)))
        return check_run_name(next(name for name in every if is_free(store, name, here)))
    there = store.exists(layout.run_config_key(run))  # what was begun and is no run yet is completed, if it is the same
    if here.is_scheduled and there and not is_free(store, run, here):
        fact = f"run {run!r} exists in {store.url}, and another flow run or a command has begun it"
        repair = 'so give a name with "{date}" or "{date}-{time}" in it'
        raise InputError(f"{fact}: each flow run of a schedule begins a run of its own, {repair}")
    return run


def is_free(store: Root, run: str, here: Here) -> bool:
    """True if there is no run of that name, or this flow run has begun it."""
    if not store.exists(layout.run_config_key(run)):
        return not names(store, run, 0).manifests
    return here.identity is not None and begun_by(store, run) == here.identity


def fixed(
    run: str, root: str, start: str | None, since: str | None, newer_than: str | None, moment: datetime
) -> dict[str, str]:
    """Resolve relative parameters, and keep them with the flow run, so that a Retry has the same. Raises InputError if
    the run to start from has no state, or both times are given."""
    if since is not None and newer_than is not None:
        raise InputError("give either since (a time) or newer_than (an age)")
    store, found = open_root(root), dict[str, str]()
    if start is not None:
        found["start"] = start_of(store, run, start)
    if newer_than is not None:
        found["since"] = since_of(store, run, newer_than, moment)
    fix(**found, run=run, newer_than=None)
    return found


def configured(
    run: str,
    root: str,
    given: dict[str, Any],
    config: str | None,
    settings: list[str],
    here: Here,
    announce: Announce = lambda _: None,
) -> RunConfig:
    """Begin the run, and return its configuration. Raises InputError for a bad one, or if another has completed it."""
    store = open_root(root)
    table = {key: value for key, value in given.items() if value is not None}
    resolved = retrain_config(store, run, table, config, settings)
    begin_on_samples(run, store, resolved, here.identity, announce)
    if begun_by(store, run) != here.identity and (here.is_scheduled or is_complete(store, run, resolved)):
        raise InputError(f"run {run!r} in {store.url} is another's, and complete: give the new run another name")
    return resolved


def check_sources(start: str | None, select: Sequence[str]) -> None:
    """Refuse sources in a root that is another one elsewhere. Raises InputError, which names the root."""
    given = ([] if start is None else [start]) + [*select]
    check_places({f"the root of {text!r}": place_of(text).root for text in given})
