"""A site on PostgreSQL, the database for more than trials."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.states import Scheduled

from storage.backends.root import open_root
from storage.manifest import need
from tasks.stages.names import Stage
from tests.flows.site.conftest import SiteHere, command, connected_to, ended, fired, free_port, up, wait_for
from tests.small.config import _DOCUMENT

_INSTALLED = sorted(Path("/usr/lib/postgresql").glob("*/bin"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _INSTALLED, reason="PostgreSQL is not installed: apt-get install postgresql"),
]


@dataclass(frozen=True)
class Postgres:
    url: str
    restart: Callable[[], None]


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    """A server of its own; PostgreSQL refuses to run as root.

    Its folder is not below pytest's, which each start of pytest closes to other users.
    """
    with tempfile.TemporaryDirectory(prefix="ratchet-tests-postgres-") as folder:
        yield from served(Path(folder), free_port())


def served(folder: Path, port: int) -> Iterator[Postgres]:
    user = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
    if user:
        shutil.chown(folder, "postgres")

    def tool(name: str, *words: str) -> None:
        command = [*user, str(_INSTALLED[-1] / name), "-D", str(folder / "data"), *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd="/")

    tool("initdb", "-A", "trust", "-U", "postgres", "--no-sync")
    begin = ("-w", "-l", str(folder / "log"), "-o", f"-p {port} -h 127.0.0.1 -k {folder}")
    tool("pg_ctl", "start", *begin)
    url = f"postgresql://postgres@127.0.0.1:{port}/postgres"
    yield Postgres(url, lambda: tool("pg_ctl", "restart", "-m", "immediate", *begin))
    tool("pg_ctl", "stop", "-m", "immediate")


@pytest.fixture(scope="module")
def site(postgres: Postgres, python: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SiteHere]:
    folder, port = tmp_path_factory.mktemp("site") / "site", free_port()
    try:
        yield SiteHere(folder, port, up(folder, port, f"--database={postgres.url}")["api"])
    finally:
        command("down", f"--folder={folder}")


@pytest.mark.full  # in CI schedules and Retry are on SQLite, and a restart of the database is on PostgreSQL
def test_a_schedule_fires_and_a_failed_flow_run_is_retried(site: SiteHere, tmp_path: Path):
    root, config = str(tmp_path / "runs"), tmp_path / "small.toml"
    config.write_text(_DOCUMENT)
    (tmp_path / "fail-train").write_text("NumericsError")
    with connected_to(site) as client:
        flow_run = fired(client, {"run": "a", "root": root, "iterations": 1, "config": str(config)})
        assert ended(site, client, flow_run).state.is_failed()
        (tmp_path / "fail-train").unlink()
        client.set_flow_run_state(flow_run.id, Scheduled(name="AwaitingRetry"))
        done = ended(site, client, flow_run, attempt=2)
    assert done.state.is_completed(), done.state
    assert need(open_root(root), "a", 1, Stage.TRAIN).attempt == 1


def test_a_restart_of_the_database_loses_nothing(postgres: Postgres, site: SiteHere, tmp_path: Path):
    """The database is killed in the middle of a rollout, and the run recovers."""
    root, config = str(tmp_path / "runs"), tmp_path / "small.toml"
    config.write_text(_DOCUMENT)
    (tmp_path / "slow-rollout").write_text("600")
    given = {"run": "b", "root": root, "iterations": 2, "config": str(config), "settings": ["evaluate.every=0"]}
    with connected_to(site) as client:
        deployment = client.read_deployment_by_name("train/train")
        flow_run = client.create_flow_run_from_deployment(deployment.id, parameters=given)
        wait_for(lambda: open_root(root).keys("b/manifests/000001"))
        postgres.restart()
        (tmp_path / "slow-rollout").unlink()
        done = ended(site, client, flow_run)
        assert done.state.is_completed(), done.state
        # `run_count` also counts the states in which the page said that the server was unreachable
        names = [state.name for state in client.read_flow_run_states(flow_run.id)]
        assert names.count("Pending") == 1, names
        assert set(names) <= {"Scheduled", "Submitting", "Pending", "Running", "Completed"}
        mine = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[flow_run.id]))  # its iterations

        def shown() -> set[str]:  # the server writes them later, from events
            tasks = client.read_task_runs(flow_run_filter=mine)
            return {task.name for task in tasks if task.state is not None and task.state.is_completed()}

        wait_for(lambda: {"rollout-1", "train-1", "weight-sync-2"} <= shown())
    assert need(open_root(root), "b", 2, Stage.WEIGHT_SYNC).attempt == 0
    assert "SQLite" not in (site.folder / "server.log").read_text()
    assert not list((site.folder / "prefect").glob("*.db"))


def test_another_database_is_refused_while_the_site_runs(site: SiteHere):
    done = command("up", f"--folder={site.folder}", "--database=postgresql://elsewhere/name")
    assert done.code == 2
    assert "`ratchet down` first" in done.err


def test_a_database_with_a_password_is_refused(python: None, tmp_path: Path):
    done = command("up", f"--folder={tmp_path / 'site'}", "--database=postgresql://a:geheim@host/name")
    assert done.code == 2
    assert "give it as env:NAME" in done.err
    assert "geheim" not in done.err
