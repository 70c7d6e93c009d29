"""Findings of the doctor."""

import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from flows.site.doctor import Diagnosis, _clock, _storage_clock, diagnose
from flows.site.processes import RunningProcess, SiteFolder, SiteRecord
from storage.backends.root import Root, Stored
from storage.errors import InputError
from tasks.config.code_version import code_version


def found(diagnosis: Diagnosis) -> dict[str, str]:
    return {one.check.partition(" ")[0]: one.level for one in diagnosis.findings}


def test_a_machine_without_gpu_and_site_is_healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    diagnosis = diagnose(SiteFolder.at(tmp_path / "site"), str(tmp_path / "runs"))
    expected = {
        "versions": "ok",
        "temporary": "ok",
        "storage": "ok",
        "store's": "ok",
        "sandbox": "ok",
        "GPU": "warning",
        "site": "warning",
    }
    assert {name: level for name, level in found(diagnosis).items() if name != "ports"} == expected
    assert diagnosis.healthy


def test_a_root_that_other_users_can_look_into_is_said_with_the_command_that_closes_it(tmp_path: Path):
    root = tmp_path / "the runs"
    root.mkdir()
    root.chmod(0o755)

    def said() -> list[str]:
        findings = diagnose(SiteFolder.at(tmp_path / "site"), str(root)).findings
        return [one.text for one in findings if one.check == "storage mode"]

    (text,) = said()
    subprocess.run(text.split("`")[1], shell=True, check=True)
    assert said() == []


def test_a_root_that_cannot_be_written_is_an_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    diagnosis = diagnose(SiteFolder.at(tmp_path / "site"), str(tmp_path / "file"))
    assert found(diagnosis)["storage"] == "error"
    assert not diagnosis.healthy


def test_a_dead_worker_and_server_are_errors(tmp_path: Path):
    folder = SiteFolder.at(tmp_path / "site")
    gone = [
        RunningProcess(role=role, process=1, started="before", version=code_version()) for role in ("server", "worker")
    ]
    folder.keep(SiteRecord(api="http://127.0.0.1:1/api", processes=tuple(gone)))
    diagnosis = diagnose(folder, str(tmp_path / "runs"))
    assert {name: found(diagnosis)[name] for name in ("server", "worker")} == {"server": "error", "worker": "error"}
    assert all("`ratchet up` starts it" in one.text for one in diagnosis.findings if one.check in ("server", "worker"))


@pytest.mark.parametrize(("apart", "level"), [(0, "ok"), (60, "error"), (-60, "error")])
def test_a_clock_that_differs_is_an_error(apart, level):
    date = (datetime.now(UTC) + timedelta(seconds=apart)).strftime("%a, %d %b %Y %H:%M:%S GMT")
    assert _clock(httpx.Response(200, headers={"date": date})).level == level


@pytest.mark.parametrize(("apart", "level"), [(0, "ok"), (90, "error"), (-90, "error")])
def test_a_clock_of_the_store_that_differs_is_an_error(apart, level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def other(root: Root, key: str) -> Stored | None:
        found = info(root, key)
        return None if found is None else found._replace(modified=found.modified + timedelta(seconds=apart))

    info = Root.info
    monkeypatch.setattr(Root, "info", other)
    (finding,) = _storage_clock(str(tmp_path))
    assert finding.level == level, finding
    assert not apart or ("ahead" if apart > 0 else "behind") in finding.text


def test_a_folder_that_others_can_read_is_refused(tmp_path: Path):
    (tmp_path / "site").mkdir(mode=0o755)
    with pytest.raises(InputError, match="chmod 700"):
        SiteFolder.at(tmp_path / "site")
