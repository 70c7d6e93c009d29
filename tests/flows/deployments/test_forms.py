"""The forms of all deployments, as a real server has them: each choice of a list is sent, checked and obeyed."""

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.deployments.runs import described
from flows.site.entries import Deployments, read_deployments
from flows.site.registration import register
from tasks.config.code_version import PROJECT_ROOT
from tests.flows.deployments.forms import fields, nested

DEPLOYMENTS: Deployments = read_deployments(PROJECT_ROOT / "infra" / "prefect.yaml")
NEEDED: dict[str, dict[str, Any]] = {
    "new-run": {
        "run": "a", "root": "/data/runs", "iterations": 1, "model.source": "/data/model", "data.train": "/data/a.jsonl",
        "train.max_length": 256, "train.optimizer.learning_rate": 1e-5, "reward.function": "exact_match",
    },
    "rerun-stage": {"run": "a", "root": "/data/runs", "iteration": 1, "stage": "train", "reason": "why"},
    "evaluate": {"run": "a", "root": "/data/runs"},
    "export": {"run": "a", "root": "/data/runs", "to": "/data/out"},
}  # fmt: skip
"""Forms with lists, and the fields that each needs."""
BESIDE: dict[str, dict[str, Any]] = {
    "engine.adapter=live": {"train.lora.rank": 8},
    "train.critic.decay": {"train.critic.learning_rate": 1e-5, "train.policy.advantage.type": "gae"},
    "train.parallel.sequence": {"train.parallel.tensor": 2},
    "train.policy.kl_estimator": {"train.policy.kl_coefficient": 0.1},
    "train.policy.kl_in": {"train.policy.kl_coefficient": 0.1},
    "train.policy.kl_estimator=k1": {"train.policy.kl_in": "reward"},  # in the loss its gradient is 0 on average
    "train.policy.loss_aggregation=constant": {"train.policy.loss_length": 64},
}
"""Settings that a choice needs."""


@pytest.fixture(scope="module")
def registered(prefect_server) -> Iterator[tuple[SyncPrefectClient, dict[str, DeploymentResponse]]]:
    with temporary_settings({PREFECT_API_URL: prefect_server.url}), get_client(sync_client=True) as client:
        register(DEPLOYMENTS, None)
        found = {flow.name: client.read_deployment_by_name(f"{flow.name}/{entry.name}") for entry, flow in DEPLOYMENTS}
        yield client, found
        for one in found.values():
            client.delete_deployment(one.id)


def lists(deployment: DeploymentResponse) -> dict[str, list[Any]]:
    """The fields of a form that are lists of choices."""
    schema = deployment.parameter_openapi_schema
    assert schema is not None
    return {name: field["enum"] for name, field in fields(schema).items() if "enum" in field}


def sent(client: SyncPrefectClient, deployment: DeploymentResponse, filled: dict[str, Any]) -> dict[str, Any]:
    """The parameters of the flow run that a form makes; the flow run is deleted again."""
    made = client.create_flow_run_from_deployment(deployment.id, parameters=nested(filled))
    client.delete_flow_run(made.id)
    return made.parameters


def test_every_form_with_a_list_is_tried(registered):
    _, found = registered
    assert {name for name, one in found.items() if lists(one)} == set(NEEDED)


@pytest.mark.parametrize("name", NEEDED)
def test_each_choice_of_a_form_arrives_and_no_other_does(name: str, registered):
    client, found = registered
    choices = lists(found[name])
    flow = next(flow for _, flow in DEPLOYMENTS if flow.name == name)
    for number in range(max(map(len, choices.values()))):
        filled = {**NEEDED[name], **{field: every[number % len(every)] for field, every in choices.items()}}
        parameters = sent(client, found[name], filled)
        assert nested(filled).items() <= parameters.items()
        flow.validate_parameters(parameters)
    field = next(iter(choices))
    with pytest.raises(PrefectHTTPStatusError, match=r"409|422"):
        sent(client, found[name], {**NEEDED[name], field: "none of these"})


def test_each_choice_for_a_new_run_becomes_the_setting(registered):
    _, found = registered
    for field, every in lists(found["new-run"]).items():
        for choice in every:
            beside = {**BESIDE.get(field, {}), **BESIDE.get(f"{field}={choice}", {})}
            tables = nested({**NEEDED["new-run"], **beside, field: choice})
            sections = {name: table for name, table in tables.items() if isinstance(table, dict)}
            found_setting = attrgetter(field)(described("a", 1, [], sections))
            assert f"{found_setting}".lower() == f"{choice}", field
