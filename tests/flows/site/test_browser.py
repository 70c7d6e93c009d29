"""A person in front of the UI, in headless Chromium: signs in, reads why a flow run is red, presses Retry, sees green.

Pictures are kept in the folder that PICTURES names, or in the test's own.
"""

import os
import shutil
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient

from storage.backends.root import open_root
from storage.manifest import need
from tasks.stages.names import Stage
from tests.flows.site.conftest import DEADLINE_S, SiteHere, ended
from tests.small.config import _DOCUMENT

playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
CHROMIUM = shutil.which("chromium")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium"),
]


@pytest.fixture
def page(site: SiteHere):
    with playwright.sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.set_default_timeout(60_000)
        yield page
        browser.close()


def test_a_person_signs_in_reads_and_presses_retry(
    site: SiteHere, client: SyncPrefectClient, start, page, tmp_path: Path
):
    pictures = Path(os.environ.get("PICTURES", str(tmp_path)))
    pictures.mkdir(parents=True, exist_ok=True)
    (tmp_path / "small.toml").write_text(_DOCUMENT)
    (tmp_path / "fail-train").write_text("NumericsError")
    root = str(tmp_path / "runs")
    flow_run = start(run="a", root=root, iterations=1, config=str(tmp_path / "small.toml"))
    assert ended(site, client, flow_run).state.is_failed()

    ui = site.api.removesuffix("/api")
    page.goto(f"{ui}/login?redirect=/runs/flow-run/{flow_run.id}")
    page.locator("input[type=password]").fill(site.secret)
    page.screenshot(path=pictures / "1-sign-in.png")
    page.keyboard.press("Enter")
    page.get_by_text("train does not work here").first.wait_for()
    page.screenshot(path=pictures / "2-red.png")

    (tmp_path / "fail-train").unlink()
    page.get_by_role("button", name="Retry").first.click()
    page.screenshot(path=pictures / "3-dialog.png")
    page.get_by_role("dialog").get_by_role("button", name="Retry").click()
    assert ended(site, client, flow_run, attempt=2).state.is_completed()
    page.get_by_text("Completed").first.wait_for(timeout=DEADLINE_S * 1000)
    page.screenshot(path=pictures / "4-green.png")
    assert need(open_root(root), "a", 1, Stage.ROLLOUT).attempt == 0
    assert need(open_root(root), "a", 1, Stage.TRAIN).attempt == 1
