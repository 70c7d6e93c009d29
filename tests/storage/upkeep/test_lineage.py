"""Origins and uses, followed by digests."""

import pytest

from storage import layout
from storage.errors import InputError
from storage.ownership.lease import acquire
from storage.ownership.process import this_process
from storage.upkeep.catalog import summaries
from storage.upkeep.fork import fork
from storage.upkeep.lineage import of_sample, of_weights, parse_sample
from tasks.stages.names import WORKFLOW, Stage
from tests.storage.runs import DOCUMENT, make_iteration, make_run


def test_weights_come_from_all_that_was_learned(any_root):
    manifests = make_run(any_root)
    lineage = of_weights(any_root, WORKFLOW, "run", 2)
    assert lineage.steps[-1].digest == manifests[2, Stage.TRAIN].digest
    places = [(step.iteration, step.stage) for step in lineage.steps]
    stages = (Stage.ROLLOUT, Stage.REWARD, Stage.TRAIN)
    assert places == [
        (0, Stage.PREPARE),
        (0, Stage.TRAIN),
        (0, Stage.WEIGHT_SYNC),
        *((1, stage) for stage in (*stages, Stage.WEIGHT_SYNC)),
        *((2, stage) for stage in stages),
    ]
    assert (lineage.sampled_by, lineage.weights_digest, lineage.reward_mean) == (1, "w2", 0.25)
    assert lineage.prompts == ("p0", "p1", "p2", "p3")
    assert all(step.code_version == "1" and step.config_digest == "c0" for step in lineage.steps)


@pytest.mark.slow
def test_the_first_weights_learned_from_no_sample(root):
    make_run(root)
    lineage = of_weights(root, WORKFLOW, "run", 0)
    assert [step.stage for step in lineage.steps] == [Stage.PREPARE, Stage.TRAIN]
    assert (lineage.sampled_by, lineage.prompts, lineage.reward_mean) == (None, (), None)


@pytest.mark.slow
def test_a_sample_knows_what_made_it_and_what_learned_from_it(any_root):
    manifests = make_run(any_root)
    lineage = of_sample(any_root, WORKFLOW, "run", 2, "p1", 2)
    assert (lineage.weight_versions, lineage.weights) == ((1,), manifests[1, Stage.WEIGHT_SYNC].digest)
    assert (lineage.prompt, lineage.reward, lineage.reward_status) == ("text of p1", 0.5, "ok")
    assert [step.digest for step in lineage.used_by] == [manifests[2, Stage.TRAIN].digest]
    assert lineage.rollout == manifests[2, Stage.ROLLOUT].digest
    assert of_sample(any_root, WORKFLOW, "run", 2, "p1", 1).reward is None
    assert of_sample(any_root, WORKFLOW, "run", 2, "p1", 1).reward_status == "timeout"


def test_forks_that_learned_from_a_sample_count(root):
    make_run(root)
    fork(root, WORKFLOW, "run", 2, "fork", "c1", DOCUMENT)
    make_iteration(root, "fork", 3)
    assert [(step.run, step.iteration) for step in of_sample(root, WORKFLOW, "run", 1, "p0", 0).used_by] == [
        ("fork", 1),
        ("run", 1),
    ]
    assert [step.run for step in of_sample(root, WORKFLOW, "run", 3, "p0", 0).used_by] == ["run"]
    steps = of_weights(root, WORKFLOW, "fork", 2).steps
    assert {step.config_digest for step in steps} == {"c0"}
    assert {step.origin.run for step in steps} == {"run"}


def test_what_another_run_has_damaged_hides_no_use(root):
    make_run(root)
    make_run(root, "other", 1)
    root.replace(layout.manifest_key("other", 1, Stage.TRAIN, 0), b"{}")
    assert [(step.run, step.iteration) for step in of_sample(root, WORKFLOW, "run", 1, "p0", 0).used_by] == [("run", 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda root: of_weights(root, WORKFLOW, "run", 9), r"no weights of version 9, only \[0, 1\]"),
        (lambda root: of_weights(root, WORKFLOW, "nobody", 0), "no run 'nobody'"),
        (lambda root: of_sample(root, WORKFLOW, "run", 1, "p9", 0), "no sample 0 of prompt 'p9'"),
        (lambda root: of_sample(root, WORKFLOW, "run", 0, "p0", 0), "no rollout of iteration 0"),
        (lambda root: of_sample(root, WORKFLOW, "nobody", 0, "p0", 0), "no run 'nobody'"),
    ],
)
def test_what_is_not_there_is_said(root, call, reason):
    make_run(root, iterations=1)
    with pytest.raises(InputError, match=reason):
        call(root)


def test_a_sample_is_named_in_one_word():
    assert parse_sample("math/17@2024/3") == ("math/17@2024", 3)
    for wrong in ("p0", "p0/x", "/1", "p0/", "p0/1@1", "p0/²"):
        with pytest.raises(InputError, match="PROMPT_ID/SAMPLE_ID; its iteration is named with the run"):
            parse_sample(wrong)


def test_runs_in_one_line_each(root):
    make_run(root, "one", 2)
    fork(root, WORKFLOW, "one", 1, "two", "c1", DOCUMENT)
    acquire(root, "two", this_process("me"))
    one, two = summaries(root)
    assert (one.run, one.iteration, one.stage, one.driven_by, one.parent) == ("one", 2, Stage.WEIGHT_SYNC, None, None)
    assert (two.run, two.iteration, two.parent) == ("two", 1, "one")
    assert two.driven_by.startswith("me (host ")
