"""Processes of a site."""

import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flows.site.processes import RunningProcess, SiteFolder, SiteRecord, end, find, kill_tree, start, strays
from flows.site.up import down, stay
from tasks.config.environment import site_environment
from tests.flows.site.conftest import wait_for

CHILD = "import time; time.sleep(600)"
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {CHILD!r}]); {CHILD}"


@pytest.fixture
def folder(tmp_path: Path) -> SiteFolder:
    return SiteFolder.at(tmp_path / "site")


@pytest.fixture
def begun(folder: SiteFolder) -> Iterator[RunningProcess]:
    """A process with a child, started like a site's, without a record."""
    environment = site_environment(folder.path, folder.prefect_home, "http://127.0.0.1:1/api", "a:b")
    running = start("worker", [sys.executable, "-c", PARENT, "ratchet"], environment, folder.log("worker"))
    wait_for(lambda: psutil.Process(running.process).children())
    yield running
    end(running)


def test_the_folder_that_a_site_makes_is_its_owners_alone(folder: SiteFolder):
    folder.write(folder.client_file, "x")
    assert [path.stat().st_mode & 0o777 for path in (folder.path, folder.client_file)] == [0o700, 0o600]


def test_a_process_that_nothing_recorded_is_found_without_its_children(folder: SiteFolder, begun: RunningProcess):
    assert [one.pid for one in strays(folder.path, ())] == [begun.process]
    assert [one.pid for one in strays(folder.path, (), "ratchet")] == [begun.process]
    assert strays(folder.path, (), "flows.server.sqlite:site_app") == []
    assert strays(folder.path, (begun,)) == []
    assert strays(folder.path.parent, ()) == []


def test_a_process_is_found_although_the_clock_was_set(begun: RunningProcess, monkeypatch: pytest.MonkeyPatch):
    """A process's start time in seconds since the epoch follows the clock, even where NTP only slews it."""
    monkeypatch.setattr(psutil.Process, "create_time", lambda _: 0.0)
    assert find(begun) is not None
    assert find(begun.model_copy(update={"started": f"{begun.started}0"})) is None


def test_what_a_killed_process_leaves_is_found(folder: SiteFolder, begun: RunningProcess):
    parent = psutil.Process(begun.process)
    (child,) = parent.children()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    left = strays(folder.path, (begun,))
    kill_tree(child)
    assert left == [child]


def test_down_ends_what_nothing_recorded(folder: SiteFolder, begun: RunningProcess):
    children = psutil.Process(begun.process).children()
    folder.keep(SiteRecord(api="http://127.0.0.1:1/api"))
    assert down(folder).ended == ("stray",)
    assert find(begun) is None
    assert not any(child.is_running() for child in children)


def test_a_worker_that_is_asked_to_end_starts_nothing_any_more(folder: SiteFolder, tmp_path: Path):
    """Prefect's worker does this under load: it restarts a flow run that has just ended, and stays alive with it."""
    again = f"pathlib.Path({str(tmp_path / 'again')!r}).write_text('')"
    text = (
        f"import pathlib, signal, time; signal.signal(signal.SIGTERM, lambda *_: {again}); print(flush=True); {CHILD}"
    )
    environment = site_environment(folder.path, folder.prefect_home, "http://127.0.0.1:1/api", "a:b")
    worker = start("worker", [sys.executable, "-c", text], environment, folder.log("worker"))
    folder.keep(SiteRecord(api="http://127.0.0.1:1/api", processes=(worker,)))
    wait_for(lambda: folder.log("worker").read_text())
    assert down(folder).ended == ("worker",)
    assert find(worker) is None
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    "killed", [("server",), ("worker",), ("server", "worker"), ("worker", "server", "worker"), ("down", "worker")]
)
def test_what_ends_is_started_again_until_the_site_is_ended(folder: SiteFolder, killed: tuple[str, ...]):
    environment = site_environment(folder.path, folder.prefect_home, "http://127.0.0.1:1/api", "a:b")

    def again() -> None:
        with folder.locked():  # as `up` does
            before = folder.record()
            alive = {one.role: one for one in (before.processes if before else ()) if find(one)}
            made = [
                alive.get(role) or start(role, [sys.executable, "-c", CHILD], environment, folder.log(role))
                for role in ("server", "worker")
            ]
            folder.keep(SiteRecord(api="http://127.0.0.1:1/api", processes=tuple(made)))

    def recorded(role: str) -> RunningProcess | None:
        return next((one for one in (folder.record() or SiteRecord(api="")).processes if one.role == role), None)

    def process(role: str) -> RunningProcess:
        wait_for(lambda: recorded(role))
        found = recorded(role)
        assert found is not None
        return found

    again()
    stopped = threading.Event()
    staying = threading.Thread(target=stay, args=(folder, again, stopped, lambda _: None, 0.02))
    staying.start()
    for role in killed:
        if role == "down":  # `ratchet down` beside a site that stays
            before, role = process("server"), "server"
            assert set(down(folder).ended) == {"server", "worker"}
        else:
            before = process(role)
            psutil.Process(before.process).kill()
        wait_for(lambda role=role, before=before: recorded(role) not in (None, before))
    last = [process(role) for role in ("server", "worker")]
    assert all(find(one) for one in last)
    stopped.set()
    staying.join()
    assert not any(find(one) for one in last)
