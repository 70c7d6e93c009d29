"""Runs made of hand-written manifests on the real storage, and one real Prefect server for the whole folder."""

import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.server.temporary import TemporaryServer, drain
from storage.backends.root import Root, open_root
from storage.manifest import Manifest, commit
from tasks.config.document import parse_config
from tasks.config.run import RunConfig
from tasks.config.stored import record_config
from tasks.stages.names import WORKFLOW, Stage
from tests.flows.runs import MINIMAL, MakeRun, make_manifest


@pytest.fixture
def config() -> RunConfig:
    return parse_config(tomllib.loads(MINIMAL), "test")


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return open_root(str(tmp_path / "runs"))


@pytest.fixture
def make_run(root: Root, config: RunConfig) -> MakeRun:
    """Store a run whose iterations 0 ... `complete` are done, with `more` in their manifests, and some stages of the
    next."""

    def make(
        run: str,
        complete: int,
        begun: tuple[Stage, ...] = (),
        unevaluated: tuple[int, ...] = (),
        more: Callable[[Manifest], dict[str, Any]] = lambda manifest: {},
    ) -> None:
        digest = record_config(root, run, config)
        for iteration in range(complete + 1):
            for stage in map(Stage, WORKFLOW.stages_of(iteration)):
                if stage != Stage.EVALUATE or iteration not in unevaluated:
                    one = make_manifest(run, iteration, stage, config_digest=digest)
                    commit(root, one.model_copy(update=more(one)))
        for stage in begun:
            commit(root, make_manifest(run, complete + 1, stage, config_digest=digest))

    return make


@pytest.fixture(scope="session")
def prefect_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Home of every Prefect server that these tests start."""
    home = tmp_path_factory.mktemp("prefect")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_HOME", str(home))
        patch.setenv("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
        yield home


@pytest.fixture(scope="session")
def prefect_server(prefect_home: Path, group_end: ExitStack) -> Iterator[TemporaryServer]:
    """A real server with a database of its own."""
    with ExitStack() as ends:
        group_end.callback(ends.close)
        server = ends.enter_context(TemporaryServer())
        ends.callback(drain)
        server.wait(240)
        yield server


@pytest.fixture
def prefect_api(prefect_server: TemporaryServer) -> Iterator[str]:
    """Connect Prefect in this process to the real server."""
    with temporary_settings({PREFECT_API_URL: prefect_server.url}):
        yield prefect_server.url
