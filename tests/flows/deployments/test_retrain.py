"""Names, fixed parameters and refusals of the deployment `retrain`; the flow itself runs in tests/flows/site."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4
from zoneinfo import ZoneInfo

import pytest
from prefect.client.schemas.objects import DeploymentSchedule, FlowRun
from prefect.client.schemas.schedules import CronSchedule

from flows.deployments.retrain import Here, check_sources, configured, expanded, fixed, own_name, zone_of
from flows.site.entries import read_deployments
from storage import layout
from storage.backends.root import Root
from storage.errors import InputError
from tasks.config.code_version import PROJECT_ROOT
from tasks.config.run import RunConfig
from tasks.config.stored import begun_by, record_config
from tests.small.config import small_config
from tests.small.driving import RUN, driver

START = datetime(2026, 11, 24, 23, 30, tzinfo=UTC)
NIGHT = "night-{date}"


def here(identity: str = "mine", moment: datetime = START, *, is_scheduled: bool = True) -> Here:
    return Here(identity, moment, is_scheduled)


def planned(schedules: list[str | None], *, by: int | None) -> tuple[FlowRun, list[DeploymentSchedule]]:
    """A flow run that schedule number `by` or a person has started, and the schedules of its deployment."""
    made = [
        DeploymentSchedule(id=uuid4(), deployment_id=uuid4(), schedule=CronSchedule(cron="0 3 * * *", timezone=zone))
        for zone in schedules
    ]
    creator = None if by is None else {"id": made[by].id, "type": "SCHEDULE", "display_value": "nightly"}
    return FlowRun(flow_id=uuid4(), auto_scheduled=by is not None, created_by=creator), made


@pytest.mark.parametrize(
    ("schedules", "by", "date"),
    [
        (["Europe/Berlin"], 0, "20261125-003000"),
        (["America/New_York", "Europe/Berlin"], 0, "20261124-183000"),
        (["America/New_York", "Europe/Berlin"], 1, "20261125-003000"),
        ([None], 0, "20261124-233000"),
        (["Asia/Tokyo"], None, "20261125-083000"),  # by hand, for a night that was missed
        (["Asia/Tokyo", "Europe/Berlin"], None, "20261124-233000"),
        ([], None, "20261124-233000"),
    ],
)
def test_dates_are_those_of_the_time_zone_of_the_schedule(schedules, by, date):
    moment = START.astimezone(zone_of(*planned(schedules, by=by)))
    assert expanded("night-{date}-{time}", moment) == f"night-{date}"


def test_the_hour_that_comes_twice_has_two_runs(make_run, root: Root, config):
    berlin = ZoneInfo("Europe/Berlin")
    hours = [datetime(2026, 10, 25, hour, 30, tzinfo=UTC).astimezone(berlin) for hour in (0, 1)]
    first, second = (here(f"{number}", hour) for number, hour in enumerate(hours))
    name = own_name(root, "{date}-{time}", first)
    assert name == expanded("{date}-{time}", second.moment) == "20261025-023000"
    record_config(root, name, config, None, first.identity)
    make_run(name, 1)
    assert own_name(root, "{date}-{time}", second) == f"{name}-2"
    assert own_name(root, "{date}-{time}", first) == name  # its Retry


@pytest.mark.parametrize(
    ("begun", "asked", "name"),
    [
        ({}, here(), "night-20261124"),
        ({"night-20261124": "mine"}, here(), "night-20261124"),
        ({"night-20261124": "another"}, here(), "night-20261124-2"),
        ({"night-20261124": None}, here(), "night-20261124-2"),  # by a command
        ({"night-20261124": "another"}, here(is_scheduled=False), "night-20261124-2"),
        ({"night-20261124": "another", "night-20261124-2": None}, here(), "night-20261124-3"),
        ({"night-20261124": "another", "night-20261124-2": "mine"}, here(), "night-20261124-2"),
    ],
)
def test_no_flow_run_takes_the_run_of_another_for_its_own(make_run, root: Root, config, begun, asked, name):
    for run, request in begun.items():
        record_config(root, run, config, None, request)
        make_run(run, 1)
    assert own_name(root, NIGHT, asked) == name


def test_a_schedule_with_a_name_that_does_not_change_is_refused_the_second_time(make_run, root: Root, config):
    assert own_name(root, "night", here()) == "night"
    record_config(root, "night", config, None, "mine")
    make_run("night", 1)
    assert own_name(root, "night", here()) == "night"
    assert own_name(root, "night", here("another", is_scheduled=False)) == "night"  # a person continues it
    with pytest.raises(InputError, match="another flow run or a command has begun it"):
        own_name(root, "night", here("another"))
    with pytest.raises(InputError, match="run name"):
        own_name(root, "night-{day}", here())


GIVEN = {"start": f"{RUN}@1", "select": [RUN], "samples": 6, "epochs": None}


def test_a_run_is_begun_for_one_flow_run_and_continued_only_by_hand_and_until_it_is_complete(
    root: Root, tmp_path: Path
):
    driver(root, small_config(["run.iterations=1"]), tmp_path / "scratch").drive()

    def ask(asked: Here, **changed: Any) -> RunConfig:
        return configured(own_name(root, "night", asked), str(root.folder), {**GIVEN, **changed}, None, [], asked)

    config = ask(here("first"), epochs=2)
    assert begun_by(root, "night") == "first"
    assert ask(here("first")) == config  # a Retry
    assert ask(here("second", is_scheduled=False)) == config  # settings that are not given keep their values
    with pytest.raises(InputError, match="begins a run of its own"):
        ask(here("second"))
    root.remove(layout.run_config_key("night"))  # killed before it was published
    assert ask(here("first"), epochs=2) == config
    driver(root, config, tmp_path / "night", run="night").drive()
    with pytest.raises(InputError, match="is another's, and complete"):
        ask(here("second", is_scheduled=False))
    assert ask(here("first")) == config
    more = ask(here("second", is_scheduled=False), epochs=3)
    assert more.retrain is not None
    assert more.retrain.epochs == 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"since": "2026-01-01", "newer_than": "1h"}, "either since"),
        ({"start": "a"}, "no run 'a'"),
    ],
)
def test_what_is_relative_or_contradicts_is_refused(tmp_path: Path, given, words):
    with pytest.raises(InputError, match=words):
        fixed(
            **{"run": "new", "root": str(tmp_path), "start": None, "since": None, "newer_than": None, **given},
            moment=START,
        )


def test_relative_places_are_refused():
    for start, select in (("runs//a@1", ()), (None, ["runs//a"])):
        with pytest.raises(InputError, match="give an absolute path"):
            check_sources(start, select)


@pytest.mark.parametrize("file", ["infra/prefect.yaml", "infra/examples/nightly.yaml"])
def test_the_files_that_ship_can_be_registered(file):
    names = [entry.name for entry, _ in read_deployments(PROJECT_ROOT / file)]
    assert "retrain" in names
