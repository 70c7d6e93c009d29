"""The form of a new run, and the owner of each name."""

import json
import re

import pytest
from prefect.utilities.callables import parameter_schema

from flows.deployments.runs import Tables, check_new, described, new_run
from storage.errors import InputError
from tasks.config.stored import record_config


def schema() -> dict:
    return parameter_schema(new_run).model_dump_for_openapi()


def test_the_form_has_typed_fields_with_limits_and_none_for_a_secret():
    form = schema()["properties"]
    assert set(schema()["required"]) == {"run", "root", "iterations"}
    for name in ("model", "data", "rollout", "reward", "train", "evaluate", "engine", "storage"):
        assert form[name]["title"] == name
        assert form[name]["properties"], name
        assert "required" not in form[name], name
        assert form[name]["default"] == {}  # the page sends the default for each field left empty
    prompts = form["rollout"]["properties"]["prompts"]
    assert (prompts["type"], prompts["minimum"]) == ("integer", 1)
    assert "Default: 32. Fixed once the run has begun." in prompts["description"]
    assert "Fixed" not in form["storage"]["properties"]["keep_newest"]["description"]
    assert not {"token", "generate"} & {*form["model"]["properties"], *form["data"]["properties"]}
    assert form["train"]["properties"]["optimizer"]["properties"]["decay"]["enum"] == ["constant", "linear", "cosine"]


NEW: Tables = {
    "model": {"generate": {"layers": 2}},
    "data": {"generate": {"held_out": 2}},
    "train": {"max_length": 128, "optimizer": {"learning_rate": 1e-3}},
}


def test_a_new_run_can_be_described_by_the_form_alone():
    made = described("new", 3, ["rollout.samples=4"], {**NEW, "rollout": {"samples": 2, "prompts": 6}})
    assert (made.run.iterations, made.rollout.samples, made.rollout.prompts) == (3, 4, 6)
    assert made.model.generate is not None
    assert made.train.optimizer.learning_rate == 1e-3


def test_what_a_page_sends_for_a_field_that_nobody_touched_is_left_alone():
    untouched = {"engine": {}, "rollout": {"prompts": None}, "storage": {"keep_every": None}}
    given = {**NEW, "train": {**NEW["train"], "policy": {}}, **untouched}
    assert described("new", 3, [], given) == described("new", 3, [], NEW)


@pytest.mark.parametrize(
    ("given", "fact"),
    [
        ({"rollout": {"prompts": 0}}, "rollout.prompts"),
        ({"rollout": {"promts": 3}}, "promts"),
        ({"model": {"generate": {"layers": 2}}}, "data"),
    ],
)
def test_a_form_that_cannot_work_names_the_field(given, fact):
    with pytest.raises(InputError, match=fact):
        described("new", 1, [], {**NEW, **given} if "rollout" in given else given)


def test_a_switch_that_nobody_touches_sends_nothing():
    # the page sends false for each boolean of a form, touched or not
    assert not re.findall('"type": "boolean"', json.dumps(schema()))
    assert schema()["properties"]["data"]["properties"]["shuffle"]["enum"] == ["true", "false"]
    assert described("new", 1, [], {**NEW, "engine": {"cuda_graphs": "true"}}).engine.cuda_graphs is True


def test_the_name_of_a_run_that_something_else_has_begun_is_refused(make_run, root, config):
    check_new(root, "a", "mine")
    record_config(root, "a", config, None, "mine")
    check_new(root, "a", "another")  # nothing was made: the start failed
    make_run("a", 1)
    check_new(root, "a", "mine")
    for identity in ("another", None):
        with pytest.raises(InputError, match="run 'a' exists"):
            check_new(root, "a", identity)
