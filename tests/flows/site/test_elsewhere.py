"""Registering with a Prefect server that Ratchet does not run, and the needs of a team's own work pool."""

import json
from pathlib import Path

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.site.registration import POOL, register_elsewhere
from storage.errors import InputError
from tasks.config.code_version import PROJECT_ROOT

TEMPLATE = json.loads((PROJECT_ROOT / "infra" / "site" / "kubernetes.json").read_text())
RUN = {"run": "a", "root": "/data/runs", "more": 1}


def written(folder: Path, *schedules: dict) -> Path:
    entry = {"name": "nightly", "entrypoint": "flows.deployments.runs.train", "schedules": list(schedules)}
    (folder / "prefect.yaml").write_text(yaml.safe_dump({"deployments": [entry]}))
    return folder / "prefect.yaml"


def test_a_server_accepts_the_template_and_its_pool_is_used(prefect_api: str):
    with get_client(sync_client=True) as client:
        if any(pool.name == POOL for pool in client.read_work_pools()):  # of a test before this one
            client.delete_work_pool(POOL)
        client.create_work_pool(WorkPoolCreate(name=POOL, type="kubernetes", base_job_template=TEMPLATE))
        broken = json.loads(json.dumps(TEMPLATE).replace("{{ gpus }}", "{{ cards }}"))
        with pytest.raises(PrefectHTTPStatusError, match="422"):
            client.create_work_pool(WorkPoolCreate(name="broken", type="kubernetes", base_job_template=broken))
        names = register_elsewhere(PROJECT_ROOT / "infra" / "prefect.yaml", None, None)
        assert {"train/train", "maintain/maintain"} <= set(names)
        made = client.read_deployment_by_name("maintain/maintain")
        assert made.work_pool_name == POOL
        assert client.read_work_pool(POOL).type == "kubernetes"
        assert {"ratchet", "maintain"} <= set(made.tags)
        assert set(made.job_variables) <= set(TEMPLATE["variables"]["properties"])
        form = made.parameter_openapi_schema["properties"]
        assert all(field.get("title") and field.get("description") for field in form.values())
        client.delete_work_pool(POOL)


def test_a_schedule_that_changed_in_the_file_changes_and_what_a_person_paused_stays(prefect_api: str, tmp_path: Path):
    nightly = {"slug": "nightly", "cron": "0 2 * * *", "parameters": RUN}
    often = {"slug": "often", "interval": 3600, "parameters": RUN}

    def there(client):
        return {one.slug: one for one in client.read_deployment_by_name("train/nightly").schedules}

    register_elsewhere(written(tmp_path, nightly, often), None, None)
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("train/nightly").id
        before = there(client)
        client.update_deployment_schedule(deployment, before["nightly"].id, active=False)
        later = {**nightly, "cron": "0 3 * * *", "parameters": {**RUN, "more": 5}}
        register_elsewhere(written(tmp_path, later, often), None, None)
        after = there(client)
        assert [one.id for one in after.values()] == [before[slug].id for slug in after]
        assert after["nightly"].schedule.cron == "0 3 * * *"
        assert after["nightly"].parameters["more"] == 5
        assert not after["nightly"].active
        assert after["often"].schedule == before["often"].schedule  # else each registration would begin to count again
        client.delete_deployment(deployment)


@pytest.mark.parametrize(
    ("api", "fact"), [(None, "PREFECT_API_URL is not set"), ("http://127.0.0.1:1/api", "start it")]
)
def test_a_server_that_is_not_there_is_named(api, fact: str):
    with temporary_settings({PREFECT_API_URL: api}), pytest.raises(InputError, match=fact):
        register_elsewhere(PROJECT_ROOT / "infra" / "prefect.yaml", None, None)
