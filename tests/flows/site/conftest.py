"""A real site, started and ended by the command line, whose worker runs the deployment over small workers."""

import json
import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId, LogFilter, LogFilterFlowRunId
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from storage.backends.root import open_root
from tests.forked_python import Finished, forked_python, of_workers, own
from tests.prefect_home import prepared
from tests.small.config import _DOCUMENT

PROJECT = Path(__file__).resolve().parents[3]
SMALL = Path(__file__).with_name("small.yaml")
DEADLINE_S = 600
_PYTHON = "PYTHON_OF_THE_TESTS"


@dataclass(frozen=True)
class SiteHere:
    folder: Path
    port: int
    api: str

    @property
    def secret(self) -> str:
        return (self.folder / "secret").read_text().strip()

    def record(self) -> dict[str, Any]:
        return json.loads((self.folder / "site.json").read_text())

    def process(self, role: str) -> int:
        return next(one["process"] for one in self.record()["processes"] if one["role"] == role)


def free_port() -> int:
    """Find a port that stays free while nothing listens there, as between `down` and `up`.

    Linux gives 32768 and above to connections of any process, and Ray 10002 to 19999 to its workers.
    """
    for port in random.sample(range(20_000, 32_768), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("none of a hundred ports is free")


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let `begin` start forked processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_PYTHON, forked_python(tmp_path_factory, "command"))
        yield


