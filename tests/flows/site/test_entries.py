"""Errors in a file of deployments, refused before anything starts, and their messages."""

from pathlib import Path

import pytest
import yaml

from flows.site.entries import ScheduleEntry, read_deployments
from storage.errors import InputError
from tasks.config.code_version import PROJECT_ROOT

RUN = {"run": "a", "root": "/data/runs", "more": 1}
NIGHTLY = {"slug": "nightly", "cron": "0 2 * * *", "timezone": "Europe/Berlin", "parameters": RUN}


def written(folder: Path, schedule: dict, **deployment) -> Path:
    entry = {"name": "train", "entrypoint": "flows.deployments.runs.train", "schedules": [schedule], **deployment}
    file = folder / "prefect.yaml"
    file.write_text(yaml.safe_dump({"deployments": [entry]}))
    return file


def test_cron_and_interval_schedules_are_read(tmp_path: Path):
    interval = {"slug": "often", "interval": 3600, "parameters": RUN}
    ((entry, flow),) = read_deployments(written(tmp_path, NIGHTLY, schedules=[NIGHTLY, interval]))
    assert flow.name == "train"
    cron, often = (one.schedule() for one in entry.schedules)
    assert (cron.cron, cron.timezone) == ("0 2 * * *", "Europe/Berlin")
    assert often.interval.total_seconds() == 3600


@pytest.mark.parametrize(
    ("changed", "facts"),
    [
        ({"cron": "61 2 * * *"}, ("schedule nightly, cron: '61 2 * * *' is not a cron schedule", "minute, hour")),
        ({"cron": None}, ("schedule nightly: give exactly one of cron and interval",)),
        ({"interval": 600}, ("schedule nightly: give exactly one of cron and interval",)),
        ({"cron": None, "interval": 5}, ("schedule nightly, interval: 5 s is too short: give 60 s or more",)),
        ({"cron": None, "interval": float("nan")}, ("interval: nan s is too short",)),
        ({"timezone": "Europe/Berlim"}, ("timezone: 'Europe/Berlim' is not a time zone: give Europe/Berlin",)),
        ({"slug": ""}, ("slug",)),
        ({"every": "day"}, ("schedule nightly, every: Extra inputs",)),
        ({"parameters": {**RUN, "itertions": 3}}, ("no parameter 'itertions': give iterations",)),
        ({"parameters": {"root": "/data"}}, ("schedule nightly: parameters run are missing: add them",)),
        ({"parameters": {**RUN, "more": -1}}, ("schedule nightly", "more")),
    ],
)
def test_a_schedule_that_cannot_work_is_refused_with_field_and_repair(tmp_path: Path, changed, facts):
    file = written(tmp_path, {**NIGHTLY, **changed})
    with pytest.raises(InputError) as refused:
        read_deployments(file)
    for fact in (str(file), "deployment train", *facts):
        assert fact in str(refused.value)


def test_a_schedule_of_which_only_the_first_flow_run_would_train_is_refused(tmp_path: Path):
    night = {**NIGHTLY, "parameters": {"run": "night", "root": "/data/runs"}}
    with pytest.raises(InputError, match=r"schedule nightly: run 'night' is the same each time.*put \{date\}"):
        read_deployments(written(tmp_path, night, entrypoint="flows.deployments.retrain.retrain"))


def test_a_slug_names_one_schedule(tmp_path: Path):
    with pytest.raises(InputError, match="slug 'nightly' is given twice"):
        read_deployments(written(tmp_path, NIGHTLY, schedules=[NIGHTLY, NIGHTLY]))


@pytest.mark.parametrize("text", ["", "[]", "deployments: 3", "deployments: [", "deployments:\n- {}"])
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str):
    (tmp_path / "prefect.yaml").write_text(text)
    with pytest.raises(InputError, match=r"prefect.yaml cannot be used"):
        read_deployments(tmp_path / "prefect.yaml")


def test_what_comes_with_ratchet_can_be_used_also_with_the_schedules_that_it_shows():
    file = PROJECT_ROOT / "infra" / "prefect.yaml"
    flows = {entry.entrypoint.rpartition(".")[2] for entry, _ in read_deployments(file)}
    assert flows == {
        "train", "new_run", "rerun_stage", "retrain", "maintain", "evaluate",
        "choose_revision", "export_weights", "fork_run", "verify_runs", "import_files",
    }  # fmt: skip
    shown = [line[6:] for line in file.read_text().splitlines() if line.startswith("    # ")]
    schedules = [one for block in "\n".join(shown).split("schedules:")[1:] for one in yaml.safe_load(block)]
    assert {ScheduleEntry.model_validate(one).slug for one in schedules} >= {"nightly", "weekly"}
