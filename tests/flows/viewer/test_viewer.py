"""The viewer over stored runs of small workers: what its pages show, and what it refuses."""

from collections.abc import Iterator
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

from flows.viewer.pages import application
from flows.viewer.server import HEADERS, Guard
from storage.backends.root import Root, open_root
from storage.manifest import need
from storage.reader import read_stored_table
from tasks.stages.names import Stage
from tests.small.config import small_config
from tests.small.driving import RUN, driver

PORT, TOKEN = 4321, "right-token"
HERE = f"http://127.0.0.1:{PORT}"
MARKUP = "</pre><script>alert(1)</script>"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    """A root with two runs that differ in one setting; the second is named so that it comes last."""
    folder = tmp_path_factory.mktemp("viewed")
    store = open_root(str(folder / "runs"))
    driver(store, small_config(), folder / "one").drive()
    driver(store, small_config(["train.optimizer.learning_rate=1e-2"]), folder / "two", run="two").drive()
    return store


@pytest.fixture
def browser(root: Root) -> Iterator[TestClient]:
    """A browser that has opened the printed address."""
    with TestClient(Guard(application(root), PORT, TOKEN), HERE, raise_server_exceptions=True) as browser:
        assert browser.get(f"/?token={TOKEN}").status_code == 200
        yield browser


def sample_of(root: Root, iteration: int = 1) -> tuple[str, int]:
    table = read_stored_table(root, need(root, RUN, iteration, Stage.ROLLOUT))
    return table["prompt_id"][0].as_py(), table["sample_id"][0].as_py()


def paths(root: Root) -> list[str]:
    prompt, sample = sample_of(root)
    which = f"prompt={quote(prompt, safe='')}"
    return [
        "/", f"/run/{RUN}", f"/run/{RUN}?metric=train/loss", f"/compare?run={RUN}&run=two", f"/run/{RUN}/0",
        f"/run/{RUN}/1", f"/run/{RUN}/1/group?{which}", f"/run/{RUN}/1/sample?{which}&sample={sample}",
        f"/run/{RUN}/1/sample?{which}&sample={sample}&color=version",
        f"/run/{RUN}/1/sample?{which}&sample={sample}&color=advantage",
        f"/run/{RUN}/1/lineage?{which}&sample={sample}", f"/run/{RUN}/search", f"/run/{RUN}/curve",
        f"/run/{RUN}/search?where=reward+%3E+0&order=best", f"/run/{RUN}/search?where=nonsense",
    ]  # fmt: skip


def test_every_page_answers_and_none_writes(root: Root, browser: TestClient):
    assert root.folder is not None
    before = {path: path.stat().st_mtime_ns for path in sorted(root.folder.rglob("*"))}
    for path in paths(root):
        answer = browser.get(path)
        assert answer.status_code == 200, (path, answer.text)
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert {path: path.stat().st_mtime_ns for path in sorted(root.folder.rglob("*"))} == before