def begin(*words: str, **more: str) -> "subprocess.Popen[str]":
    """Start a command of a person whose environment names no server."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {**of_workers(Path(environment[_PYTHON])), "PREFECT_WORKER_QUERY_SECONDS": "1", **more}
    return subprocess.Popen(
        [environment[_PYTHON], "-m", "flows", *words],
        cwd=PROJECT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def command(*words: str, **more: str) -> Finished:
    """The result of such a command."""
    process = begin(*words, "--json", **more)
    out, err = process.communicate()
    return Finished(process.returncode, out, err)


def up(folder: Path, port: int, *more: str) -> dict[str, Any]:
    here = ["up", f"--folder={folder}", f"--port={port}", f"--deployments={SMALL}"]
    done = command(*here, *more, RATCHET_FAULTS=str(faults(folder)))
    assert done.code == 0, done.err
    return done.json


@pytest.fixture(scope="session")  # starting one takes long
def site(python: None, group_end: ExitStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SiteHere]:
    folder, port = tmp_path_factory.mktemp("site") / "site", free_port()
    folder.mkdir(mode=0o700)
    prepared(folder / "prefect", tmp_path_factory)
    faults(folder).mkdir()
    with ExitStack() as ends:
        group_end.callback(ends.close)
        ends.callback(down, folder)
        yield SiteHere(folder, port, up(folder, port)["api"])


def down(folder: Path) -> None:
    ended = command("down", f"--folder={folder}")
    assert ended.code == 0, ended.err


def faults(folder: Path) -> Path:
    """Folder of the planned faults of flow runs over the real stack."""
    return folder.parent / "faults"


@contextmanager
def connected_to(site: SiteHere) -> Iterator[SyncPrefectClient]:
    settings = {PREFECT_API_URL: site.api, PREFECT_API_AUTH_STRING: site.secret}
    with temporary_settings(settings), get_client(sync_client=True) as client:
        yield client


@pytest.fixture(scope="session")
def client(site: SiteHere) -> Iterator[SyncPrefectClient]:
    with connected_to(site) as client:
        yield client


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the pictures of the browser tests."""
    folder = Path(os.environ.get("PICTURES") or tmp_path_factory.mktemp("pictures"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# Prefect redraws the graph of a running flow run on every frame; without a GPU, that keeps a core almost fully busy
FEW_FRAMES = """
const frame = window.requestAnimationFrame.bind(window);
window.requestAnimationFrame = draw => setTimeout(() => frame(draw), 500);
window.cancelAnimationFrame = clearTimeout;
"""


@pytest.fixture
def page() -> Iterator[Any]:
    """A page of headless Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with playwright.sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(60_000)
        page.add_init_script(FEW_FRAMES)
        yield page
        browser.close()


def open_flow_run(page: Any, site: "SiteHere", flow_run: FlowRun, pictures: Path) -> None:
    """Sign in and open the page of a flow run."""
    page.goto(f"{site.api.removesuffix('/api')}/login?redirect=/runs/flow-run/{flow_run.id}")
    page.locator("input[type=password]").fill(site.secret)
    page.screenshot(path=pictures / "sign-in.png")
    page.keyboard.press("Enter")


def photograph(page: Any, picture: Path) -> None:
    """Keep a picture of the page, without Prefect's advertisements on it."""
    page.locator("#prefect-design-toast-app").evaluate_all("all => all.forEach(one => one.remove())")
    page.screenshot(path=picture)


def press_retry(page: Any, picture: Path) -> None:
    """Press Retry, and again in the dialog; then leave the page, which would ask the server and draw without end."""
    page.get_by_role("button", name="Retry").first.click()
    page.get_by_role("dialog").get_by_role("button", name="Retry").wait_for()
    photograph(page, picture)
    with page.expect_response("**/set_state"):
        page.get_by_role("dialog").get_by_role("button", name="Retry").click()
    page.goto("about:blank")


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "small.toml"
    file.write_text(_DOCUMENT)
    return str(file)


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "runs")


@pytest.fixture
def start(client: SyncPrefectClient) -> Callable[..., FlowRun]:
    """Ask for a flow run of the deployment, as a person with the form does."""
    deployment = client.read_deployment_by_name("train/train")

    def start(**parameters: Any) -> FlowRun:
        return client.create_flow_run_from_deployment(deployment.id, parameters=parameters)

    return start


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def begun_rollout(start: Callable[..., FlowRun], config: str, root: str, run: str) -> FlowRun:
    """A flow run that is in the middle of its first rollout until `slow-rollout` is removed."""
    (Path(root).parent / "slow-rollout").write_text("600")
    flow_run = start(run=run, root=root, iterations=1, config=config, settings=["evaluate.every=0"])
    wait_for(lambda: open_root(root).keys(f"{run}/manifests/000001"))
    return flow_run


def flow_process(site: SiteHere) -> psutil.Process:
    """The process of the flow run that the worker has started."""
    (process,) = psutil.Process(site.process("worker")).children()
    return own(process)


def wait_until_idle(site: SiteHere) -> None:
    """Wait until the process of the last flow run is gone: no person presses Retry within that second."""
    wait_for(lambda: not psutil.Process(site.process("worker")).children())


def ended(site: SiteHere, client: SyncPrefectClient, flow_run: FlowRun, attempt: int = 1) -> FlowRun:
    """Wait until that attempt has ended; returns the flow run."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        found = client.read_flow_run(flow_run.id)
        if found.state is not None and found.state.is_final() and found.run_count >= attempt:
            wait_until_idle(site)
            return found
        assert time.monotonic() < deadline, found.state
        time.sleep(0.5)  # each question costs the server and this process some hundredths of a second of processor


def text_of(client: SyncPrefectClient, flow_run: FlowRun) -> str:
    lines = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run.id])))
    return "\n".join(line.message for line in lines)


def fired(client: SyncPrefectClient, parameters: dict[str, Any]) -> FlowRun:
    """The first flow run that a schedule has started; the schedule ends with it."""
    deployment = client.read_deployment_by_name("train/train")
    schedule = IntervalSchedule(interval=timedelta(seconds=20), anchor_date=datetime.now(UTC))
    made = DeploymentScheduleCreate(schedule=schedule, active=True, parameters=parameters)
    (created,) = client.create_deployment_schedules(deployment.id, [made])
    while True:
        found = client.read_flow_runs(deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[deployment.id])))
        begun = [run for run in found if run.auto_scheduled and run.start_time is not None]
        if begun:
            client.delete_deployment_schedule(deployment.id, created.id)
            return begun[0]
        time.sleep(0.5)
