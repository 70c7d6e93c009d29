"""A person reads why a flow run is red, repairs it and presses Retry, and it becomes green.

One kind of failure is looked at in headless Chromium, the others by what the page is made from. Pictures are kept in
the folder that PICTURES names, or in a temporary one.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.client.schemas.objects import FlowRun
from prefect.states import Scheduled

from flows.site.registration import POOL
from flows.views.history import stages_of
from storage.backends.root import open_root
from storage.manifest import find, need
from tasks.config.document import without_blanks
from tasks.stages.names import Stage
from tests.flows.deployments.forms import nested
from tests.flows.site.conftest import (
    DEADLINE_S,
    PROJECT,
    SiteHere,
    ended,
    open_flow_run,
    photograph,
    press_retry,
    wait_for,
)
from tests.small.config import PIECES

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Kind:
    """A way to fail: how a person would meet it, read of it, and repair it."""

    breaks: Callable[[Path], object]
    repairs: Callable[[Path], object]
    words: tuple[str, ...]
    """Parts of the message."""
    stage: Stage
    """The stage that fails."""
    settings: tuple[str, ...] = ()

    @property
    def during(self) -> str:
        return f"the storing of {self.stage}" if self.breaks is in_the_way else str(self.stage)


def file(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def gone(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


_GOOD = "def score(record, response):\n    return float(len(response))\n"
_BAD = "def score(record, response):\n    return record['solution']\n"


def in_the_way(folder: Path) -> None:
    place = folder / "runs" / "a" / "parts" / "000001" / "train"
    place.parent.mkdir(parents=True)
    place.write_text("a file where the store needs a folder")


KINDS = {
    "reward": Kind(
        file("my_reward.py", _BAD), file("my_reward.py", _GOOD), ("KeyError", "responses have no score"),
        Stage.REWARD, ("reward.function=my_reward.py:score", "reward.processes=1", "reward.try=false"),
    ),
    "engine": Kind(
        file("fail-rollout", "WorkerLost|engine 0 died during generate|1"), gone("fail-rollout"),
        ("engine 0 died", "more often than it is replaced"), Stage.ROLLOUT, ("run.retries=1",),
    ),
    "storage": Kind(
        in_the_way, gone("runs/a/parts/000001/train"), ("Not a directory", "The store refuses"), Stage.TRAIN
    ),
}  # fmt: skip


class Looking:
    """A person in front of the page, who keeps pictures of it."""

    def __init__(self, page, site: SiteHere, pictures: Path, name: str) -> None:
        self._page, self._site, self._pictures, self._name = page, site, pictures, name

    def retry(self, _client: SyncPrefectClient, flow_run: FlowRun, repair: Callable[[], object]) -> None:
        """Read why it is red, repair that, and press Retry."""
        open_flow_run(self._page, self._site, flow_run, self._pictures)
        self._page.get_by_text("Everything that was committed is kept").first.wait_for()
        photograph(self._page, self._pictures / f"{self._name}-1-red.png")
        repair()
        press_retry(self._page, self._pictures / f"{self._name}-2-dialog.png")

    def sees_green(self) -> None:
        """See that it is complete."""
        self._page.reload()
        self._page.get_by_text("Completed").first.wait_for(timeout=DEADLINE_S * 1000)
        photograph(self._page, self._pictures / f"{self._name}-3-green.png")


class Asking:
    """The requests that the page makes, without a page."""

    def retry(self, client: SyncPrefectClient, flow_run: FlowRun, repair: Callable[[], object]) -> None:
        """Repair, and ask for the state that Retry asks for."""
        repair()
        client.set_flow_run_state(flow_run.id, Scheduled(name="AwaitingRetry", message="Retry from the UI"))

    def sees_green(self) -> None:
        """The state has been read already."""


def test_a_person_reads_what_failed_repairs_it_and_presses_retry(
    site: SiteHere, client: SyncPrefectClient, start, page, pictures: Path, config, root, tmp_path: Path
):
    looking = Looking(page, site, pictures, "reward")
    check_the_retry(KINDS["reward"], looking, site, client, start, config, root, tmp_path)


@pytest.mark.parametrize("name", ["engine", "storage"])
def test_another_failure_is_explained_and_retried(
    name: str, site: SiteHere, client: SyncPrefectClient, start, config, root, tmp_path: Path
):
    check_the_retry(KINDS[name], Asking(), site, client, start, config, root, tmp_path)


def check_the_retry(kind: Kind, person: Looking | Asking, site, client, start, config, root, tmp_path: Path) -> None:
    """Each stage that was committed is kept, and the one that failed is resumed."""
    kind.breaks(tmp_path)
    settings = ["evaluate.every=0", *kind.settings]
    flow_run = start(run="a", root=root, iterations=1, config=config, settings=settings)
    failed = ended(site, client, flow_run).state
    assert failed.is_failed(), failed
    for words in (*kind.words, f"{kind.during} of iteration 1", f"kept in {root}/a", "Retry repeats only the"):
        assert words in failed.message
    store, order = open_root(root), [one for one in stages_of(1) if one != Stage.EVALUATE]
    before = [stage for stage in order if find(store, "a", 1, stage)]
    assert before == order[: order.index(kind.stage)]  # what was committed is what stands before the stage that failed
    made = {stage: need(store, "a", 1, stage) for stage in before}

    person.retry(client, flow_run, lambda: kind.repairs(tmp_path))
    done = ended(site, client, flow_run, attempt=2).state
    assert done.is_completed(), done
    person.sees_green()
    assert {stage: need(store, "a", 1, stage) for stage in before} == made
    assert need(store, "a", 1, kind.stage).attempt >= 1
    # each piece once: resumed inside the stage, and one is sampled again to compare it with what is kept
    answered = PIECES + (kind.stage == Stage.ROLLOUT)
    assert (tmp_path / "calls-rollout").read_text() == "x" * answered


class Choice(str):
    """An entry of a list."""


RUN = {"run": "a", "root": "/data/runs"}
FORMS: dict[str, tuple[dict[str, Any], ...]] = {
    "train": ({**RUN, "more": 3}, {**RUN, "iterations": 7, "config": "/data/a.toml", "settings": ["run.retries=1"]}),
    "new-run": (
        {
            **RUN, "iterations": 2, "model.source": "/data/model", "data.train": "/data/a.jsonl",
            "data.shuffle": Choice("false"), "train.max_length": 256, "train.precision": Choice("bf16"),
            "train.optimizer.learning_rate": 1e-5, "reward.function": "exact_match",
        },
    ),
    "rerun-stage": ({**RUN, "iteration": 1, "stage": Choice("reward"), "reason": "why", "cascade": False},),
    "retrain": ({**RUN, "start": "b", "select": ["b@1-2", "c"], "newer_than": "24h", "rescore": True},),
    "maintain": ({"root": "/data/runs", "runs": ["a"], "verify": False},),
    "evaluate": ({**RUN, "iteration": "best", "table": Choice("train")}, {**RUN, "iteration": "12"}),
    "choose": ({**RUN, "revision": 0, "reason": "why"},),
    "export": ({**RUN, "to": "/data/out", "iteration": "best", "precision": Choice("bf16")},),
    "fork": ({**RUN, "at": 0, "new": "b"},),
    "verify": ({"root": "/data/runs"},),
    "import": ({**RUN, "files": ["/data/a.jsonl"], "columns": ["reward=score"], "without_logprobs": True},),
}  # fmt: skip
"""Input of a person: texts, numbers, lists, switches and choices. `tests/flows/deployments/test_forms.py` tries
every choice of each list without a browser."""
_TABS = {int: "int", str: "str", float: "float"}


def fill(page: Any, name: str, value: Any) -> None:
    """Fill in a field as a person does."""
    label = page.locator(".schema-form-property__label", has_text=re.compile(rf"^{re.escape(name)}( \(Optional\))?$"))
    field = page.locator(".schema-form-property", has=label).last
    if isinstance(value, bool):
        if (field.get_by_role("switch").get_attribute("aria-checked") == "true") is not value:
            field.get_by_role("switch").click()
        return
    if isinstance(value, Choice):
        field.locator(".p-select-button__control").press("Space")
        page.locator(".p-select-option", has_text=re.compile(rf"^\s*{re.escape(value)}\s*$")).first.click()
        return
    if isinstance(value, list):
        for number, one in enumerate(value):
            field.get_by_role("button", name="Add item").click()
            field.locator("textarea").nth(number).fill(one)
        return
    tab = field.get_by_role("button", name=_TABS[type(value)], exact=True)
    if tab.count():
        tab.click()
    field.locator("textarea, input").first.fill(f"{value}")


def test_a_form_sends_what_a_person_fills_in_and_the_rest_as_it_was(
    site: SiteHere, client: SyncPrefectClient, page, pictures: Path
):
    client.update_work_pool(POOL, WorkPoolUpdate(is_paused=True))  # nothing of this is to be done
    try:
        page.goto(f"{site.api.removesuffix('/api')}/login?redirect=/deployments")
        page.locator("input[type=password]").fill(site.secret)
        page.keyboard.press("Enter")
        page.get_by_text("rerun-stage").first.wait_for()
        for name, filled in ((name, filled) for name, every in FORMS.items() for filled in every):
            check_form(name, filled, site, client, page, pictures)
    finally:
        client.update_work_pool(POOL, WorkPoolUpdate(is_paused=False))


def check_form(
    name: str, filled: dict[str, Any], site: SiteHere, client: SyncPrefectClient, page: Any, pictures: Path
) -> None:
    """Fill in a form and send it; the flow run that it makes is deleted again."""
    deployment = client.read_deployment_by_name(f"{name}/{name}")
    schema = deployment.parameter_openapi_schema
    assert schema is not None
    default = {at: field["default"] for at, field in schema["properties"].items() if "default" in field}
    mine = DeploymentFilter(id=DeploymentFilterId(any_=[deployment.id]))
    before = {one.id for one in client.read_flow_runs(deployment_filter=mine)}

    def new() -> list[FlowRun]:
        return [one for one in client.read_flow_runs(deployment_filter=mine) if one.id not in before]

    page.goto(f"{site.api.removesuffix('/api')}/deployments/deployment/{deployment.id}/run")
    page.get_by_role("button", name="Submit").wait_for()
    for field, value in filled.items():
        fill(page, field, value)
    page.screenshot(path=pictures / f"form-{name}.png", full_page=True)
    page.get_by_role("button", name="Submit").click()
    wait_for(new)
    (made,) = new()
    client.delete_flow_run(made.id)
    wanted = {**default, **deployment.parameters, **nested(filled)}
    assert without_blanks(made.parameters) == without_blanks(wanted), name


def test_every_deployment_has_a_form_that_is_tried():
    entries = yaml.safe_load((PROJECT / "infra" / "prefect.yaml").read_text())["deployments"]
    assert {one["name"] for one in entries} == set(FORMS)
