"""The file of deployments, in the format of prefect.yaml: read, and checked before anything starts."""

import difflib
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any
from zoneinfo import available_timezones

import yaml
from prefect import Flow
from prefect.client.schemas.schedules import CronSchedule, construct_schedule
from prefect.exceptions import ParameterTypeError
from pydantic import AfterValidator, BaseModel, Field, ValidationError, field_validator, model_validator

from storage.errors import InputError

SHORTEST_S = 60.0  # least seconds between two flow runs of a schedule: Prefect looks for new ones about once a minute

_OWN_RUNS = "retrain"  # the flow of which each flow run begins a run of its own


class ScheduleEntry(BaseModel, frozen=True, extra="forbid"):
    """A schedule of a deployment, identified by its slug; those made in the UI are left alone."""

    slug: str = Field(min_length=1)
    cron: Annotated[str, AfterValidator(lambda text: _fires(text))] | None = None  # minute hour day month weekday
    interval: Annotated[float, AfterValidator(lambda seconds: _not_too_short(seconds))] | None = None  # seconds
    timezone: Annotated[str, AfterValidator(lambda name: _exists(name))] | None = None
    active: bool = True
    parameters: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_rule(self) -> "ScheduleEntry":
        if (self.cron is None) == (self.interval is None):
            raise ValueError("give exactly one of cron and interval (seconds)")
        return self

    def schedule(self) -> Any:
        return construct_schedule(interval=self.interval, cron=self.cron, timezone=self.timezone)


def _fires(cron: str) -> str:
    try:
        CronSchedule(cron=cron)
    except ValidationError:
        form = 'minute, hour, day, month, weekday, such as "0 2 * * *"'
        raise ValueError(f"{cron!r} is not a cron schedule: give {form}") from None
    return cron


def _not_too_short(interval: float) -> float:
    if not interval >= SHORTEST_S:
        raise ValueError(f"{interval:g} s is too short: give {SHORTEST_S:g} s or more")
    return interval


def _exists(timezone: str) -> str:
    if timezone not in available_timezones():
        near = difflib.get_close_matches(timezone, available_timezones(), 1)
        raise ValueError(f"{timezone!r} is not a time zone: give {near[0] if near else 'one such as Europe/Berlin'}")
    return timezone


class DeploymentEntry(BaseModel, frozen=True, extra="forbid"):
    """A deployment, as Prefect's own `prefect deploy` reads it."""

    name: str
    entrypoint: str  # module.function of a flow
    description: str | None = None
    tags: tuple[str, ...] = ()
    parameters: dict[str, Any] = Field(default_factory=dict)
    schedules: tuple[ScheduleEntry, ...] = ()
    work_pool: dict[str, Any] = Field(default_factory=dict)

    @field_validator("schedules")
    @classmethod
    def _distinct(cls, schedules: tuple[ScheduleEntry, ...]) -> tuple[ScheduleEntry, ...]:
        slugs = [one.slug for one in schedules]
        if twice := [slug for slug in slugs if slugs.count(slug) > 1]:
            raise ValueError(f"slug {twice[0]!r} is given twice: a slug says which schedule it is, so give another")
        return schedules


Deployments = tuple[tuple[DeploymentEntry, Flow[..., Any]], ...]


class DeploymentsFile(BaseModel, frozen=True, extra="ignore"):
    """A file in the format of prefect.yaml, as far as it is used here."""

    deployments: tuple[DeploymentEntry, ...]


def read_deployments(file: Path) -> Deployments:
    """The deployments of a file in the format of prefect.yaml, each with its flow. Raises InputError if it cannot be
    read, names a flow that does not exist, or has a schedule or a parameter that cannot be used."""
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
        entries = DeploymentsFile.model_validate(document).deployments
    except (OSError, yaml.YAMLError) as error:
        raise InputError(f"the deployments in {file} cannot be used: {error}") from None
    except ValidationError as error:
        raise _refused(file, (_flaw(document, one["loc"], one["msg"]) for one in error.errors())) from None
    found = tuple((entry, _flow(entry)) for entry in entries)
    if flaws := [flaw for entry, flow in found for flaw in _parameter_flaws(entry, flow)]:
        raise _refused(file, iter(flaws))
    return found


def _refused(file: Path, flaws: Iterator[str]) -> InputError:
    return InputError("\n  ".join([f"the deployments in {file} cannot be used:", *flaws]))


def _flaw(document: Any, place: tuple[int | str, ...], message: str) -> str:
    """A flaw with its place in words: names of deployments and schedules instead of numbers."""
    words: list[str] = []
    here: Any = document
    for step in place:
        try:
            here = here[step]
        except (KeyError, IndexError, TypeError):
            here = None
        if isinstance(step, int):
            named = here.get("slug", here.get("name")) if isinstance(here, Mapping) else None
            words[-1] = f"{words[-1].removesuffix('s')} {named or step + 1}"
        else:
            words.append(step)
    return f"{', '.join(words) or 'the file'}: {message.removeprefix('Value error, ')}"


def _flow(entry: DeploymentEntry) -> Flow[..., Any]:
    module, _, name = entry.entrypoint.rpartition(".")
    try:
        found = vars(importlib.import_module(module)).get(name)
    except (ImportError, ValueError) as error:
        raise InputError(f"deployment {entry.name}: {entry.entrypoint} cannot be imported: {error}") from None
    if not isinstance(found, Flow):
        raise InputError(f"deployment {entry.name}: {entry.entrypoint} is not a flow: give module.function")
    return found


def _parameter_flaws(entry: DeploymentEntry, flow: Flow[..., Any]) -> Iterator[str]:
    """Parameters that the flow does not have, and schedules whose flow runs would be refused."""
    known = flow.parameters.properties
    places = [(f"deployment {entry.name}", entry.parameters)]
    places += [(f"deployment {entry.name}, schedule {one.slug}", one.parameters) for one in entry.schedules]
    for place, parameters in places:
        for name in parameters:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                yield f"{place}: {flow.name} has no parameter {name!r}: give {near[0] if near else ', '.join(known)}"
    for place, one in zip((name for name, _ in places[1:]), entry.schedules, strict=True):
        given = {name: value for name, value in {**entry.parameters, **one.parameters}.items() if name in known}
        if missing := [name for name in flow.parameters.required or () if name not in given]:
            yield f"{place}: parameters {', '.join(missing)} are missing: add them"
            continue
        if flow.name == _OWN_RUNS and "{" not in f"{given['run']}":
            fact = f"run {given['run']!r} is the same each time, and only the first flow run would train"
            yield f"{place}: {fact}: put {{date}} or {{date}}-{{time}} into it"
            continue
        try:
            flow.validate_parameters(given)
        except ParameterTypeError as error:
            yield f"{place}: {error}"
