"""What deployment `retrain` fixes and refuses; the flow itself runs in tests/flows/site."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from flows.deployments.retrain import configured, fixed, run_name
from flows.site.entries import read_deployments
from storage.errors import InputError
from tasks.config.code_version import PROJECT_ROOT


def test_each_scheduled_start_has_a_run_of_its_own():
    assert run_name("night-{date}-{time}", datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)) == "night-20260102-030405"
    with pytest.raises(InputError, match="run name"):
        run_name("night-{day}", datetime.now(UTC))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"root": "runs"}, "root is 'runs'"),
        ({"start": "runs//a@1"}, "a root is 'runs'"),
        ({"since": "2026-01-01", "newer_than": "1h"}, "either since"),
        ({"start": "a"}, "no run 'a'"),
    ],
)
def test_what_is_relative_or_contradicts_is_refused(tmp_path: Path, given, words):
    with pytest.raises(InputError, match=words):
        fixed(**{"run": "new", "root": str(tmp_path), "start": None, "since": None, "newer_than": None, **given})


@pytest.mark.parametrize(("select", "config"), [(["runs//a"], None), (["a"], "more.toml")])
def test_relative_places_are_refused(tmp_path: Path, select, config):
    with pytest.raises(InputError, match="give an absolute path"):
        configured("new", str(tmp_path), {"select": select}, config, [])


@pytest.mark.parametrize("file", ["infra/prefect.yaml", "infra/examples/nightly.yaml"])
def test_the_files_that_ship_can_be_registered(file):
    names = [entry.name for entry, _ in read_deployments(PROJECT_ROOT / file)]
    assert "retrain" in names
