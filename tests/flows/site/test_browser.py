"""A person reads why a flow run is red, repairs it and presses Retry, and it becomes green.

One kind of failure is looked at in headless Chromium, the others in `tests/flows/deployments/test_flows.py`. Pictures
are kept in the folder that PICTURES names, or in a temporary one.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.client.schemas.objects import FlowRun

from flows.site.registration import POOL
from storage.backends.root import open_root
from storage.manifest import find
from tasks.config.document import without_blanks
from tasks.stages.names import Stage
from tests.flows.deployments.forms import nested
from tests.flows.failures import KINDS, check_explained, check_resumed
from tests.flows.site.conftest import (
    DEADLINE_S,
    PROJECT,
    SiteHere,
    ended,
    open_flow_run,
    photograph,
    press_retry,
    text_of,
    wait_for,
)

pytestmark = pytest.mark.slow


def test_a_person_reads_what_failed_repairs_it_and_presses_retry(
    site: SiteHere, client: SyncPrefectClient, start, page, pictures: Path, config, root, tmp_path: Path
):
    kind, store = KINDS["reward"], open_root(root)
    kind.breaks(tmp_path)
    settings = ["evaluate.every=0", *kind.settings]
    flow_run = start(run="a", root=root, more=1, config=config, settings=settings)  # the site counts it once
    failed = ended(site, client, flow_run)
    made = check_explained(kind, failed.state, store)
    assert (failed.parameters["iterations"], failed.parameters["more"]) == (1, None)

    open_flow_run(page, site, flow_run, pictures)
    page.get_by_text("Everything that was committed is kept").first.wait_for()
    photograph(page, pictures / "reward-1-red.png")
    kind.repairs(tmp_path)
    press_retry(page, pictures / "reward-2-dialog.png")

    check_resumed(kind, ended(site, client, flow_run, attempt=2).state, store, made, tmp_path)
    assert find(store, "a", 2, Stage.ROLLOUT) is None
    text = text_of(client, flow_run)
    assert [words for words in ("iteration 1/1", *kind.words) if words not in text] == [], text
    page.go_back()
    page.get_by_text("Completed").first.wait_for(timeout=DEADLINE_S * 1000)
    photograph(page, pictures / "reward-3-green.png")


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
IN_CI = ("train", "new-run", "retrain", "import")
"""Deployments whose forms together have every kind of field; the others are filled in by hand."""
BY_HAND = tuple(name for name in FORMS if name not in IN_CI)
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


@pytest.mark.parametrize("names", [IN_CI, pytest.param(BY_HAND, marks=pytest.mark.full)], ids=["every-kind", "others"])
def test_a_form_sends_what_a_person_fills_in_and_the_rest_as_it_was(
    site: SiteHere, client: SyncPrefectClient, page, pictures: Path, names: tuple[str, ...]
):
    client.update_work_pool(POOL, WorkPoolUpdate(is_paused=True))  # none of this is left to do
    try:
        page.goto(f"{site.api.removesuffix('/api')}/login?redirect=/deployments")
        page.locator("input[type=password]").fill(site.secret)
        page.keyboard.press("Enter")
        page.get_by_text("rerun-stage").first.wait_for()
        for name, filled in ((one, filled) for one in names for filled in FORMS[one]):
            check_form(name, filled, site, client, page, pictures)
    finally:
        client.update_work_pool(POOL, WorkPoolUpdate(is_paused=False))


def check_form(
    name: str, filled: dict[str, Any], site: SiteHere, client: SyncPrefectClient, page: Any, pictures: Path
) -> None:
    """Fill in a form and send it; the test deletes the flow run that it makes."""
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
    kinds = {name: {type(value) for filled in every for value in filled.values()} for name, every in FORMS.items()}
    assert set().union(*(kinds[name] for name in IN_CI)) == set().union(*kinds.values())
