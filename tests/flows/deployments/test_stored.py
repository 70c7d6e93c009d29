"""Deployments for stored runs, over small workers; without a server, as an unknown flow run."""

from pathlib import Path

import pytest
from prefect import Flow
from prefect.utilities.callables import parameter_schema

from flows.deployments.runs import rerun_stage
from flows.deployments.stored import LAST, begin_choice, begin_export, begin_fork
from flows.driving import is_redoing, rerun
from flows.site.entries import read_deployments
from storage.backends.root import Root
from storage.errors import InputError
from storage.revisions import read_revisions
from storage.upkeep.redoing import Wanted
from tasks.config.code_version import PROJECT_ROOT
from tasks.config.stored import begun_by
from tasks.stages.names import WORKFLOW, Stage
from tests.flows.deployments.forms import fields
from tests.small.config import small_config
from tests.small.driving import RUN, driver

FLOWS = {flow.name: flow for _, flow in read_deployments(PROJECT_ROOT / "infra" / "prefect.yaml")}


@pytest.fixture
def trained(root: Root, tmp_path: Path) -> Root:
    driver(root, small_config(["run.iterations=1"]), tmp_path / "scratch").drive()
    return root


def test_a_fork_has_the_settings_that_were_given(trained: Root):
    state = begin_fork(RUN, str(trained.folder), 1, "new", ["train.optimizer.learning_rate=1e-4"])
    assert state.message == f"run new has iterations 0 to 1 of run {RUN}"
    assert begun_by(trained, "new") is None
    with pytest.raises(InputError, match="already exists"):
        begin_fork(RUN, str(trained.folder), 1, "new", [])


def test_a_fork_is_of_the_revision_that_was_given(trained: Root):
    with pytest.raises(InputError, match="revision 7"):
        begin_fork(RUN, str(trained.folder), 1, "new", [], revision=7)


@pytest.mark.parametrize(
    ("precision", "adapter", "critic", "fact"),
    [
        ("fp16", False, False, "an export has the settings precision, adapter, critic; wrong are\nprecision: "),
        ("as trained", True, True, "adapter and critic name two models"),
        ("bf16", True, False, "leave precision out"),
        ("as trained", False, True, "has no critic .*: leave --critic out"),
    ],
)
def test_an_export_has_the_settings_that_were_given(trained: Root, tmp_path, precision, adapter, critic, fact):
    with pytest.raises(InputError, match=fact):
        begin_export(RUN, str(trained.folder), str(tmp_path / "out"), LAST, precision, adapter, critic)
    assert not (tmp_path / "out").exists()


def test_a_revision_beside_the_head_is_chosen_once(trained: Root, tmp_path: Path):
    rerun(trained, RUN, Wanted(1, Stage.REWARD, "odd", "a person", cascade=False))
    driver(trained, small_config(["run.iterations=1"]), tmp_path / "scratch").redo()
    assert (
        begin_choice(RUN, str(trained.folder), 1, "better").message
        == f"run {RUN}: revision 1 is the head, before it was 0"
    )
    assert begin_choice(RUN, str(trained.folder), 1, "better").message == f"run {RUN}: revision 1 is the head already"
    assert [one.revision for one in read_revisions(trained, RUN).choices] == [1]


def test_the_choice_of_the_head_withdraws_a_rerun_that_is_not_finished(trained: Root):
    rerun(trained, RUN, Wanted(1, Stage.REWARD, "odd", "a person", cascade=False))
    for words in ("stays the head: revision 1, which was not finished, is withdrawn", "is the head already"):
        assert begin_choice(RUN, str(trained.folder), 0, "no").message == f"run {RUN}: revision 0 {words}"
    assert not is_redoing(trained, RUN)
    assert [one.revision for one in read_revisions(trained, RUN).choices] == [0]


@pytest.mark.parametrize(
    ("run", "revision", "reason", "fact"),
    [("no", 1, "x", "no run 'no'"), (RUN, 1, " ", "a reason is missing"), (RUN, 7, "x", "revision 7")],
)
def test_a_choice_that_cannot_be_is_refused(trained: Root, run, revision, reason, fact):
    with pytest.raises(InputError, match=fact):
        begin_choice(run, str(trained.folder), revision, reason)


@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS.keys())
def test_no_field_of_a_form_is_a_choice_of_types_of_which_a_page_sends_one(flow: Flow):
    schema = parameter_schema(flow).model_dump_for_openapi()
    for name, field in fields(schema).items():
        kinds = [one for one in field.get("anyOf", field.get("oneOf", ())) if one.get("type") != "null"]
        assert len(kinds) <= 1, name
        assert field.get("title"), name
        assert field.get("description"), name
    first = next(iter(schema["properties"]))
    assert first in ("run", "root")


def test_only_stages_that_can_be_done_again_are_offered():
    offered = parameter_schema(rerun_stage).model_dump_for_openapi()["properties"]["stage"]["enum"]
    assert set(offered) == set(WORKFLOW.behind) - {WORKFLOW.prepares}


def test_what_a_person_fills_in_to_continue_a_run_stands_first_and_is_all():
    form = parameter_schema(FLOWS["train"]).model_dump_for_openapi()["properties"]
    assert sorted(form, key=lambda name: form[name]["position"])[:5] == ["run", "root", "more", "iterations", "config"]
    assert len(fields({"properties": form})) < 10
