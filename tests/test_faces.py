"""The faces of one function have the same options: the command line, the Python module and the forms of deployments."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import ratchet
from flows.cli.app import app
from flows.site.entries import read_deployments
from storage.errors import InputError
from tasks.config.code_version import PROJECT_ROOT
from tasks.config.retrain import RetrainSection

FLOWS = {flow.name: flow for _, flow in read_deployments(PROJECT_ROOT / "infra" / "prefect.yaml")}
COMMANDS = {"train": "run", "new-run": "run", "rerun-stage": "rerun"}  # of flows that are not called like theirs
PLACES = {"run", "root", "json", "which", "at", "iteration", "stage", "new", "self", "patience_minutes"}
"""Options that say which run, where it is, or how a result is shown: each face has its own."""
RENAMED = {"set": "settings", "from": "start", "pass": "passing", "map": "columns"}
APART: dict[str, tuple[set[str], set[str]]] = {
    "train": (set(), {"more", "config"}),  # the command has the file in place of the run; a schedule wants some more
    "new-run": (set(), {"model", "data", "train", "reward", "rollout", "evaluate", "engine", "storage"}),  # the file
    "rerun-stage": ({"revision"}, set()),  # Retry goes on with a rerun
    "retrain": (set(), {"since"}),  # what `newer_than` becomes, so that a Retry selects the same
    "evaluate": ({"prompts_per_part"}, set()),
    "verify": ({"all"}, set()),  # the form takes all runs if none is named
    "maintain": ({"folder"}, set()),  # of the site, which the flow is in
}
"""Options of the command alone, and of the form alone."""


def of_command(name: str) -> set[str]:
    """The options of a command, by the names that they have in Python."""
    names = {
        one.name.lstrip("-").replace("-", "_").lower() for one in app[name].assemble_argument_collection() if one.show
    }
    return {RENAMED.get(name, name) for name in names} - PLACES


def of_function(function: Callable[..., Any]) -> set[str]:
    return {*inspect.signature(function).parameters} - PLACES


@pytest.mark.parametrize("name", FLOWS)
def test_a_form_has_the_options_of_the_command(name: str):
    command, form = of_command(COMMANDS.get(name, name)), of_function(FLOWS[name].fn)
    assert (command - form, form - command) == APART.get(name, (set(), set()))


def taken(call: Callable[..., object], *given: str) -> set[str]:
    """The settings that a call takes, as its refusal of another lists them."""
    with pytest.raises(InputError) as refused:
        call(*given, no_such_setting=1)
    found = re.search("has the settings (.*); wrong are", str(refused.value))
    assert found is not None
    return set(found[1].split(", "))


def test_a_python_call_has_the_options_of_the_command():
    run = ratchet.Run("a")
    for call in (ratchet.export, run.export):
        assert taken(call, "a", "b") | (of_function(call) - {"settings"}) == of_command("export")
    for call in (ratchet.evaluate, run.evaluate):
        assert taken(call, "a") | (of_function(call) - {"settings"}) == of_command("evaluate")
    assert of_function(run.train) == of_command("run") | {"config"}
    table = of_command("retrain") - of_function(ratchet.retrain)
    assert table - {*RetrainSection.model_fields} == {"newer_than"}  # `since`, which does not depend on the moment
