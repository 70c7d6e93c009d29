"""The commands about reruns of stages: their refusals, records and output."""

import json
import re
from pathlib import Path

import pytest

from flows.cli.app import app
from storage.backends.root import Root, open_root
from storage.errors import InputError, LeaseHeld
from storage.manifest import commit, need
from storage.ownership.lease import hold
from storage.revisions import read_revisions, record_rerun
from tasks.config.run import RunConfig
from tasks.config.stored import read_config, record_config
from tasks.stages.names import Stage
from tests.storage.revised import rerun
from tests.storage.runs import make_run


@pytest.fixture
def root(tmp_path: Path, config: RunConfig) -> Root:
    """A run of three iterations with a revision 1, in which train@2 has another learning rate."""
    found = open_root(str(tmp_path / "runs"))
    record_config(found, "run", config)
    first = make_run(found)[2, Stage.TRAIN]
    record_rerun(found, "run", rerun(2, Stage.TRAIN, 1, settings={"train.optimizer.learning_rate": 0.5}, cascade=False))
    commit(found, first.model_copy(update={"revision": 1, "facts": {**first.facts, "again": 1}}))
    return found


@pytest.fixture
def call(root: Root, capfd: pytest.CaptureFixture[str]):
    def carry_out(*words: str) -> str:
        assert app([*words, "--root", root.url]) == 0
        return capfd.readouterr().out

    return carry_out


def test_revisions_are_listed_and_shown(call):
    said = call("show", "run")
    assert re.search(r"^1 +0 +train of iteration 2 +tests", said, re.MULTILINE)
    assert "train.optimizer.learning_rate=0.5" in said
    assert said.endswith("revision 0 is the head\n")
    assert ", revision 1\n" in call("show", "run@2:train", "--revision", "1")
    document = json.loads(call("show", "run@2:train", "--json"))
    assert (document["head"], document["reruns"][0]["reason"]) == (0, "a test")
    assert document["stages"][0]["manifest"]["revision"] == 0


def test_a_revision_is_chosen_and_is_the_head_of_every_command(call, root: Root):
    assert call("choose", "run", "1", "--reason", "better") == "run run: revision 1 is the head, before it was 0\n"
    assert need(root, "run", 2, Stage.TRAIN).revision == 1
    assert read_config(root, "run").config.train.optimizer.learning_rate == 0.5
    chosen = read_revisions(root, "run").choices[0]
    assert chosen.reason == "better"
    assert "@" in chosen.asked_by
    assert "weight-sync" not in call("show", "run@2")
    assert "weight-sync" in call("show", "run@2", "--revision", "0")
    assert json.loads(call("lineage", "run@2", "--json"))["steps"][-1]["digest"] == (
        need(root, "run", 2, Stage.TRAIN).digest
    )


def test_a_fork_of_a_revision_has_its_settings(call, root: Root):
    call("choose", "run", "1", "--reason", "better")
    call("fork", "run@1", "--run", "second")
    call("fork", "run@3", "--run", "first", "--revision", "0")
    rates = [read_config(root, run).config.train.optimizer.learning_rate for run in ("second", "first")]
    assert rates == [0.5, 1e-3]


def test_nothing_is_chosen_while_the_run_is_driven(call, root: Root):
    with hold(root, "run", "a person's command"), pytest.raises(LeaseHeld, match="a person's command"):
        call("choose", "run", "1", "--reason", "better")


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (["run"], "write it as RUN@ITERATION:STAGE, as in my-run@6:reward"),
        (["run@3"], "lacks :STAGE"),
        (["run:train"], "lacks @ITERATION"),
        (["run@3:walk"], "'walk' is not a stage"),
        (["run@3:trian"], "did you mean 'train'"),
        (["run@3:train"], "give --reason"),
        (["run@3:train", "--reason", " "], "a reason is missing"),
        (["run@3:select", "--reason", "x"], "select is never done again, only prepare, rollout, "),
        (["run@3:train", "--reason", "x", "--set", "rollout.temperature=2"], "rollout.temperature cannot change"),
        (["run@3:train", "--reason", "x", "--set", "engine.precision=bf16"], "engine.precision cannot change"),
        (["run@3:evaluate", "--reason", "x", "--set", "reward.function=words"], "nothing is made from evaluate"),
        (["run@3:reward", "--revision", "1"], "revision 1 is train of iteration 2, not reward of iteration 3"),
        (["run@3:reward", "--revision", "4"], "there is no revision 4"),
    ],
)
def test_what_cannot_be_done_again_is_refused_before_anything_starts(call, root: Root, words, fact):
    before = read_revisions(root, "run")
    with pytest.raises(InputError, match=fact):
        call("rerun", *words)
    assert read_revisions(root, "run") == before
