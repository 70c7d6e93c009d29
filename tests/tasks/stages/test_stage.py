"""The one rule of every stage."""

import pytest

from storage.backends.root import open_root
from storage.errors import CommitConflict
from tasks.config.stored import ConfigRecord
from tasks.stages.context import RunContext
from tasks.stages.names import Stage
from tasks.stages.stage import StageOutput, Work, stage
from tasks.stages.views import Prepared, Rewards, Rollouts
from tasks.workers.stalls import current_stage
from tests.small.config import small_config
from tests.small.here import WorkersHere

FACTS = {"weight_version": 1, "cursor": 7}


@pytest.fixture
def context(tmp_path):
    config = small_config()
    return RunContext(
        "run", open_root(str(tmp_path)), config, ConfigRecord.of(config).digest, WorkersHere(config), tmp_path
    )


def rolling(text=b"result", calls=None, name=Stage.ROLLOUT):
    """A stage without inputs that stores `text`."""

    @stage(name, (), Rollouts)
    def body(work: Work) -> StageOutput:
        if calls is not None:
            calls.append(text)
        return StageOutput(parts=(work.writer.write_bytes("part.bin", text),), facts=FACTS)

    return body


@stage(Stage.REWARD, ("rollout",), Rewards)
def scoring(work: Work, rollouts: Rollouts) -> StageOutput:
    return StageOutput(parts=(work.writer.write_bytes("part.bin", rollouts.digest.encode()),))


def test_a_committed_stage_is_not_done_again(context):
    calls = []
    first = rolling(calls=calls).perform(context, 1, ())
    second = rolling(calls=calls).perform(context, 1, ())
    assert (first.reused, second.reused) == (False, True)
    assert second.view == first.view
    assert len(calls) == 1


def test_what_works_for_a_stage_knows_its_name(context):
    @stage(Stage.ROLLOUT, (), Rollouts)
    def body(work: Work) -> StageOutput:
        return StageOutput(facts={**FACTS, "stage": current_stage()})

    assert body.perform(context, 3, ()).view.manifest.facts["stage"] == "rollout of iteration 3"
    assert current_stage() == ""


def test_facts_have_types(context):
    view = rolling()(context, 1)
    assert (view.cursor, view.weight_version) == (7, 1)
    broken = Rollouts(view.manifest.model_copy(update={"facts": {"cursor": "seven"}}))
    with pytest.raises(Exception, match="records 'seven' as cursor, but a whole number is expected"):
        _ = broken.cursor


def test_a_body_that_fails_commits_nothing(context):
    @stage(Stage.ROLLOUT, (), Rollouts)
    def broken(work: Work) -> StageOutput:
        work.writer.write_bytes("part.bin", b"half")
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        broken(context, 1)
    assert not rolling().perform(context, 1, ()).reused


def test_other_inputs_are_a_conflict(context):
    one, two = rolling(b"1")(context, 1), rolling(b"2")(context, 2)
    scoring(context, 1, one)
    with pytest.raises(CommitConflict, match="from another rollout"):
        scoring(context, 1, two)


def test_another_configuration_is_a_conflict(context):
    rollouts = rolling()(context, 1)
    scoring(context, 1, rollouts)
    other = RunContext("run", context.root, context.config, "another", context.workers, context.scratch)
    with pytest.raises(CommitConflict, match="from another configuration"):
        scoring(other, 1, rollouts)


def test_a_lost_race_is_adopted_if_equal_and_a_conflict_if_not(context):
    def overtaken(theirs, mine):
        @stage(Stage.ROLLOUT, (), Rollouts)
        def body(work: Work) -> StageOutput:
            # another process commits the same stage while this one is still working
            rolling(theirs)(context, work.iteration)
            return StageOutput(parts=(work.writer.write_bytes("part.bin", mine),), facts=FACTS)

        return body

    assert overtaken(b"same", b"same")(context, 1).manifest.writer
    with pytest.raises(CommitConflict, match="other content"):
        overtaken(b"theirs", b"mine")(context, 2)


def test_whoever_asks_for_the_identity_is_told_it_and_a_reused_stage_tells_nobody(context):
    told = []

    @stage(Stage.PREPARE, (), Prepared)
    def body(work: Work) -> StageOutput:
        return StageOutput(identified=told.append)

    view = body(context, 0)
    assert told == [view.digest]
    body(context, 0)
    assert told == [view.digest]


def test_time_that_a_start_takes_is_not_that_of_the_stage(context):
    @stage(Stage.ROLLOUT, (), Rollouts)
    def body(work: Work) -> StageOutput:
        work.context.starts.seconds += 1000.0  # `await_start` does this
        return StageOutput(facts=FACTS)

    metrics = body(context, 1).manifest.metrics
    assert metrics["start_seconds"] == 1000.0
    assert metrics["seconds"] is not None
    assert metrics["seconds"] < 0  # the time of the body was not 1,000 s
    assert "start_seconds" not in rolling()(context, 2).manifest.metrics
